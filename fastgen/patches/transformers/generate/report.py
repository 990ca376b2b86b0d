"""What accelerated calls did: counted for `status`, and the last one as it is, for measurements."""

from dataclasses import dataclass, field

from fastgen.decoding.plan import Plan
from fastgen.patches.engine import engine
from fastgen.patches.transformers import TOOLKIT


@dataclass
class CallReport:
    """One accelerated call.

    Attributes:
        plan: what it ran.
        kv_bytes: peak bytes of keys and values in use; stock_kv_bytes: what the toolkit's cache would have used.
        steps: (rows in the batch, seconds) of each decode step.
        joined: how many of the steps were made together with those of other batches.
    """

    plan: Plan
    kv_bytes: int = 0
    stock_kv_bytes: int = 0
    steps: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    joined: int = 0


_last: CallReport | None = None


def last_call() -> CallReport | None:
    """The newest accelerated call, or None."""
    return _last


def note_served(
    patch: str, model: object, report: CallReport, left_off: tuple[str, ...] = ()
) -> None:
    """Count a call that fastgen's loop has served.

    Args:
        patch: whose loop it was. left_off: what the call did without beside what its plan says.
    """
    global _last
    _last, plan = report, report.plan
    engine.hit(patch, dict.fromkeys((*plan.left_off, *left_off)))
    outcome = "partly" if plan.missing else "accelerated"
    engine.note_call(TOOLKIT.name, type(model).__name__, plan.method, outcome, plan.missing)
