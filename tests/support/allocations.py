"""Trace the memory that a function allocates, including the workspaces of operators."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Allocations:
    """Allocations that were observed while a function ran.

    Attributes:
        peak: the largest number of bytes in use at once, beyond those in use before.
        sizes: bytes of each allocation, in order.
    """

    peak: int
    sizes: tuple[int, ...]


def allocations(function: Callable[[], Any]) -> Allocations:
    """Run a function on a CPU and trace torch's allocator, which oneDNN uses too."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = cast(Any, profiler.profiler).kineto_results.events()
    changes = [
        e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()) if e.name() == "[memory]"
    ]
    now = peak = 0
    for change in changes:
        now += change
        peak = max(peak, now)
    return Allocations(peak, tuple(change for change in changes if change > 0))
