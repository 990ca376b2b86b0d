"""fairseq's encoder where linear layers are routed: layer by layer, with one attention call in each.

Loaded models run PyTorch's fused encoder layer instead, whose matrix products no route reaches. On a CPU on which
oneDNN's are the faster ones, that is the slower way.
"""

import copy
from typing import Any

import torch
from fairseq.models.transformer.transformer_encoder import TransformerEncoderBase
from fairseq.modules import MultiheadAttention
from fairseq.modules.transformer_layer import TransformerEncoderLayerBase
from torch import Tensor, nn
from torch.nn import functional as F

from fastgen.models import linear
from fastgen.patches.fairseq.attention import Attending, current_step


class EncoderAttention(Attending):
    """The attention modules of an encoder's layers."""

    def __init__(self, encoder: nn.Module) -> None:
        self.modules = {layer.self_attn for layer in _layers(encoder)}

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


def encode(ensemble: Any, net_input: dict[str, Any]) -> list[Any]:
    """Return what fairseq's `EnsembleModel.forward_encoder` does, None for a model without an encoder."""
    if not ensemble.has_encoder():
        return [None] * len(ensemble.models)
    return [_encode(model, net_input) for model in ensemble.models]


def _encode(model: Any, net_input: dict[str, Any]) -> Any:
    if not _layer_by_layer(model):
        return model.encoder.forward_torchscript(net_input)
    encoder = _unfused(model.encoder)
    token = current_step.set(EncoderAttention(encoder))
    try:
        return encoder.forward_torchscript(net_input)
    finally:
        current_step.reset(token)


def _layer_by_layer(model: Any) -> bool:
    """Whether a model's encoder and its layers are fairseq's own, and their linear layers are routed."""
    encoder = model.encoder
    return (
        isinstance(encoder, TransformerEncoderBase)
        and type(encoder).forward_scriptable is TransformerEncoderBase.forward_scriptable
        and linear.reason_off(model) is None
        and all(
            isinstance(layer, TransformerEncoderLayerBase)
            and type(layer).forward is TransformerEncoderLayerBase.forward
            and "forward" not in vars(layer)
            and type(layer.self_attn) is MultiheadAttention
            and not layer._forward_hooks
            and not layer._forward_pre_hooks
            for layer in _layers(encoder)
        )
    )


def _layers(encoder: nn.Module) -> list[Any]:
    return list(encoder.get_submodule("layers").children())


def _unfused(encoder: Any) -> Any:
    """An encoder of the same parameters whose layers say that no checkpoint was loaded: then none is fused.

    The model itself stays as it is: another thread may be running it.
    """
    layers = _twin(encoder.layers)
    for name, layer in encoder.layers.named_children():
        layers._modules[name] = _twin(layer)
        layers._modules[name].load_to_BT = False
    twin = _twin(encoder)
    twin._modules["layers"] = layers
    return twin


def _twin(module: Any) -> Any:
    """A module of the same parameters and parts, in whose place among others another can be put."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin
