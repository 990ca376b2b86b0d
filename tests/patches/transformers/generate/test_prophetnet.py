"""Check ProphetNet: fused steps run two of its streams; its own attention shares no cache."""

from typing import Any

import pytest
import torch
import transformers as tf
from transformers.models.prophetnet import modeling_prophetnet

import fastgen
from fastgen import config
from fastgen.models.build import equivalence_check
from fastgen.models.build.equivalence_check import OUTPUTS_DIFFER, by_modules
from fastgen.models.specs.registry import SPECS
from fastgen.patches.transformers.generate.report import CallReport, last_call
from fastgen.patches.transformers.planning.sharing import MODULES_CANNOT, not_shared
from tests.support import zoo
from tests.support.parity import assert_same, fallbacks, left_off, same
from tests.support.recorder import Graphs

FIELDS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
METHODS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "4 beams": {"num_beams": 4, "no_repeat_ngram_size": 2, "eos_token_id": [2, 7, 9, 30]},
    "5 beams": {
        "num_beams": 5,
        "length_penalty": 0.6,
        "early_stopping": True,
        "num_return_sequences": 3,
    },
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "drawn beams": {"do_sample": True, "num_beams": 3},
}


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute softmax in the dtype of the scores; ProphetNet would use fp32 for fp64 as well."""
    monkeypatch.setattr(
        modeling_prophetnet,
        "softmax",
        lambda x, dim, onnx_trace=False: torch.nn.functional.softmax(x, dim),
    )


def _batch(model: Any, sentences: int = 4, padding: str = "natural") -> dict[str, torch.Tensor]:
    """Return inputs with a mask in the model's dtype; integer masks give NaN in fp64."""
    inputs = zoo.batch(model, sentences, 9, padding)
    return inputs | {"attention_mask": inputs["attention_mask"].to(model.dtype)}


def _report(shared: bool = True) -> CallReport:
    report = last_call()
    assert report is not None
    assert (report.plan.shared, report.plan.fused) == (shared, shared)
    return report


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("options", METHODS.values(), ids=METHODS)
def test_same(options: dict[str, Any], dtype: torch.dtype) -> None:
    model, before = zoo.build("prophetnet", dtype), fallbacks()
    kwargs = _batch(model) | options | {"max_new_tokens": 24}
    kwargs |= FIELDS if dtype == torch.float64 else {}
    for _ in range(2):  # the first step of the first call runs both ways
        assert assert_same(model, kwargs).error is None
        _report()
    assert fallbacks() == before
    assert equivalence_check.verdicts_of(model.prophetnet.decoder).step[1]


@pytest.mark.parametrize("beams", [1, 4])
def test_same_with_the_softmax_of_transformers(beams: int) -> None:
    model = zoo.build("prophetnet")
    kwargs = _batch(model) | FIELDS | {"num_beams": beams, "max_new_tokens": 30}
    assert assert_same(model, kwargs, tolerance=1e-5).error is None
    _report()


