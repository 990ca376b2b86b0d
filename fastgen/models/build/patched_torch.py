"""Detection of torch functions that were replaced, e.g. by attention libraries or profilers.

fastgen computes what these functions do by other means. Where one of them was replaced, calls run
the toolkit's code, which uses the replacement.
"""

from types import BuiltinFunctionType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fastgen.models.routing.instance import is_toolkits
from fastgen.models.state import CachedState, process_state

_LOOKED_UP: tuple[tuple[Any, str], ...] = (
    (
        F,
        (
            "scaled_dot_product_attention linear softmax layer_norm rms_norm embedding gelu relu "
            "silu dropout"
        ),
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
"""Functions that toolkit modules look up when they run, and that fused steps bypass."""

_PLACES = [(owner, name) for owner, names in _LOOKED_UP for name in names.split()]


class Originals(CachedState):
    """The functions that the last check has found to be torch's own.

    Attributes:
        functions: In the order of `_PLACES`.
    """

    functions: tuple[Any, ...] = ()


def replaced() -> str | None:
    """Return which torch function was replaced and by what; None where all are torch's own."""
    known = process_state().of(Originals)
    now = tuple([getattr(owner, name) for owner, name in _PLACES])
    if now == known.functions:
        return None
    for (owner, name), function in zip(_PLACES, now, strict=True):
        if not _is_torchs_own(function):
            where = getattr(function, "__module__", None) or type(function).__module__
            by = f"{where}.{getattr(function, '__qualname__', type(function).__name__)}"
            return f"{_named(owner)}.{name} was replaced by {by}"
    known.functions = now
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
