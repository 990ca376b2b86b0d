"""Splitting of a batch: generate its parts in turn, with the same result.

The parts are halves of a batch that does not fit into memory, or groups of prompts that begin
alike.
"""

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.stopping_criteria import MaxTimeCriteria

from fastgen.decoding.plan import Unsupported
from fastgen.models.memory import scratch
from fastgen.patches.engine import engine
from fastgen.patches.engine.out_of_memory import NO_MEMORY, free_unused_memory, stop_packing
from fastgen.patches.generation_call import in_part
from fastgen.patches.transformers.generate.first_tokens import of_sentences
from fastgen.patches.transformers.generate.legacy_search import method_of
from fastgen.patches.transformers.generate.logits_processors import has_rows
from fastgen.patches.transformers.generate.outputs import Scored
from fastgen.patches.transformers.generate.stopping_criteria import fill_of
from fastgen.patches.transformers.introspection.prepared import (
    Prepared,
    generates_segments,
    prepare,
    without_wrappers,
)
from fastgen.patches.transformers.planning import common_prompt
from fastgen.patches.transformers.planning.decide import decide
from fastgen.patches.transformers.streaming import suspend

_Generate = Callable[..., Any]


def generate(original: _Generate, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `generate`, on parts of the batch if that is faster or saves memory.

    The output is the same. Parts are groups of prompts that begin alike, or halves if memory runs
    out.

    Args:
        original: `generate` without splitting.
        model: The model.
        args: Positional arguments of `generate`.
        kwargs: Keyword arguments of `generate`.

    Raises:
        torch.OutOfMemoryError: The batch cannot be split. An allocation failure on a CPU is a
            RuntimeError.
    """
    named = kwargs | dict(zip(("inputs", "generation_config"), args, strict=False))
    groups = common_prompt.groups_of(model, named) if len(args) <= 2 else []
    if groups and (prepared := _separable(model, named)) is not None:
        engine.hit("transformers.generate", [f"prompts begin alike in {len(groups)} groups"])
        return _in_parts(original, model, named, groups, prepared)
    encoder_outputs = kwargs.get("encoder_outputs")
    # `generate` repeats the rows of encoder_outputs in place.
    untouched = {} if encoder_outputs is None else {"encoder_outputs": copy.copy(encoder_outputs)}
    try:
        return original(model, *args, **kwargs)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not scratch.is_out_of_memory(error):
            raise
        named |= untouched
        prepared = None if len(args) > 2 else _separable(model, named)
        if prepared is None:
            stop_packing(model.device)
            raise
    # Outside the handler, so that the exception keeps no tensors of the call alive.
    sentences = prepared.sentences
    _logger.warning(
        "not enough memory for a batch of %d sentences: it is generated in halves", sentences
    )
    engine.hit("transformers.generate", ["batch split: out of memory"])
    suspend.refuse(model, NO_MEMORY)
    free_unused_memory()
    half = sentences // 2
    halves = [list(range(half)), list(range(half, sentences))]
    return _in_parts(original, model, named, halves, prepared)


def _in_parts(
    original: _Generate,
    model: Any,
    kwargs: dict[str, Any],
    parts: Sequence[Sequence[int]],
    prepared: Prepared,
) -> Any:
    """Run `generate` on parts of a batch and return the output for the whole batch.

    Args:
        original: `generate` without splitting.
        kwargs: All arguments of `generate`.
        parts: The sentences of each part.
        prepared: The prepared call.
    """
    fill = fill_of("sample" if method_of(prepared.config) else prepared.loop, prepared.config)
    found: list[Any] = []
    for rows in parts:
        with in_part(rows):
            own = {name: _part(name, value, rows) for name, value in kwargs.items()}
            found.append(generate(original, model, **own))
    order = sum(map(list, parts), list[int]())
    joined = _joined(found, fill)
    return joined if order == sorted(order) else _ordered(joined, order)


def _ordered(output: Any, order: list[int]) -> Any:
    """Return an output, (B * N, L) or `Scored`, whose sentences are given by number, in order."""
    if isinstance(output, Scored):
        return Scored(_ordered(output.sequences, order), _ordered(output.scores, order))
    places = torch.tensor(order, dtype=torch.int64, device=output.device).argsort()
    return output.unflatten(0, (len(order), -1))[places].flatten(0, 1)


_logger = logging.getLogger("fastgen")


def _separable(model: Any, kwargs: dict[str, Any]) -> Prepared | None:
    """Return the prepared call if splitting its batch does not change the output, else None.

    None also if the batch has one sentence.
    """
    try:
        bare = without_wrappers(model)
        if generates_segments(bare):  # this call is one segment; its outer generate prepared it
            return None
        prepared = prepare(bare, model, dict(kwargs))
        plan, _ = decide(
            bare,
            prepared.loop,
            prepared.input_ids,
            prepared.logits_processor,
            prepared.stopping_criteria,
            prepared.config,
            prepared.kwargs,
        )
    except (Unsupported, torch.OutOfMemoryError):
        return None
    start: Any = prepared.config.decoder_start_token_id
    indivisible = (
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
    return None if indivisible or timed or not divisible else prepared


_SETTINGS = frozenset(GenerationConfig().to_dict()) | {
    "generation_config",
    "logits_processor",
    "stopping_criteria",
}
_FIRST = "forced_bos_token_id"
_BY_SENTENCE = {
    "inputs",
    "input_ids",
    "attention_mask",
    "inputs_embeds",
    "encoder_outputs",
    "decoder_input_ids",
    "decoder_attention_mask",
    "position_ids",
}


def _is_divisible(name: str, value: Any, sentences: int) -> bool:
    """Return whether an argument applies to all sentences or has one row per sentence."""
    if value is None or name in _SETTINGS:
        return True
    parts = (
        list(cast("Mapping[str, Any]", value).values()) if isinstance(value, Mapping) else [value]
    )
    rows = [
        isinstance(part, Tensor) and part.dim() > 0 and part.shape[0] == sentences for part in parts
    ]
    return name in _BY_SENTENCE and all(rows)


def _part(name: str, value: Any, at: Sequence[int]) -> Any:
    """Return an argument for some of the sentences: their rows if it has one per sentence."""
    if value is None or (
        name not in _BY_SENTENCE and (name != _FIRST or of_sentences(value) is None)
    ):
        return value
    if isinstance(value, Mapping):
        parts = cast("Mapping[str, Tensor]", value)
        return cast(Any, type(parts))({key: part[at] for key, part in parts.items()})
    return value[at] if isinstance(value, Tensor) else [value[row] for row in at]


def _joined(parts: list[Any], fill: int) -> Any:
    """Concatenate sequences (N, L) along the batch, padding shorter ones with `fill`.

    If all parts are `Scored`, their scores are concatenated as well.
    """
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
