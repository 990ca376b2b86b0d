"""fp32 linear layers on a CPU through oneDNN, where that is faster than torch's default.

torch hands fp32 matrix products to MKL, which leaves AVX-512 unused on AMD processors, and is slow for a handful of
rows on every weight that does not fit the cache. oneDNN lies in the same torch, behind the operators that Inductor uses
for frozen weights. With the weight packed into oneDNN's own layout it is 2 to 5 times faster for 2 to 16 rows and 1.2
to 1.7 times for more (2 cores of an AMD EPYC, torch 2.13); on Intel's processors up to 2 times for 4 to 32 rows, 1.1
for more, and slower for fewer (2 cores of a Xeon with AVX-512). Unpacked it costs no memory and gains less.

The operators are private to torch, so `available` looks for them and checks a result once.
"""

import math
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from fastgen.ops import processor
from fastgen.ops.activation import FUNCTIONS, activation_reference

LEAST_ROWS = ((96 * 1024, 32), (384 * 1024, 2), (math.inf, 1))
"""Rows from which on oneDNN is faster, for weights of fewer elements than stand before them.

Small weights stay in the cache, where the fixed cost of a oneDNN call (about 10 us) is seldom won back; products of few
rows with large ones take as long as it takes to read them. Measured from 256 x 256 to 1024 x 50264 and 1 to 2,048 rows
(AMD EPYC): 4.4 times as fast at 256 x 5000, 2 rows."""

LEAST_ROWS_INTEL = ((128 * 1024, 512), (600 * 1024, 16), (math.inf, 4))
"""The same for Intel's processors, from 128 x 128 to 4096 x 1024 and 4 to 256 rows, read from memory, one thread and
two (Xeon): small weights are slower (0.4 to 0.9 times as fast with 4 to 128 rows), others gain from 16 rows on (1.0 to
1.9 with 16 and 32 rows, 1.0 to 1.2 with more), large ones with 4 too (0.95 to 1.4). With 1 to 3 rows MKL reads a
weight once, and oneDNN takes 1.1 to 1.4 times as long."""

ODD_INTEL = 128
"""Rows from which on it gains there where outputs are fewer than inputs and no multiple of so many."""

DEAR = ("gelu", "gelu_tanh")
"""Activation functions that oneDNN computes behind a product for much less than torch does by itself."""

DEAR_WORK_INTEL = 2**21
"""Rows times elements of the weight from which on that decides there: 1.1 to 1.4 times as fast with gelu, 16 to 128
rows of 192 x 768, where the product alone is 0.95 to 1.05."""

CHUNK, CHUNK_ROWS = 2 * 2**20, 64
"""Bytes of output, and rows at least, that `linear_into` computes at a time."""


# How oneDNN's operator calls what comes behind a product.
_ACTIVATIONS: dict[str | None, tuple[str, str]] = {
    None: ("none", ""), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "relu": ("relu", ""),
    "silu": ("swish", ""),
}  # fmt: skip


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x (..., K) times weight (N, K) transposed plus bias (N,): `torch.nn.functional.linear`."""
    return F.linear(x, weight, bias)


@cache
def available() -> bool:
    """Whether this torch has oneDNN's linear operators and they agree with its own product (checked once)."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    x, weight, bias = (
        torch.linspace(-1, 1, 3 * 64).view(3, 64),
        torch.linspace(1, -1, 32 * 64).view(32, 64),
        torch.ones(32),
    )
    expected = F.linear(x, weight, bias)
    try:
        found = [linear(x, weight, bias), linear(x, pack(weight), bias)]
        found += [linear(x, weight, bias, residual=expected) - expected]
        activated = [(linear(x, weight, bias, kind), activation_reference(expected, kind)) for kind in FUNCTIONS]
    except (RuntimeError, TypeError, AttributeError):
        return False
    return all(torch.allclose(y, wanted, atol=1e-4) for y, wanted in [*((y, expected) for y in found), *activated])


def least_rows(outputs: int, inputs: int, activation: str | None = None) -> int:
    """Rows of x from which on oneDNN with a packed weight (outputs, inputs) is faster than `F.linear`.

    activation: the kind of it right behind the product; None for none.
    """
    elements, intel = outputs * inputs, processor.on_intel()
    least = next(rows for limit, rows in (LEAST_ROWS_INTEL if intel else LEAST_ROWS) if elements < limit)
    if intel and outputs < inputs and outputs % ODD_INTEL:
        least = max(least, ODD_INTEL)
    if intel and activation in DEAR:
        least = min(least, math.ceil(DEAR_WORK_INTEL / max(1, elements)))
    return least


def saved_share() -> float:
    """The share of the time of an encoder's layer that oneDNN's products save at least."""
    return 0.03 if processor.on_intel() else 0.15


def pack(weight: Tensor, rows: int = 16) -> Tensor:
    """Return weight (N, K) fp32 in oneDNN's layout, a copy that only `linear` can read.

    Args:
        weight: (N, K) fp32 on the CPU.
        rows: the number of rows of x to lay out for; any other number works too.
    """
    return torch.ops.mkldnn._reorder_linear_weight.default(weight.detach().contiguous(), rows)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Return x (..., K) fp32 times weight (N, K) transposed plus bias (N,), by oneDNN.

    Differs from `linear_reference` by fp32 rounding. What comes behind costs a pass over memory less: gelu at 128 x 512
    x 1,024 33 us, by itself 83; the sum at 128 x 256 x 512 5 us, by itself 16.

    Args:
        weight: plain, or the result of `pack`.
        activation: gelu, gelu_tanh, relu or silu, for that of the result.
        residual: (..., N), to be added to the result; not with an activation.
    """
    # oneDNN reads a bias as if its elements lay side by side.
    bias = None if bias is None else bias.contiguous()
    if residual is not None:
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, weight, bias, "add")
    name, algorithm = _ACTIVATIONS[activation]
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, name, [], algorithm)


def linear_into(
    y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> None:
    """Write `linear(x, weight, bias, activation)` to y (..., N), contiguous.

    oneDNN's operators return fresh memory; some rows at a time it stays in the cache, and the copies cost next to
    nothing (2,048 x 1,024 x 4,096: 81 ms, at once 85 ms).
    """
    target, rows = y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
    step = max(CHUNK_ROWS, CHUNK // (4 * y.shape[-1]))
    for start in range(0, len(rows), step):
        target[start : start + step] = linear(rows[start : start + step], weight, bias, activation)
