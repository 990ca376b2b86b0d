"""Dispatch of fairseq's `SequenceGenerator`: whether and how a call is accelerated.

The decision is made once, before the call has any effect.
"""

from typing import Any

from fairseq.models.transformer.transformer_decoder import TransformerDecoderBase
from fairseq.modules import MultiheadAttention
from fairseq.modules.fairseq_dropout import FairseqDropout
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from fairseq.sequence_generator import EnsembleModel, SequenceGenerator
from torch import Tensor

from fastgen.decoding.plan import Plan, Unsupported
from fastgen.models.build.introspection import reads_rows
from fastgen.models.build.patched_torch import replaced
from fastgen.models.routing.routes import touched_of, why_compiled
from fastgen.patches.engine import engine
from fastgen.patches.fairseq.generator.shared_stepper import attention_of

# Methods that the engine replaces, and which therefore must not be overridden.
_UNCHANGED: tuple[tuple[type, tuple[str, ...]], ...] = (
    (
        SequenceGenerator,
        ("_generate", "_prefix_tokens", "finalize_hypos", "is_finished", "replicate_first_beam"),
    ),
    (
        EnsembleModel,
        ("forward_encoder", "forward_decoder", "reorder_encoder_out", "reorder_incremental_state"),
    ),
    (
        TransformerDecoderBase,
        ("forward", "extract_features", "extract_features_scriptable", "output_layer"),
    ),
    (TransformerDecoderLayerBase, ("forward",)),
)


def decide(generator: Any, sample: Any, constraints: Tensor | None) -> Plan:
    """Return the plan of a call.

    Raises:
        Unsupported: The call cannot be accelerated; with the fallback reason that
            `fastgen.status()` shows.
    """
    if not engine.is_applied("fairseq.attention"):
        raise Unsupported("fairseq.attention is not in place")
    if "src_tokens" not in sample["net_input"]:
        raise Unsupported("the source is not text")
    if constraints is not None and not generator.search.supports_constraints:
        raise Unsupported("the search takes no constraints")
    check(generator, SequenceGenerator)
    check(generator.model, EnsembleModel)
    for model in (*generator.model.models, generator.lm_model):
        if model is not None:
            check_model(model)
    source: Tensor = sample["net_input"]["src_tokens"]
    beams = generator.beam_size
    kind = type(generator.search).__name__
    return Plan(kind, source.shape[0], beams, shared=True, drop=True)


def check(thing: Any, kind: type) -> None:
    """Raise Unsupported if an object has the wrong type, or overrides a replaced method."""
    if not isinstance(thing, kind):
        raise Unsupported(f"{type(thing).__name__} is no {kind.__name__}")
    for owner, names in _UNCHANGED:
        if isinstance(thing, owner) and (
            changed := next((name for name in names if not _is_own(thing, owner, name)), None)
        ):
            raise Unsupported(f"{type(thing).__name__} has its own {changed}")


def _is_own(thing: Any, owner: type, name: str) -> bool:
    return name not in vars(thing) and getattr(type(thing), name) is getattr(owner, name)


def check_model(model: Any) -> None:
    """Raise Unsupported if the engine cannot run the decode steps of a model."""
    if (reason := replaced()) is not None:
        raise Unsupported(reason)
    decoder = getattr(model, "decoder", None)
    if not isinstance(decoder, TransformerDecoderBase):
        name = type(model if decoder is None else decoder).__name__
        raise Unsupported(f"{name} is no transformer decoder of fairseq's")
    check(decoder, TransformerDecoderBase)
    if decoder.cross_self_attention:
        raise Unsupported("cross_self_attention=True")
    if (reason := why_compiled(model)) is not None:
        raise Unsupported(reason)
    for layer in decoder.layers:
        check(layer, TransformerDecoderLayerBase)
    # The decoder's own hooks never run: fairseq calls its `forward`, which `check` has verified.
    observers = {
        module: found for module in touched_of(model) if (found := reads_rows(module)) is not None
    }
    for module in decoder.modules() if observers else ():
        if module is not decoder and module in observers:
            raise Unsupported(f"{observers[module]} may look at rows, or at the cache")
    for module in attention_of(decoder):
        if type(module) is not MultiheadAttention:
            raise Unsupported(f"attention of the kind {type(module).__name__}")
        if (
            module.bias_k is not None
            or module.add_zero_attn
            or getattr(module, "use_xformers", False)
        ):
            raise Unsupported("attention with keys of its own, or of xformers")
    if model.training or any(
        module.apply_during_inference
        for module in model.modules()
        if isinstance(module, FairseqDropout)
    ):
        raise Unsupported("dropout is retained")
