"""The calls of this process by model class and method: were they accelerated, and if not, why and what would help."""

from collections.abc import Mapping
from dataclasses import dataclass

from fastgen.patches.engine.counts import OUTCOMES, Outcome
from fastgen.patches.engine.remedies import remedy_for


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


def groups(
    outcomes: Mapping[tuple[str, ...], int], reasons: Mapping[tuple[str, ...], int]
) -> tuple[CallGroup, ...]:
    """Return what was counted by toolkit, model and method, in the order of the first calls.

    Args:
        outcomes: by (toolkit, model, method, outcome). reasons: by (toolkit, model, method, outcome, text).
    """
    found: list[CallGroup] = []
    often_first = sorted(reasons.items(), key=lambda item: -item[1])
    for of in dict.fromkeys(key[:3] for key in outcomes):
        accelerated, partly, not_accelerated = (
            outcomes.get((*of, outcome), 0) for outcome in OUTCOMES
        )
        why = [
            Reason(outcome, key[4], remedy_for(key[4]), count)
            for outcome in OUTCOMES
            for key, count in often_first
            if key[:4] == (*of, outcome)
        ]
        toolkit, model, method = of
        found.append(
            CallGroup(toolkit, model, method, accelerated, partly, not_accelerated, tuple(why))
        )
    return tuple(found)
