"""The fused decode step: a decoder's step that runs on its weights and bypasses its modules.

A decoder is a sequence of sublayers: self-attention, cross-attention and feed-forward. In every
model family a sublayer ends in the same two operations: an output projection with the residual sum,
and a norm. In post-norm models that is the sublayer's own norm, in pre-norm models the next one's.

Source: Wang et al. 2021 (LightSeq), section 2.1 (one operation between two matrix products).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from fastgen.models.comparison import comparison
from fastgen.models.layers.linear import Product
from fastgen.models.layers.norm import Norm, NormLike, unnormed
from fastgen.models.layers.positions import Bias, Rotary, turned_once
from fastgen.ops.activation import fused_activation
from fastgen.ops.beam_attention import Newest, beam_attention, beam_attention_with_weights
from fastgen.ops.dispatch import runs_kernels
from fastgen.ops.embedding import Positions, embedding, normed_embedding, rows_of_positions
from fastgen.ops.rotation import Rotation, rotated


class KeysAndValues(Protocol):
    """The part of a KV cache layer that a decode step uses.

    Keys and values are (B, Hkv, N, D), with M beams per sentence.
    """

    beams: int

    @property
    def keys(self) -> Tensor: ...
    @property
    def values(self) -> Tensor: ...

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Write the newest token of every beam; keys and values are (B * M, Hkv, 1, D)."""

    def append_turned(
        self, query: Tensor, key: Tensor, value: Tensor, rotation: Rotation
    ) -> Tensor:
        """Rotate queries and keys, and write the rotated keys and the values.

        Args:
            query: (B * M, H, D).
            key: (B * M, Hkv, D).
            value: (B * M, Hkv, D).
            rotation: Rotary position embedding of the newest token.

        Returns:
            The rotated queries (B * M, H, D).
        """
        ...

    def reserve(self, keys: Tensor, values: Tensor) -> None:
        """Reserve the slots of the newest token of every beam, which attention then writes.

        Arguments are as in `append`.
        """