def _ordered(
    self: Any, hidden: torch.Tensor, scores: torch.Tensor, _: Any, buckets: torch.Tensor
) -> torch.Tensor:
    """Return relative position biases of the predicting streams.

    For more than one token, transformers assigns biases to the wrong token and head. Without a
    cache, its ProphetNet therefore differs from its output with one.

    Args:
        hidden: (B, T, n, C).
    Returns:
        (B, n, H, T, 2 T).
    """
    bias = self.relative_pos_embeddings(hidden).unflatten(
        -1, (self.num_buckets, self.num_attn_heads)
    )
    index = buckets[:, None, None].expand(-1, *scores.shape[1:3], -1, -1)
    return bias.permute(0, 2, 4, 1, 3).gather(-1, index.long())


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("beams", [1, 4])
def test_same_without_a_cache(beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skipping streams and caching keys across steps do not change the text."""
    model = zoo.build("prophetnet")
    kwargs = _batch(model) | FIELDS | {"num_beams": beams, "max_new_tokens": 20}
    ours = model.generate(**kwargs)
    _report()
    attention = modeling_prophetnet.ProphetNetNgramSelfAttention
    monkeypatch.setattr(attention, "get_predict_relative_pos_embeddings", _ordered)
    with fastgen.disabled():
        plain = model.generate(**kwargs, use_cache=False)
    same(ours.sequences, plain.sequences)
    same(ours.logits, plain.logits)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("beams", [1, 3])
def test_replayed(beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps read the position of the predicting stream's keys and other lengths on the device."""
    graphs, model = Graphs(monkeypatch), zoo.build("prophetnet")
    kwargs = _batch(model) | FIELDS | {"num_beams": beams, "max_new_tokens": 20}
    model.generate(**kwargs)  # the first step of the first call runs both ways
    replays = graphs.replays
    assert assert_same(model, kwargs).error is None
    assert _report().plan.graphs
    assert graphs.replays - replays >= 8


@pytest.mark.usefixtures("exact")
def test_no_cache_is_asked_for() -> None:
    model = zoo.build("prophetnet")
    assert (
        assert_same(model, _batch(model) | FIELDS | {"num_beams": 3, "use_cache": False}).error
        is None
    )
    _report(shared=False)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("beams", [1, 3])
def test_a_prompt_with_padding(beams: int) -> None:
    """transformers uses its mask during prefill only."""
    model = zoo.build("prophetnet")
    prompt = torch.tensor([[3, 5, 6, 7], [3, 9, 4, 8], [3, 20, 21, 22], [3, 5, 5, 5]])
    mask = torch.ones(4, 4, dtype=torch.float64)
    mask[1, :2] = mask[2, :1] = 0
    kwargs = {
        "decoder_input_ids": prompt,
        "decoder_attention_mask": mask,
        "num_beams": beams,
        "max_new_tokens": 9,
    }
    for _ in range(2):
        assert assert_same(model, _batch(model) | kwargs | FIELDS).error is None
        _report()


@pytest.mark.usefixtures("exact")
def test_finished_sentences_leave() -> None:
    model = zoo.build("prophetnet")
    kwargs = _batch(model, 8) | {
        "num_beams": 3,
        "eos_token_id": list(range(2, 30)),
        "max_new_tokens": 30,
    }
    for _ in range(2):
        assert assert_same(model, kwargs).error is None
    steps = _report().steps
    assert steps[-1][0] < steps[0][0]


@pytest.mark.usefixtures("exact")
def test_without_steps_from_the_weights_nothing_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build("prophetnet")
    kwargs = _batch(model) | {"num_beams": 3, "max_new_tokens": 9}
    states = {"output_hidden_states": True, "return_dict_in_generate": True}
    assert assert_same(model, kwargs | states).error is None
    reasons = {not_shared(MODULES_CANNOT), by_modules("hidden states or attentions are returned")}
    assert reasons <= set(_report(shared=False).plan.left_off)
    monkeypatch.setenv("FASTGEN_STEP", "module")
    config.reload()
    reasons = not_shared(MODULES_CANNOT), by_modules("FASTGEN_STEP=module")
    assert fastgen.explain(model, **kwargs).plan.left_off == reasons
    assert assert_same(model, kwargs).error is None
    assert _report(shared=False).plan.left_off == reasons
    monkeypatch.undo()
    config.reload()


@pytest.mark.usefixtures("exact")
def test_another_decoder_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step detects it: this call goes on with transformers' cache, later ones use it."""
    monkeypatch.setitem(SPECS, "prophetnet", zoo.misplaced("prophetnet", 2))
    model = zoo.build("prophetnet")
    kwargs = _batch(model) | FIELDS | {"num_beams": 3, "max_new_tokens": 9}
    assert fastgen.explain(model, **kwargs).plan.shared
    for _ in range(2):
        assert assert_same(model, kwargs).error is None
        assert {not_shared(MODULES_CANNOT), by_modules(OUTPUTS_DIFFER)} <= set(
            _report(shared=False).plan.left_off
        )


def test_contrastive_search_looks_at_the_main_stream() -> None:
    model = zoo.build("prophetnet")
    kwargs = _batch(model, 1, "none") | {"max_new_tokens": 9}
    model.generate(**kwargs, top_k=4, penalty_alpha=0.6)
    reason = by_modules("contrastive search looks at tokens, and the head at what asks behind them")
    assert {reason, not_shared(MODULES_CANNOT)} <= set(_report(shared=False).plan.left_off)


def test_padding_that_is_not_0() -> None:
    """transformers' own positions and buckets do not fit such padding, and it raises."""
    settings = zoo.build("prophetnet").config.to_dict() | {"pad_token_id": 1}
    model = tf.ProphetNetForConditionalGeneration(tf.ProphetNetConfig(**settings)).double().eval()
    for beams in (1, 3):
        kwargs = _batch(model) | {"num_beams": beams, "max_new_tokens": 9}
        assert assert_same(model, kwargs).error is not None


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("beams", [1, 3])
def test_explained_bytes(beams: int) -> None:
    model = zoo.build("prophetnet")
    kwargs = _batch(model) | {"num_beams": beams, "max_new_tokens": 9, "min_new_tokens": 9}
    explained = fastgen.explain(model, **kwargs)
    model.generate(**kwargs)
    report = _report()
    assert explained.plan == report.plan
    assert (explained.kv_bytes, explained.stock_kv_bytes) == (
        report.kv_bytes,
        report.stock_kv_bytes,
    )


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("beams", [1, 3])
def test_a_decoder_alone(beams: int) -> None:
    settings = zoo.build("prophetnet").config.to_dict() | {
        "add_cross_attention": False,
        "num_encoder_layers": 3,
    }
    model = tf.ProphetNetForCausalLM(tf.ProphetNetConfig(**settings)).double().eval()
    before = fallbacks()
    kwargs = {
        "input_ids": torch.tensor([[3, 5, 6], [3, 8, 9]]),
        "num_beams": beams,
        "max_new_tokens": 9,
    } | FIELDS
    assert assert_same(model, kwargs).error is None
    assert fallbacks() == before
    report = last_call()
    assert report is not None
    assert report.plan.shared == (beams == 1)


def test_batches_of_a_stream_run_one_after_the_other() -> None:
    model = zoo.build("prophetnet", torch.float32)
    texts = [torch.randint(4, zoo.VOCABULARY, (5 + i % 4,)) for i in range(12)]
    options = {"num_beams": 3, "max_new_tokens": 12, "eos_token_id": list(range(2, 20))}
    before = left_off()
    ours = list(fastgen.generate_stream(model, texts, max_tokens=30, **options))
    assert any("each step runs 2 tokens of a text" in reason for reason in left_off() - before)
    with fastgen.disabled():
        alone = [model.generate(text[None], **options)[0] for text in texts]
    for mine, theirs in zip(ours, alone, strict=True):
        same(mine[0], theirs)


def test_it_drafts_nothing() -> None:
    model = zoo.build("prophetnet", torch.float32)
    with pytest.raises(ValueError, match="each step runs 2 tokens of a text"):
        model.generate(
            **_batch(model), assistant_early_exit=1, fallback_threshold=0.5, rollback_threshold=2.0
        )
