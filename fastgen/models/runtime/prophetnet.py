"""The decode step of ProphetNet, which runs the main stream and the first predicting stream.

ProphetNet has a predicting stream for each of the next n tokens. Each of them attends to the keys
of the main stream and to its own newest key; no other stream attends to it. Only the first one
therefore affects the next token, and the others are skipped. It corresponds to UniLM's mask token
(`models.runtime.masked_step`).

Source: Qi et al. 2020 (ProphetNet), section 3.
"""

from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from fastgen.models.layers.linear import Product
from fastgen.models.layers.norm import NormLike
from fastgen.models.runtime.decode_step import Embedding
from fastgen.models.runtime.masked_step import MaskedStepInputs
from fastgen.models.runtime.step_inputs import StepInputs
from fastgen.models.runtime.sublayers import SelfAttention


@dataclass(frozen=True)
class StreamEmbedding(Embedding):
    """The embedding of both streams; negative ids stand for the predicting stream.

    Attributes:
        stream: (C,), embedding of the predicting stream.
    """

    stream: Tensor = field(kw_only=True)

    def __call__(self, ids: Tensor, position: int | Tensor) -> Tensor:
        assert self.positions is not None
        assert self.norm is not None
        x = torch.where((ids < 0)[:, None], self.stream, F.embedding(ids.clamp_min(0), self.tokens))
        return self.norm(x.add_(self.positions[self.first + position]))[0]

    def with_norm(
        self, ids: Tensor, position: int | Tensor, then: NormLike | None
    ) -> tuple[Tensor, Tensor]:
        x = self(ids, position)
        return x if then is None else then(x)[0], x


@dataclass(frozen=True)
class StreamAttention(SelfAttention):
    """Self-attention of both streams over the text, with a learned bias by distance.

    The predicting stream also attends to itself. Each query computes its own bias.

    Attributes:
        nearness: Product that computes the biases (R, K * H) of K buckets from a query's input.
        buckets: (L,) int64, the bucket of each distance.
    """

    nearness: Product = field(kw_only=True)
    buckets: Tensor = field(kw_only=True)

    def __call__(self, x: Tensor, layer: int, context: StepInputs) -> Tensor:
        inputs = cast(MaskedStepInputs, context)
        query, key, value = (
            part.apply(x).view(-1, self.heads, self.dims) for part in self.projections
        )
        keys, values = inputs.append(layer, key, value)
        return inputs.attend(
            query, keys, values, self._bias(self.nearness.apply(x), inputs), self.scoring
        )

    def _bias(self, nearness: Tensor, around: MaskedStepInputs) -> Tensor:
        """Return the bias plus the mask, (B, H, 2 * M, N); -inf where a query must not attend."""
        sentences, known = around.context.sentences, around.context.biased
        query_bias = nearness.view(
            sentences, -1, nearness.shape[1] // self.heads, self.heads
        ).permute(0, 3, 1, 2)
        if id(self.buckets) not in known:  # All layers share it.
            known[id(self.buckets)] = self.buckets[
                around.distances.clamp(0, len(self.buckets) - 1)
            ][:, None]
        bucket = known[id(self.buckets)].expand(sentences, self.heads, -1, -1)
        return query_bias.gather(3, bucket).add_(around.mask)
