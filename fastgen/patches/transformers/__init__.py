"""Table of the patches of transformers; each record names the function that replaces its target."""

from fastgen.patches.engine.engine import Patch, Toolkit

TOOLKIT = Toolkit(
    name="transformers",
    module="transformers",
    versions=">=5.17",
    tested="5.24.0",
    canary="fastgen.patches.transformers.introspection.canary:parts",
    install_hint='pip install "transformers>=5.17"',
)

DECODER_ONLY, ENCODER_DECODER = "decoder-only models", "encoder-decoder models"
CACHES = "KV caches that callers give or get"


def part_of(method: str, encoder_decoder: bool) -> str:
    """Return the canary part that covers a decoding method of one kind of model."""
    return f"{method} of {ENCODER_DECODER if encoder_decoder else DECODER_ONLY}"


def _of_loops(*methods: str) -> tuple[str, ...]:
    return tuple(
        part_of(method, encoder_decoder) for method in methods for encoder_decoder in (False, True)
    )


# Per family: package of the model code, encoder class, sequence classification class.
_ENCODERS = (
    ("bert", "BertEncoder", "BertForSequenceClassification"),
    ("camembert", "CamembertEncoder", "CamembertForSequenceClassification"),
    ("distilbert", "Transformer", "DistilBertForSequenceClassification"),
    ("electra", "ElectraEncoder", "ElectraForSequenceClassification"),
    ("roberta", "RobertaEncoder", "RobertaForSequenceClassification"),
    ("xlm_roberta", "XLMRobertaEncoder", "XLMRobertaForSequenceClassification"),
)

_OF_ENCODERS = tuple(
    patch
    for family, layers, classifier in _ENCODERS
    for patch in (
        Patch(
            name=f"transformers.encoder.{family}",
            toolkit=TOOLKIT,
            target=f"transformers.models.{family}.modeling_{family}:{layers}.forward",
            replacement="fastgen.patches.transformers.encoders.encoder:encode",
            parameters=("self", "hidden_states", "attention_mask"),
            help="runs encoder layers from their weights on a CPU; skips padding that is not read",
        ),
        Patch(
            name=f"transformers.classifier.{family}",
            toolkit=TOOLKIT,
            target=f"transformers.models.{family}.modeling_{family}:{classifier}.forward",
            replacement="fastgen.patches.transformers.encoders.encoder_consumers:classify",
            parameters=("self", "input_ids", "attention_mask"),
            help="computes only the first position of each sentence in the last layer",
        ),
    )
)

