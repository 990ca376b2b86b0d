"""Check `fastgen.generate_stream`.

It yields, in order, what `generate` gives for each sentence by itself, in any batching.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

import fastgen
from fastgen.patches.transformers.generate import searches as loops
from tests.support import zoo

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 9},
    "beams": {
        "max_new_tokens": 9,
        "num_beams": 3,
        "num_return_sequences": 2,
        "no_repeat_ngram_size": 2,
    },
    "single tokens": {"max_new_tokens": 9, "no_repeat_ngram_size": 1, "pad_token_id": 2},
    "ends": {"max_new_tokens": 9, "num_beams": 2, "eos_token_id": [2, 7, 9, 30], "pad_token_id": 5},
}


def _sentences(count: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 12, (count,), generator=generator).tolist()
    return [torch.randint(10, zoo.VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("family", ["bart", "t5", "gpt2", "llama"])
def test_each_sentence_as_by_itself(family: str, options: str) -> None:
    model, sentences = zoo.build(family), _sentences(23)
    alone = [model.generate(input_ids=torch.tensor([s]), **OPTIONS[options]) for s in sentences]
    for max_tokens, window in ((40, 7), (1, 5), (4096, 1024), (40, 1)):
        found = list(
            fastgen.generate_stream(
                model, sentences, max_tokens=max_tokens, window=window, **OPTIONS[options]
            )
        )
        assert [sequences.tolist() for sequences in found] == [
            sequences.tolist() for sequences in alone
        ]


def test_order_is_that_of_the_inputs() -> None:
    model, sentences = zoo.build("bart"), _sentences(17)
    order = torch.randperm(17, generator=torch.Generator().manual_seed(3)).tolist()
    found = list(fastgen.generate_stream(model, sentences, max_tokens=30, max_new_tokens=6))
    moved = list(
        fastgen.generate_stream(
            model, [sentences[i] for i in order], max_tokens=30, max_new_tokens=6
        )
    )
    assert [found[i].tolist() for i in order] == [sequences.tolist() for sequences in moved]


def test_reads_no_further_than_the_window() -> None:
    read: list[int] = []

    def inputs() -> Iterator[list[int]]:
        for number, sentence in enumerate(_sentences(20)):
            read.append(number)
            yield sentence

    stream = fastgen.generate_stream(zoo.build("bart"), inputs(), window=6, max_new_tokens=3)
    assert read == []
    next(stream)
    assert read == list(range(6))


def test_a_limit_by_the_longest_sentence_of_a_batch() -> None:
    model, sentences = zoo.build("bart"), [[5] * length for length in (3, 9, 4, 8)]
    given: dict[str, Any] = {"num_beams": 2, "eos_token_id": None, "forced_eos_token_id": None}
    found = fastgen.generate_stream(
        model, sentences, max_tokens=18, max_new_tokens=lambda length: length + 1, **given
    )
    assert [one.shape[1] - 1 for one in found] == [5, 10, 5, 10]


def test_batches_are_full_and_no_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    model, shapes = zoo.build("bart"), list[tuple[int, ...]]()
    generate = model.generate

    def noted(input_ids: torch.Tensor, **kwargs: Any) -> Any:
        shapes.append(tuple(input_ids.shape))
        return generate(input_ids=input_ids, **kwargs)

    monkeypatch.setattr(model, "generate", noted)
    list(
        fastgen.generate_stream(
            model, [[9] * n for n in (3, 8, 1, 8, 2, 20)], max_tokens=16, max_new_tokens=2
        )
    )
    assert shapes == [(1, 20), (2, 8), (3, 3)]


@pytest.mark.parametrize(
    ("inputs", "options", "error", "shown"),
    [
        ([[]], {}, ValueError, r"shape \(0,\)"),
        ([[[4, 5]]], {}, ValueError, r"shape \(1, 2\)"),
        ([[4]], {"max_tokens": 0}, ValueError, "max_tokens = 0"),
        ([[4]], {"window": -1}, ValueError, "window = -1"),
        ([[4]], {"return_dict_in_generate": True}, TypeError, "return_dict_in_generate=True"),
        ([[4]], {"attention_mask": torch.ones(1, 1)}, TypeError, "attention_mask"),
        ([[4]], {"encoder_outputs": ()}, TypeError, "encoder_outputs"),
        ([[4]], {"stop_strings": ["a"]}, TypeError, "stop_strings"),
        ([[4.5]], {}, TypeError, "float"),
        (["text"], {}, TypeError, "a str"),
        ([{"input_ids": [4]}], {}, TypeError, "a dict"),
    ],
)
def test_errors(inputs: Any, options: dict[str, Any], error: type[Exception], shown: str) -> None:
    with pytest.raises(error, match=shown):
        list(fastgen.generate_stream(zoo.build("bart"), inputs, max_new_tokens=3, **options))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_penalty_does_not_see_padding(family: str) -> None:
    """The padding is an end of sequence here, so a penalty on it would show."""
    model, sentences = zoo.build(family), _sentences(24)
    options = {
        "eos_token_id": [2, 7, 9],
        "pad_token_id": 9,
        "max_new_tokens": 20,
        "repetition_penalty": 3.0,
    }
    with fastgen.disabled():
        expected = [
            model.generate(input_ids=torch.tensor([one]), **options).tolist() for one in sentences
        ]
    assert [
        one.tolist() for one in fastgen.generate_stream(model, sentences, **options)
    ] == expected


@pytest.mark.parametrize("bad", [0, 1, 4, 7])
@pytest.mark.parametrize("kind", ["sentence", "iterator"])
def test_what_was_read_before_an_error_is_not_lost(kind: str, bad: int) -> None:
    sentences, model = _sentences(9), zoo.build("bart")

    def inputs() -> Iterator[list[int]]:
        for number, sentence in enumerate(sentences):
            if number == bad and kind == "iterator":
                raise OSError("the disk is gone")
            yield [] if number == bad else sentence

    expected = list(fastgen.generate_stream(model, sentences[:bad], max_new_tokens=5))
    stream = fastgen.generate_stream(model, inputs(), window=4, max_new_tokens=5)
    found = [next(stream) for _ in range(bad)]
    assert [one.tolist() for one in found] == [one.tolist() for one in expected]
    with pytest.raises(
        OSError if kind == "iterator" else ValueError, match=r"the disk is gone|shape \(0,\)"
    ):
        next(stream)


def test_a_decoder_needs_a_number_of_new_tokens() -> None:
    with pytest.raises(TypeError, match="max_new_tokens"):
        fastgen.generate_stream(zoo.build("gpt2"), [[4]], max_length=9)
    with pytest.raises(TypeError, match="min_length = 5"):
        fastgen.generate_stream(zoo.build("gpt2"), [[4]], max_new_tokens=9, min_length=5)


SCORED: dict[str, dict[str, Any]] = OPTIONS | {
    "greedy, that ends": {
        "max_new_tokens": 12,
        "eos_token_id": list(range(2, 40)),
        "pad_token_id": 0,
    },
    "a penalty": {
        "max_new_tokens": 7,
        "num_beams": 3,
        "length_penalty": 0.3,
        "early_stopping": True,
    },
}


def _scores_of_transformers(
    model: Any, sentence: list[int], options: dict[str, Any]
) -> torch.Tensor:
    """Return the scores of unpatched transformers for the sequences of one sentence."""
    with fastgen.disabled():
        found = model.generate(
            input_ids=torch.tensor([sentence]),
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    if "num_beams" in options:
        return found.sequences_scores
    each = model.compute_transition_scores(found.sequences, found.scores, normalize_logits=True)
    # A single row has no padding after it.
    tokens = found.sequences[0, -len(found.scores) :]
    chosen = [
        scores.log_softmax(-1)[0, token] for scores, token in zip(found.scores, tokens, strict=True)
    ]
    torch.testing.assert_close(torch.stack(chosen), each[0])
    return torch.stack(chosen).double().sum().reshape(1)


class _Asks(LogitsProcessor):
    """A user's processor that calls `generate` of the same model."""

    def __init__(self, model: Any, inputs: dict[str, Any]) -> None:
        self.model, self.inputs, self.found = model, inputs, list[Any]()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.found.append(self.model.generate(**self.inputs, max_new_tokens=4))
        return scores


