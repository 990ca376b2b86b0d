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


_EPS_NAMES = ("variance_epsilon", "eps")  # attributes of transformers' classes
_EPS = 1e-5  # of classes without such an attribute


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


class Forms(CachedState):
    """What each norm of transformers computes, by its class, forward and parameters.

    Attributes:
        known: `rms` and `offset` of `Norm`; None for a class that computes something else.
    """

    def __init__(self) -> None:
        self.known: dict[tuple[object, ...], tuple[bool, float] | None] = {}


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
    """Return the forward for an RMSNorm of a transformers class; None for any other module."""
    found = norm_of(module)
    if found is None or not found.rms or found.weight is None or found.bias is not None:
        return None
    return RMSNorm(module, found.eps, found.offset)


def norm_of(module: nn.Module) -> Norm | None:
    """Return the LayerNorm or RMSNorm of a transformers class; None for any other module.

    Classes are identified by the values they compute.
    """
    kind, parameters = type(module), module._parameters
    if (
        not _is_named_so(kind)
        or not parameters.keys() <= {"weight", "bias"}
        or module._modules
        or module._buffers
        or not all(map(_is_vector, parameters.values()))
    ):
        return None
    found = (getattr(module, name, None) for name in _EPS_NAMES)
    eps = next((eps for eps in found if isinstance(eps, float)), _EPS)
    weight, bias = map(parameters.get, ("weight", "bias"))
    key = kind, kind.forward, weight is None, bias is None
    forms = process_state().of(Forms).known
    if key not in forms:
        forms[key] = _form(module, eps)
    form = forms[key]
    return None if form is None else Norm(weight, bias, eps, *form)


@functools.cache
def _is_named_so(kind: type) -> bool:
    return "Norm" in kind.__name__ and kind.__module__.startswith("transformers.")


def _is_vector(parameter: nn.Parameter | None) -> bool:
    return parameter is None or (
        type(parameter) is nn.Parameter and parameter.dim() == 1 and not parameter.is_meta
    )


def _form(module: Any, eps: float) -> tuple[bool, float] | None:
    """Return `rms` and `offset` (0 or 1) of the norm a module computes; None for other modules."""
    held = {name: each for name, each in module._parameters.items() if each is not None}
    if not held and not hasattr(module, "normalized_shape"):
        return None
    count = len(next(iter(held.values()))) if held else module.normalized_shape[-1]
    like = {
        "dtype": torch.float32,
        "device": next(iter(held.values())).device if held else "cpu",
    }
    x = torch.linspace(-3, 2, 2 * count, **like).view(2, -1).sin()
    x[1] *= 1e-3  # Makes eps count.
    values = {name: torch.linspace(0.5, 1.5, count, **like) for name in held}
    probe = copy.copy(module)
    probe._parameters = dict.fromkeys(module._parameters) | {
        name: nn.Parameter(value) for name, value in values.items()
    }
    weight, bias = map(values.get, ("weight", "bias"))
    with torch.no_grad():
        try:
            actual = type(module).forward(probe, x)
        except (RuntimeError, TypeError, ValueError):
            return None
        for rms, offset in ((True, 0.0), (True, 1.0), (False, 0.0), (False, 1.0)):
            expected = norm_reference(x, weight, bias, eps, rms=rms, offset=offset)[0]
            if (
                actual.shape == expected.shape
                and actual.dtype == expected.dtype
                and torch.allclose(actual, expected, atol=1e-5)
            ):
                return rms, offset
    return None
