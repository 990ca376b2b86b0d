"""Check more families with fewer options.

Their modules compute attention themselves, or resemble Llama.
"""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn
from transformers.models.fsmt.modeling_fsmt import SinusoidalPositionalEmbedding

import fastgen
from fastgen.models.build.equivalence_check import OUTPUTS_DIFFER, by_modules
from fastgen.models.specs.registry import SPECS
from fastgen.patches.transformers.generate.report import CallReport, last_call
from fastgen.patches.transformers.planning.sharing import MODULES_CANNOT, not_shared
from tests.patches.transformers.bild.test_bild_transformers import generated, greedy, pair
from tests.patches.transformers.bild.test_drafted_beams import _assert_same, _settings
from tests.support import zoo
from tests.support.parity import assert_same, fallbacks
from tests.support.recorder import Graphs

FIELDS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
BEAMS = {"num_beams": 4, "no_repeat_ngram_size": 2, "eos_token_id": [2, 7, 9, 30]}
# These families compute attention, its softmax or the rotation in fp32, whatever the dtype.
_IN_FP32 = ("bloom", "codegen", "deepseek_v2", "gpt_neo", "gptj", "mpt")
# transformers 5.17 gives all generated tokens of FSMT one position; fastgen's steps do not.
_FSMT_COUNTS = bool(
    {"past_key_values_length", "cache_length"}
    & set(inspect.signature(SinusoidalPositionalEmbedding.forward).parameters)
)
needs_counting = pytest.mark.skipif(
    not _FSMT_COUNTS, reason="this FSMT does not count its positions"
)


def _same(model: Any, kwargs: dict[str, Any], tolerance: float = 1e-9) -> CallReport:
    before = fallbacks()
    assert assert_same(model, kwargs, tolerance=tolerance).error is None
    assert fallbacks() == before
    call = last_call()
    assert call is not None
    return call


def _inputs(name: str, model: Any, dtype: torch.dtype) -> dict[str, Any]:
    # For fully masked rows, transformers' fp32 softmax over fp64's lowest number gives NaN.
    nan = dtype == torch.float64 and name in ("bloom", "mpt")
    return zoo.batch(model, 4, 11, "none" if nan else "natural")


CASES: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "beams": (BEAMS, torch.float64),
    "more beams": (
        {"num_beams": 5, "num_return_sequences": 2, "length_penalty": 0.6},
        torch.float32,
    ),
    "greedy": ({"num_beams": 1}, torch.float64),
    "samples": ({"do_sample": True, "num_return_sequences": 3, "top_k": 20}, torch.float32),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", zoo.MORE)
def test_family(name: str, case: str) -> None:
    """Run twice: the first step of the first call runs both ways."""
    options, dtype = CASES[case]
    if (name, dtype) == ("xglm", torch.float64):
        pytest.skip("transformers' own attention fails in fp64")
    model = zoo.build(name, dtype)
    kwargs = _inputs(name, model, dtype) | options | {"max_new_tokens": 16}
    kwargs |= FIELDS if dtype == torch.float64 else {}
    for _ in range(2):
        plan = _same(model, kwargs, tolerance=1e-5 if name in _IN_FP32 else 1e-9).plan
        assert plan.fused == (name != "fsmt" or _FSMT_COUNTS)
        assert plan.shared == (plan.fused or plan.beams == 1)


@pytest.mark.parametrize("name", ["bloom", "falcon-40b", "gptj", "gpt_neo", "led", "mvp"])
def test_weights_may_change_between_calls(name: str) -> None:
    model = zoo.build(name)
    kwargs = (
        _inputs(name, model, torch.float64) | BEAMS | {"max_new_tokens": 10, "min_new_tokens": 10}
    )
    spec = SPECS[model.config.model_type].decoder
    decoder, attention = model.get_submodule(spec.path), spec.self_attention
    layer = getattr(decoder, spec.layers)[1]
    query = layer.get_submodule(f"{attention.module}.{attention.qkv[0]}")
    changes: list[Callable[[], object]] = [
        lambda: query.weight.data.neg_(),
        lambda: layer.get_submodule(spec.mlp.down).weight.data.mul_(-2.0),
        lambda: getattr(decoder, spec.embedding.tokens).weight.data.mul_(-1.0),
    ]
    for change in changes:
        before = model.generate(**kwargs, **FIELDS)
        change()
        assert _same(model, kwargs | FIELDS, tolerance=1e-4).plan.fused
        after = model.generate(**kwargs, **FIELDS)
        assert not torch.equal(before.logits[1], after.logits[1]), "the change has no effect"


