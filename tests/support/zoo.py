"""Tiny random models of every proven family, built from their configs without loading weights.

Weights have a large standard deviation, so that the logits of two tokens are rarely near a tie.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from fastgen.models.specs.model_spec import ModelSpec
from fastgen.models.specs.registry import SPECS
from fastgen.patches.generation_call import in_step
from fastgen.unilm import UniLMConfig, UniLMForConditionalGeneration

VOCABULARY = 96
PAD, EOS, START = 0, 2, 3

_ENCODER_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24, "max_position_embeddings": 128, "init_std": 1.0, "pad_token_id": PAD,
    "bos_token_id": 1, "eos_token_id": EOS, "decoder_start_token_id": START,
    "forced_eos_token_id": None,
}  # fmt: skip
_T5: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2,
    "num_decoder_layers": 2, "num_heads": 2, "initializer_factor": 3.0, "pad_token_id": PAD,
    "eos_token_id": EOS, "decoder_start_token_id": START, "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
}  # fmt: skip
_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 256, "initializer_range": 0.8, "pad_token_id": PAD,
    "bos_token_id": 1, "eos_token_id": EOS,
}  # fmt: skip
_EXPERTS: dict[str, Any] = _DECODER | {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "experts_implementation": "eager",  # the only one in fp64
}  # fmt: skip
_GROUPED: dict[str, Any] = _EXPERTS | {
    "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
    "routed_scaling_factor": 1.5, "first_k_dense_replace": 1,
}  # fmt: skip


_LATENT: dict[str, Any] = {k: v for k, v in _GROUPED.items() if k != "head_dim"} | {
    "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6, "v_head_dim": 10,
}  # fmt: skip


def _without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in _DECODER.items() if name not in names}


def _experts(*names: str) -> dict[str, Any]:
    return {name: value for name, value in _EXPERTS.items() if name not in names}


ENCODER_DECODERS: dict[str, Callable[[], Any]] = {
    "bart": lambda: tf.BartForConditionalGeneration(tf.BartConfig(**_ENCODER_DECODER)),
    "mbart": lambda: tf.MBartForConditionalGeneration(tf.MBartConfig(**_ENCODER_DECODER)),
    "marian": lambda: tf.MarianMTModel(tf.MarianConfig(**_ENCODER_DECODER)),
    "m2m_100": lambda: tf.M2M100ForConditionalGeneration(tf.M2M100Config(**_ENCODER_DECODER)),
    "pegasus": lambda: tf.PegasusForConditionalGeneration(tf.PegasusConfig(**_ENCODER_DECODER)),
    "plbart": lambda: tf.PLBartForConditionalGeneration(tf.PLBartConfig(**_ENCODER_DECODER)),
    "blenderbot": lambda: tf.BlenderbotForConditionalGeneration(
        tf.BlenderbotConfig(**_ENCODER_DECODER)
    ),
    "blenderbot-small": lambda: tf.BlenderbotSmallForConditionalGeneration(
        tf.BlenderbotSmallConfig(**_ENCODER_DECODER)
    ),
    "t5": lambda: tf.T5ForConditionalGeneration(tf.T5Config(**_T5)),
    "mt5": lambda: tf.MT5ForConditionalGeneration(tf.MT5Config(**_T5)),
    "umt5": lambda: tf.UMT5ForConditionalGeneration(tf.UMT5Config(**_T5)),
    "unilm": lambda: UniLMForConditionalGeneration(
        UniLMConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=128,
            initializer_range=0.8,
            pad_token_id=PAD,
            eos_token_id=EOS,
            decoder_start_token_id=START,
            mask_token_id=1,
        )
    ),
}

DECODERS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: tf.GPT2LMHeadModel(
        tf.GPT2Config(
            vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=256,
            initializer_range=0.8, pad_token_id=PAD, bos_token_id=1, eos_token_id=EOS,
        )
    ),
    "opt": lambda: tf.OPTForCausalLM(
        tf.OPTConfig(
            vocab_size=VOCABULARY, hidden_size=16, ffn_dim=24, num_hidden_layers=2,
            num_attention_heads=2, word_embed_proj_dim=16, max_position_embeddings=256,
            init_std=0.8, pad_token_id=PAD, bos_token_id=1, eos_token_id=EOS,
        )
    ),
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_DECODER)),
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**_DECODER)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**_DECODER)),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**_DECODER, sliding_window=8)),
    "gemma": lambda: tf.GemmaForCausalLM(tf.GemmaConfig(**_DECODER)),
    "gemma2": lambda: tf.Gemma2ForCausalLM(
        tf.Gemma2Config(
            **_DECODER, sliding_window=8, query_pre_attn_scalar=8, attn_implementation="eager",
        )
    ),
    "gemma3_text": lambda: tf.Gemma3ForCausalLM(
        tf.Gemma3TextConfig(**_DECODER, sliding_window=8, query_pre_attn_scalar=8)
    ),
    "gpt_neox": lambda: tf.GPTNeoXForCausalLM(
        tf.GPTNeoXConfig(
            **_without("head_dim", "num_attention_heads", "num_key_value_heads"),
            num_attention_heads=2,
            rope_parameters={
                "rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5,
            },
        )
    ),
    "phi": lambda: tf.PhiForCausalLM(tf.PhiConfig(**_without("head_dim"), hidden_act="gelu_new")),
    "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**_without("head_dim"))),
}  # fmt: skip

STREAMS: dict[str, Callable[[], Any]] = {
    "prophetnet": lambda: tf.ProphetNetForConditionalGeneration(
        tf.ProphetNetConfig(
            vocab_size=VOCABULARY, hidden_size=16, encoder_ffn_dim=24, decoder_ffn_dim=24,
            num_encoder_layers=3, num_decoder_layers=2, num_encoder_attention_heads=2,
            num_decoder_attention_heads=2, init_std=1.0, max_position_embeddings=64, num_buckets=6,
            relative_max_distance=10, ngram=3, pad_token_id=PAD, bos_token_id=1, eos_token_id=EOS,
            decoder_start_token_id=START,
        )
    ),
}  # fmt: skip
"""Families whose decoder has several streams and its own attention."""

SPEECH: dict[str, Callable[[], Any]] = {
    "whisper": lambda: _with_speech_tokens(
        tf.WhisperForConditionalGeneration(tf.WhisperConfig(**_WHISPER))
    ),
}
"""Families that take audio features instead of tokens."""

FRAMES, MELS = 20, 8
"""Frames per audio segment, and features per frame."""

TIMES = 73
"""The first timestamp token; they extend to the end of the vocabulary of `SPEECH`."""

_WHISPER: dict[str, Any] = {
    "vocab_size": 84, "d_model": 16, "encoder_layers": 3, "decoder_layers": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24, "num_mel_bins": MELS, "max_source_positions": FRAMES // 2,
    "max_target_positions": 48, "init_std": 1.0, "pad_token_id": 59, "bos_token_id": 59,
    "eos_token_id": 59, "decoder_start_token_id": 60, "median_filter_width": 3,
}  # fmt: skip


def _with_speech_tokens(model: Any) -> Any:
    settings: dict[str, Any] = {
        "lang_to_id": {"<|en|>": 61, "<|de|>": 62, "<|fr|>": 63},
        "task_to_id": {"transcribe": 64, "translate": 65}, "is_multilingual": True,
        "prev_sot_token_id": 66, "no_timestamps_token_id": TIMES - 1, "max_length": 20,
        "max_initial_timestamp_index": 4, "suppress_tokens": [1, 2, 60, 61, 62, 63, 64, 65, 66],
        "begin_suppress_tokens": [4, 59], "alignment_heads": [[0, 0], [1, 1]],
    }  # fmt: skip
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    return model


OWN_ATTENTION = "tests_own"
"""Name of an attention implementation that no library defines."""

AttentionInterface.register(OWN_ATTENTION, sdpa_attention_forward)
AttentionMaskInterface.register(OWN_ATTENTION, sdpa_mask)

FAMILIES = ENCODER_DECODERS | DECODERS

_GPTJ: dict[str, Any] = {
    "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256,
    "rotary_dim": 4, "initializer_range": 0.5, "pad_token_id": PAD, "bos_token_id": 1,
    "eos_token_id": EOS,
}  # fmt: skip
_FALCON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "initializer_range": 0.5, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": EOS,
}  # fmt: skip


def with_sinks(model: Any) -> Any:
    """Make the attention sinks and biases of a new model large enough to tell, and return it."""
    for name, held in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(("bias", "sinks")):
            nn.init.normal_(held, std=0.3 if "correction" in name else 1.0)
    return model


def _falcon(**form: Any) -> Any:
    return tf.FalconForCausalLM(tf.FalconConfig(**_FALCON, **form))


_ALTERNATING = ["sliding_attention", "full_attention"]


_GPT_BIGCODE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 256,
    "initializer_range": 0.8, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": EOS,
}  # fmt: skip


def _gpt_bigcode(**form: Any) -> Any:
    return tf.GPTBigCodeForCausalLM(tf.GPTBigCodeConfig(**_GPT_BIGCODE, **form))


def _stablelm(**form: Any) -> Any:
    half = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    return tf.StableLmForCausalLM(
        tf.StableLmConfig(**_without("head_dim"), rope_parameters=half, **form)
    )


MORE: dict[str, Callable[[], Any]] = {
    "bloom": lambda: tf.BloomForCausalLM(
        tf.BloomConfig(
            vocab_size=VOCABULARY, hidden_size=24, n_layer=2, n_head=3, initializer_range=0.5,
            pad_token_id=PAD, bos_token_id=1, eos_token_id=EOS,
        )
    ),
    "falcon": _falcon,
    "falcon-40b": lambda: _falcon(new_decoder_architecture=True, num_kv_heads=2),
    "falcon-11b": lambda: _falcon(
        new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1,
    ),
    "falcon-rw": lambda: _falcon(alibi=True, multi_query=False, parallel_attn=False, bias=True),
    "gptj": lambda: tf.GPTJForCausalLM(tf.GPTJConfig(**_GPTJ)),
    "codegen": lambda: tf.CodeGenForCausalLM(tf.CodeGenConfig(**_GPTJ)),
    "gpt_neo": lambda: tf.GPTNeoForCausalLM(
        tf.GPTNeoConfig(
            vocab_size=VOCABULARY, hidden_size=16, num_layers=2, num_heads=2, window_size=8,
            initializer_range=0.5, attention_types=[[["global", "local"], 1]],
            max_position_embeddings=128, pad_token_id=PAD, bos_token_id=1, eos_token_id=EOS,
        )
    ),
    "mpt": lambda: tf.MptForCausalLM(
        tf.MptConfig(
            d_model=24, n_heads=3, n_layers=2, max_seq_len=64, vocab_size=VOCABULARY,
            initializer_range=0.5, use_cache=True, pad_token_id=PAD, bos_token_id=1,
            eos_token_id=EOS,
        )
    ),
    "cohere": lambda: tf.CohereForCausalLM(tf.CohereConfig(**_DECODER, logit_scale=0.5)),
    "cohere-norms": lambda: tf.CohereForCausalLM(
        tf.CohereConfig(**_DECODER, logit_scale=0.5, use_qk_norm=True),
    ),
    "granite": lambda: tf.GraniteForCausalLM(
        tf.GraniteConfig(
            **_DECODER, embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.6,
            logits_scaling=2.0
        )
    ),
    "olmo2": lambda: tf.Olmo2ForCausalLM(tf.Olmo2Config(**_DECODER)),
    "stablelm": _stablelm,
    "stablelm-parallel": lambda: _stablelm(use_parallel_residual=True, use_qkv_bias=True),
    "starcoder2": lambda: tf.Starcoder2ForCausalLM(tf.Starcoder2Config(**_without("head_dim"))),
    "biogpt": lambda: tf.BioGptForCausalLM(
        tf.BioGptConfig(
            **_without("head_dim", "num_key_value_heads"),
            hidden_act="gelu", scale_embedding=True,
        )
    ),
    "cohere2": lambda: tf.Cohere2ForCausalLM(
        tf.Cohere2Config(**_DECODER, logit_scale=0.5, sliding_window=64, layer_types=_ALTERNATING)
    ),
    "cwm": lambda: tf.CwmForCausalLM(
        tf.CwmConfig(**_DECODER, sliding_window=64, layer_types=_ALTERNATING)
    ),
    "ernie4_5": lambda: tf.Ernie4_5ForCausalLM(tf.Ernie4_5Config(**_DECODER)),
    "exaone4": lambda: tf.Exaone4ForCausalLM(
        tf.Exaone4Config(**_DECODER, sliding_window=64, layer_types=_ALTERNATING)
    ),
    "glm": lambda: tf.GlmForCausalLM(tf.GlmConfig(**_DECODER)),
    "glm4": lambda: tf.Glm4ForCausalLM(tf.Glm4Config(**_DECODER)),
    "gpt_bigcode": lambda: _gpt_bigcode(),
    "gpt_bigcode-heads": lambda: _gpt_bigcode(multi_query=False),
    "helium": lambda: tf.HeliumForCausalLM(tf.HeliumConfig(**_DECODER | {"head_dim": 4})),
    "hunyuan_v1_dense": lambda: tf.HunYuanDenseV1ForCausalLM(
        tf.HunYuanDenseV1Config(**_DECODER)
    ),
    "ministral": lambda: tf.MinistralForCausalLM(
        tf.MinistralConfig(**_DECODER, sliding_window=64, layer_types=_ALTERNATING)
    ),
    "olmo": lambda: tf.OlmoForCausalLM(tf.OlmoConfig(**_DECODER)),
    "olmo3": lambda: tf.Olmo3ForCausalLM(
        tf.Olmo3Config(**_DECODER, sliding_window=64, layer_types=_ALTERNATING)
    ),
    "seed_oss": lambda: tf.SeedOssForCausalLM(tf.SeedOssConfig(**_DECODER)),
    "smollm3": lambda: tf.SmolLM3ForCausalLM(
        tf.SmolLM3Config(**_DECODER | {"num_hidden_layers": 4}, no_rope_layers=[1, 1, 1, 0])
    ),
    "axk1": lambda: tf.AXK1ForCausalLM(
        tf.AXK1Config(**_LATENT, mlp_layer_types=["dense", "sparse"])
    ),
    "deepseek_v2": lambda: tf.DeepseekV2ForCausalLM(
        tf.DeepseekV2Config(**_LATENT, topk_method="group_limited_greedy")
    ),
    "deepseek_v3": lambda: tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(**_LATENT)),
    "deepseek_v3-plain": lambda: tf.DeepseekV3ForCausalLM(
        tf.DeepseekV3Config(**_LATENT | {"q_lora_rank": None}, rope_interleave=False)
    ),
    "glm4_moe_lite": lambda: tf.Glm4MoeLiteForCausalLM(
        tf.Glm4MoeLiteConfig(**_LATENT, mlp_layer_types=["dense", "sparse"])
    ),
    "minicpm3": lambda: tf.MiniCPM3ForCausalLM(
        tf.MiniCPM3Config(**_LATENT, scale_emb=3.0, scale_depth=0.8, dim_model_base=4)
    ),
    "sarvam_mla": lambda: tf.DeepseekV3ForCausalLM(tf.SarvamMLAConfig(**_LATENT)),
    "youtu": lambda: tf.YoutuForCausalLM(tf.YoutuConfig(**_LATENT)),
    "dots1": lambda: tf.Dots1ForCausalLM(tf.Dots1Config(**_GROUPED)),
    "ernie4_5_moe": lambda: tf.Ernie4_5_MoeForCausalLM(
        tf.Ernie4_5_MoeConfig(
            **_experts("num_experts", "num_experts_per_tok"), moe_num_experts=4, moe_k=2,
            moe_num_shared_experts=1, moe_layer_start_index=1,
        )
    ),
    "exaone_moe": lambda: tf.ExaoneMoeForCausalLM(
        tf.ExaoneMoeConfig(
            **_GROUPED, num_shared_experts=1, sliding_window=64, layer_types=_ALTERNATING,
            mlp_layer_types=["dense", "sparse"],
        )
    ),
    "flex_olmo": lambda: tf.FlexOlmoForCausalLM(tf.FlexOlmoConfig(**_EXPERTS)),
    "glm4_moe": lambda: tf.Glm4MoeForCausalLM(tf.Glm4MoeConfig(**_GROUPED, use_qk_norm=True)),
    "gpt_oss": lambda: with_sinks(
        tf.GptOssForCausalLM(tf.GptOssConfig(**_EXPERTS, sliding_window=64))
    ),
    "granitemoe": lambda: tf.GraniteMoeForCausalLM(
        tf.GraniteMoeConfig(
            **_EXPERTS, embedding_multiplier=3.0, attention_multiplier=0.2,
            residual_multiplier=0.6, logits_scaling=2.0,
        )
    ),
    "hunyuan_v1_moe": lambda: tf.HunYuanMoEV1ForCausalLM(
        tf.HunYuanMoEV1Config(**_experts("num_experts_per_tok"), moe_topk=2)
    ),
    "hy_v3": lambda: tf.HYV3ForCausalLM(
        tf.HYV3Config(**_GROUPED, mlp_layer_types=["dense", "sparse"])
    ),
    "minimax_m2": lambda: tf.MiniMaxM2ForCausalLM(tf.MiniMaxM2Config(**_EXPERTS)),
    "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**_EXPERTS)),
    "olmoe": lambda: tf.OlmoeForCausalLM(tf.OlmoeConfig(**_experts("head_dim"))),
    "phimoe": lambda: tf.PhimoeForCausalLM(tf.PhimoeConfig(**_EXPERTS, lm_head_bias=True)),
    "qwen2_moe": lambda: tf.Qwen2MoeForCausalLM(
        tf.Qwen2MoeConfig(**_EXPERTS, shared_expert_intermediate_size=40)
    ),
    "qwen3_moe": lambda: tf.Qwen3MoeForCausalLM(
        tf.Qwen3MoeConfig(**_EXPERTS, norm_topk_prob=True, mlp_only_layers=[0])
    ),
    "jais2": lambda: tf.Jais2ForCausalLM(tf.Jais2Config(**_DECODER)),
    "nemotron": lambda: tf.NemotronForCausalLM(tf.NemotronConfig(**_DECODER)),
    "persimmon": lambda: tf.PersimmonForCausalLM(
        tf.PersimmonConfig(**_without("head_dim", "num_key_value_heads"))
    ),
    "solar_open": lambda: tf.SolarOpenForCausalLM(tf.SolarOpenConfig(**_GROUPED)),
    "xglm": lambda: tf.XGLMForCausalLM(
        tf.XGLMConfig(
            vocab_size=VOCABULARY, d_model=16, ffn_dim=24, num_layers=2, attention_heads=2,
            init_std=0.5, max_position_embeddings=128, pad_token_id=PAD, bos_token_id=1,
            eos_token_id=EOS, decoder_start_token_id=START,
        )
    ),
    "led": lambda: tf.LEDForConditionalGeneration(
        tf.LEDConfig(
            **{k: v for k, v in _ENCODER_DECODER.items() if k != "max_position_embeddings"},
            attention_window=4, max_encoder_position_embeddings=64,
            max_decoder_position_embeddings=64,
        )
    ),
    "mvp": lambda: tf.MvpForConditionalGeneration(tf.MvpConfig(**_ENCODER_DECODER)),
    "fsmt": lambda: tf.FSMTForConditionalGeneration(
        tf.FSMTConfig(
            **{k: v for k, v in _ENCODER_DECODER.items() if k != "vocab_size"}, langs=["en", "de"],
            src_vocab_size=VOCABULARY, tgt_vocab_size=VOCABULARY,
        )
    ),
}  # fmt: skip
"""Families and variants that only `test_more_families.py` uses, in fewer combinations."""


def build(family: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """Return a tiny model of a family, ready to generate; skip a test of one that is missing."""
    torch.manual_seed(seed)
    try:
        model = (FAMILIES | STREAMS | SPEECH | MORE)[family]()
    except AttributeError as error:
        if error.obj is not tf:
            raise
        pytest.skip(f"transformers {tf.__version__} has no {error.name}")
    return model.to(dtype).eval()


def seeing() -> Any:
    """Return a LLaVA: a model with a spec that also takes images, of four tokens each."""
    text = {"vocab_size": 96, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    return tf.LlavaForConditionalGeneration(
        tf.LlavaConfig(
            vision_config=tf.CLIPVisionConfig(**vision, image_size=8, patch_size=4),
            text_config=tf.LlamaConfig(
                **text, num_attention_heads=2, pad_token_id=0, eos_token_id=2, bos_token_id=1
            ),
            image_token_index=95,
        )
    ).eval()


def misplaced(family: str, row: int) -> ModelSpec:
    """Return a family's spec with another row of position 0, so that its steps compute wrongly."""
    decoder = SPECS[family].decoder
    positions = replace(decoder.positions, first_row=lambda _: row)
    return replace(SPECS[family], decoder=replace(decoder, positions=positions))


