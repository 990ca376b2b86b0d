"""Whether drafts pay, by the clock: what a token costs with them, and what it costs the large model alone.

For use where drafts change nothing about the output. Both costs depend on how many texts are running, so that they are
kept for each number of them, as a power of two. What trials of drafts may lose is bounded: a small share of all the
time that a pair of models has taken so far in calls that begin with as many texts. So the first trial comes a while
after the first token.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

SHARE = 0.005
"""Of all seconds, those that drafts may have lost against the large model alone."""

TRIAL = 3
"""Rounds with drafts before they are judged."""

UNKNOWN = 8
"""Rounds that a first trial may cost, of so many texts or more: where a pass reads many tokens, each of them costs."""

DEAR = 1.5
"""A token that costs so many times that of the large model alone ends a trial at once."""

REST, LONGEST_REST = 16, 512
"""Rounds without drafts when they have not paid once, and at most; each time in succession twice as many."""

STALE = 64
"""Rounds with drafts after which one is made without them, to see what that costs by now."""

_NEWEST = 0.25
"""The weight of the newest round among those before it."""


@dataclass
class _Costs:
    """Seconds per token, and what is to come; of rounds, or in the same way of calls.

    Attributes:
        pays: what the last trial has found, and no round since has undone.
        tried: rounds with drafts since the last without. rest: rounds without drafts before the next with them.
        next_rest: how many it will be when drafts do not pay the next time.
        lost: seconds that the last trial has cost beyond the large model alone.
    """

    alone: float | None = None
    together: float | None = None
    pays: bool = False
    tried: int = 0
    rest: int = 0
    next_rest: int = REST
    lost: float = 0.0

    def note_alone(self, cost: float) -> None:
        self.alone = _mean(self.alone, cost)
        self.tried, self.rest = 0 if self.tried >= STALE else self.tried, max(0, self.rest - 1)

    def note_drafts(self, cost: float, alone: float, lost: float) -> None:
        together = self.together = _mean(self.together, cost)
        self.lost = lost + (self.lost if self.tried else 0.0)
        self.tried += 1
        if self.tried < TRIAL and together <= DEAR * alone:
            return
        self.pays = together <= alone
        if self.pays:
            self.next_rest = REST
            return
        self.together, self.tried = None, 0
        self.rest, self.next_rest = self.next_rest, min(2 * self.next_rest, LONGEST_REST)


def _mean(before: float | None, newest: float) -> float:
    return newest if before is None else before + _NEWEST * (newest - before)


@dataclass
class Pace:
    """The costs of a pair of models, over all their calls that begin with a like number of texts.

    Attributes:
        prompts: seconds of the small model's prompts, in the last call that had drafts; before there was one, those of
            the longest two rounds. start: of all calls, for each token that they gave.
        total: seconds of all rounds. lost: of them, those that drafts have cost beyond the large model alone.
    """

    clock: Callable[[], float] = time.perf_counter
    prompts: float = 0.0
    start: float = 0.0
    total: float = 0.0
    lost: float = 0.0
    _costs: dict[int, _Costs] = field(default_factory=dict[int, _Costs])
    _calls: _Costs = field(default_factory=_Costs)
    _drafted: bool = False

    def drafts(self, texts: int) -> bool:
        """Whether the next round of so many texts is to be one with drafts."""
        costs = self._of(texts)
        if costs.alone is None or costs.tried >= STALE:
            return False
        return costs.pays or costs.tried > 0 or self._can_afford(costs, texts)

    def may_draft(self) -> bool:
        """Whether a round of a call may be one with drafts, as far as it is known.

        Not where calls as a whole have lost by it: what the small model's prompts cost is spread over all tokens,
        though drafts may pay for a batch's last texts alone.
        """
        calls = self._calls
        if calls.tried >= STALE:
            return False
        worth = (
            calls.pays
            or calls.tried
            or (calls.rest == 0 and self.lost + calls.lost <= SHARE * self.total)
        )
        return bool(calls.alone is None or worth) and any(
            costs.pays
            or costs.tried
            or (costs.alone is not None and self._can_afford(costs, 2**size // 2))
            for size, costs in self._costs.items()
        )

    def _can_afford(self, costs: _Costs, texts: int) -> bool:
        expected = self.prompts + max(
            costs.lost, (costs.alone or 0.0) * texts * min(texts, UNKNOWN)
        )
        return costs.rest == 0 and self.lost + expected <= SHARE * self.total

    def note(self, drafted: bool, texts: int, tokens: int, seconds: float) -> None:
        """Note a round: whether it was one with drafts, the tokens that all its texts gained, and how long it took."""
        costs = self._of(texts)
        self.total += seconds
        if not self._drafted:
            self.prompts = max(self.prompts, 2 * seconds)
        if not drafted:
            costs.note_alone(seconds / tokens)
        if not drafted or costs.alone is None:
            return
        lost = seconds - tokens * costs.alone
        self.lost = max(0.0, self.lost + lost)
        costs.note_drafts(seconds / tokens + self.start, costs.alone, lost)

    def note_call(self, drafted: bool, tokens: int, seconds: float) -> None:
        """Note a call: whether it had drafts, the tokens of all its texts, and how long it took."""
        calls, cost = self._calls, seconds / max(1, tokens)
        if not drafted:
            calls.note_alone(cost)
        elif calls.alone is not None:
            calls.note_drafts(cost, calls.alone, seconds - tokens * calls.alone)

    def note_start(self, seconds: float, tokens: int) -> None:
        """Note, when a call is over, what the small model's prompts took, and how many tokens the call gave."""
        self._drafted, self.prompts = True, seconds
        self.start = _mean(self.start or None, seconds / max(1, tokens))
        self.total, self.lost = self.total + seconds, self.lost + seconds

    def _of(self, texts: int) -> _Costs:
        return self._costs.setdefault(texts.bit_length(), _Costs())


_paces: "WeakKeyDictionary[Any, WeakKeyDictionary[Any, dict[tuple[int | None, int], Pace]]]" = (
    WeakKeyDictionary()
)
"""By large and small model, by the layer of an early exit, and by texts: what drafts have cost so far."""


def pace_of(large: Any, small: Any, layers: int | None, texts: int) -> Pace:
    """The costs of a pair of models in calls that begin with about so many texts.

    small: None where the first `layers` of the large one stand in its place.
    """
    of_large = _paces.setdefault(large, WeakKeyDictionary())
    of_pair = of_large.setdefault(large if small is None else small, {})
    return of_pair.setdefault((layers, texts.bit_length()), Pace())
