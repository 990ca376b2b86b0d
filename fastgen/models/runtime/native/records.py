"""Sublayers as C records (`ops.native.step`), and the one native call that runs all of them.

If C does not implement some part of a sublayer, `models.runtime.decode_step` runs all sublayers
operation by operation.
"""

import ctypes
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fastgen.models.layers.experts import Experts
from fastgen.models.layers.linear import Int8Linear
from fastgen.models.layers.low_rank import LowRank
from fastgen.models.layers.norm import NormLike
from fastgen.models.memory.scratch import ScratchPool
from fastgen.models.runtime.encoder import EncoderSelfAttention
from fastgen.models.runtime.native import experts
from fastgen.models.runtime.native.layers import (
    adapter_elements,
    down_weight,
    in_blocks,
    input_elements,
    mixer_elements,
    norm_fits,
    norm_of,
    packed_of,
    products_of,
    split_halves,
    splits_panel,
    supports_sublayer,
    vector_fits,
    weight_of,
)
from fastgen.models.runtime.sublayers import (
    FeedForward,
    LatentAttention,
    SelfAttention,
    Sublayer,
)
from fastgen.ops import native
from fastgen.ops.linear import native_for
from fastgen.ops.native import products as native_products
from fastgen.ops.native import step as c


class _Held:
    """The tensors whose addresses the C records hold: parameters of layers, and others.

    Every step checks whether any of them was replaced, moved or modified. The check compares lists
    that `map` makes, because a Python loop would take a large part of a small step.
    """

    def __init__(self, products: Sequence[Any], others: Sequence[Tensor]) -> None:
        self._homes: list[dict[str, Tensor | None]] = [
            product.module._parameters for product in products for _ in range(2)
        ]
        self._names = [
            name
            for product in products
            for name in (getattr(product, "weight_name", "weight"), "bias")
        ]
        self._found = list(map(dict.get, self._homes, self._names))
        self._tensors = [*(tensor for tensor in self._found if tensor is not None), *others]
        self._addresses = list(map(_address, self._tensors))
        self._weights: list[Any] = self._found[::2]  # C reads packed copies of them.
        self._versions = list(map(_version, self._weights))

    @property
    def is_same(self) -> bool:
        """Whether parameters are the same tensors at the same addresses, and weights unmodified."""
        return (
            all(map(operator.is_, map(dict.get, self._homes, self._names), self._found))
            and list(map(_address, self._tensors)) == self._addresses
            and list(map(_version, self._weights)) == self._versions
        )


_address, _version = Tensor.data_ptr, operator.attrgetter("_version")


class Rows(NamedTuple):
    """The rows of one call.

    Attributes:
        sentences: Number of sentences.
        beams: Rows per sentence: beams in a decoder, tokens in an encoder.
        successive: Whether the rows of a sentence are successive tokens of its text.
    """

    sentences: int
    beams: int
    successive: bool = False


