"""One decode step of a decoder from its weights: between two matrix products only what has to be there.

A decoder is a row of sublayers: attention over the text, attention over the source, feed-forward. All end in the same
two operations, whatever the family: a projection with the sum, and a norm, the sublayer's own, or, where norms come
first, the next one's. Source: Wang et al. 2021 (LightSeq), section 2.1: one operation between two matrix products.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from fastgen.models.layers.linear import Product
from fastgen.models.layers.norm import NormLike, unnormed
from fastgen.models.layers.positions import Bias, Rotary, turned_once
from fastgen.ops.activation import fused_activation
from fastgen.ops.beam_attention import Newest, beam_attention, beam_attention_with_weights
from fastgen.ops.dispatch import runs_kernels
from fastgen.ops.embedding import embedding, rows_of_positions
from fastgen.ops.rotation import Rotation, rotated

rounding: ContextVar[Callable[[Tensor], Tensor] | None] = ContextVar(
    "fastgen_rounding", default=None
)
"""Rounds once more what a sublayer puts out, while it is tried what rounding does to a model (`equivalence_check`)."""


class KeysAndValues(Protocol):
    """What a step needs of a layer of the cache: keys and values (B, Hkv, N, D), of M beams per sentence."""

    beams: int

    @property
    def keys(self) -> Tensor: ...
    @property
    def values(self) -> Tensor: ...

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Write the newest token of every beam: keys, values (B * M, Hkv, 1, D)."""

    def append_turned(
        self, query: Tensor, key: Tensor, value: Tensor, rotation: Rotation
    ) -> Tensor:
        """The same of keys that are turned first, (B * M, Hkv, D); return the turned queries."""
        ...

    def reserve(self, keys: Tensor, values: Tensor) -> None:
        """Have the slots of the newest token of every beam, which attention then writes; keys, values: as `append`."""


