"""Attention over the shared cache, installed where transformers' modules look up their function."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fastgen.models.build.introspection import is_toolkits
from fastgen.models.layers.attention import BeamAttention, layer_of
from fastgen.patches.generation_call import current

_Function = Callable[..., tuple[Tensor, Tensor | None]]


def get_interface(
    original: Callable[..., _Function], self: Any, attn_implementation: str, default: _Function
) -> _Function:
    """Return the attention function of a module.

    During a decode step the toolkit's functions are wrapped so that they resolve the placeholders
    of the shared cache. A user's own function is returned unchanged.
    """
    function = original(self, attn_implementation, default)
    step: BeamAttention | None = current.get().step
    return function if step is None or not is_toolkits(function) else _Resolving(step, function)


class _Resolving:
    """Attention function of a decode step: resolves placeholders, passes on all other keys."""

    __slots__ = ("function", "step")

    def __init__(self, step: BeamAttention, function: _Function) -> None:
        self.step, self.function = step, function

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        layer = layer_of(key)
        if layer is None:
            return self.function(module, query, key, value, attention_mask, *args, **kwargs)
        scale = kwargs.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        mixed = self.step.attend(
            query, layer, attention_mask, kwargs.get("position_bias"), scale, kwargs.get("softcap")
        )
        return mixed, None
