"""Sublayers as C reads them (`ops.native.step`), and how it runs them: all in one call.

What a sublayer has that is not written in C leaves all of them to `models.runtime.decode_step`, operation by operation.
"""

import ctypes
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard, cast

import torch
from torch import Tensor

from fastgen import config
from fastgen.models.layers.linear import Linear, Product
from fastgen.models.layers.norm import Norm, NormLike, unnormed
from fastgen.models.memory.scratch import Memory
from fastgen.models.runtime.decode_step import FeedForward, SourceAttention, Sublayer, TextAttention
from fastgen.models.runtime.encoder import SentenceAttention
from fastgen.ops import native
from fastgen.ops.linear import PanelWeight, native_for
from fastgen.ops.native import step as c


def are_written(sublayers: Sequence[Sublayer]) -> bool:
    """Whether sublayers have no parts but such as are written in C, and may be packed."""
    return bool(sublayers) and config.settings().packs and all(map(_is_written, sublayers))


def _is_written(sublayer: Sublayer) -> bool:
    mix, norm = sublayer.mix, sublayer.norm
    if sublayer.own is not None or not (norm is unnormed or is_norm(norm)):
        return False
    return _is_mix_written(mix) and all(
        isinstance(product, Linear) for product in _products(sublayer)
    )


def _is_mix_written(mix: Any) -> bool:
    if type(mix) is TextAttention:
        norms = [norm for norm in (mix.query_norm, mix.key_norm) if norm is not None]
        in_order = len(mix.parts) == 3 or (mix.blocks == 1 and not mix.values_first)
        plainly = in_order and not mix.spread and mix.softcap is None
        return (
            plainly
            and len(norms) != 1
            and all(map(is_norm, norms))
            and mix.dims in native.HEAD_DIMS
        )
    if type(mix) in (SourceAttention, SentenceAttention):
        return mix.dims in native.HEAD_DIMS
    return type(mix) is FeedForward


def is_norm(norm: NormLike) -> TypeGuard[Norm]:
    """Whether a norm is one that C can read."""
    held = (norm.weight, norm.bias) if type(norm) is Norm else ()
    return type(norm) is Norm and all(
        x is None or (is_readable(x) and x.is_contiguous()) for x in held
    )


def norm_fits(norm: NormLike | None, width: int) -> bool:
    """Whether a norm, if it is one, is of so many numbers."""
    held = (norm.weight, norm.bias) if isinstance(norm, Norm) else ()
    return all(x is None or x.shape == (width,) for x in held)


def _is_cut(mix: Any, panel: int) -> bool:
    """Whether the halves of a wide layer do not begin where a panel does."""
    return type(mix) is FeedForward and mix.halves and mix.wide.outputs % (2 * panel) != 0


def _halves(wide: c.Weight) -> tuple[c.Weight, c.Weight]:
    """The halves of a layer's outputs as weights of their own."""
    half, bias = wide.outputs // 2, wide.bias
    behind = wide.panels + 4 * half * wide.inputs, None if bias is None else bias + 4 * half
    return c.Weight(wide.panels, bias, half, wide.inputs), c.Weight(*behind, half, wide.inputs)


def norm_of(norm: NormLike | None, at: Callable[[Tensor | None], int | None]) -> c.Norm:
    """A norm as C reads it, or none; at: gives a tensor's address."""
    if not isinstance(norm, Norm):
        return c.Norm(kind=c.UNNORMED)
    kind = c.RMS_NORM if norm.rms else c.LAYER_NORM
    return c.Norm(at(norm.weight), at(norm.bias), norm.eps, norm.offset, kind)


