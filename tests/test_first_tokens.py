"""`forced_bos_token_id` as a list: each sentence of a batch has the output that it has alone, with its own token."""

import copy
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

import fastgen
from fastgen import config
from fastgen.models.step import DecoderStep
from fastgen.patches.transformers.report import last_call
from tests import zoo
from tests.parity import assert_same, fallbacks, hits, left_off
from tests.recorder import Graphs

FAMILIES = ["m2m_100", "mbart"]  # NLLB is an m2m_100, mBART-50 an mbart
LANGUAGES = [7, 50, 7, 90, 31]
METHODS: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 12},
    "beams": {"num_beams": 4, "max_new_tokens": 12},
    "early": {"num_beams": 3, "max_new_tokens": 20, "early_stopping": True, "eos_token_id": list(range(2, 30))},
    "edits": {"num_beams": 3, "max_new_tokens": 12, "no_repeat_ngram_size": 2, "min_length": 4, "suppress_tokens": [9]},
    "hypotheses": {"num_beams": 4, "num_return_sequences": 3, "max_new_tokens": 9, "length_penalty": 0.4},
    "two tokens": {"num_beams": 2, "max_length": 3, "forced_eos_token_id": 2},
}


def _alone(model: Any, inputs: dict[str, Tensor], options: dict[str, Any]) -> list[Tensor]:
    """What unpatched transformers gives for each sentence, with its language."""
    with fastgen.disabled():
        return [
            model.generate(
                **{name: value[i : i + 1] for name, value in inputs.items()}, **options, forced_bos_token_id=t
            )
            for i, t in enumerate(LANGUAGES)
        ]


def _assert_together(
    model: Any, inputs: dict[str, Tensor], options: dict[str, Any], languages: Any = LANGUAGES
) -> None:
    """Assert that a batch gives what its sentences give alone, but for what fills it."""
    together = model.generate(**inputs, **options, forced_bos_token_id=languages)
    copies = options.get("num_return_sequences", 1)
    for i, alone in enumerate(_alone(model, inputs, options)):
        own, length = together[i * copies : (i + 1) * copies], alone.shape[1]
        assert torch.equal(own[:, :length], alone)
        assert bool((own[:, 1] == LANGUAGES[i]).all()) or "forced_eos_token_id" in options
        assert set(own[:, length:].flatten().tolist()) <= {zoo.PAD, zoo.EOS}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_sentence_has_its_own(family: str, method: str) -> None:
    model = zoo.build(family)
    inputs = zoo.batch(model, len(LANGUAGES), 9, "natural")
    served, declined, without = hits(), fallbacks(), left_off()
    _assert_together(model, inputs, METHODS[method])
    assert hits() == served + 1
    assert fallbacks() == declined
    assert left_off() == without
    call = last_call()
    assert call is not None
    assert call.plan.fused
    assert call.plan.drop


def test_sentences_leave_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = zoo.build("m2m_100"), list[int]()
    step = DecoderStep.__call__

    def noted(self: DecoderStep, ids: Tensor, context: Any) -> Tensor:
        rows.append(len(ids))
        return step(self, ids, context)

    monkeypatch.setattr(DecoderStep, "__call__", noted)
    _assert_together(model, zoo.batch(model, len(LANGUAGES), 9, "natural"), METHODS["early"])
    assert min(rows) < max(rows) == 3 * len(LANGUAGES)


