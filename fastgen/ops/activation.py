"""Activation functions in the memory of their input.

After a linear layer nobody else reads the layer's output, so that it need not be kept: for a long prompt or source that
saves a pass over fresh memory, which the system hands out page by page (44 ms for 2,048 x 4,096 fp32 where 2.5 ms of
arithmetic are to be done, on a virtual machine of two cores).
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


def activation_reference(x: Tensor, kind: str) -> Tensor:
    """Return the activation function `kind` (gelu, gelu_tanh, relu, silu) of x, of any shape."""
    return _FUNCTIONS[kind](x)


def activation_(x: Tensor, kind: str) -> Tensor:
    """Replace x by the activation function `kind` of it and return it; equal to `activation_reference` bit by bit."""
    if kind == "relu":
        return torch.relu_(x)
    if kind == "silu":
        return F.silu(x, inplace=True)
    return torch.ops.aten.gelu.out(x, approximate="tanh" if kind == "gelu_tanh" else "none", out=x)


def kind_of(function: Callable[[Tensor], Tensor]) -> str | None:
    """Say which activation function a function is, by its values; None when it is none of them.

    Forms that differ by rounding alone, such as the tanh approximation of gelu written in Python, count as the same.
    """
    probe = torch.cat([torch.linspace(-8, 8, 257), torch.tensor([-1e4, -50.0, -20.0, 20.0, 50.0, 1e4])])
    try:
        values = function(probe.clone())
    except (RuntimeError, TypeError, ValueError):
        return None
    return next(
        (
            kind
            for kind in _FUNCTIONS
            if values.shape == probe.shape
            and values.dtype == probe.dtype
            and torch.allclose(values, activation_reference(probe, kind), atol=2e-6, rtol=1e-6)
        ),
        None,
    )
