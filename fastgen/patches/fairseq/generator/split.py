"""Batches that exceed memory, generated in halves: one after the other, with the same result."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from fairseq.search import BeamSearch
from torch import Tensor

from fastgen.models.memory.scratch import is_out_of_memory
from fastgen.patches.engine import engine
from fastgen.patches.engine.out_of_memory import free_unused_memory, stop_packing

_logger = logging.getLogger("fastgen")

Found = list[list[dict[str, Tensor]]]
"""The return value of `_generate`: the hypotheses of each sentence, best first."""


def in_halves(
    call: Callable[[Any, Tensor | None], Found], generator: Any, sample: Any, prefix: Tensor | None
) -> Found:
    """Return the result of `call` for a batch; if memory runs out, split the batch and concatenate.

    The halves keep the padding of the whole batch, so that the split does not change the output.

    Args:
        call: Generates a sample with a prefix (B, P), or None.
        generator: fairseq's generator.
        sample: The batch.
        prefix: (B, P) int64, or None.
    """
    try:
        return call(sample, prefix)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        sentences = sample["net_input"]["src_tokens"].shape[0]
        if not is_out_of_memory(error):
            raise
        if not _separable(generator, sample, sentences):
            stop_packing(sample["net_input"]["src_tokens"].device)
            raise
    # Outside of the handler: there, the traceback would keep the call's tensors alive.
    _logger.warning(
        "not enough memory for a batch of %d sentences: it is generated in halves", sentences
    )
    engine.hit("fairseq.generate", ["batch split: out of memory"])
    free_unused_memory()
    hypotheses: Found = []
    for at in (slice(0, sentences // 2), slice(sentences // 2, sentences)):
        part = {
            name: value[at] if _by_sentence(value, sentences) else value
            for name, value in sample.items()
        }
        part["net_input"] = {
            name: None if value is None else value[at]
            for name, value in sample["net_input"].items()
        }
        hypotheses += in_halves(call, generator, part, None if prefix is None else prefix[at])
    return hypotheses


def _separable(generator: Any, sample: Any, sentences: int) -> bool:
    """Return whether sentences are searched independently and all inputs can be split."""
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
