"""Specs of decoders: the names under which a live model holds the parts of a decode step."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Attention:
    """Names of the parts of an attention sublayer.

    `module`, `norm` and `own_norm` are paths from the layer; the other names are relative to
    `module`.

    Attributes:
        module: The attention module.
        norm: The sublayer's norm, before or after it as `Layout.norm_first` says; "" for none.
        parts: The query, key and value projections, or the one projection fused from all three.
        out: The output projection.
        blocks: Returns the number of blocks in a fused projection, as `TextAttention.blocks`.
        values_first: Whether values precede keys in a fused projection.
        spread: Attribute that tells whether key heads are repeated for every query head, as
            `TextAttention.spread`; None where they never are.
        own_norm: The norm of the sublayer's output, before the residual sum; None for none.
        softcap: Attribute that holds the soft cap of the attention scores.
        rotation: Attribute that selects one of several rotary embeddings.
        rotation_table: Attribute with a table of sines and cosines by position, used instead of the
            decoder's rotary module. It belongs to `Layout.rotary` where the decoder has one, else
            to `module`.
        neighbours: Whether rotary embeddings rotate adjacent pairs of channels.
        whole_norms: Whether the query and key norms span all heads together.
        scale: Returns the scale of the attention scores.
        seen: Attribute with a (1, 1, P, P) bool table of the positions each position attends to;
            None for plain causal attention.
        core: Path of the submodule that holds the head size and the scale; "" for `module` itself.
        nearness: The projection that computes a bias by distance from the query's input
            (`models.runtime.prophetnet`); None for none.
    """

    module: str
    norm: str
    parts: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    out: str = "out_proj"
    blocks: Callable[[Any], int] = lambda _: 1
    values_first: bool = False
    spread: str | None = None
    own_norm: str | None = None
    softcap: str | None = None
    rotation: str | None = None
    rotation_table: str | None = None
    neighbours: bool = False
    whole_norms: bool = False
    scale: Callable[[Any], float] = lambda module: getattr(module, "scaling", 1.0)
    seen: str | None = None
    core: str = ""
    nearness: str | None = None


@dataclass(frozen=True)
class Layout:
    """Names of the parts of a decoder or an encoder.

    Paths of the feed-forward sublayer are relative to the layer. Optional parts of the decoder may
    be named although a given model lacks them.

    Attributes:
        decoder: Path from the model; "" where the model itself is the encoder.
        head: Path from the model; "" where there is no head.
        layers: Path from the decoder.
        tokens: Token embedding, a path from the decoder; "" where tokens are embedded elsewhere.
        positions: Position embedding, a path from the decoder.
        embedding_norm: Path from the decoder.
        last_norm: Name of the decoder's final norm.
        rotary: Name of the decoder's rotary module.
        text: The self-attention sublayer.
        source: The cross-attention sublayer; None for none.
        wide: The first feed-forward projection.
        gated: The gate projection; equal to `wide` where one projection holds both halves.
        wide_gated: The name of `wide` in gated models, for families with both forms.
        activation: The activation function.
        narrow: The second feed-forward projection.
        feed_norm: The norm of the feed-forward sublayer, as `Attention.norm`.
        feed_own_norm: The norm of the feed-forward output, as `Attention.own_norm`.
        norm_first: Whether layers are pre-norm, or the layer attribute that says so.
        parallel: Whether attention and feed-forward both read the layer's input, or the layer
            attribute that says so.
        first: Returns the row of position 0 in the position table.
        pads: Whether padding tokens have a row of their own in the position table; "before" where
            they take the row before that of their position.
        past: Names, across releases, of the forward parameter that passes the number of cached
            tokens to the position embedding; empty where it needs none.
        norm_tokens: Whether unscaled token embeddings are normed before positions are added.
        dims: Attribute of an attention module that holds the head size.
        bias: Name of the model buffer added to the logits; None for none.
        scale: Returns the factor applied to the head's input.
        softcap: Returns the soft cap of the logits; None for none.
        embed_scale: Attribute of the token embedding or the decoder that scales token embeddings;
            "" for none.
        multiplier: Layer attribute that scales the output of each sublayer. It replaces `own_norm`
            and `feed_own_norm`.
        alibi: Returns a decoder's (H, L) bias of attention scores for L positions; None for none.
        by_position: Whether `alibi` is indexed by the position of a key, not by its distance.
        positions_of: Config attribute with the number of positions, where no table limits it.
        never: Paths from a layer of attributes that must be falsy, as no decode step implements
            them.
        masks_text: Whether decode steps of an encoder-decoder apply the mask of the decoder prompt.
        own_inputs: Whether the model overrides the preparation of its inputs in a way that does not
            change decode steps.
        mask: Returns the token id of the mask to predict from (`models.runtime.masked_step`); None
            where each step predicts from its newest token.
        transform: Projection before the head, a path from the model; None for none.
        transform_activation: Its activation function, a path from the model.
        transform_norm: Its norm, a path from the model.
        types: Path from the decoder of a table whose row `target_type` is added to all embeddings.
        target_type: Returns the row of `types`.
        streams: Path from the decoder of the embeddings of predicting streams
            (`models.runtime.prophetnet`); their last row belongs to the stream that steps run.
        counted: Whether positions count only the tokens that the decoder prompt's mask shows.
        masks_source: Whether the model's attention mask masks the source.
        called: Whether the toolkit calls the model and its decoder as modules, so that their hooks
            run; otherwise it calls their `forward`.
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
    pads: bool | Literal["before"] = False
    past: tuple[str, ...] = ()
    norm_tokens: bool = False
    dims: str = "head_dim"
    bias: str | None = None
    scale: Callable[[Any], float] = lambda _: 1.0
    softcap: Callable[[Any], float | None] = lambda _: None
    embed_scale: str = "embed_scale"
    multiplier: str | None = None
    alibi: Callable[[Any, int], Tensor] | None = None
    by_position: bool = False
    positions_of: str | None = None
    never: tuple[str, ...] = ()
    masks_text: bool = True
    own_inputs: bool = False
    mask: Callable[[Any], int] | None = None
    transform: str | None = None
    transform_activation: str = ""
    transform_norm: str = ""
    types: str | None = None
    target_type: Callable[[Any], int] = lambda _: 0
    streams: str | None = None
    counted: bool = False
    masks_source: bool = True
    called: bool = True

    @property
    def source_in_text(self) -> bool:
        """Whether the source is the beginning of the text, as in UniLM."""
        return self.source is None and self.mask is not None


