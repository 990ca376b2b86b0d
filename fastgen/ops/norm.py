"""Fused residual, bias and normalisation: the operations between two matrix products.

The kernel runs one program per row. It reads each input and writes each output once, where torch
launches one kernel each for the bias, the residual and the three to six steps of a normalisation.

Sources: Wang et al. 2021 (LightSeq), section 2.1 (fused layer normalisation); Zhang and Sennrich
2019 (RMSNorm).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fastgen.ops.dispatch import constexpr, jit, launch, power_of_two, tl, use_triton

CHUNK = 2**21
"""Elements that a CPU normalises at a time."""

WIDEST = 16 * 1024
"""Longest row that a program of the kernel holds."""


class NormParameters(NamedTuple):
    """The parameters of `ops.norm.norm`."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    rms: bool = False
    offset: float = 0.0


def norm_reference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    added: Tensor | None = None,
    rms: bool = False,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the normalisation of x + added + residual, and that sum.

    Args:
        x: (..., D) floating point. Not modified.
        weight: (D,), the scale of the normalisation; None for 1.
        bias: (D,), the shift of the normalisation; None for 0.
        eps: added to the variance, or to the mean square.
        residual: (..., D) of x's shape and dtype, or None.
        added: (D,), the bias of the linear layer that produced x, or None.
        rms: divide by the root of the mean square (RMSNorm) instead of subtracting the mean first
            (LayerNorm).
        offset: the scale is weight + offset; 1 for weights of Gemma and Nemotron, which are
            differences from one.

    Returns:
        normalised, total: of x's shape and dtype; total is x itself if nothing is added.
    Numerics: the sum has the dtype of x; everything after it is fp32 (fp64 for fp64). RMSNorm
    without an offset rounds to the dtype of x before the weight, and LayerNorm rounds the sum of
    weight and offset, as transformers' modules do.
    """
    total = x if added is None else x + added
    total = total if residual is None else total + residual
    dtype = x.dtype
    wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32
    scale = weight
    if weight is not None and offset:
        scale = (weight.to(wide) if rms else weight) + offset
    if not rms and dtype is wide:
        return torch.layer_norm(total, x.shape[-1:], scale, bias, eps), total
    if not rms:
        scale, shift = (None if p is None else p.to(wide) for p in (scale, bias))
        return torch.layer_norm(total.to(wide), x.shape[-1:], scale, shift, eps).to(x.dtype), total
    if dtype is wide:
        normalised = _rms_norm(total, scale, eps)
    else:
        normalised = torch.mul(
            total, total.to(wide).pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()
        )
        if scale is not None:
            normalised = normalised.mul_(scale) if offset else normalised.to(x.dtype).mul_(scale)
        normalised = normalised.to(x.dtype)
    return normalised if bias is None else normalised.add_(bias), total


def _rms_norm(x: Tensor, scale: Tensor | None, eps: float) -> Tensor:
    """Apply RMSNorm with one intermediate tensor, on a CPU in chunks of rows that fit the cache.

    The result equals that of transformers' modules bit by bit; they use four intermediate tensors
    (16,384 x 1,024 fp32: 6.4 against 34 ms; 2,048 x 768: 0.4 against 0.8 ms; 2 cores).
    """
    if x.device.type != "cpu" or x.numel() <= CHUNK:
        return _scaled(x, scale, eps)
    normalised = torch.empty_like(x, memory_format=torch.contiguous_format)
    step = max(1, CHUNK // x.shape[-1])
    for part, target in zip(
        *(t.reshape(-1, x.shape[-1]).split(step) for t in (x, normalised)), strict=True
    ):
        _scaled(part, scale, eps, target)
    return normalised


def _scaled(x: Tensor, scale: Tensor | None, eps: float, target: Tensor | None = None) -> Tensor:
    normalised = torch.mul(x, x.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_(), out=target)
    return normalised if scale is None else normalised.mul_(scale)


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    added: Tensor | None = None,
    rms: bool = False,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the normalisation of x + added + residual, and that sum.

    Arguments as `norm_reference`. Traffic: one read of each input, one write of each output.

    Raises:
        ValueError: the shapes do not fit the kernel; the message holds them.
        RuntimeError: the shapes do not fit; raised by torch where it runs the reference.
    """
    supported = lambda: (  # noqa: E731
        x.dtype != torch.float64
        and x.shape[-1] <= WIDEST
        and all(t is None or t.is_contiguous() for t in (x, weight, bias, residual, added))
        and (residual is None or residual.dtype == x.dtype)
    )
    if not use_triton("norm", supported, x, weight, bias, residual, added):
        return norm_reference(x, weight, bias, eps, residual, added, rms, offset)
    d = x.shape[-1]
    operands = {"weight": weight, "bias": bias, "residual": residual, "added": added}
    if any(
        t is not None and t.shape != (x.shape if name == "residual" else (d,))
        for name, t in operands.items()
    ):
        shapes = ", ".join(
            f"{name} {tuple(tensor.shape)}"
            for name, tensor in operands.items()
            if tensor is not None
        )
        raise ValueError(f"{shapes} do not fit x {tuple(x.shape)}")
    adds = added is not None or residual is not None
    normalised = torch.empty_like(x)
    total = torch.empty_like(x) if adds else x
    pointers = [x if t is None else t for t in (weight, bias, residual, added)]
    block = power_of_two(d)
    launch(
        _norm_kernel, (x.numel() // d,), x, *pointers, normalised, total, d, eps, offset,
        BLOCK=block, WEIGHT=weight is not None, BIAS=bias is not None,
        RESIDUAL=residual is not None, ADDED=added is not None, RMS=rms, OFFSET=offset != 0,
        num_warps=min(16, max(1, block // 256)),
    )  # fmt: skip
    return normalised, total


@jit()
def _norm_kernel(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, added_ptr, normalised_ptr, total_ptr, dims, eps,
    offset, BLOCK: constexpr, WEIGHT: constexpr, BIAS: constexpr, RESIDUAL: constexpr,
    ADDED: constexpr, RMS: constexpr, OFFSET: constexpr,
):  # fmt: skip
    """Sum, normalise, scale and shift one row."""
    row = tl.program_id(0).to(tl.int64) * dims
    dim = tl.arange(0, BLOCK)
    inside = dim < dims
    total = tl.load(x_ptr + row + dim, mask=inside, other=0.0)
    dtype = total.dtype
    total = total.to(tl.float32)
    if ADDED:
        total = (
            (total + tl.load(added_ptr + dim, mask=inside, other=0.0).to(tl.float32))
            .to(dtype)
            .to(tl.float32)
        )
    if RESIDUAL:
        other = tl.load(residual_ptr + row + dim, mask=inside, other=0.0).to(tl.float32)
        total = (total + other).to(dtype).to(tl.float32)
    if ADDED or RESIDUAL:
        tl.store(total_ptr + row + dim, total.to(dtype), mask=inside)
    store_normalised(
        normalised_ptr + row, total, weight_ptr, bias_ptr, dim, inside, dims, eps, offset, WEIGHT,
        BIAS, RMS, OFFSET,
    )  # fmt: skip


@jit()
def store_normalised(
    normalised_ptr, total, weight_ptr, bias_ptr, dim, inside, dims, eps, offset, WEIGHT: constexpr,
    BIAS: constexpr, RMS: constexpr, OFFSET: constexpr,
):  # fmt: skip
    """Normalise, scale and shift a row in fp32, 0 beyond its end, and store it."""
    dtype = normalised_ptr.dtype.element_ty
    if not RMS:
        total = tl.where(inside, total - tl.sum(total, 0) / dims, 0.0)
    result = total * tl.rsqrt(tl.sum(total * total, 0) / dims + eps)
    if RMS and not OFFSET:
        result = result.to(dtype).to(tl.float32)
    if WEIGHT:
        scale = tl.load(weight_ptr + dim, mask=inside, other=0.0).to(tl.float32) + offset
        if OFFSET and not RMS:
            scale = scale.to(dtype).to(tl.float32)
        result *= scale
    if BIAS:
        result += tl.load(bias_ptr + dim, mask=inside, other=0.0).to(tl.float32)
    tl.store(normalised_ptr + dim, result.to(dtype), mask=inside)
