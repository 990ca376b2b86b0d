"""Activation functions of a live model that run in place on the output of a linear layer."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastgen.models.routing.instance import Routed, untouched
from fastgen.models.state import CachedState, process_state
from fastgen.ops.activation import activation_, kind_of

_MARK = "_fastgen_unshared"


def hand_over(x: Tensor) -> Tensor:
    """Mark the fresh output of a linear layer as one that its activation function may overwrite."""
    setattr(x, _MARK, True)
    return x


class Activation(Routed):
    """Routed forward of an activation function; runs in place on marked tensors only."""

    def __init__(self, module: nn.Module, kind: str) -> None:
        super().__init__(module)
        self.kind = kind

    def __call__(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and getattr(x, _MARK, False):
            return activation_(x, self.kind)
        return type(self.module).forward(self.module, x)


class Kinds(CachedState):
    """Kinds of activation functions by function, or by class and attributes of a module.

    Attributes:
        known: Kind as in `ops.activation`; None for an unknown function.
    """

    def __init__(self) -> None:
        self.known: dict[object, str | None] = {}


def kind(function: Any) -> str | None:
    """Return the kind of an activation function or module; None for an unknown one.

    Functions are identified by the values they compute. The result is cached by function, or by the
    module's class and attributes.
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
    kinds = process_state().of(Kinds).known
    try:
        if key not in kinds:
            kinds[key] = kind_of(call)
        return kinds[key]
    except TypeError:  # an attribute is not hashable
        return kind_of(call)


def pairs(
    modules: Iterable[nn.Module], names: Sequence[tuple[str, str]]
) -> Iterator[tuple[nn.Module, nn.Module, str]]:
    """Yield (linear layer, activation function after it, kind of activation).

    Only modules that transformers defines are considered: in a user's own class other code may read
    the layer's output.

    Args:
        modules: Modules that may contain such a pair.
        names: Names of the linear layer and the activation function within one module.
    """
    for parent in modules:
        if not type(parent).__module__.startswith("transformers."):
            continue
        for layer_name, function_name in names:
            layer, function = parent._modules.get(layer_name), parent._modules.get(function_name)
            if layer is None or function is None or not untouched(function):
                continue
            known = kind(function)
            if known is not None:
                yield layer, function, known