PATCHES = (
    Patch(
        name="transformers.generate",
        toolkit=TOOLKIT,
        target="transformers.generation.utils:GenerationMixin.generate",
        replacement="fastgen.patches.transformers.generate.generate:generate",
        parameters=("self", "inputs", "generation_config", "logits_processor", "stopping_criteria"),
        help="linear layers with packed weights on a CPU, for the whole call; parity mode",
        covers="generate",
    ),
    Patch(
        name="transformers.beam_search",
        toolkit=TOOLKIT,
        target="transformers.generation.utils:GenerationMixin._beam_search",
        replacement="fastgen.patches.transformers.generate.generate:beam_search",
        parameters=(
            "self",
            "input_ids",
            "logits_processor",
            "stopping_criteria",
            "generation_config",
            "synced_gpus",
        ),
        help="beam search and beam sampling over one cache per sentence",
        covers="beam search",
        parts=_of_loops("beam search", "beam sampling"),
    ),
    Patch(
        name="transformers.sample",
        toolkit=TOOLKIT,
        target="transformers.generation.utils:GenerationMixin._sample",
        replacement="fastgen.patches.transformers.generate.generate:sample",
        parameters=(
            "self",
            "input_ids",
            "logits_processor",
            "stopping_criteria",
            "generation_config",
            "synced_gpus",
        ),
        help="greedy search and sampling; several samples share the prompt's cache",
        covers="greedy search and sampling",
        parts=_of_loops("greedy search", "sampling"),
    ),
    Patch(
        name="transformers.generation_mode",
        toolkit=TOOLKIT,
        target="transformers.generation.configuration_utils:GenerationConfig.get_generation_mode",
        replacement="fastgen.patches.transformers.generate.legacy_search:generation_mode",
        parameters=("self", "assistant_model"),
        help="diverse and constrained beam search and contrastive search, "
        "which transformers 5 removed; greedy prompt lookup on a CPU",
        inner=True,
    ),
    Patch(
        name="transformers.compiled_call",
        toolkit=TOOLKIT,
        target="transformers.modeling_utils:PreTrainedModel.get_compiled_call",
        replacement="fastgen.patches.transformers.generate.generate:compiled_call",
        parameters=("self", "compile_config"),
        help="inside generate: a model whose forward transformers compiles "
        "gets its own linear layers and norms back",
        inner=True,
    ),
    Patch(
        name="transformers.attention",
        toolkit=TOOLKIT,
        target="transformers.modeling_utils:AttentionInterface.get_interface",
        replacement="fastgen.patches.transformers.cache.attention:get_interface",
        parameters=("self", "attn_implementation", "default"),
        help="attention of a decode step over the shared cache; everything else passes through",
        inner=True,
    ),
    Patch(
        name="transformers.first_tokens",
        toolkit=TOOLKIT,
        target="transformers.generation.logits_process:ForcedBOSTokenLogitsProcessor.__call__",
        replacement="fastgen.patches.transformers.generate.first_tokens:force",
        parameters=("self", "input_ids", "scores"),
        help="forced_bos_token_id as a list: a token for each sentence",
        is_bugfix=True,
    ),
    Patch(
        name="transformers.source",
        toolkit=TOOLKIT,
        target="transformers.modeling_utils:PreTrainedModel.get_encoder",
        replacement="fastgen.patches.transformers.encoders.unpadded_encoder:get_encoder",
        parameters=("self", "modality"),
        help="inside generate, on a CPU: encoders of encoder-decoder models without padding",
    ),
    Patch(
        name="transformers.tagger",
        toolkit=TOOLKIT,
        target="transformers.pipelines.token_classification:TokenClassificationPipeline._forward",
        replacement="fastgen.patches.transformers.encoders.encoder_consumers:tag",
        parameters=("self", "model_inputs"),
        help="the pipeline of token classification skips padding",
    ),
    Patch(
        name="transformers.beam_streamer",
        toolkit=TOOLKIT,
        target="transformers.generation.utils:GenerationMixin._validate_generation_mode",
        replacement="fastgen.patches.transformers.streaming.beam_streamer:validate",
        parameters=("self", "generation_mode", "generation_config", "generation_mode_kwargs"),
        help="a streamer with several beams, which transformers refuses, receives tokens once they "
        "are final",
    ),
    Patch(
        name="transformers.generate_batch",
        toolkit=TOOLKIT,
        target="transformers.generation.continuous_batching.continuous_api:"
        "ContinuousMixin.generate_batch",
        replacement="fastgen.patches.transformers.streaming.generate_batch:generate_batch",
        parameters=(
            "self",
            "inputs",
            "generation_config",
            "continuous_batching_config",
            "record_timestamps",
            "progress_bar",
            "persistent_manager",
            "warmup",
        ),
        help="continuous batching on a CPU, also with beams and of encoder-decoder models",
        covers="generate_batch",
    ),
    Patch(
        name="transformers.request_manager",
        toolkit=TOOLKIT,
        target="transformers.generation.continuous_batching.continuous_api:"
        "ContinuousMixin.init_continuous_batching",
        replacement="fastgen.patches.transformers.streaming.manager:init_continuous_batching",
        parameters=("self", "generation_config", "continuous_batching_config"),
        help="a ContinuousBatchingManager whose requests run on fastgen's continuous batching",
        covers="ContinuousBatchingManager",
    ),
    Patch(
        name="transformers.server",
        toolkit=TOOLKIT,
        target="transformers.cli.serving.server:build_server",
        replacement="fastgen.patches.transformers.streaming.server:build_server",
        parameters=(
            "model_manager",
            "chat_handler",
            "completion_handler",
            "response_handler",
            "transcription_handler",
        ),
        help="`transformers serve` answers 503 if a queue is full, and stops work for clients "
        "that have left",
    ),
    Patch(
        name="transformers.server_answer",
        toolkit=TOOLKIT,
        target="transformers.cli.serving.utils:CBGenerateManager.generate_non_streaming",
        replacement="fastgen.patches.transformers.streaming.server:generate_non_streaming",
        parameters=("self", "model", "processor", "inputs", "gen_config", "request_id"),
        help="a request whose client has left frees its rows at the next step",
    ),
    Patch(
        name="transformers.evaluation_loop",
        toolkit=TOOLKIT,
        target="transformers.trainer:Trainer.evaluation_loop",
        replacement="fastgen.patches.transformers.loops.loops:evaluation_loop",
        parameters=("self", "dataloader", "description"),
        help="evaluation that generates: texts of several batches, sorted by length, on a CPU",
    ),
    Patch(
        name="transformers.evaluation_loss",
        toolkit=TOOLKIT,
        target="transformers.trainer:Trainer.compute_loss_context_manager",
        replacement="fastgen.patches.transformers.loops.evaluation_loss:"
        "compute_loss_context_manager",
        parameters=("self",),
        help="evaluation that generates: losses with packed weights, without padding, on a CPU",
    ),
    Patch(
        name="transformers.pipeline_batches",
        toolkit=TOOLKIT,
        target="transformers.pipelines.base:Pipeline.get_iterator",
        replacement="fastgen.patches.transformers.loops.loops:get_iterator",
        parameters=("self", "inputs", "num_workers", "batch_size"),
        help="pipelines that generate: texts of several batches, sorted by length, on a CPU",
    ),
    *_OF_ENCODERS,
)
