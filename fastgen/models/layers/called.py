"""Layers that a fused step calls as modules: quantised layers, adapters, and layers of users."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fastgen.models.comparison import comparison
from fastgen.ops.activation import fused_activation

_SIZES = (("out_features", "in_features"), ("outfeatures", "infeatures"))
"""Attributes that hold the outputs and inputs of a layer; the last pair is that of GPTQ layers."""


class ModuleLinear:
    """The product of a layer that is called as a module, with its own forward and hooks.

    It gets the rows of a step as (R, 1, K), which is what a model's own modules pass.

    Attributes:
        module: The layer, which has `sizes_of`.
        outputs: N.
    """

    fuses = False

    def __init__(self, module: nn.Module, outputs: int) -> None:
        self.module, self.outputs = module, outputs

    def apply(
        self, x: Tensor, activation: str | None = None, residual: Tensor | None = None
    ) -> Tensor:
        y = self._run(x[:, None])[:, 0] if x.dim() == 2 else self._run(x)
        # The output may be memory of the layer, so nothing is computed in place.
        if activation is not None:
            y = fused_activation(y, activation)
        return y if residual is None else y + residual

    def _run(self, x: Tensor) -> Tensor:
        if comparison.get() is None:
            return self.module(x)
        # An equivalence check runs the layer once more than the model does.
        with Unchanged(list(self.module.modules())):
            y = self.module(x)
        if y.dtype != x.dtype:
            raise TypeError(f"a layer returns {y.dtype} for {x.dtype}")
        return y


class Unchanged:
    """Context manager that restores what modules hold.

    Raises:
        RuntimeError: An attribute, a buffer or a parameter was replaced or written to.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        own: list[dict[str, Any]] = [vars(module) for module in modules]
        self._held = [each for of in own for each in (of, of["_buffers"], of["_parameters"])]

    def __enter__(self) -> None:
        self._before = [dict(each) for each in self._held]
        self._versions = [_versions(each) for each in self._held]

    def __exit__(self, *_: object) -> None:
        is_same = True
        for held, before, versions in zip(self._held, self._before, self._versions, strict=True):
            same_objects = held.keys() == before.keys() and all(
                held[name] is value for name, value in before.items()
            )
            if not same_objects:
                held.clear()
                held.update(before)
            is_same = is_same and same_objects and _versions(held) == versions
        if not is_same:
            raise RuntimeError("a layer keeps state of its own")


def _versions(held: dict[str, Any]) -> list[int]:
    tensors = [value for value in held.values() if isinstance(value, Tensor)]
    return [tensor._version for tensor in tensors if not tensor.is_inference()]


def sizes_of(module: Any) -> tuple[int, int] | None:
    """Return the outputs and inputs of a layer that is like a linear one; None if unknown."""
    for names in _SIZES:
        outputs, inputs = (getattr(module, name, None) for name in names)
        if isinstance(outputs, int) and isinstance(inputs, int):
            return outputs, inputs
    weight = getattr(module, "weight", None)  # of a wrapper around a linear layer
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return None
    return weight.shape[0], weight.shape[1]
