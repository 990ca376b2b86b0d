"""A step of ProphetNet's decoder: the stream of the text, and the one that predicts what follows it.

A model of n-grams has a stream for each of the next n tokens. All attend to the main stream's keys, and each to its own
newest one; nobody attends to theirs. So those behind the first say nothing of the next token, and are not run. The
first is to the text what a mask is to a UniLM's (`models.runtime.masked_step`).

Source: Qi et al. 2020 (ProphetNet), section 3.
"""

from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from fastgen.models.layers.linear import Product
from fastgen.models.runtime.decode_step import Embedding, StepInputs, TextAttention
from fastgen.models.runtime.masked_step import Asking


@dataclass(frozen=True)
class StreamEmbedding(Embedding):
    """Embeddings of both streams: what is less than 0 is no token, but the predicting stream, `stream` (C,)."""

    stream: Tensor = field(kw_only=True)

    def __call__(self, ids: Tensor, position: int | Tensor) -> Tensor:
        assert self.positions is not None
        assert self.norm is not None
        x = torch.where((ids < 0)[:, None], self.stream, F.embedding(ids.clamp_min(0), self.tokens))
        return self.norm(x.add_(self.positions[self.first + position]))[0]


@dataclass(frozen=True)
class StreamAttention(TextAttention):
    """Both streams attend to the text, the predicting one to itself too, with a bias of each query by distance.

    Attributes:
        nearness: the product that makes of a query's input its biases, (R, K * H) of K buckets.
        buckets: (L,) int64, the bucket of each distance.
    """

    nearness: Product = field(kw_only=True)
    buckets: Tensor = field(kw_only=True)

    def __call__(self, x: Tensor, layer: int, context: StepInputs) -> Tensor:
        around = cast(Asking, context)
        query, key, value = (part.apply(x).view(-1, self.heads, self.dims) for part in self.parts)
        keys, values = around.append(layer, key, value)
        return around.attend(
            query, keys, values, self._bias(self.nearness.apply(x), around), self.scale, None
        )

    def _bias(self, nearness: Tensor, around: Asking) -> Tensor:
        """What is added to the scores, (B, H, 2 * M, N): -inf where a query does not look."""
        sentences, known = around.context.sentences, around.context.biased
        of_query = nearness.view(
            sentences, -1, nearness.shape[1] // self.heads, self.heads
        ).permute(0, 3, 1, 2)
        if id(self.buckets) not in known:  # which layers have in common
            known[id(self.buckets)] = self.buckets[
                around.distances.clamp(0, len(self.buckets) - 1)
            ][:, None]
        bucket = known[id(self.buckets)].expand(sentences, self.heads, -1, -1)
        return of_query.gather(3, bucket).add_(around.mask)
