"""A step of ProphetNet's decoder: the stream of the text, and the one that predicts what follows it.

A model of n-grams has a stream for each of the next n tokens. All attend to the main stream's keys, and each to its own
newest one; nobody attends to theirs. So those behind the first say nothing of the next token, and are not run. The two
that are lie side by side: row 2r is the main stream of row r of the batch, row 2r + 1 the predicting one.

Source: Qi et al. 2020 (ProphetNet), section 3.
"""

from dataclasses import dataclass, field
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from fastgen.models.linear import Product
from fastgen.models.step import Context, Embedding, KeysAndValues, Surroundings, TextAttention
from fastgen.ops.beam_attention import beam_attention

STREAMS = 2


@dataclass(frozen=True)
class StreamEmbedding(Embedding):
    """Embeddings of both streams: the predicting one has `stream` (C,) for a token, a position further."""

    stream: Tensor = field(kw_only=True)

    def __call__(self, ids: Tensor, position: int | Tensor) -> Tensor:
        """Return (2 R, C) for ids (R,)."""
        assert self.positions is not None
        assert self.norm is not None
        at = self.first + position
        main = F.embedding(ids, self.tokens) + self.positions[at]
        predicting = (self.positions[at + 1] + self.stream).expand_as(main)
        return self.norm(torch.stack([main, predicting], 1).flatten(0, 1))[0]


class Passing(KeysAndValues, Protocol):
    """A layer of the cache that also holds keys and values for the time of a step."""

    def with_passing(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H, N + M, D) with a token (B * M, H, 1, D) of every beam behind them for this step."""
        ...


@dataclass(frozen=True)
class StreamAttention(TextAttention):
    """Both streams attend to the text, the predicting one to itself too, with a bias of each query by distance.

    Attributes:
        nearness: the product that makes of a query's input its biases, (R, K * H) of K buckets.
        buckets: (L,) int64, the bucket of each distance.
    """

    nearness: Product = field(kw_only=True)
    buckets: Tensor = field(kw_only=True)

    def __call__(self, x: Tensor, layer: int, context: Surroundings) -> Tensor:
        if not isinstance(context, Context):
            raise TypeError(f"both streams of a step run for the rows of one call, not in a {type(context).__name__}")
        query, key, value = (part.apply(x).view(-1, STREAMS, self.heads, self.dims) for part in self.parts)
        kept = cast(Passing, context.text[layer])
        kept.append(key[:, 0, :, None], value[:, 0, :, None])
        keys, values = kept.with_passing(key[:, 1, :, None], value[:, 1, :, None])
        bias = self._bias(self.nearness.apply(x), context)
        query = query.view(context.sentences, -1, self.heads, self.dims)
        return beam_attention(query, keys, values, bias, self.scale).reshape(len(x), -1)

    def _bias(self, nearness: Tensor, context: Context) -> Tensor:
        """What is added to the scores, (B, H, 2 M, N + M): -inf where a query does not look."""
        of_query = nearness.view(context.sentences, -1, STREAMS, nearness.shape[1] // self.heads, self.heads)
        unseen = of_query.shape[3]
        bucket = context.once(self.buckets, lambda: self._bucket(context, unseen))
        table = F.pad(of_query.permute(0, 4, 1, 2, 3), (0, 1), value=-torch.inf)
        return table.gather(4, bucket[:, None].expand(-1, self.heads, -1, -1, -1)).flatten(2, 3)

    def _bucket(self, context: Context, unseen: int) -> Tensor:
        """The bucket (B, M, 2, N + M) of each key for each query, or `unseen`; made once for all layers."""
        beams = context.text[0].beams
        distance = context.distance()
        of_streams = torch.stack([distance, distance + 1], 1).clamp_(0, len(self.buckets) - 1)
        text = self.buckets[of_streams][:, None].expand(context.sentences, beams, -1, -1)
        if context.text_mask is not None:
            text = text.masked_fill(context.text_mask.transpose(1, 2) < 0, unseen)
        own = text.new_full((beams, STREAMS, beams), unseen)
        own[:, 1].fill_diagonal_(int(self.buckets[0]))
        return torch.cat([text, own.expand(context.sentences, -1, -1, -1)], 3)
