"""A batch for which there is not enough memory, in halves: one after the other, with the same result."""

import copy
import logging
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.stopping_criteria import MaxTimeCriteria

from fastgen.decoding.plan import Unsupported
from fastgen.models.memory import scratch
from fastgen.patches.engine import engine
from fastgen.patches.engine.out_of_memory import NO_MEMORY, give_up, make_room
from fastgen.patches.transformers.generate.decide import decide
from fastgen.patches.transformers.generate.first_tokens import of_sentences
from fastgen.patches.transformers.generate.generation_call import in_part
from fastgen.patches.transformers.generate.legacy_search import method_of
from fastgen.patches.transformers.generate.logits_processors import fill_of, has_rows
from fastgen.patches.transformers.generate.sequence_scores import Scored
from fastgen.patches.transformers.introspection.prepared import (
    Prepared,
    generates_segments,
    prepare,
    without_wrappers,
)
from fastgen.patches.transformers.streaming import suspend

_Generate = Callable[..., Any]


def generate(original: _Generate, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `generate`; where memory runs out, run it on halves of the batch if nobody can tell."""
    given = kwargs.get("encoder_outputs")
    untouched = (
        {} if given is None else {"encoder_outputs": copy.copy(given)}
    )  # `generate` repeats its rows in place
    try:
        return original(model, *args, **kwargs)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not scratch.is_out_of_memory(error):
            raise
        kwargs = kwargs | untouched
        if args:
            kwargs = kwargs | dict(zip(("inputs", "generation_config"), args, strict=False))
        prepared = None if len(args) > 2 else _separable(model, kwargs)
        if prepared is None:
            give_up(model.device)
            raise
    # Out of the handler, so that nothing holds on to what the call had made.
    sentences = prepared.sentences
    _logger.warning(
        "not enough memory for a batch of %d sentences: it is generated in halves", sentences
    )
    engine.hit("transformers.generate", [f"a batch at once: {NO_MEMORY}"])
    fill = fill_of("sample" if method_of(prepared.config) else prepared.loop, prepared.config)
    del prepared
    suspend.refuse(model, NO_MEMORY)
    make_room()
    half = sentences // 2
    parts: list[Any] = []
    for at in (slice(0, half), slice(half, sentences)):
        with in_part(at.start):
            parts.append(
                generate(
                    original,
                    model,
                    **{name: _part(name, value, at) for name, value in kwargs.items()},
                )
            )
    return _joined(parts, fill)


_logger = logging.getLogger("fastgen")


def _separable(model: Any, kwargs: dict[str, Any]) -> Prepared | None:
    """The prepared call, if its sentences can be generated apart; None where somebody could tell, or there is one."""
    try:
        bare = without_wrappers(model)
        if generates_segments(bare):  # this is one segment, which its own generate has prepared
            return None
        prepared = prepare(bare, model, dict(kwargs))
        plan, _ = decide(
            bare, prepared.loop, prepared.input_ids, prepared.logits_processor, prepared.stopping_criteria,
            prepared.config, prepared.kwargs,
        )  # fmt: skip
    except (Unsupported, torch.OutOfMemoryError):
        return None
    start: Any = prepared.config.decoder_start_token_id
    whole = (
        prepared.sentences == 1
        or any(map(has_rows, kwargs.get("logits_processor") or ()))
        or not plan.drop
        or (isinstance(start, list | tuple | Tensor) and len(cast(Any, start)) > 1)
        or (
            of_sentences(prepared.config.forced_bos_token_id) is not None
            and kwargs.get(_FIRST) is None
        )
    )
    timed = any(isinstance(criterion, MaxTimeCriteria) for criterion in prepared.stopping_criteria)
    divisible = all(
        _is_divisible(name, value, prepared.sentences) for name, value in kwargs.items()
    )
    return None if whole or timed or not divisible else prepared


_SETTINGS = frozenset(GenerationConfig().to_dict()) | {
    "generation_config",
    "logits_processor",
    "stopping_criteria",
}
_FIRST = "forced_bos_token_id"
_BY_SENTENCE = {
    "inputs", "input_ids", "attention_mask", "inputs_embeds", "encoder_outputs", "decoder_input_ids",
    "decoder_attention_mask", "position_ids",
}  # fmt: skip


def _is_divisible(name: str, value: Any, sentences: int) -> bool:
    """Whether an argument is one for all sentences, or has an entry for each."""
    if value is None or name in _SETTINGS:
        return True
    parts = (
        list(cast("Mapping[str, Any]", value).values()) if isinstance(value, Mapping) else [value]
    )
    rows = [
        isinstance(part, Tensor) and part.dim() > 0 and part.shape[0] == sentences for part in parts
    ]
    return name in _BY_SENTENCE and all(rows)


def _part(name: str, value: Any, at: slice) -> Any:
    """Some sentences of an argument, if it is one that has an entry for each."""
    if value is None or (
        name not in _BY_SENTENCE and (name != _FIRST or of_sentences(value) is None)
    ):
        return value
    if isinstance(value, Mapping):
        parts = cast("Mapping[str, Tensor]", value)
        return cast(Any, type(parts))({key: part[at] for key, part in parts.items()})
    return value[at]


def _joined(parts: list[Any], fill: int) -> Any:
    """Sequences (N, L) below each other, the shorter ones filled up; with their scores, where all have them."""
    if all(isinstance(part, Scored) for part in parts):
        return Scored(
            _joined([part.sequences for part in parts], fill),
            torch.cat([part.scores for part in parts]),
        )
    parts = [part.sequences if isinstance(part, Scored) else part for part in parts]
    longest = max(part.shape[1] for part in parts)
    return torch.cat(
        [torch.nn.functional.pad(part, (0, longest - part.shape[1]), value=fill) for part in parts]
    )
