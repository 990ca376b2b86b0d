"""Summary of this process's `generate` calls by model class and decoding method.

For each group: how many calls were accelerated, why others were not, and what the user can change.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from fastgen.patches.engine.counts import OUTCOMES, Outcome
from fastgen.patches.engine.remedies import remedy_for


@dataclass(frozen=True)
class Reason:
    """A reason why calls were only partly accelerated or not accelerated.

    Attributes:
        outcome: ``"partly"`` or ``"not"``.
        text: The fallback reason, or the missing feature with its reason.
        remedy: What the user can change; empty if no remedy is known.
        calls: Number of affected calls.
    """

    outcome: Outcome
    text: str
    remedy: str
    calls: int


@dataclass(frozen=True)
class CallGroup:
    """Call counts of one decoding method of one model class.

    Attributes:
        toolkit: Toolkit name, such as ``transformers``.
        model: Model class name, such as ``BartForConditionalGeneration``.
        method: Decoding method, such as ``beam search``.
        accelerated: Number of fully accelerated calls.
        partly: Number of calls that ran in fastgen's decode loop without a feature that provides
            most of the speedup.
        not_accelerated: Number of calls that ran the toolkit's own code.
        reasons: Reasons for `partly` and then for `not_accelerated`, the most frequent first.
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
    """Group the counts by toolkit, model and method, in the order of the first calls.

    Args:
        outcomes: Number of calls by (toolkit, model, method, outcome).
        reasons: Number of calls by (toolkit, model, method, outcome, text).
    """
    call_groups: list[CallGroup] = []
    often_first = sorted(reasons.items(), key=lambda item: -item[1])
    for group_key in dict.fromkeys(key[:3] for key in outcomes):
        accelerated, partly, not_accelerated = (
            outcomes.get((*group_key, outcome), 0) for outcome in OUTCOMES
        )
        why = [
            Reason(outcome, key[4], remedy_for(key[4]), count)
            for outcome in OUTCOMES
            for key, count in often_first
            if key[:4] == (*group_key, outcome)
        ]
        toolkit, model, method = group_key
        call_groups.append(
            CallGroup(toolkit, model, method, accelerated, partly, not_accelerated, tuple(why))
        )
    return tuple(call_groups)