class Records:
    """The C records of sublayers.

    They are built once all weights are packed, and rebuilt when a weight changes.

    Args:
        sublayers: Sublayers of which C implements all parts.
        norm_first: Whether the model is pre-norm.
    """

    def __init__(self, sublayers: Sequence[Sublayer], norm_first: bool) -> None:
        self.sublayers, self.norm_first = sublayers, norm_first
        self.made: Any = None
        self._made_by: native.Library | None = None
        self._held: _Held | None = None
        self._others: list[Tensor] = []  # Tensors that are not parameters of layers.
        self._mixtures: list[c.Mixture] = []  # Records whose addresses are in those of sublayers.
        self._panels: list[Any] = []  # Packed weights whose addresses are in the records.
        self._adapters: list[Any] = []  # Arrays whose addresses are in those of weights.
        self._whole = [product for sublayer in sublayers for product in products_of(sublayer)]
        self._adapted = [product for product in self._whole if type(product) is LowRank]
        self.products: list[Any] = [each for whole in self._whole for each in packed_of(whole)]
        self.memory: ScratchPool = self.products[0].memory
        # Average multiply-adds of a product, for one row.
        work = (experts.work(p, s.mixer) for s in sublayers for p in products_of(s))
        self.work = sum(work) // len(self.products)
        self._sizes = max(map(input_elements, sublayers)), max(map(mixer_elements, sublayers))
        self._low = max(
            map(adapter_elements, sublayers)
        )  # Elements of a row in both products of adapters.
        # Bytes of a row for products of int8; all products of a step are, or none.
        in_bytes = isinstance(self.products[0], Int8Linear)
        self._byte_row = (
            native_products.byte_row(max(p.inputs for p in self.products)) if in_bytes else 0
        )
        self.width: int = self.products[0].inputs  # Elements per row.
        self.dtype: torch.dtype = self.products[0].dtype  # Of weights, keys and values.

    def why_not_packable(self, by: native.Library) -> str | None:
        """Return why the records cannot be built for a library, even if all weights are packed."""
        for mixer in (sublayer.mixer for sublayer in self.sublayers):
            if splits_panel(mixer, by.panel):
                half = mixer.activated.outputs // 2
                return f"gates that are merged have {half} outputs, no multiple of {by.panel}"
        return None if self._is_readable(by) else "the shape or dtype of a weight is not read by C"

    def _is_readable(self, by: native.Library) -> bool:
        """Return whether C reads all weights, biases and norms, once they are packed."""
        modules = [product.module for product in self.products]
        biases = [module.bias for module in modules]
        return (
            all(self._has_width(sublayer, by.panel) for sublayer in self.sublayers)
            and all(
                x is None
                or (
                    x.dtype == self.dtype
                    and x.is_cpu
                    and x.is_contiguous()
                    and x.shape == (product.outputs,)
                )
                for product, x in zip(self.products, biases, strict=True)
            )
            and all(module.weight.dtype == self.dtype for module in modules)
            and all(
                native_for(product.outputs, product.inputs) is not None for product in self.products
            )
            and all(map(supports_sublayer, self.sublayers))
            and all(map(self._fits_adapter, self._adapted))
        )

    def _fits_adapter(self, product: LowRank) -> bool:
        """Return whether the products of adapters have the shapes of the layer's own."""
        parts: list[tuple[Any, Any]] = [(each.up, each.down) for each in product.adapters]
        return all(
            down.module.weight.dtype == self.dtype
            and down.module.weight.is_contiguous()
            and down.module.bias is None
            and down.module.weight.shape == (up.inputs, product.inputs)
            and up.outputs == product.outputs
            for up, down in parts
        )

    def fits(self, x: Tensor, stream: Tensor) -> bool:
        """Return whether x and stream, (R, C) each, have the width of the sublayers."""
        return x.dim() == 2 and x.shape == stream.shape and x.shape[1] == self.width

    def _has_width(self, sublayer: Sublayer, panel: int) -> bool:
        """Return whether the shapes of the products and norms of a sublayer match."""
        mixer: Any = sublayer.mixer
        if type(mixer) is Experts:
            return experts.has_shapes(mixer, self.width, panel) and self._fits_norms(sublayer)
        if type(mixer) is LatentAttention:
            return self._fits_latent(sublayer, mixer, panel)
        *parts, out = products_of(sublayer)
        made = sum(part.outputs for part in parts)
        if type(mixer) is FeedForward:
            mixed = made // len(parts) // (2 if mixer.halves else 1)
            fits = all(part.outputs == parts[0].outputs for part in parts)
        else:
            mixed = mixer.heads * mixer.dims
            key_heads = {
                SelfAttention: lambda: mixer.key_heads,
                EncoderSelfAttention: lambda: mixer.heads,
            }
            fits = made == mixed + 2 * mixer.dims * key_heads.get(type(mixer), lambda: 0)()
        if in_blocks(mixer):
            fits = _blocks_fit(mixer, made)
        if type(mixer) is SelfAttention:
            for norm, heads in ((mixer.query_norm, mixer.heads), (mixer.key_norm, mixer.key_heads)):
                width = mixer.dims * heads if mixer.norms_all_heads else mixer.dims
                fits = fits and norm_fits(norm, width, self.dtype)
            fits = fits and vector_fits(mixer.sinks, mixer.heads, self.dtype)
        inputs = {cast(Any, part).inputs for part in parts}
        widths_match = (
            inputs == {self.width} and out.outputs == self.width and cast(Any, out).inputs == mixed
        )
        return fits and widths_match and self._fits_norms(sublayer)

    def _fits_norms(self, sublayer: Sublayer) -> bool:
        norms = sublayer.norm, self._own(sublayer)
        return all(norm_fits(norm, self.width, self.dtype) for norm in norms)

    @staticmethod
    def _own(sublayer: Sublayer) -> NormLike | None:
        """Return the norm of a sublayer's output before the residual sum."""
        mixer = sublayer.mixer
        return (
            experts.norm(mixer)
            if isinstance(mixer, Experts) and sublayer.own is None
            else sublayer.own
        )

    def _fits_latent(self, sublayer: Sublayer, mixer: LatentAttention, panel: int) -> bool:
        """Return whether the shapes of latent attention match, and heads begin at panels."""
        asked, compress, *others, out = cast(list[Any], products_of(sublayer))
        *rest, _, _ = others
        assert mixer.key_norm is not None
        (latent, _), dims, queries = mixer.cached_dims, mixer.value_dims, [asked, *rest][-1]
        norms = (mixer.key_norm, latent), (mixer.query_norm, asked.outputs)
        return (
            (asked.inputs, compress.inputs, out.outputs) == (self.width,) * 3
            and compress.outputs == sum(mixer.cached_dims)
            and queries.outputs == mixer.heads * mixer.dims
            and all(product.inputs == asked.outputs for product in rest)
            and out.inputs == mixer.heads * dims
            and latent % panel == dims % panel == 0
            and len(rest) == (mixer.query_norm is not None)
            and all(norm_fits(norm, width, self.dtype) for norm, width in norms)
            and self._fits_norms(sublayer)
        )

    def ready(self, by: native.Library, source_heads: Callable[[int], int], rows: int = 1) -> bool:
        """Build the records for a library, unless they are up to date.

        Args:
            by: The native library.
            source_heads: Returns the number of cross-attention key heads of a layer.
            rows: Rows of the call, which decide whether weights are packed for it.

        Returns:
            Whether there are records of the current weights.
        """
        if (
            self.made is not None
            and self._made_by is by
            and self._held is not None
            and self._held.is_same
        ):
            return True
        self.made = None
        if self.why_not_packable(by) is not None:
            return False
        modules = [product.module for product in self.products]
        # Asks for all panels, as each request counts as a use of the weight.
        found = [product.in_panels(rows) for product in self.products]
        panels = [each for each in found if each is not None]
        sizes = [(panel.outputs, panel.inputs) for panel in panels]
        if sizes != [(product.outputs, product.inputs) for product in self.products]:
            return False
        biases = [module.bias for module in modules]
        self._others, self._mixtures = [], []
        self._panels, self._made_by = panels, by
        packed = iter([weight_of(by, w, b) for w, b in zip(panels, biases, strict=True)])
        self._adapters = []
        left = iter([self._weight(product, packed) for product in self._whole])
        self.made = (c.Sublayer * len(self.sublayers))(
            *(self._record(s, source_heads, left) for s in self.sublayers)
        )
        downs = [each.down for product in self._adapted for each in product.adapters]
        self._held = _Held([*self.products, *downs], self._others)
        return True

    def _record(
        self, sublayer: Sublayer, source_heads: Callable[[int], int], weights: Iterator[c.Weight]
    ) -> c.Sublayer:
        mixer: Any = sublayer.mixer
        if type(mixer) is Experts:
            of_mixture = list(itertools.islice(weights, len(products_of(sublayer))))
            record, mixture = experts.record(mixer, of_mixture, self._at)
            self._mixtures.append(mixture)
            record.experts, record.norm = ctypes.addressof(mixture), self._norm(sublayer.norm)
            record.own = self._norm(self._own(sublayer))
            return record
        parts = [next(weights) for _ in products_of(sublayer)[1:]]
        of_heads = [parts.pop() for _ in range(2)] if type(mixer) is LatentAttention else ()
        record = c.Sublayer(
            parts=len(parts), part=tuple(parts), out=next(weights), norm=self._norm(sublayer.norm)
        )
        record.parallel, record.own = sublayer.parallel, self._norm(sublayer.own)
        if type(mixer) is FeedForward:
            record.kind, record.activation = c.FEED_FORWARD, native.ACTIVATIONS[mixer.activation]
            if mixer.halves:
                record.parts, record.part = 2, self._halves(parts[0])
            return record
        record.heads, record.dims, record.scale = mixer.heads, mixer.dims, mixer.scale
        if type(mixer) is SelfAttention:
            record.kind, record.key_heads, record.interleaved = (
                c.SELF_ATTENTION,
                mixer.key_heads,
                mixer.interleaved,
            )
            record.query_norm, record.key_norm = (
                self._norm(mixer.query_norm),
                self._norm(mixer.key_norm),
            )
            record.norms_all_heads, record.norms_rotated = (
                mixer.norms_all_heads,
                mixer.norms_rotated,
            )
            record.sinks, record.softcap = self._at(mixer.sinks), mixer.softcap or 0.0
            if in_blocks(mixer):
                record.blocks, record.values_first = mixer.blocks, mixer.values_first
        elif isinstance(mixer, LatentAttention):
            record.kind, record.key_heads = c.LATENT_ATTENTION, mixer.heads
            record.interleaved, record.pairs_apart = mixer.interleaved, mixer.pairs_apart
            record.query_norm = self._norm(mixer.query_norm)
            record.key_norm = self._norm(mixer.key_norm)
            record.latent, record.value_dims = mixer.cached_dims[0], mixer.value_dims
            record.of_latent, record.to_latent = (weight.panels for weight in of_heads)
        elif type(mixer) is EncoderSelfAttention:
            record.kind, record.key_heads = c.SELF_ATTENTION, mixer.heads
        else:
            record.kind, record.key_heads = c.CROSS_ATTENTION, source_heads(sublayer.layer)
        return record

    def _weight(self, product: Any, packed: Iterator[c.Weight]) -> c.Weight:
        """Return the record of a product's weight, with those of its adapters."""
        weight = next(packed)
        if type(product) is LowRank:
            ups = itertools.islice(packed, len(product.adapters))
            made = [
                (self._at(down_weight(each)), up.panels, up.bias, up.inputs, each.scaling)
                for each, up in zip(product.adapters, ups, strict=True)
            ]
            self._adapt(weight, made)
        return weight

    def _adapt(self, weight: c.Weight, adapters: Sequence[tuple[Any, ...]]) -> None:
        """Give the record of a weight those of its adapters, from their fields."""
        records = (c.Adapter * len(adapters))(*adapters)
        self._adapters.append(records)
        weight.adapters, weight.adapter_count = ctypes.addressof(records), len(records)

    def _halves(self, wide: c.Weight) -> tuple[c.Weight, c.Weight]:
        """Return the records of both halves of a weight's outputs, with those of its adapters."""
        halves = split_halves(wide, self.dtype)
        if wide.adapter_count:
            whole = (c.Adapter * wide.adapter_count).from_address(wide.adapters)
            kind = native_products.NUMBERS
            ups = [
                split_halves(
                    c.Weight(of.panels, of.bias, None, None, wide.outputs, of.rank, kind),
                    self.dtype,
                )
                for of in whole
            ]
            for half, parts in zip(halves, zip(*ups, strict=True), strict=True):
                fields = [
                    (of.down, up.panels, up.bias, of.rank, of.scaling)
                    for of, up in zip(whole, parts, strict=True)
                ]
                self._adapt(half, fields)
        return halves

    def _norm(self, norm: NormLike | None) -> c.Norm:
        return norm_of(norm, self._at)

    def _at(self, tensor: Tensor | None) -> int | None:
        """Return the address of a tensor, and register it for the check in every step."""
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
        """Run all sublayers in place.

        Args:
            by: The native library.
            x: (R, C) fp32, input of the first sublayer; overwritten with the output of the last
                one. The values are rounded to the dtype of the weights.
            stream: (R, C) fp32, residual stream; its content is lost.
            seen: `ops.native.step.Seen` records, of each attention sublayer for each call.
            calls: Rows of each call.
            attention: Multiplications of the largest attention.

        Raises:
            torch.OutOfMemoryError: There is no memory for the attention scores.
        """
        step, held = self.given(x, stream, seen, calls)
        threads = native.threads_for(max(x.shape[0] * self.work, attention))
        if not c.run(by, threads, step):
            raise torch.OutOfMemoryError(
                f"no memory for the scores of {len(x)} rows in each of {threads} threads"
            )
        del held  # Kept alive until C has read it.

    def given(
        self, x: Tensor, stream: Tensor, seen: Any, calls: Sequence[Rows]
    ) -> tuple[c.Step, list[Any]]:
        """Return the arguments of the library, and objects to keep alive while it runs.

        The arguments are as in `run`.
        """
        (rows, width), (wide, mixed) = x.shape, self._sizes
        mixtures = (s.mixer for s in self.sublayers if isinstance(s.mixer, Experts))
        routed = max((experts.scratch(each, rows, width) for each in mixtures), default=0)
        # Two residual sums, outputs of input products, attention or feed-forward outputs, experts,
        # bytes, adapters.
        room = (
            rows * width,
            rows * width,
            rows * wide,
            rows * mixed,
            routed,
            rows * self._byte_row // 4,
            rows * self._low,
        )
        scratch = self.memory.take(x, sum(room))
        sum_at, spare_at, wide_at, mixed_at, routed_at, bytes_at, low_at = _addresses(scratch, room)
        if self.norm_first:
            sum_at = stream.data_ptr()
        placed = (c.Rows * len(calls))(*_placed(calls))
        step = c.Step(
            ctypes.addressof(self.made),
            ctypes.addressof(seen),
            ctypes.addressof(placed),
            len(self.sublayers),
            len(calls),
            *x.shape,
            self.norm_first,
            native.DTYPES[self.dtype],
            x.data_ptr(),
            sum_at,
            spare_at,
            wide_at,
            mixed_at,
            routed_at,
            bytes_at if self._byte_row else None,
            low_at if self._low else None,
        )
        return step, [scratch, placed]


def _blocks_fit(mixer: SelfAttention, made: int) -> bool:
    """Return whether the heads of a single product, of `made` outputs, fill its blocks evenly."""
    heads = made // mixer.dims
    key_heads = (heads - mixer.heads) // 2
    return (
        heads * mixer.dims == made
        and key_heads > 0
        and heads == mixer.heads + 2 * key_heads
        and mixer.heads % mixer.blocks == key_heads % mixer.blocks == 0
        and mixer.heads % key_heads == 0
        and mixer.key_heads == (mixer.heads if mixer.repeats_kv else key_heads)
    )


def _placed(calls: Sequence[Rows]) -> Iterator[tuple[int, int, int, bool]]:
    """Yield the first row and the fields of each call, whose rows are concatenated."""
    first = 0
    for sentences, beams, successive in calls:
        yield first, sentences, beams, successive
        first += sentences * beams


def _addresses(room: Tensor, sizes: Sequence[int]) -> list[int]:
    """Return the addresses of consecutive fp32 arrays of the given sizes in elements."""
    starts = itertools.accumulate(sizes, initial=0)
    return [room.data_ptr() + 4 * start for start, _ in zip(starts, sizes, strict=False)]
