"""Token selection as a CUDA graph, whose results the host reads one step late."""

import functools
from typing import Any

import torch
from torch import Tensor

from fastgen.decoding.search.multinomial import draw
from fastgen.models.cuda_graphs import graph

OTHERS = 8
"""Consecutive steps with a new logits tensor after which decode steps count as not captured.

A capture causes two such steps, and the start of a call four.
"""


def not_captured(reason: str) -> str:
    """Return the message of a plan whose token selection is not captured."""
    return f"choices are not captured as CUDA graphs: {reason}"


class CapturedSelection:
    """Captured function that selects the next tokens, run in every step of a search.

    Args:
        generator: random number generator of the function, or None if it draws nothing.

    Attributes:
        refused: why token selection is not captured, once that is known; otherwise None.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.refused: str | None = None
        self._generator = generator
        self._state: Tensor | None = None  # generator state before the newest run
        self._undrawable: Tensor | None = None
        self._repeated = graph.CapturedFunction()
        self._logits: Tensor | None = None
        self._others = 0  # consecutive steps whose logits tensor was a new one
        self._newest: graph.DelayedRead | None = None  # flags of the previous step
        self._spare: graph.DelayedRead | None = None

    def able(self, logits: Tensor) -> bool:
        """Return whether a step with these logits may run captured. Call it once per step."""
        self._others = 0 if logits is self._logits else self._others + 1
        self._logits = logits
        if self._others > OTHERS:
            self.refuse("decode steps are not")
        return self.refused is None

    def refuse(self, reason: str) -> None:
        """Stop capturing; the first reason is kept."""
        self.refused = self.refused or not_captured(reason)

    def __call__(self, choose: functools.partial[Any], logits: Tensor, *inputs: object) -> Any:
        """Run `choose` through `graph.CapturedFunction` and return its result.

        Args:
            choose: the function.
            logits: an input of `choose`; its device is the one to capture on.
            *inputs: everything else that `choose` depends on.

        Raises:
            NotCaptured: `choose` has not run; `refused` holds the reason.
        """
        if self._generator is not None:
            self._state = self._generator.get_state()
        try:
            return self._repeated(choose, logits.device, logits, *inputs)
        except graph.NotCaptured as reason:
            self.refuse(str(reason))
            raise

    def take_back(self) -> None:
        """Undo the random draws of the newest run, which was one too many."""
        if self._generator is not None and self._state is not None:
            self._generator.set_state(self._state)

    def draw(self, weights: Tensor, count: int) -> Tensor:
        """Sample from probabilities (N, V) as `torch.multinomial` does, inside the function.

        Where `torch.multinomial` would raise, `seen` reports the error.
        """
        self._undrawable = weights[:, 0].isnan()  # an invalid softmax is NaN in the whole row
        return draw(weights, count)

    def seen(self, flags: Tensor) -> Tensor:
        """Return flags (F, N) for `look`, with one row appended for invalid draws if it samples."""
        return flags if self._undrawable is None else torch.cat([flags, self._undrawable[None]])

    def look(self, seen: Tensor) -> Tensor | None:
        """Start to copy the flags of this step to the host and return those of the previous step.

        Args:
            seen: result of `seen` in this step.

        Returns:
            (F, N) on the CPU; None if there is no previous step.

        Raises:
            RuntimeError: `torch.multinomial` would have raised it in the previous step.
        """
        newest = graph.DelayedRead(seen) if self._spare is None else self._spare
        newest.send(seen)
        before, self._newest, self._spare = self._newest, newest, self._newest
        return None if before is None else self._told(before)

    def last(self) -> Tensor | None:
        """Return flags that `look` has not returned yet, or None; raises as `look` does."""
        before = self._newest
        self.forget()
        return None if before is None else self._told(before)

    def forget(self) -> None:
        """Drop pending flags, which no longer match the batch after a compaction."""
        self._newest = self._spare = None

    def _told(self, late: graph.DelayedRead) -> Tensor:
        flags = late.read()
        if self._generator is None:
            return flags
        if flags[-1].any():
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        return flags[:-1]
