"""Sublayers of a decode step: attention or feed-forward, projection, residual sum and norm."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastgen.models.comparison import comparison
from fastgen.models.layers.head_products import HeadProducts
from fastgen.models.layers.linear import Product
from fastgen.models.layers.norm import NormLike, unnormed
from fastgen.models.layers.positions import AttentionBias, Rotary
from fastgen.models.runtime.step_inputs import CallStepInputs, Scoring, StepInputs
from fastgen.ops.activation import fused_activation
from fastgen.ops.dispatch import runs_kernels
from fastgen.ops.rotation import Rotation, rotated


@dataclass(frozen=True)
class SelfAttention:
    """Self-attention of each beam's newest token over its text, including that token.

    Attributes:
        projections: Three products of queries, keys and values, or a single product of all three.
        heads: Number of query heads H.
        dims: Head dimension D.
        scale: Factor of the scores.
        query_norm: Norm of the queries, per head or over all (`norms_all_heads`); None for none.
        key_norm: The same for the keys.
        bias: Bias of the scores by distance; None for none.
        rotary: Rotary position embedding of queries and keys; None for none.
        softcap: Soft cap of the scores; None for none.
        blocks: Number of blocks of the outputs of a single product; each block has the queries,
            keys and values of the same number of heads.
        values_first: Whether values come before keys in those blocks.
        repeats_kv: Whether each key head is stored once per query head that reads it.
        interleaved: Whether the rotation pairs adjacent elements (GPT-J style).
        norms_all_heads: Whether the norms run over all heads together.
        norms_rotated: Whether the norms come after the rotation.
        rotates_fp32: Whether the rotation rounds queries and keys to fp32 first.
        sinks: (H,), one more score per head, whose weight belongs to no key; None for none.
    """

    projections: Sequence[Product]
    heads: int
    dims: int
    scale: float
    query_norm: NormLike | None = None
    key_norm: NormLike | None = None
    bias: AttentionBias | None = None
    rotary: Rotary | None = None
    softcap: float | None = None
    blocks: int = 1
    values_first: bool = False
    repeats_kv: bool = False
    interleaved: bool = False
    norms_all_heads: bool = False
    norms_rotated: bool = False
    rotates_fp32: bool = False
    sinks: Tensor | None = None

    @property
    def key_heads(self) -> int:
        """Number of key and value heads in the cache."""
        return (
            self.heads
            if self.repeats_kv
            else (sum(part.outputs for part in self.projections) // self.dims - self.heads) // 2
        )

    @property
    def cached_dims(self) -> tuple[int, int]:
        """Dimensions of keys and of values in the cache."""
        return self.dims, self.dims

    @functools.cached_property
    def scoring(self) -> Scoring:
        return Scoring(self.scale, self.softcap, self.bias, self.sinks)

    def __call__(self, x: Tensor, layer: int, context: StepInputs) -> Tensor:
        projected = [part.apply(x).unflatten(1, (-1, self.dims)) for part in self.projections]
        query, key, value = projected if len(projected) > 1 else self._split(projected[0])
        if not self.norms_rotated:
            query, key = self._normed(query, self.query_norm), self._normed(key, self.key_norm)
        if self.rotary is not None:
            angles = context.rotation(self.rotary, x)
            rotation = Rotation(*angles, self.interleaved, self.rotates_fp32)
            plain = not (self.repeats_kv or self.norms_rotated)
            if isinstance(context, CallStepInputs) and plain and runs_kernels(query):
                return context.self_attention(layer, query, key, value, self.scoring, rotation)
            query, key = rotated(query, rotation), rotated(key, rotation)
        if self.norms_rotated:
            query, key = self._normed(query, self.query_norm), self._normed(key, self.key_norm)
        if self.repeats_kv:
            key, value = (
                each.repeat_interleave(self.heads // each.shape[1], 1) for each in (key, value)
            )
        return context.self_attention(layer, query, key, value, self.scoring)

    def _normed(self, x: Tensor, of_heads: NormLike | None) -> Tensor:
        if of_heads is None:
            return x
        return of_heads(x.flatten(1))[0].view_as(x) if self.norms_all_heads else of_heads(x)[0]

    def _split(self, made: Tensor) -> Sequence[Tensor]:
        """Split the output of a single product into queries, keys and values.

        Args:
            made: (R, heads of all three, D).

        Returns:
            Queries (R, H, D), keys and values (R, Hkv, D).
        """
        heads = made.shape[1] // self.blocks
        query_heads = self.heads // self.blocks
        key_heads = (heads - query_heads) // 2
        parts = made.unflatten(1, (self.blocks, heads)).split(
            (query_heads, key_heads, key_heads), 2
        )
        query, key, value = (part.flatten(1, 2) for part in parts)
        return (query, value, key) if self.values_first else (query, key, value)


@dataclass(frozen=True)
class LatentAttention(SelfAttention):
    """Self-attention over a cache of latent vectors, from which keys and values are computed.

    The cache holds the latent vectors as keys and the rotated part of the keys, which all heads
    share, as values. The projections from latent vectors run on queries and outputs instead.

    Attributes:
        projections: The product of the queries, or the two around `query_norm`.
        dims: Dimensions of a head's queries and keys.
        key_norm: Norm of the latent vectors.
        compress: Product of the latent vectors (C) and the rotated part of the keys (E).
        expand: (H, N + D, C), which maps a latent vector to keys without the rotated part, of N
            dimensions per head, and values.
        rope_dim: E.
        pairs_apart: Whether channels that are rotated as adjacent pairs are half the channels apart
            afterwards.
        of_heads: The products with `expand` of each head's queries, and of its attention output, in
            C; None where C does not run them.
    """

    compress: Product = field(kw_only=True)
    expand: Tensor = field(kw_only=True)
    rope_dim: int = field(kw_only=True)
    pairs_apart: bool = field(kw_only=True)
    of_heads: tuple[HeadProducts, HeadProducts] | None = field(kw_only=True, default=None)

    @property
    def key_heads(self) -> int:
        return 1

    @property
    def cached_dims(self) -> tuple[int, int]:
        return self.expand.shape[2], self.rope_dim

    @property
    def value_dims(self) -> int:
        """Dimensions of a head's output."""
        return self.expand.shape[1] + self.rope_dim - self.dims

    @functools.cached_property
    def scoring(self) -> Scoring:
        return Scoring(self.scale, bias=self.bias, latent=True)

    def __call__(self, x: Tensor, layer: int, context: StepInputs) -> Tensor:
        query = self.projections[0].apply(x)
        if self.query_norm is not None:
            query = self.projections[1].apply(self.query_norm(query)[0])
        query = query.unflatten(1, (self.heads, self.dims))
        latent, key = self.compress.apply(x).split([self.expand.shape[2], self.rope_dim], 1)
        assert self.key_norm is not None
        assert self.rotary is not None
        latent = self.key_norm(latent)[0]
        of_keys, of_values = self.expand.split(
            [nope_dim := self.dims - self.rope_dim, self.expand.shape[1] - nope_dim], 1
        )
        angles = context.rotation(self.rotary, x)
        rotation = Rotation(*angles, self.interleaved, self.rotates_fp32)
        asked = torch.bmm(query[..., :nope_dim].transpose(0, 1), of_keys).transpose(0, 1)
        query = torch.cat([asked, self._rotated(query[..., nope_dim:], rotation)], 2)
        key = self._rotated(key[:, None], rotation)
        mixed = context.self_attention(layer, query, latent[:, None], key, self.scoring)
        mixed = mixed.view(len(x), self.heads, -1).transpose(0, 1)
        return torch.bmm(mixed, of_values.transpose(1, 2)).transpose(0, 1).flatten(1)

    def _rotated(self, x: Tensor, rotation: Rotation) -> Tensor:
        if self.pairs_apart:
            x = x.unflatten(2, (-1, 2)).transpose(2, 3).flatten(2)
        return rotated(x, rotation)


