"""fairseq's encoder where linear layers are routed: layer by layer, with one attention call in each.

Loaded models run PyTorch's fused encoder layer instead, whose matrix products no route reaches. On a CPU on which
oneDNN's are the faster ones, that is the slower way.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from fairseq.models.transformer.transformer_encoder import TransformerEncoderBase
from fairseq.modules import MultiheadAttention
from fairseq.modules.transformer_layer import TransformerEncoderLayerBase
from torch import Tensor
from torch.nn import functional as F

from fastgen.models import linear
from fastgen.patches.fairseq.attention import Attending, current_step

_lock = threading.Lock()
_users: Counter[int] = Counter()  # by a layer's id: contexts that it is in


class EncoderAttention(Attending):
    """The attention modules of an encoder's layers."""

    def __init__(self, layers: Iterable[Any]) -> None:
        self.modules = {layer.self_attn for layer in layers}

    def attend(self, module: Any, query: Tensor, key: Tensor | None, options: dict[str, Any]) -> Any:
        """Return (S, B, C) for query (S, B, C), every token of which sees all that is no padding."""
        if module not in self.modules or options.get("attn_mask") is not None or options.get("need_weights"):
            return None
        shape = *query.shape[:2], module.num_heads, module.head_dim
        queries, keys, values = (
            projection(query).view(shape).permute(1, 2, 0, 3)
            for projection in (module.q_proj, module.k_proj, module.v_proj)
        )
        padding = options.get("key_padding_mask")
        mask = None if padding is None else ~padding.to(torch.bool)[:, None, None]
        mixed = F.scaled_dot_product_attention(queries, keys, values, mask, scale=module.scaling)
        return module.out_proj(mixed.permute(2, 0, 1, 3).reshape(query.shape)), None


@contextmanager
def layer_by_layer(models: Iterable[Any]) -> Iterator[None]:
    """Within it the encoders of models, where that is the faster way, run layer by layer."""
    layers = [layer for model in models for layer in _layers(model)]
    token = current_step.set(EncoderAttention(layers))
    try:
        with ExitStack() as stack:
            for layer in layers:
                stack.enter_context(_unfused(layer))
            yield
    finally:
        current_step.reset(token)


def _layers(model: Any) -> list[Any]:
    """The layers of a model's encoder, if they are fairseq's own and their linear layers are routed."""
    encoder = getattr(model, "encoder", None)
    if (
        not isinstance(encoder, TransformerEncoderBase)
        or type(encoder).forward_scriptable is not TransformerEncoderBase.forward_scriptable
        or linear.reason_off(model) is not None
    ):
        return []
    layers: list[Any] = list(encoder.layers)
    own = all(
        type(layer).forward is TransformerEncoderLayerBase.forward and type(layer.self_attn) is MultiheadAttention
        for layer in layers
        if isinstance(layer, TransformerEncoderLayerBase)
    )
    return layers if own and all(isinstance(layer, TransformerEncoderLayerBase) for layer in layers) else []


@contextmanager
def _unfused(layer: Any) -> Iterator[None]:
    """Within it a layer says that it was not loaded from a checkpoint, without which it is never fused."""
    if not layer.load_to_BT and not _users[id(layer)]:
        yield
        return
    with _lock:
        _users[id(layer)] += 1
        layer.load_to_BT = False
    try:
        yield
    finally:
        with _lock:
            _users[id(layer)] -= 1
            if not _users[id(layer)]:
                del _users[id(layer)]
                layer.load_to_BT = True
