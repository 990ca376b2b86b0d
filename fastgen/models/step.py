"""One decode step of a decoder from its weights: between two matrix products only what has to be there.

A decoder is a row of sublayers: attention over the text, attention over the source, feed-forward. What comes behind
each is the same, a projection, the sum with what went in, and a norm: the sublayer's own, or, where norms come first,
that of the next sublayer. So every one of them ends in the same two operations, whatever the family.

Source: Wang et al. 2021 (LightSeq), section 2.1: one operation between two matrix products.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastgen.models.linear import Product
from fastgen.ops.activation import fused_activation
from fastgen.ops.beam_attention import beam_attention, beam_attention_with_weights
from fastgen.ops.norm import norm


class KeysAndValues(Protocol):
    """What a step needs of a layer of the cache: keys and values (B, Hkv, N, D), of M beams per sentence."""

    beams: int

    @property
    def keys(self) -> Tensor: ...
    @property
    def values(self) -> Tensor: ...

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Write the newest token of every beam: keys, values (B * M, Hkv, 1, D)."""
        ...


class Surroundings(Protocol):
    """What a step reads beside the weights: a context, or several of them with their rows one behind the other."""

    @property
    def position(self) -> int | Tensor:
        """Of the newest token, the first being 0; (R,) int64 where rows differ."""
        ...

    def rotation(self, rotary: "Rotary", x: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the newest token's position, of the dtype and on the device of x."""
        ...

    def over_text(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, bias: "RelativeBias | None", scale: float,
        softcap: float | None,
    ) -> Tensor:  # fmt: skip
        """Keep key and value (R, Hkv, D) of the newest token; return what query (R, H, D) finds there, (R, H * D)."""
        ...

    def over_source(self, layer: int, query: Tensor, scale: float) -> Tensor:
        """Return what query (R, H, D) finds in the source, (R, H * D)."""
        ...


@dataclass
class Context:
    """What a step reads beside the weights: `Surroundings` of the sentences of one call.

    Attributes:
        sentences: B, of R = B * M rows.
        length: tokens of the text, of which the newest is run; (1,) int64 where only the device knows.
        prefix: of those, the ones that all beams share.
        position: of the newest token, the first being 0; (1,) int64 where only the device knows, (R,) where rows
            differ.
        text, source: keys and values of each layer.
        text_mask, source_mask: additive, broadcastable to (B, H, M, N); None where everything is seen.
        times: (B, F) int64, the step that each slot behind the prefix is of; None where there are M of each, in order.
        seen: (1,) int64, how many keys of the text there are, where only the device knows.
        watched: the layer whose attention over the source is wanted; it comes out in `weights`, (R, S) fp32.
    """

    sentences: int
    length: int | Tensor
    prefix: int
    position: int | Tensor
    text: Sequence[KeysAndValues]
    source: Sequence[KeysAndValues]
    text_mask: Tensor | None = None
    source_mask: Tensor | None = None
    times: Tensor | None = None
    seen: Tensor | None = None
    watched: int | None = None
    weights: Tensor | None = None
    biased: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    rotations: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict[int, tuple[Tensor, Tensor]])

    def text_mask_with(self, bias: "RelativeBias | None") -> Tensor | None:
        """The mask of the text plus a bias, made once for all layers that have it."""
        mask = self.text_mask
        if bias is None:
            return mask
        return self.once(bias, lambda: bias.over(self) if mask is None else bias.over(self) + mask)

    def once(self, of: object, make: Callable[[], Tensor]) -> Tensor:
        """What is made of something that layers have in common, made once for all of them."""
        return self.biased[id(of)] if id(of) in self.biased else self.biased.setdefault(id(of), make())

    def distance(self) -> Tensor:
        """How far the tokens of the prefix and of the slots lie behind the newest one, (1 or B, N) int64."""
        kept, steps = self.text[0], self.times
        if steps is None:
            steps = (torch.arange(kept.keys.shape[2] - self.prefix, device=kept.keys.device) // kept.beams)[None]
        prefix = torch.arange(self.prefix, device=steps.device).expand(steps.shape[0], -1)
        return self.length - 1 - torch.cat([prefix, steps + self.prefix], 1)

    def rotation(self, rotary: "Rotary", x: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the newest token's position, made once for all layers; x: of their dtype and device."""
        return turned_once(self.rotations, rotary, self.position, x)

    def over_text(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, bias: "RelativeBias | None", scale: float,
        softcap: float | None,
    ) -> Tensor:  # fmt: skip
        kept = self.text[layer]
        kept.append(key[:, :, None], value[:, :, None])
        rows, mask = query.shape[0], self.text_mask_with(bias)
        query = query.reshape(self.sentences, -1, *query.shape[1:])
        return beam_attention(query, kept.keys, kept.values, mask, scale, softcap, self.seen).reshape(rows, -1)

    def over_source(self, layer: int, query: Tensor, scale: float) -> Tensor:
        kept, rows = self.source[layer], query.shape[0]
        query = query.view(self.sentences, -1, *query.shape[1:])
        if self.watched == layer:
            mixed, weights = beam_attention_with_weights(query, kept.keys, kept.values, self.source_mask, scale)
            self.weights = weights.flatten(0, 1)
        else:
            mixed = beam_attention(query, kept.keys, kept.values, self.source_mask, scale)
        return mixed.reshape(rows, -1)


Rotary = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Gives cosine and sine (1 or R, 1, E), of the dtype and device of a tensor, for positions (1 or R, 1)."""


def turned_once(
    known: dict[int, tuple[Tensor, Tensor]], rotary: Rotary, at: int | Tensor, x: Tensor
) -> tuple[Tensor, Tensor]:
    """Cosine and sine for positions `at`, as `Context` has them, kept in `known` for the other layers of a step."""
    if id(rotary) not in known:
        known[id(rotary)] = rotary(
            x, at[:, None] if isinstance(at, Tensor) else torch.full((1, 1), at, device=x.device)
        )
    return known[id(rotary)]


@dataclass(frozen=True)
class RelativeBias:
    """What is added to attention scores by a key's distance: `make` gives (H, L), from 0 on (Raffel et al. 2020)."""

    make: Callable[[], Tensor]

    @functools.cached_property
    def by_distance(self) -> Tensor:
        return self.make()

    def over(self, context: Context) -> Tensor:
        """Return (1 or B, H, 1, N) over the prefix and the slots of a context."""
        distance = context.distance().clamp_(0, self.by_distance.shape[1] - 1)  # of slots that are not filled yet, too
        found = self.by_distance.index_select(1, distance.flatten())
        return found.view(-1, *distance.shape).transpose(0, 1)[:, :, None]


class NormLike(Protocol):
    """A norm of the sum of two tensors (..., C)."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The normed sum, and the sum."""
        ...


def unnormed(x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """In place of a norm: the sum, and the sum."""
    total = x if residual is None else x + residual
    return total, total


@dataclass(frozen=True)
class OwnNorm:
    """A norm by its module's own forward."""

    module: nn.Module

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        return type(self.module).forward(self.module, total), total


@dataclass(frozen=True)
class Norm:
    """LayerNorm, or RMSNorm; parameters as `ops.norm` has them."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    rms: bool = False
    offset: float = 0.0

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The normed sum, and the sum."""
        return norm(x, self.weight, self.bias, self.eps, residual, rms=self.rms, offset=self.offset)


@dataclass(frozen=True)
class TextAttention:
    """Each beam's newest token attends to its text, itself included.

    Attributes:
        parts: products of queries, keys and values, or the one that has them side by side.
        by_head: whether that one has those of each head side by side, not those of all heads.
        query_norm, key_norm: of each head; None for none.
        bias: by distance; None for none.
        rotary: turns queries and keys; None where they are not turned.
        softcap: of the scores; None for none.
    """

    parts: Sequence[Product]
    heads: int
    dims: int
    scale: float
    query_norm: NormLike | None = None
    key_norm: NormLike | None = None
    bias: RelativeBias | None = None
    rotary: Rotary | None = None
    softcap: float | None = None
    by_head: bool = False

    def __call__(self, x: Tensor, layer: int, context: Surroundings) -> Tensor:
        made = [part.apply(x).unflatten(1, (-1, self.dims)) for part in self.parts]
        if self.by_head:
            made = made[0].unflatten(1, (self.heads, 3)).unbind(2)
        elif len(made) == 1:
            kv_heads = (made[0].shape[1] - self.heads) // 2
            made = made[0].split((self.heads, kv_heads, kv_heads), 1)
        query, key, value = made
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query)[0], self.key_norm(key)[0]
        if self.rotary is not None:
            turned = context.rotation(self.rotary, x)
            query, key = _rotated(query, *turned), _rotated(key, *turned)
        return context.over_text(layer, query, key, value, self.bias, self.scale, self.softcap)


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021) of the first E of x (R, H, D); cosine and sine (1 or R, 1, E)."""
    turned, rest = x[..., : cosine.shape[-1]], x[..., cosine.shape[-1] :]
    first, second = turned.chunk(2, -1)
    turned = turned * cosine + torch.cat([-second, first], -1) * sine
    return torch.cat([turned, rest], -1) if rest.shape[-1] else turned


@dataclass(frozen=True)
class SourceAttention:
    """The newest token attends to the encoder's output, whose keys and values are there already."""

    query: Product
    heads: int
    dims: int
    scale: float

    def __call__(self, x: Tensor, layer: int, context: Surroundings) -> Tensor:
        return context.over_source(layer, self.query.apply(x).view(-1, self.heads, self.dims), self.scale)


@dataclass(frozen=True)
class FeedForward:
    """The wide layer and its activation function, times a gate where there is one.

    gated: that layer; None for none. halves: whether the second half of the wide layer's output is times the first.
    """

    wide: Product
    activation: str
    gated: Product | None = None
    halves: bool = False

    def __call__(self, x: Tensor, layer: int, context: Surroundings) -> Tensor:
        if self.halves:
            active, gate = self.wide.apply(x).chunk(2, 1)
            return fused_activation(active, self.activation, gate=gate)
        if self.gated is None:
            return self.wide.apply(x, self.activation)
        if self.wide.fuses:
            return self.wide.apply(x, self.activation).mul_(self.gated.apply(x))
        return fused_activation(self.wide.apply(x), self.activation, gate=self.gated.apply(x))


@dataclass(frozen=True)
class Sublayer:
    """`mix` of the input, its projection, the sum with the residual stream, and the norm behind it.

    own: a norm of the projection's output, before the sum; None for none.
    parallel: whether the norm behind is of the stream that came in, without the sum: the next sublayer reads that.
    """

    layer: int
    mix: Callable[[Tensor, int, Surroundings], Tensor]
    out: Product
    norm: NormLike = unnormed
    own: NormLike | None = None
    parallel: bool = False

    def __call__(self, x: Tensor, stream: Tensor, context: Surroundings) -> tuple[Tensor, Tensor]:
        """Return what the next sublayer reads, the normed sum, and the sum, (R, C) each."""
        mixed = self.mix(x, self.layer, context)
        if self.parallel:
            return self.norm(stream)[0], self.out.apply(mixed, residual=stream)
        if self.own is not None:
            return self.norm(self.own(self.out.apply(mixed))[0], stream)
        if self.out.fuses:
            return self.norm(self.out.apply(mixed, residual=stream))
        return self.norm(self.out.apply(mixed), stream)


@dataclass(frozen=True)
class Embedding:
    """Token embeddings, scaled, plus those of positions, normed.

    positions: (P, C), whose row `first` is the position 0; None for none. padding: the token that has row `padding_row`
    wherever it stands; None for none. norm_tokens: whether the norm is of the tokens alone.
    """

    tokens: Tensor
    scale: float = 1.0
    positions: Tensor | None = None
    first: int = 0
    padding: int | None = None
    padding_row: int = 0
    norm: NormLike | None = None
    norm_tokens: bool = False

    def __call__(self, ids: Tensor, position: int | Tensor) -> Tensor:
        x = F.embedding(ids, self.tokens)
        if self.scale != 1.0:
            x.mul_(self.scale)
        if self.norm is not None and self.norm_tokens:
            x = self.norm(x)[0]
        if self.positions is not None:
            row = self.positions[self.first + position]
            if self.padding is not None:
                row = torch.where((ids == self.padding)[:, None], self.positions[self.padding_row], row)
            x = x.add_(row)
        return x if self.norm is None or self.norm_tokens else self.norm(x)[0]


@dataclass(frozen=True)
class DecoderStep:
    """A decoder's step.

    Attributes:
        module: the decoder.
        first: the norm before the first sublayer, where norms come first; None where they come behind.
        bias: (V,), added to the logits; None for none.
        scale: of what the head reads.
        softcap: of the logits; None for none.
        streams: rows of each row of the batch, of which the head reads the last (`models.streams`).
        facts: what it was made from beside weights, the model's config among it: equal where nothing has changed.
    """

    module: nn.Module
    embedding: Embedding
    sublayers: Sequence[Sublayer]
    first: NormLike | None
    head: Product
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    streams: int = 1
    facts: tuple[object, ...] = ()

    @property
    def layers(self) -> tuple[int, int]:
        """How many attend to the text, and to a source."""
        mixes = [sublayer.mix for sublayer in self.sublayers]
        return sum(isinstance(m, TextAttention) for m in mixes), sum(isinstance(m, SourceAttention) for m in mixes)

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.tokens.dtype

    def __call__(self, ids: Tensor, context: Surroundings) -> Tensor:
        """Return the logits (R, V) of what follows ids (R,) int64, the newest token of each row."""
        stream = self.embedding(ids, context.position)
        x = stream if self.first is None else self.first(stream)[0]
        for sublayer in self.sublayers:
            x, total = sublayer(x, stream, context)
            stream = x if self.first is None else total
        x = x[self.streams - 1 :: self.streams].contiguous()  # itself, where there is one stream
        logits = self.head.apply(x if self.scale == 1.0 else x * self.scale)
        if self.bias is not None:
            logits.add_(self.bias)
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)
