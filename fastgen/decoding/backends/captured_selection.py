"""The choices of a search as a graph: whether they can be, and what the host knows of them, which is a step old."""

import functools
from typing import Any

import torch
from torch import Tensor

from fastgen.decoding.search.multinomial import draw
from fastgen.models.cuda_graphs import graph

OTHERS = 8
"""Steps in succession whose logits lie elsewhere: nothing replays them. A capture brings two, a call's start four."""


def not_captured(reason: str) -> str:
    """How a plan says that choices are not captured."""
    return f"choices are not captured as CUDA graphs: {reason}"


class CapturedSelection:
    """One function that chooses the next tokens, run at every step of a search.

    Args:
        generator: what it draws random numbers from, if it does.

    Attributes:
        refused: that choices are not captured and why, found when it was tried.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.refused: str | None = None
        self._generator = generator
        self._state: Tensor | None = None  # of the generator, before the newest run
        self._undrawable: Tensor | None = None
        self._repeated = graph.CapturedFunction()
        self._logits: Tensor | None = None
        self._others = 0  # steps in succession whose logits did not lie where they did
        self._newest: graph.DelayedRead | None = None  # what was seen of the step before
        self._spare: graph.DelayedRead | None = None

    def able(self, logits: Tensor) -> bool:
        """Whether the choices of a step with these logits are to be made here."""
        self._others = 0 if logits is self._logits else self._others + 1
        self._logits = logits
        if self._others > OTHERS:
            self.refuse("decode steps are not")
        return self.refused is None

    def refuse(self, reason: str) -> None:
        self.refused = self.refused or not_captured(reason)

    def __call__(self, choose: functools.partial[Any], logits: Tensor, *inputs: object) -> Any:
        """Return what `choose` does, as `graph.CapturedFunction`.

        Raises:
            NotCaptured: it has not run, and `refused` says why.
        """
        if self._generator is not None:
            self._state = self._generator.get_state()
        try:
            return self._repeated(choose, logits.device, logits, *inputs)
        except graph.NotCaptured as reason:
            self.refuse(str(reason))
            raise

    def take_back(self) -> None:
        """The newest run was one too many: what it drew is drawn again by whoever is next."""
        if self._generator is not None and self._state is not None:
            self._generator.set_state(self._state)

    def draw(self, weights: Tensor, count: int) -> Tensor:
        """`torch.multinomial` of softmaxes (N, V), within the function; where it would raise, `seen` says so."""
        self._undrawable = weights[:, 0].isnan()  # as a whole row is then
        return draw(weights, count)

    def seen(self, flags: Tensor) -> Tensor:
        """What the function returns for `look`: flags (F, N), and one more of what has been drawn from."""
        return flags if self._undrawable is None else torch.cat([flags, self._undrawable[None]])

    def look(self, seen: Tensor) -> Tensor | None:
        """Have the device tell `seen` of this step; return what was seen of the one before, if anything.

        Raises:
            RuntimeError: as `torch.multinomial` would have in the step before.
        """
        newest = graph.DelayedRead(seen) if self._spare is None else self._spare
        newest.send(seen)
        before, self._newest, self._spare = self._newest, newest, self._newest
        return None if before is None else self._told(before)

    def last(self) -> Tensor | None:
        """What was seen last, if it has not been returned; raises as `look`."""
        before = self._newest
        self.forget()
        return None if before is None else self._told(before)

    def forget(self) -> None:
        """What was seen is of sentences that have left, too."""
        self._newest = self._spare = None

    def _told(self, late: graph.DelayedRead) -> Tensor:
        flags = late.read()
        if self._generator is None:
            return flags
        if flags[-1].any():
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        return flags[:-1]