@pytest.mark.parametrize("beams", [1, 3])
def test_a_call_within_a_stream_is_asked_for_nothing(beams: int) -> None:
    """It is asked neither for scores nor for cancellation."""
    model = zoo.build("bart")
    inputs = zoo.batch(model, 5, 6)
    expected = model.generate(**inputs, max_new_tokens=4)
    asks = _Asks(model, inputs)
    sentences = [row.tolist() for row in zoo.batch(model, 2, 5, "none")["input_ids"]]
    options: dict[str, Any] = {"num_beams": beams, "max_new_tokens": 3, "logits_processor": [asks]}
    made = fastgen.generate_stream(
        model, sentences, scores=True, wanted=lambda number: True, **options
    )
    assert len(list(made)) == 2
    assert asks.found
    assert all(isinstance(one, torch.Tensor) and torch.equal(one, expected) for one in asks.found)


@pytest.mark.parametrize("options", SCORED)
@pytest.mark.parametrize("family", ["bart", "t5", "gpt2", "llama"])
def test_scores_are_those_of_transformers(family: str, options: str) -> None:
    model, sentences = zoo.build(family), _sentences(23)
    alone = [_scores_of_transformers(model, sentence, SCORED[options]) for sentence in sentences]
    plain = list(
        fastgen.generate_stream(model, sentences, max_tokens=40, window=7, **SCORED[options])
    )
    loop = "transformers.beam_search" if "num_beams" in SCORED[options] else "transformers.sample"
    before = fastgen.status()[loop].hits
    found = list(
        fastgen.generate_stream(
            model, sentences, max_tokens=40, window=7, scores=True, **SCORED[options]
        )
    )
    assert fastgen.status()[loop].hits > before
    with fastgen.disabled():
        stock = list(
            fastgen.generate_stream(
                model, sentences, max_tokens=40, window=7, scores=True, **SCORED[options]
            )
        )
    for (sequences, scores), same, mine, expected in zip(found, stock, plain, alone, strict=True):
        assert sequences.tolist() == mine.tolist() == same.sequences.tolist()
        torch.testing.assert_close(scores.double(), expected.double(), atol=1e-9, rtol=0)
        torch.testing.assert_close(same.scores.double(), expected.double(), atol=1e-9, rtol=0)


