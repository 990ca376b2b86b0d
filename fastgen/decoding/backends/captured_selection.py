"""Token selection as a CUDA graph, whose results the host reads one step late."""

import functools
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from fastgen.decoding.backends.decode_backend import (
    DecodeBackend,
    Search,
    reason_not_to_capture,
)
from fastgen.decoding.search.multinomial import draw
from fastgen.models.cuda_graphs import graph
from fastgen.models.cuda_graphs.kept_graphs import KeptFunction

MAX_UNCAPTURED = 8
"""Consecutive steps with a new logits tensor after which decode steps count as not captured.

A capture causes two such steps, and the start of a call four.
"""

_Search = TypeVar("_Search", bound=Search)


class CapturedSelection(DecodeBackend[_Search]):
    """Base of the backends whose token selection runs as a CUDA graph.

    Everything that depends on the length of the text is read from device memory. The tables have
    room for the longest text from the start, and a counter on the device selects the column to
    write. One capture therefore serves all steps in which the transforms do the same.

    The device knows at once whether the search is over, and freezes what has finished. The host
    reads the result one step late, when one more step is already running. That step has no effect:
    the state of the random number generator from before it is restored.

    Once a capture fails, or decode steps turn out not to be captured, `Search.advance` selects the
    tokens of all further steps.

    Attributes:
        search_type: The kind of search that the backend runs.
    """

    description = "as a CUDA graph"
    search_type: ClassVar[type]

    def __init__(
        self, search: _Search, model: Any, generator: torch.Generator | None = None
    ) -> None:
        """Create the backend.

        Args:
            search: The search.
            model: The stepper of its decode steps.
            generator: Random number generator that the selection draws from; None if it draws
                nothing.
        """
        super().__init__(search, model)
        self._generator = generator
        self._state: Tensor | None = None  # generator state before the newest step
        self._invalid: Tensor | None = None  # rows that cannot be drawn from in this step
        self._function = KeptFunction()
        self._logits: Tensor | None = None
        self._new_logits = 0  # consecutive steps whose logits tensor was a new one
        self._pending: graph.DelayedRead | None = None  # flags of the previous step
        self._spare: graph.DelayedRead | None = None

    @classmethod
    def supports(cls, search: Search, model: Any) -> bool:
        """Return whether decode steps are captured and token selection can be as well."""
        return (
            search.captured
            and isinstance(search, cls.search_type)
            and reason_not_to_capture(search, model) is None
        )

    def can_capture(self, logits: Tensor) -> bool:
        """Return whether selection from these logits may run captured. Call it once per step."""
        self._new_logits = 0 if logits is self._logits else self._new_logits + 1
        self._logits = logits
        if self._new_logits > MAX_UNCAPTURED:
            self._refused = self._refused or "decode steps are not"
        return self._refused is None

    def run(self, select: functools.partial[Any], logits: Tensor, *inputs: object) -> Any:
        """Run a function through `graph.CapturedFunction` and return its result.

        Args:
            select: The function.
            logits: An input of the function; its device is the one to capture on.
            *inputs: Everything else that the function depends on.

        Raises:
            NotCaptured: The function has not run, and no further step will be captured.
        """
        if self._generator is not None:
            self._state = self._generator.get_state()
        try:
            return self._function.run(
                select, logits.device, self.model.kept_graphs(logits), self.reads, logits, *inputs
            )
        except graph.NotCaptured as reason:
            self._refused = self._refused or str(reason)
            raise

    @abstractmethod
    def reads(self) -> Sequence[tuple[Any, Sequence[str]]]:
        """Return what the function reads: objects, each with the names of attributes."""

    def leave(self) -> None:
        """Move the search's tensors out of memory that later calls use. Captures end with this."""
        self._function.leave()

    def undo_draws(self) -> None:
        """Undo the random draws of the newest step, which was one too many."""
        if self._generator is not None and self._state is not None:
            self._generator.set_state(self._state)

    def draw(self, weights: Tensor, count: int) -> Tensor:
        """Sample from probabilities (N, V) as `torch.multinomial` does, inside the function.

        Where `torch.multinomial` would raise, `with_invalid` reports the error.
        """
        self._invalid = weights[:, 0].isnan()  # an invalid softmax is NaN in the whole row
        return draw(weights, count)

    def with_invalid(self, flags: Tensor) -> Tensor:
        """Return flags (F, N), with one row appended for invalid draws if the selection samples."""
        return flags if self._invalid is None else torch.cat([flags, self._invalid[None]])

    def exchange(self, flags: Tensor) -> Tensor | None:
        """Start to copy the flags of this step to the host and return those of the previous step.

        Args:
            flags: Result of `with_invalid` in this step.

        Returns:
            (F, N) on the CPU; None if there is no previous step.

        Raises:
            RuntimeError: `torch.multinomial` would have raised it in the previous step.
        """
        newest = graph.DelayedRead(flags) if self._spare is None else self._spare
        newest.send(flags)
        previous, self._pending, self._spare = self._pending, newest, self._pending
        return None if previous is None else self._read(previous)

    def read_pending(self) -> Tensor | None:
        """Return flags that `exchange` has not returned yet, or None; raises as `exchange` does."""
        pending = self._pending
        self.drop_pending()
        return None if pending is None else self._read(pending)

    def drop_pending(self) -> None:
        """Drop pending flags, which no longer match the batch after a compaction."""
        self._pending = self._spare = None

    def _read(self, pending: graph.DelayedRead) -> Tensor:
        flags = pending.read()
        if self._generator is None:
            return flags
        if flags[-1].any():
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        return flags[:-1]
