"""fairseq's encoder on a CPU: fused and without padding, or layer by layer.

The fused encoder is `models.runtime.encoder`. Loaded models otherwise run PyTorch's fused encoder
layer, whose matrix products cannot be routed to C.
"""

import copy
import math
from typing import Any, NamedTuple

import torch
from fairseq.models.transformer.transformer_encoder import TransformerEncoderBase
from fairseq.modules import MultiheadAttention
from fairseq.modules.transformer_layer import TransformerEncoderLayerBase
from torch import Tensor, nn
from torch.nn import functional as F

from fastgen.models.build.encoder_builder import encoder_of, may_run_in_c
from fastgen.models.build.equivalence_check import (
    OUTPUTS_DIFFER,
    record_verdict,
    recorded_verdict,
    trial,
)
from fastgen.models.build.int8_step import encoder_to_run
from fastgen.models.build.introspection import NotFused
from fastgen.models.layers import linear
from fastgen.models.runtime.encoder import Encoder, UnpaddedBatch, pays, unpad, weights_of, whole
from fastgen.models.specs.encoder_decoder import FAIRSEQ_ENCODER
from fastgen.patches.fairseq.generator.attention import Attending
from fastgen.patches.generation_call import in_step


class EncoderAttention(Attending):
    """The self-attention layers of an encoder."""

    def __init__(self, encoder: nn.Module) -> None:
        self.modules = {layer.self_attn for layer in _layers(encoder)}

    def attend(
        self, module: Any, query: Tensor, key: Tensor | None, options: dict[str, Any]
    ) -> Any:
        """Compute bidirectional self-attention over all tokens that are not padding.

        Args:
            module: The attention module.
            query: (S, B, C).
            key: Unused: keys are computed from `query`.
            options: Keyword arguments of `MultiheadAttention.forward`.

        Returns:
            The pair (output (S, B, C), None), or None if the original has to run.
        """
        if (
            module not in self.modules
            or options.get("attn_mask") is not None
            or options.get("need_weights")
        ):
            return None
        shape = *query.shape[:2], module.num_heads, module.head_dim
        queries, keys, values = (
            projection(query).view(shape).permute(1, 2, 0, 3)
            for projection in (module.q_proj, module.k_proj, module.v_proj)
        )
        padding = options.get("key_padding_mask")
        mask = None if padding is None else ~padding.to(torch.bool)[:, None, None]
        attended = F.scaled_dot_product_attention(queries, keys, values, mask, scale=module.scaling)
        return module.out_proj(attended.permute(2, 0, 1, 3).reshape(query.shape)), None


class Encoded(NamedTuple):
    """The output of the encoders of an ensemble.

    Attributes:
        outputs: One output per model; None for a model without an encoder.
        left_off: Disabled features, each with its fallback reason.
    """

    outputs: list[Any]
    left_off: tuple[str, ...] = ()


def encode(ensemble: Any, net_input: dict[str, Any]) -> Encoded:
    """Return the output of `EnsembleModel.forward_encoder`; padded positions may differ."""
    if not ensemble.has_encoder():
        return Encoded([None] * len(ensemble.models))
    outputs, reasons = zip(
        *(_encode(model.encoder, net_input) for model in ensemble.models), strict=True
    )
    return Encoded(
        list(outputs), tuple(dict.fromkeys(reason for reason in reasons if reason is not None))
    )


def _encode(encoder: Any, net_input: dict[str, Any]) -> tuple[Any, str | None]:
    """Return an encoder's output, and the fallback reason if a faster path was not used."""
    on_cpu = net_input["src_tokens"].device.type == "cpu"
    if not _is_fairseqs(encoder):
        reason = _through_modules("layers that are not fairseq's own") if on_cpu else None
        return encoder.forward_torchscript(net_input), reason
    try:
        found = _from_weights(encoder, net_input) if on_cpu else None
    except NotFused as reason:
        return _by_modules(encoder, net_input), _through_modules(reason)
    return (_by_modules(encoder, net_input), None) if found is None else found


def _through_modules(reason: object) -> str:
    return f"the encoder runs through its own modules: {reason}"


