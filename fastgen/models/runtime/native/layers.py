"""Layers that C implements: which ones, their products, weights and norms as C records."""

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor

from fastgen import config
from fastgen.models.comparison import comparison
from fastgen.models.layers.experts import ExpertProducts, Experts
from fastgen.models.layers.head_products import HeadProducts
from fastgen.models.layers.linear import Linear, Product
from fastgen.models.layers.low_rank import Adapter, LowRank
from fastgen.models.layers.norm import ConstantScale, Norm, NormLike, unnormed
from fastgen.models.runtime.encoder import EncoderSelfAttention
from fastgen.models.runtime.native import experts
from fastgen.models.runtime.sublayers import (
    CrossAttention,
    FeedForward,
    LatentAttention,
    SelfAttention,
    Sublayer,
)
from fastgen.ops import native
from fastgen.ops.native import products as native_products
from fastgen.ops.native import step as c


def supports_sublayers(sublayers: Sequence[Sublayer]) -> bool:
    """Return whether C implements all parts of the sublayers, and their weights may be packed."""
    return bool(sublayers) and config.settings().packs and all(map(supports_sublayer, sublayers))


def supports_sublayer(sublayer: Sublayer) -> bool:
    """Return whether C implements all parts of a sublayer."""
    mixer, norm, own = sublayer.mixer, sublayer.norm, sublayer.own
    if not (norm is unnormed or is_norm(norm)):
        return False
    if own is not None and (
        sublayer.parallel
        or not (isinstance(own, ConstantScale) or is_norm(own))
        or (isinstance(mixer, Experts) and mixer.routing is not None and mixer.routing.norm)
    ):
        return False
    return _supports_mixer(mixer) and all(
        isinstance(product, (Linear, ExpertProducts, HeadProducts))
        or supports_adapter(product, mixer)
        for product in products_of(sublayer)
    )


def supports_adapter(product: object, mixer: Any) -> TypeGuard[LowRank]:
    """Return whether C implements a product with an adapter in a sublayer."""
    return (
        type(product) is LowRank
        and isinstance(product.base, Linear)
        and all(isinstance(each.up, Linear) for each in product.adapters)
        and all(is_readable(w) and not w.is_inference() for w in map(down_weight, product.adapters))
        and not isinstance(mixer, Experts)
    )


def down_weight(adapter: Adapter) -> Tensor:
    """Return the weight of an adapter's first product, which C reads as it is."""
    return cast(Any, adapter.down).module.weight


def packed_of(product: Any) -> list[Any]:
    """Return the products whose weights are packed: the product itself, or those of adapters."""
    if type(product) is not LowRank:
        return [product]
    return [product.base, *(each.up for each in product.adapters)]


def _supports_mixer(mixer: Any) -> bool:
    if type(mixer) is SelfAttention:
        sinks = mixer.sinks
        if sinks is not None and not (is_readable(sinks) and sinks.is_contiguous()):
            return False
        norms = [norm for norm in (mixer.query_norm, mixer.key_norm) if norm is not None]
        return (
            len(norms) != 1
            and all(map(is_norm, norms))
            and mixer.dims in native.HEAD_DIMS
            and (len(mixer.projections) == 1 or not mixer.repeats_kv)
        )
    if type(mixer) is LatentAttention:
        norms = [mixer.key_norm, *([] if mixer.query_norm is None else [mixer.query_norm])]
        return (
            mixer.of_heads is not None
            and all(norm is not None and is_norm(norm) for norm in norms)
            and mixer.bias is None
            and not (mixer.pairs_apart and mixer.interleaved)
            and all(dims % native.HEAD_DIMS[0] == 0 for dims in mixer.cached_dims)
        )
    if type(mixer) in (CrossAttention, EncoderSelfAttention):
        return mixer.dims in native.HEAD_DIMS
    return type(mixer) is FeedForward or (type(mixer) is Experts and experts.is_supported(mixer))


def is_norm(norm: NormLike) -> TypeGuard[Norm]:
    """Return whether C can read a norm."""
    held = (norm.weight, norm.bias) if type(norm) is Norm else ()
    return type(norm) is Norm and all(
        x is None or (is_readable(x) and x.is_contiguous()) for x in held
    )


def norm_fits(norm: NormLike | None, width: int, dtype: torch.dtype) -> bool:
    """Return whether the parameters of a norm, if any, have `width` elements of a dtype."""
    held = (norm.weight, norm.bias) if isinstance(norm, Norm) else ()
    return all(vector_fits(x, width, dtype) for x in held)


def vector_fits(x: Tensor | None, width: int, dtype: torch.dtype) -> bool:
    """Return whether x, if any, has `width` elements of a dtype."""
    return x is None or (x.shape == (width,) and x.dtype == dtype)


def splits_panel(mixer: object, panel: int) -> TypeGuard[FeedForward]:
    """Return whether the second half of a wide layer starts within a panel."""
    return (
        type(mixer) is FeedForward and mixer.halves and mixer.activated.outputs % (2 * panel) != 0
    )


def weight_of(by: native.Library, weight: Any, bias: Tensor | None) -> c.Weight:
    """Return the C record of a weight and its bias, whose addresses it holds.

    Args:
        by: The native library.
        weight: `ops.linear.PanelWeight` or `ops.native.Int8Weight`.
        bias: (N,), or None.
    """
    address = None if bias is None else bias.data_ptr()
    in_bytes = isinstance(weight, native_products.Int8Weight)
    others = [each.data_ptr() for each in (weight.scales, weight.sums)] if in_bytes else [None] * 2
    kind = native_products.kind_of(by, weight if in_bytes else weight.panels)
    return c.Weight(weight.panels.data_ptr(), address, *others, weight.outputs, weight.inputs, kind)


