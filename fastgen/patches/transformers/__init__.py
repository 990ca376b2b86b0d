"""What fastgen patches in transformers: plain data. The code lies in the modules that the records name."""

from fastgen.patches._engine import Patch, Toolkit

TOOLKIT = Toolkit(
    name="transformers",
    module="transformers",
    versions=">=5.17",
    tested="5.23.0",
    canary="fastgen.patches.transformers.canary:agrees",
    install_hint='pip install "transformers>=5.17"',
)

PATCHES = (
    Patch(
        name="transformers.generate",
        toolkit=TOOLKIT,
        target="transformers.generation.utils:GenerationMixin.generate",
        replacement="fastgen.patches.transformers.generate:generate",
        parameters=("self", "inputs", "generation_config", "logits_processor", "stopping_criteria"),
        help="linear layers through oneDNN on a CPU, for the whole call; parity mode",
    ),
    Patch(
        name="transformers.beam_search",
        toolkit=TOOLKIT,
        target="transformers.generation.utils:GenerationMixin._beam_search",
        replacement="fastgen.patches.transformers.generate:beam_search",
        parameters=("self", "input_ids", "logits_processor", "stopping_criteria", "generation_config", "synced_gpus"),
        help="beam search and beam sampling over one cache per sentence",
    ),
    Patch(
        name="transformers.sample",
        toolkit=TOOLKIT,
        target="transformers.generation.utils:GenerationMixin._sample",
        replacement="fastgen.patches.transformers.generate:sample",
        parameters=("self", "input_ids", "logits_processor", "stopping_criteria", "generation_config", "synced_gpus"),
        help="greedy search and sampling; several samples share the prompt's cache",
    ),
    Patch(
        name="transformers.attention",
        toolkit=TOOLKIT,
        target="transformers.modeling_utils:AttentionInterface.get_interface",
        replacement="fastgen.patches.transformers.attention:get_interface",
        parameters=("self", "attn_implementation", "default"),
        help="attention of a decode step over the shared cache; everything else passes through",
        inner=True,
    ),
    Patch(
        name="transformers.first_tokens",
        toolkit=TOOLKIT,
        target="transformers.generation.logits_process:ForcedBOSTokenLogitsProcessor.__call__",
        replacement="fastgen.patches.transformers.first_tokens:force",
        parameters=("self", "input_ids", "scores"),
        help="forced_bos_token_id as a list: a token for each sentence",
        mends=True,
    ),
    Patch(
        name="transformers.beam_streamer",
        toolkit=TOOLKIT,
        target="transformers.generation.utils:GenerationMixin._validate_generation_mode",
        replacement="fastgen.patches.transformers.beam_streamer:validate",
        parameters=("self", "generation_mode", "generation_config", "generation_mode_kwargs"),
        help="a streamer with several beams hears tokens as soon as they are certain; transformers refuses one",
    ),
)
