"""The calls of this process by model class and method: were they accelerated, and if not, why and what would help."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from fastgen.patches._remedies import remedy_for

Outcome = Literal["accelerated", "partly", "not"]
OUTCOMES: tuple[Outcome, ...] = ("accelerated", "partly", "not")


class Of(NamedTuple):
    """What a call is of: a toolkit, a model's class, and a decoding method or another function."""

    toolkit: str
    model: str
    method: str


@dataclass(frozen=True)
class Reason:
    """Why calls were accelerated in part or not at all.

    Attributes:
        outcome: partly, or not.
        text: what stands in the way.
        remedy: what to change, where something can be changed; else empty.
        calls: how many it stood in the way of.
    """

    outcome: Outcome
    text: str
    remedy: str
    calls: int


@dataclass(frozen=True)
class CallGroup:
    """The calls of one method of one model class.

    Attributes:
        toolkit, model, method: ``transformers``, ``BartForConditionalGeneration``, ``beam search``.
        accelerated, partly, not_accelerated: numbers of calls. A call counts as partly accelerated where fastgen ran
            its decoding loop and something that costs most of the gain was missing.
        reasons: why, the most frequent first.
    """

    toolkit: str
    model: str
    method: str
    accelerated: int
    partly: int
    not_accelerated: int
    reasons: tuple[Reason, ...]


@dataclass
class Calls:
    """Counts of calls, not locked: the engine's lock guards them."""

    outcomes: Counter[tuple[str, ...]] = field(default_factory=Counter[tuple[str, ...]])  # (*Of, outcome)
    reasons: Counter[tuple[str, ...]] = field(default_factory=Counter[tuple[str, ...]])  # (*Of, outcome, text)

    def add(self, of: Of, outcome: Outcome, reasons: Iterable[str]) -> None:
        """Count one call."""
        self.outcomes[(*of, outcome)] += 1
        self.reasons.update((*of, outcome, text) for text in reasons)

    def merge(self, outcomes: Mapping[tuple[str, ...], int], reasons: Mapping[tuple[str, ...], int]) -> None:
        """Add the counts of another process."""
        self.outcomes.update(outcomes)
        self.reasons.update(reasons)

    def clear(self) -> None:
        self.outcomes.clear()
        self.reasons.clear()

    def groups(self) -> tuple[CallGroup, ...]:
        """Return the counts by toolkit, model and method, in the order of their first calls."""
        found: list[CallGroup] = []
        for of in dict.fromkeys(Of(*key[:3]) for key in self.outcomes):
            accelerated, partly, not_accelerated = (self.outcomes.get((*of, outcome), 0) for outcome in OUTCOMES)
            reasons = [
                Reason(outcome, key[4], remedy_for(key[4]), count)
                for outcome in OUTCOMES
                for key, count in self.reasons.most_common()
                if key[:4] == (*of, outcome)
            ]
            found.append(CallGroup(*of, accelerated, partly, not_accelerated, tuple(reasons)))
        return tuple(found)
