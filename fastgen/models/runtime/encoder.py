"""An encoder's layers over sentences of different lengths: no padding between them, and none that nobody reads.

What reads the weights runs over the tokens of all sentences, one row each; attention over the sentences of one length
at a time. Where only what the encoder makes of each sentence's first position is read, the last layer makes no more.

Sources: Wang et al. 2021 (LightSeq), section 2.1; Zhai et al. 2023 (ByteTransformer), for the rows without padding.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastgen.models.build.equivalence_check import outcome_in_c, verdict_in_c
from fastgen.models.layers.linear import Product
from fastgen.models.layers.norm import NormLike
from fastgen.models.runtime.decode_step import Embedding, Sublayer
from fastgen.ops.linear import saved_share

Padding = Literal["run", "alike", "none", "first"]
"""What is made of padding: each position of it; one, which stands for all of its sentence; nothing; and nothing either,
but of every sentence the first position is run, be it padding, and alone is read in the end."""

READING, CALL = 18 * 10**6, 22 * 10**5
"""What it takes to read a layer's parts, and one call of attention, in multiply-adds of a matrix product (0.4 and 0.05
ms of one thread of an AMD EPYC): so much less is to be computed where padding is left out."""

LOOK = 4 * READING
"""What there must be to save at most, or even a look at the masks costs too much."""


class Group(NamedTuple):
    """Sentences of one length: how many, the tokens of each, and the padding of each that is run."""

    sentences: int
    tokens: int
    padding: int


@dataclass(frozen=True)
class Sentences:
    """The positions of a batch (B, S) that are run, one row each: tokens first, then padding.

    Sentences are in the order of their lengths.

    Attributes:
        shape: (B, S).
        groups: the sentences, one behind the other.
        places: (R,) int64, where each row lies among the B * S positions; None where they are the batch as it lies.
        rows: (B * S,) int64, the row that has what each position gets; None where some get nothing.
        first: (B,) int64, the rows of first positions, where nothing else is read; else None.
        back: (B,) int64, the place of each sentence of the batch in the order of lengths.
        narrow: whether the rows that attend are but those of `first`.
    """

    shape: tuple[int, int]
    groups: tuple[Group, ...]
    places: Tensor | None = None
    rows: Tensor | None = None
    first: Tensor | None = None
    back: Tensor | None = None
    narrow: bool = False

    @property
    def tokens(self) -> int:
        """How many rows are attended to."""
        return sum(group.sentences * group.tokens for group in self.groups)

    def chosen(self, hidden: Tensor) -> Tensor:
        """The rows (R, C) of hidden (B, S, C), or of (B, S) its (R,)."""
        flat = hidden.reshape(-1, *hidden.shape[2:])
        return flat if self.places is None else flat.index_select(0, self.places)

    def restored(self, x: Tensor) -> Tensor:
        """What was made of the rows as (B, S, C), with zeros where nothing was; (B, 1, C) of the first positions."""
        if self.first is not None:
            return (x if self.back is None else x[self.back])[:, None]
        if self.places is None:
            return x.view(*self.shape, -1)
        if self.rows is not None:
            return x.index_select(0, self.rows).view(*self.shape, -1)
        whole = x.new_zeros(self.shape[0] * self.shape[1], x.shape[1])
        return whole.index_copy_(0, self.places, x).view(*self.shape, -1)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None
    ) -> Tensor:
        """Return what each query (R, H, D) finds in its own sentence, (R, H * D).

        Args:
            query: of all rows, or where these are narrow of each sentence's first position.
            key, value: (N, H, D) of the tokens.
            bias: (1, H, S, S), to be added to the scores; None for none. Only without padding.
        """
        found, of_padding, start, behind = (
            list[Tensor](),
            list[Tensor](),
            0,
            0 if self.narrow else self.tokens,
        )
        for count, tokens, padding in self.groups:
            end = start + count * tokens
            keys, values = (
                part[start:end].view(count, tokens, *part.shape[1:]).transpose(1, 2)
                for part in (key, value)
            )
            mask = None if bias is None else bias[..., :tokens, :tokens]
            if not self.narrow:
                found.append(_attention(query[start:end], keys, values, scale, mask))
            others = 1 if self.narrow else padding
            if others:
                of_padding.append(
                    _attention(query[behind : behind + count * others], keys, values, scale, None)
                )
            start, behind = end, behind + count * others
        found += of_padding
        return found[0] if len(found) == 1 else torch.cat(found)


def may_pay(positions: int, channels: int, padded: bool) -> bool:
    """Whether it is worth a look: not in a call that is over before the layers' parts are read.

    padded: whether some of the work may be left out.
    """
    return (1 if padded else saved_share()) * positions * weights_of(channels) > LOOK


def weights_of(channels: int) -> int:
    """The elements of a layer's weights, as wide as most are."""
    return 12 * channels**2


def pays(
    lengths: Sequence[int], length: int, padding: Padding, weights: int, layers: int, routed: bool
) -> bool:
    """Whether layers run sooner so than by their own forward, over sentences padded to one length.

    Args:
        lengths: tokens of each sentence. length: with padding.
        weights: elements of a layer's. layers: how many.
        routed: whether its products may have packed weights.
    """
    positions, tokens = len(lengths) * length, sum(lengths)
    padded = sum(count < length for count in lengths)
    run = {"run": positions - tokens, "alike": padded}.get(padding, 0)
    calls = len(set(lengths)) * (2 if run else 1)
    left_out = (positions - tokens - run) * layers
    if padding == "first":
        left_out += tokens * 3 // 4  # the last layer still makes keys and values
    saved = left_out + (saved_share() * (tokens + run) * layers if routed else 0)
    return saved * weights > layers * (READING + calls * CALL)


