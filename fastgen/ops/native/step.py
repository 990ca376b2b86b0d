"""What a decode step in C is given, as `step.h` declares it, and the call.

Numbers are fp32; strides are in elements, and addresses are those of tensors that whoever fills these structures holds.
"""

import ctypes
from typing import Any, ClassVar

from fastgen.ops.native import Library

TEXT, SOURCE, FEED_FORWARD = range(3)
UNNORMED, LAYER_NORM, RMS_NORM = range(3)

POINTER, INTEGER, DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_Fields = list[tuple[str, Any]]


def of(kind: Any, names: str) -> _Fields:
    return [(name, kind) for name in names.split()]


class Weight(ctypes.Structure):
    """A packed weight and its bias."""

    _fields_: ClassVar = [*of(POINTER, "panels bias"), *of(INTEGER, "outputs inputs")]


class Norm(ctypes.Structure):
    """A norm of rows, or none."""

    _fields_: ClassVar = [*of(POINTER, "weight bias"), *of(DOUBLE, "eps offset"), ("kind", INTEGER)]


class Sublayer(ctypes.Structure):
    """Products of what comes in, attention or an activation function, a product with the sum, and the norm behind."""

    _fields_: ClassVar = [
        *of(INTEGER, "kind parts"), ("part", Weight * 3), ("out", Weight),
        *of(Norm, "norm query_norm key_norm"), *of(INTEGER, "parallel heads key_heads dims whole_norms"),
        ("scale", DOUBLE), ("behind", INTEGER),
        *of(POINTER, "cosine sine"), *of(INTEGER, "turned turn_row neighbours"),
    ]  # fmt: skip


class Seen(ctypes.Structure):
    """What a sublayer attends to, of the sentences of one call."""

    _fields_: ClassVar = [
        *of(POINTER, "keys values weights mask bias"),
        *of(
            INTEGER,
            "count slot keys_b keys_h keys_n values_b values_h values_n mask_b mask_h mask_m",
        ),
        *of(INTEGER, "bias_b bias_h bias_step"),
    ]


class Rows(ctypes.Structure):
    """The rows of one call."""

    _fields_: ClassVar = of(INTEGER, "first_row sentences beams")


class Step(ctypes.Structure):
    """All sublayers, and what they work on."""

    _fields_: ClassVar = [
        *of(POINTER, "sublayers seen calls"), *of(INTEGER, "sublayer_count call_count rows width norm_first"),
        *of(POINTER, "x stream spare wide mixed"),
    ]  # fmt: skip


SIZE = sum(map(ctypes.sizeof, (Step, Sublayer, Seen, Rows)))
"""What `step_size` of a library returns, if it has the same structures."""


def run(by: Library, threads: int, step: Step) -> bool:
    """Run all sublayers by so many threads at most; return whether there was memory for it."""
    return bool(by.step(by.run, threads, by.wait, ctypes.byref(step)))
