"""Activation functions: in place, and fused with bias and gate.

The output of a linear layer has no other consumer, so the activation can overwrite it. For a long
prompt or source this saves a pass over fresh memory, which the operating system maps page by page
(2,048 x 4,096 fp32 took 44 ms for 2.5 ms of arithmetic, on a virtual machine with two cores).
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from fastgen.ops.dispatch import cdiv, constexpr, jit, launch, tl, use_triton

BLOCK = 1024
"""Values per program of the kernel."""

FEW = 16 * 1024
"""Largest number of values for which torch's own gelu is faster than oneDNN's on a CPU."""

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square_(),
    "silu": F.silu,
}


def activation_reference(x: Tensor, kind: str) -> Tensor:
    """Return the activation function `kind` (a key of `FUNCTIONS`) of x, of any shape."""
    return FUNCTIONS[kind](x)


def activation_(x: Tensor, kind: str, exactly: bool = True) -> Tensor:
    """Replace x by the activation function `kind` of it and return it.

    Args:
        x: floating point, any shape. Modified in place.
        kind: gelu, gelu_tanh, relu, relu_squared or silu.
        exactly: if True, the result equals `activation_reference` bit by bit. If False, gelu of up
            to `FEW` contiguous fp32 values on a CPU may differ by rounding: torch passes contiguous
            inputs to oneDNN (11 us for 1,280 values) but computes strided ones itself (5 us).
    """
    if kind == "relu":
        return torch.relu_(x)
    if kind == "relu_squared":
        return torch.relu_(x).square_()
    if kind == "silu":
        return F.silu(x, inplace=True)
    approximate = "tanh" if kind == "gelu_tanh" else "none"
    few = (
        not exactly
        and kind == "gelu"
        and x.numel() <= FEW
        and x.numel() % 2 == 0
        and x.device.type == "cpu"
    )
    if few and x.dtype == torch.float32 and x.is_contiguous():
        strided = x.view(-1, 2).t()
        torch.ops.aten.gelu.out(strided, approximate=approximate, out=strided)
        return x
    return torch.ops.aten.gelu.out(x, approximate=approximate, out=x)


def fused_activation_reference(
    x: Tensor, kind: str, bias: Tensor | None = None, gate: Tensor | None = None
) -> Tensor:
    """Return activation(x + bias) * gate.

    Args:
        x: (..., D) floating point. Not modified.
        kind: gelu, gelu_tanh, relu, relu_squared or silu.
        bias: (D,), the bias of the preceding linear layer, or None.
        gate: (..., D) of x's shape, for gated feed-forward layers (Shazeer 2020), or None.

    Returns:
        (..., D) in x's dtype.
    """
    y = activation_reference(x, kind) if bias is None else activation_(x + bias, kind)
    return y if gate is None else y.mul_(gate)


def fused_activation(
    x: Tensor, kind: str, bias: Tensor | None = None, gate: Tensor | None = None
) -> Tensor:
    """Return activation(x + bias) * gate; arguments as `fused_activation_reference`.

    Traffic: one read of x and gate, one write. Source: Wang et al. 2021 (LightSeq), section 2.1.

    Raises:
        ValueError: the kind is unknown, or the shapes do not fit; the message holds them.
    """
    if kind not in FUNCTIONS:
        raise ValueError(f"kind = {kind!r} is none of {', '.join(FUNCTIONS)}")
    d = x.shape[-1] if x.dim() else 0
    if (bias is not None and bias.shape != (d,)) or (gate is not None and gate.shape != x.shape):
        operands = {"bias": bias, "gate": gate}
        shapes = ", ".join(
            f"{name} {tuple(tensor.shape)}"
            for name, tensor in operands.items()
            if tensor is not None
        )
        raise ValueError(f"{shapes} do not fit x {tuple(x.shape)}")
    supported = lambda: (  # noqa: E731
        x.dtype != torch.float64 and all(t is None or t.is_contiguous() for t in (x, bias, gate))
    )
    if not use_triton("activation", supported, x, bias, gate):
        return fused_activation_reference(x, kind, bias, gate)
    y = torch.empty_like(x)
    launch(
        _activation_kernel, (cdiv(x.numel(), BLOCK),), x, x if bias is None else bias,
        x if gate is None else gate, y, x.numel(), d, KIND=kind, BIAS=bias is not None,
        GATE=gate is not None, BLOCK=BLOCK,
    )  # fmt: skip
    return y


def kind_of(function: Callable[[Tensor], Tensor]) -> str | None:
    """Identify an activation function by its values.

    Forms that differ by rounding alone, such as the tanh approximation of gelu written in Python,
    count as the same function.

    Returns:
        gelu, gelu_tanh, relu, relu_squared or silu; None if the function is none of them.
    """
    probe = torch.cat(
        [
            torch.linspace(-8, 8, 257, dtype=torch.float32, device="cpu"),
            torch.tensor([-1e4, -50.0, -20.0, 20.0, 50.0, 1e4], dtype=torch.float32, device="cpu"),
        ]
    )
    try:
        values = function(probe.clone())
    except (RuntimeError, TypeError, ValueError):
        return None
    return next(
        (
            kind
            for kind in FUNCTIONS
            if values.shape == probe.shape
            and values.dtype == probe.dtype
            and torch.allclose(values, activation_reference(probe, kind), atol=2e-6, rtol=1e-6)
        ),
        None,
    )


@jit("count")
def _activation_kernel(
    x_ptr, bias_ptr, gate_ptr, y_ptr, count, dims, KIND: constexpr, BIAS: constexpr,
    GATE: constexpr, BLOCK: constexpr,
):  # fmt: skip
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < count
    x = tl.load(x_ptr + offset, mask=inside, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    if BIAS:
        x = (
            (x + tl.load(bias_ptr + offset % dims, mask=inside, other=0.0).to(tl.float32))
            .to(dtype)
            .to(tl.float32)
        )
    if KIND == "relu":
        y = tl.where(x < 0, 0.0, x)  # NaN stays NaN
    elif KIND == "relu_squared":
        y = tl.where(x < 0, 0.0, x * x)
    elif KIND == "silu":
        y = x * tl.sigmoid(x)
    elif KIND == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        # 0.5 * (1 + tanh(z)) = sigmoid(2z)
        y = x * tl.sigmoid(2.0 * 0.7978845608028654 * (x + 0.044715 * x * x * x))
    if GATE:
        y = y.to(dtype).to(tl.float32) * tl.load(gate_ptr + offset, mask=inside, other=0.0).to(
            tl.float32
        )
    tl.store(y_ptr + offset, y.to(dtype), mask=inside)
