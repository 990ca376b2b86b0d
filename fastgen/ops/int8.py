"""Linear layers with weights in int8, on a CPU: a quarter of the bytes of fp32, and another result.

The weights of each output, and each row of the input, are scaled so that their largest magnitude is
127, and rounded. Products and sums are integers, hence exact. A decode step of few rows takes the
time it takes to read the weights, so that fewer bytes are less time.

Source: Dettmers et al. 2022 (LLM.int8()), section 2.1: vector-wise quantization.
"""

import torch
from torch import Tensor

from fastgen.ops import native
from fastgen.ops.activation import FUNCTIONS
from fastgen.ops.dispatch import in_c, plain, select_backend, unsupported
from fastgen.ops.linear import native_for
from fastgen.ops.native import products as native_products
from fastgen.ops.native.products import Int8Weight

MOST_INPUTS = 2**17
"""Most inputs of a weight in int8: sums of their products fit int32."""

ROUNDED_AT_ONCE = 2**18
"""Elements of a weight that are rounded at once, as that takes several times their memory."""

LEAST = 1e-30
"""Rows of smaller numbers are rounded to zeros, as the reciprocal of their scale may overflow."""


def rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row to int8.

    Args:
        rows: (R, K), fp32, bf16 or fp16.

    Returns:
        values (R, K) int8, from -127 to 127; scales (R,) fp32, by which they are multiplied. The
        scale of a row is 0 if all of it is, and NaN if any of it is NaN or infinite.
    """
    rows = rows.float()
    size = rows.abs().amax(-1)
    is_zero = size < LEAST
    # A number divided by a tensor is its reciprocal times the number, which rounds twice.
    inverse = torch.where(is_zero, 0.0, torch.full_like(size, 127.0) / size)
    values = (rows * inverse[:, None]).round().nan_to_num(0.0, 0.0, 0.0).to(torch.int8)
    return values, torch.where(is_zero, 0.0, size / 127.0) + (rows * 0.0).sum(-1)


def int8_linear_reference(
    x: Tensor,
    weight: tuple[Tensor, Tensor],
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Return x times a weight in int8 plus bias.

    Args:
        x: (..., K), fp32, bf16 or fp16.
        weight: Values (N, K) and scales (N,), as `rounded` returns them.
        bias: (N,) of x's dtype, or None.
        activation: a key of `ops.activation.FUNCTIONS`, applied to the result; or None.
        residual: (..., N), added to the result; or None.

    Returns:
        (..., N) of x's dtype, to which the result of each operation is rounded.
    """
    values, scales = weight
    rows, of_rows = rounded(x.reshape(-1, x.shape[-1]))
    total = rows.double() @ values.double().t()  # exact
    y = total.float() * (of_rows[:, None] * scales)
    if bias is not None:
        y = y + bias.float()
    y = y.to(x.dtype).view(*x.shape[:-1], len(values))
    if activation is not None:
        y = FUNCTIONS[activation](y.float()).to(x.dtype)
    return y if residual is None else y + residual


def supported(outputs: int, inputs: int) -> bool:
    """Return whether C multiplies a weight (outputs, inputs) in int8."""
    return inputs <= MOST_INPUTS and native_for(outputs, inputs) is not None


def pack(weight: Tensor) -> Int8Weight | None:
    """Return a copy of a weight in int8 that only `int8_linear` can read; None if C cannot.

    Args:
        weight: (N, K) on the CPU, fp32, bf16 or fp16.
    """
    weight, by = weight.detach(), native_for(*weight.shape)
    if by is None or not supported(*weight.shape):
        return None
    outputs, inputs = weight.shape
    count, groups, width = -(-outputs // by.panel), -(-inputs // 4), by.panel
    device = weight.device
    packed = Int8Weight(
        torch.empty(count, groups, width, 4, dtype=torch.int8, device=device),
        torch.empty(count * width, dtype=torch.float32, device=device),
        torch.empty(count * width, dtype=torch.int32, device=device),
        outputs,
        inputs,
    )
    step = max(1, ROUNDED_AT_ONCE // (width * inputs))
    for start in range(0, count, step):
        panels = slice(start, start + step)
        rows = slice(start * width, (start + step) * width)
        part = native_products.packed_bytes(by, *rounded(weight[rows]))
        packed.panels[panels] = part.panels
        packed.scales[rows], packed.sums[rows] = part.scales, part.sums
    return packed


def bytes_to_pack(outputs: int, inputs: int) -> int:
    """Return the bytes that a weight (outputs, inputs) takes in int8; 0 if it is not packed."""
    by = native_for(outputs, inputs)
    if by is None or not supported(outputs, inputs):
        return 0
    return -(-outputs // by.panel) * by.panel * (-(-inputs // 4) * 4 + 8)


def unpacked(weight: Int8Weight) -> tuple[Tensor, Tensor]:
    """Return values (N, K) and scales (N,) of a packed weight."""
    values = weight.panels.transpose(1, 2).flatten(0, 1).flatten(1, 2)
    return values[: weight.outputs, : weight.inputs], weight.scales[: weight.outputs]


def int8_linear(
    x: Tensor,
    weight: Int8Weight,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Return x times a packed weight plus bias; arguments and result as `int8_linear_reference`."""
    shape = *x.shape[:-1], weight.outputs
    backend = select_backend(
        "int8_linear", unsupported, lambda: _covers(x, weight, bias, residual), x
    )
    if not in_c(backend):
        return int8_linear_reference(x, unpacked(weight), bias, activation, residual)
    return native_products.product(
        backend, x, weight, bias, activation, residual, x.new_empty(shape)
    )


def _covers(x: Tensor, weight: Int8Weight, bias: Tensor | None, residual: Tensor | None) -> bool:
    """Return whether C can read these tensors."""
    by = native.library()
    return (
        by is not None
        and weight.panels.shape[2] == by.panel
        and x.dtype in native.DTYPES
        and plain(x, None if bias is None else bias.data, residual, dtype=x.dtype)
        and x.shape[-1] == weight.inputs
        and (bias is None or bias.shape == (weight.outputs,))
        and (residual is None or residual.shape == (*x.shape[:-1], weight.outputs))
    )