class StepInputs(Protocol):
    """The inputs of a decode step besides the weights, for the rows of one or more calls."""

    @property
    def position(self) -> int | Tensor:
        """Position of the newest token, counted from 0; (R,) int64 if rows differ."""
        ...

    def rotation(self, rotary: Rotary, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of the newest token's position, with the dtype and device of x."""
        ...

    def self_attention(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Bias | None,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        """Append the newest token to the KV cache and attend to the text, including that token.

        Args:
            layer: Index of the decoder layer.
            query: (R, H, D).
            key: (R, Hkv, D).
            value: (R, Hkv, D).
            bias: Bias of the scores by position; None for none.
            scale: Factor of the scores.
            softcap: Soft cap of the scores; None for none.

        Returns:
            The attention output (R, H * D).
        """
        ...

    def cross_attention(self, layer: int, query: Tensor, scale: float) -> Tensor:
        """Attend to the source with query (R, H, D); return the output (R, H * D)."""
        ...


@dataclass
class Context:
    """`StepInputs` of the sentences of one call.

    In captured steps the device holds `length`, `prefix` and `seen`, and `position` if rows agree.

    Attributes:
        sentences: Batch size B; there are R = B * M rows.
        length: Length of the text in tokens, the newest included; (1,) int64 in captured steps.
        prefix: Tokens that all beams share; (1,) int64 in captured steps.
        position: Position of the newest token, counted from 0; (1,) int64 in captured steps, (R,)
            int64 if rows differ.
        text: Keys and values of each self-attention layer.
        source: Keys and values of each cross-attention layer.
        text_mask: Additive mask of the text, broadcastable to (B, H, M, N); None if everything is
            visible.
        source_mask: The same for the source.
        times: (B, F) int64, the decode step that filled each slot after the prefix; None if the
            steps have M slots each, in order.
        seen: (1,) int64, number of keys of the text in captured steps; else None.
        watched: Layer whose cross-attention weights are requested; None for none.
        weights: The requested weights, (R, S) fp32. For multistep runs in C this is the output
            buffer, (steps, B, M, S) fp32.
        biased: Masks with a bias, by the id of the `Bias`; they serve all layers of a step.
        rotations: Cosines and sines, by the id of the `Rotary`; they serve all layers of a step.
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
        """Return the text mask plus a bias, computed once for all layers that share the bias."""
        if bias is None:
            return self.text_mask
        if id(bias) not in self.biased:
            table = bias.at(self.distances()[:, None], self._position_of_sentences())
            self.biased[id(bias)] = table if self.text_mask is None else table + self.text_mask
        return self.biased[id(bias)]

    def biases(self, bias: Bias, steps: int) -> Tensor:
        """Return a bias for the next decode steps, before any of their slots is reserved.

        Args:
            bias: Bias of the scores by position.
            steps: Number of decode steps.

        Returns:
            (1 or B, H, steps, N), where N counts the slots that exist after these steps.
        """
        later = torch.arange(steps, dtype=torch.int64, device=self.text[0].keys.device)[:, None]
        return bias.at(
            self.distances(steps)[:, None] + later, self._position_of_sentences() + later
        )

    def _position_of_sentences(self) -> int | Tensor:
        """Return `position`, as (1 or B, 1, 1) if it is a tensor: the beams of a sentence agree."""
        if not isinstance(self.position, Tensor):
            return self.position
        return self.position.view(1 if len(self.position) == 1 else self.sentences, -1)[:, :1, None]

    def distances(self, more: int = 0) -> Tensor:
        """Return the distance in tokens from the newest token to each slot.

        Args:
            more: Number of steps, the newest token's included, whose slots are not reserved yet
                but are to be counted.

        Returns:
            (1 or B, N) int64, negative for slots that are not filled yet.
        """
        keys, beams = self.text[0].keys, self.text[0].beams
        steps = self.times
        if isinstance(self.prefix, Tensor):
            slots = torch.arange(keys.shape[2], device=keys.device, dtype=torch.int64)
            generated = (slots - self.prefix).div(beams, rounding_mode="floor")
            return (
                self.length - 1 - torch.where(generated < 0, slots, generated + self.prefix)[None]
            )
        if steps is None:
            slots = torch.arange(
                keys.shape[2] - self.prefix + more * beams, device=keys.device, dtype=torch.int64
            )
            steps = slots.div(beams, rounding_mode="floor")[None]
        elif more:
            upcoming = torch.arange(more, device=keys.device, dtype=torch.int64).repeat_interleave(
                beams
            ) + (self.length - 1 - self.prefix)
            steps = torch.cat([steps, upcoming.expand(steps.shape[0], -1)], 1)
        prefix = torch.arange(self.prefix, device=keys.device, dtype=torch.int64).expand(
            steps.shape[0], -1
        )
        return self.length - 1 - torch.cat([prefix, steps + self.prefix], 1)

    def rotation(self, rotary: Rotary, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of the newest token's position, computed once for all layers.

        Args:
            rotary: Rotary position embedding.
            x: Tensor with the dtype and device of the result.
        """
        return turned_once(self.rotations, rotary, self.position, x)

    def self_attention(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Bias | None,
        scale: float,
        softcap: float | None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """Append the newest token to the KV cache and attend to the text.

        Arguments are as in `StepInputs`. `rotation` is applied to queries and keys first; None if
        there is none, or they are rotated already.
        """
        cache, newest = self.text[layer], None
        if rotation is not None:
            query = cache.append_turned(query, key, value, rotation)
        elif runs_kernels(query) and key.stride(2) == value.stride(2) == 1:
            newest = Newest(key, value)
            cache.reserve(key[:, :, None], value[:, :, None])
        else:
            cache.append(key[:, :, None], value[:, :, None])
        rows, mask = query.shape[0], self.text_mask_with(bias)
        query = query.reshape(self.sentences, -1, *query.shape[1:])
        mixed = beam_attention(
            query, cache.keys, cache.values, mask, scale, softcap, self.seen, newest
        )
        return mixed.reshape(rows, -1)

    def cross_attention(self, layer: int, query: Tensor, scale: float) -> Tensor:
        cache, rows = self.source[layer], query.shape[0]
        inputs = (
            query.view(self.sentences, -1, *query.shape[1:]),
            cache.keys,
            cache.values,
            self.source_mask,
            scale,
        )
        if self.watched != layer:
            return beam_attention(*inputs).reshape(rows, -1)
        mixed, weights = beam_attention_with_weights(*inputs)
        self.weights = weights.flatten(0, 1)
        return mixed.reshape(rows, -1)


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
    """

    projections: Sequence[Product]
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
    repeats_kv: bool = False
    interleaved: bool = False
    norms_all_heads: bool = False
    norms_rotated: bool = False
    rotates_fp32: bool = False

    @property
    def key_heads(self) -> int:
        """Number of key and value heads in the cache."""
        return (
            self.heads
            if self.repeats_kv
            else (sum(part.outputs for part in self.projections) // self.dims - self.heads) // 2
        )

    def __call__(self, x: Tensor, layer: int, context: StepInputs) -> Tensor:
        projected = [part.apply(x).unflatten(1, (-1, self.dims)) for part in self.projections]
        query, key, value = projected if len(projected) > 1 else self._split(projected[0])
        if not self.norms_rotated:
            query, key = self._normed(query, self.query_norm), self._normed(key, self.key_norm)
        if self.rotary is not None:
            angles = context.rotation(self.rotary, x)
            rotation = Rotation(*angles, self.interleaved, self.rotates_fp32)
            plain = not (self.repeats_kv or self.norms_rotated)
            if isinstance(context, Context) and plain and runs_kernels(query):
                return context.self_attention(
                    layer, query, key, value, self.bias, self.scale, self.softcap, rotation
                )
            query, key = rotated(query, rotation), rotated(key, rotation)
        if self.norms_rotated:
            query, key = self._normed(query, self.query_norm), self._normed(key, self.key_norm)
        if self.repeats_kv:
            key, value = (
                each.repeat_interleave(self.heads // each.shape[1], 1) for each in (key, value)
            )
        return context.self_attention(layer, query, key, value, self.bias, self.scale, self.softcap)

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
class CrossAttention:
    """Cross-attention of the newest token over precomputed keys and values of the source.

    Attributes:
        query: Product of the queries.
        heads: Number of query heads H.
        dims: Head dimension D.
        scale: Factor of the scores.
        made_by: Products of the keys and values; None if these do not come from linear layers.
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


@dataclass(frozen=True)
class Embedding:
    """Scaled token embeddings plus position embeddings, with an optional norm.

    Attributes:
        tokens: Token embeddings (V, C).
        scale: Factor of the token embeddings.
        positions: Position embeddings (P, C); None for none.
        first: Row of `positions` for position 0.
        padding: Id of the padding token, if its position embedding differs; None if it does not.
        padding_row: Row of `positions` for padding; None for the row before that of its position.
        norm: Norm of the embeddings; None for none.
        norm_tokens: Whether the norm applies to the token embeddings only.
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
        positions = self._positions(position)
        row, other = (None, None) if positions is None else positions.rows()
        if self.norm is None:
            return embedding(ids, self.tokens, self.scale, row, other)
        if not self.norm_tokens:
            return self.norm(embedding(ids, self.tokens, self.scale, row, other))[0]
        x = self.norm(embedding(ids, self.tokens, self.scale))[0]
        return x if row is None else x.add_(rows_of_positions(ids, row, other))

    def with_norm(
        self, ids: Tensor, position: int | Tensor, then: NormLike | None
    ) -> tuple[Tensor, Tensor]:
        """Return the embeddings after another norm, and before it.

        Args:
            ids: (R,) int64.
            position: Position of the newest tokens, as `StepInputs.position`.
            then: The other norm; None for none.

        Returns:
            (R, C) each.
        """
        first = then if self.norm is None else self.norm
        if isinstance(first, Norm) and not self.norm_tokens and runs_kernels(ids):
            positions, of = self._positions(position), first.parameters
            x, total = normed_embedding(ids, self.tokens, self.scale, positions, of)
            if first is then:
                return x, total
        else:
            x = self(ids, position)
        return x if then is None else then(x)[0], x

    def _positions(self, position: int | Tensor) -> Positions | None:
        if self.positions is None:
            return None
        return Positions(self.positions, self.first, position, self.padding, self.padding_row)


@dataclass(frozen=True)
class DecoderStep:
    """The fused decode step of a decoder.

    Attributes:
        tokens: Tokens that a step runs per row, of which only the first stays in the KV cache.
        module: The decoder.
        embedding: Embedding of the newest tokens.
        sublayers: Sublayers in the order in which they run.
        first: Norm before the first sublayer in pre-norm models; None in post-norm models.
        head: Product of the output head.
        bias: (V,) bias of the logits; None for none.
        scale: Factor of the hidden states before the head.
        softcap: Soft cap of the logits; None for none.
        facts: Fingerprint of everything besides the weights that the step was built from, such as
            the model's config. An equal fingerprint means that the step is still valid.
        together: Runs all sublayers at once, given the input of the first one and the residual
            stream. None if there is no such function. It returns None for a step that it does not
            support.
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
        """Numbers of self-attention and cross-attention layers."""
        mixers = [sublayer.mixer for sublayer in self.sublayers]
        return sum(isinstance(m, SelfAttention) for m in mixers), sum(
            isinstance(m, CrossAttention) for m in mixers
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.tokens.dtype

    @property
    def counts_padding(self) -> bool:
        """Whether attention needs the number of padding tokens, which position ids do not tell."""
        biases = (s.mixer.bias for s in self.sublayers if isinstance(s.mixer, SelfAttention))
        return any(bias is not None and bias.by_position for bias in biases)

    def __call__(self, ids: Tensor, context: StepInputs) -> Tensor:
        """Run the decode step.

        Args:
            ids: (R,) int64, the newest token of each row.
            context: Other inputs of the step.

        Returns:
            The logits (R, V) of the next token.
        """
        return self.logits(self.hidden(ids, context))

    def hidden(self, ids: Tensor, context: StepInputs) -> Tensor:
        """Return the hidden states (R, C) that the head reads; arguments as in `__call__`."""
        x, stream = self.embedding.with_norm(ids, context.position, self.first)
        if self.together is not None and (hidden := self.together(x, stream, context)) is not None:
            return hidden
        for sublayer in self.sublayers:
            x, total = sublayer(x, stream, context)
            stream = x if self.first is None else total
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Apply the head to hidden states (R, C); return the logits (R, V)."""
        logits = self.head.apply(x if self.scale == 1.0 else x * self.scale)
        if self.bias is not None:
            logits.add_(self.bias)
        return (
            logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)
        )