def is_readable(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.is_cpu


def _products(sublayer: Sublayer) -> list[Product]:
    """All products of a sublayer, that of what it has mixed behind the others."""
    mix: Any = sublayer.mix
    if type(mix) in (TextAttention, SentenceAttention):
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
        self._homes: list[dict[str, Tensor | None]] = [
            module._parameters for module in modules for _ in _NAMES
        ]
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


class Rows(NamedTuple):
    """The rows of one call, of which there are `beams` for each sentence: beams, or tokens."""

    sentences: int
    beams: int


class Records:
    """Sublayers as C reads them, made when all weights are packed, and again when one is no longer what it was.

    Args:
        sublayers: of parts that are written in C. norm_first: whether norms come before what they belong to.
    """

    def __init__(self, sublayers: Sequence[Sublayer], norm_first: bool) -> None:
        self.sublayers, self.norm_first = sublayers, norm_first
        self.made: Any = None
        self._made_by: native.Library | None = None
        self._held: _Held | None = None
        self._others: list[Tensor] = []  # than parameters of layers
        self._panels: list[PanelWeight] = []  # which the records name
        self.products: list[Any] = [
            product for sublayer in sublayers for product in _products(sublayer)
        ]
        self.memory: Memory = self.products[0].memory
        self.work = sum(p.outputs * p.inputs for p in self.products) // len(
            self.products
        )  # of a product of one row
        self._sizes = max(map(_made, sublayers)), max(map(_mixed, sublayers))
        self.width: int = self.products[0].inputs  # of a row

    def _is_packable(self, by: native.Library) -> bool:
        """Whether there may be records for this library, once all weights are packed."""
        modules = [product.module for product in self.products]
        biases = [module.bias for module in modules]
        return (
            not any(_is_cut(sublayer.mix, by.panel) for sublayer in self.sublayers)
            and all(self._has_width(sublayer) for sublayer in self.sublayers)
            and all(
                x is None
                or (is_readable(x) and x.is_contiguous() and x.shape == (product.outputs,))
                for product, x in zip(self.products, biases, strict=True)
            )
            and all(module.weight.dtype == torch.float32 for module in modules)
            and all(
                native_for(product.outputs, product.inputs) is not None for product in self.products
            )
            and all(map(_is_written, self.sublayers))
        )

    def fits(self, x: Tensor, stream: Tensor) -> bool:
        """Whether x and the stream, (R, C) each, are as wide as the sublayers."""
        return x.dim() == 2 and x.shape == stream.shape and x.shape[1] == self.width

    def _has_width(self, sublayer: Sublayer) -> bool:
        """Whether the products and norms of a sublayer read what those before them write."""
        mix: Any = sublayer.mix
        *parts, out = _products(sublayer)
        made = sum(part.outputs for part in parts)
        if type(mix) is FeedForward:
            mixed = made // len(parts) // (2 if mix.halves else 1)
            fits = all(part.outputs == parts[0].outputs for part in parts)
        else:
            mixed = mix.heads * mix.dims
            key_heads = {TextAttention: lambda: mix.key_heads, SentenceAttention: lambda: mix.heads}
            fits = made == mixed + 2 * mix.dims * key_heads.get(type(mix), lambda: 0)()
        if type(mix) is TextAttention:
            for norm, heads in ((mix.query_norm, mix.heads), (mix.key_norm, mix.key_heads)):
                fits = fits and norm_fits(norm, mix.dims * heads if mix.whole_norms else mix.dims)
        inputs = {cast(Any, part).inputs for part in parts}
        own = (
            inputs == {self.width} and out.outputs == self.width and cast(Any, out).inputs == mixed
        )
        return fits and own and norm_fits(sublayer.norm, self.width)

    def ready(self, by: native.Library, source_heads: Callable[[int], int]) -> bool:
        """Whether there are records for this library, of weights as they are now.

        source_heads: of the keys of the source, by the layer.
        """
        if (
            self.made is not None
            and self._made_by is by
            and self._held is not None
            and self._held.is_same
        ):
            return True
        self.made = None
        if not self._is_packable(by):
            return False
        modules = [product.module for product in self.products]
        panels = [
            each for product in self.products if (each := product.in_panels()) is not None
        ]  # all count as used
        sizes = [(panel.outputs, panel.panels.shape[1]) for panel in panels]
        if sizes != [(product.outputs, product.inputs) for product in self.products]:
            return False
        biases = [module.bias for module in modules]
        self._others = []
        self._panels, self._made_by = panels, by
        weights = [c.Weight(w.panels.data_ptr(), None if b is None else b.data_ptr(), w.outputs, w.panels.shape[1])
                   for w, b in zip(panels, biases, strict=True)]  # fmt: skip
        left = iter(weights)
        self.made = (c.Sublayer * len(self.sublayers))(
            *(self._record(s, source_heads, left) for s in self.sublayers)
        )
        self._held = _Held(modules, self._others)
        return True

    def _record(
        self, sublayer: Sublayer, source_heads: Callable[[int], int], weights: Iterator[c.Weight]
    ) -> c.Sublayer:
        mix: Any = sublayer.mix
        parts = [next(weights) for _ in _products(sublayer)[1:]]
        record = c.Sublayer(
            parts=len(parts), part=tuple(parts), out=next(weights), norm=self._norm(sublayer.norm)
        )
        record.parallel = sublayer.parallel
        if type(mix) is FeedForward:
            record.kind, record.behind = c.FEED_FORWARD, native.BEHIND[mix.activation]
            if mix.halves:
                record.parts, record.part = 2, _halves(parts[0])
            return record
        record.heads, record.dims, record.scale = mix.heads, mix.dims, mix.scale
        if type(mix) is TextAttention:
            record.kind, record.key_heads, record.neighbours = c.TEXT, mix.key_heads, mix.neighbours
            record.query_norm, record.key_norm = (
                self._norm(mix.query_norm),
                self._norm(mix.key_norm),
            )
            record.whole_norms = mix.whole_norms
        elif type(mix) is SentenceAttention:
            record.kind, record.key_heads = c.TEXT, mix.heads
        else:
            record.kind, record.key_heads = c.SOURCE, source_heads(sublayer.layer)
        return record

    def _norm(self, norm: NormLike | None) -> c.Norm:
        return norm_of(norm, self._at)

    def _at(self, tensor: Tensor | None) -> int | None:
        """A tensor's address, which is looked at again in every step."""
        if tensor is None:
            return None
        self._others.append(tensor)
        return tensor.data_ptr()

    def run(
        self,
        by: native.Library,
        x: Tensor,
        stream: Tensor,
        seen: Any,
        calls: Sequence[Rows],
        attention: int,
    ) -> None:
        """Run all sublayers of x (R, C), which becomes what the head reads, and the stream, which is lost.

        seen: what each attending sublayer sees of each call. attention: multiplications of the largest one.
        """
        step, held = self.given(x, stream, seen, calls)
        threads = native.threads_for(max(x.shape[0] * self.work, attention))
        if not c.run(by, threads, step):
            raise torch.OutOfMemoryError(
                f"no memory for the scores of {len(x)} rows in each of {threads} threads"
            )
        del held  # what C has read

    def given(
        self, x: Tensor, stream: Tensor, seen: Any, calls: Sequence[Rows]
    ) -> tuple[c.Step, list[Any]]:
        """What C reads, of the same arguments as `run`, and what has to be held for it."""
        (rows, width), (wide, mixed) = x.shape, self._sizes
        room = (
            rows * width,
            rows * width,
            rows * wide,
            rows * mixed,
        )  # of two sums, what products make, what is mixed
        scratch = self.memory.take(x, sum(room))
        sum_at, spare_at, wide_at, mixed_at = _addresses(scratch, room)
        if self.norm_first:
            sum_at = stream.data_ptr()
        placed = (c.Rows * len(calls))(*_placed(calls))
        step = c.Step(
            ctypes.addressof(self.made), ctypes.addressof(seen), ctypes.addressof(placed), len(self.sublayers),
            len(calls), *x.shape, self.norm_first, x.data_ptr(), sum_at, spare_at, wide_at, mixed_at,
        )  # fmt: skip
        return step, [scratch, placed]


def _placed(calls: Sequence[Rows]) -> Iterator[tuple[int, int, int]]:
    """The rows of calls, one behind the other."""
    first = 0
    for sentences, beams in calls:
        yield first, sentences, beams
        first += sentences * beams


def _addresses(room: Tensor, sizes: Sequence[int]) -> list[int]:
    """Where pieces of so many numbers begin."""
    starts = itertools.accumulate(sizes, initial=0)
    return [room.data_ptr() + 4 * start for start, _ in zip(starts, sizes, strict=False)]
