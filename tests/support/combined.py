"""Tiny random models that combine two: an encoder and a decoder of any family, or images and text.

`COMBINED` holds them by name, each with a function that returns inputs for B sentences, padded or
not.
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from torch import Tensor

from tests.support import zoo

IMAGE, VIDEO, BEGIN, END = 95, 94, 93, 92
"""Token ids of images, of videos, and around them."""

_BART: dict[str, Any] = {
    "vocab_size": zoo.VOCABULARY, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 2,
    "decoder_ffn_dim": 48, "max_position_embeddings": 128, "init_std": 0.5, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "is_decoder": True, "is_encoder_decoder": False,
    "add_cross_attention": True, "cross_attention_hidden_size": None,
}  # fmt: skip
_GPT2: dict[str, Any] = {
    "vocab_size": zoo.VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128,
    "initializer_range": 0.5, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "is_decoder": True, "add_cross_attention": True,
}  # fmt: skip
_BERT: dict[str, Any] = {
    "vocab_size": zoo.VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 128,
    "initializer_range": 0.5, "pad_token_id": 0,
}  # fmt: skip
_TEXT: dict[str, Any] = {
    "vocab_size": zoo.VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.5,
    "max_position_embeddings": 256,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 16, "patch_size": 8,
}  # fmt: skip
_QWEN: dict[str, Any] = {
    "depth": 2, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "in_channels": 3,
}  # fmt: skip
_QWEN_TOKENS: dict[str, Any] = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": BEGIN,
    "vision_end_token_id": END, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

Inputs = dict[str, Tensor]


def vit(decoder: Any, width: int = 32) -> Any:
    """Return a ViT with a decoder, as TrOCR, Donut and captioning models."""
    config = tf.ViTConfig(**_VISION | {"hidden_size": width}, initializer_range=0.3)
    return _started(tf.VisionEncoderDecoderModel(encoder=tf.ViTModel(config), decoder=decoder))


def wav2vec2(decoder: Any) -> Any:
    """Return a Wav2Vec2 with a decoder."""
    config = tf.Wav2Vec2Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2,
        num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4, initializer_range=0.3,
        do_stable_layer_norm=True, feat_extract_norm="layer",
    )  # fmt: skip
    encoder = tf.Wav2Vec2Model(config)
    return _started(tf.SpeechEncoderDecoderModel(encoder=encoder, decoder=decoder))


def bert_to(decoder: Any) -> Any:
    """Return a BERT with a decoder."""
    encoder = tf.BertModel(tf.BertConfig(**_BERT))
    return _started(tf.EncoderDecoderModel(encoder=encoder, decoder=decoder))


def _started(model: Any) -> Any:
    for config in (model.config, model.generation_config):
        config.decoder_start_token_id, config.pad_token_id = zoo.START, zoo.PAD
        config.bos_token_id, config.eos_token_id = 1, zoo.EOS
    return model


def gpt2() -> Any:
    return tf.GPT2LMHeadModel(tf.GPT2Config(**_GPT2))


def bert() -> Any:
    return tf.BertLMHeadModel(tf.BertConfig(**_BERT, is_decoder=True, add_cross_attention=True))


def bart() -> Any:
    return tf.BartForCausalLM(tf.BartConfig(**_BART))


def mbart() -> Any:
    return tf.MBartForCausalLM(tf.MBartConfig(**_BART))


def trocr(width: int = 32) -> Any:
    return tf.TrOCRForCausalLM(tf.TrOCRConfig(**_BART | {"cross_attention_hidden_size": width}))


def _llava() -> Any:
    return tf.LlavaForConditionalGeneration(
        tf.LlavaConfig(
            vision_config=tf.CLIPVisionConfig(**_VISION), text_config=tf.LlamaConfig(**_TEXT),
            image_token_id=IMAGE,
        )
    )  # fmt: skip


def _llava_next() -> Any:
    return tf.LlavaNextForConditionalGeneration(
        tf.LlavaNextConfig(
            vision_config=tf.CLIPVisionConfig(**_VISION), text_config=tf.MistralConfig(**_TEXT),
            image_token_id=IMAGE, image_grid_pinpoints=[[16, 16]],
        )
    )  # fmt: skip


def _paligemma() -> Any:
    return tf.PaliGemmaForConditionalGeneration(
        tf.PaliGemmaConfig(
            vision_config=tf.SiglipVisionConfig(**_VISION, projection_dim=32),
            text_config=tf.GemmaConfig(**_TEXT), projection_dim=32, hidden_size=32,
            image_token_id=IMAGE,
        )
    )  # fmt: skip


def _gemma3() -> Any:
    return tf.Gemma3ForConditionalGeneration(
        tf.Gemma3Config(
            text_config=_TEXT | {"sliding_window": 64}, vision_config=_VISION,
            mm_tokens_per_image=4, image_token_id=IMAGE, boi_token_index=BEGIN,
            eoi_token_index=END,
        )
    )  # fmt: skip


def _idefics3() -> Any:
    return tf.Idefics3ForConditionalGeneration(
        tf.Idefics3Config(
            text_config=_TEXT | {"model_type": "llama"}, vision_config=_VISION, scale_factor=2,
            image_token_id=IMAGE, pad_token_id=0,
        )
    )  # fmt: skip


def _qwen(kind: str, vision: dict[str, Any], **rope: Any) -> Any:
    text = dict(_TEXT, rope_parameters={"rope_type": "default", "rope_theta": 1e4, **rope})
    config = getattr(tf, f"{kind}Config")(
        text_config=text, vision_config=_QWEN | vision, **_QWEN_TOKENS
    )
    return getattr(tf, f"{kind}ForConditionalGeneration")(config)


def _qwen2_audio() -> Any:
    sound: dict[str, Any] = {
        "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 48,
        "num_mel_bins": 8, "max_source_positions": 8, "initializer_range": 0.5,
    }  # fmt: skip
    return tf.Qwen2AudioForConditionalGeneration(
        tf.Qwen2AudioConfig(
            audio_config=sound, text_config=_TEXT | {"model_type": "qwen2"}, audio_token_id=IMAGE
        )
    )


def recordings(count: int) -> Inputs:
    """Return features of random recordings, each of which takes 4 tokens of a prompt."""
    generator = torch.Generator().manual_seed(1)
    return {
        "input_features": torch.randn(count, 8, 16, generator=generator),
        "feature_attention_mask": torch.ones(count, 16, dtype=torch.int64),
    }


def pictures(count: int, *shape: int) -> Tensor:
    """Return random images (N, ..., 3, 16, 16)."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, *shape, 3, 16, 16, generator=generator)


