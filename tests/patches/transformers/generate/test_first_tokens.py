"""Check `forced_bos_token_id` as a list.

Each sentence of a batch has the output that it has alone, with its own token.
"""

import copy
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

import fastgen
from fastgen import config
from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.patches.transformers.generate.report import last_call
from tests.support import zoo
from tests.support.parity import assert_same, fallbacks, hits, left_off
from tests.support.recorder import Graphs
from tests.support.together import start_soon

FAMILIES = ["m2m_100", "mbart"]  # NLLB is an m2m_100, mBART-50 an mbart
LANGUAGES = [7, 50, 7, 90, 31]
ENDS = {"eos_token_id": [2, *range(20, 40)], "pad_token_id": 5}
METHODS: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 12},
    "beams": {"num_beams": 4, "max_new_tokens": 12},
    "early": {
        "num_beams": 3,
        "max_new_tokens": 20,
        "early_stopping": True,
        "eos_token_id": list(range(2, 30)),
    },
    "transforms": {
        "num_beams": 3,
        "max_new_tokens": 12,
        "no_repeat_ngram_size": 2,
        "min_length": 4,
        "suppress_tokens": [9],
    },
    "hypotheses": {
        "num_beams": 4,
        "num_return_sequences": 3,
        "max_new_tokens": 9,
        "length_penalty": 0.4,
    },
    "two tokens": {"num_beams": 2, "max_length": 3, "forced_eos_token_id": 2},
}


def _alone(model: Any, inputs: dict[str, Tensor], options: dict[str, Any]) -> list[Tensor]:
    """Return the output of unpatched transformers for each sentence with its language."""
    with fastgen.disabled():
        return [
            model.generate(
                **{name: value[i : i + 1] for name, value in inputs.items()},
                **options,
                forced_bos_token_id=t,
            )
            for i, t in enumerate(LANGUAGES)
        ]