@pytest.mark.parametrize("beams", [1, 3])
def test_kernels_and_captured_choices(beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTGEN_OPS", "triton")
    config.reload()
    try:
        graphs, model = Graphs(monkeypatch), zoo.build("m2m_100", torch.float32)
        kwargs = zoo.batch(model, 2, 5) | {"num_beams": beams, "max_new_tokens": 13, "min_new_tokens": 13}
        for _ in range(2):
            kwargs |= {"forced_bos_token_id": LANGUAGES[:2], "no_repeat_ngram_size": 3}
            assert assert_same(model, kwargs, tolerance=1e-4).error is None
        assert graphs.replayed["_choose" if beams > 1 else "_choose_next"] > 0
    finally:
        monkeypatch.undo()
        config.reload()


@pytest.mark.parametrize("languages", [tuple(LANGUAGES), torch.tensor(LANGUAGES)], ids=["tuple", "tensor"])
def test_other_kinds_of_lists(languages: Any) -> None:
    model = zoo.build("mbart")
    _assert_together(model, zoo.batch(model, len(LANGUAGES), 6), METHODS["beams"], languages)


def test_a_generation_config_may_hold_it() -> None:
    model = zoo.build("m2m_100")
    inputs, options = zoo.batch(model, len(LANGUAGES), 6), METHODS["beams"]
    settings = copy.deepcopy(model.generation_config)
    settings.update(forced_bos_token_id=LANGUAGES, **options)
    expected = model.generate(**inputs, **options, forced_bos_token_id=LANGUAGES)
    assert torch.equal(model.generate(**inputs, generation_config=settings), expected)


@pytest.mark.parametrize("method", ["greedy", "beams"])
def test_whichever_loop_runs(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own loops, by themselves and behind a fallback, and both in parity mode; scores too."""
    model = zoo.build("m2m_100")
    kwargs = zoo.batch(model, len(LANGUAGES), 6) | METHODS[method] | {"forced_bos_token_id": LANGUAGES}
    scores = {"return_dict_in_generate": True, "output_scores": True}
    assert assert_same(model, kwargs | scores).error is None
    before = fastgen.status().parity
    monkeypatch.setenv("FASTGEN_PARITY", "1")
    config.reload()
    try:
        model.generate(**kwargs)
    finally:
        monkeypatch.undo()
        config.reload()
    assert fastgen.status().parity == before | {"equal": before.get("equal", 0) + 1}


def test_samples_begin_with_their_sentence_s_token() -> None:
    model = zoo.build("mbart")
    kwargs = zoo.batch(model, len(LANGUAGES), 6) | {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 4}
    found = assert_same(model, kwargs | {"forced_bos_token_id": LANGUAGES}).value
    assert found[:, 1].tolist() == [token for token in LANGUAGES for _ in range(2)]


def test_one_token_in_a_list_is_for_all() -> None:
    """As transformers has it."""
    model = zoo.build("m2m_100")
    kwargs = zoo.batch(model, 3, 6) | METHODS["beams"] | {"forced_bos_token_id": [7]}
    assert assert_same(model, kwargs).value[:, 1].tolist() == [7, 7, 7]


def test_halves_have_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory runs out, the list goes with its sentences."""
    model = zoo.build("m2m_100")
    step = DecoderStep.__call__

    def short(self: DecoderStep, ids: Tensor, context: Any) -> Tensor:
        if len(ids) > 9:
            raise torch.OutOfMemoryError("out of memory")
        return step(self, ids, context)

    monkeypatch.setattr(DecoderStep, "__call__", short)
    inputs = zoo.batch(model, len(LANGUAGES), 6)
    _assert_together(model, inputs, METHODS["edits"])
    settings = copy.deepcopy(model.generation_config)
    settings.forced_bos_token_id = LANGUAGES
    with pytest.raises(torch.OutOfMemoryError):  # a list that is not an argument is not cut
        model.generate(**inputs, **METHODS["edits"], generation_config=settings)


@pytest.mark.parametrize(
    ("languages", "message"),
    [
        ([7, 8], "forced_bos_token_id has 2 tokens, and the batch 3 sentences"),
        ([7, 8, 9, 10, 11, 12], "forced_bos_token_id has 6 tokens, and the batch 3 sentences"),
        ([7, 8, 4000], "forced_bos_token_id has 4000, and the vocabulary"),
        ([7, 8, -1], "forced_bos_token_id has -1, and the vocabulary"),
    ],
)
def test_what_does_not_fit_is_said(languages: list[int], message: str) -> None:
    model = zoo.build("m2m_100")
    kwargs = zoo.batch(model, 3, 6) | METHODS["beams"] | {"forced_bos_token_id": languages}
    for call in (lambda: model.generate(**kwargs), lambda: fastgen.explain(model, **kwargs)):
        with pytest.raises(ValueError, match=message):
            call()


def test_what_is_no_token() -> None:
    model = zoo.build("mbart")
    with pytest.raises(TypeError, match=r"forced_bos_token_id=\[7.5, 8.0\] is no token"):
        model.generate(**zoo.batch(model, 2, 6), forced_bos_token_id=[7.5, 8.0], max_new_tokens=3)


def test_explain() -> None:
    model = zoo.build("m2m_100")
    kwargs = zoo.batch(model, len(LANGUAGES), 6) | METHODS["beams"]
    explained = fastgen.explain(model, **kwargs, forced_bos_token_id=LANGUAGES)
    assert explained == fastgen.explain(model, **kwargs, forced_bos_token_id=7)
    assert explained.plan is not None


def test_who_takes_one_token_alone() -> None:
    model = zoo.build("m2m_100")
    with pytest.raises(TypeError, match="a stream makes batches of its own"):
        fastgen.generate_stream(model, [[5, 6], [7, 8]], max_new_tokens=3, forced_bos_token_id=[7, 8])
    with pytest.raises(ValueError, match="one forced_bos_token_id for all"):
        model.generate(
            **zoo.batch(model, 2, 6), assistant_model=zoo.build("m2m_100", seed=1), lossless=True, max_new_tokens=3,
            forced_bos_token_id=[7, 8],
        )  # fmt: skip


def test_without_fastgen_transformers_is_as_it_was() -> None:
    fastgen.disable()
    try:
        processor = tf.ForcedBOSTokenLogitsProcessor([3, 4])
        left = processor(torch.ones(2, 1, dtype=torch.int64), torch.zeros(2, 6)).isfinite()
        assert left.tolist() == [[False, False, False, True, True, False]] * 2
    finally:
        fastgen.enable()
