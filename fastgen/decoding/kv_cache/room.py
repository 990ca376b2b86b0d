"""How much room KV buffers have, and when unused slots are freed."""

from torch import Tensor

from fastgen.models.cuda_graphs import graph

COMPACT_EVERY = 16
"""Decode steps between two compactions, which free KV slots that no live beam references."""

GROWTH = 64
"""Decode steps for which a buffer gets room at least, when it grows and the text may become that long."""


ALIGNED = 16
"""Slots of which a buffer has a multiple where kernels read it: they load several at once then."""


def room_for(steps: int, longest: int, like: Tensor, elements: int) -> int:
    """Steps to make room for beyond the `steps` that are filled: half as many again, and never beyond `longest`.

    Where what reads the buffer is captured, all up to `longest`, unless that takes too much memory, or is a limit that
    few texts come near to.

    Args:
        like: a tensor of the buffer's dtype and device.
        elements: of a step.
    """
    left = longest - steps
    if longest <= 8 * GROWTH and graph.may_be_roomy(like, longest * elements):
        return max(1, left)
    return max(1, min(max(GROWTH, steps // 2), left))


def aligned(slots: int, most: int, like: Tensor) -> int:
    """Slots of a buffer that never grows again; others grow together with what goes with them."""
    return -(-slots // ALIGNED) * ALIGNED if slots == most and graph.wanted(like) else slots
