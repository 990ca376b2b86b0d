"""Routing of a live model's linear layers to `ops.linear`, for the time of one call.

The route is an attribute of the instance, put there when a call begins and taken away when the last
concurrent call ends: no class is touched, and a model at rest is exactly what it was. Layers that are quantised,
parametrised, hooked, or already overridden keep their own forward.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fastgen import config
from fastgen.ops import linear as ops

_lock = threading.RLock()
_packed: "WeakTensorKeyDictionary" = WeakTensorKeyDictionary()


@dataclass
class _Route:
    """The layers of a model that carry a route now, and how many calls use it."""

    layers: dict[nn.Module, Any] = field(default_factory=dict)  # and the forward that the instance had, or None
    users: int = 0


_routes: dict[int, _Route] = {}


@dataclass
class _Packed:
    """A packed copy of a weight and what tells whether the weight is still the one it was made from.

    probe: some elements, compared at the start of each call to notice writes through `.data`, which no version shows.
    """

    address: int
    version: int
    probe: Tensor
    uses: int = 0
    copy: Tensor | None = None

    def is_stale(self, weight: Tensor) -> bool:
        return self.address != weight.data_ptr() or self.version != weight._version

    def probe_differs(self, weight: Tensor) -> bool:
        return not torch.equal(self.probe, _sample(weight))


def _sample(weight: Tensor) -> Tensor:
    """One element of every row and of every column."""
    matrix = weight.detach()
    return torch.cat([matrix[:, matrix.shape[1] // 2], matrix[matrix.shape[0] // 2]])


def _entry(weight: Tensor) -> _Packed:
    entry = _packed.get(weight)
    if entry is None or entry.is_stale(weight):
        entry = _Packed(weight.data_ptr(), weight._version, _sample(weight))
        with _lock:
            _packed[weight] = entry
    return entry


class _Forward:
    """The forward of one linear layer while it is routed.

    transposed: the weight is (K, N), as GPT-2's Conv1D has it.
    """

    def __init__(self, module: nn.Module, transposed: bool) -> None:
        self.module: Any = module  # as nn.Module knows no weight
        self.transposed = transposed
        self.mode = config.settings().linear
        self.entry: _Packed | None = None

    def __call__(self, x: Tensor) -> Tensor:
        module, weight = self.module, self.module.weight
        rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
        if (
            x.dtype != torch.float32
            or torch.is_grad_enabled()
            or torch.is_autocast_enabled("cpu")
            or not ops.worthwhile(rows, weight.numel())
        ):
            return type(module).forward(module, x)
        entry = self.entry
        if entry is None or entry.is_stale(weight):
            entry = self.entry = _entry(weight)
        entry.uses += 1
        if (
            entry.copy is None
            and self.mode != "plain"
            and entry.uses > 1  # a weight used once in its life is not worth the copy; the second use pays for it
            and (self.mode == "packed" or _affordable(weight))
        ):
            entry.copy = ops.pack(weight.t() if self.transposed else weight)
        if entry.copy is not None:
            return ops.linear(x, entry.copy, module.bias)
        return type(module).forward(module, x) if self.transposed else ops.linear(x, weight, module.bias)

    def __reduce__(self) -> Any:
        """A model copied or pickled while it generates gets its layers' own forward."""
        return getattr, (self.module, "forward")


def _affordable(weight: Tensor) -> bool:
    """Whether packed copies, with one of this weight, take no more memory than they leave free."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return True  # not Linux: the system does not say
    free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return packed_bytes() + 2 * 4 * weight.numel() <= free


def _is_overridden(module: nn.Module) -> bool:
    """Whether the instance has a forward that is not its class's own, which copies of a model may carry."""
    own = module.__dict__.get("forward")
    return own is not None and getattr(own, "__func__", None) is not type(module).forward


def _is_plain(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return (
        weight is not None
        and type(weight) is nn.Parameter
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and not weight.is_inference()
        and not _is_overridden(module)
        and not module._forward_hooks
        and not module._forward_pre_hooks
    )


def _linears(model: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """Yield (layer, transposed) for every linear layer that can be routed."""
    for module in model.modules():
        transposed = type(module).__name__ == "Conv1D" and hasattr(module, "nf")
        if (type(module) is nn.Linear or transposed) and _is_plain(module):
            yield module, transposed


def reason_off(model: nn.Module) -> str | None:
    """Why linear layers keep torch's own product for this model, or None when they are routed."""
    if config.settings().linear == "off":
        return "FASTGEN_LINEAR=off"
    weight = next(iter(model.parameters()), None)
    if weight is None or weight.device.type != "cpu":
        return "not on a CPU"
    if weight.dtype != torch.float32:
        return f"weights are {str(weight.dtype).removeprefix('torch.')}, not float32"
    if not ops.available():
        return "this torch has no oneDNN linear operators"
    return None


@contextmanager
def routed(model: nn.Module) -> Iterator[int]:
    """Route the linear layers of model to oneDNN while the context lasts; yields how many.

    Nested and concurrent contexts of one model share the routes, which the last one takes away.
    """
    if reason_off(model) is not None:
        yield 0
        return
    with _lock:
        route = _routes.setdefault(id(model), _Route())
        if route.users == 0:
            for module, transposed in _linears(model):
                entry = _packed.get(module.weight)
                if entry is not None and (entry.is_stale(module.weight) or entry.probe_differs(module.weight)):
                    del _packed[module.weight]
                route.layers[module] = module.__dict__.get("forward")
                module.__dict__["forward"] = _Forward(module, transposed)
        route.users += 1
    try:
        yield len(route.layers)
    finally:
        with _lock:
            route.users -= 1
            if route.users == 0:
                del _routes[id(model)]
                for module, own in route.layers.items():
                    if own is None:
                        module.__dict__.pop("forward", None)
                    else:
                        module.__dict__["forward"] = own


@dataclass(frozen=True)
class Survey:
    """What `routed` would do to a model.

    layers: how many it would route. packed: whether their weights are packed. packed_bytes: of the copies, at most.
    """

    layers: int
    packed: bool
    packed_bytes: int


def survey(model: nn.Module) -> Survey:
    """Say what `routed` would do, without doing it."""
    packed = config.settings().linear != "plain"
    with _lock:
        route = _routes.get(id(model))
        layers: list[Any] = [module for module, transposed in _linears(model) if packed or not transposed]
        layers += [] if route is None else route.layers
    weights = {id(module.weight): 4 * module.weight.numel() for module in layers}  # tied weights have one copy
    return Survey(len(layers), packed, sum(weights.values()) if packed else 0)


def packed_bytes() -> int:
    """Bytes that packed copies of weights hold now."""
    with _lock:
        return sum(4 * entry.copy.numel() for entry in _packed.values() if entry.copy is not None)


def release() -> None:
    """Drop every packed copy; the next calls make them again."""
    with _lock:
        _packed.clear()
