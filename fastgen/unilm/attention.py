"""UniLM's self-attention: regular tokens, plus mask tokens that only query."""

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from fastgen.models.layers.attention import BeamAttention, Layer, layer_of
from fastgen.patches.generation_call import current
from fastgen.unilm.config import UniLMConfig


class UniLMSelfAttention(nn.Module):
    """Self-attention of regular tokens (source and target) and of the mask tokens after them.

    All tokens attend to the regular tokens, as far as `visible` permits. A mask token also attends
    to itself, and no other token attends to it. The KV cache therefore stores the regular tokens
    only.
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
        """Compute self-attention.

        Args:
            x: (R, L, C); the last `masks` tokens are mask tokens.
            masks: Number of mask tokens.
            visible: Additive mask, broadcastable to (R, 1, L, N) over the N regular tokens, those
                of `past` first.
            past: KV cache of regular tokens, or None.

        Returns:
            (R, L, C).
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
        layer, step = layer_of(keys), current.get().step
        if layer is None or step is None:
            mixed = self.mix(query, keys, values, visible, own_keys, own_values, asks)
        else:
            mixed = self._of_beams(step, query, layer, visible, own_keys, own_values, asks)
        return mixed.transpose(1, 2).flatten(2)

    def mix(
        self, query: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, own_keys: Tensor,
        own_values: Tensor, asks: Tensor,
    ) -> Tensor:  # fmt: skip
        """Attend to shared keys and, where `asks` is set, to each query's own key.

        Args:
            query: (B, H, Q, D).
            keys: (B, H, N, D).
            values: (B, H, N, D).
            visible: Additive mask, broadcastable to (B, H, Q, N); None if all keys are visible.
            own_keys: (B, H, Q, D), the own key of each query.
            own_values: (B, H, Q, D), the own value of each query.
            asks: (Q,) bool, the queries that see their own key.

        Returns:
            (B, H, Q, D).
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
        self, step: BeamAttention, query: Tensor, layer: Layer, visible: Tensor | None,
        own_keys: Tensor, own_values: Tensor, asks: Tensor,
    ) -> Tensor:  # fmt: skip
        """Run `mix` over the shared cache, whose keys and values `layer` holds.

        All beams of a sentence are queries of one attention call.
        """
        b, m, n = step.sentences, step.beams, query.shape[2]
        slots = step.begin_layer(layer, visible, None, query.dtype)
        slots = None if slots is None else slots.repeat_interleave(n, 2)  # (B, 1, M * L, N)
        query, own_keys, own_values = (
            part.unflatten(0, (b, m)).transpose(1, 2).flatten(2, 3)
            for part in (query, own_keys, own_values)
        )
        mixed = self.mix(query, *layer.joined(), slots, own_keys, own_values, asks.repeat(m))
        return mixed.unflatten(2, (m, n)).transpose(1, 2).flatten(0, 1)
