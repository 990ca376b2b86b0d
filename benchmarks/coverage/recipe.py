"""Build a small random model of any family of transformers from its own config class.

Sizes are set by the names that configs use for them, also in nested configs.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES as SEQ_TO_SEQ,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES as SPEECH,
)

PAD, BOS, EOS, START = 0, 1, 2, 3
WEIGHT, OTHER = 0.4, 0.1
"""Standard deviations of matrices and of vectors. Logits are then rarely near a tie."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model.

    Attributes:
        width: Hidden size.
        inner: Size of the layers inside of an MLP.
        layers: Number of layers, of encoder and decoder each.
        heads: Number of attention heads.
        kv_heads: Number of heads of keys and values, where a family distinguishes them.
        head_dim: Size of a head.
        positions: Maximum number of tokens of a text.
        vocabulary: Number of tokens.
        experts: Number of experts.
    """

    width: int = 32
    inner: int = 48
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    positions: int = 256
    vocabulary: int = 96
    experts: int = 4


_NAMES: dict[str, tuple[str, ...]] = {
    "width": (
        "hidden_size", "d_model", "n_embd", "word_embed_proj_dim", "embedding_size",
        "emb_dim", "attention_hidden_size",
    ),
    "inner": (
        "intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "dim_ff",
        "dff", "d_inner", "moe_intermediate_size", "shared_expert_intermediate_size",
        "expert_ffn_hidden_size", "ffn_hidden_size", "intermediate_size_mlp",
        "shared_intermediate_size", "feed_forward_size", "n_inner",
    ),
    "layers": (
        "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers",
        "decoder_layers", "num_encoder_layers", "num_decoder_layers", "num_blocks",
    ),
    "heads": (
        "num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads",
        "encoder_attention_heads", "decoder_attention_heads", "num_encoder_attention_heads",
        "num_decoder_attention_heads", "encoder_num_attention_heads",
        "decoder_num_attention_heads", "linear_num_value_heads", "linear_num_key_heads",
    ),
    "kv_heads": (
        "num_key_value_heads", "encoder_num_key_value_heads", "decoder_num_key_value_heads",
        "num_kv_heads",
    ),
    "head_dim": (
        "head_dim", "d_kv", "attention_window", "v_head_dim", "qk_nope_head_dim",
        "qk_rope_head_dim", "linear_key_head_dim", "linear_value_head_dim",
        "kv_channels", "index_head_dim", "swa_head_dim",
    ),
    "positions": (
        "n_positions", "max_position_embeddings", "max_seq_len", "max_encoder_position_embeddings",
        "max_decoder_position_embeddings",
    ),
    "vocabulary": (
        "vocab_size", "unpadded_vocab_size", "src_vocab_size", "tgt_vocab_size",
        "vocab_size_per_layer_input",
    ),
    "experts": (
        "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts",
    ),
}  # fmt: skip
"""Names that configs use for their sizes, by the name in `Sizes`."""

_VALUES: dict[str, Any] = {
    "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "decoder_start_token_id": START,
    "forced_eos_token_id": None, "num_experts_per_tok": 2, "moe_k": 2, "top_k_experts": 2,
    "moe_topk": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "mamba_chunk_size": 16,
}  # fmt: skip
"""Other small values, by the name in configs."""


def types() -> list[str]:
    """Return the model types of the causal, sequence-to-sequence and speech mappings."""
    return sorted({*CAUSAL, *SEQ_TO_SEQ, *SPEECH})


def config_of(kind: type[Any], sizes: Sizes, own: Mapping[str, Any], top: bool = True) -> Any:
    """Return a config of a class with small sizes, also in its nested configs.

    Args:
        kind: The class of the config.
        sizes: The sizes.
        own: Values for attributes, in place of those by name. Nested configs get those that they
            know.
        top: Whether this is no nested config.
    """
    known = inspect.signature(kind).parameters
    values = {
        word: getattr(sizes, size)
        for size, words in _NAMES.items()
        for word in words
        if word in known
    }
    if "kv_lora_rank" in known and "num_key_value_heads" in known:  # of latent attention
        values["num_key_value_heads"] = sizes.heads
    values |= {word: value for word, value in _VALUES.items() if word in known}
    values |= {word: value for word, value in own.items() if top or word in known}
    if kind.sub_configs:
        whole = kind()
        for name in kind.sub_configs:
            part = getattr(whole, name, None)
            if part is not None and name not in own:
                values[name] = config_of(type(part), sizes, own, top=False)
    return kind(**values)


def build(name: str, sizes: Sizes, own: Mapping[str, Any] = {}) -> Any:
    """Return a model of a family in evaluation mode, with the same weights every time.

    Args:
        name: A model type of `types`.
        sizes: The sizes.
        own: Values for attributes of its config that the names of sizes do not give.
    """
    config = config_of(CONFIG_MAPPING[name], sizes, own)
    auto: Any = AutoModelForSeq2SeqLM  # also of families that fastgen registers
    if name in CAUSAL and not (config.is_encoder_decoder and name in {*SEQ_TO_SEQ, *SPEECH}):
        auto = AutoModelForCausalLM
    elif name in SPEECH and name not in SEQ_TO_SEQ:
        auto = AutoModelForSpeechSeq2Seq
    torch.manual_seed(0)
    model = auto.from_config(config).eval()
    if config.is_encoder_decoder and model.generation_config.decoder_start_token_id is None:
        model.generation_config.decoder_start_token_id = START
    return model


def tiny(name: str) -> Any:
    """Return a model of a family with the smallest sizes."""
    return build(name, Sizes(), TINY.get(name, {}))


def enlarge(model: Any) -> Any:
    """Draw all weights of a model anew, large enough that its logits are no near ties."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator).to(weight.dtype)
            if weight.dim() > 1:
                weight.copy_(WEIGHT * noise)
            else:
                weight.add_(OTHER * noise)
    return model