def _assert_together(
    model: Any, inputs: dict[str, Tensor], options: dict[str, Any], languages: Any = LANGUAGES
) -> None:
    """Assert that a batch has the output of its single sentences, except for padding."""
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
@pytest.mark.slow
def test_kernels_and_captured_choices(beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTGEN_OPS", "triton")
    config.reload()
    try:
        graphs, model = Graphs(monkeypatch), zoo.build("m2m_100", torch.float32)
        kwargs = zoo.batch(model, 2, 5) | {
            "num_beams": beams,
            "max_new_tokens": 13,
            "min_new_tokens": 13,
        }
        for _ in range(2):
            kwargs |= {"forced_bos_token_id": LANGUAGES[:2], "no_repeat_ngram_size": 3}
            assert assert_same(model, kwargs, tolerance=1e-4).error is None
        assert graphs.replayed["_select_tokens"] > 0
    finally:
        monkeypatch.undo()
        config.reload()


@pytest.mark.parametrize(
    "languages", [tuple(LANGUAGES), torch.tensor(LANGUAGES)], ids=["tuple", "tensor"]
)
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
    """Run transformers' own loops, alone and after a fallback, and parity mode; compare scores."""
    model = zoo.build("m2m_100")
    kwargs = (
        zoo.batch(model, len(LANGUAGES), 6) | METHODS[method] | {"forced_bos_token_id": LANGUAGES}
    )
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
    kwargs = zoo.batch(model, len(LANGUAGES), 6) | {
        "do_sample": True,
        "num_return_sequences": 2,
        "max_new_tokens": 4,
    }
    found = assert_same(model, kwargs | {"forced_bos_token_id": LANGUAGES}).value
    assert found[:, 1].tolist() == [token for token in LANGUAGES for _ in range(2)]


def test_one_token_in_a_list_is_for_all() -> None:
    """transformers behaves the same."""
    model = zoo.build("m2m_100")
    kwargs = zoo.batch(model, 3, 6) | METHODS["beams"] | {"forced_bos_token_id": [7]}
    assert assert_same(model, kwargs).value[:, 1].tolist() == [7, 7, 7]


def test_halves_have_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """When memory runs out, the list is split with its sentences."""
    model = zoo.build("m2m_100")
    step = DecoderStep.__call__

    def short(self: DecoderStep, ids: Tensor, context: Any) -> Tensor:
        if len(ids) > 9:
            raise torch.OutOfMemoryError("out of memory")
        return step(self, ids, context)

    monkeypatch.setattr(DecoderStep, "__call__", short)
    inputs = zoo.batch(model, len(LANGUAGES), 6)
    _assert_together(model, inputs, METHODS["transforms"])
    settings = copy.deepcopy(model.generation_config)
    settings.forced_bos_token_id = LANGUAGES
    with pytest.raises(torch.OutOfMemoryError):  # only a list passed as an argument is split
        model.generate(**inputs, **METHODS["transforms"], generation_config=settings)


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


def test_big_little_decoding_takes_one_token_alone() -> None:
    model = zoo.build("m2m_100")
    with pytest.raises(ValueError, match="one forced_bos_token_id for all"):
        model.generate(
            **zoo.batch(model, 2, 6), assistant_model=zoo.build("m2m_100", seed=1), lossless=True,
            max_new_tokens=3, forced_bos_token_id=[7, 8],
        )  # fmt: skip


STREAMED = {
    "greedy": ENDS | {"max_new_tokens": 14},
    "beams": ENDS | {"num_beams": 4, "max_new_tokens": 14},
}


def _sentences(count: int) -> tuple[list[list[int]], list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 12, (count,), generator=generator).tolist()
    sentences = [
        torch.randint(40, zoo.VOCABULARY, (n,), generator=generator).tolist() for n in lengths
    ]
    return sentences, [LANGUAGES[i % len(LANGUAGES)] for i in range(count)]


def _streamed_alone(
    model: Any, sentences: list[list[int]], first: list[int], options: dict[str, Any]
) -> list[Any]:
    """Return the output of unpatched transformers for each sentence of a stream."""
    with fastgen.disabled():
        return [
            next(fastgen.generate_stream(model, [s], scores=True, **options, forced_bos_token_id=t))
            for s, t in zip(sentences, first, strict=True)
        ]


@pytest.mark.parametrize("method", STREAMED)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_stream_has_one_for_each_sentence(
    family: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches mix languages and refill."""
    together = start_soon(monkeypatch)
    model, options = zoo.build(family), STREAMED[method]
    sentences, first = _sentences(40)
    expected = _streamed_alone(model, sentences, first, options)
    found = list(
        fastgen.generate_stream(
            model,
            iter(sentences),
            max_tokens=60,
            window=30,
            scores=True,
            **options,
            forced_bos_token_id=iter(first),
        )
    )
    assert [one.sequences.tolist() for one in found] == [one.sequences.tolist() for one in expected]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.scores.double(), theirs.scores.double(), atol=1e-9, rtol=0)
    assert max(together) > 1


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor, iter])
def test_streams_take_any_kind_and_mix_them_in_a_batch(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, forced = zoo.build("m2m_100"), list[Any]()
    generate = type(model).generate
    monkeypatch.setattr(
        type(model),
        "generate",
        lambda *a, **k: (forced.append(k["forced_bos_token_id"]), generate(*a, **k))[1],
    )
    sentences, first = [[40, 41], [42, 43], [44, 45], [46]], [7, 50, 7, 7]
    stream = fastgen.generate_stream(
        model, sentences, max_tokens=6, max_new_tokens=1, forced_bos_token_id=kind(first)
    )
    assert [int(ids[0, 1]) for ids in stream] == first
    assert forced == [[7, 50, 7], 7]


@pytest.mark.parametrize("why", ["the patch is off", "a small model drafts"])
def test_batches_of_one_language_where_they_cannot_mix(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, options = zoo.build("m2m_100"), {"max_new_tokens": 6}
    sentences, first = _sentences(9)
    expected = [one.sequences for one in _streamed_alone(model, sentences, first, options)]
    if why == "the patch is off":
        fastgen.disable()
    else:
        options |= {"assistant_model": zoo.build("m2m_100", seed=1), "lossless": True}
    try:
        found = list(
            fastgen.generate_stream(model, sentences, **options, forced_bos_token_id=first)
        )
    finally:
        fastgen.enable()
    assert [ids.tolist() for ids in found] == [ids.tolist() for ids in expected]


@pytest.mark.parametrize(("tokens", "yielded"), [(3, 0), (5, 4), (9, 8)])
def test_a_stream_of_fewer_tokens_or_more_than_sentences(tokens: int, yielded: int) -> None:
    """The error precedes the results of its window, and nothing is read ahead of it."""
    model, read = zoo.build("m2m_100"), list[int]()
    first = (read.append(i) or 7 for i in range(tokens))
    stream = fastgen.generate_stream(
        model, [[40 + i] for i in range(8)], window=4, max_new_tokens=2, forced_bos_token_id=first
    )
    assert read == []
    found = list[Any]()
    with pytest.raises(
        ValueError,
        match=f"{tokens} tokens, and there are more" if tokens < 8 else "more tokens than",
    ):
        found.extend(stream)  # keeps the items that precede the error
    assert (len(found), len(read)) == (yielded, tokens)


@pytest.mark.parametrize(
    ("forced", "error", "shown"),
    [
        (["de", "fr"], TypeError, "forced_bos_token_id has 'de', which is no token"),
        (torch.tensor([7.5, 8.0]), TypeError, "forced_bos_token_id has 7.5, which is no token"),
        ([7, None], TypeError, "forced_bos_token_id has None, which is no token"),
        ([7, 4000], ValueError, "forced_bos_token_id has 4000, and the vocabulary 96 tokens"),
        ("de", TypeError, "forced_bos_token_id='de' is no token, nor one for each sentence"),
    ],
)
def test_what_is_no_token_of_a_stream(forced: Any, error: type[Exception], shown: str) -> None:
    with pytest.raises(error, match=shown):
        next(
            fastgen.generate_stream(
                zoo.build("mbart"), [[5, 6], [7]], max_new_tokens=3, forced_bos_token_id=forced
            )
        )


def test_without_fastgen_transformers_is_as_it_was() -> None:
    fastgen.disable()
    try:
        processor = tf.ForcedBOSTokenLogitsProcessor([3, 4])
        left = processor(torch.ones(2, 1, dtype=torch.int64), torch.zeros(2, 6)).isfinite()
        assert left.tolist() == [[False, False, False, True, True, False]] * 2
    finally:
        fastgen.enable()
