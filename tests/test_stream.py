"""`fastgen.generate_stream`: what `generate` gives for each sentence by itself, in order, whatever the batches are."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fastgen
from tests import zoo

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 9},
    "beams": {"max_new_tokens": 9, "num_beams": 3, "num_return_sequences": 2, "no_repeat_ngram_size": 2},
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
            fastgen.generate_stream(model, sentences, max_tokens=max_tokens, window=window, **OPTIONS[options])
        )
        assert [sequences.tolist() for sequences in found] == [sequences.tolist() for sequences in alone]


def test_order_is_that_of_the_inputs() -> None:
    model, sentences = zoo.build("bart"), _sentences(17)
    order = torch.randperm(17, generator=torch.Generator().manual_seed(3)).tolist()
    found = list(fastgen.generate_stream(model, sentences, max_tokens=30, max_new_tokens=6))
    moved = list(fastgen.generate_stream(model, [sentences[i] for i in order], max_tokens=30, max_new_tokens=6))
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


def test_batches_are_full_and_no_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    model, shapes = zoo.build("bart"), list[tuple[int, ...]]()
    generate = model.generate

    def noted(input_ids: torch.Tensor, **kwargs: Any) -> Any:
        shapes.append(tuple(input_ids.shape))
        return generate(input_ids=input_ids, **kwargs)

    monkeypatch.setattr(model, "generate", noted)
    list(fastgen.generate_stream(model, [[9] * n for n in (3, 8, 1, 8, 2, 20)], max_tokens=16, max_new_tokens=2))
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


def test_a_decoder_needs_a_number_of_new_tokens() -> None:
    with pytest.raises(TypeError, match="max_new_tokens"):
        fastgen.generate_stream(zoo.build("gpt2"), [[4]], max_length=9)
    with pytest.raises(TypeError, match="min_length = 5"):
        fastgen.generate_stream(zoo.build("gpt2"), [[4]], max_new_tokens=9, min_length=5)
