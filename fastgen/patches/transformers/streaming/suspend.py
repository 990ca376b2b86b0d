"""Suspension: `generate` returns its decode loop after the start, to resume it alongside others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers.generation.stopping_criteria import MaxTimeCriteria

from fastgen.decoding.backends.decode_backend import DecodeBackend
from fastgen.decoding.backends.drafted_sampling import DraftedSampling
from fastgen.decoding.batching.continuous_batching import not_refilled
from fastgen.decoding.plan import Plan
from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.patches.engine import engine
from fastgen.patches.generation_call import call_of
from fastgen.patches.transformers.generate import legacy_search
from fastgen.patches.transformers.generate.module_stepper import ModuleStepper
from fastgen.patches.transformers.generate.report import note_served


@dataclass
class Request:
    """Request that a call of a model's `generate` suspend its loop.

    Attributes:
        refused: Why it may not be suspended, which the call counts; None if it may.
        draws_apart: Whether samples need not be those that the whole batch draws in one plain call,
            so that finished ones may leave it.
        calls: Calls of `generate` so far. The caller does not get the loop of a nested call.
    """

    refused: str | None = None
    draws_apart: bool = False
    calls: int = 0


@dataclass
class SuspendedDecode:
    """A suspended decode loop.

    Attributes:
        name: Name of the patch that runs it.
        backend: Runs its decode steps; it holds the search and the stepper.
        output: Builds the return value of `generate`, once the loop is over.
        left_off: Features disabled in this call in addition to those of its plan, with reasons.
    """

    name: str
    backend: DecodeBackend[Any]
    output: Callable[[], Any]
    left_off: tuple[str, ...] = ()

    @property
    def model(self) -> ModuleStepper:
        """The stepper of the decode steps."""
        return self.backend.model

    def finish(self) -> Any:
        """Count the call and return the value of `generate`, once the loop is over."""
        output, model = self.output(), self.model
        left_off = *model.plan.left_off, *self.backend.left_off
        model.plan = replace(model.plan, left_off=left_off)
        model.restore_user_cache()
        if isinstance(self.backend, DraftedSampling) and self.backend.drafting.rounds:
            engine.note_drafting(self.backend.drafting.counts())
        note_served(self.name, model.model, model.report(), self.left_off)
        return output


def note_call(model: Any) -> None:
    """Record a call of a model's `generate`."""
    request = call_of(model).suspension
    if request is not None:
        request.calls += 1


def refuse(model: Any, reason: str) -> None:
    """Disallow suspending loops of a model, if that was requested."""
    request = call_of(model).suspension
    if request is not None:
        request.refused = request.refused or reason


def decide(
    model: Any, plan: Plan, step: DecoderStep | None, criteria: Sequence[Any]
) -> tuple[bool, str | None]:
    """Return whether to suspend a loop, and what to count if that was requested but is refused.

    Args:
        model: The model.
        plan: Plan of the call.
        step: The fused decode step, or None.
        criteria: Stopping criteria of the call.
    """
    request = call_of(model).suspension
    if request is None:
        return False, None
    reason = request.refused or _reason_not_to_pause(request, plan, step, criteria)
    return reason is None, None if reason is None else not_refilled(reason)


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