def _offset(positions: Any) -> int:
    return positions.offset


def _behind_padding(positions: Any) -> int:
    return positions.padding_idx + 1


def _t5_scale(model: Any) -> float:
    config = model.config
    kind = {"t5": "scale_decoder_outputs", "umt5": "tie_word_embeddings"}.get(config.model_type)
    return model.model_dim**-0.5 if kind is not None and getattr(config, kind) else 1.0


def _scale_of_gptj(attention: Any) -> float:
    """Return the score scale; before transformers 5.24 the attribute holds a divisor."""
    return (
        float(attention.scaling)
        if hasattr(attention, "scaling")
        else 1 / float(attention.scale_attn)
    )


def _alibi_of_bloom(decoder: Any, length: int) -> Tensor:
    """Return (H, L) by position, rounded as in BLOOM and Falcon."""
    mask = torch.ones(1, length, dtype=torch.int64, device=decoder.word_embeddings.weight.device)
    make = vars(sys.modules[type(decoder).__module__])["build_alibi_tensor"]
    return make(mask, decoder.num_heads, decoder.word_embeddings.weight.dtype)[:, 0]


def _alibi_of_falcon(decoder: Any, length: int) -> Tensor:
    """Return (H, L) by position; Falcon scales the sum of score and bias."""
    return _alibi_of_bloom(decoder, length) / math.sqrt(decoder.embed_dim // decoder.num_heads)


def _alibi_of_mpt(decoder: Any, length: int) -> Tensor:
    """Return (H, L) by distance, in the dtype of the token embedding."""
    weight = decoder.wte.weight
    alibi = decoder.build_mpt_alibi_tensor(decoder.num_heads, length, device=weight.device)
    return alibi[:, 0].flip(1).to(weight.dtype)


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
    text=replace(
        _LLAMA.text, own_norm="post_attention_layernorm", softcap="attn_logit_softcapping"
    ),
    feed_norm="pre_feedforward_layernorm",
    feed_own_norm="post_feedforward_layernorm",
    softcap=lambda model: model.config.final_logit_softcapping,
)

_GPTJ = Layout(
    "transformer",
    layers="h",
    tokens="wte",
    last_norm="ln_f",
    text=Attention(
        "attn", "ln_1", ("qkv_proj",), blocks=lambda _: 4, values_first=True,
        rotation_table="embed_positions",
        neighbours=True, scale=_scale_of_gptj,
    ),
    source=None,
    wide="mlp.fc_in",
    activation="mlp.act",
    narrow="mlp.fc_out",
    feed_norm="ln_1",
    parallel=True,
)  # fmt: skip


