"""Activation functions of a live model that work in the memory of the linear layer before them."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastgen.models.routing.instance import Routed, untouched
from fastgen.ops.activation import activation_, kind_of

_MARK = "_fastgen_unshared"


def hand_over(x: Tensor) -> Tensor:
    """Mark the fresh output of a linear layer as one that its activation function may overwrite."""
    setattr(x, _MARK, True)
    return x


class Activation(Routed):
    """The forward of an activation function while it is routed: in place on marked tensors, its own on all others."""

    def __init__(self, module: nn.Module, kind: str) -> None:
        super().__init__(module)
        self.kind = kind

    def __call__(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and getattr(x, _MARK, False):
            return activation_(x, self.kind)
        return type(self.module).forward(self.module, x)


_kinds: dict[object, str | None] = {}


def kind(function: Any) -> str | None:
    """The kind of an activation function, or of a module that is one; None where it is none of those known.

    It is known by its values, which are looked at again when a module's class or what it holds has changed.
    """
    if not isinstance(function, nn.Module):
        key, call = function, function
    else:
        if function._parameters or function._buffers or function._modules:
            return None
        own = type(function).forward
        held = tuple(
            (name, value)
            for name, value in vars(function).items()
            if name[0] != "_" and name != "forward"
        )
        key, call = (type(function), own, held), functools.partial(own, function)
    try:
        if key not in _kinds:
            _kinds[key] = kind_of(call)
        return _kinds[key]
    except TypeError:  # it holds what cannot be looked up
        return kind_of(call)


def pairs(
    modules: Iterable[nn.Module], names: Sequence[tuple[str, str]]
) -> Iterator[tuple[nn.Module, nn.Module, str]]:
    """Yield (linear layer, activation function behind it, kind), by their names in one module.

    Only in modules that transformers itself defines: in a user's own class somebody else may read the layer's output.
    """
    for parent in modules:
        if not type(parent).__module__.startswith("transformers."):
            continue
        for before, behind in names:
            layer, function = parent._modules.get(before), parent._modules.get(behind)
            if layer is None or function is None or not untouched(function):
                continue
            found = kind(function)
            if found is not None:
                yield layer, function, found