def _from_weights(encoder: Any, net_input: dict[str, Any]) -> tuple[Any, str | None] | None:
    """Run the fused encoder, with zeros at padded positions.

    The first call runs the modules too and returns their output, for the equivalence check.

    Returns:
        The output, and the reason if the check failed; None if the modules are the faster path.

    Raises:
        NotFused: The fused encoder does not support these layers or inputs.
    """
    inputs = {name for name, value in net_input.items() if value is not None}
    if more := sorted(inputs - {"src_tokens", "src_lengths", "prev_output_tokens"}):
        raise NotFused(f"it gets {', '.join(more)}")
    visible = net_input["src_tokens"].ne(encoder.padding_idx)
    lengths: list[int] = visible.sum(1).tolist()
    count, length, width = (
        len(encoder.layers),
        visible.shape[1],
        weights_of(encoder.layers[0].embed_dim),
    )
    saves = pays(
        lengths, length, "none", width, count, linear.reason_off(encoder, math.inf) is None
    )
    if not (saves or may_run_in_c(encoder)):
        return None
    if not all(lengths):
        raise NotFused("a sentence of padding alone")
    layers = encoder_of(_bare(encoder), FAIRSEQ_ENCODER, length, of=encoder)
    if not saves and layers.run_layers is None:
        return None
    proven = recorded_verdict(layers)
    if proven is None:
        own = _by_modules(encoder, net_input)
        one_input, one_visible = {name: net_input[name][:1] for name in inputs}, visible[:1]
        own_tokens = _tokens_of(own, one_visible)
        trial_result = trial(
            lambda: _tokens_of(_at_once(encoder, layers, one_input, one_visible), one_visible),
            (),
            own_tokens.dtype,
        )
        reason = record_verdict(layers, trial_result, own_tokens)
        return own, None if reason is None else _through_modules(reason)
    if not proven:
        raise NotFused(OUTPUTS_DIFFER)
    # LayerDrop draws its random numbers here, in evaluation mode too.
    next(iter(encoder.layers))
    return _at_once(encoder, encoder_to_run(layers), net_input, visible), None


def _tokens_of(output: Any, visible: Tensor) -> Tensor:
    """Return the encoder's output at the first sentence's tokens, (N, C); visible: (1, S)."""
    return output["encoder_out"][0][:, 0][visible[0]]


def _at_once(encoder: Any, layers: Encoder, net_input: dict[str, Any], visible: Tensor) -> Any:
    """Return the encoder's output, with all of its layers replaced by a fused one."""
    shape = visible.shape[0], visible.shape[1]
    sentences = (
        whole(shape, "none", visible.device) if bool(visible.all()) else unpad(visible, "none")
    )
    twin = _twin(encoder)
    twin._modules |= {"layers": nn.ModuleList([_AllLayers(layers, sentences)]), "layer_norm": None}
    return twin.forward_torchscript(net_input)


class _AllLayers(nn.Module):
    """An encoder's layers and its final norm, run over the tokens of all sentences."""

    load_to_BT = False  # fairseq reads it from the first layer

    def __init__(self, layers: Encoder, sentences: UnpaddedBatch) -> None:
        super().__init__()
        self.run = layers, sentences

    def forward(self, x: Tensor, encoder_padding_mask: Tensor | None) -> Tensor:
        """Return (S, B, C) for x (S, B, C)."""
        layers, sentences = self.run
        found = sentences.restored(layers(sentences.chosen(x.transpose(0, 1)), sentences))
        return found.transpose(0, 1).contiguous()  # every decoder layer reads it


def _by_modules(encoder: Any, net_input: dict[str, Any]) -> Any:
    if linear.reason_off(encoder) is not None:
        return encoder.forward_torchscript(net_input)
    unfused = _unfused(encoder)
    with in_step(EncoderAttention(unfused)):
        return unfused.forward_torchscript(net_input)


def _is_fairseqs(encoder: Any) -> bool:
    """Return whether an encoder and its layers run fairseq's own code."""
    return (
        isinstance(encoder, TransformerEncoderBase)
        and type(encoder).forward_scriptable is TransformerEncoderBase.forward_scriptable
        and all(
            isinstance(layer, TransformerEncoderLayerBase)
            and type(layer).forward is TransformerEncoderLayerBase.forward
            and "forward" not in vars(layer)
            and type(layer.self_attn) is MultiheadAttention
            and layer.self_attn.bias_k is None
            and not layer.self_attn.add_zero_attn
            and not getattr(layer.self_attn, "use_xformers", False)
            and not layer._forward_hooks
            and not layer._forward_pre_hooks
            for layer in _layers(encoder)
        )
    )


def _layers(encoder: nn.Module) -> list[Any]:
    return list(encoder.get_submodule("layers").children())


def _unfused(encoder: Any) -> Any:
    """Return a copy of an encoder that does not run PyTorch's fused layers.

    The copy shares the parameters. The model stays unchanged: another thread may be running it.
    """
    layers = _twin(encoder.layers)
    for name, layer in encoder.layers._modules.items():  # a layer may occur more than once
        layers._modules[name] = _twin(layer)
        layers._modules[name].load_to_BT = False
    twin = _twin(encoder)
    twin._modules["layers"] = layers
    return twin


def _bare(encoder: Any) -> nn.Module:
    """Return a copy of an encoder with its layers and final norm only.

    The second set of weights that fused layers hold is left out.
    """
    bare = _unfused(encoder)
    bare._modules = {
        name: part for name, part in bare._modules.items() if name in ("layers", "layer_norm")
    }
    bare._parameters, bare._buffers = {}, {}
    for layer in bare._modules["layers"]._modules.values():
        layer._parameters = {}
    return bare


def _twin(module: Any) -> Any:
    """Return a shallow copy of a module, with the same parameters and replaceable submodules."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin
