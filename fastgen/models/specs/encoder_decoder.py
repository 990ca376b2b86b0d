"""Specs of encoder-decoder models of transformers, of fairseq's models, and of UniLM."""

from dataclasses import replace
from typing import Any

from fastgen.models.specs.model_spec import (
    Attention,
    Embedding,
    Head,
    Mlp,
    ModelSpec,
    Positions,
    Stack,
    Transform,
    encoder_like,
)


def offset_of(positions: Any) -> int:
    """Return the row of position 0 in BART's position embedding."""
    return positions.offset


def _after_padding(positions: Any) -> int:
    return positions.padding_idx + 1


def _both(decoder: Stack, head: Head) -> ModelSpec:
    """Return the spec of a model whose encoder has the layers of its decoder."""
    return ModelSpec(decoder, encoder_like(decoder), head)


_OFFSET = Positions(first_row=offset_of)
_BIASED_HEAD = Head(bias="final_logits_bias")

BART_DECODER = Stack(
    "model.decoder",
    self_attention=Attention("self_attn", "self_attn_layer_norm"),
    cross_attention=Attention("encoder_attn", "encoder_attn_layer_norm"),
    mlp=Mlp("fc1", "fc2", "activation_fn", "final_layer_norm"),
)
"""A pre-norm decoder of BART's names, as of Pegasus."""

_POST_NORM = replace(BART_DECODER, pre_norm=False)
_BART = replace(_POST_NORM, positions=_OFFSET)


def _t5_scale(model: Any) -> float:
    config = model.config
    scaled = {"t5": "scale_decoder_outputs", "umt5": "tie_word_embeddings"}.get(config.model_type)
    return model.model_dim**-0.5 if scaled is not None and getattr(config, scaled) else 1.0


def _t5_attention(sublayer: str, name: str) -> Attention:
    return Attention(
        f"{sublayer}.{name}", f"{sublayer}.layer_norm", ("q", "k", "v"), "o",
        head_dim="key_value_proj_dim",
    )  # fmt: skip


def _t5_mlp(sublayer: str) -> Mlp:
    dense = f"{sublayer}.DenseReluDense"
    return Mlp(
        up=f"{dense}.wi_1", down=f"{dense}.wo", activation=f"{dense}.act",
        norm=f"{sublayer}.layer_norm", gate=f"{dense}.wi_0", ungated=f"{dense}.wi",
    )  # fmt: skip


_T5_DECODER = Stack(
    "decoder",
    self_attention=_t5_attention("layer.0", "SelfAttention"),
    cross_attention=_t5_attention("layer.1", "EncDecAttention"),
    mlp=_t5_mlp("layer.2"),
    layers="block",
    final_norm="final_layer_norm",
)
_T5 = ModelSpec(
    _T5_DECODER,
    replace(encoder_like(_T5_DECODER), mlp=_t5_mlp("layer.1")),
    Head(scale=_t5_scale),
)

_PROPHETNET = Attention(
    "self_attn", "self_attn_layer_norm", ("query_proj", "key_proj", "value_proj"),
    scale=lambda module: module.head_dim**-0.5, relative_positions="relative_pos_embeddings",
)  # fmt: skip

ENCODER_DECODER = {
    "bart": _both(_BART, _BIASED_HEAD),
    "blenderbot": _both(BART_DECODER, _BIASED_HEAD),
    "blenderbot-small": _both(
        replace(_POST_NORM, embedding=Embedding(norms_tokens=True)), _BIASED_HEAD
    ),
    "m2m_100": _both(
        replace(BART_DECODER, positions=Positions(first_row=_after_padding, padding="own")), Head()
    ),
    "marian": _both(_POST_NORM, _BIASED_HEAD),
    "mbart": _both(replace(BART_DECODER, positions=_OFFSET), _BIASED_HEAD),
    "pegasus": _both(BART_DECODER, _BIASED_HEAD),
    "plbart": _both(_BART, _BIASED_HEAD),
    **dict.fromkeys(("t5", "mt5", "umt5"), _T5),
    "led": ModelSpec(
        replace(_POST_NORM, path="led.decoder"), head=_BIASED_HEAD, attention_interface=False,
        masks_prompt=False,
    ),
    "mvp": ModelSpec(_BART, head=_BIASED_HEAD, attention_interface=False),
    "fsmt": ModelSpec(
        replace(
            _POST_NORM,
            positions=Positions(
                first_row=_after_padding, padding="previous",
                length_arguments=("past_key_values_length", "cache_length"),
            ),
        ),
        head=Head("model.decoder.output_projection"), attention_interface=False,
        masks_prompt=False,
    ),
    "whisper": ModelSpec(
        replace(
            BART_DECODER, embedding=Embedding(scale=""), positions=Positions(skips_padding=True)
        ),
        head=Head("proj_out"), prepares_inputs=True, masks_source=False, generates_segments=True,
    ),
    "prophetnet": ModelSpec(
        Stack(
            "prophetnet.decoder",
            self_attention=_PROPHETNET,
            cross_attention=replace(
                _PROPHETNET, module="cross_attn", norm="cross_attn_layer_norm",
                relative_positions=None,
            ),
            mlp=Mlp(
                "feed_forward.intermediate", "feed_forward.output", "feed_forward.activation_fn",
                "feed_forward_layer_norm",
            ),
            embedding=Embedding(
                "word_embeddings", norm="embeddings_layer_norm", streams="ngram_embeddings"
            ),
            positions=Positions("position_embeddings", _after_padding),
            pre_norm=False,
        ),
        attention_interface=False, masks_prompt=False, mask_token=lambda _: -1,
    ),
    "unilm": ModelSpec(
        Stack(
            "bert",
            self_attention=Attention(
                "attention", "attention.output.LayerNorm",
                ("self.query", "self.key", "self.value"), "output.dense",
            ),
            mlp=Mlp(
                "intermediate.dense", "output.dense", "intermediate.intermediate_act_fn",
                "output.LayerNorm",
            ),
            layers="encoder.layer",
            embedding=Embedding(
                "embeddings.word_embeddings", norm="embeddings.LayerNorm",
                token_types="embeddings.token_type_embeddings",
                token_type=lambda model: model.config.target_type_id,
            ),
            positions=Positions("embeddings.position_embeddings"),
            pre_norm=False,
        ),
        head=Head(
            "cls.predictions.decoder",
            transform=Transform(
                "cls.predictions.transform.dense", "cls.predictions.transform.transform_act_fn",
                "cls.predictions.transform.LayerNorm",
            ),
        ),
        mask_token=lambda model: model.config.mask_token_id,
    ),
}  # fmt: skip

_FAIRSEQ_DECODER = replace(
    BART_DECODER,
    path="decoder",
    positions=Positions(first_row=_after_padding),
    pre_norm="normalize_before",
    runs_hooks=False,
)
FAIRSEQ_ENCODER = replace(encoder_like(_FAIRSEQ_DECODER), embedding=None)
FAIRSEQ = ModelSpec(_FAIRSEQ_DECODER, FAIRSEQ_ENCODER, Head("decoder.output_projection"))
"""fairseq's transformer, BART, and language models (which have no cross-attention modules)."""
