"""Whether drafts pay, by the clock: what a token costs with them, and what it costs the large model alone.

For use where drafts change nothing about the output. Both costs depend on how many texts are running, so that they are
kept for each number of them, as a power of two. Now and then the other way is tried, the more seldom the longer drafts
have not paid.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

TRIAL = 3
"""Rounds with drafts before they are judged."""

REST, LONGEST_REST = 16, 512
"""Rounds without drafts when they have not paid once, and at most; each time in succession twice as many."""

STALE = 64
"""Rounds with drafts after which one is made without them, to see what that costs by now."""

_NEWEST = 0.25
"""The weight of the newest round among those before it."""


@dataclass
class _Costs:
    """Seconds per token, and what is to come.

    Attributes:
        tried: rounds with drafts since the last without. rest: rounds without drafts before the next with them.
        next_rest: how many it will be when drafts do not pay the next time.
    """

    alone: float | None = None
    together: float | None = None
    tried: int = 0
    rest: int = 0
    next_rest: int = REST

    def drafts(self) -> bool:
        if self.alone is None or self.tried >= STALE:
            return False
        return self.rest == 0

    def note(self, drafted: bool, cost: float) -> None:
        if not drafted:
            self.alone = _mean(self.alone, cost)
            self.tried, self.rest = 0 if self.tried >= STALE else self.tried, max(0, self.rest - 1)
            return
        together = self.together = _mean(self.together, cost)
        self.tried += 1
        if self.tried < TRIAL or self.alone is None:
            return
        if together <= self.alone:
            self.next_rest = REST
            return
        self.together, self.tried = None, 0
        self.rest, self.next_rest = self.next_rest, min(2 * self.next_rest, LONGEST_REST)


def _mean(before: float | None, newest: float) -> float:
    return newest if before is None else before + _NEWEST * (newest - before)


@dataclass
class Pace:
    """The costs of a pair of models, over all their calls."""

    clock: Callable[[], float] = time.perf_counter
    start: float = 0.0  # seconds of the small model's prompt, for each token of a call
    _costs: dict[int, _Costs] = field(default_factory=dict[int, _Costs])

    def drafts(self, texts: int) -> bool:
        """Whether the next round of so many texts is to be one with drafts."""
        return self._of(texts).drafts()

    def note(self, drafted: bool, texts: int, tokens: int, seconds: float) -> None:
        """Note a round: whether it was one with drafts, the tokens that all its texts gained, and how long it took."""
        self._of(texts).note(drafted, seconds / tokens + (self.start if drafted else 0.0))

    def note_start(self, seconds: float, tokens: int) -> None:
        """Note, when a call is over, what the small model's prompts took, and how many tokens the call gave."""
        self.start = _mean(self.start or None, seconds / max(1, tokens))

    def _of(self, texts: int) -> _Costs:
        return self._costs.setdefault(texts.bit_length(), _Costs())


_paces: "WeakKeyDictionary[Any, WeakKeyDictionary[Any, dict[int | None, Pace]]]" = WeakKeyDictionary()
"""By large and small model, and by the layer of an early exit: what drafts have cost so far."""


def pace_of(large: Any, small: Any, layers: int | None) -> Pace:
    """The costs of a pair of models, or of a large one and its first layers, in whose place there is no small one."""
    of_large = _paces.setdefault(large, WeakKeyDictionary())
    return of_large.setdefault(large if small is None else small, {}).setdefault(layers, Pace())
