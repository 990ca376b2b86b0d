"""The unpadded encoder: an encoder's layers over sentences of different lengths without padding.

Matrix products run over the tokens of all sentences, one row per token. Attention runs over groups
of sentences of equal length. If only the output at each sentence's first position is needed, the
last layer computes only that.

Sources: Wang et al. 2021 (LightSeq), section 2.1; Zhai et al. 2023 (ByteTransformer), for rows
without padding.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastgen.models.build.equivalence_check import record_verdict_in_c, recorded_verdict_in_c
from fastgen.models.layers.linear import Product
from fastgen.models.layers.norm import NormLike
from fastgen.models.runtime.decode_step import Embedding
from fastgen.models.runtime.sublayers import Sublayer
from fastgen.ops.linear import saved_share

Padding = Literal["run", "alike", "none", "first"]
"""How padding is processed.

- "run": Every padding position is run.
- "alike": One padding position per sentence is run, and its output serves all of them.
- "none": Padding is skipped, and its output is zero.
- "first": Padding is skipped, except at first positions. Only the output at each sentence's first
  position is returned.
"""

READING, CALL = 18 * 10**6, 22 * 10**5
"""Cost of inspecting the parts of a layer, and of one attention call.

The unit is multiply-adds of a matrix product; the costs are 0.4 ms and 0.05 ms of one thread of an
AMD EPYC. Skipping padding has to save at least that.
"""

LOOK = 4 * READING
"""Possible savings, in multiply-adds, below which even inspecting the masks costs too much."""


class Group(NamedTuple):
    """Sentences of equal length.

    Attributes:
        sentences: Number of sentences.
        tokens: Tokens of each sentence.
        padding: Padding positions of each sentence that are run.
    """

    sentences: int
    tokens: int
    padding: int


@dataclass(frozen=True)
class UnpaddedBatch:
    """The R rows that an encoder computes, in place of the B * S positions of a padded batch.

    All tokens come first, sorted by the length of their sentence, then the padding positions whose
    output is needed.

    Attributes:
        shape: (B, S).
        groups: The sentences by length, in the order of their rows.
        places: (R,) int64, index of each row among the B * S positions; None if the rows are all
            positions in order.
        rows: (B * S,) int64, row whose output each position gets; None if some positions get zeros.
        first: (B,) int64, rows of first positions if only their output is needed; else None.
        back: (B,) int64, index of each sentence of the batch in the order of lengths; None if the
            sentences keep their order.
        narrow: Whether only the rows of `first` are queries.
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
        """Number of rows that are keys and values."""
        return sum(group.sentences * group.tokens for group in self.groups)

    def chosen(self, hidden: Tensor) -> Tensor:
        """Gather the rows (R, C) from hidden (B, S, C), or (R,) from (B, S)."""
        flat = hidden.reshape(-1, *hidden.shape[2:])
        return flat if self.places is None else flat.index_select(0, self.places)

    def restored(self, x: Tensor) -> Tensor:
        """Scatter the outputs x (R, C) to the positions of the batch.

        Returns:
            (B, S, C), with zeros at positions that were skipped; (B, 1, C) if only first positions
            are needed.
        """
        if self.first is not None:
            return (x if self.back is None else x[self.back])[:, None]
        if self.places is None:
            return x.view(*self.shape, -1)
        if self.rows is not None:
            return x.index_select(0, self.rows).view(*self.shape, -1)
        padded = x.new_zeros(self.shape[0] * self.shape[1], x.shape[1])
        return padded.index_copy_(0, self.places, x).view(*self.shape, -1)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None
    ) -> Tensor:
        """Let each query attend to the tokens of its sentence.

        Args:
            query: (R, H, D), of all rows, or of first positions only if `narrow`.
            key: (N, H, D), of the tokens.
            value: (N, H, D), of the tokens.
            scale: Factor of the scores.
            bias: (1, H, S, S) bias of the scores; None for none. It requires that no padding is
                run.

        Returns:
            The attention output (R, H * D).
        """
        token_outputs, padding_outputs, start, padding_start = (
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
                token_outputs.append(_attention(query[start:end], keys, values, scale, mask))
            extra = 1 if self.narrow else padding
            if extra:
                padding_outputs.append(
                    _attention(
                        query[padding_start : padding_start + count * extra],
                        keys,
                        values,
                        scale,
                        None,
                    )
                )
            start, padding_start = end, padding_start + count * extra
        token_outputs += padding_outputs
        return token_outputs[0] if len(token_outputs) == 1 else torch.cat(token_outputs)


def may_pay(positions: int, channels: int, padded: bool) -> bool:
    """Return whether the unpadded encoder might pay, from the size of the batch alone.

    Args:
        positions: Positions of the batch, B * S.
        channels: Width of the model C.
        padded: Whether there may be padding to skip.
    """
    return (1 if padded else saved_share()) * positions * weights_of(channels) > LOOK


def weights_of(channels: int) -> int:
    """Return the number of weights of a typical encoder layer with this width."""
    return 12 * channels**2


def pays(
    lengths: Sequence[int], length: int, padding: Padding, weights: int, layers: int, routed: bool
) -> bool:
    """Return whether the unpadded encoder is faster than the encoder's own forward.

    Args:
        lengths: Tokens of each sentence.
        length: Length of the padded batch S.
        padding: How padding is processed.
        weights: Number of weights of one layer.
        layers: Number of layers.
        routed: Whether the layers' products may use packed weights.
    """
    positions, tokens = len(lengths) * length, sum(lengths)
    padded = sum(count < length for count in lengths)
    run = {"run": positions - tokens, "alike": padded}.get(padding, 0)
    calls = len(set(lengths)) * (2 if run else 1)
    skipped = (positions - tokens - run) * layers
    if padding == "first":
        skipped += tokens * 3 // 4  # The last layer still computes keys and values.
    saved = skipped + (saved_share() * (tokens + run) * layers if routed else 0)
    return saved * weights > layers * (READING + calls * CALL)


def _attention(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None
) -> Tensor:
    """Run attention of query (G * Q, H, D) over keys and values (G, H, L, D).

    Returns:
        (G * Q, H * D).
    """
    folded = query.view(keys.shape[0], -1, *query.shape[1:]).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(folded, keys, values, mask, scale=scale)
    return mixed.transpose(1, 2).reshape(len(query), -1)


def whole(shape: tuple[int, int], padding: Padding, device: torch.device) -> UnpaddedBatch:
    """Return the `UnpaddedBatch` of a batch (B, S) without padding."""
    first = (
        torch.arange(shape[0], device=device, dtype=torch.int64) * shape[1]
        if padding == "first"
        else None
    )
    return UnpaddedBatch(shape, (Group(*shape, 0),), first=first)


def unpad(visible: Tensor, padding: Padding) -> UnpaddedBatch:
    """Return the `UnpaddedBatch` of a padded batch.

    Args:
        visible: (B, S) bool, True at tokens and False at padding; each sentence has a token.
        padding: How padding is processed.
    """
    sentences, length = visible.shape
    columns, run = torch.arange(length, device=visible.device, dtype=torch.int64), ~visible
    if padding == "alike":
        run = run & (run.cumsum(1) == 1)
    elif padding == "first":
        run = run & (columns == 0)
    elif padding == "none":
        run = torch.zeros_like(run)
    counts = list(zip(visible.sum(1).tolist(), run.sum(1).tolist(), strict=True))
    order = sorted(range(sentences), key=counts.__getitem__)
    by_length = torch.tensor(order, device=visible.device, dtype=torch.int64)
    positions = by_length[:, None] * length + columns
    places = torch.cat([positions[visible[by_length]], positions[run[by_length]]])
    groups = tuple(
        Group(len(list(group)), *kind)
        for kind, group in itertools.groupby(counts[sentence] for sentence in order)
    )
    back = torch.empty_like(by_length).index_copy_(
        0, by_length, torch.arange(sentences, device=visible.device, dtype=torch.int64)
    )
    if padding == "none":
        return UnpaddedBatch((sentences, length), groups, places, back=back)
    rows = torch.zeros(sentences * length, dtype=torch.int64, device=visible.device)
    rows.index_copy_(0, places, torch.arange(len(places), device=visible.device, dtype=torch.int64))
    if padding == "first":
        return UnpaddedBatch(
            (sentences, length), groups, places, first=rows[by_length * length], back=back
        )
    if padding == "alike":
        rows = rows.view(sentences, length)
        padding_row = (rows * run).sum(1, keepdim=True)  # (B, 1), the padding row that is run.
        rows = torch.where(visible, rows, padding_row).flatten()
    return UnpaddedBatch((sentences, length), groups, places, rows, back=back)


@dataclass(frozen=True)
class PositionBias:
    """A bias of attention scores by the positions of query and key.

    Attributes:
        make: Computes the table (1, H, S, S).
    """

    make: Callable[[], Tensor]

    @functools.cached_property
    def table(self) -> Tensor:
        return self.make().contiguous()


@dataclass(frozen=True)
class EncoderSelfAttention:
    """Self-attention of every row over the tokens of its sentence.

    Attributes:
        projections: Products of queries, keys and values.
        heads: Number of heads H.
        dims: Head dimension D.
        scale: Factor of the scores.
        bias: Bias of the scores by position; None for none.
    """

    projections: Sequence[Product]
    heads: int
    dims: int
    scale: float
    bias: PositionBias | None = None

    def __call__(self, x: Tensor, layer: int, sentences: UnpaddedBatch) -> Tensor:
        tokens = x[: sentences.tokens]
        queries = x[sentences.first] if sentences.narrow else x
        query, key, value = (
            part.apply(rows).view(-1, self.heads, self.dims)
            for part, rows in zip(self.projections, (queries, tokens, tokens), strict=True)
        )
        return sentences.attend(
            query, key, value, self.scale, None if self.bias is None else self.bias.table
        )


@dataclass(frozen=True)
class Encoder:
    """The layers of an encoder.

    Attributes:
        module: The encoder.
        sublayers: Sublayers in the order in which they run.
        first: Norm before the first sublayer in pre-norm models; None in post-norm models.
        embedding: Embedding of the tokens; None if the caller embeds them.
        fingerprint: Everything besides the weights that it was built from, such as the model's
            config. An equal fingerprint means that it is still valid.
        run_layers: Runs all sublayers at once, as `DecoderStep.run_layers`; None if nothing does.
    """

    module: nn.Module
    sublayers: Sequence[Sublayer]
    first: NormLike | None
    embedding: Embedding | None
    fingerprint: tuple[object, ...]
    run_layers: Callable[[Tensor, Tensor, UnpaddedBatch], Tensor | None] | None = None

    @property
    def biased(self) -> bool:
        """Whether any layer has a bias of attention scores by position."""
        return any(
            isinstance(part.mixer, EncoderSelfAttention) and part.mixer.bias is not None
            for part in self.sublayers
        )

    def __call__(self, x: Tensor, sentences: UnpaddedBatch) -> Tensor:
        """Run the layers.

        Args:
            x: (R, C), the embedded rows.
            sentences: The positions of the rows.

        Returns:
            (R, C); (B, C) in the order of lengths if only first positions are needed.
        """
        stream = x
        if self.first is not None:
            x = self.first(stream)[0]
        native_output = (
            None
            if self.run_layers is None or recorded_verdict_in_c(self) is False
            else self.run_layers(x, stream, sentences)
        )
        if native_output is not None and recorded_verdict_in_c(self):
            return native_output
        output = self._one_by_one(x, stream, sentences)
        if native_output is not None:
            record_verdict_in_c(
                self, native_output, output, lambda: self._one_by_one(x, stream, sentences)
            )
        return output

    def _one_by_one(self, x: Tensor, stream: Tensor, sentences: UnpaddedBatch) -> Tensor:
        for index, sublayer in enumerate(self.sublayers):
            # The last two sublayers are the attention and feed-forward of the last layer.
            if sentences.first is not None and index == len(self.sublayers) - 2:
                stream, sentences = stream[sentences.first], replace(sentences, narrow=True)
            x, total = sublayer(x, stream, sentences)
            stream = x if self.first is None else total
        return x
