"""Norms: what a decode step from the weights has of them, and RMSNorm modules of a live model through `ops.norm`.

The latter make one pass where transformers' own make four to six.
"""

import copy
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fastgen.models.routing.instance import Routed, untouched
from fastgen.ops.norm import norm, norm_reference


class NormLike(Protocol):
    """A norm of the sum of two tensors (..., C)."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The normed sum, and the sum."""
        ...


def unnormed(x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """In place of a norm: the sum, and the sum."""
    total = x if residual is None else x + residual
    return total, total


@dataclass(frozen=True)
class OwnNorm:
    """A norm by its module's own forward."""

    module: nn.Module

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        return type(self.module).forward(self.module, total), total


@dataclass(frozen=True)
class Times:
    """In place of a norm of a sublayer's output: a number times it."""

    factor: float

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        return total * self.factor, total


@dataclass(frozen=True)
class Norm:
    """LayerNorm, or RMSNorm; parameters as `ops.norm` has them."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    rms: bool = False
    offset: float = 0.0

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The normed sum, and the sum."""
        return norm(x, self.weight, self.bias, self.eps, residual, rms=self.rms, offset=self.offset)


_EPS = ("variance_epsilon", "eps")  # names of the attribute that transformers' classes have


class RMSNorm(Routed):
    """The forward of one RMSNorm while it is routed; offset: 1 where the weight is a difference from one."""

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


_offsets: dict[
    tuple[type, object], float | None
] = {}  # by class and its forward, which somebody may replace


def applies(model: nn.Module) -> bool:
    """Whether the norms of a model are worth routing: not in fp64, where transformers' own compute in fp32."""
    weight = next(iter(model.parameters()), None)
    if weight is None:
        return False
    dtypes = {"cpu": (torch.float32,), "cuda": (torch.float32, torch.float16, torch.bfloat16)}
    return weight.dtype in dtypes.get(weight.device.type, ())


def norms(modules: Iterable[nn.Module]) -> Iterator[RMSNorm]:
    """Yield a forward for each RMSNorm of a class of transformers' own that runs its own."""
    for module in modules:
        if (
            _is_named_so(type(module))
            and untouched(module)
            and (found := rms_norm(module)) is not None
        ):
            yield found


def rms_norm(module: nn.Module) -> RMSNorm | None:
    """The forward of an RMSNorm of a class of transformers' own, which is known by what it computes; else None."""
    kind = type(module)
    if not _is_named_so(kind):
        return None
    eps = next(
        (value for name in _EPS if isinstance(value := getattr(module, name, None), float)), None
    )
    if eps is None or not _is_plain(module):
        return None
    key = kind, kind.forward
    if key not in _offsets:
        _offsets[key] = _offset(module, eps)
    offset = _offsets[key]
    return None if offset is None else RMSNorm(module, eps, offset)


@functools.cache
def _is_named_so(kind: type) -> bool:
    return kind.__name__.endswith("Norm") and kind.__module__.startswith("transformers.")


def _is_plain(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    alone = len(module._parameters) == 1 and not module._modules and not module._buffers
    return alone and type(weight) is nn.Parameter and weight.dim() == 1 and not weight.is_meta


def _offset(module: nn.Module, eps: float) -> float | None:
    """0 or 1 where the module's class computes an RMSNorm with that offset, None where it computes anything else."""
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
            found = kind.forward(probe, x)
        except (RuntimeError, TypeError, ValueError):
            return None
        for offset in (0.0, 1.0):
            wanted = norm_reference(x, weight, eps=eps, rms=True, offset=offset)[0]
            if (
                found.shape == wanted.shape
                and found.dtype == wanted.dtype
                and torch.allclose(found, wanted, atol=1e-5)
            ):
                return offset
    return None
