"""Size of the KV cache in bytes: measured on the live tensors of a call, and by formula."""

from __future__ import annotations

import gc
from typing import Any

import torch
from transformers import LogitsProcessor


def head_shape(config: Any) -> tuple[int, int, int]:
    """Return the number of decoder layers, the number of KV heads, and the head dimension."""
    heads = getattr(config, "num_key_value_heads", None) or getattr(
        config, "decoder_attention_heads", None
    )
    heads = heads or config.num_attention_heads
    size = (
        getattr(config, "d_kv", None)
        or getattr(config, "head_dim", None)
        or config.hidden_size // heads
    )
    layers = getattr(config, "num_decoder_layers", None) or getattr(config, "decoder_layers", None)
    return layers or config.num_hidden_layers, heads, size


def expected_bytes(
    model: Any, batch: int, source: int, beams: int, new_tokens: int
) -> dict[str, int]:
    """Return the bytes of fastgen's B*S + B*M*T entries per layer and the toolkit's B*M*(S+T).

    An entry is one key and one value of all heads. The last token is never fed to the decoder. The
    start token of an encoder-decoder is, so its T is `new_tokens`; a decoder-only model's is one
    less.
    """
    layers, heads, size = head_shape(model.config)
    entry = 2 * layers * heads * size * torch.finfo(model.dtype).bits // 8
    fed = new_tokens if model.config.is_encoder_decoder else new_tokens - 1
    return {
        "fastgen": entry * (batch * source + batch * beams * fed),
        "stock": entry * batch * beams * (source + fed),
    }


class KVProbe(LogitsProcessor):
    """A logits processor that measures the KV cache at the last decode step.

    It returns the scores unchanged. A tensor counts as keys or values if it has at least 4
    dimensions, ends in the head dimension, has the number of heads among its other dimensions, and
    is not a weight. Each storage counts once, with its full size, whatever number of views it has.
    """

    def __init__(self, model: Any, new_tokens: int) -> None:
        self.model, self.new_tokens = model, new_tokens
        self.calls, self.bytes = 0, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.new_tokens:
            self.bytes = self._count()
        return scores

    def _count(self) -> int:
        gc.collect()  # frees the unused tensors that earlier steps and calls left in cycles
        _, heads, size = head_shape(self.model.config)
        weights = {
            t.untyped_storage().data_ptr()
            for t in [*self.model.parameters(), *self.model.buffers()]
        }
        storages = {}
        for candidate in gc.get_objects():
            if (
                not issubclass(type(candidate), torch.Tensor)
                or candidate.layout != torch.strided
                or candidate.ndim < 4
            ):
                continue
            if candidate.shape[-1] == size and heads in candidate.shape[:-1]:
                storage = candidate.untyped_storage()
                if storage.data_ptr() not in weights:
                    storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values())
