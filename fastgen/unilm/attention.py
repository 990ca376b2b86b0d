"""Attention of a text in which masks ask: what they see of each other is nothing, and nothing else sees them."""

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from fastgen.models.layers.attention import BeamAttention, Layer, layer_of
from fastgen.patches.transformers.cache.attention import current_step
from fastgen.unilm.config import UniLMConfig


class UniLMSelfAttention(nn.Module):
    """Attention of the tokens that stay (source and target) and of the masks behind them.

    All see the tokens that stay, as far as `visible` says; a mask also sees itself. So the masks need no keys beside
    those of the text, and a cache holds what stays.
    """

    def __init__(self, config: UniLMConfig, layer: int) -> None:
        super().__init__()
        self.heads, self.head_dim = (
            config.num_attention_heads,
            config.hidden_size // config.num_attention_heads,
        )
        self.layer, self.scaling = layer, self.head_dim**-0.5
        self.query, self.key, self.value = (
            nn.Linear(config.hidden_size, config.hidden_size) for _ in range(3)
        )
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)

    def forward(self, x: Tensor, masks: int, visible: Tensor | None, past: Cache | None) -> Tensor:
        """Return (R, L, C) for x (R, L, C), the last `masks` of which are masks.

        visible: additive, broadcastable to (R, 1, L, N) over the N tokens that stay, those of `past` first.
        """
        query, own_keys, own_values = (
            part(x).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        stay = x.shape[1] - masks
        keys, values = own_keys[:, :, :stay], own_values[:, :, :stay]
        if past is not None:
            keys, values = past.update(keys, values, self.layer)
        asks = torch.arange(x.shape[1], device=x.device, dtype=torch.int64) >= stay
        layer, step = layer_of(keys), current_step.get()
        if layer is None or step is None:
            mixed = self.mix(query, keys, values, visible, own_keys, own_values, asks)
        else:
            mixed = self._of_beams(step, query, layer, visible, own_keys, own_values, asks)
        return mixed.transpose(1, 2).flatten(2)

    def mix(
        self, query: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, own_keys: Tensor,
        own_values: Tensor, asks: Tensor,
    ) -> Tensor:  # fmt: skip
        """Return (B, H, Q, D) for queries, each with a key and value of its own, (B, H, Q, D).

        Args:
            keys, values: (B, H, N, D). visible: additive, broadcastable to (B, H, Q, N); None where all is seen.
            asks: (Q,) bool, which queries see the key of their own.
        """
        query = query * self.scaling
        scores = query @ keys.transpose(2, 3)
        if visible is not None:
            scores = scores + visible
        own = (query * own_keys).sum(-1, keepdim=True).masked_fill(~asks[:, None], -torch.inf)
        weights = torch.softmax(
            torch.cat([scores, own], -1), -1, dtype=torch.promote_types(scores.dtype, torch.float32)
        )
        weights = self.dropout(weights.to(values.dtype))
        return weights[..., :-1] @ values + weights[..., -1:] * own_values

    def _of_beams(
        self, step: BeamAttention, query: Tensor, layer: Layer, visible: Tensor | None, own_keys: Tensor,
        own_values: Tensor, asks: Tensor,
    ) -> Tensor:  # fmt: skip
        """The same over the shared cache, which a decode step's ticket names: all beams of a sentence are queries."""
        b, m, n = step.sentences, step.beams, query.shape[2]
        slots = step.begin_layer(layer, visible, None, query.dtype)
        slots = None if slots is None else slots.repeat_interleave(n, 2)  # (B, 1, M * L, N)
        query, own_keys, own_values = (
            part.unflatten(0, (b, m)).transpose(1, 2).flatten(2, 3)
            for part in (query, own_keys, own_values)
        )
        mixed = self.mix(
            query, layer.keys, layer.values, slots, own_keys, own_values, asks.repeat(m)
        )
        return mixed.unflatten(2, (m, n)).transpose(1, 2).flatten(0, 1)
