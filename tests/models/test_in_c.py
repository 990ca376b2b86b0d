"""All sublayers of a decode step in one C call: equal to single operations and to transformers."""

import contextlib
import copy
import ctypes
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward

import fastgen
from fastgen import config as settings
from fastgen.decoding import loop
from fastgen.decoding.backends import native_multistep
from fastgen.models.layers import packed_weights
from fastgen.models.memory import budget
from fastgen.models.runtime.native.step import NativeStep
from fastgen.models.specs.registry import SPECS
from fastgen.ops import native
from fastgen.ops.counts import calls
from fastgen.ops.native import step as c
from fastgen.patches.transformers.generate.report import last_call
from fastgen.patches.transformers.introspection import noise
from fastgen.patches.transformers.planning import sharing
from tests.ops.test_native import own_variant as variant  # noqa: F401  a fixture
from tests.support import zoo
from tests.support.parity import assert_same

_TOKENS = {
    "pad_token_id": zoo.PAD,
    "bos_token_id": 1,
    "eos_token_id": zoo.EOS,
    "vocab_size": zoo.VOCABULARY,
}
OWN: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: tf.GPT2LMHeadModel(
        tf.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=256, **_TOKENS),
    ),
    "opt": lambda: tf.OPTForCausalLM(
        tf.OPTConfig(hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=2,
        word_embed_proj_dim=32,
                     init_std=0.3, **_TOKENS)
    ),
    "bloom": lambda: tf.BloomForCausalLM(
        tf.BloomConfig(hidden_size=48, n_layer=2, n_head=3, initializer_range=0.3, **_TOKENS)
    ),
    "gpt_neo": lambda: tf.GPTNeoForCausalLM(
        tf.GPTNeoConfig(
            hidden_size=32, num_layers=2, num_heads=2, window_size=8, initializer_range=0.3,
            attention_types=[[["global", "local"], 1]], max_position_embeddings=128, **_TOKENS,
        )
    ),
    "mpt": lambda: tf.MptForCausalLM(
        tf.MptConfig(
            d_model=48, n_heads=3, n_layers=2, max_seq_len=64, initializer_range=0.3,
            use_cache=True, **_TOKENS,
        )
    ),
    "xglm": lambda: tf.XGLMForCausalLM(
        tf.XGLMConfig(
            d_model=32, ffn_dim=48, num_layers=2, attention_heads=2, init_std=0.3,
            max_position_embeddings=128, decoder_start_token_id=zoo.START, **_TOKENS,
        )
    ),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**zoo._DECODER, sliding_window=64)),
    "phi3": lambda: tf.Phi3ForCausalLM(
        tf.Phi3Config(**zoo._without("head_dim", "intermediate_size"), intermediate_size=64)
    ),
    "glm": lambda: tf.GlmForCausalLM(tf.GlmConfig(**zoo._DECODER | {"intermediate_size": 64})),
    "glm4": lambda: tf.Glm4ForCausalLM(tf.Glm4Config(**zoo._DECODER | {"intermediate_size": 64})),
    "helium": lambda: tf.HeliumForCausalLM(
        tf.HeliumConfig(**zoo._DECODER | {"head_dim": 16, "num_attention_heads": 4})
    ),
    # Experts whose weights fill whole panels.
    "gpt_oss": lambda: zoo.with_sinks(
        tf.GptOssForCausalLM(
            tf.GptOssConfig(**_FILLED | {"intermediate_size": 32}, sliding_window=8)
        )
    ),
    "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**_FILLED)),
    "olmoe": lambda: tf.OlmoeForCausalLM(
        tf.OlmoeConfig(**{name: value for name, value in _FILLED.items() if name != "head_dim"})
    ),
    "qwen2_moe": lambda: tf.Qwen2MoeForCausalLM(
        tf.Qwen2MoeConfig(**_FILLED, norm_topk_prob=False, shared_expert_intermediate_size=40)
    ),
    "qwen3_moe": lambda: tf.Qwen3MoeForCausalLM(
        tf.Qwen3MoeConfig(**_FILLED, norm_topk_prob=True, mlp_only_layers=[0])
    ),
}  # fmt: skip
_FILLED = zoo._EXPERTS | {
    "hidden_size": 64, "head_dim": 16, "intermediate_size": 128, "moe_intermediate_size": 128,
    "num_experts": 5, "num_local_experts": 5, "initializer_range": 0.3,
}  # fmt: skip
_GROUPED = (
    {**_FILLED, "num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6}
    | {
        name: zoo._GROUPED[name]
        for name in ("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace")
    }
    | {"routed_scaling_factor": 1.5, "norm_topk_prob": False}
)
_SPARSE = {"mlp_layer_types": ["dense", "sparse"]}
OWN |= {
    "dots1": lambda: zoo.with_sinks(tf.Dots1ForCausalLM(tf.Dots1Config(**_GROUPED))),
    "ernie4_5_moe": lambda: zoo.with_sinks(
        tf.Ernie4_5_MoeForCausalLM(
            tf.Ernie4_5_MoeConfig(
                **{k: v for k, v in _FILLED.items() if k[:11] != "num_experts"}, moe_k=2,
                moe_num_experts=5, moe_num_shared_experts=1, moe_layer_start_index=1,
            )
        )
    ),
    "exaone_moe": lambda: zoo.with_sinks(
        tf.ExaoneMoeForCausalLM(
            tf.ExaoneMoeConfig(
                **_GROUPED, **_SPARSE, num_shared_experts=1, sliding_window=64,
                layer_types=["full_attention", "sliding_attention"],
            )
        )
    ),
    "glm4_moe": lambda: zoo.with_sinks(
        tf.Glm4MoeForCausalLM(
            tf.Glm4MoeConfig(**_GROUPED | {"norm_topk_prob": True}, use_qk_norm=True)
        )
    ),
    "hy_v3": lambda: zoo.with_sinks(tf.HYV3ForCausalLM(tf.HYV3Config(**_GROUPED, **_SPARSE))),
    "minimax_m2": lambda: zoo.with_sinks(tf.MiniMaxM2ForCausalLM(tf.MiniMaxM2Config(**_FILLED))),
    "solar_open": lambda: zoo.with_sinks(tf.SolarOpenForCausalLM(tf.SolarOpenConfig(**_GROUPED))),
    "flex_olmo": lambda: tf.FlexOlmoForCausalLM(tf.FlexOlmoConfig(**_FILLED)),
    "granitemoe": lambda: tf.GraniteMoeForCausalLM(
        tf.GraniteMoeConfig(
            **_FILLED, embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.6,
            logits_scaling=2.0,
        )
    ),
    "hunyuan_v1_moe": lambda: tf.HunYuanMoEV1ForCausalLM(
        tf.HunYuanMoEV1Config(
            **{k: v for k, v in _FILLED.items() if k != "num_experts_per_tok"}, moe_topk=2
        )
    ),
    # Logits so close that a weight is shared by several.
    "phimoe": lambda: tf.PhimoeForCausalLM(
        tf.PhimoeConfig(**_FILLED, lm_head_bias=True, router_jitter_noise=0.4)
    ),
}  # fmt: skip
# Latent attention whose heads fill whole panels.
_LATENT = {k: v for k, v in _GROUPED.items() if k != "head_dim"} | {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 64, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 10, "v_head_dim": 64,
}  # fmt: skip
_LATENTS: dict[str, Callable[[], Any]] = {
    "axk1": lambda: tf.AXK1ForCausalLM(tf.AXK1Config(**_LATENT | _SPARSE)),
    "deepseek_v2": lambda: tf.DeepseekV2ForCausalLM(
        tf.DeepseekV2Config(**_LATENT, topk_method="group_limited_greedy")
    ),
    "deepseek_v2-greedy": lambda: tf.DeepseekV2ForCausalLM(
        tf.DeepseekV2Config(**_LATENT, topk_method="greedy")
    ),
    "deepseek_v3": lambda: tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(**_LATENT)),
    "deepseek_v3-plain": lambda: tf.DeepseekV3ForCausalLM(
        # Latent vectors, and the rotated part, in several pieces.
        tf.DeepseekV3Config(
            **_LATENT | {"q_lora_rank": None, "kv_lora_rank": 192, "qk_rope_head_dim": 112},
            rope_interleave=False,
        )
    ),
    "glm4_moe_lite": lambda: tf.Glm4MoeLiteForCausalLM(
        tf.Glm4MoeLiteConfig(**_LATENT | {"norm_topk_prob": True} | _SPARSE)
    ),
    "minicpm3": lambda: tf.MiniCPM3ForCausalLM(
        tf.MiniCPM3Config(**_LATENT, scale_emb=3.0, scale_depth=0.8, dim_model_base=16)
    ),
    "sarvam_mla": lambda: tf.DeepseekV3ForCausalLM(tf.SarvamMLAConfig(**_LATENT)),
    "youtu": lambda: tf.YoutuForCausalLM(tf.YoutuConfig(**_LATENT)),
}
OWN |= {name: lambda make=make: zoo.with_sinks(make()) for name, make in _LATENTS.items()}
EXPERTS = (
    "deepseek_v2", "deepseek_v3", "dots1", "exaone_moe", "flex_olmo", "glm4_moe", "gpt_oss",
    "granitemoe", "hunyuan_v1_moe", "hy_v3", "minimax_m2", "mixtral", "olmoe", "phimoe",
    "qwen2_moe", "qwen3_moe", "solar_open",
)  # fmt: skip
NOT_WRITTEN = {
    "cohere-norms",  # norms of queries and keys with weights of their own for each head
    "unilm",  # a mask token after each newest one
}
FAMILIES = sorted(
    {
        "cohere-norms",
        "falcon-40b",
        "falcon-11b",
        "falcon-rw",
        "gpt_bigcode-heads",
        "stablelm-parallel",
    }
    | set(SPECS) & set(zoo.FAMILIES | zoo.MORE)
)
METHODS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 4, "eos_token_id": [2, 7, 9, 30], "no_repeat_ngram_size": 2},
    "samples": {"do_sample": True, "num_return_sequences": 3},
}


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    widen(monkeypatch)
    calls.clear()
    yield
    packed_weights.release()


