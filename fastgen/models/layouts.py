"""Where the parts of a decode step lie in a live model: a record of names per kind of decoder."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Attention:
    """Names of an attention sublayer's parts, paths from the layer; those of `parts` and `out` from `module`.

    parts: the projections of queries, keys and values, or the one of all three; by_head: whether that one's output is
        by heads first.
    own_norm: of the sublayer's output, before the sum, a path from the layer; None where there is none.
    softcap, rotation: attributes of `module`: the cap of its scores, and which of several rotations is its.
    by_root: whether scores are divided by the root of a head's size, where `module` has no factor for them.
    nearness: of what makes of a query its bias by distance, with the predicting stream of ProphetNet; None for none.
    """

    module: str
    norm: str
    parts: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    out: str = "out_proj"
    by_head: bool = False
    own_norm: str | None = None
    softcap: str | None = None
    rotation: str | None = None
    by_root: bool = False
    nearness: str | None = None


@dataclass(frozen=True)
class Layout:
    """Names of a decoder's parts.

    Attributes:
        decoder, head: paths from the model.
        layers, tokens, positions, embedding_norm, last_norm, rotary: of the decoder; what a model has not may be named.
        wide, gated, activation, narrow, feed_norm, feed_own_norm: of the feed-forward sublayer, paths from the layer,
            the last as `Attention.own_norm`; `gated` is `wide` where that one has both side by side.
        wide_gated: what `wide` is called where there is a gate, in a family that has both forms.
        norm_first: whether norms stand before their sublayers, or the attribute of a layer that says so.
        parallel: whether attention and feed-forward both read what comes into a layer, or the attribute that says so.
        first: says which row of a table of positions is the first one's.
        pads: whether padding has a row of its own there.
        norm_tokens: whether token embeddings are normed before positions are added, and not scaled.
        dims: the attribute of an attention module that is the size of a head.
        bias: that of the logits, a buffer of the model's; None where there is none.
        scale: says what is multiplied with before the head.
        softcap: says what caps the logits; None for nothing.
        own_inputs: whether the model prepares its inputs in a way of its own, which makes no difference here.
        scaled: whether token embeddings are multiplied with the decoder's `embed_scale`, where it has one.
        counted: whether positions count the tokens that the mask of a decoder's prompt shows.
        streams: embeddings of the predicting streams, whose last one is the first stream's; None for no streams.
        prompt_masked: whether steps look at the mask of a decoder's prompt.
        source_masked: whether the mask that the model is given is that of the source.
    """

    decoder: str
    head: str = "lm_head"
    layers: str = "layers"
    tokens: str = "embed_tokens"
    positions: str = "embed_positions"
    embedding_norm: str = "layernorm_embedding"
    last_norm: str = "layer_norm"
    rotary: str = "rotary_emb"
    text: Attention = Attention("self_attn", "self_attn_layer_norm")
    source: Attention | None = Attention("encoder_attn", "encoder_attn_layer_norm")
    wide: str = "fc1"
    gated: str | None = None
    wide_gated: str | None = None
    activation: str = "activation_fn"
    narrow: str = "fc2"
    feed_norm: str = "final_layer_norm"
    feed_own_norm: str | None = None
    norm_first: bool | str = True
    parallel: bool | str = False
    first: Callable[[Any], int] = lambda _: 0
    pads: bool = False
    norm_tokens: bool = False
    dims: str = "head_dim"
    bias: str | None = None
    scale: Callable[[Any], float] = lambda _: 1.0
    softcap: Callable[[Any], float | None] = lambda _: None
    own_inputs: bool = False
    scaled: bool = True
    counted: bool = False
    streams: str | None = None
    prompt_masked: bool = True
    source_masked: bool = True


def _offset(positions: Any) -> int:
    return positions.offset


def _behind_padding(positions: Any) -> int:
    return positions.padding_idx + 1


def _t5_scale(model: Any) -> float:
    config = model.config
    kind = {"t5": "scale_decoder_outputs", "umt5": "tie_word_embeddings"}.get(config.model_type)
    return model.model_dim**-0.5 if kind is not None and getattr(config, kind) else 1.0


_BART = Layout("model.decoder", bias="final_logits_bias")
_T5 = Layout(
    "decoder",
    layers="block",
    last_norm="final_layer_norm",
    text=Attention("layer.0.SelfAttention", "layer.0.layer_norm", ("q", "k", "v"), "o"),
    source=Attention("layer.1.EncDecAttention", "layer.1.layer_norm", ("q", "k", "v"), "o"),
    wide="layer.2.DenseReluDense.wi",
    gated="layer.2.DenseReluDense.wi_1",
    wide_gated="layer.2.DenseReluDense.wi_0",
    activation="layer.2.DenseReluDense.act",
    narrow="layer.2.DenseReluDense.wo",
    feed_norm="layer.2.layer_norm",
    dims="key_value_proj_dim",
    scale=_t5_scale,
)
_LLAMA = Layout(
    "model",
    last_norm="norm",
    text=Attention("self_attn", "input_layernorm", out="o_proj"),
    source=None,
    wide="mlp.gate_proj",
    gated="mlp.up_proj",
    activation="mlp.act_fn",
    narrow="mlp.down_proj",
    feed_norm="post_attention_layernorm",
)
_GEMMA2 = replace(
    _LLAMA,
    text=replace(_LLAMA.text, own_norm="post_attention_layernorm", softcap="attn_logit_softcapping"),
    feed_norm="pre_feedforward_layernorm",
    feed_own_norm="post_feedforward_layernorm",
    softcap=lambda model: model.config.final_logit_softcapping,
)

_PROPHETNET = Attention("self_attn", "self_attn_layer_norm", ("query_proj", "key_proj", "value_proj"), by_root=True)

LAYOUTS = {
    "bart": replace(_BART, norm_first=False, first=_offset),
    "blenderbot": _BART,
    "blenderbot-small": replace(_BART, norm_first=False, norm_tokens=True),
    "m2m_100": replace(_BART, bias=None, first=_behind_padding, pads=True),
    "marian": replace(_BART, norm_first=False),
    "mbart": replace(_BART, first=_offset),
    "pegasus": _BART,
    "plbart": replace(_BART, norm_first=False, first=_offset),
    **dict.fromkeys(("t5", "mt5", "umt5"), _T5),
    "gpt2": Layout(
        "transformer", layers="h", tokens="wte", positions="wpe", last_norm="ln_f",
        text=Attention("attn", "ln_1", ("c_attn",), "c_proj"), source=None, wide="mlp.c_fc", activation="mlp.act",
        narrow="mlp.c_proj", feed_norm="ln_2",
    ),
    "opt": Layout(
        "model.decoder", last_norm="final_layer_norm", source=None, norm_first="do_layer_norm_before", first=_offset
    ),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma"), _LLAMA),
    "gpt_neox": Layout(
        "gpt_neox", tokens="embed_in", last_norm="final_layer_norm",
        text=Attention("attention", "input_layernorm", ("query_key_value",), "dense", by_head=True), source=None,
        wide="mlp.dense_h_to_4h", activation="mlp.act", narrow="mlp.dense_4h_to_h",
        feed_norm="post_attention_layernorm", parallel="use_parallel_residual", dims="head_size",
    ),
    "phi": Layout(
        "model", last_norm="final_layernorm", text=Attention("self_attn", "input_layernorm", out="dense"), source=None,
        wide="mlp.fc1", activation="mlp.activation_fn", narrow="mlp.fc2", feed_norm="input_layernorm", parallel=True,
    ),
    "gemma2": _GEMMA2,
    "gemma3_text": replace(_GEMMA2, text=replace(_GEMMA2.text, softcap=None, rotation="layer_type")),
    "phi3": replace(
        _LLAMA, text=Attention("self_attn", "input_layernorm", ("qkv_proj",), "o_proj"), wide="mlp.gate_up_proj",
        gated="mlp.gate_up_proj", activation="mlp.activation_fn", own_inputs=True,
    ),
    "prophetnet": Layout(
        "prophetnet.decoder", tokens="word_embeddings", positions="position_embeddings",
        embedding_norm="embeddings_layer_norm", norm_first=False, first=_behind_padding, streams="ngram_embeddings",
        text=replace(_PROPHETNET, nearness="relative_pos_embeddings"),
        source=replace(_PROPHETNET, module="cross_attn", norm="cross_attn_layer_norm"),
        wide="feed_forward.intermediate", activation="feed_forward.activation_fn", narrow="feed_forward.output",
        feed_norm="feed_forward_layer_norm", prompt_masked=False,
    ),
    "whisper": replace(
        _BART, head="proj_out", bias=None, own_inputs=True, scaled=False, counted=True, source_masked=False
    ),
    "fairseq": Layout("decoder", "decoder.output_projection", norm_first="normalize_before", first=_behind_padding),
}  # fmt: skip
"""By the `model_type` of a transformers model's config, or the toolkit."""
