"""A mixture of experts in a decode step: it runs as a module, or in C from its weights."""

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fastgen import config
from fastgen.models.layers.linear import Packable
from fastgen.models.layers.norm import NormLike
from fastgen.models.state import CachedState, cached_state_of, state_of
from fastgen.ops import native


class ExpertWeight:
    """The weights of all experts, as `packed_weights` reads a layer.

    Args:
        experts: The module that has the weights.
        name: Name of the parameter (E, N, K).
    """

    bias = None

    def __init__(self, experts: nn.Module, name: str) -> None:
        self._experts, self.name = weakref.ref(experts), name

    @property
    def _parameters(self) -> dict[str, Any]:
        experts = self._experts()
        return {} if experts is None else experts._parameters

    @property
    def weight(self) -> Any:
        return self._parameters.get(self.name)

    def modules(self) -> Iterator[Any]:
        """Yield the module that has the weights, and its submodules, as `nn.Module.modules`."""
        experts = self._experts()
        return iter((self,)) if experts is None else experts.modules()


class ExpertWeights(CachedState):
    """The weights of one module of experts that C reads, by name."""

    def __init__(self) -> None:
        self.by_name: dict[str, ExpertWeight] = {}


def weights_of(module: nn.Module) -> Sequence[ExpertWeight]:
    """Return the weights of a module of experts that C has read."""
    kept = cached_state_of(module, ExpertWeights)
    return () if kept is None else tuple(kept.by_name.values())


def forget(module: nn.Module) -> None:
    """Drop the packed weights of a module of experts."""
    if cached_state_of(module, ExpertWeights) is not None:
        state_of(module).drop(ExpertWeights)


class ExpertProducts(Packable):
    """The products of all experts with one of their weights, which only C computes.

    Args:
        experts: The module that has the weights.
        name: Name of the parameter (E, N, K), or (E, K, N) if they are transposed.
        transposed: Whether they are.
    """

    def __init__(self, experts: nn.Module, name: str, transposed: bool = False) -> None:
        by_name = state_of(experts).of(ExpertWeights).by_name
        self.module: Any = by_name.setdefault(name, ExpertWeight(experts, name))
        self.weight_name = name
        self.transposed = transposed
        self.count, outputs, self.inputs = self._plain.shape
        self.each, self.outputs = outputs, self.count * outputs
        self.dtype = self.module.weight.dtype
        self.entry = None
        self.always = config.settings().linear == "packed"

    def in_panels(self, rows: int = 1) -> Any:
        """Return the weights as C reads them for this many rows; None where they are not packed."""
        return self._copy(self.module.weight, self._plain, rows)

    @property
    def _plain(self) -> Tensor:
        weight = self.module.weight
        return weight.transpose(1, 2) if self.transposed else weight


def is_plain(weight: Tensor) -> bool:
    """Return whether the weights of experts can be packed."""
    return (
        type(weight) is nn.Parameter
        and weight.dtype in native.DTYPES
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and not weight.is_inference()
    )


@functools.cache
def is_clamped(gate: Callable[[Any, Tensor], Tensor], slope: float, limit: float) -> bool:
    """Return whether a function of experts computes a clamped gate, by the values it computes.

    It maps pairs of a gate g and a value u to min(g, limit) * sigmoid(slope * g) * (u + 1), with u
    limited to both sides.

    Args:
        gate: Maps the experts and the outputs (R, 2 * F) of their first product to (R, F).
        slope: Attribute `alpha` of the experts.
        limit: Attribute `limit` of the experts.
    """
    pairs = torch.linspace(-2 * limit, 2 * limit, 62, dtype=torch.float32, device="cpu")
    pairs = pairs[torch.arange(62, device="cpu", dtype=torch.int64) * 23 % 62].view(1, -1)
    g, u = pairs[:, ::2].clamp(max=limit), pairs[:, 1::2].clamp(-limit, limit)
    try:
        found = gate(SimpleNamespace(alpha=slope, limit=limit), pairs)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False
    expected = g * torch.sigmoid(slope * g) * (u + 1)
    return found.shape == expected.shape and torch.allclose(found, expected, atol=1e-5)


@dataclass(frozen=True)
class Routing:
    """Parameters of a mixture of experts that the C implementation reads.

    Attributes:
        router: Weight of the router (E, C); its logits choose the experts of each row.
        chosen: Experts per row, K.
        normalised: Whether the weights of the chosen experts, which are their scores, are divided
            by their sum.
        rounded: Whether those weights are rounded to the model's dtype.
        precise: Whether logits are not rounded to the model's dtype.
        sigmoid: Whether scores are the sigmoid of each logit, not the softmax of all.
        correction: (E,) fp32, added to scores for the choice only; None for none.
        groups: Number of groups of experts, how many of them are kept, and how many of their scores
            (1 or 2) count; 1 group for no groups.
        factor: Factor of the weights.
        activation: Kind of activation of the gate, as in `ops.activation`; None for a clamped one.
        up: Products of the gates and of what they multiply, F outputs each.
        down: The output projections.
        router_bias: (E,), added to the logits; None for none.
        up_bias: (E, 2 * F), that of `up`; None for none.
        down_bias: (E, C), that of `down`; None for none.
        clamp: Slope and limit of a clamped gate (`is_clamped`), for which outputs of `up` are pairs
            of a gate and what it multiplies; None for gates in one half of the outputs.
        shared: Gate, up and down of an expert that all rows share; empty for none.
        shared_gate: (1, C), whose sigmoid multiplies the shared expert's output; None for none.
        norm: Norm of the mixture's output; None for none.
        margin: If given, the weight of an expert is the softmax of the logits that belong to no
            expert chosen before it, and that are at most this much below its own, relative to the
            larger of it and their absolute values.
    """

    router: Tensor
    chosen: int
    normalised: bool
    rounded: bool
    precise: bool
    sigmoid: bool
    correction: Tensor | None
    groups: tuple[int, int, int]
    factor: float
    activation: str | None
    up: ExpertProducts
    down: ExpertProducts
    router_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    clamp: tuple[float, float] | None = None
    shared: tuple[Any, ...] = ()
    shared_gate: Tensor | None = None
    norm: NormLike | None = None
    margin: float | None = None


@dataclass(frozen=True)
class Experts:
    """A mixture of experts.

    Attributes:
        module: The mixture. It maps (R, 1, C) to the same shape, or to a tuple that begins with it.
        routing: What C needs to run it; None where C does not implement it.
    """

    module: nn.Module
    routing: Routing | None = None

    def __call__(self, x: Tensor, layer: int, context: Any) -> Tensor:
        mixed = self.module(x[:, None])
        return (mixed[0] if isinstance(mixed, tuple) else mixed).reshape(x.shape)