class StepInputs(Protocol):
    """What a step reads beside the weights: a context, or several of them with their rows one behind the other."""

    @property
    def position(self) -> int | Tensor:
        """Of the newest token, the first being 0; (R,) int64 where rows differ."""
        ...

    def rotation(self, rotary: Rotary, x: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the newest token's position, of the dtype and on the device of x."""
        ...

    def self_attention(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, bias: Bias | None, scale: float,
        softcap: float | None,
    ) -> Tensor:  # fmt: skip
        """Keep key and value (R, Hkv, D) of the newest token; return what query (R, H, D) finds there, (R, H * D)."""
        ...

    def cross_attention(self, layer: int, query: Tensor, scale: float) -> Tensor:
        """Return what query (R, H, D) finds in the source, (R, H * D)."""
        ...


@dataclass
class Context:
    """What a step reads beside the weights: `StepInputs` of the sentences of one call.

    Attributes:
        sentences: B, of R = B * M rows.
        length: tokens of the text, of which the newest is run; (1,) int64 where only the device knows.
        prefix: of those, the ones that all beams share; (1,) int64 where only the device knows.
        position: of the newest token, the first being 0; (1,) int64 where the device knows, (R,) where rows differ.
        text, source: keys and values of each layer.
        text_mask, source_mask: additive, broadcastable to (B, H, M, N); None where everything is seen.
        times: (B, F) int64, the step that each slot behind the prefix is of; None where there are M of each, in order.
        seen: (1,) int64, how many keys of the text there are, where only the device knows.
        watched: the layer whose attention over the source is wanted; it comes out in `weights`, (R, S) fp32. For
            several steps in C that is where it is written, (steps, B, M, S).
    """

    sentences: int
    length: int | Tensor
    prefix: int | Tensor
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
    rotations: dict[int, tuple[Tensor, Tensor]] = field(
        default_factory=dict[int, tuple[Tensor, Tensor]]
    )

    def text_mask_with(self, bias: Bias | None) -> Tensor | None:
        """The mask of the text plus a bias, made once for all layers that have it."""
        if bias is None:
            return self.text_mask
        if id(bias) not in self.biased:
            found = bias.at(self.distances()[:, None], self._position_of_sentences())
            self.biased[id(bias)] = found if self.text_mask is None else found + self.text_mask
        return self.biased[id(bias)]

    def biases(self, bias: Bias, steps: int) -> Tensor:
        """A bias in so many steps in a row, none of which is open: (1 or B, H, steps, N), of all slots behind them."""
        later = torch.arange(steps, dtype=torch.int64, device=self.text[0].keys.device)[:, None]
        return bias.at(
            self.distances(steps)[:, None] + later, self._position_of_sentences() + later
        )

    def _position_of_sentences(self) -> int | Tensor:
        """`position`, where there are several as (1 or B, 1, 1): the beams of a sentence are at the same one."""
        if not isinstance(self.position, Tensor):
            return self.position
        return self.position.view(1 if len(self.position) == 1 else self.sentences, -1)[:, :1, None]

    def distances(self, more: int = 0) -> Tensor:
        """(1 or B, N) int64, from the newest token to each slot; less than 0 to those that are not filled yet.

        more: steps whose slots are still to come, that of the newest token among them.
        """
        keys, beams = self.text[0].keys, self.text[0].beams
        steps = self.times
        if isinstance(self.prefix, Tensor):
            slots = torch.arange(keys.shape[2], device=keys.device, dtype=torch.int64)
            behind = (slots - self.prefix).div(beams, rounding_mode="floor")
            return self.length - 1 - torch.where(behind < 0, slots, behind + self.prefix)[None]
        if steps is None:
            slots = torch.arange(
                keys.shape[2] - self.prefix + more * beams, device=keys.device, dtype=torch.int64
            )
            steps = slots.div(beams, rounding_mode="floor")[None]
        elif more:
            coming = torch.arange(more, device=keys.device, dtype=torch.int64).repeat_interleave(
                beams
            ) + (self.length - 1 - self.prefix)
            steps = torch.cat([steps, coming.expand(steps.shape[0], -1)], 1)
        prefix = torch.arange(self.prefix, device=keys.device, dtype=torch.int64).expand(
            steps.shape[0], -1
        )
        return self.length - 1 - torch.cat([prefix, steps + self.prefix], 1)

    def rotation(self, rotary: Rotary, x: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the newest token's position, made once for all layers; x: of their dtype and device."""
        return turned_once(self.rotations, rotary, self.position, x)

    def self_attention(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, bias: Bias | None, scale: float,
        softcap: float | None, rotation: Rotation | None = None,
    ) -> Tensor:  # fmt: skip
        """Arguments as `StepInputs` has them; rotation: of queries and keys that are not turned yet."""
        kept, newest = self.text[layer], None
        if rotation is not None:
            query = kept.append_turned(query, key, value, rotation)
        elif runs_kernels(query) and key.stride(2) == value.stride(2) == 1:
            newest = Newest(key, value)
            kept.reserve(key[:, :, None], value[:, :, None])
        else:
            kept.append(key[:, :, None], value[:, :, None])
        rows, mask = query.shape[0], self.text_mask_with(bias)
        query = query.reshape(self.sentences, -1, *query.shape[1:])
        mixed = beam_attention(
            query, kept.keys, kept.values, mask, scale, softcap, self.seen, newest
        )
        return mixed.reshape(rows, -1)

    def cross_attention(self, layer: int, query: Tensor, scale: float) -> Tensor:
        kept, rows = self.source[layer], query.shape[0]
        given = (
            query.view(self.sentences, -1, *query.shape[1:]),
            kept.keys,
            kept.values,
            self.source_mask,
            scale,
        )
        if self.watched != layer:
            return beam_attention(*given).reshape(rows, -1)
        mixed, weights = beam_attention_with_weights(*given)
        self.weights = weights.flatten(0, 1)
        return mixed.reshape(rows, -1)


@dataclass(frozen=True)
class TextAttention:
    """Each beam's newest token attends to its text, itself included.

    Attributes:
        parts: products of queries, keys and values, or the one that has them side by side.
        blocks: in how many blocks, of as many heads each, that one has its queries, keys and values side by side.
        values_first: whether values stand before keys there.
        spread: whether a key head is kept once for each query head that reads it.
        query_norm, key_norm: of each head, or, with `whole_norms`, of all together; None for none.
        bias: by distance; None for none.
        rotary: turns queries and keys; None where they are not turned.
        neighbours: whether neighbours are turned together.
        softcap: of the scores; None for none.
    """

    parts: Sequence[Product]
    heads: int
    dims: int
    scale: float
    query_norm: NormLike | None = None
    key_norm: NormLike | None = None
    bias: Bias | None = None
    rotary: Rotary | None = None
    softcap: float | None = None
    blocks: int = 1
    values_first: bool = False
    spread: bool = False
    neighbours: bool = False
    whole_norms: bool = False

    @property
    def key_heads(self) -> int:
        """Of keys and values, as they are kept."""
        return (
            self.heads
            if self.spread
            else (sum(part.outputs for part in self.parts) // self.dims - self.heads) // 2
        )

    def __call__(self, x: Tensor, layer: int, context: StepInputs) -> Tensor:
        made = [part.apply(x).unflatten(1, (-1, self.dims)) for part in self.parts]
        query, key, value = made if len(made) > 1 else self._split(made[0])
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self._normed(query, self.query_norm), self._normed(key, self.key_norm)
        if self.rotary is not None:
            rotation = Rotation(*context.rotation(self.rotary, x), self.neighbours)
            if isinstance(context, Context) and not self.spread and runs_kernels(query):
                return context.self_attention(
                    layer, query, key, value, self.bias, self.scale, self.softcap, rotation
                )
            query, key = rotated(query, rotation), rotated(key, rotation)
        if self.spread:
            key, value = (
                each.repeat_interleave(self.heads // each.shape[1], 1) for each in (key, value)
            )
        return context.self_attention(layer, query, key, value, self.bias, self.scale, self.softcap)

    def _normed(self, x: Tensor, of_heads: NormLike) -> Tensor:
        return of_heads(x.flatten(1))[0].view_as(x) if self.whole_norms else of_heads(x)[0]

    def _split(self, made: Tensor) -> Sequence[Tensor]:
        """Queries, keys and values (R, .., D) of one product (R, all of their heads, D)."""
        heads = made.shape[1] // self.blocks
        of_queries = self.heads // self.blocks
        others = (heads - of_queries) // 2
        parts = made.unflatten(1, (self.blocks, heads)).split((of_queries, others, others), 2)
        query, key, value = (part.flatten(1, 2) for part in parts)
        return (query, value, key) if self.values_first else (query, key, value)


@dataclass(frozen=True)
class SourceAttention:
    """The newest token attends to the encoder's output, whose keys and values are there already.

    made_by: what makes them of it; None where that is no product of linear layers.
    """

    query: Product
    heads: int
    dims: int
    scale: float
    made_by: tuple[Product, Product] | None = None

    def __call__(self, x: Tensor, layer: int, context: StepInputs) -> Tensor:
        return context.cross_attention(
            layer, self.query.apply(x).view(-1, self.heads, self.dims), self.scale
        )


@dataclass(frozen=True)
class FeedForward:
    """The wide layer and its activation function, times a gate where there is one.

    gated: that layer; None for none. halves: whether the second half of the wide layer's output is times the first.
    """

    wide: Product
    activation: str
    gated: Product | None = None
    halves: bool = False

    def __call__(self, x: Tensor, layer: int, context: Any) -> Tensor:
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
    mix: Callable[[Tensor, int, Any], Tensor]
    out: Product
    norm: NormLike = unnormed
    own: NormLike | None = None
    parallel: bool = False

    def __call__(self, x: Tensor, stream: Tensor, context: Any) -> tuple[Tensor, Tensor]:
        """Return what the next sublayer reads, the normed sum, and the sum, (R, C) each; context: what `mix` reads."""
        made = self._made(x, stream, context)
        return made if (noise := rounding.get()) is None else (noise(made[0]), noise(made[1]))

    def _made(self, x: Tensor, stream: Tensor, context: Any) -> tuple[Tensor, Tensor]:
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
    wherever it stands, or, where that is None, the row before its own; None for none. norm_tokens: whether the norm is
    of the tokens alone.
    """

    tokens: Tensor
    scale: float = 1.0
    positions: Tensor | None = None
    first: int = 0
    padding: int | None = None
    padding_row: int | None = 0
    norm: NormLike | None = None
    norm_tokens: bool = False

    def __call__(self, ids: Tensor, position: int | Tensor) -> Tensor:
        row, other = self._rows(position)
        if self.norm is None:
            return embedding(ids, self.tokens, self.scale, row, other)
        if not self.norm_tokens:
            return self.norm(embedding(ids, self.tokens, self.scale, row, other))[0]
        x = self.norm(embedding(ids, self.tokens, self.scale))[0]
        return x if row is None else x.add_(rows_of_positions(ids, row, other))

    def _rows(self, position: int | Tensor) -> tuple[Tensor | None, tuple[int, Tensor] | None]:
        """The rows of positions, and of what a padding token has instead."""
        if self.positions is None:
            return None, None
        row = self.positions[self.first + position]
        if self.padding is None:
            return row, None
        other = self.first + position - 1 if self.padding_row is None else self.padding_row
        return row, (self.padding, self.positions[other])


@dataclass(frozen=True)
class DecoderStep:
    """A decoder's step.

    Attributes:
        module: the decoder.
        first: the norm before the first sublayer, where norms come first; None where they come behind.
        bias: (V,), added to the logits; None for none.
        scale: of what the head reads.
        softcap: of the logits; None for none.
        facts: what it was made from beside weights, the model's config among it: equal where nothing has changed.
        together: runs all sublayers at once, of what the first one reads and the stream that it adds to; None for no
            such thing, or, as its result, where this step is not for it.
        tokens: how many it runs of each row, of which the first stays.
    """

    tokens: ClassVar[int] = 1
    module: nn.Module
    embedding: Embedding
    sublayers: Sequence[Sublayer]
    first: NormLike | None
    head: Product
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    facts: tuple[object, ...] = ()
    together: Callable[[Tensor, Tensor, Any], Tensor | None] | None = None

    @property
    def layers(self) -> tuple[int, int]:
        """How many attend to the text, and to a source."""
        mixes = [sublayer.mix for sublayer in self.sublayers]
        return sum(isinstance(m, TextAttention) for m in mixes), sum(
            isinstance(m, SourceAttention) for m in mixes
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.tokens.dtype

    @property
    def counts_padding(self) -> bool:
        """Whether attention has to know how many tokens of the prompt are padding, which no position id says."""
        biases = (s.mix.bias for s in self.sublayers if isinstance(s.mix, TextAttention))
        return any(bias is not None and bias.by_position for bias in biases)

    def __call__(self, ids: Tensor, context: StepInputs) -> Tensor:
        """Return the logits (R, V) of what follows ids (R,) int64, the newest token of each row."""
        return self.logits(self.hidden(ids, context))

    def hidden(self, ids: Tensor, context: StepInputs) -> Tensor:
        """Return what the head reads of ids (R,) int64, the newest token of each row: (R, C)."""
        stream = self.embedding(ids, context.position)
        x = stream if self.first is None else self.first(stream)[0]
        if self.together is not None and (made := self.together(x, stream, context)) is not None:
            return made
        for sublayer in self.sublayers:
            x, total = sublayer(x, stream, context)
            stream = x if self.first is None else total
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits (R, V) of hidden states (R, C)."""
        logits = self.head.apply(x if self.scale == 1.0 else x * self.scale)
        if self.bias is not None:
            logits.add_(self.bias)
        return (
            logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)
        )
