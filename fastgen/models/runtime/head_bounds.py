"""Bounds of the logits of greedy decode steps in C: when they pay, and the copy of the head.

`ops.logit_bounds` says how a copy of the head in int8 rules most tokens out.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgen import config
from fastgen.models.layers.linear import Int8Linear, Linear
from fastgen.models.layers.packed_weights import Int8Packed, LogitErrors, has_copy, packed_of
from fastgen.models.memory import budget
from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.models.runtime.native.step import NativeStep
from fastgen.models.state import CachedState, state_of
from fastgen.ops import int8, logit_bounds, native, processor
from fastgen.ops.native import search as c

MOST_ROWS = 3
"""Most rows of a step. Each takes two rows of bytes, of which a product accumulates six at a time.

With three rows, the highest logits of 151,936 tokens and 896 inputs take 0.27 (fp32) and 0.54 times
(bf16) the time of the head's product, with four 0.35 and 0.72 times (one thread of Zen 4).
"""

OUTGROWN = 2.0
"""Least size of the weights, relative to the last-level cache, at which a step reads memory."""

LEAST_SHARE = 0.05
"""Least share of a step's bytes that the copy saves."""

WORTH = 2000
"""Greedy steps after which the int8 copy of a head pays, if the head held all bytes of a step.

Copies and bounds are made at 0.5 GB/s and weights are read at 20 GB/s, so making a copy takes as
long as 40 steps. It may take at most 1/50 of the time of a model's greedy calls: 40 * 50 steps.
"""


@dataclass(eq=False)
class HeadUse(CachedState):
    """How often bounds may decide, or have decided, a step of a head.

    Attributes:
        counts: (3,) int64, as in `ops.native.search.LogitBounds`.
    """

    counts: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.int64, device="cpu"))

    def release(self) -> bool:
        self.counts.zero_()
        return False  # a running call may still count


class HeadBounds(NamedTuple):
    """The C record of a head's bounds, and objects to keep alive while C has it."""

    record: c.LogitBounds
    held: list[Any]


def why_no_bounds(step: DecoderStep, rows: int) -> str:
    """Return why all logits of greedy decode steps in C are computed; empty if bounds may decide.

    Args:
        step: The decode step.
        rows: R.
    """
    settings, head = config.settings(), step.head
    if settings.int8_head == "off":
        return "FASTGEN_INT8_HEAD=off"
    if settings.precision != "model":
        return f"FASTGEN_PRECISION={settings.precision}"
    if type(head) is not Linear or not isinstance(step.run_layers, NativeStep):
        return "decode steps are not written in C"
    if step.softcap:
        return "logits have a soft cap"
    if rows > MOST_ROWS:
        return f"{rows} rows, more than {MOST_ROWS}"
    if head.dtype not in logit_bounds.DTYPES:
        return f"the head is {str(head.dtype).removeprefix('torch.')}"
    weight: Tensor = head.module.weight
    if head.transposed or weight.stride(1) != 1 or not int8.supported(head.outputs, head.inputs):
        return "C cannot read the head as it is"
    if settings.int8_head == "on":
        return ""
    of_step = weight_bytes(step)
    if of_step < OUTGROWN * processor.last_level_cache():
        return "the weights fit into the processor's cache, or nearly so"
    saved = weight.nbytes - int8.bytes_to_pack(head.outputs, head.inputs)
    return "" if saved >= LEAST_SHARE * of_step else "the head is a small part of the weights"


def weight_bytes(step: DecoderStep) -> int:
    """Return the bytes that the products of a decode step read; shared weights count each time.

    Args:
        step: The decode step, which has a `run_layers`.
    """
    run_layers, head = step.run_layers, step.head
    assert isinstance(run_layers, NativeStep)
    products = [*run_layers.records.products, head]
    return step.dtype.itemsize * sum(each.outputs * getattr(each, "inputs", 0) for each in products)


def bytes_of_copies(step: DecoderStep) -> int:
    """Return the bytes of the copy of the head and of its bounds."""
    head: Any = step.head
    return int8.bytes_to_pack(head.outputs, head.inputs) + logit_bounds.bytes_of_bounds(
        head.outputs
    )


def bounds_of(
    by: native.Library, step: DecoderStep, rows: int, bias: Tensor | None
) -> HeadBounds | None:
    """Return the bounds of the logits of a job's steps; None if they never decide.

    A head has a copy once enough steps that bounds may decide have run, and while memory has room.
    Until then the record only counts these steps.

    Args:
        by: The native library.
        step: The decode step.
        rows: R.
        bias: (V,) of the head, contiguous; or None.
    """
    if why_no_bounds(step, rows):
        return None
    head: Any = step.head
    counts = state_of(head.module).of(HeadUse).counts
    counting = HeadBounds(c.LogitBounds(counts=counts.data_ptr()), [counts])
    if not _is_worth_it(step, int(counts[0])) or not _has_room(head):
        return counting
    weight: Tensor = head.module.weight.detach()
    copy = Int8Linear(head).in_panels()
    errors = packed_of(head.module, LogitErrors).copied(head.module.weight, weight, always=False)
    if copy is None or errors is None:
        return counting
    record = logit_bounds.record_of(by, weight, copy, errors, bias, counts)
    return counting if record is None else HeadBounds(record, [counts, weight, copy, errors, bias])


def _is_worth_it(step: DecoderStep, steps: int) -> bool:
    if config.settings().int8_head == "on":
        return steps > 0  # of a search that may use them
    head: Any = step.head
    return steps * weight_bytes(step) >= WORTH * head.module.weight.nbytes


def _has_room(head: Any) -> bool:
    """Return whether memory has room for the copies that are missing."""
    needed = 0
    if not has_copy(head.module, Int8Packed):
        needed += int8.bytes_to_pack(head.outputs, head.inputs)
    if not has_copy(head.module, LogitErrors):
        needed += logit_bounds.bytes_of_bounds(head.outputs)
    return not needed or budget.shortage_now(needed) is None
