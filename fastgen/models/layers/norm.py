"""Norms of fused decode steps, and routing of a live model's RMSNorm modules to `ops.norm`.

A routed RMSNorm makes one pass over memory, where transformers' makes four to six.
"""

import copy
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fastgen.models.routing.instance import Routed, untouched
from fastgen.models.state import CachedState, process_state
from fastgen.ops.norm import NormParameters, norm, norm_reference


class NormLike(Protocol):
    """A norm of the sum of two tensors (..., C)."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the normed sum and the sum."""
        ...


def unnormed(x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the sum twice: the stand-in for an absent norm."""
    total = x if residual is None else x + residual
    return total, total


@dataclass(frozen=True)
class ModuleNorm:
    """A norm computed by its module's own forward."""

    module: nn.Module

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        return type(self.module).forward(self.module, total), total


@dataclass(frozen=True)
class ConstantScale:
    """A constant factor in place of a norm of a sublayer's output."""

    factor: float

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        return total * self.factor, total


@dataclass(frozen=True)
class Norm:
    """LayerNorm or RMSNorm, with the parameters of `ops.norm`."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    rms: bool = False
    offset: float = 0.0

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the normed sum and the sum."""
        return norm(x, self.weight, self.bias, self.eps, residual, rms=self.rms, offset=self.offset)

    @property
    def parameters(self) -> NormParameters:
        """The parameters, for operations that include the norm."""
        return NormParameters(self.weight, self.bias, self.eps, self.rms, self.offset)


_EPS = ("variance_epsilon", "eps")  # attribute names in transformers' classes


class RMSNorm(Routed):
    """Routed forward of one RMSNorm.

    Attributes:
        eps: Added to the mean square.
        offset: 1 where the weight is stored as the difference from one, else 0.
    """

    def __init__(self, module: nn.Module, eps: float, offset: float) -> None:
        super().__init__(module)
        self.eps, self.offset = eps, offset

    def __call__(self, hidden_states: Tensor) -> Tensor:
        weight = self.module.weight
        if torch.compiler.is_compiling():
            return type(self.module).forward(self.module, hidden_states)
        if (
            hidden_states.dtype != weight.dtype
            or hidden_states.dtype == torch.float64
            or torch.is_grad_enabled()
        ):
            return type(self.module).forward(self.module, hidden_states)
        return norm(hidden_states, weight, eps=self.eps, rms=True, offset=self.offset)[0]


class Offsets(CachedState):
    """Offset of each RMSNorm by class and forward, as a class's forward may be replaced.

    Attributes:
        known: 0 or 1; None for a class that computes something else.
    """

    def __init__(self) -> None:
        self.known: dict[tuple[type, object], float | None] = {}


def applies(model: nn.Module) -> bool:
    """Return whether routing a model's norms pays; transformers' norms compute fp64 in fp32."""
    weight = next(iter(model.parameters()), None)
    if weight is None:
        return False
    dtypes = {"cpu": (torch.float32,), "cuda": (torch.float32, torch.float16, torch.bfloat16)}
    return weight.dtype in dtypes.get(weight.device.type, ())


def norms(modules: Iterable[nn.Module]) -> Iterator[RMSNorm]:
    """Yield a routed forward for each unmodified RMSNorm of a transformers class."""
    for module in modules:
        if (
            _is_named_so(type(module))
            and untouched(module)
            and (found := rms_norm(module)) is not None
        ):
            yield found


def rms_norm(module: nn.Module) -> RMSNorm | None:
    """Return the forward for an RMSNorm of a transformers class; None for any other module.

    Classes are identified by the values they compute.
    """
    kind = type(module)
    if not _is_named_so(kind):
        return None
    eps = next(
        (value for name in _EPS if isinstance(value := getattr(module, name, None), float)), None
    )
    if eps is None or not _is_plain(module):
        return None
    key = kind, kind.forward
    offsets = process_state().of(Offsets).known
    if key not in offsets:
        offsets[key] = _offset(module, eps)
    offset = offsets[key]
    return None if offset is None else RMSNorm(module, eps, offset)


@functools.cache
def _is_named_so(kind: type) -> bool:
    return kind.__name__.endswith("Norm") and kind.__module__.startswith("transformers.")


def _is_plain(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    alone = len(module._parameters) == 1 and not module._modules and not module._buffers
    return alone and type(weight) is nn.Parameter and weight.dim() == 1 and not weight.is_meta


def _offset(module: nn.Module, eps: float) -> float | None:
    """Return the offset (0 or 1) of the RMSNorm a module computes; None for other modules."""
    parameter: Any = module.weight
    count, like = len(parameter), {"dtype": torch.float32, "device": parameter.device}
    weight, x = (
        torch.linspace(0.5, 1.5, count, **like),
        torch.linspace(-3, 2, 2 * count, **like).view(2, -1).sin(),
    )
    kind: Any = type(module)
    probe = copy.copy(module)
    probe._parameters = {"weight": nn.Parameter(weight)}
    with torch.no_grad():
        try:
            actual = kind.forward(probe, x)
        except (RuntimeError, TypeError, ValueError):
            return None
        for offset in (0.0, 1.0):
            expected = norm_reference(x, weight, eps=eps, rms=True, offset=offset)[0]
            if (
                actual.shape == expected.shape
                and actual.dtype == expected.dtype
                and torch.allclose(actual, expected, atol=1e-5)
            ):
                return offset
    return None