def _bloom(**form: Any) -> Any:
    config = zoo.build("bloom").config
    for name, value in form.items():
        setattr(config, name, value)
    return tf.BloomForCausalLM(config).eval()


def _clipped() -> Any:
    model = zoo.build("mpt", torch.float32)
    for block in model.transformer.blocks:
        block.attn.clip_qkv = 0.5
    return model


def _prompted() -> Any:
    config = zoo.build("mvp").config
    config.use_prompt, config.prompt_length, config.prompt_mid_dim = True, 3, 8
    return tf.MvpForConditionalGeneration(config).eval()


def _with_adapter() -> Any:
    model = zoo.build("gptj", torch.float32)
    model.transformer.h[0].mlp.fc_out = nn.Sequential(model.transformer.h[0].mlp.fc_out)
    return model


DECLINED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "residual behind the norm": (
        lambda: _bloom(apply_residual_connection_post_layernorm=True),
        {},
        "apply_residual_connection_post_layernorm of its layers is True",
    ),
    "clipped": (_clipped, {}, "clip_qkv of its layers is 0.5"),
    "adapter": (_with_adapter, {}, "a torch.Sequential in place of a linear layer"),
    "prompts": (_prompted, {}, "a part of its own, self_attn_prompt.prompt_embedding.weight"),
    "padding on the right": (
        lambda: zoo.build("bloom", torch.float32),
        {"attention_mask": torch.tensor([[1] * 7, [1] * 5 + [0] * 2, [0, 1, 1, 0, 1, 1, 1]])},
        "padding that is not on the left",
    ),
    "too long": (
        lambda: zoo.build("gpt_neo", torch.float32),
        {
            "input_ids": torch.randint(4, 90, (3, 121)),
            "attention_mask": torch.ones(3, 121, dtype=torch.int64),
        },
        "a text of up to 129 tokens, positions for 128",
    ),
}


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("what", DECLINED)
def test_declined(what: str, beams: int) -> None:
    """The modules know only transformers' cache, so several rows share nothing; it is reported."""
    build, given, reason = DECLINED[what]
    model = build()
    kwargs = zoo.batch(model, 3, 7, "none") | given | {"num_beams": beams, "max_new_tokens": 8}
    left_off = _same(model, kwargs, tolerance=1e-4).plan.left_off
    assert by_modules(reason) in left_off
    assert (not_shared(MODULES_CANNOT) in left_off) == (beams > 1)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("family", [pytest.param("fsmt", marks=needs_counting), "led"])
def test_a_prompt_with_padding(family: str, beams: int) -> None:
    """The modules use its mask during prefill only."""
    model = zoo.build(family)
    prompt, mask = (
        torch.tensor([[3, 5, 6, 7], [3, 9, 4, 8], [3, 20, 21, 22]]),
        torch.ones(3, 4, dtype=torch.int64),
    )
    mask[1, :2] = mask[2, :1] = 0
    kwargs = (
        zoo.batch(model, 3, 7)
        | {"decoder_input_ids": prompt, "decoder_attention_mask": mask}
        | FIELDS
    )
    for _ in range(2):  # the first step of the first call runs both ways
        plan = _same(model, kwargs | {"num_beams": beams, "max_new_tokens": 8}).plan
        assert (plan.shared, plan.fused) == (True, True)