def inputs_of(
    model: Any, sentences: int, tokens: int, padded: bool = False
) -> dict[str, torch.Tensor]:
    """Return random inputs of a call: token ids and their mask, or audio features for Whisper.

    Args:
        model: The model.
        sentences: Number of sentences B.
        tokens: Number of tokens of the longest sentence.
        padded: Whether all sentences but the first are shorter than that.
    """
    generator, config = torch.Generator().manual_seed(1), model.config
    if config.model_type == "whisper":
        shape = sentences, config.num_mel_bins, 2 * config.max_source_positions
        sound = torch.randn(shape, generator=generator)
        return {"input_features": sound.to(model.device, model.dtype)}
    text = config.get_text_config(decoder=True)
    vocabulary = getattr(text, "vocab_size", None) or config.src_vocab_size
    ids = torch.randint(START + 1, vocabulary, (sentences, tokens), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        for row in range(1, sentences):
            cut = row * tokens // sentences
            mask[row, slice(tokens - cut, None) if config.is_encoder_decoder else slice(cut)] = 0
        ids[mask == 0] = PAD
    return {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}


_DECODER = {"is_decoder": True}
_ALL_HEADS = {"num_key_value_heads": 4}
_MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64, "mamba_d_state": 16,
    "mamba_n_groups": 1,
}  # fmt: skip
_FEW_FILTERS = {"num_filters": 2, "depths": (1,) * 7}
_FEW_ROTATED = {"rotary_dim": 4}
_HALF = {"layer_types": ["linear_attention", "full_attention"]}
_INDEXED = {"layer_types": ["linear_attention", "indexed_attention"]}
_HYBRID = {"num_hidden_layers": 2, "layers_block_type": ["linear_attention", "hybrid"]}

TINY: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            "bert",
            "bert-generation",
            "big_bird",
            "camembert",
            "data2vec-text",
            "electra",
            "ernie",
            "megatron-bert",
            "rembert",
            "roberta",
            "roberta-prelayernorm",
            "roc_bert",
            "roformer",
            "xlm-roberta",
            "xlm-roberta-xl",
            "xmod",
        ),
        _DECODER,
    ),
    **dict.fromkeys(
        (
            "bailing_hybrid",
            "kimi_linear",
            "qwen3_5",
            "qwen3_5_moe",
            "qwen3_5_moe_text",
            "qwen3_5_text",
            "qwen3_next",
        ),
        _HALF,
    ),
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), _INDEXED),
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "codegen": _FEW_ROTATED,
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        }
    },
    "dots3_note": _ALL_HEADS,
    "dots3_note_text": _ALL_HEADS,
    "falcon_h1": _MAMBA,
    "fsmt": {"langs": ["en", "de"]},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": _FEW_ROTATED,
    "granitemoehybrid": _MAMBA | _HALF,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "chunk_size": 16},
    "mpt": {"use_cache": True},
    "nemotron_h": {
        "layers_block_type": ["mamba", "full_attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 1,
        "chunk_size": 16,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "lru_width": 32},
    "reformer": _DECODER
    | {
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [16, 16],
        "axial_pos_embds_dim": [8, 24],
    },
    "roc_bert": _DECODER | {"shape_vocab_size": 96, "pronunciation_vocab_size": 96},
    "vibevoice": _FEW_FILTERS,
    "vibevoice_asr": _FEW_FILTERS,
    "whisper": {"max_source_positions": 16},
    "zamba": _HYBRID,
    "zamba2": _HYBRID,
    "zaya": {"num_experts_per_tok": 1},
}
"""Values for attributes that the names of sizes do not give, by model type, for `tiny`."""