def _attention(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None
) -> Tensor:
    """Attention of query (G * Q, H, D) over keys, values (G, H, L, D): (G * Q, H * D)."""
    folded = query.view(keys.shape[0], -1, *query.shape[1:]).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(folded, keys, values, mask, scale=scale)
    return mixed.transpose(1, 2).reshape(len(query), -1)


def whole(shape: tuple[int, int], padding: Padding, device: torch.device) -> Sentences:
    """The positions of a batch (B, S) without padding."""
    first = (
        torch.arange(shape[0], device=device, dtype=torch.int64) * shape[1]
        if padding == "first"
        else None
    )
    return Sentences(shape, (Group(*shape, 0),), first=first)


def arranged(visible: Tensor, padding: Padding) -> Sentences:
    """The positions of a batch that are run.

    Args:
        visible: (B, S) bool, where a token is and no padding; at least one in each sentence.
    """
    sentences, length = visible.shape
    at, run = torch.arange(length, device=visible.device, dtype=torch.int64), ~visible
    if padding == "alike":
        run = run & (run.cumsum(1) == 1)
    elif padding == "first":
        run = run & (at == 0)
    elif padding == "none":
        run = torch.zeros_like(run)
    counts = list(zip(visible.sum(1).tolist(), run.sum(1).tolist(), strict=True))
    order = sorted(range(sentences), key=counts.__getitem__)
    by_length = torch.tensor(order, device=visible.device, dtype=torch.int64)
    positions = by_length[:, None] * length + at
    places = torch.cat([positions[visible[by_length]], positions[run[by_length]]])
    groups = tuple(
        Group(len(list(alike)), *kind)
        for kind, alike in itertools.groupby(counts[sentence] for sentence in order)
    )
    back = torch.empty_like(by_length).index_copy_(
        0, by_length, torch.arange(sentences, device=visible.device, dtype=torch.int64)
    )
    if padding == "none":
        return Sentences((sentences, length), groups, places, back=back)
    rows = torch.zeros(sentences * length, dtype=torch.int64, device=visible.device)
    rows.index_copy_(0, places, torch.arange(len(places), device=visible.device, dtype=torch.int64))
    if padding == "first":
        return Sentences(
            (sentences, length), groups, places, first=rows[by_length * length], back=back
        )
    if padding == "alike":
        rows = rows.view(sentences, length)
        stands = (rows * run).sum(1, keepdim=True)  # the one row of a sentence's padding
        rows = torch.where(visible, rows, stands).flatten()
    return Sentences((sentences, length), groups, places, rows, back=back)


@dataclass(frozen=True)
class PositionBias:
    """What is added to attention scores by the places of query and key: `make` gives (1, H, S, S)."""

    make: Callable[[], Tensor]

    @functools.cached_property
    def table(self) -> Tensor:
        return self.make().contiguous()


@dataclass(frozen=True)
class SentenceAttention:
    """Every row attends to the tokens of its sentence; parts: the products of queries, keys and values."""

    parts: Sequence[Product]
    heads: int
    dims: int
    scale: float
    bias: PositionBias | None = None

    def __call__(self, x: Tensor, layer: int, sentences: Sentences) -> Tensor:
        tokens = x[: sentences.tokens]
        attending = x[sentences.first] if sentences.narrow else x
        query, key, value = (
            part.apply(read).view(-1, self.heads, self.dims)
            for part, read in zip(self.parts, (attending, tokens, tokens), strict=True)
        )
        return sentences.attend(
            query, key, value, self.scale, None if self.bias is None else self.bias.table
        )


@dataclass(frozen=True)
class Encoder:
    """An encoder's layers.

    Attributes:
        module: the encoder.
        embedding: of its tokens; None where somebody else embeds them.
        first: the norm before the first sublayer, where norms come first; None where they come behind.
        facts: what it was made from beside weights, the model's config among it: equal where nothing has changed.
        together: runs all sublayers at once, as `DecoderStep.together`; None for no such thing.
    """

    module: nn.Module
    sublayers: Sequence[Sublayer]
    first: NormLike | None
    embedding: Embedding | None
    facts: tuple[object, ...]
    together: Callable[[Tensor, Tensor, Sentences], Tensor | None] | None = None

    @property
    def biased(self) -> bool:
        """Whether attention depends on how far apart two tokens are."""
        return any(
            isinstance(part.mix, SentenceAttention) and part.mix.bias is not None
            for part in self.sublayers
        )

    def __call__(self, x: Tensor, sentences: Sentences) -> Tensor:
        """Return what the layers make of rows x (R, C); of first positions alone (B, C), in the order of lengths."""
        stream = x
        if self.first is not None:
            x = self.first(stream)[0]
        made = (
            None
            if self.together is None or outcome_in_c(self) is False
            else self.together(x, stream, sentences)
        )
        if made is not None and outcome_in_c(self):
            return made
        own = self._one_by_one(x, stream, sentences)
        if made is not None:
            verdict_in_c(self, made, own)
        return own

    def _one_by_one(self, x: Tensor, stream: Tensor, sentences: Sentences) -> Tensor:
        for index, sublayer in enumerate(self.sublayers):
            if (
                sentences.first is not None and index == len(self.sublayers) - 2
            ):  # attention of the last layer
                stream, sentences = stream[sentences.first], replace(sentences, narrow=True)
            x, total = sublayer(x, stream, sentences)
            stream = x if self.first is None else total
        return x
