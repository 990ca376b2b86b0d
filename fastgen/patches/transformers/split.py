"""A batch for which there is not enough memory, in halves: one after the other, with the same result."""

import copy
import gc
import warnings
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig

from fastgen.decoding.plan import Unsupported
from fastgen.models import memory
from fastgen.patches import _engine
from fastgen.patches.transformers.decide import decide
from fastgen.patches.transformers.edits import fill_of
from fastgen.patches.transformers.explain import Prepared, prepare, without_wrappers

_Generate = Callable[..., Any]


def generate(original: _Generate, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `generate`; where memory runs out, at whatever stage, run it on halves of the batch if nobody can tell."""
    given = kwargs.get("encoder_outputs")
    untouched = {} if given is None else {"encoder_outputs": copy.copy(given)}  # `generate` repeats its rows in place
    try:
        return original(model, *args, **kwargs)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        kwargs = kwargs | untouched
        if args:
            kwargs = kwargs | dict(zip(("inputs", "generation_config"), args, strict=False))
        prepared = None if len(args) > 2 else _separable(model, kwargs)
        if prepared is None:
            raise
    # Out of the handler, so that nothing holds on to what the call had made.
    sentences = prepared.sentences
    warnings.warn(
        f"there is not enough memory for a batch of {sentences} sentences: they are generated in two parts",
        stacklevel=4,
    )
    _engine.hit("transformers.generate", ["a batch at once: there was not enough memory"])
    fill = fill_of(prepared.loop, prepared.config)
    del prepared
    memory.release()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    half = sentences // 2
    parts = [
        generate(original, model, **{name: _part(name, value, sentences, at) for name, value in kwargs.items()})
        for at in (slice(0, half), slice(half, sentences))
    ]
    return _joined(parts, fill)


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: " in str(error)


def _separable(model: Any, kwargs: dict[str, Any]) -> Prepared | None:
    """The prepared call, if its sentences can be generated apart; None where somebody could tell, or there is one."""
    try:
        bare = without_wrappers(model)
        prepared = prepare(bare, model, dict(kwargs))
        plan = decide(
            bare, prepared.loop, prepared.input_ids, prepared.logits_processor, prepared.stopping_criteria,
            prepared.config, prepared.kwargs,
        )  # fmt: skip
    except Unsupported:
        return None
    alone = plan.drop and prepared.sentences > 1 and prepared.config.max_time is None
    return prepared if alone and kwargs.get("past_key_values") is None else None


_SETTINGS = frozenset(GenerationConfig().to_dict())


def _part(name: str, value: Any, sentences: int, at: slice) -> Any:
    """Some sentences of an argument, if it is one that has an entry for each."""
    if name in _SETTINGS:
        return value
    if isinstance(value, Tensor):
        return value[at] if value.dim() and value.shape[0] == sentences else value
    if isinstance(value, Mapping):
        parts = cast("Mapping[str, Any]", value)
        return cast(Any, type(parts))({key: _part(key, part, sentences, at) for key, part in parts.items()})
    return value


def _joined(parts: list[Tensor], fill: int) -> Tensor:
    """Sequences (N, L) below each other, the shorter ones filled up."""
    longest = max(part.shape[1] for part in parts)
    return torch.cat([torch.nn.functional.pad(part, (0, longest - part.shape[1]), value=fill) for part in parts])
