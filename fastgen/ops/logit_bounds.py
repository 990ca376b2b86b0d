"""The highest logit of each row of x, without reading most of the head's weights.

Greedy search needs one token of a step, and most tokens are far from being it. A copy of the head
in int8 has a quarter of the bytes of fp32. It gives an upper bound of each logit; only the tokens
whose bounds reach the best logit are scored by the head itself. Their scores are the same bits as
those of the full product, so that the chosen token is the same, ties included.

**The bound.** Let w be a row of the head (V, K), and ŵ = s q its copy, with q in int8. A row x is
rounded to bytes, and what that leaves is rounded again: x = h + l + d, where h = a p and l = b r
with p and r in int8. Then

    x·w = h·ŵ + l·ŵ + d·ŵ + x·(w - ŵ)

The first two terms are sums of integers, times a s and b s. By Cauchy-Schwarz, |x·(w - ŵ)| is at
most |x| e, where e = |w - ŵ| is computed when the copy is made; and |d·ŵ| is at most |d| L, where L
bounds |w| + 2 e of all rows. Norms of x, h, l and d are computed in fp64, from the bytes
themselves.

The rest is rounding in fp32, whose unit is u = 2^-24. Let M = L (|x| + |h| + |l|) + B, where B
bounds the magnitude of the bias.

- *Of the logit itself*: each of its K products passes through at most K + 4 roundings, those of the
  sums of earlier pieces and of the bias included. It therefore differs from the exact one by at
  most g (sum of |x_k w_k| + |bias|), g = n u / (1 - n u) <= 1.01 n u for n = K + 4, as K is at most
  `int8.MOST_INPUTS`; and the sum of |x_k w_k| is at most |x| |w|.
- *Of the bound*: converting an integer, multiplying the scales, and multiplying both are 3
  roundings of the first two terms. Four additions follow, each of a sum of at most 2 M.

Together they are at most 1.01 (K + 32) u M. In bf16, u is counted twice, as an instruction that
multiplies pairs of bf16 may truncate. Its flush of subnormal numbers, and scales whose product
underflows, cost at most K 2^-100 (1 + |x| + L). If M is less than 1e37, no sum overflows. So

    logit <= h·ŵ + l·ŵ + bias + |x| e + (|d| L + 1.01 (K + 32) u M + K 2^-100 (1 + |x| + L))

where the last term is the same for all tokens.

**The rounding of logits.** A logit in fp32 is that sum. In bf16 it is rounded, and different sums
may tie. Rounding is monotonic, and moves a number by at most 2^-8 of the result. So tokens are
scored whose bounds reach the best logit less 2^-8 of it, and the first of the highest rounded
logits wins.

Source: ops/native/bounds.c. Dettmers et al. 2022 (LLM.int8()), section 2.1, for the copy.
"""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from fastgen.ops import int8, native
from fastgen.ops.native import products, search

DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of a head: logits in fp16 may overflow where their bounds do not."""

LEAST_MOST, MOST_SHARE = 16, 64
"""Most candidates of a row: `LEAST_MOST`, or 1/`MOST_SHARE` of the vocabulary if that is more.

A candidate's row is read from memory in fp32, so that this share takes a 16th of the copy's time.
"""


class ErrorBounds(NamedTuple):
    """Bounds of the rounding errors of a weight's copy in int8.

    Attributes:
        errors: (N,) fp32, of the norm of each row's error.
        longest: of the norms of all rows, plus twice their errors.
    """

    errors: Tensor
    longest: float

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.errors.nbytes


def bytes_of_bounds(outputs: int) -> int:
    """Return the bytes of the `ErrorBounds` of a weight with this number of rows."""
    return 4 * outputs


def error_bounds(weight: Tensor) -> ErrorBounds | None:
    """Return bounds for the copy of a weight that `int8.pack` makes; None if it is not all finite.

    Args:
        weight: (N, K), fp32 or bf16.
    """
    weight, longest = weight.detach(), 0.0
    errors = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    step = max(1, int8.ROUNDED_AT_ONCE // weight.shape[1])
    for start in range(0, len(weight), step):
        rows = weight[start : start + step].float()
        values, scales = int8.rounded(rows)
        exact = rows.double()
        # fp64 holds products of bytes and scales exactly.
        of_rows = (exact - values.double() * scales.double()[:, None]).norm(dim=1) * (1 + 1e-6)
        errors[start : start + step] = of_rows
        size = float((exact.norm(dim=1) + 2 * of_rows).max()) * (1 + 1e-6)
        if not size < 1e37:  # NaN included
            return None
        longest = max(longest, size)
    return ErrorBounds(errors, longest)


def record_of(
    by: native.Library,
    weight: Tensor,
    copy: products.Int8Weight,
    bounds: ErrorBounds,
    bias: Tensor | None,
    counts: Tensor,
) -> search.LogitBounds | None:
    """Return the C record of a head's copy and its bounds; None if the bias is not all finite.

    Args:
        by: The native library.
        weight: The head (V, K), one of `DTYPES`, with contiguous rows.
        copy: The head in int8.
        bounds: Of `copy`.
        bias: (V,) of the head's dtype, contiguous; or None.
        counts: (3,) int64, as in `ops.native.search.LogitBounds`.
    """
    largest = 0.0 if bias is None else float(bias.detach().abs().max())
    if not largest < 1e37:
        return None
    in_bytes = search.Weight(
        copy.panels.data_ptr(), None if bias is None else bias.data_ptr(), copy.scales.data_ptr(),
        copy.sums.data_ptr(), copy.outputs, copy.inputs, products.kind_of(by, copy),
    )  # fmt: skip
    most = max(LEAST_MOST, copy.outputs // MOST_SHARE)
    return search.LogitBounds(
        in_bytes, bounds.errors.data_ptr(), weight.data_ptr(), weight.stride(0), bounds.longest,
        largest, most, counts.data_ptr(),
    )  # fmt: skip


def find_highest(
    by: native.Library,
    x: Tensor,
    record: search.LogitBounds,
    dtype: torch.dtype,
    banned: Tensor | None = None,
) -> Tensor | None:
    """Return the first of the highest logits of each row, of tokens that are not banned.

    Args:
        by: The native library.
        x: (R, K) fp32, contiguous; its values are rounded to the head's dtype.
        record: The head's copy and its bounds.
        dtype: Of the head.
        banned: (R, ceil(V / 32)) int32, a token mask; or None.

    Returns:
        (R,) int64; None if all logits are needed: too many tokens may be the best, a logit may not
        be finite, or all tokens are banned.
    """
    tokens = torch.empty(len(x), dtype=torch.int64, device="cpu")
    upper = x.new_empty(2 * len(x), record.bytes.outputs)
    found = by.find_by_bounds(
        by.run, native.threads_for(x.numel() * record.bytes.outputs), tokens.data_ptr(),
        x.data_ptr(), upper.data_ptr(), None if banned is None else banned.data_ptr(),
        ctypes.addressof(record), len(x), native.DTYPES[dtype],
    )  # fmt: skip
    return tokens if found else None
