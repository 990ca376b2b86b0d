"""Decode steps of a model on weights in int8, over the shared cache of its own steps."""

from collections.abc import Sequence

from torch import Tensor

from fastgen.models.build.int8_step import int8_step
from fastgen.models.runtime.native_multistep_job import Prepared
from fastgen.ops import native
from fastgen.patches.transformers.cache.shared_cache import SharedCache
from fastgen.patches.transformers.generate.fused_decoder import FusedDecoder


class RoundedStepper:
    """Runs decode steps that are only drafts, with one beam per sentence.

    Args:
        fused: The model's own fused steps, which have passed the equivalence check.
        cache: The shared cache.

    Attributes:
        start: Generated tokens in the cache before the draft.
    """

    eager_selection: str | None = None

    def __init__(self, fused: FusedDecoder, cache: SharedCache) -> None:
        self._fused, self._cache, self._step = fused, cache, int8_step(fused.step)
        self.start = cache.text[0].steps

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
        for layer in self._cache.text:
            layer.rewind(self.start)
