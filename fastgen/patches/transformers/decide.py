"""Whether and how a call of transformers' decoding loops is accelerated: one decision, before any effect."""

from typing import Any, Literal

from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from fastgen.decoding.plan import Plan, Unsupported
from fastgen.models.families import family_of
from fastgen.patches import _engine
from fastgen.patches.transformers.edits import known, rowwise

_ATTENTION = ("sdpa", "eager")


def decide(
    model: Any,
    loop: Literal["beam", "sample"],
    input_ids: Tensor,
    processors: Any,
    criteria: Any,
    config: Any,
    kwargs: dict[str, Any],
) -> Plan:
    """Return the plan of a call, from what `generate` hands to its loop.

    Raises:
        Unsupported: with the reason, in the words that `fastgen.status()` shows.
    """
    beams = config.num_beams if loop == "beam" else config.num_return_sequences
    _check_call(config, kwargs)
    check_model(model)
    _check_cache(kwargs["past_key_values"])
    if config.return_dict_in_generate and config.output_attentions:
        _check_attentions(kwargs["past_key_values"], beams)
    if beams > 1:
        _check_shared(model, config, kwargs)
    left_off: list[str] = []
    if (
        reason := _reason_not_to_drop(config, processors, criteria, kwargs, beams if loop == "sample" else 1)
    ) is not None:
        left_off.append(f"finished sentences stay in the batch: {reason}")
    drawn = "sampling" if loop == "sample" else "beam sampling"
    return Plan(
        method=drawn if config.do_sample else {"sample": "greedy search", "beam": "beam search"}[loop],
        sentences=input_ids.shape[0] // beams,
        beams=beams,
        shared=beams > 1,
        drop=not left_off,
        left_off=tuple(left_off),
    )


refused: set[type] = set()
"""Model classes that were found, at a first decode step, not to take their keys from the shared cache."""


def computes_alone(model: Any) -> str:
    """The reason for which a refused model falls back."""
    return f"{type(model).__name__} computes with the cache in a way of its own"


def _check_call(config: Any, kwargs: dict[str, Any]) -> None:
    if kwargs.get("synced_gpus"):
        raise Unsupported("synced_gpus=True")
    if config.use_cache is False:
        raise Unsupported("use_cache=False")
    if config.low_memory:
        raise Unsupported("low_memory=True")
    if config.is_assistant:
        raise Unsupported("the model is the assistant of another")
    if config.cache_implementation not in (None, "dynamic"):
        raise Unsupported(f"cache_implementation={config.cache_implementation!r}")


def check_model(model: Any) -> None:
    """Raise Unsupported where no call of this model is accelerated, whatever its arguments."""
    text = model.config.get_text_config(decoder=True)
    if family_of(model.config.model_type) is None and family_of(text.model_type) is None:
        raise Unsupported(f"model type {model.config.model_type!r} is not proven yet")
    if hasattr(model, "_reorder_cache"):
        raise Unsupported(f"{type(model).__name__} reorders its cache itself")
    if getattr(model, "_compiled_call_impl", None) is not None:
        raise Unsupported("the model is compiled")
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        raise Unsupported("the model lies on several devices")


def _check_cache(cache: Any) -> None:
    if getattr(cache, "_is_user_defined", False):
        raise Unsupported("past_key_values is given")
    parts = (
        [cache.self_attention_cache, cache.cross_attention_cache] if isinstance(cache, EncoderDecoderCache) else [cache]
    )
    for part in parts:
        if type(part) is not DynamicCache or part.offloading:
            raise Unsupported(
                f"the cache is {type(part).__name__}{' with offloading' if getattr(part, 'offloading', False) else ''}"
            )
        layers: list[Any] = part.layers
        for layer in layers:
            if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
                raise Unsupported(f"the cache has a {type(layer).__name__}")
            if layer.get_seq_length() > 0:
                raise Unsupported("past_key_values is given")


def _check_attentions(cache: Any, beams: int) -> None:
    if beams > 1:
        raise Unsupported("output_attentions=True with several rows per sentence")
    own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    if any(own.is_sliding):
        raise Unsupported("output_attentions=True with a sliding window")


def _check_shared(model: Any, config: Any, kwargs: dict[str, Any]) -> None:
    if type(model) in refused:
        raise Unsupported(computes_alone(model))
    if not _engine.is_applied("transformers.attention"):
        raise Unsupported("transformers.attention is not in place")
    for part in (model.config, model.config.get_text_config(decoder=True)):
        if part._attn_implementation not in _ATTENTION:
            raise Unsupported(f"attention implementation {part._attn_implementation!r}")
    if kwargs.get("mm_encoder_outputs"):
        raise Unsupported("images or videos are given")
    position_ids = kwargs.get("position_ids")
    if position_ids is not None and position_ids.dim() > 2:
        raise Unsupported("multimodal position ids")


def _reason_not_to_drop(
    config: Any, processors: Any, criteria: Any, kwargs: dict[str, Any], samples: int
) -> str | None:
    if config.do_sample:
        return "sampling draws for the whole batch"
    if samples > 1:
        return "several sequences per sentence"
    if config.return_dict_in_generate:
        return "return_dict_in_generate=True"
    if kwargs.get("streamer") is not None:
        return "a streamer listens"
    name = rowwise(processors) or known(criteria)
    return None if name is None else f"{name} may look at the whole batch"
