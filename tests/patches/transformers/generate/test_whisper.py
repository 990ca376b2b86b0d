"""Check Whisper, whose `generate` calls transformers' loops per segment and attempt."""

from typing import Any

import pytest
import torch
import transformers as tf

import fastgen
from fastgen.patches.transformers.generate.report import CallReport
from fastgen.patches.transformers.streaming import suspend
from tests.support import zoo
from tests.support.parity import Result, assert_same, fallbacks

END = 59
CASES = [
    (1, torch.float64),
    (4, torch.float64),
    (5, torch.float64),
    (1, torch.float32),
    (5, torch.float32),
]
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[CallReport]:
    """Return a list that collects the reports of fastgen's loops."""
    found: list[CallReport] = []
    monkeypatch.setattr(suspend, "note_served", lambda _, __, report, *___: found.append(report))
    return found


def _sounds(
    sentences: int, frames: int = zoo.FRAMES, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Any:
    features = torch.randn(
        sentences, zoo.MELS, frames, generator=torch.Generator().manual_seed(seed)
    )
    return features.to(dtype)


def _long(sentences: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Any]:
    """Return sounds of up to three segments, of different lengths."""
    lengths = [3 * zoo.FRAMES - 7 * i for i in range(sentences)]
    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    features = _sounds(sentences, max(lengths), dtype, seed) * mask[:, None]
    return {"input_features": features, "attention_mask": mask.long(), "return_timestamps": True}


def _check(
    model: Any, kwargs: dict[str, Any], reports: list[CallReport], tolerance: float = 1e-9
) -> Result:
    """Assert equal output, with fastgen's loops over one cache per sentence throughout."""
    before = fallbacks()
    result = assert_same(model, kwargs, tolerance=tolerance)
    assert result.error is None
    assert fallbacks() == before
    assert reports
    assert all(report.plan.shared and report.plan.fused for report in reports)
    return result


SHORT: dict[str, dict[str, Any]] = {
    "plain": {},
    "times": {"return_timestamps": True},
    "language": {"language": "de", "task": "translate"},
    "languages": {"language": ["en", "de", "fr"]},
    "prompt": {"language": "en", "prompt_ids": torch.tensor([66, 5, 9, 30])},
    "n-grams": {"no_repeat_ngram_size": 2, "length_penalty": 0.6, "early_stopping": True},
}


@pytest.mark.parametrize(("beams", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("options", SHORT.values(), ids=SHORT)
def test_one_segment(
    options: dict[str, Any], beams: int, dtype: torch.dtype, reports: list[CallReport]
) -> None:
    model = zoo.build("whisper", dtype)
    kwargs = {"input_features": _sounds(3, dtype=dtype), "num_beams": beams} | options
    if dtype == torch.float64:
        kwargs |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    _check(model, kwargs, reports, 1e-9 if dtype == torch.float64 else 1e-6)
    assert {report.plan.beams for report in reports} == {beams}


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("conditioned", [False, True], ids=["", "conditioned on what was said"])
def test_several_segments(beams: int, conditioned: bool, reports: list[CallReport]) -> None:
    """Sounds have different lengths: some finish before the others, with fewer tokens."""
    model = zoo.build("whisper", seed=2)
    kwargs = _long(3) | {
        "num_beams": beams,
        "condition_on_prev_tokens": conditioned,
        "return_segments": True,
    }
    result = _check(model, kwargs | {"language": "en"}, reports)
    assert {len(segments) for segments in result.value["segments"]} != {1}
    assert bool((result.value["sequences"] >= zoo.TIMES).any())
    assert {report.plan.sentences for report in reports} > {3}, "all sounds have as many segments"


@DTYPES
@pytest.mark.parametrize("beams", [1, 5])
def test_temperatures(beams: int, dtype: torch.dtype, reports: list[CallReport]) -> None:
    """Segments with repetitive or unlikely text are sampled again at higher temperatures."""
    model = zoo.build("whisper", dtype, seed=2)
    kwargs = _long(3, dtype) | {
        "num_beams": beams, "temperature": (0.0, 0.4, 1.0), "compression_ratio_threshold": 1.0,
        "logprob_threshold": -1.2, "no_speech_threshold": 0.4, "language": "en",
    }  # fmt: skip
    _check(model, kwargs, reports, 1e-9 if dtype == torch.float64 else 1e-6)
    methods = [report.plan.method for report in reports]
    assert methods[0] == ("greedy search" if beams == 1 else "beam search")
    drawn = [report.plan.sentences for report in reports if report.plan.method == "sampling"]
    assert drawn
    assert min(drawn) < 3, "no segment was found good at once"


def test_prompt_ids_of_several_segments(reports: list[CallReport]) -> None:
    model = zoo.build("whisper", seed=2)
    prompt = {"prompt_ids": torch.tensor([66, 5, 9, 30]), "prompt_condition_type": "all-segments"}
    kwargs = (
        _long(2) | prompt | {"condition_on_prev_tokens": True, "num_beams": 3, "language": "en"}
    )
    _check(model, kwargs, reports)
    assert len(reports) > 1


@pytest.mark.parametrize("beams", [1, 3])
def test_times_of_tokens(beams: int, reports: list[CallReport]) -> None:
    """They require attentions, which beams with a shared KV cache do not return."""
    model = zoo.build("whisper")
    kwargs = {
        "input_features": _sounds(2),
        "return_token_timestamps": True,
        "language": "en",
        "num_beams": beams,
    }
    before = fallbacks()
    assert assert_same(model, kwargs).error is None
    assert fallbacks() == before
    assert [report.plan.shared for report in reports] == [beams == 1]


def test_several_texts_of_a_sound(reports: list[CallReport]) -> None:
    model = zoo.build("whisper")
    kwargs = {
        "input_features": _sounds(2),
        "num_beams": 3,
        "num_return_sequences": 2,
        "language": "en",
    }
    _check(model, kwargs, reports)
    _check(model, kwargs | {"temperature": (0.7,)}, reports)
    assert reports[-1].plan.method == "sampling"


def test_given_encoder_outputs(reports: list[CallReport]) -> None:
    model = zoo.build("whisper")
    with torch.no_grad():
        outputs = model.get_encoder()(_sounds(3))
    _check(model, {"encoder_outputs": outputs, "num_beams": 3, "language": "en"}, reports)


@pytest.mark.parametrize("beams", [1, 4])
def test_finished_texts_leave(beams: int, reports: list[CallReport]) -> None:
    """The timestamp processor handles every row by itself."""
    model = zoo.build("whisper", seed=2)
    kwargs = {
        "input_features": _sounds(8),
        "return_timestamps": True,
        "num_beams": beams,
        "max_new_tokens": 30,
    }
    _check(
        model,
        kwargs | {"language": "en", "sequence_bias": {(END,): 8.0}, "length_penalty": 0.0},
        reports,
    )
    report = reports[0]
    assert report.plan.drop
    assert report.steps[-1][0] < report.steps[0][0]


def test_scaled_embeddings_are_not_scaled() -> None:
    """transformers' decoder ignores the factor of its config."""
    model = zoo.build("whisper")
    model.model.decoder.embed_scale = 4.0
    reports: list[CallReport] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(suspend, "note_served", lambda _, __, report, *___: reports.append(report))
        for _ in range(2):  # the first step of the first call runs both ways
            _check(model, {"input_features": _sounds(2), "num_beams": 2, "language": "en"}, reports)


def test_explained() -> None:
    model = zoo.build("whisper")
    kwargs = _long(2) | {"num_beams": 4, "return_token_timestamps": True}
    attention = model.config._attn_implementation
    explained = fastgen.explain(model, **kwargs)
    assert explained.plan is not None
    assert not explained.plan.shared  # as attentions are returned
    assert model.config._attn_implementation == attention
    assert any("first segment" in note for note in explained.notes)


@pytest.mark.parametrize("beams", [1, 4])
def test_explained_bytes(beams: int, reports: list[CallReport]) -> None:
    """Bytes match for a decoder with fewer layers than its encoder, without language detection."""
    model = zoo.build("whisper", seed=3)
    kwargs = {
        "input_features": _sounds(3),
        "num_beams": beams,
        "max_new_tokens": 9,
        "min_new_tokens": 9,
    }
    explained = fastgen.explain(model, **kwargs)
    assert (explained.plan, explained.reason) == (
        fastgen.explain(model, **kwargs, language="en").plan,
        None,
    )
    model.generate(**kwargs)
    report = reports[0]
    assert explained.plan == report.plan
    assert (explained.kv_bytes, explained.stock_kv_bytes) == (
        report.kv_bytes,
        report.stock_kv_bytes,
    )


def test_nothing_to_explain() -> None:
    model = zoo.build("whisper")
    kwargs = _long(2) | {
        "attention_mask": torch.zeros(2, 3 * zoo.FRAMES, dtype=torch.int64),
        "language": "en",
    }
    assert "comes to no loop" in str(fastgen.explain(model, **kwargs).reason)


def test_a_small_whisper_drafts_nothing() -> None:
    model, small = zoo.build("whisper"), zoo.build("whisper", seed=2)
    options = {
        "assistant_model": small,
        "fallback_threshold": 0.5,
        "rollback_threshold": 2.0,
        "language": "en",
    }
    with pytest.raises(
        ValueError, match="WhisperForConditionalGeneration has a generate of its own"
    ):
        model.generate(_sounds(1), **options)


def test_a_decoder_that_is_given_encoder_outputs() -> None:
    """Its `forward` builds a new cache from transformers' own kind of cache only."""
    torch.manual_seed(0)
    model = tf.WhisperForCausalLM(tf.WhisperConfig(**zoo._WHISPER)).double().eval()
    encoded = (torch.randn(2, 5, 16, dtype=torch.float64),)
    kwargs = {"input_ids": torch.tensor([[60, 5], [60, 7]]), "encoder_outputs": encoded}
    before = fallbacks()
    assert assert_same(model, kwargs | {"max_new_tokens": 5}).error is None
    assert fallbacks() == before
    reason = "keys and values are not shared: encoder outputs are given to a decoder"
    assert reason in fastgen.explain(model, **kwargs).notes