def with_images(sentences: int, padded: bool, tokens: int = 4) -> Inputs:
    """Return prompts of equal length, or padded on the left, that hold the tokens of one image."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, 90, (sentences, 12 + tokens), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(sentences):
        begin = 3 * row % 9 if padded else 0
        ids[row, :begin] = mask[row, :begin] = 0
        ids[row, begin] = BEGIN
        ids[row, begin + 1 : begin + 1 + tokens] = IMAGE
    return {"input_ids": ids, "attention_mask": mask}


def _images(sentences: int, padded: bool) -> Inputs:
    return {"pixel_values": pictures(sentences)}


def _sounds(sentences: int, padded: bool) -> Inputs:
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(sentences, 400, dtype=torch.int64)
    for row in range(sentences - 1 if padded else 0):
        mask[row, 300 - 60 * row :] = 0
    return {
        "input_values": torch.randn(sentences, 400, generator=generator) * mask,
        "attention_mask": mask,
    }


def _sources(sentences: int, padded: bool) -> Inputs:
    return zoo.batch(None, sentences, 9, "right" if padded else "none")


def _typed(sentences: int, padded: bool) -> Inputs:
    inputs = with_images(sentences, padded)
    types = (inputs["input_ids"] == IMAGE).int()
    return inputs | {"pixel_values": pictures(sentences), "token_type_ids": types}


def _of_qwen(sentences: int, padded: bool) -> Inputs:
    inputs = with_images(sentences, padded)
    patches = pictures(sentences).flatten(1).view(sentences * 16, -1)
    return inputs | {
        "pixel_values": patches.repeat_interleave(2, 1),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * sentences),
        "mm_token_type_ids": (inputs["input_ids"] == IMAGE).int(),
    }


COMBINED: dict[str, tuple[Callable[[], Any], Callable[[int, bool], Inputs]]] = {
    "vit-gpt2": (lambda: vit(gpt2()), _images),
    "vit-bert": (lambda: vit(bert()), _images),
    "vit-bart": (lambda: vit(bart()), _images),
    "vit-trocr": (lambda: vit(trocr()), _images),
    "wide vit-trocr": (lambda: vit(trocr(48), 48), _images),
    "wide vit-mbart": (lambda: vit(mbart(), 48), _images),
    "wav2vec2-bart": (lambda: wav2vec2(bart()), _sounds),
    "wav2vec2-gpt2": (lambda: wav2vec2(gpt2()), _sounds),
    "bert-bert": (lambda: bert_to(bert()), _sources),
    "bert-gpt2": (lambda: bert_to(gpt2()), _sources),
    "llava": (
        _llava,
        lambda b, padded: with_images(b, padded) | {"pixel_values": pictures(b)},
    ),
    "llava_next": (
        _llava_next,
        lambda b, padded: (
            with_images(b, padded, 10)
            | {"pixel_values": pictures(b, 2), "image_sizes": torch.tensor([[16, 16]] * b)}
        ),
    ),
    "paligemma": (_paligemma, _typed),
    "gemma3": (_gemma3, _typed),
    "idefics3": (
        _idefics3,
        lambda b, padded: with_images(b, padded, 1) | {"pixel_values": pictures(b, 1)},
    ),
    "qwen2_audio": (_qwen2_audio, lambda b, padded: with_images(b, padded) | recordings(b)),
    "qwen2_vl": (
        lambda: _qwen("Qwen2VL", {"embed_dim": 32, "mlp_ratio": 2}, mrope_section=[2, 3, 3]),
        _of_qwen,
    ),
    "qwen2_5_vl": (
        lambda: _qwen(
            "Qwen2_5_VL",
            {"out_hidden_size": 32, "intermediate_size": 48, "window_size": 8,
             "fullatt_block_indexes": [1]},
            mrope_section=[2, 3, 3],
        ),
        _of_qwen,
    ),
    "qwen3_vl": (
        lambda: _qwen(
            "Qwen3VL",
            {"out_hidden_size": 32, "intermediate_size": 48, "deepstack_visual_indexes": [0],
             "num_position_embeddings": 16},
            mrope_section=[2, 3, 3], mrope_interleaved=True,
        ),
        _of_qwen,
    ),
}  # fmt: skip


def build(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """Return a model of `COMBINED`, ready to generate."""
    torch.manual_seed(0)
    return COMBINED[name][0]().to(dtype).eval()


def inputs_of(
    name: str, sentences: int, padded: bool, dtype: torch.dtype = torch.float64
) -> Inputs:
    """Return inputs of a model of `COMBINED`."""
    inputs = COMBINED[name][1](sentences, padded)
    return {
        key: value.to(dtype) if value.is_floating_point() else value
        for key, value in inputs.items()
    }