@dataclass(frozen=True)
class CrossAttention:
    """Cross-attention of the newest token over precomputed keys and values of the source.

    Attributes:
        query: Product of the queries.
        heads: Number of query heads H.
        dims: Head dimension D.
        scale: Factor of the scores.
        kv_projections: Products of the keys and values; None if no linear layers make them.
    """

    query: Product
    heads: int
    dims: int
    scale: float
    kv_projections: tuple[Product, Product] | None = None

    def __call__(self, x: Tensor, layer: int, context: StepInputs) -> Tensor:
        return context.cross_attention(
            layer, self.query.apply(x).view(-1, self.heads, self.dims), self.scale
        )


@dataclass(frozen=True)
class FeedForward:
    """The first half of a feed-forward block: an activated linear layer with an optional gate.

    Attributes:
        activated: The linear layer whose output is activated.
        activation: Kind of activation, as in `ops.activation`.
        multiplier: Linear layer of the gate; None for none.
        halves: Whether the second half of the output of `activated` is the gate of the first half.
    """

    activated: Product
    activation: str
    multiplier: Product | None = None
    halves: bool = False

    def __call__(self, x: Tensor, layer: int, context: Any) -> Tensor:
        if self.halves:
            active, gate = self.activated.apply(x).chunk(2, 1)
            return fused_activation(active, self.activation, gate=gate)
        if self.multiplier is None:
            return self.activated.apply(x, self.activation)
        if self.activated.fuses:
            return self.activated.apply(x, self.activation).mul_(self.multiplier.apply(x))
        return fused_activation(
            self.activated.apply(x), self.activation, gate=self.multiplier.apply(x)
        )


@dataclass(frozen=True)
class Sublayer:
    """A sublayer: attention or feed-forward, an output projection, the residual sum, and a norm.

    Attributes:
        layer: Index of the decoder layer.
        mixer: Attention or feed-forward, called with the input, `layer` and the step's inputs.
        out: Product of the output projection.
        norm: Norm of the residual sum.
        own: Norm of the projection's output before the residual sum; None for none.
        parallel: Whether `norm` gets the incoming residual stream instead of the sum. The next
            sublayer then reads the same input and runs in parallel to this one.
    """

    layer: int
    mixer: Callable[[Tensor, int, Any], Tensor]
    out: Product
    norm: NormLike = unnormed
    own: NormLike | None = None
    parallel: bool = False

    def __call__(self, x: Tensor, stream: Tensor, context: Any) -> tuple[Tensor, Tensor]:
        """Run the sublayer.

        Args:
            x: Input of the sublayer (R, C).
            stream: Residual stream (R, C).
            context: Inputs of the step, which `mixer` reads.

        Returns:
            The input of the next sublayer and the residual stream, (R, C) each.
        """
        outputs = self._made(x, stream, context)
        if (compared := comparison.get()) is None or compared.rounding is None:
            return outputs
        return compared.rounding(outputs[0]), compared.rounding(outputs[1])

    def _made(self, x: Tensor, stream: Tensor, context: Any) -> tuple[Tensor, Tensor]:
        mixed = self.mixer(x, self.layer, context)
        if self.parallel:
            return self.norm(stream)[0], self.out.apply(mixed, residual=stream)
        if self.own is not None:
            return self.norm(self.own(self.out.apply(mixed))[0], stream)
        if self.out.fuses:
            return self.norm(self.out.apply(mixed, residual=stream))
        return self.norm(self.out.apply(mixed), stream)
