"""The sublayers of a decode step run in C, all at once: on a CPU, in fp32, where `ops.native` has a library.

A step of a small model takes some 200 operations of a few microseconds each, and the Python between them; in C it is
one call. What a sublayer has that is not written in C leaves the whole step to `models.step`, operation by operation.
"""

import ctypes
import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from fastgen import config
from fastgen.models.joint import Joint
from fastgen.models.linear import Linear, Product
from fastgen.models.memory import Memory
from fastgen.models.norm import Norm, NormLike, unnormed
from fastgen.models.step import (
    Context,
    FeedForward,
    SourceAttention,
    Sublayer,
    Surroundings,
    TextAttention,
)
from fastgen.ops import native
from fastgen.ops.dispatch import chosen, in_c, never, plain
from fastgen.ops.linear import PanelWeight
from fastgen.ops.native import step as c

Together = Callable[[Tensor, Tensor, Surroundings], Tensor | None]
"""Gives what the head reads (R, C) of what the first sublayer reads and the stream, which it may overwrite; or None."""

Reference = weakref.ReferenceType[Tensor] | None
"""To a tensor that is not kept alive by it."""


def together(sublayers: Sequence[Sublayer], norm_first: bool) -> Together | None:
    """Return what runs these sublayers in C, for as long as a call lasts; None where they have parts not written in C.

    norm_first: whether norms come before what they belong to.
    """
    if not sublayers or config.settings().linear == "plain" or not all(map(_is_written, sublayers)):
        return None
    return InC(sublayers, norm_first)


def _is_written(sublayer: Sublayer) -> bool:
    mix, norm = sublayer.mix, sublayer.norm
    if sublayer.own is not None or not (norm is unnormed or _is_norm(norm)):
        return False
    return _is_mix_written(mix) and all(isinstance(product, Linear) for product in _products(sublayer))


def _is_mix_written(mix: Any) -> bool:
    if type(mix) is TextAttention:
        norms = [norm for norm in (mix.query_norm, mix.key_norm) if norm is not None]
        in_order = len(mix.parts) == 3 or (mix.blocks == 1 and not mix.values_first)
        plainly = in_order and not mix.spread and mix.softcap is None
        return plainly and len(norms) != 1 and all(map(_is_norm, norms)) and mix.dims in native.HEAD_DIMS
    if type(mix) is SourceAttention:
        return mix.dims in native.HEAD_DIMS
    return type(mix) is FeedForward


def _is_norm(norm: NormLike) -> TypeGuard[Norm]:
    held = (norm.weight, norm.bias) if type(norm) is Norm else ()
    return type(norm) is Norm and all(x is None or (_is_readable(x) and x.is_contiguous()) for x in held)


def _is_cut(mix: Any, panel: int) -> bool:
    """Whether the halves of a wide layer do not begin where a panel does."""
    return type(mix) is FeedForward and mix.halves and mix.wide.outputs % (2 * panel) != 0


def _halves(wide: c.Weight) -> tuple[c.Weight, c.Weight]:
    """The halves of a layer's outputs as weights of their own."""
    half, bias = wide.outputs // 2, wide.bias
    behind = wide.panels + 4 * half * wide.inputs, None if bias is None else bias + 4 * half
    return c.Weight(wide.panels, bias, half, wide.inputs), c.Weight(*behind, half, wide.inputs)


