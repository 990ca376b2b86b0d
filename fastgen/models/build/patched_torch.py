"""Functions of torch in whose place somebody has put others: attention libraries, quantisation tools, profilers.

fastgen computes what these functions do by its own means. Where one of them is not torch's own any more, calls run on
the toolkit's code, which looks it up.
"""

from types import BuiltinFunctionType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fastgen.models.routing.instance import is_toolkits

_LOOKED_UP: tuple[tuple[Any, str], ...] = (
    (
        F,
        "scaled_dot_product_attention linear softmax layer_norm rms_norm embedding gelu relu silu dropout",
    ),
    (
        torch,
        "matmul bmm baddbmm addmm mm softmax log_softmax relu tanh sigmoid argmax topk multinomial",
    ),
    (nn.Module, "__call__ _call_impl _wrapped_call_impl"),
    (nn.Linear, "forward"),
    (nn.LayerNorm, "forward"),
    (nn.Embedding, "forward"),
)
"""What modules of the toolkits look up when they run, and fastgen's steps and products do not."""

_PLACES = [(owner, name) for owner, names in _LOOKED_UP for name in names.split()]
_known: tuple[Any, ...] = ()  # what was found there last, and is all torch's own


def replaced() -> str | None:
    """Say which function of torch has been replaced, and by what; None where all are torch's own."""
    global _known
    now = tuple([getattr(owner, name) for owner, name in _PLACES])
    if now == _known:
        return None
    for (owner, name), found in zip(_PLACES, now, strict=True):
        if not _is_torchs_own(found):
            where = getattr(found, "__module__", None) or type(found).__module__
            by = f"{where}.{getattr(found, '__qualname__', type(found).__name__)}"
            return f"{_named(owner)}.{name} was replaced by {by}"
    _known = now
    return None


def _is_torchs_own(function: Any) -> bool:
    if type(function) is BuiltinFunctionType:
        return (function.__module__ or "").partition(".")[0] == "torch"
    return is_toolkits(function)


def _named(owner: Any) -> str:
    return (
        owner.__name__
        if not isinstance(owner, type)
        else f"{owner.__module__}.{owner.__qualname__}"
    )
