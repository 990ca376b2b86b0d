"""Fingerprint of a decode step: tells whether a CUDA graph of one step is valid for another."""

import dataclasses
import functools
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from fastgen.models.layers.experts import Experts
from fastgen.models.layers.linear import Identity, MergedLinear, TorchLinear
from fastgen.models.layers.low_rank import Adapter, LowRank
from fastgen.models.layers.norm import ConstantScale, ModuleNorm, Norm
from fastgen.models.layers.positions import (
    AttentionBias,
    ComplexRotary,
    InterleavedRotary,
    PairedRotary,
    RotationTable,
)
from fastgen.models.runtime.decode_step import DecoderStep, Embedding
from fastgen.models.runtime.sublayers import (
    CrossAttention,
    FeedForward,
    LatentAttention,
    SelfAttention,
    Sublayer,
)


class Unknown(Exception):
    """The fingerprint of a step is undefined, as it does not cover one of its parts."""


_MADE: dict[type, tuple[str, ...]] = {MergedLinear: ("weight", "bias"), AttentionBias: ("table",)}
"""Attributes that hold tensors derived from weights for the duration of a call."""

_PARTS = (
    Adapter, DecoderStep, Embedding, FeedForward, ComplexRotary, InterleavedRotary, PairedRotary,
    LowRank, Norm, ModuleNorm, RotationTable, CrossAttention, LatentAttention, Sublayer,
    SelfAttention, ConstantScale,
)  # fmt: skip
_UNREAD: dict[type, tuple[str, ...]] = {
    DecoderStep: ("fingerprint", "module", "run_layers"),
    CrossAttention: ("kv_projections",),
    LatentAttention: ("of_heads",),
}
"""Fields that a decode step on a device does not read."""


def fingerprint_of(part: Any, made: list[tuple[Any, str]]) -> object:
    """Return everything a part of a step reads, equal where a graph of one is valid for the other.

    Args:
        part: A decode step or any part of one.
        made: Receives (holder, attribute name) of each tensor that was derived from weights.

    Raises:
        Unknown: The fingerprint does not cover a part.
    """
    again = functools.partial(fingerprint_of, made=made)
    kind: Any = type(part)
    if part is None or kind in (bool, int, float, str, torch.dtype) or isinstance(part, type):
        return part
    if isinstance(part, Tensor):
        return part.data_ptr(), part.shape, part.stride(), part.dtype, part.device
    if kind in (list, tuple):
        return tuple(map(again, part))
    if kind is functools.partial:
        return (
            again(part.func),
            again(part.args),
            tuple((name, again(each)) for name, each in part.keywords.items()),
        )
    if isinstance(part, nn.Module):
        numbers = (
            (name, value)
            for name, value in vars(part).items()
            if isinstance(value, (bool, int, float, str))
        )
        return kind, tuple(numbers), tuple(map(again, (*part.parameters(), *part.buffers())))
    # A closure may hold tensors, which a fingerprint must not keep alive.
    if kind is FunctionType and part.__closure__ is None:
        return part
    if kind is TorchLinear:
        return (
            kind,
            *(
                (again(part.module),)
                if part.weight is None
                else (again(part.weight), again(part.bias))
            ),
        )
    if kind is Experts:
        # transformers' loop over experts reads their numbers on the host, which no graph can.
        loops = (getattr(module, "config", None) for module in part.module.modules())
        if any(getattr(config, "_experts_implementation", "") == "eager" for config in loops):
            raise Unknown("a loop over experts")
        return kind, tuple(map(again, part.module.modules()))
    if kind is Identity:
        return kind, part.outputs
    if kind in _MADE:
        known = {(id(holder), name) for holder, name in made}
        tensors = [(name, getattr(part, name)) for name in _MADE[kind]]
        made += [
            (part, name)
            for name, tensor in tensors
            if tensor is not None and (id(part), name) not in known
        ]
        shapes = tuple(
            None if tensor is None else (tensor.shape, tensor.dtype) for _, tensor in tensors
        )
        return kind, shapes, getattr(part, "by_position", None)
    if kind not in _PARTS:
        raise Unknown(kind.__name__)
    names = [
        each.name for each in dataclasses.fields(part) if each.name not in _UNREAD.get(kind, ())
    ]
    # `fingerprint` of a step are kept alive by its equivalence check anyway.
    own: tuple[object, ...] = part.fingerprint if kind is DecoderStep else ()
    return (kind, own, *(again(getattr(part, name)) for name in names))
