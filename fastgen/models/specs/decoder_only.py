"""Specs of decoder-only models of transformers."""

import math
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastgen.models.specs.encoder_decoder import BART_DECODER, offset_of
from fastgen.models.specs.model_spec import (
    Attention,
    Embedding,
    Experts,
    Head,
    Latent,
    Mlp,
    ModelSpec,
    Positions,
    Rotary,
    Stack,
)


def _gptj_scale(attention: Any) -> float:
    """Return the score scale; before transformers 5.24 the attribute holds a divisor."""
    return (
        float(attention.scaling)
        if hasattr(attention, "scaling")
        else 1 / float(attention.scale_attn)
    )


def _bloom_alibi(decoder: Any, length: int) -> Tensor:
    """Return (H, L) by position, rounded as in BLOOM and Falcon."""
    mask = torch.ones(1, length, dtype=torch.int64, device=decoder.word_embeddings.weight.device)
    make = vars(sys.modules[type(decoder).__module__])["build_alibi_tensor"]
    return make(mask, decoder.num_heads, decoder.word_embeddings.weight.dtype)[:, 0]


def _falcon_alibi(decoder: Any, length: int) -> Tensor:
    """Return (H, L) by position; Falcon scales the sum of score and bias."""
    return _bloom_alibi(decoder, length) / math.sqrt(decoder.embed_dim // decoder.num_heads)


def _mpt_alibi(decoder: Any, length: int) -> Tensor:
    """Return (H, L) by distance, in the dtype of the token embedding."""
    weight = decoder.wte.weight
    alibi = decoder.build_mpt_alibi_tensor(decoder.num_heads, length, device=weight.device)
    return alibi[:, 0].flip(1).to(weight.dtype)


def _falcon_groups(attention: Any) -> int:
    if attention.new_decoder_architecture:
        return attention.num_kv_heads
    return 1 if attention.multi_query else attention.num_heads


def _falcon_variant(spec: ModelSpec, config: Any) -> ModelSpec:
    """Return the spec of one of Falcon's forms.

    Attention runs in parallel with the feed-forward layer, with one norm or two, or precedes it.
    """
    decoder = spec.decoder
    if config.alibi:
        decoder = replace(decoder, positions=Positions(alibi=_falcon_alibi, alibi_by_key=True))
    if config.new_decoder_architecture and config.num_ln_in_parallel_attn == 2:
        decoder = replace(
            decoder,
            self_attention=replace(decoder.self_attention, norm="ln_attn"),
            mlp=replace(decoder.mlp, norm="ln_mlp"),
            parallel=True,
        )
    elif config.new_decoder_architecture or config.parallel_attn:
        decoder = _parallel(decoder)
    return replace(spec, decoder=decoder)


def _best_of_groups(router: Any) -> tuple[int, int]:
    greedy = router.topk_method == "greedy"
    return (1, 1) if greedy else (router.num_group, router.topk_group)


def _stablelm_variant(spec: ModelSpec, config: Any) -> ModelSpec:
    return replace(spec, decoder=_parallel(spec.decoder)) if config.use_parallel_residual else spec


def _bigcode_groups(attention: Any) -> int:
    return 1 if attention.multi_query else attention.num_heads


def _rotated(decoder: Stack, **rotary: Any) -> Stack:
    """Return a decoder with another rotary embedding, given as the fields of `Rotary`."""
    attention = replace(decoder.self_attention, rotary=Rotary(**rotary))
    return replace(decoder, self_attention=attention)


def _parallel(decoder: Stack) -> Stack:
    """Return a decoder whose sublayers run in parallel, with one norm in each layer."""
    mlp = replace(decoder.mlp, norm=decoder.self_attention.norm)
    return replace(decoder, mlp=mlp, parallel=True)


_LLAMA_MLP = Mlp(
    up="mlp.up_proj", gate="mlp.gate_proj", down="mlp.down_proj", activation="mlp.act_fn",
    norm="post_attention_layernorm",
)  # fmt: skip
_LLAMA_ATTENTION = Attention("self_attn", "input_layernorm", out="o_proj")
_LLAMA = Stack("model", _LLAMA_ATTENTION, _LLAMA_MLP, final_norm="norm")

_UNGATED = Mlp("mlp.up_proj", "mlp.down_proj", "mlp.act_fn", _LLAMA_MLP.norm)

_FUSED_GATE = replace(
    _LLAMA_MLP, up="mlp.gate_up_proj", gate="mlp.gate_up_proj", activation="mlp.activation_fn"
)

_GEMMA2 = replace(
    _LLAMA,
    self_attention=replace(
        _LLAMA_ATTENTION, post_norm="post_attention_layernorm", softcap="attn_logit_softcapping"
    ),
    mlp=replace(
        _LLAMA_MLP, norm="pre_feedforward_layernorm", post_norm="post_feedforward_layernorm"
    ),
)
_OLMO2 = replace(
    _LLAMA,
    self_attention=replace(
        _LLAMA_ATTENTION, norm="", post_norm="post_attention_layernorm", norms_all_heads=True
    ),
    mlp=replace(_LLAMA_MLP, norm="", post_norm="post_feedforward_layernorm"),
)
_COHERE = _parallel(_rotated(_LLAMA, interleaved=True, fp32=True))
_COHERE_HEAD = Head(scale=lambda model: model.logit_scale)

_GLM = _rotated(replace(_LLAMA, mlp=_FUSED_GATE), interleaved=True, halves=True)

_GEMMA2_HEAD = Head(softcap=lambda model: model.config.final_logit_softcapping)

_MOE = replace(_LLAMA, experts=Experts())
_SOFTMAX = Experts(normalised=lambda router: router.norm_topk_prob)
_SHARED = tuple(f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down"))
_SIGMOID = Experts(
    normalised=lambda _: True, rounded=False, sigmoid=True,
    correction="mlp.e_score_correction_bias",
)  # fmt: skip
_GROUPED = replace(
    _SIGMOID, normalised=lambda router: router.norm_topk_prob, precise=True,
    correction="mlp.gate.e_score_correction_bias",
    groups=lambda router: (router.num_group, router.topk_group),
    factor="routed_scaling_factor", shared=_SHARED,
)  # fmt: skip
_OLMOE = replace(_MOE, self_attention=replace(_LLAMA_ATTENTION, norms_all_heads=True))

_LATENT = replace(
    _MOE,
    experts=_GROUPED,
    self_attention=Attention("self_attn", "input_layernorm", out="o_proj", latent=Latent()),
)

_GPT2 = Stack(
    "transformer",
    self_attention=Attention("attn", "ln_1", ("c_attn",), "c_proj"),
    mlp=Mlp("mlp.c_fc", "mlp.c_proj", "mlp.act", "ln_2"),
    layers="h",
    embedding=Embedding("wte"),
    positions=Positions("wpe"),
    final_norm="ln_f",
)

_GPTJ = Stack(
    "transformer",
    self_attention=Attention(
        "attn", "ln_1", scale=_gptj_scale, rotary=Rotary(interleaved=True, table="embed_positions")
    ),
    mlp=Mlp("mlp.fc_in", "mlp.fc_out", "mlp.act", "ln_1"),
    layers="h",
    embedding=Embedding("wte"),
    final_norm="ln_f",
    parallel=True,
)

_BLOOM = Stack(
    "transformer",
    self_attention=Attention(
        "self_attention", "input_layernorm", ("query_key_value",), "dense",
        scale=lambda module: module.inv_norm_factor, qkv_groups=lambda module: module.num_heads,
    ),
    mlp=Mlp(
        "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", "mlp.gelu_impl", "post_attention_layernorm"
    ),
    layers="h",
    embedding=Embedding("word_embeddings", norm="word_embeddings_layernorm"),
    positions=Positions(alibi=_bloom_alibi, alibi_by_key=True),
    final_norm="ln_f",
    unsupported=("apply_residual_connection_post_layernorm",),
)  # fmt: skip

DECODER_ONLY = {
    "gpt2": ModelSpec(_GPT2),
    "opt": ModelSpec(
        replace(
            BART_DECODER, cross_attention=None, positions=Positions(first_row=offset_of),
            final_norm="final_layer_norm", pre_norm="do_layer_norm_before",
        )
    ),
    **dict.fromkeys(
        ("cwm", "gemma", "llama", "ministral", "mistral", "qwen2", "qwen3", "seed_oss"),
        ModelSpec(_LLAMA),
    ),
    "gpt_neox": ModelSpec(
        Stack(
            "gpt_neox",
            self_attention=Attention(
                "attention", "input_layernorm", ("query_key_value",), "dense", head_dim="head_size",
                qkv_groups=lambda module: module.config.num_attention_heads,
            ),
            mlp=Mlp(
                "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", "mlp.act", "post_attention_layernorm"
            ),
            embedding=Embedding("embed_in"),
            final_norm="final_layer_norm",
            parallel="use_parallel_residual",
        )
    ),
    "phi": ModelSpec(
        _parallel(
            replace(
                _LLAMA, self_attention=replace(_LLAMA_ATTENTION, out="dense"),
                mlp=Mlp("mlp.fc1", "mlp.fc2", "mlp.activation_fn", ""),
                final_norm="final_layernorm",
            )
        )
    ),
    "gemma2": ModelSpec(_GEMMA2, head=_GEMMA2_HEAD),
    "gemma3_text": ModelSpec(
        _rotated(
            replace(_GEMMA2, self_attention=replace(_GEMMA2.self_attention, softcap=None)),
            kind="layer_type",
        ),
        head=_GEMMA2_HEAD,
    ),
    "phi3": ModelSpec(
        replace(
            _LLAMA, self_attention=replace(_LLAMA_ATTENTION, qkv=("qkv_proj",)),
            mlp=_FUSED_GATE,
        ),
        prepares_inputs=True,
    ),
    "bloom": ModelSpec(_BLOOM, attention_interface=False, prepares_inputs=True),
    "falcon": ModelSpec(
        replace(
            _BLOOM,
            self_attention=replace(
                _BLOOM.self_attention, qkv_groups=_falcon_groups,
                repeats_kv="new_decoder_architecture",
            ),
            mlp=replace(_BLOOM.mlp, activation="mlp.act"), embedding=Embedding("word_embeddings"),
            positions=Positions(), unsupported=(),
        ),
        attention_interface=False, variant=_falcon_variant,
    ),
    "gptj": ModelSpec(_GPTJ, attention_interface=False),
    "codegen": ModelSpec(
        replace(
            _GPTJ,
            self_attention=replace(
                _GPTJ.self_attention, qkv=("qkv_proj",), qkv_groups=lambda _: 4, values_first=True
            ),
        ),
        attention_interface=False,
    ),
    "gpt_neo": ModelSpec(
        replace(
            _GPT2, self_attention=Attention("attn.attention", "ln_1", causal_mask="bias")
        ),
        attention_interface=False,
    ),
    "mpt": ModelSpec(
        Stack(
            "transformer",
            self_attention=Attention(
                "attn", "norm_1", ("Wqkv",), scale=lambda module: module.softmax_scale
            ),
            mlp=Mlp("ffn.up_proj", "ffn.down_proj", "ffn.act", "norm_2"),
            layers="blocks",
            embedding=Embedding("wte"),
            positions=Positions(count="max_seq_len", alibi=_mpt_alibi),
            final_norm="norm_f",
            unsupported=("attn.clip_qkv",),
        ),
        attention_interface=False,
    ),
    "starcoder2": ModelSpec(
        replace(_LLAMA, mlp=Mlp("mlp.c_fc", "mlp.c_proj", "mlp.act", _LLAMA_MLP.norm))
    ),
    "stablelm": ModelSpec(_LLAMA, variant=_stablelm_variant),
    "granite": ModelSpec(
        replace(
            _LLAMA, embedding=Embedding(scale="embedding_multiplier"),
            residual_multiplier="residual_multiplier",
        ),
        head=Head(scale=lambda model: 1 / model.config.logits_scaling),
    ),
    "cohere": ModelSpec(_COHERE, head=_COHERE_HEAD),
    "cohere2": ModelSpec(
        _rotated(
            _COHERE, interleaved=True, fp32=True,
            applies=lambda module: module.sliding_window is not None,
        ),
        head=_COHERE_HEAD,
    ),
    "ernie4_5": ModelSpec(_rotated(_LLAMA, interleaved=True, halves=True, fp32=True)),
    "exaone4": ModelSpec(
        _rotated(
            replace(
                _OLMO2, self_attention=replace(_OLMO2.self_attention, norms_all_heads=False)
            ),
            applies=lambda module: module.sliding_window is None or module.is_sliding,
        )
    ),
    "glm": ModelSpec(_GLM),
    "glm4": ModelSpec(
        replace(
            _GLM,
            self_attention=replace(_GLM.self_attention, post_norm="post_self_attn_layernorm"),
            mlp=replace(_GLM.mlp, post_norm="post_mlp_layernorm"),
        )
    ),
    "helium": ModelSpec(_rotated(_LLAMA, interleaved=True, halves=True)),
    "hunyuan_v1_dense": ModelSpec(
        replace(
            _LLAMA,
            self_attention=replace(
                _LLAMA_ATTENTION, qk_norm=("query_layernorm", "key_layernorm"), norms_rotated=True
            ),
        )
    ),
    "olmo": ModelSpec(replace(_LLAMA, unsupported=("self_attn.config.clip_qkv",))),
    "olmo2": ModelSpec(_OLMO2),
    "olmo3": ModelSpec(_rotated(_OLMO2, kind="attention_type")),
    "smollm3": ModelSpec(_rotated(_LLAMA, applies=lambda module: module.use_rope)),
    "biogpt": ModelSpec(
        replace(
            BART_DECODER, path="biogpt", cross_attention=None,
            positions=Positions(first_row=offset_of),
        ),
        head=Head("output_projection"),
    ),
    "gpt_bigcode": ModelSpec(
        replace(
            _GPT2, self_attention=replace(_GPT2.self_attention, qkv_groups=_bigcode_groups)
        )
    ),
    "deepseek_v2": ModelSpec(
        _rotated(
            replace(
                _LATENT,
                self_attention=replace(
                    _LATENT.self_attention, latent=Latent(pairs_apart=lambda _: False)
                ),
                experts=Experts(
                    normalised=lambda _: False, rounded=False, precise=True,
                    groups=_best_of_groups, group_scores=1, factor="routed_scaling_factor",
                    shared=_SHARED,
                ),
            ),
            interleaved=True, complex=True, fp32=True,
        ),
        attention_interface=False,
    ),
    **dict.fromkeys(
        ("deepseek_v3", "glm4_moe_lite", "sarvam_mla", "youtu"),
        ModelSpec(_LATENT, attention_interface=False),
    ),
    "axk1": ModelSpec(
        replace(_LATENT, experts=replace(_GROUPED, norm="mlp.post_mlp_layernorm")),
        attention_interface=False,
    ),
    "minicpm3": ModelSpec(
        replace(
            _LATENT, experts=None, residual_multiplier="residual_scale",
            self_attention=replace(
                _LATENT.self_attention, latent=Latent(pairs_apart=lambda _: False)
            ),
        ),
        head=Head(scale=lambda model: 1 / model.config.logits_scaling), attention_interface=False,
    ),
    **dict.fromkeys(
        ("dots1", "glm4_moe", "solar_open"), ModelSpec(replace(_MOE, experts=_GROUPED)),
    ),
    "hy_v3": ModelSpec(
        replace(
            _MOE,
            experts=replace(
                _SIGMOID, precise=True, factor="router_scaling_factor", shared=_SHARED
            ),
        )
    ),
    "ernie4_5_moe": ModelSpec(
        _rotated(
            replace(
                _MOE,
                experts=Experts(
                    # The sum is at least `norm_min`, which no sum of scores is below.
                    normalised=lambda router: True if router.norm_min <= 1e-6 else None,
                    precise=True, shared=_SHARED,
                    correction="mlp.gate.moe_statics.e_score_correction_bias",
                ),
            ),
            interleaved=True, halves=True, fp32=True,
        )
    ),
    "exaone_moe": ModelSpec(
        _rotated(
            replace(_MOE, experts=_GROUPED),
            applies=lambda module: module.sliding_window is None or module.is_sliding,
        )
    ),
    "flex_olmo": ModelSpec(replace(_OLMO2, experts=_SOFTMAX)),
    "gpt_oss": ModelSpec(
        _rotated(
            replace(_MOE, experts=Experts(router="mlp.router", normalised=lambda _: True)),
            once=True,
        )
    ),
    "granitemoe": ModelSpec(
        replace(
            _MOE,
            experts=Experts(
                "block_sparse_moe", "block_sparse_moe.router", experts="block_sparse_moe.experts",
                normalised=lambda _: True,
            ),
            embedding=Embedding(scale="embedding_multiplier"),
            residual_multiplier="residual_multiplier",
        ),
        head=Head(scale=lambda model: 1 / model.config.logits_scaling),
    ),
    "hunyuan_v1_moe": ModelSpec(
        replace(
            _MOE,
            self_attention=replace(
                _LLAMA_ATTENTION, qk_norm=("query_layernorm", "key_layernorm"), norms_rotated=True
            ),
            experts=Experts(
                logits="wg", normalised=lambda _: True,
                shared=tuple(f"mlp.shared_mlp.{name}_proj" for name in ("gate", "up", "down")),
            ),
        )
    ),
    "minimax_m2": ModelSpec(replace(_OLMOE, experts=_SIGMOID)),
    "mixtral": ModelSpec(
        replace(_MOE, experts=Experts(normalised=lambda _: True, rounded=False))
    ),
    "olmoe": ModelSpec(
        replace(_OLMOE, experts=_SOFTMAX, unsupported=("self_attn.config.clip_qkv",))
    ),
    "phimoe": ModelSpec(
        replace(
            _MOE,
            experts=Experts(
                router="mlp.router", margin=lambda router: 2 * router.router_jitter_noise,
                # Its routers choose two experts.
                normalised=lambda router: False if router.top_k == 2 else None,
            ),
        ),
        prepares_inputs=True,
    ),
    "qwen2_moe": ModelSpec(
        replace(
            _MOE,
            experts=replace(
                _SOFTMAX,
                shared=tuple(f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")),
                shared_gate="mlp.shared_expert_gate",
            ),
        )
    ),
    "qwen3_moe": ModelSpec(replace(_MOE, experts=_SOFTMAX)),
    **dict.fromkeys(("jais2", "nemotron"), ModelSpec(replace(_LLAMA, mlp=_UNGATED))),
    "persimmon": ModelSpec(
        replace(
            _LLAMA,
            self_attention=replace(
                _LLAMA_ATTENTION, qkv=("query_key_value",), out="dense",
                qkv_groups=lambda module: module.num_heads,
                qk_norm=("q_layernorm", "k_layernorm"),
            ),
            mlp=Mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", "mlp.act", _LLAMA_MLP.norm),
            final_norm="final_layernorm",
        )
    ),
    "xglm": ModelSpec(
        replace(
            BART_DECODER, path="model", cross_attention=None,
            positions=Positions(first_row=offset_of),
        ),
        attention_interface=False,
    ),
}  # fmt: skip
