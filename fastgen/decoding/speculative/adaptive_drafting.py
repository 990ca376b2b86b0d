"""Adaptive drafting: draft only while the measured cost per token is lower with drafts.

Use it only where drafts do not change the output. Both costs depend on the number of running texts,
so they are kept for each number, rounded to powers of two. The time that trials of drafting may
lose is bounded by a small share of the total time. That total counts the rounds of a pair of models
in calls that begin with about as many texts. The first trial therefore comes some time after the
first token.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from fastgen.models.state import CachedState, state_of

SHARE = 0.005
"""Share of the total time that drafting may lose against the large model alone."""

TRIAL = 3
"""Rounds with drafts before they are judged; see `DEAR` for an earlier end."""

UNKNOWN = 8
"""Maximum number of rounds that a trial is expected to cost before any trial was measured.

A trial over N texts counts as min(N, `UNKNOWN`) rounds: in a pass over many tokens, each one costs.
"""

DEAR = 1.5
"""Cost per token, relative to the large model alone, above which a trial ends at once."""

REST, LONGEST_REST = 16, 512
"""Rounds without drafts after a failed trial, and their maximum; consecutive failures double it."""

STALE = 64
"""Rounds with drafts after which one round runs without them, to refresh the cost of the latter."""

_NEWEST = 0.25
"""Weight of the newest round in the moving average of costs."""


@dataclass
class _Costs:
    """Cost per token and state of the trials, of rounds or of whole calls.

    Attributes:
        without_drafts: seconds per token without drafts, a moving average; None until measured.
        with_drafts: seconds per token with drafts, a moving average; None until measured.
        pays: whether drafts paid in the last trial and in all rounds since.
        tried: rounds with drafts in the current trial, or since `without_drafts` was set.
        rest: rounds without drafts before the next trial.
        next_rest: value of `rest` after the next failed trial.
        lost: seconds that the last trial cost beyond the large model alone.
    """

    without_drafts: float | None = None
    with_drafts: float | None = None
    pays: bool = False
    tried: int = 0
    rest: int = 0
    next_rest: int = REST
    lost: float = 0.0

    def note_undrafted(self, cost: float) -> None:
        self.without_drafts = _mean(self.without_drafts, cost)
        self.tried, self.rest = 0 if self.tried >= STALE else self.tried, max(0, self.rest - 1)

    def note_drafts(self, cost: float, without_drafts: float, lost: float) -> None:
        with_drafts = self.with_drafts = _mean(self.with_drafts, cost)
        self.lost = lost + (self.lost if self.tried else 0.0)
        self.tried += 1
        if self.tried < TRIAL and with_drafts <= DEAR * without_drafts:
            return
        self.pays = with_drafts <= without_drafts
        if self.pays:
            self.next_rest = REST
            return
        self.with_drafts, self.tried = None, 0
        self.rest, self.next_rest = self.next_rest, min(2 * self.next_rest, LONGEST_REST)


def _mean(before: float | None, newest: float) -> float:
    return newest if before is None else before + _NEWEST * (newest - before)


@dataclass
class DraftTiming:
    """Costs of a pair of models, over all calls that begin with a similar number of texts.

    Attributes:
        clock: returns the time in seconds.
        prompts: seconds of the small model's prefill in the last call with drafts. Before the first
            such call, twice the duration of the longest round.
        start: seconds of the small model's prefill per generated token, a moving average.
        total: seconds of all rounds and of the small model's prefills.
        lost: seconds of `total` that drafting cost beyond the large model alone.
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
        """Return whether the next round, over `texts` running texts, should draft."""
        costs = self._of(texts)
        if costs.without_drafts is None or costs.tried >= STALE:
            return False
        return costs.pays or costs.tried > 0 or self._can_afford(costs, texts)

    def may_draft(self) -> bool:
        """Return whether any round of a new call may draft, from what is known so far.

        Return False if drafting has slowed down calls as a whole. The costs of rounds cannot show
        that: they spread the small model's prefill over all tokens, while drafts may pay only for
        the last texts of a batch.
        """
        calls = self._calls
        if calls.tried >= STALE:
            return False
        worth = (
            calls.pays
            or calls.tried
            or (calls.rest == 0 and self.lost + calls.lost <= SHARE * self.total)
        )
        return bool(calls.without_drafts is None or worth) and any(
            costs.pays
            or costs.tried
            or (costs.without_drafts is not None and self._can_afford(costs, 2**size // 2))
            for size, costs in self._costs.items()
        )

    def _can_afford(self, costs: _Costs, texts: int) -> bool:
        expected = self.prompts + max(
            costs.lost, (costs.without_drafts or 0.0) * texts * min(texts, UNKNOWN)
        )
        return costs.rest == 0 and self.lost + expected <= SHARE * self.total

    def note(self, drafted: bool, texts: int, tokens: int, seconds: float) -> None:
        """Record a round.

        Args:
            drafted: whether the small model drafted.
            texts: number of running texts.
            tokens: tokens that they gained, all together.
            seconds: duration of the round.
        """
        costs = self._of(texts)
        self.total += seconds
        if not self._drafted:
            self.prompts = max(self.prompts, 2 * seconds)
        if not drafted:
            costs.note_undrafted(seconds / tokens)
        if not drafted or costs.without_drafts is None:
            return
        lost = seconds - tokens * costs.without_drafts
        self.lost = max(0.0, self.lost + lost)
        costs.note_drafts(seconds / tokens + self.start, costs.without_drafts, lost)

    def note_call(self, drafted: bool, tokens: int, seconds: float) -> None:
        """Record a call.

        Args:
            drafted: whether the small model drafted.
            tokens: generated tokens of all texts.
            seconds: duration of the call.
        """
        calls, cost = self._calls, seconds / max(1, tokens)
        if not drafted:
            calls.note_undrafted(cost)
        elif calls.without_drafts is not None:
            calls.note_drafts(cost, calls.without_drafts, seconds - tokens * calls.without_drafts)

    def note_start(self, seconds: float, tokens: int) -> None:
        """Record the small model's prefill at the end of a call.

        Args:
            seconds: duration of the prefill.
            tokens: generated tokens of all texts.
        """
        self._drafted, self.prompts = True, seconds
        self.start = _mean(self.start or None, seconds / max(1, tokens))
        self.total, self.lost = self.total + seconds, self.lost + seconds

    def _of(self, texts: int) -> _Costs:
        return self._costs.setdefault(texts.bit_length(), _Costs())


class DraftTimings(CachedState):
    """Costs of drafting for one large model, by small model, early-exit layer, and texts."""

    def __init__(self) -> None:
        self.by_small: WeakKeyDictionary[Any, dict[tuple[int | None, int], DraftTiming]] = (
            WeakKeyDictionary()
        )


def timing_of(large: Any, small: Any, layers: int | None, texts: int) -> DraftTiming:
    """Return the costs of a pair of models in calls that begin with about `texts` texts.

    Args:
        large: the large model.
        small: the small model; None if it is the first `layers` layers of the large one.
        layers: number of those layers, or None.
        texts: number of texts, rounded to a power of two.
    """
    by_small = state_of(large).of(DraftTimings).by_small
    of_pair = by_small.setdefault(large if small is None else small, {})
    return of_pair.setdefault((layers, texts.bit_length()), DraftTiming())