def _is_readable(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.is_cpu


def _products(sublayer: Sublayer) -> list[Product]:
    """All products of a sublayer, that of what it has mixed behind the others."""
    mix: Any = sublayer.mix
    if type(mix) is TextAttention:
        parts = list(mix.parts)
    elif type(mix) is SourceAttention:
        parts = [mix.query]
    else:
        parts = [mix.wide] if mix.gated is None else [mix.wide, mix.gated]
    return [*parts, sublayer.out]


def _made(sublayer: Sublayer) -> int:
    """How many numbers of a row the products of what comes in make."""
    return sum(product.outputs for product in _products(sublayer)[:-1])


def _mixed(sublayer: Sublayer) -> int:
    """How many numbers of a row a sublayer mixes, beside where its products lie."""
    mix: Any = sublayer.mix
    return mix.wide.outputs if isinstance(mix, FeedForward) else mix.heads * mix.dims


class _Held:
    """What C has the addresses of: weights and biases of layers, and other tensors, which may change where they are.

    A look at all of them in every step is a good part of a small one, so that there is no loop of Python's here.
    """

    def __init__(self, modules: Sequence[Any], others: Sequence[Tensor]) -> None:
        self._homes: list[dict[str, Tensor | None]] = [module._parameters for module in modules for _ in _NAMES]
        self._names = [name for _ in modules for name in _NAMES]
        self._found = list(map(dict.get, self._homes, self._names))
        self._tensors = [*(tensor for tensor in self._found if tensor is not None), *others]
        self._addresses = list(map(_address, self._tensors))
        self._weights: list[Any] = self._found[:: len(_NAMES)]  # of which packed copies are read
        self._versions = list(map(_version, self._weights))

    @property
    def is_same(self) -> bool:
        """Whether modules have the parameters that they had, where they were, and weights hold what they held."""
        return (
            all(map(operator.is_, map(dict.get, self._homes, self._names), self._found))
            and list(map(_address, self._tensors)) == self._addresses
            and list(map(_version, self._weights)) == self._versions
        )


_NAMES = "weight", "bias"
_address, _version = Tensor.data_ptr, operator.attrgetter("_version")


class _Place(NamedTuple):
    """Where a sublayer attends to what a call has: a layer of its cache."""

    mix: Any
    of_text: bool
    part: Context
    layer: Any


class InC:
    """Sublayers as C reads them, made when all weights are packed, and again when one is no longer what it was.

    Args:
        sublayers: of parts that are written in C.
    """

    def __init__(self, sublayers: Sequence[Sublayer], norm_first: bool) -> None:
        self.sublayers, self.norm_first = sublayers, norm_first
        mixes: list[tuple[int, Any, int]] = [(i, sublayer.mix, sublayer.layer) for i, sublayer in enumerate(sublayers)]
        self.attending = [
            (i, mix, type(mix) is TextAttention, layer) for i, mix, layer in mixes if type(mix) is not FeedForward
        ]
        self._records: Any = None
        self._made_by: native.Library | None = None
        self._held: _Held | None = None
        self._others: list[Tensor] = []  # than parameters of layers
        self._panels: list[PanelWeight] = []  # which the records name
        self._seen: Any = ()  # what each attending sublayer sees of each call
        self._checked: list[Reference] = []  # keys that C can read
        self._placed: list[Reference] = []  # keys whose addresses it has
        self.products: list[Any] = [product for sublayer in sublayers for product in _products(sublayer)]
        self.memory: Memory = self.products[0].memory
        self._work = sum(p.outputs * p.inputs for p in self.products) // len(self.products)  # of a product of one row
        self._attention = 0  # multiplications of the largest attention in a step
        self._sizes = max(map(_made, sublayers)), max(map(_mixed, sublayers))

    def __call__(self, x: Tensor, stream: Tensor, context: Surroundings) -> Tensor | None:
        parts, by = _parts(context), native.library()
        if parts is None or by is None:
            return None
        (rows, width), (wide, mixed) = x.shape, self._sizes
        work = rows * width, rows * width, rows * wide, rows * mixed
        if self.memory.planned:  # nothing is computed, but what it would take is counted
            self.memory.take(x, sum(work))
            return None
        places = self._places(parts)
        able = lambda: plain(x, stream) and self._covers(places) and self._ready(by, parts[0])  # noqa: E731
        if not in_c(chosen("decoder_step", never, able, x)):
            return None
        scratch = self.memory.take(x, sum(work))
        sum_at, spare_at, wide_at, mixed_at = _addresses(scratch, work)
        if self.norm_first:
            sum_at = stream.data_ptr()
        held = [*self._turn(context, x), *self._open(parts, places)]
        calls = _calls(parts)
        step = c.Step(
            ctypes.addressof(self._records), ctypes.addressof(self._seen), ctypes.addressof(calls), len(self.sublayers),
            len(parts), rows, width, self.norm_first, x.data_ptr(), sum_at, spare_at, wide_at, mixed_at,
        )  # fmt: skip
        threads = native.threads_for(max(rows * self._work, self._attention))
        done = c.run(by, threads, step)
        del held, scratch  # what C has read
        if not done:
            raise torch.OutOfMemoryError(f"no memory for the scores of {rows} rows in each of {threads} threads")
        return x

    def _places(self, parts: Sequence[Context]) -> list[_Place]:
        """Of each attending sublayer, one for each call."""
        return [
            _Place(mix, of_text, part, (part.text if of_text else part.source)[number])
            for _, mix, of_text, number in self.attending
            for part in parts
        ]

    def _covers(self, places: Sequence[_Place]) -> bool:
        """Whether what there is to attend to lies where C can read it."""
        if len(self._checked) != len(places):
            count = len(places)
            self._seen, self._checked, self._placed = (c.Seen * count)(), [None] * count, [None] * count
        for i, (mix, of_text, part, layer) in enumerate(places):
            mask = part.text_mask if of_text else part.source_mask
            if not (mask is None or _is_mask(mask)):
                return False
            if not getattr(layer, "begun", False):  # a cache of another kind, or one without a shape yet
                return False
            keys, values = layer.room
            if _beams(part) * (mix.heads // keys.shape[1]) > native.ROWS or not (of_text or layer.slots):
                return False
            if _is(self._checked[i], keys):
                continue
            heads = keys.shape[1]
            if not (
                mix.heads % heads == 0
                and (not of_text or heads == mix.key_heads)
                and keys.shape[3] == values.shape[3] == mix.dims
                and keys.stride(3) == values.stride(3) == 1
                and _is_readable(keys)
                and _is_readable(values)
            ):
                return False
            self._checked[i] = weakref.ref(keys)
        return True

    def _ready(self, by: native.Library, part: Context) -> bool:
        """Whether there are records for this library, of weights as they are now."""
        if self._records is not None and self._made_by is by and self._held is not None and self._held.is_same:
            return True
        self._records = None
        if any(_is_cut(sublayer.mix, by.panel) for sublayer in self.sublayers):
            return False
        modules = [product.module for product in self.products]
        panels = [each for product in self.products if (each := product.in_panels()) is not None]  # all count as used
        biases = [module.bias for module in modules]
        readable = all(x is None or (_is_readable(x) and x.is_contiguous()) for x in biases)
        if not (len(panels) == len(modules) and readable and all(map(_is_written, self.sublayers))):
            return False
        self._others = []
        self._panels, self._made_by = panels, by
        weights = [c.Weight(w.panels.data_ptr(), None if b is None else b.data_ptr(), w.outputs, w.panels.shape[1])
                   for w, b in zip(panels, biases, strict=True)]  # fmt: skip
        left = iter(weights)
        self._records = (c.Sublayer * len(self.sublayers))(*(self._record(s, part, left) for s in self.sublayers))
        self._held = _Held(modules, self._others)
        return True

    def _record(self, sublayer: Sublayer, part: Context, weights: Iterator[c.Weight]) -> c.Sublayer:
        mix: Any = sublayer.mix
        parts = [next(weights) for _ in _products(sublayer)[1:]]
        record = c.Sublayer(parts=len(parts), part=tuple(parts), out=next(weights), norm=self._norm(sublayer.norm))
        record.parallel = sublayer.parallel
        if type(mix) is FeedForward:
            record.kind, record.behind = c.FEED_FORWARD, native.BEHIND[mix.activation]
            if mix.halves:
                record.parts, record.part = 2, _halves(parts[0])
            return record
        record.heads, record.dims, record.scale = mix.heads, mix.dims, mix.scale
        if type(mix) is TextAttention:
            record.kind, record.key_heads, record.neighbours = c.TEXT, mix.key_heads, mix.neighbours
            record.query_norm, record.key_norm = self._norm(mix.query_norm), self._norm(mix.key_norm)
            record.whole_norms = mix.whole_norms
        else:
            record.kind, record.key_heads = c.SOURCE, part.source[sublayer.layer].keys.shape[1]
        return record

    def _norm(self, norm: NormLike | None) -> c.Norm:
        if not isinstance(norm, Norm):
            return c.Norm(kind=c.UNNORMED)
        kind = c.RMS_NORM if norm.rms else c.LAYER_NORM
        return c.Norm(self._at(norm.weight), self._at(norm.bias), norm.eps, norm.offset, kind)

    def _at(self, tensor: Tensor | None) -> int | None:
        """A tensor's address, which is looked at again in every step."""
        if tensor is None:
            return None
        self._others.append(tensor)
        return tensor.data_ptr()

    def _turn(self, context: Surroundings, x: Tensor) -> list[Tensor]:
        """Note by what queries and keys are turned in this step; returns what has to stay until it has been."""
        held: list[Tensor] = []
        for index, mix, of_text, _ in self.attending:
            if of_text and mix.rotary is not None:
                cosine, sine = (part.contiguous() for part in context.rotation(mix.rotary, x))
                record = self._records[index]
                record.cosine, record.sine = cosine.data_ptr(), sine.data_ptr()
                record.turned = cosine.shape[-1]
                record.turn_row = 0 if cosine.shape[0] == 1 else record.turned
                held += (cosine, sine)
        return held

    def _open(self, parts: Sequence[Context], places: Sequence[_Place]) -> list[Tensor]:
        """Open the slots of the newest tokens, and say what is seen; returns the masks of it."""
        slots = {id(part): _open(part) for part in parts}
        masks: dict[int, tuple[Tensor, list[int]]] = {}
        self._attention = 0
        for i, (mix, of_text, part, layer) in enumerate(places):
            at = self._seen[i]
            keys, values = layer.room
            if not _is(self._placed[i], keys):
                at.keys, at.values = keys.data_ptr(), values.data_ptr()
                at.keys_b, at.keys_h, at.keys_n, _ = keys.stride()
                at.values_b, at.values_h, at.values_n, _ = values.stride()
                self._placed[i] = weakref.ref(keys)
            at.count = count = layer.slots
            at.slot = slots[id(part)]
            self._attention = max(self._attention, part.sentences * _beams(part) * mix.heads * mix.dims * count)
            mask, at.mask = part.text_mask_with(mix.bias) if of_text else part.source_mask, None
            if mask is not None:
                if id(mask) not in masks:
                    readable = mask.float()
                    readable = readable if readable.stride(3) == 1 else readable.contiguous()
                    steps = zip(readable.stride(), readable.shape, strict=True)
                    masks[id(mask)] = readable, [step if size > 1 else 0 for step, size in steps]
                readable, (at.mask_b, at.mask_h, at.mask_m, _) = masks[id(mask)]
                at.mask = readable.data_ptr()
            at.weights = None
            if not of_text and part.watched is not None and part.source[part.watched] is layer:
                rows = part.sentences * _beams(part)
                part.weights = torch.empty(rows, at.count, dtype=torch.float32, device="cpu")
                at.weights = part.weights.data_ptr()
        return [mask for mask, _ in masks.values()]


def _is(known: Reference, tensor: Tensor) -> bool:
    return known is not None and known() is tensor


def _parts(context: Surroundings) -> Sequence[Context] | None:
    """The contexts of all calls in a step; None for surroundings of another kind."""
    return [context] if type(context) is Context else context.parts if type(context) is Joint else None


def _beams(part: Context) -> int:
    return part.text[0].beams


def _open(part: Context) -> int:
    """Open a slot for the newest token of every beam in each layer of the text; return where it is."""
    slot = 0
    for layer in part.text:
        placed: Any = layer
        placed.make_room()
        slot = placed.slots
        placed.note_step()
    return slot


def _calls(parts: Sequence[Context]) -> Any:
    """The rows of each call, one behind the other."""
    calls, first = (c.Rows * len(parts))(), 0
    for call, part in zip(calls, parts, strict=True):
        call.first_row, call.sentences, call.beams = first, part.sentences, _beams(part)
        first += call.sentences * call.beams
    return calls


def _addresses(room: Tensor, sizes: Sequence[int]) -> list[int]:
    """Where pieces of so many numbers begin."""
    starts = itertools.accumulate(sizes, initial=0)
    return [room.data_ptr() + 4 * start for start, _ in zip(starts, sizes, strict=False)]


def _is_mask(mask: Tensor) -> bool:
    return plain(mask) and mask.dim() == 4
