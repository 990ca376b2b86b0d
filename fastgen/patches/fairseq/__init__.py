"""The patches of fairseq, as plain data; the code is in the modules that the records name.

Patches with `mends=True` let fairseq run on current versions: it was last released for Python 3.10
and PyTorch 1.12.
"""

from fastgen.patches.engine.engine import Patch, Toolkit

TOOLKIT = Toolkit(
    name="fairseq",
    module="fairseq",
    versions=">=0.12.2,<0.13",
    tested="0.12.3.1",  # and 0.12.2
    install_hint='pip install bitarray "hydra-core>=1.3.2,<1.4" numpy "omegaconf>=2.3" regex '
    '"sacrebleu>=1.4.12" tqdm '
    "&& pip install --no-deps fairseq==0.12.2",
)

PATCHES = (
    Patch(
        name="fairseq.dataclasses",
        toolkit=TOOLKIT,
        target="dataclasses:_get_field",
        replacement="fastgen.patches.fairseq.mend:get_field",
        parameters=("cls", "a_name", "a_type"),
        help="fairseq imports on Python 3.11 and later: its dataclasses may be defaults of each "
        "other",
        when="fairseq.dataclass.constants",
        is_bugfix=True,
    ),
    Patch(
        name="fairseq.load",
        toolkit=TOOLKIT,
        target="fairseq.checkpoint_utils:load_checkpoint_to_cpu",
        replacement="fastgen.patches.fairseq.mend:load_checkpoint",
        parameters=("path", "arg_overrides"),
        help="checkpoints load on PyTorch 2.6 and later, which is told fairseq's known classes; no "
        "others run",
        is_bugfix=True,
    ),
    Patch(
        name="fairseq.encoder_layer",
        toolkit=TOOLKIT,
        target="fairseq.modules.transformer_layer:TransformerEncoderLayerBase.forward",
        replacement="fastgen.patches.fairseq.mend:encoder_layer",
        parameters=("self", "x", "encoder_padding_mask", "attn_mask"),
        help="padded sources pass PyTorch's fused encoder layer, which now requires the type of "
        "the mask",
        is_bugfix=True,
    ),
    Patch(
        name="fairseq.ngram_block",
        toolkit=TOOLKIT,
        target="fairseq.ngram_repeat_block:NGramRepeatBlock.forward",
        replacement="fastgen.patches.fairseq.mend:ngram_block",
        parameters=("self", "tokens", "lprobs", "bsz", "beam_size", "step"),
        help="--no-repeat-ngram-size works without fairseq's CUDA extension, where it does "
        "nothing; a size of 1 blocks nothing, as in fairseq",
        is_bugfix=True,
    ),
    Patch(
        name="fairseq.beam_size",
        toolkit=TOOLKIT,
        target="fairseq.sequence_generator:EnsembleModel.set_decoder_beam_size",
        replacement="fastgen.patches.fairseq.mend:set_decoder_beam_size",
        parameters=("self", "beam_size"),
        help="BART with one beam after a call with several attends to its own sentence, not to "
        "another",
        is_bugfix=True,
    ),
    Patch(
        name="fairseq.beam_size_again",
        toolkit=TOOLKIT,
        target="fairseq.sequence_generator:EnsembleModel.forward_encoder",
        replacement="fastgen.patches.fairseq.mend:forward_encoder",
        parameters=("self", "net_input"),
        help="the same for a generator that was made before another one of the same models",
        is_bugfix=True,
    ),
    Patch(
        name="fairseq.token_blocks",
        toolkit=TOOLKIT,
        target="fairseq.data.token_block_dataset:TokenBlockDataset._build_slice_indices",
        replacement="fastgen.patches.fairseq.mend:token_blocks",
        parameters=("sizes", "break_mode", "document_sep_len", "block_size"),
        help="language models read texts line by line (also those given to the hub) with a numpy "
        "without `compat`",
        is_bugfix=True,
    ),
    Patch(
        name="fairseq.generate",
        toolkit=TOOLKIT,
        target="fairseq.sequence_generator:SequenceGenerator._generate",
        replacement="fastgen.patches.fairseq.generator.generate:generate",
        parameters=("self", "sample", "prefix_tokens", "constraints", "bos_token"),
        help="SequenceGenerator over one cache per sentence; linear layers with packed weights on "
        "a CPU",
        covers="generation",
    ),
    Patch(
        name="fairseq.score",
        toolkit=TOOLKIT,
        target="fairseq.sequence_scorer:SequenceScorer.generate",
        replacement="fastgen.patches.fairseq.generator.score:score",
        parameters=("self", "models", "sample"),
        help="fairseq-eval-lm and --score-reference: linear layers with packed weights on a CPU",
    ),
    Patch(
        name="fairseq.attention",
        toolkit=TOOLKIT,
        target="fairseq.modules.multihead_attention:MultiheadAttention.forward",
        replacement="fastgen.patches.fairseq.generator.attention:forward",
        parameters=("self", "query", "key", "value"),
        help="attention of a decode step over the shared cache; everything else passes through",
        inner=True,
    ),
    Patch(
        name="fairseq.generate_command",
        toolkit=TOOLKIT,
        target="fairseq_cli.generate:main",
        replacement="fastgen.patches.fairseq.commands.generate_command:generate",
        parameters=("cfg",),
        help="fairseq-generate: one process per thread on a CPU; text is produced and scored in "
        "the background",
    ),
    Patch(
        name="fairseq.interactive_command",
        toolkit=TOOLKIT,
        target="fairseq_cli.interactive:main",
        replacement="fastgen.patches.fairseq.commands.interactive_command:interactive",
        parameters=("cfg",),
        help="fairseq-interactive: one process per thread on a CPU; text is produced and files are "
        "read in the background",
    ),
    Patch(
        name="fairseq.options",
        toolkit=TOOLKIT,
        target="fairseq.options:get_generation_parser",
        replacement="fastgen.patches.fairseq.commands.options:get_generation_parser",
        parameters=("interactive", "default_task"),
        help="--postprocess-workers and --decode-hypothesis, as FastSeq has them; "
        "--generate-workers; --bild-small and its like",
    ),
)
