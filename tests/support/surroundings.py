"""Surroundings of a call: process-wide settings, and changes to a model between two calls.

Each is a context manager that takes a model and a random number generator, and restores everything
when it exits.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

Surrounding = Callable[[Any, Random], AbstractContextManager[None]]


def _layer(model: Any, r: Random) -> tuple[nn.Module, str, nn.Linear]:
    """Return a linear layer's parent module, its name there, and the layer."""
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    # GPT-2 has no linear layer except its head
    return r.choice(found) if found else (model, "", nn.Linear(1, 1))


@contextmanager
def setting(change: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    """Give a process-wide setting a value, and restore it."""
    change(value)
    try:
        yield
    finally:
        change(before)


def default_dtype(_: Any, r: Random) -> AbstractContextManager[None]:
    dtype = r.choice([torch.float32, torch.float64, torch.bfloat16])
    return setting(torch.set_default_dtype, dtype, torch.get_default_dtype())


@contextmanager
def default_device(_: Any, r: Random) -> Iterator[None]:
    with torch.device(r.choice(["cpu", "meta"])):
        yield


def deterministic(_: Any, __: Random) -> AbstractContextManager[None]:
    return setting(torch.use_deterministic_algorithms, True, False)


@contextmanager
def grad_mode(_: Any, r: Random) -> Iterator[None]:
    with r.choice([torch.inference_mode, torch.enable_grad, torch.no_grad])():
        yield


@contextmanager
def hook(model: Any, r: Random) -> Iterator[None]:
    layer = _layer(model, r)[2]
    if r.random() < 0.5:
        handle = layer.register_forward_hook(lambda _, __, output: output * -1.5)
    else:
        handle = layer.register_forward_pre_hook(lambda _, args: (args[0] * -1.5, *args[1:]))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def forward(model: Any, r: Random) -> Iterator[None]:
    layer = _layer(model, r)[2]
    own = layer.forward
    layer.forward = lambda x: own(x) * -1.5
    try:
        yield
    finally:
        del layer.forward


@contextmanager
def function(_: Any, r: Random) -> Iterator[None]:
    owner, name = r.choice(
        [(nn.Linear, "forward"), (nn.functional, "scaled_dot_product_attention")]
    )
    own = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: own(*args, **kwargs) * -1.5)
    try:
        yield
    finally:
        setattr(owner, name, own)


class Adapted(nn.Module):
    """A linear layer with a low-rank product added, as in adapters."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        numbers = torch.Generator().manual_seed(0)
        options: dict[str, Any] = {
            "dtype": layer.weight.dtype,
            "device": "cpu",
            "generator": numbers,
        }
        self.down = nn.Parameter(torch.randn(2, layer.in_features, **options), requires_grad=False)
        self.up = nn.Parameter(torch.randn(layer.out_features, 2, **options), requires_grad=False)

    @property
    def weight(self) -> Tensor:
        return self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.down.T @ self.up.T


@contextmanager
def adapter(model: Any, r: Random) -> Iterator[None]:
    parent, name, layer = _layer(model, r)
    if name:
        setattr(parent, name, Adapted(layer).eval())
    try:
        yield
    finally:
        if name:
            setattr(parent, name, layer)


@contextmanager
def weight(model: Any, r: Random) -> Iterator[None]:
    """Write to, replace or swap a weight, and restore it."""
    layer = _layer(model, r)[2]
    own, how = layer.weight, r.choice(["written", "exchanged", "swapped"])
    before = own.detach().clone()
    if how == "written":
        own.data.mul_(-1.5)
    elif how == "exchanged":
        layer.weight = nn.Parameter(before * -1.5, requires_grad=own.requires_grad)
    else:
        other = nn.Parameter(before * -1.5, requires_grad=own.requires_grad)
        torch.utils.swap_tensors(own, other)
    try:
        yield
    finally:
        if how == "exchanged":
            layer.weight = own
        elif how == "swapped":
            torch.utils.swap_tensors(own, other)
        else:
            own.data.copy_(before)


SURROUNDINGS: dict[str, Surrounding] = {
    made.__name__: made
    for made in (
        default_dtype, default_device, deterministic, grad_mode, hook, forward, function, adapter,
        weight,
    )
}  # fmt: skip