def unproven(dtype: torch.dtype = torch.float32) -> Any:
    """Return a tiny model of a family without a spec."""
    torch.manual_seed(0)
    return tf.ArceeForCausalLM(tf.ArceeConfig(**_DECODER)).to(dtype).eval()


def alone(model: Any) -> Any:
    """Make a model compute all attention itself, as a modified forward may do, and return it."""
    kind = type(model)

    class Alone(kind):
        @functools.wraps(kind.forward)
        # No attention function of fastgen's applies, whatever transformers looks up.
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            with in_step(None):
                return super().forward(*args, **kwargs)

    model.__class__ = Alone
    return model


def batch(
    model: Any, sentences: int, length: int, padding: str = "natural", seed: int = 0
) -> dict[str, torch.Tensor]:
    """Return input_ids and attention_mask of sentences of different lengths.

    Args:
        model: the model, whose kind decides about natural padding.
        sentences: B.
        length: S.
        padding: "none", "left", "right", or "natural": right for an encoder, left for a decoder.
        seed: seed of the tokens and lengths.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, VOCABULARY, (sentences, length), generator=generator)
    mask = torch.ones_like(ids)
    if padding == "natural":
        padding = "right" if model.config.is_encoder_decoder else "left"
    if padding != "none":
        for row in range(sentences - 1):
            cut = int(torch.randint(0, length, (1,), generator=generator))
            mask[row, slice(0, cut) if padding == "left" else slice(length - cut, length)] = 0
        mask[:, length - 1 if padding == "left" else 0] = 1
        ids[mask == 0] = PAD
    return {"input_ids": ids, "attention_mask": mask}


_ENCODER: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 40, "initializer_range": 0.5,
    "num_labels": 5, "pad_token_id": PAD,
}  # fmt: skip
_DISTILBERT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24,
    "max_position_embeddings": 40, "initializer_range": 0.5, "num_labels": 5, "pad_token_id": PAD,
}  # fmt: skip
ENCODERS = ("Bert", "Camembert", "DistilBert", "Electra", "Roberta", "XLMRoberta")


def encoder(
    family: str, head: str = "Model", dtype: torch.dtype = torch.float64, **more: Any
) -> Any:
    """Return a tiny encoder of a family of `ENCODERS`.

    `head` is "Model", "ForTokenClassification" and the like.
    """
    options = _DISTILBERT if family == "DistilBert" else _ENCODER
    torch.manual_seed(0)
    return (
        getattr(tf, family + head)(getattr(tf, f"{family}Config")(**options | more))
        .to(dtype)
        .eval()
    )