def _blocks_of_falcon(attention: Any) -> int:
    if attention.new_decoder_architecture:
        return attention.num_kv_heads
    return 1 if attention.multi_query else attention.num_heads


def _falcon(layout: Layout, config: Any) -> Layout:
    """Select one of Falcon's forms.

    Attention runs in parallel with the feed-forward layer, with one norm or two, or precedes it.
    """
    if config.alibi:
        layout = replace(layout, alibi=_alibi_of_falcon, by_position=True)
    if config.new_decoder_architecture and config.num_ln_in_parallel_attn == 2:
        return replace(
            layout, text=replace(layout.text, norm="ln_attn"), feed_norm="ln_mlp", parallel=True
        )
    if config.new_decoder_architecture or config.parallel_attn:
        return replace(layout, feed_norm="input_layernorm", parallel=True)
    return layout


_PROPHETNET = Attention(
    "self_attn", "self_attn_layer_norm", ("query_proj", "key_proj", "value_proj"),
    scale=lambda module: module.head_dim**-0.5, nearness="relative_pos_embeddings",
)  # fmt: skip

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
        text=Attention("attn", "ln_1", ("c_attn",), "c_proj"), source=None, wide="mlp.c_fc",
        activation="mlp.act", narrow="mlp.c_proj", feed_norm="ln_2",
    ),
    "opt": Layout(
        "model.decoder", last_norm="final_layer_norm", source=None,
        norm_first="do_layer_norm_before", first=_offset
    ),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma"), _LLAMA),
    "gpt_neox": Layout(
        "gpt_neox", tokens="embed_in", last_norm="final_layer_norm",
        text=Attention(
            "attention", "input_layernorm", ("query_key_value",), "dense",
            blocks=lambda module: module.config.num_attention_heads,
        ), source=None, wide="mlp.dense_h_to_4h", activation="mlp.act", narrow="mlp.dense_4h_to_h",
        feed_norm="post_attention_layernorm", parallel="use_parallel_residual", dims="head_size",
    ),
    "phi": Layout(
        "model", last_norm="final_layernorm",
        text=Attention("self_attn", "input_layernorm", out="dense"), source=None,
        wide="mlp.fc1", activation="mlp.activation_fn", narrow="mlp.fc2",
        feed_norm="input_layernorm", parallel=True,
    ),
    "gemma2": _GEMMA2,
    "gemma3_text": replace(
        _GEMMA2, text=replace(_GEMMA2.text, softcap=None, rotation="layer_type")
    ),
    "phi3": replace(
        _LLAMA, text=Attention("self_attn", "input_layernorm", ("qkv_proj",), "o_proj"),
        wide="mlp.gate_up_proj",
        gated="mlp.gate_up_proj", activation="mlp.activation_fn", own_inputs=True,
    ),
    "bloom": Layout(
        "transformer", layers="h", tokens="word_embeddings",
        embedding_norm="word_embeddings_layernorm", last_norm="ln_f",
        text=Attention(
            "self_attention", "input_layernorm", ("query_key_value",), "dense",
            blocks=lambda module: module.num_heads, scale=lambda module: module.inv_norm_factor,
        ), source=None, wide="mlp.dense_h_to_4h", activation="mlp.gelu_impl",
        narrow="mlp.dense_4h_to_h",
        feed_norm="post_attention_layernorm", alibi=_alibi_of_bloom, by_position=True,
        never=("apply_residual_connection_post_layernorm",), own_inputs=True,
    ),
    "falcon": Layout(
        "transformer", layers="h", tokens="word_embeddings", last_norm="ln_f",
        text=Attention(
            "self_attention", "input_layernorm", ("query_key_value",), "dense",
            blocks=_blocks_of_falcon,
            spread="new_decoder_architecture", scale=lambda module: module.inv_norm_factor,
        ), source=None, wide="mlp.dense_h_to_4h", activation="mlp.act", narrow="mlp.dense_4h_to_h",
        feed_norm="post_attention_layernorm",
    ),
    "gptj": replace(_GPTJ, text=replace(_GPTJ.text, parts=("q_proj", "k_proj", "v_proj"))),
    "codegen": _GPTJ,
    "gpt_neo": Layout(
        "transformer", layers="h", tokens="wte", positions="wpe", last_norm="ln_f",
        text=Attention("attn.attention", "ln_1", seen="bias"), source=None, wide="mlp.c_fc",
        activation="mlp.act", narrow="mlp.c_proj", feed_norm="ln_2",
    ),
    "mpt": Layout(
        "transformer", layers="blocks", tokens="wte", last_norm="norm_f",
        text=Attention("attn", "norm_1", ("Wqkv",), scale=lambda module: module.softmax_scale),
        source=None,
        wide="ffn.up_proj", activation="ffn.act", narrow="ffn.down_proj", feed_norm="norm_2",
        alibi=_alibi_of_mpt, positions_of="max_seq_len", never=("attn.clip_qkv",),
    ),
    "starcoder2": replace(
        _LLAMA, wide="mlp.c_fc", gated=None, activation="mlp.act", narrow="mlp.c_proj"
    ),
    "stablelm": _LLAMA,
    "granite": replace(
        _LLAMA, embed_scale="embedding_multiplier", multiplier="residual_multiplier",
        scale=lambda model: 1 / model.config.logits_scaling,
    ),
    "olmo2": replace(
        _LLAMA,
        text=Attention(
            "self_attn", "", out="o_proj", own_norm="post_attention_layernorm", whole_norms=True
        ), feed_norm="", feed_own_norm="post_feedforward_layernorm",
    ),
    "cohere": replace(
        _LLAMA, text=replace(_LLAMA.text, neighbours=True), feed_norm="input_layernorm",
        parallel=True, scale=lambda model: model.logit_scale,
    ),
    "xglm": replace(_BART, decoder="model", bias=None, source=None, first=_offset),
    "led": replace(_BART, decoder="led.decoder", norm_first=False, masks_text=False),
    "mvp": replace(_BART, norm_first=False, first=_offset),
    "fsmt": Layout(
        "model.decoder", "model.decoder.output_projection", norm_first=False, first=_behind_padding,
        pads="before", past=("past_key_values_length", "cache_length"), masks_text=False,
    ),
    "unilm": Layout(
        "bert", "cls.predictions.decoder", layers="encoder.layer",
        tokens="embeddings.word_embeddings",
        positions="embeddings.position_embeddings", embedding_norm="embeddings.LayerNorm",
        text=Attention(
            "attention", "attention.output.LayerNorm", ("self.query", "self.key", "self.value"),
            "output.dense"
        ), source=None, wide="intermediate.dense", activation="intermediate.intermediate_act_fn",
        narrow="output.dense", feed_norm="output.LayerNorm", norm_first=False,
        mask=lambda model: model.config.mask_token_id, transform="cls.predictions.transform.dense",
        transform_activation="cls.predictions.transform.transform_act_fn",
        transform_norm="cls.predictions.transform.LayerNorm",
        types="embeddings.token_type_embeddings",
        target_type=lambda model: model.config.target_type_id,
    ),
    "prophetnet": Layout(
        "prophetnet.decoder", tokens="word_embeddings", positions="position_embeddings",
        embedding_norm="embeddings_layer_norm", text=_PROPHETNET,
        source=replace(
            _PROPHETNET, module="cross_attn", norm="cross_attn_layer_norm", nearness=None
        ), wide="feed_forward.intermediate", activation="feed_forward.activation_fn",
        narrow="feed_forward.output",
        feed_norm="feed_forward_layer_norm", norm_first=False, first=_behind_padding,
        masks_text=False, mask=lambda _: -1, streams="ngram_embeddings",
    ),
    "whisper": replace(
        _BART, head="proj_out", bias=None, embed_scale="", own_inputs=True, counted=True,
        masks_source=False
    ),
    "fairseq": Layout(
        "decoder", "decoder.output_projection", norm_first="normalize_before",
        first=_behind_padding, called=False
    ),
}  # fmt: skip
"""Layouts by the `model_type` of a transformers config; "fairseq" for fairseq's models."""


def _stablelm(layout: Layout, config: Any) -> Layout:
    return (
        replace(layout, feed_norm="input_layernorm", parallel=True)
        if config.use_parallel_residual
        else layout
    )


_BY_CONFIG: dict[str, Callable[[Layout, Any], Layout]] = {"falcon": _falcon, "stablelm": _stablelm}
"""Families whose layout depends on the config."""


def layout_of(config: Any) -> Layout | None:
    """Return the layout of a transformers model by its config; None for an unknown `model_type`."""
    layout, by_config = LAYOUTS.get(config.model_type), _BY_CONFIG.get(config.model_type)
    return layout if layout is None or by_config is None else by_config(layout, config)
