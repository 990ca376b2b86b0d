"""What a function allocates: every tensor's memory, and what operators take besides, as torch's allocators see it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Allocations:
    """What was taken from an allocator, and given back.

    Attributes:
        peak: the most bytes that there were beside those of before.
        sizes: bytes of each allocation, in order.
    """

    peak: int
    sizes: tuple[int, ...]


def allocations(function: Callable[[], Any]) -> Allocations:
    """Run a function on a CPU and follow torch's allocator, which oneDNN takes its memory from, too."""
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
