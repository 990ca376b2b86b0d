"""Activation functions of a live model that work in the memory of the linear layer before them."""

from collections.abc import Iterable, Iterator, Sequence
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from fastgen.models.instance import Routed, untouched
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
        if getattr(x, _MARK, False):
            return activation_(x, self.kind)
        return type(self.module).forward(self.module, x)


_kinds: "WeakKeyDictionary[nn.Module, str | None]" = WeakKeyDictionary()


def pairs(modules: Iterable[nn.Module], names: Sequence[tuple[str, str]]) -> Iterator[tuple[nn.Module, nn.Module, str]]:
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
            if function not in _kinds:
                stateless = not any(True for _ in function.parameters()) and not any(True for _ in function.buffers())
                _kinds[function] = kind_of(function) if stateless else None
            kind = _kinds[function]
            if kind is not None:
                yield layer, function, kind
