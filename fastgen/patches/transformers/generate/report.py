"""Reports of accelerated calls: counts for `status`, and the newest report for benchmarks."""

from dataclasses import dataclass, field

from fastgen.decoding.plan import Plan
from fastgen.patches.engine import engine
from fastgen.patches.transformers import TOOLKIT


@dataclass
class CallReport:
    """Report of one accelerated call.

    Attributes:
        plan: The plan that it ran.
        kv_bytes: Peak bytes of keys and values in use.
        stock_kv_bytes: Bytes that the toolkit's cache would have used.
        steps: (rows in the batch, seconds) of each decode step.
        joined: Number of steps that ran jointly with steps of other calls.
    """

    plan: Plan
    kv_bytes: int = 0
    stock_kv_bytes: int = 0
    steps: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    joined: int = 0


_last: CallReport | None = None


def last_call() -> CallReport | None:
    """Return the report of the newest accelerated call, or None."""
    return _last


def note_served(
    patch: str, model: object, report: CallReport, left_off: tuple[str, ...] = ()
) -> None:
    """Count a call that fastgen's loop has served.

    Args:
        patch: Name of the patch that ran the loop.
        left_off: Features that the call ran without, besides those of its plan, with reasons.
    """
    global _last
    _last, plan = report, report.plan
    engine.hit(patch, dict.fromkeys((*plan.left_off, *left_off)))
    outcome = "partly" if plan.missing else "accelerated"
    engine.note_call(TOOLKIT.name, type(model).__name__, plan.method, outcome, plan.missing)