def test_a_model_that_computes_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step detects it, and every row then has its own keys and values."""
    model = zoo.build("falcon-rw")
    attend = type(model.transformer.h[0].self_attention).forward

    def doubled(self: Any, *args: Any, **kwargs: Any) -> Any:
        output, weights = attend(self, *args, **kwargs)
        return 2 * output, weights

    monkeypatch.setattr("fastgen.models.build.introspection.is_toolkits", lambda _: True)
    monkeypatch.setattr(type(model.transformer.h[0].self_attention), "forward", doubled)
    kwargs = zoo.batch(model, 3, 7) | {"num_beams": 3, "max_new_tokens": 8} | FIELDS
    for _ in range(2):  # detected first, then known
        call = _same(model, kwargs)
        assert not call.plan.shared
        assert {by_modules(OUTPUTS_DIFFER), not_shared(MODULES_CANNOT)} <= set(call.plan.left_off)
        assert call.kv_bytes == call.stock_kv_bytes


@needs_counting
def test_padding_that_fsmt_generates() -> None:
    """Padding takes the position of the preceding token, wherever it occurs."""
    model = zoo.build("fsmt")
    allowed = lambda _, ids: [zoo.PAD] if len(ids) in (2, 5, 6) else list(range(4, 40))  # noqa: E731
    kwargs = zoo.batch(model, 3, 9) | {
        "num_beams": 3,
        "max_new_tokens": 12,
        "prefix_allowed_tokens_fn": allowed,
    }
    for _ in range(2):
        assert _same(model, kwargs | FIELDS).plan.fused


def test_global_attention_of_led() -> None:
    model = zoo.build("led")
    kwargs = zoo.batch(model, 3, 11) | {"num_beams": 3, "max_new_tokens": 9} | FIELDS
    without = model.generate(**kwargs)
    everywhere = torch.zeros_like(kwargs["input_ids"])
    everywhere[:, 0] = 1
    for _ in range(2):
        assert _same(model, kwargs | {"global_attention_mask": everywhere}).plan.fused
    assert not torch.equal(
        without.logits[1], model.generate(**kwargs, global_attention_mask=everywhere).logits[1]
    )


def test_a_local_window_that_is_not_outgrown() -> None:
    model = zoo.build("gpt_neo", torch.float32)
    kwargs = zoo.batch(model, 3, 4) | {"num_beams": 3, "max_new_tokens": 4, "output_logits": True}
    for _ in range(2):
        assert _same(model, kwargs, tolerance=1e-4).plan.fused


# Texts with padding, whose positions differ from their KV slots. // Two forms of ALiBi, a window,
# and neighbors.
_PLACED = ("falcon-rw", "gptj")


@pytest.mark.parametrize("name", [*_PLACED, "mistral"])
def test_graphs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that change per step are read from the device."""
    graphs = Graphs(monkeypatch)
    model = zoo.build(name)
    kwargs = (
        zoo.batch(model, 3, 9) | BEAMS | {"max_new_tokens": 20, "eos_token_id": zoo.EOS} | FIELDS
    )
    model.generate(**kwargs)
    replays = graphs.replays
    assert _same(model, kwargs, tolerance=1e-5).plan.graphs
    assert graphs.replays - replays >= 8


@pytest.mark.parametrize("name", [*_PLACED, "gpt_neo", "mpt"])
def test_big_little_decoding(name: str) -> None:
    large, small = pair(name, seed=2, apart=0.03)
    inputs = zoo.batch(large, 3, 7, "none" if name == "mpt" else "natural", seed=1)
    options = {
        "assistant_model": small,
        "lossless": True,
        "fallback_threshold": 0.2,
        "adaptive_draft": False,
    }
    found, ids = generated(large, inputs, **options), greedy(large, inputs)
    for row, (tokens, _) in zip(ids[:, 7:].tolist(), found, strict=True):
        assert row[: len(tokens)] == tokens
    assert sum(counts["drafted"] for _, counts in found)


def test_drafted_beams() -> None:
    large, small = pair("falcon-rw", seed=1, apart=0.03)
    before = fastgen.status().bild.get("beam_steps", 0)
    _assert_same(large, small, zoo.batch(large, 3, 7), 2, _settings(3, num_return_sequences=2))
    assert fastgen.status().bild["beam_steps"] > before


def test_batches_that_refill() -> None:
    """A joint step combines calls at different positions of their texts."""
    model = zoo.build("falcon-rw")
    texts = [[4 + (7 * row + place) % 80 for place in range(3 + 2 * (row % 4))] for row in range(8)]
    settings = {"num_beams": 3, "max_new_tokens": 12, "eos_token_id": list(range(2, 60, 7))}
    found = list(fastgen.generate_stream(model, texts, max_tokens=24, **settings))
    with fastgen.disabled():
        for text, output in zip(texts, found, strict=True):
            wanted = model.generate(torch.tensor([text]), **settings)[0]
            assert output[0, : len(wanted)].tolist() == wanted.tolist()


@pytest.mark.parametrize("name", ["bloom", "falcon", "falcon-40b"])
@pytest.mark.parametrize("beams", [1, 4])
def test_the_memory_is_what_the_call_then_takes(name: str, beams: int) -> None:
    model = zoo.build(name, torch.float32)
    kwargs = zoo.batch(model, 4, 11, "none") | {
        "num_beams": beams,
        "max_new_tokens": 12,
        "min_new_tokens": 12,
    }
    explanation = fastgen.explain(model, **kwargs)
    model.generate(**kwargs)
    call = last_call()
    assert call is not None
    assert explanation.plan == call.plan
    assert (explanation.kv_bytes, explanation.stock_kv_bytes) == (
        call.kv_bytes,
        call.stock_kv_bytes,
    )
