"""Products with packed weights in C."""

from typing import NamedTuple

import torch
from torch import Tensor

from fastgen.ops import native
from fastgen.ops.native import Library

NUMBERS, BYTES, BYTES_AT_ONCE = range(3)
"""Codes of how a weight is stored and multiplied, as in product.h."""


def packed(by: Library, weight: Tensor) -> Tensor:
    """Return weight (N, K), of one of `DTYPES`, packed for `product`.

    Returns:
        (P, K, W): P panels of W outputs, the last one padded with zeros. In bf16
        (P, ceil(K / 2), W, 2), where zeros pad an odd K.
    """
    (outputs, inputs), pair = weight.shape, _inputs_together(weight.dtype)
    if (
        pair == 2
        and inputs % 2 == 0
        and weight.is_contiguous()
        and weight.storage_offset() % 2 == 0
    ):
        pairs = packed(
            by, weight.detach().view(torch.int32)
        )  # moves both numbers at once, twice as fast
        return pairs.view(weight.dtype).unflatten(2, (by.panel, 2))
    full, width = outputs // by.panel, by.panel
    padded = padded_inputs(inputs, weight.dtype)
    panels = weight.new_empty(-(-outputs // width), padded // pair, width, pair)
    for i in range(pair):
        part, of = panels[..., i], weight[:, i::pair]
        part[:full, : of.shape[1]].copy_(
            of[: full * width].unflatten(0, (full, width)).transpose(1, 2)
        )
        if full < len(panels):
            part[full].zero_()[: of.shape[1], : outputs - full * width] = of[full * width :].t()
        part[:, of.shape[1] :] = 0
    return panels if pair > 1 else panels.squeeze(3)


def _inputs_together(dtype: torch.dtype) -> int:
    """Return how many inputs of an output lie side by side in a packed weight, as in product.c."""
    return 2 if dtype == torch.bfloat16 else 1


def padded_inputs(inputs: int, dtype: torch.dtype) -> int:
    """Return the inputs of a packed weight, with those that pad it."""
    together = _inputs_together(dtype)
    return -(-inputs // together) * together


class Int8Weight(NamedTuple):
    """A weight (N, K) in bytes, in the layout of products in C.

    Attributes:
        panels: (P, G, W, 4) int8: P panels of W outputs, G groups of four inputs; padded with
            zeros.
        scales: (P * W,) fp32, by which the bytes of each output are multiplied.
        sums: (P * W,) int32, the sum of the bytes of each output.
        outputs: N.
        inputs: K.
    """

    panels: Tensor
    scales: Tensor
    sums: Tensor
    outputs: int
    inputs: int

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.panels.nbytes + self.scales.nbytes + self.sums.nbytes


def packed_bytes(by: Library, values: Tensor, scales: Tensor) -> Int8Weight:
    """Return a weight in bytes packed for `product`.

    Args:
        values: (N, K) int8, none of them -128.
        scales: (N,) fp32.
    """
    outputs, inputs = values.shape
    count, width, groups = -(-outputs // by.panel), by.panel, -(-inputs // 4)
    padded = values.new_zeros(count * width, 4 * groups)
    padded[:outputs, :inputs] = values
    padded_scales = scales.new_zeros(count * width)
    padded_scales[:outputs] = scales
    panels = padded.view(count, width, groups, 4).transpose(1, 2).contiguous()
    sums = padded.sum(1, dtype=torch.int32)
    return Int8Weight(panels, padded_scales, sums, outputs, inputs)


def kind_of(by: Library, weight: "Tensor | Int8Weight") -> int:
    """Return the code of how a packed weight is multiplied."""
    if isinstance(weight, Tensor):
        return NUMBERS
    return BYTES_AT_ONCE if by.can_dot else BYTES


def byte_row(inputs: int) -> int:
    """Return the bytes that a row of `inputs` numbers takes when it is rounded to bytes."""
    return -(-inputs // 4) * 4 + 4


def product(
    by: Library,
    x: Tensor,
    panels: Tensor | Int8Weight,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    out: Tensor,
) -> Tensor:
    """Compute x times a packed weight plus bias, with a fused activation and residual.

    Sums are fp32. In half precision, the result of each operation is rounded to the dtype of x, as
    those of separate operations are. With a weight in bytes, each row of x is rounded to bytes,
    too, and sums are int32.

    Args:
        x: (..., K), of the weight's dtype, unless that is in bytes.
        panels: (P, K, W), or (P, ceil(K / 2), W, 2) in bf16, a weight that is `packed`; or one in
            bytes.
        bias: (N,), or None.
        activation: an activation function of `ACTIVATIONS`, applied to the result; or None.
        residual: of out's shape, added after the activation; or None.
        out: (..., N), contiguous.

    Returns:
        out.
    """
    outputs, inputs = out.shape[-1], x.shape[-1]
    if x.dim() != 2 or x.stride(1) != 1:
        x = x.reshape(-1, inputs).contiguous()
    bias = None if bias is None else bias.contiguous()
    residual = None if residual is None else residual.contiguous()
    code = native.DTYPES[out.dtype]
    if out.dtype == torch.float32:
        _product(by, x, panels, bias, activation, residual, out, code)
        return out
    # C reads and writes activations as fp32: convert some rows at a time.
    written = out.view(-1, outputs)
    for start in range(0, len(x), native.CONVERTED_ROWS):
        part = slice(start, start + native.CONVERTED_ROWS)
        given = x[part].float()
        added = None if residual is None else residual.view(-1, outputs)[part].float()
        made = given.new_empty(len(given), outputs)
        _product(by, given, panels, bias, activation, added, made, code)
        written[part] = made
    return out


def _product(
    by: Library,
    x: Tensor,
    weight: Tensor | Int8Weight,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    out: Tensor,
    code: int,
) -> None:
    (rows, inputs), outputs = x.shape, out.shape[-1]
    threads = native.threads_for(rows * inputs * outputs)
    added = [None if each is None else each.data_ptr() for each in (bias, residual)]
    numbers = rows, outputs, inputs, x.stride(0), native.ACTIVATIONS[activation], code
    if isinstance(weight, Tensor):
        by.product(
            by.run, threads, out.data_ptr(), x.data_ptr(), weight.data_ptr(), *added, *numbers
        )
        return
    scratch = torch.empty(rows * byte_row(inputs) // 4, dtype=torch.int32, device="cpu")
    by.product_of_bytes(
        by.run, threads, out.data_ptr(), x.data_ptr(), weight.panels.data_ptr(),
        weight.scales.data_ptr(), weight.sums.data_ptr(), *added, scratch.data_ptr(), *numbers,
        kind_of(by, weight),
    )  # fmt: skip
