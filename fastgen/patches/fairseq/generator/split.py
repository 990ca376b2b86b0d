"""A batch for which there is not enough memory, in halves: one after the other, with the same result."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from fairseq.search import BeamSearch
from torch import Tensor

from fastgen.models.memory.scratch import is_out_of_memory
from fastgen.patches.engine import engine
from fastgen.patches.engine.out_of_memory import NO_MEMORY, give_up, make_room

_logger = logging.getLogger("fastgen")

Found = list[list[dict[str, Tensor]]]
"""What `_generate` returns: the hypotheses of each sentence, best first."""


def in_halves(
    call: Callable[[Any, Tensor | None], Found], generator: Any, sample: Any, prefix: Tensor | None
) -> Found:
    """Return what `call` does of a sample and its prefix (B, P); where memory runs out, of one half and the other.

    The halves are padded as the whole is, so that nobody can tell.
    """
    try:
        return call(sample, prefix)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        sentences = sample["net_input"]["src_tokens"].shape[0]
        if not is_out_of_memory(error):
            raise
        if not _separable(generator, sample, sentences):
            give_up(sample["net_input"]["src_tokens"].device)
            raise
    # Out of the handler, so that nothing holds on to what the call had made.
    _logger.warning(
        "not enough memory for a batch of %d sentences: it is generated in halves", sentences
    )
    engine.hit("fairseq.generate", [f"a batch at once: {NO_MEMORY}"])
    make_room()
    found: Found = []
    for at in (slice(0, sentences // 2), slice(sentences // 2, sentences)):
        part = {
            name: value[at] if _by_sentence(value, sentences) else value
            for name, value in sample.items()
        }
        part["net_input"] = {
            name: None if value is None else value[at]
            for name, value in sample["net_input"].items()
        }
        found += in_halves(call, generator, part, None if prefix is None else prefix[at])
    return found


def _separable(generator: Any, sample: Any, sentences: int) -> bool:
    """Whether each sentence is searched by itself, and whose is what can be told."""
    return (
        sentences > 1
        and type(generator.search) is BeamSearch
        and all(
            value is None or _by_sentence(value, sentences)
            for value in sample["net_input"].values()
        )
    )


def _by_sentence(value: Any, sentences: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == sentences