def split_halves(wide: c.Weight, dtype: torch.dtype) -> tuple[c.Weight, c.Weight]:
    """Split a weight, whose bias has a dtype, into the halves of its outputs."""
    half, size, in_bytes = wide.outputs // 2, dtype.itemsize, wide.kind != native_products.NUMBERS
    in_numbers = size * native_products.padded_inputs(wide.inputs, dtype)
    of_output = native_products.byte_row(wide.inputs) - 4 if in_bytes else in_numbers
    starts = wide.panels, wide.bias, wide.scales, wide.sums
    steps = of_output, size, 4, 4
    second = (
        None if at is None else at + step * half for at, step in zip(starts, steps, strict=True)
    )
    return (
        c.Weight(*starts, half, wide.inputs, wide.kind),
        c.Weight(*second, half, wide.inputs, wide.kind),
    )


def norm_of(norm: NormLike | None, at: Callable[[Tensor | None], int | None]) -> c.Norm:
    """Return the C record of a norm, or of none.

    Args:
        norm: The norm; `unnormed` or None for none.
        at: Returns the address of a tensor.
    """
    if isinstance(norm, ConstantScale):
        return c.Norm(offset=norm.factor, kind=c.CONSTANT_SCALE)
    if not isinstance(norm, Norm):
        return c.Norm(kind=c.UNNORMED)
    kind = c.RMS_NORM if norm.rms else c.LAYER_NORM
    return c.Norm(at(norm.weight), at(norm.bias), norm.eps, norm.offset, kind)


def is_readable(x: Tensor) -> bool:
    """Return whether C reads tensors of this dtype and device."""
    return x.dtype in native.DTYPES and x.is_cpu


def products_of(sublayer: Sublayer) -> Sequence[Any]:
    """Return all products of a sublayer; except for experts, the output projection last."""
    mixer: Any = sublayer.mixer
    if type(mixer) is Experts:
        return experts.products(mixer)
    if type(mixer) in (SelfAttention, EncoderSelfAttention):
        parts = list[Product](mixer.projections)
    elif type(mixer) is CrossAttention:
        parts = [mixer.query]
    elif type(mixer) is LatentAttention:
        asked, *rest = mixer.projections
        parts = [asked, mixer.compress, *rest, *(mixer.of_heads or ())]
    else:
        parts = (
            [mixer.activated] if mixer.multiplier is None else [mixer.activated, mixer.multiplier]
        )
    return [*parts, sublayer.out]


def in_blocks(mixer: object) -> TypeGuard[SelfAttention]:
    """Return whether the outputs of a single product have another order than that of C."""
    return (
        type(mixer) is SelfAttention
        and len(mixer.projections) == 1
        and (mixer.blocks > 1 or mixer.values_first or mixer.repeats_kv)
    )


def input_elements(sublayer: Sublayer) -> int:
    """Return the elements per row that C reads from the input products of a sublayer."""
    if isinstance(sublayer.mixer, Experts):
        return experts.made(sublayer.mixer)[0]
    if isinstance(mixer := sublayer.mixer, LatentAttention):
        cached = sum(mixer.cached_dims)  # Once more after the norm and the rotation, and per head.
        return sum(p.outputs for p in mixer.projections) + (2 + mixer.heads) * cached
    if in_blocks(mixer):
        return (mixer.heads + 2 * mixer.key_heads) * mixer.dims
    return sum(product.outputs for product in products_of(sublayer)[:-1])


def mixer_elements(sublayer: Sublayer) -> int:
    """Return the elements per row of a sublayer's attention or feed-forward output.

    C writes the outputs of a single product there before it orders them.
    """
    mixer: Any = sublayer.mixer
    if isinstance(mixer, Experts):
        return experts.made(mixer)[1]
    if isinstance(mixer, LatentAttention):  # Outputs, and those in the space of latent vectors.
        return mixer.heads * (mixer.cached_dims[0] + mixer.value_dims)
    if in_blocks(mixer):
        return max(mixer.heads * mixer.dims, mixer.projections[0].outputs)
    return mixer.activated.outputs if isinstance(mixer, FeedForward) else mixer.heads * mixer.dims


def adapter_elements(sublayer: Sublayer) -> int:
    """Return the elements per row that both products of a sublayer's adapters output."""
    adapted = (product for product in products_of(sublayer) if type(product) is LowRank)
    ups: list[Any] = [each.up for product in adapted for each in product.adapters]
    halves = 2 if getattr(sublayer.mixer, "halves", False) else 1  # each with `down` of its own
    return sum(halves * up.inputs + up.outputs for up in ups)


def is_left_to_torch(x: Tensor) -> bool:
    """Return whether torch runs the sublayers for rows (R, C).

    It is the faster way for many rows in half precision, and perturbs them in an equivalence check.
    """
    return len(x) > native.most_rows(x.dtype) or (
        (compared := comparison.get()) is not None and compared.rounding is not None
    )


def copied(x: Tensor) -> Tensor:
    """Return a contiguous fp32 copy."""
    return x.to(torch.float32, memory_format=torch.contiguous_format, copy=True)


def strides(x: Tensor) -> list[int]:
    """Return the strides of all dimensions of x but the last; 0 for those of size 1."""
    return [step if size > 1 else 0 for step, size in zip(x.stride()[:-1], x.shape, strict=False)]
