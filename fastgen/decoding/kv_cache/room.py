"""Growth policy of KV buffers, and the interval at which unused KV slots are freed."""

from torch import Tensor

from fastgen.models.cuda_graphs import graph

COMPACT_EVERY = 16
"""Number of decode steps between compactions, which free KV slots that no live beam references."""

GROWTH = 64
"""Minimum number of decode steps by which a buffer grows, unless the sequence ends earlier."""


ALIGNED = 16
"""Granularity of buffer sizes in slots, so that kernels can use vectorized loads."""


def steps_to_reserve(steps: int, longest: int, like: Tensor, elements: int) -> int:
    """Return the number of decode steps to reserve beyond the `steps` that are filled.

    A buffer grows by half of `steps` or by `GROWTH` steps, whichever is more, but not beyond
    `longest`. If its readers are captured as CUDA graphs, it gets room up to `longest` at once,
    unless that takes too much memory or `longest` is a limit that few texts reach.

    Args:
        steps: Decode steps that are filled.
        longest: Maximum number of decode steps.
        like: Tensor with the dtype and device of the buffer.
        elements: Elements of the buffer per decode step.
    """
    left = longest - steps
    if longest <= 8 * GROWTH and graph.may_be_roomy(like, longest * elements):
        return max(1, left)
    return max(1, min(max(GROWTH, steps // 2), left))


def aligned(slots: int, most: int, like: Tensor) -> int:
    """Round a buffer's slots up to a multiple of `ALIGNED` if graph capture is enabled for it.

    Only a buffer that has its maximum size `most` is rounded. One that may still grow has to keep
    the same number of slots as the buffers that grow with it.
    """
    return -(-slots // ALIGNED) * ALIGNED if slots == most and graph.enabled(like) else slots