def test_scores_where_transformers_own_loop_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batch shows that fastgen's loop does not run; later ones are generated once."""
    model, calls = zoo.build("bart"), list[bool]()
    # causes a fallback
    monkeypatch.setattr(type(model), "_reorder_cache", lambda *_: None, raising=False)
    sentences = [[9, 8, 7], [5, 6], [4, 4, 4, 4]]
    forward = type(model).forward

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(True)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", noted)
    found = list(
        fastgen.generate_stream(
            model, sentences, max_tokens=4, scores=True, max_new_tokens=1, do_sample=False
        )
    )
    assert len(calls) == 1 + len(sentences)
    for sentence, (_, scores) in zip(sentences, found, strict=True):
        expected = _scores_of_transformers(model, sentence, {"max_new_tokens": 1})
        torch.testing.assert_close(scores, expected, atol=1e-9, rtol=0)


def test_scores_keep_none_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build("bart")
    traces = list[Any]()
    for loop in ("BeamSearch", "Sampling"):
        kind = getattr(loops, loop)
        monkeypatch.setattr(
            loops, loop, lambda kind=kind, **given: traces.append(given["trace"]) or kind(**given)
        )
    for beams in (1, 2):
        list(
            fastgen.generate_stream(model, [[5, 6]], scores=True, max_new_tokens=4, num_beams=beams)
        )
    assert [(trace.scores, trace.logits) for trace in traces] == [(None, None)] * 2