def widen(patch: pytest.MonkeyPatch) -> None:
    """Widen heads to 16 dimensions, the least for attention in C; pack weights at first use."""
    for sizes, values in (
        (zoo._ENCODER_DECODER, {"d_model": 32, "decoder_ffn_dim": 72, "init_std": 0.5}),
        (zoo._T5, {"d_kv": 16}),
        (
            zoo._DECODER,
            {"hidden_size": 64, "head_dim": 16, "intermediate_size": 40, "initializer_range": 0.3},
        ),
        (zoo._GPTJ, {"n_embd": 64}),
        (zoo._FALCON, {"hidden_size": 64}),
        (zoo._GPT_BIGCODE, {"n_embd": 32, "initializer_range": 0.5}),
    ):
        for name, value in values.items():
            patch.setitem(sizes, name, value)
    for family, make in OWN.items():
        patch.setitem(zoo.MORE if family in zoo.MORE else zoo.FAMILIES, family, make)
    patch.setattr(packed_weights.Packed, "uses_to_pack", 1)
    patch.setattr(native, "most_rows", lambda _: math.inf)  # whatever this processor has


def _steps() -> int:
    return calls["decoder_step", "native"]


def assert_changes_count(
    model: Any, kwargs: dict[str, Any], changes: Iterable[Callable[[], object]]
) -> None:
    """Assert that steps in C follow every change of a model, and that it changes the output."""
    assert assert_same(model, kwargs).error is None
    for change in changes:
        before = model.generate(**kwargs)
        with torch.no_grad():
            change()
        calls.clear()
        assert assert_same(model, kwargs).error is None
        assert calls["search", "native"] > 0
        assert not torch.equal(before, model.generate(**kwargs)), "the change has no effect"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_family(variant: str, family: str, method: str) -> None:  # noqa: F811
    model = zoo.build(family, torch.float32)
    for padding in ("none", "natural"):
        kwargs = zoo.batch(model, 4, 9, padding) | METHODS[method] | {"max_new_tokens": 14}
        for _ in range(2):
            assert assert_same(model, kwargs).error is None
    call = last_call()
    assert call is not None
    assert (_steps() > 0) == (call.plan.fused and family not in NOT_WRITTEN)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("length", [5, 11])
