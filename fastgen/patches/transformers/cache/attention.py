"""Attention of transformers' modules over the shared cache, at the place where they look their function up."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from fastgen.models.build.introspection import is_toolkits
from fastgen.models.layers.attention import BeamAttention, layer_of

current_step: ContextVar[BeamAttention | None] = ContextVar("fastgen_step", default=None)
"""The decode step that runs in this context."""

_Function = Callable[..., tuple[Tensor, Tensor | None]]


def get_interface(
    original: Callable[..., _Function], self: Any, attn_implementation: str, default: _Function
) -> _Function:
    """Return the attention function, one that redeems tickets while a decode step runs; a user's own as it is."""
    function = original(self, attn_implementation, default)
    step = current_step.get()
    return function if step is None or not is_toolkits(function) else _Redeeming(step, function)


class _Redeeming:
    """The attention function of a decode step: over the shared cache for its tickets, the toolkit's for the rest."""

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
