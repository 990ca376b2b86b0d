"""All that a decode step is and reads, in a form that can be compared: whether a graph of one step serves another."""

import dataclasses
import functools
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from fastgen.models.layers.linear import Own, SideBySide
from fastgen.models.layers.norm import Norm, OwnNorm, Times
from fastgen.models.layers.positions import Bias, RotationTable
from fastgen.models.runtime.decode_step import (
    DecoderStep,
    Embedding,
    FeedForward,
    SourceAttention,
    Sublayer,
    TextAttention,
)


class Unknown(Exception):
    """A part of a step of which nobody has said what it reads."""


_MADE: dict[type, tuple[str, ...]] = {SideBySide: ("weight", "bias"), Bias: ("table",)}
"""Tensors that a part has made of weights, for one call."""

_PARTS = (
    DecoderStep, Embedding, FeedForward, Norm, OwnNorm, RotationTable, SourceAttention, Sublayer, TextAttention, Times
)  # fmt: skip
_UNREAD: dict[type, tuple[str, ...]] = {
    DecoderStep: ("facts", "module", "together"),
    SourceAttention: ("made_by",),
}
"""What parts have beside, and is not read in a step on a device."""


def facts_of(part: Any, made: list[tuple[Any, str]]) -> object:
    """All that a part of a step is and reads, equal where a graph of one serves the other too.

    Args:
        made: gets who holds tensors that were made of weights, and by which name.

    Raises:
        Unknown: there is another part in it.
    """
    again = functools.partial(facts_of, made=made)
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
    if (
        kind is FunctionType and part.__closure__ is None
    ):  # else it holds what it must not keep alive
        return part
    if kind is Own:
        return (
            kind,
            *(
                (again(part.module),)
                if part.weight is None
                else (again(part.weight), again(part.bias))
            ),
        )
    if kind in _MADE:
        known = {(id(holder), name) for holder, name in made}
        found = [(name, getattr(part, name)) for name in _MADE[kind]]
        made += [
            (part, name)
            for name, tensor in found
            if tensor is not None and (id(part), name) not in known
        ]
        shapes = tuple(
            None if tensor is None else (tensor.shape, tensor.dtype) for _, tensor in found
        )
        return kind, shapes, getattr(part, "by_position", None)
    if kind not in _PARTS:
        raise Unknown(kind.__name__)
    names = [
        each.name for each in dataclasses.fields(part) if each.name not in _UNREAD.get(kind, ())
    ]
    own: tuple[object, ...] = (
        part.facts if kind is DecoderStep else ()
    )  # which are kept for its proof as well
    return (kind, own, *(again(getattr(part, name)) for name in names))
