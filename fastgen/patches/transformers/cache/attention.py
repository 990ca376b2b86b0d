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


_KNOWN = frozenset((
    "scaling", "softcap", "position_bias", "s_aux",
    # These change nothing: the mask holds what they say of a decode step.
    "dropout", "is_causal", "sliding_window", "position_ids", "cache_position", "use_cache",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx",
    "output_attentions", "output_hidden_states", "output_router_logits", "num_items_in_batch",
    "logits_to_keep", "return_dict",
))  # fmt: skip
"""Keywords that modules pass to their attention function, and that placeholders allow."""


def _is_known(kwargs: dict[str, Any]) -> bool:
    """Return whether attention with these keywords can be resolved."""
    return all(value is None or name in _KNOWN for name, value in kwargs.items())


class _Resolving:
    """Attention function of a decode step: resolves placeholders, passes on all other keys.

    A placeholder that is not resolved does not count as attended, so that the first step of a call
    is repeated without the shared cache.
    """

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
        if layer is None or not _is_known(kwargs):
            return self.function(module, query, key, value, attention_mask, *args, **kwargs)
        scale = kwargs.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        mixed = self.step.attend(
            query, layer, attention_mask, kwargs.get("position_bias"), scale,
            kwargs.get("softcap"), kwargs.get("s_aux"),
        )  # fmt: skip
        return mixed, None
