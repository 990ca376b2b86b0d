"""Calls of `generate` that hand back their loop when it has begun, so that it goes on beside those of other calls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.generation.stopping_criteria import MaxTimeCriteria

from fastgen.decoding.batching.continuous_batching import left_empty
from fastgen.decoding.loop import Search
from fastgen.decoding.plan import Plan
from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.patches.transformers.generate import legacy_search
from fastgen.patches.transformers.generate.generation_call import call_of
from fastgen.patches.transformers.generate.module_stepper import Stepper
from fastgen.patches.transformers.generate.report import note_served


@dataclass
class Request:
    """That a call of a model's `generate` may pause.

    Attributes:
        refused: why it may not after all, which the call counts.
        calls: of `generate` so far; the loop of a second one is not what the caller gets.
    """

    refused: str | None = None
    calls: int = 0


@dataclass
class SuspendedDecode:
    """A loop that has begun, or is over.

    Attributes:
        name: the patch that runs it. output: makes what `generate` returns of it.
        left_off: what it does without beside what its plan says, each with the reason.
    """

    name: str
    model: Stepper
    search: Search[Tensor]
    output: Callable[[], Any]
    left_off: tuple[str, ...] = ()

    def finish(self) -> Any:
        """Return what `generate` returns, once the loop is over."""
        output = self.output()
        self.model.hand_back()
        note_served(self.name, self.model.model, self.model.report(), self.left_off)
        return output


def note_call(model: Any) -> None:
    """Note that a model's `generate` is called."""
    request = call_of(model).suspension
    if request is not None:
        request.calls += 1


def refuse(model: Any, reason: str) -> None:
    """Let no loop of a model pause any more, if one was asked to."""
    request = call_of(model).suspension
    if request is not None:
        request.refused = request.refused or reason


def decide(
    model: Any, plan: Plan, step: DecoderStep | None, criteria: Sequence[Any]
) -> tuple[bool, str | None]:
    """Whether a loop pauses; if it was asked to and does not, what to count."""
    request = call_of(model).suspension
    if request is None:
        return False, None
    reason = request.refused or _reason_not_to_pause(request, plan, step, criteria)
    return reason is None, None if reason is None else left_empty(reason)


def _reason_not_to_pause(
    request: Request, plan: Plan, step: DecoderStep | None, criteria: Sequence[Any]
) -> str | None:
    if step is None or not plan.fused:
        return "decode steps are not made from the weights"
    if step.tokens > 1:
        return f"each step runs {step.tokens} tokens of a text"
    if not plan.drop:
        return "finished sentences stay in the batch"
    if any(isinstance(criterion, MaxTimeCriteria) for criterion in criteria):
        return "max_time"
    if plan.method in legacy_search.METHODS:
        return plan.method
    return "generate has called itself" if request.calls > 1 else None
