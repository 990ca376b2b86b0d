"""Specs of models that combine two: an encoder with a decoder of any family, or images with text.

Such a model's spec is that of its decoder, found at another path.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from fastgen.models.specs.decoder_only import DECODER_ONLY
from fastgen.models.specs.encoder_decoder import ENCODER_DECODER
from fastgen.models.specs.model_spec import (
    Attention,
    Embedding,
    Head,
    Mlp,
    ModelSpec,
    Positions,
    Stack,
    Transform,
)

_BERT_ATTENTION = Attention(
    "attention", "attention.output.LayerNorm", ("self.query", "self.key", "self.value"),
    "output.dense", inner="self", head_dim="attention_head_size",
)  # fmt: skip
_TRANSFORM = "cls.predictions.transform"

_BERT = ModelSpec(
    Stack(
        "bert",
        self_attention=_BERT_ATTENTION,
        cross_attention=replace(
            _BERT_ATTENTION, module="crossattention", norm="crossattention.output.LayerNorm"
        ),
        mlp=Mlp(
            "intermediate.dense", "output.dense", "intermediate.intermediate_act_fn",
            "output.LayerNorm",
        ),
        layers="encoder.layer",
        embedding=Embedding(
            "embeddings.word_embeddings", norm="embeddings.LayerNorm",
            token_types="embeddings.token_type_embeddings",
        ),
        positions=Positions("embeddings.position_embeddings"),
        pre_norm=False,
    ),
    head=Head(
        "cls.predictions.decoder",
        transform=Transform(
            f"{_TRANSFORM}.dense", f"{_TRANSFORM}.transform_act_fn", f"{_TRANSFORM}.LayerNorm"
        ),
    ),
)  # fmt: skip
_GPT2 = DECODER_ONLY["gpt2"]

_DECODERS = {
    **{
        name: replace(ENCODER_DECODER[name], encoder=None, head=Head())
        for name in (
            "bart", "blenderbot", "blenderbot-small", "marian", "mbart", "pegasus", "plbart",
        )
    },
    "bert": _BERT,
    "gpt2": replace(
        _GPT2,
        decoder=replace(
            _GPT2.decoder,
            cross_attention=replace(
                _GPT2.decoder.self_attention, module="crossattention", norm="ln_cross_attn",
                qkv=("q_attn", "c_attn"),
            ),
        ),
    ),
    "trocr": ModelSpec(
        ENCODER_DECODER["bart"].decoder, head=Head("output_projection"), attention_interface=False
    ),
}  # fmt: skip
"""Specs of the decoders of pairs, by their model types."""


def _mask_of_features(model: Any, mask: Tensor, length: int) -> Tensor:
    """Return the mask of an encoder's output from that of the samples of sound."""
    return model.encoder._get_feature_vector_attention_mask(length, mask)


_PAIRS: dict[str, dict[str, Any]] = {
    "encoder-decoder": {},
    "speech-encoder-decoder": {"source_mask": _mask_of_features},
    "vision-encoder-decoder": {"masks_source": False},
}
"""Fields of the specs of pairs that differ from those of their decoders."""

_TEXTS = {
    **DECODER_ONLY,
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text"), DECODER_ONLY["qwen2"]),
    "qwen3_vl_text": DECODER_ONLY["qwen3"],
}
_TEXT_PATHS: dict[str, str] = dict.fromkeys(("idefics2", "idefics3", "smolvlm"), "model.text_model")
"""Where models hold their text model, by their model types, if not at `model.language_model`."""
_BEGINS = {"paligemma": 1}
"""Positions of the first tokens, by model type."""


def combined_spec(config: Any) -> ModelSpec | None:
    """Return the spec of a pair, or of a model that reads images or sound beside text.

    Args:
        config: The model's config.

    Returns:
        The spec; None for any other model, or if there is no spec of its decoder.
    """
    kind = getattr(config, "model_type", "")
    if kind in _PAIRS:
        spec = _DECODERS.get(config.decoder.model_type)
        return None if spec is None else replace(_within(spec, "decoder."), **_PAIRS[kind])
    text = getattr(config, "text_config", None)
    spec = _TEXTS.get(getattr(text, "model_type", ""))
    if spec is None or spec.decoder.path != "model":
        return None
    spec = spec if spec.variant is None else spec.variant(spec, text)
    path = _TEXT_PATHS.get(kind, "model.language_model")
    positions = replace(spec.decoder.positions, begin=_BEGINS.get(kind, 0))
    decoder = replace(spec.decoder, path=path, positions=positions)
    return replace(spec, decoder=decoder, head=Head(), prepares_inputs=True, prompts_only=_INPUTS)


_INPUTS = frozenset(
    (
        "feature_attention_mask", "image_grid_thw", "image_sizes", "input_features",
        "input_features_mask", "mm_encoder_outputs", "mm_token_type_ids", "pixel_attention_mask",
        "pixel_values", "pixel_values_videos", "second_per_grid_ts", "token_type_ids",
        "video_grid_thw", "vision_feature_layer", "vision_feature_select_strategy",
    )
)  # fmt: skip
"""Arguments of forwards that describe images, videos and sound, which only prompts contain."""


def _within(spec: ModelSpec, prefix: str) -> ModelSpec:
    """Return the spec of a model that has a model with a spec as a part."""
    head, transform = spec.head, spec.head.transform
    if transform is not None:
        paths = {name: prefix + path for name, path in vars(transform).items()}
        transform = replace(transform, **paths)
    return replace(
        spec,
        decoder=replace(spec.decoder, path=prefix + spec.decoder.path),
        head=replace(head, projection=prefix + head.projection, transform=transform),
    )
