"""The bytes that keys and values take: by looking at the tensors alive during a call, and by formula."""

from __future__ import annotations

import gc
from typing import Any

import torch
from transformers import LogitsProcessor


def head_shape(config: Any) -> tuple[int, int, int]:
    """Return decoder layers, key-value heads and head dimension."""
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
    """Return the bytes of B*S + B*M*T entries per layer and of the toolkit's B*M*(S+T) (an entry: one K and V).

    The last token is never fed; an encoder-decoder's start token is, so its T is `new_tokens`, else it is one less.
    """
    layers, heads, size = head_shape(model.config)
    entry = 2 * layers * heads * size * torch.finfo(model.dtype).bits // 8
    fed = new_tokens if model.config.is_encoder_decoder else new_tokens - 1
    return {
        "fastgen": entry * (batch * source + batch * beams * fed),
        "stock": entry * batch * beams * (source + fed),
    }


class KVProbe(LogitsProcessor):
    """Changes nothing; at the last step it adds up the storages that hold keys or values.

    Taken for keys or values are tensors of 4 or more dimensions that end in the head dimension and have the number of
    heads among the others, and are no weights. Whole storages are counted, once, however many views there are.
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
        gc.collect()  # what earlier steps and calls left in cycles is not in use
        _, heads, size = head_shape(self.model.config)
        weights = {
            t.untyped_storage().data_ptr()
            for t in [*self.model.parameters(), *self.model.buffers()]
        }
        storages = {}
        for thing in gc.get_objects():
            if (
                not issubclass(type(thing), torch.Tensor)
                or thing.layout != torch.strided
                or thing.ndim < 4
            ):
                continue
            if thing.shape[-1] == size and heads in thing.shape[:-1]:
                storage = thing.untyped_storage()
                if storage.data_ptr() not in weights:
                    storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values())
