"""Decode steps of a model on weights in int8, over the shared cache of its own steps."""

from collections.abc import Sequence

from torch import Tensor

from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.models.runtime.native.multistep_job import Prepared
from fastgen.ops import native
from fastgen.patches.transformers.generate.fused_decoder import FusedDecoder


class RoundedStepper:
    """Runs decode steps that are only drafts, with one beam per sentence.

    Args:
        fused: The model's own fused steps, which have passed the equivalence check.
        step: The decode step on rounded weights.
    """

    def __init__(self, fused: FusedDecoder, step: DecoderStep) -> None:
        self._fused, self._step, self._cache = fused, step, fused.cache
        self._start = self._cache.text[0].steps  # generated tokens in the cache before the draft

    @property
    def supports_multistep(self) -> bool:
        return native.library() is not None

    def step(self, ids: Tensor) -> Tensor:
        self._cache.begin_step()
        return self._step(ids[:, -1], self._fused.context()).float()

    def begin_steps(self, most: int) -> Prepared | None:
        return self._fused.prepared(self._cache.begin_steps(most), self._step)

    def end_steps(self, run: int, began: Sequence[float], is_open: bool) -> None:
        self._cache.end_steps(run, is_open)

    def keep(self, sentences: Tensor) -> None:
        raise AssertionError("the texts of a draft stay in the batch")

    def undo(self) -> None:
        """Drop the keys and values of all steps since the start of the draft."""
        self._cache.rewind(self._start)
