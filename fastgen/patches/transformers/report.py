"""What the last accelerated call of this process did, for measurements."""

from dataclasses import dataclass, field

from fastgen.decoding.plan import Plan


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


def note(report: CallReport) -> None:
    global _last
    _last = report