def test_sliding_windows(
    length: int,
    method: str,
    variant: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """C reads the keys in the window; a single row that would keep too much is left alone."""
    model = zoo.build("gpt_oss", torch.float32)  # one of two layers has a window of 8
    kwargs = zoo.batch(model, 4, length) | METHODS[method] | {"max_new_tokens": 20}
    for _ in range(2):
        assert assert_same(model, kwargs).error is None
        call = last_call()
        assert call is not None
        assert call.plan.fused
        assert not call.plan.not_in_c
    assert _steps() + calls["search", "native"] > 0
    monkeypatch.setattr(sharing, "MOST_KEPT", 1)
    assert assert_same(model, kwargs).error is None
    call = last_call()
    assert call is not None
    assert call.plan.shared == (method != "greedy")


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    "family",
    [
        "marian", "t5", "llama", "qwen3", "phi", "gpt2", "mistral", "opt", "bloom", "codegen",
        "cohere", "falcon-40b", "gemma2", "gemma3_text", "glm4", "granite", "hunyuan_v1_dense",
        "nemotron", "olmo", "olmo2", "persimmon", *EXPERTS,
    ],
)  # fmt: skip
def test_logits(variant: str, family: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """The logits of every step equal those of single operations, for any number of threads."""
    model = zoo.build(family, torch.float32)
    options = {
        "output_logits": True,
        "return_dict_in_generate": True,
        "max_new_tokens": 20,
        "min_new_tokens": 20,
    }
    kwargs = zoo.batch(model, 7, 9) | {"num_beams": 4} | options
    model.generate(**kwargs)
    with monkeypatch.context() as patch:
        patch.setattr(native, "threads_for", lambda work: threads)
        calls.clear()
        found = model.generate(**kwargs)
        assert _steps() >= 19
    with monkeypatch.context() as patch:
        patch.setattr(NativeStep, "__call__", lambda *_: None)
        calls.clear()
        wanted = model.generate(**kwargs)
        assert _steps() == 0
    assert torch.equal(found.sequences, wanted.sequences)
    for one, other in zip(found.logits, wanted.logits, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


LORA = ["llama", "gpt2", "marian", "t5", "bart", "phi3"]


def _lora(family: str, dtype: torch.dtype = torch.float32, rank: int = 3, seed: int = 0) -> Any:
    """Return a model with an adapter on all linear layers but the head, and two others.

    The adapter "other" has another rank, "few" is on fewer layers.
    """
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    options: dict[str, Any] = {
        "target_modules": "all-linear", "init_lora_weights": False, "lora_dropout": 0.1,
        "lora_alpha": 1,
    }  # fmt: skip
    if family == "gpt2":
        options |= {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}
    config, model = peft.LoraConfig(r=rank, **options), zoo.build(family, torch.float32, seed)
    if family == "phi3":  # halves of its gate fill panels
        sizes = zoo._without("head_dim", "intermediate_size")
        model = tf.Phi3ForCausalLM(tf.Phi3Config(**sizes, intermediate_size=64))
    model = peft.get_peft_model(model, config)
    model.add_adapter("other", peft.LoraConfig(r=rank + 2, **options))
    few = {"target_modules": ["q_proj", "fc1", "down_proj", "c_fc", "q", "wo", "gate_up_proj"]}
    model.add_adapter("few", peft.LoraConfig(r=rank, **options | few))
    return model.to(dtype).eval()


@pytest.mark.parametrize("rank", [1, 20])
@pytest.mark.parametrize("adapters", [["default"], ["few", "default", "other"]], ids=len)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("family", LORA)
def test_logits_with_lora(
    variant: str,  # noqa: F811
    family: str,
    threads: int,
    adapters: list[str],
    rank: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Single operations, and PEFT's own modules, have the same logits."""
    model = _lora(family, rank=rank)
    model.base_model.set_adapter(adapters)
    options = {"output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 12}
    kwargs = zoo.batch(model.get_base_model(), 7, 9) | options | {"min_new_tokens": 12}
    monkeypatch.setattr(native, "threads_for", lambda work: threads)
    for beams in (1, 4):
        model.generate(**kwargs, num_beams=beams)
        calls.clear()
        found = model.generate(**kwargs, num_beams=beams)
        assert _steps() >= 11
        with monkeypatch.context() as patch:
            patch.setattr(NativeStep, "__call__", lambda *_: None)
            wanted = model.generate(**kwargs, num_beams=beams)
        with fastgen.disabled():
            own = model.generate(**kwargs, num_beams=beams)
        assert torch.equal(found.sequences, wanted.sequences)
        assert torch.equal(found.sequences, own.sequences)
        for one, other in zip(found.logits, wanted.logits, strict=True):
            torch.testing.assert_close(one, other, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", LORA)
def test_lora_may_change_between_calls(family: str, method: str) -> None:
    """An adapter is switched, scaled, written to, disabled and merged; each takes effect in C."""
    model = _lora(family)
    kwargs = zoo.batch(model.get_base_model(), 4, 9) | METHODS[method] | {"max_new_tokens": 8}
    layers = [module for module in model.modules() if hasattr(module, "lora_A")]
    changes: list[Callable[[], object]] = [
        lambda: None,
        lambda: model.set_adapter("other"),
        lambda: [layer.set_scale("other", -2.0) for layer in layers],
        lambda: [layer.lora_A["other"].weight.data.neg_() for layer in layers],
        lambda: [layer.lora_B["other"].weight.data.mul_(3.0) for layer in layers],
        lambda: model.base_model.disable_adapter_layers(),
        lambda: model.base_model.enable_adapter_layers(),
        lambda: model.base_model.set_adapter(["default", "other"]),
        lambda: model.base_model.set_adapter(["few", "other", "default"]),
        lambda: [layer.set_scale("default", 3.0) for layer in layers],
        lambda: model.base_model.set_adapter("few"),
        lambda: model.base_model.set_adapter(["other", "few"]),
        lambda: model.merge_adapter(["few"]),  # the other one is left out
        lambda: model.merge_adapter(["other"]),
        lambda: model.unmerge_adapter(),
    ]
    found = list[Any]()
    for change in changes:
        with torch.no_grad():
            change()
        calls.clear()
        scores = {"return_dict_in_generate": True, "output_scores": True}
        assert_same(model, kwargs)
        found.append(model.generate(**kwargs | scores).scores[0].nan_to_num(0, 0, 0))
        assert _steps() > 0
    for i in range(1, len(changes) - 2):
        assert not torch.allclose(found[i], found[i - 1], atol=1e-3), i


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("adapters", [["default"], ["few", "default", "other"]], ids=len)
@pytest.mark.parametrize("family", ["llama", "gpt2", "bart"])
def test_lora_in_half_precision(family: str, adapters: list[str], dtype: torch.dtype) -> None:
    ratios = list[float]()
    for seed in range(7):
        model = _lora(family, dtype, seed=seed)
        model.base_model.set_adapter(adapters)
        model = model.get_base_model()
        calls.clear()
        found = noise.noise(model, zoo.batch(model, 6, 9), {"max_new_tokens": 12})
        ratios.append(found.error / found.own)
    assert sorted(ratios)[3] <= noise.LIMIT, ratios
    assert _steps() > 0


def test_halves_that_no_panel_begins_with(variant: str) -> None:  # noqa: F811
    """The plan says why steps run in torch: the gate of Phi-3 is one weight with another layer."""
    by = native.found().library
    assert by is not None
    for size, reason in (
        (by.panel, ""),
        (by.panel + 8, f"gates that are merged have {by.panel + 8} outputs, no multiple of"),
    ):
        sizes = zoo._without("head_dim", "intermediate_size")
        model = tf.Phi3ForCausalLM(tf.Phi3Config(**sizes, intermediate_size=size)).eval()
        calls.clear()
        for _ in range(2):
            model.generate(**zoo.batch(model, 3, 9), max_new_tokens=6)
        call = last_call()
        assert call is not None
        assert call.plan.not_in_c.startswith(reason) if reason else not call.plan.not_in_c
        assert (_steps() > 0) == (not reason)


HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("family", EXPERTS)
def test_experts_in_half_precision(family: str, dtype: torch.dtype) -> None:
    """Rounding may choose another expert, in either program: the median of models counts."""
    ratios = list[float]()
    for seed in range(9):
        model = zoo.build(family, torch.float32, seed).to(dtype)
        found = noise.noise(model, zoo.batch(model, 6, 9), {"max_new_tokens": 12})
        ratios.append(found.error / found.own)
    assert sorted(ratios)[4] <= noise.LIMIT, ratios
    assert _steps() > 0


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_may_change_between_calls(variant: str, family: str) -> None:  # noqa: F811
    model = zoo.build(family, torch.float32)
    kwargs = zoo.batch(model, 4, 9) | {"max_new_tokens": 12, "min_new_tokens": 12}
    mixture: Any = next(m for m in model.model.layers[1].children() if hasattr(m, "experts"))
    experts, router = mixture.experts, mixture._modules.get("gate", mixture._modules.get("router"))
    logits = getattr(router, "wg", router)
    wide = nn.Parameter(experts.gate_up_proj.detach().flip(0).clone())
    changes: list[Callable[[], object]] = [
        lambda: experts.gate_up_proj.data.neg_(),
        lambda: experts.down_proj.mul_(-2.0),
        lambda: setattr(experts, "gate_up_proj", wide),
        lambda: logits.weight.data.neg_(),
    ]
    if family == "phimoe":
        changes += [lambda: setattr(router, "router_jitter_noise", 0.05)]
    else:
        changes += [lambda: setattr(router, "top_k", 1)]
    if family == "gpt_oss":
        changes += [
            lambda: experts.gate_up_proj_bias.data.mul_(-3.0),
            lambda: experts.down_proj_bias.mul_(-3.0),
            lambda: router.bias.data.neg_(),
            lambda: setattr(experts, "limit", 0.5),
            lambda: setattr(experts, "alpha", 5.0),
            lambda: model.model.layers[0].self_attn.sinks.add_(6.0),
        ]
    assert_changes_count(model, kwargs, changes)


@pytest.mark.parametrize(
    "change",
    [
        {"moe_intermediate_size": 24},  # the halves of a weight do not begin at a panel
        {"experts_implementation": "own"},
        {"hidden_act": "tanh"},
    ],
)
def test_experts_that_c_does_not_run(
    variant: str,  # noqa: F811
    change: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "own", batched_mm_experts_forward)
    torch.manual_seed(0)
    config = tf.Qwen3MoeConfig(**_FILLED | change)
    model: Any = tf.Qwen3MoeForCausalLM(config).eval()
    assert assert_same(model, zoo.batch(model, 4, 9) | {"max_new_tokens": 12}).error is None
    call = last_call()
    assert call is not None
    assert call.plan.fused
    assert _steps() == 0


def test_packed_experts_are_counted_with_their_model() -> None:
    model = zoo.build("mixtral", torch.float32)
    model.generate(**zoo.batch(model, 4, 9) | {"max_new_tokens": 12})
    experts: Any = model.model.layers[0].mlp.experts
    weights = experts.gate_up_proj.nbytes + experts.down_proj.nbytes
    held = budget.held_by_model()
    assert held[type(model).__name__]["packed weights"] > weights * len(model.model.layers)
    assert "ExpertWeight" not in held


def test_experts_are_not_rounded_to_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTGEN_PRECISION", "int8")
    settings.reload()
    model = zoo.build("mixtral", torch.float32)
    assert assert_same(model, zoo.batch(model, 4, 9) | {"max_new_tokens": 12}).error is None
    assert _steps() > 0
    monkeypatch.undo()
    settings.reload()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(EXPERTS)))
def test_half_precision(variant: str, family: str, dtype: torch.dtype) -> None:  # noqa: F811
    """Steps run in C where they do in fp32, and round no worse than transformers.

    The few logits of one tiny model may exceed the limit by chance; then the median of five counts.
    """
    ratios = list[float]()
    for seed in range(5):
        model = zoo.build(family, torch.float32, seed).to(dtype)
        batch = zoo.batch(model, 6, 9, "natural" if family != "gemma2" else "none")
        for options in ({}, {"num_beams": 3}):
            found = noise.noise(model, batch, options | {"max_new_tokens": 12})
            ratios.append(found.error / found.own)
        if max(ratios) <= noise.LIMIT:
            break
    assert sorted(ratios)[len(ratios) // 2] <= noise.LIMIT, ratios
    call = last_call()
    assert call is not None
    assert (_steps() > 0) == (call.plan.fused and family not in NOT_WRITTEN)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "family",
    ["marian", "t5", "llama", "qwen3", "phi", "gpt2", "mistral", "opt", "gemma2", "codegen"],
)
def test_searches_in_half_precision(
    variant: str,  # noqa: F811
    family: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps that C runs from token ids to the choice of the next round no worse either."""
    logits, run = list[Tensor](), native_multistep.run

    def noting(model: Any, prepared: Any, *others: Any) -> Any:
        outcome = run(model, prepared, *others)
        logits.append(prepared.logits.clone())
        return outcome

    monkeypatch.setattr(native_multistep, "MOST", 1)  # one step for each call of C
    monkeypatch.setattr(native_multistep, "run", noting)
    model, tokens = zoo.build(family, torch.float32).to(dtype), 12
    batch = zoo.batch(model, 6, 9)
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens}
    for _ in range(2):
        logits.clear()
        texts = model.generate(**batch, **options)
    if family == "t5" and dtype == torch.float16:  # its sums are clamped
        assert not logits
        return
    assert len(logits) >= tokens - 2
    assert all(torch.equal(each, each.to(dtype).float()) for each in logits)
    exact, own = (
        noise._forced(each, batch, texts, texts.shape[1] - tokens)[-len(logits) :]
        for each in (copy.deepcopy(model).float(), model)
    )
    error, theirs = (noise.root_mean_square([noise._errors(each, exact)]) for each in (logits, own))
    assert 0 < error <= noise.LIMIT * theirs


@pytest.mark.parametrize("dtype", HALVES)
def test_many_rows_in_half_precision(
    variant: str,  # noqa: F811
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where torch has faster instructions for many rows, C runs the steps of few rows only."""
    monkeypatch.setattr(native, "most_rows", lambda _: 4)
    model = zoo.build("llama", dtype)
    for sentences, in_c in ((2, True), (3, False)):
        kwargs = zoo.batch(model, sentences, 5) | {"num_beams": 2, "max_new_tokens": 6}
        model.generate(**kwargs)
        calls.clear()
        assert model.generate(**kwargs).shape[0] == sentences
        assert (calls["search", "native"] + _steps() > 0) == in_c


def test_many_beams_and_heads_for_each_key(variant: str) -> None:  # noqa: F811
    """If more rows read a key than C supports, the step runs as single operations."""
    model = zoo.build("llama", torch.float32)
    for beams, written in ((64, True), (65, False)):
        calls.clear()
        kwargs = zoo.batch(model, 1, 5) | {"num_beams": beams, "max_new_tokens": 5}
        assert assert_same(model, kwargs).error is None
        assert (_steps() > 0) == written, beams


def test_weights_may_change_between_steps(variant: str) -> None:  # noqa: F811
    """A logits processor may modify weights in place or replace them."""

    class Changing(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            fc, norm = (
                model.model.decoder.layers[1].fc1,
                model.model.decoder.layers[0].final_layer_norm,
            )
            with torch.no_grad():
                if input_ids.shape[1] == 6:
                    fc.weight.mul_(-1)
                if input_ids.shape[1] == 8:
                    fc.weight.data = fc.weight.flip(0)
                if input_ids.shape[1] == 9:
                    fc.weight, fc.bias = nn.Parameter(fc.weight * 0.7), nn.Parameter(fc.bias - 1)
                if input_ids.shape[1] == 10:
                    fc.bias.data = fc.bias + 1
                    norm.weight.data = norm.weight * 1.5
            return scores

    found = []
    for turn in (contextlib.nullcontext, fastgen.disabled):
        model = zoo.build("bart", torch.float32)
        with turn():
            kwargs = zoo.batch(model, 3, 7) | {
                "num_beams": 2,
                "max_new_tokens": 14,
                "min_new_tokens": 14,
            }
            model.generate(**kwargs)
            found.append(
                model.generate(**kwargs, logits_processor=LogitsProcessorList([Changing()]))
            )
    assert _steps() > 12
    assert torch.equal(*found)


def test_memory_that_is_not_there_is_asked_for_seldom(
    variant: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, asked = zoo.build("marian", torch.float32), list[Tensor]()
    monkeypatch.setattr(
        packed_weights, "_shortage", lambda plain, always: asked.append(plain) or "memory is short"
    )
    kwargs = zoo.batch(model, 3, 7) | {"num_beams": 2, "max_new_tokens": 30, "min_new_tokens": 30}
    assert assert_same(model, kwargs).error is None
    assert _steps() == 0
    assert asked
    assert len(asked) <= 2 * sum(isinstance(module, nn.Linear) for module in model.modules())


def test_attention_to_a_long_text_is_shared_among_threads(
    variant: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Attention is shared among threads even where the products alone are too small for two."""
    model, seen, run = zoo.build("llama", torch.float32), list[int](), c.run
    monkeypatch.setattr(
        c, "run", lambda by, threads, step: (seen.append(threads), run(by, threads, step))[1]
    )
    for length in (8, 200):
        model.generate(**zoo.batch(model, 2, length, "none"), num_beams=4, max_new_tokens=4)
    assert seen[0] == 1
    assert seen[-1] == torch.get_num_threads()


def test_calls_at_the_same_time(variant: str) -> None:  # noqa: F811
    model = zoo.build("marian", torch.float32)
    inputs = [
        zoo.batch(model, 3, 6 + i, seed=i) | {"num_beams": 3, "max_new_tokens": 15}
        for i in range(4)
    ]
    wanted = [model.generate(**each) for each in inputs]
    found: list[Any] = [None] * len(inputs)

    def run(i: int) -> None:
        for _ in range(5):
            found[i] = model.generate(**inputs[i])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("family", ["bart", "t5", "llama"])
def test_stream(variant: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """One step runs sentences of several calls; steps run one by one here."""
    monkeypatch.setattr(loop, "BACKENDS", (loop.Eager,))
    model = zoo.build(family, torch.float32)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 12, (23,), generator=generator).tolist()
    sentences = [
        torch.randint(10, zoo.VOCABULARY, (n,), generator=generator).tolist() for n in lengths
    ]
    options = {"max_new_tokens": 9, "num_beams": 3}
    alone = [model.generate(input_ids=torch.tensor([s]), **options) for s in sentences]
    calls.clear()
    found = list(fastgen.generate_stream(model, sentences, max_tokens=40, window=7, **options))
    assert _steps() > 0
    assert [sequences.tolist() for sequences in found] == [
        sequences.tolist() for sequences in alone
    ]


def test_left_to_torch(variant: str, setting: Callable[[str, str], None]) -> None:  # noqa: F811
    """C is bypassed under operator counting, when switched off, and for unpackable weights."""
    model = zoo.build("marian", torch.float32)
    kwargs = zoo.batch(model, 3, 7) | {"num_beams": 3, "max_new_tokens": 8}
    wanted = model.generate(**kwargs)
    calls.clear()
    with FlopCounterMode(display=False):
        assert torch.equal(model.generate(**kwargs), wanted)
    for name, value in (("FASTGEN_OPS", "reference"), ("FASTGEN_LINEAR", "plain")):
        setting(name, value)
        assert torch.equal(model.generate(**kwargs), wanted)
        setting(name, "auto" if name == "FASTGEN_OPS" else "packed")
    assert _steps() == 0
    assert torch.equal(model.generate(**kwargs), wanted)
    assert _steps() > 0


# Sublayers of the decoder and of the encoder.
@pytest.mark.parametrize(("sublayers", "most"), [(6, 6), (4, 7)])
def test_without_memory(
    variant: str,  # noqa: F811
    sublayers: int,
    most: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The batch is split, and the result is the same; steps run one by one here."""
    model = zoo.build("marian", torch.float32)
    kwargs = zoo.batch(model, 4, 7, "none") | {"num_beams": 3, "max_new_tokens": 8}
    monkeypatch.setattr(loop, "BACKENDS", (loop.Eager,))
    for _ in range(2):
        wanted = model.generate(**kwargs)
    run, refused = c.run, list[int]()

    def failing(by: native.Library, threads: int, step: c.Step) -> bool:
        if step.sublayer_count == sublayers and step.rows > most:
            refused.append(step.rows)
            return False
        return run(by, threads, step)

    monkeypatch.setattr(c, "run", failing)
    assert torch.equal(model.generate(**kwargs), wanted)
    assert refused
    assert refused[0] == {6: 12, 4: 28}[sublayers]


def test_structures(variant: str) -> None:  # noqa: F811
    """Python's structures have the same size as those in C."""
    library = ctypes.CDLL(str(native.LIBRARIES / f"{variant}.so"))
    library.step_size.restype = ctypes.c_int64
    assert library.step_size() == c.SIZE


FAIRSEQ = {
    "transformer": {}, "prenorm": {"no_repeat_ngram_size": 2}, "bart": {"min_len": 3}, "lm": {},
    "scaled": {}, "lm_learned": {},
}  # fmt: skip


@pytest.mark.parametrize("name", FAIRSEQ)
def test_fairseq(variant: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Results equal fairseq's; C also returns the attention of the last layer."""
    pytest.importorskip("fairseq")
    from tests.support import fairseq_zoo

    for part in ("encoder", "decoder"):
        for size, value in (("embed_dim", 32), ("ffn_embed_dim", 40)):
            monkeypatch.setitem(fairseq_zoo._SIZES, f"{part}_{size}", value)
    model = fairseq_zoo.build.__wrapped__(name, torch.float32)
    for beams in (1, 4):
        options = {"beam_size": beams, "max_len_b": 14} | FAIRSEQ[name]
        sample = fairseq_zoo.batch(5, 9, padding="none" if name.startswith("lm") else "left")
        for _ in range(2):
            found = fairseq_zoo.assert_same([model], sample, options)
            assert not isinstance(found, Exception)
    assert (_steps() > 0) == (name != "scaled")
