"""Check `on_tokens`: the tokens of each sentence arrive as soon as they are final, in order."""

from typing import Any

import pytest
import torch

import fastgen
from fastgen import config
from fastgen.models.cuda_graphs import graph
from fastgen.models.runtime.decode_step import DecoderStep
from tests.patches.transformers.streaming.test_awaited import METHODS, SENTENCES, Clients
from tests.support import zoo
from tests.support.together import start_soon

OPTIONS = {name: options | {"num_return_sequences": None} for name, options in METHODS.items()}
OPTIONS["ending"] = {"max_new_tokens": 24, "eos_token_id": [2, *range(20, 50)], "pad_token_id": 0}


class Told:
    """Records the tokens of each sentence, and the steps at which they arrived."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.steps: dict[int, list[int]] = {}  # the steps at which tokens arrived
        self.step = 0

    def __call__(self, number: int, tokens: list[int]) -> None:
        assert tokens
        assert all(type(token) is int for token in tokens)
        self.tokens.setdefault(number, []).extend(tokens)
        self.steps.setdefault(number, []).append(self.step)


def _told(model: Any, options: dict[str, Any], **more: Any) -> tuple[Told, list[Any]]:
    told = Told()
    return told, list(fastgen.generate_stream(model, SENTENCES, on_tokens=told, **options, **more))


def _texts(model: Any, found: list[Any]) -> dict[int, list[int]]:
    starts = [1 if model.config.is_encoder_decoder else len(sentence) for sentence in SENTENCES]
    return {
        i: one[0, start:].tolist() for i, (one, start) in enumerate(zip(found, starts, strict=True))
    }


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Told]:
    """Return a list of recorders that are notified of each decode step."""
    step, listening = DecoderStep.__call__, list[Told]()

    def counted(self: DecoderStep, ids: torch.Tensor, context: Any) -> torch.Tensor:
        for told in listening:
            told.step += 1
        return step(self, ids, context)

    monkeypatch.setattr(DecoderStep, "__call__", counted)
    return listening


@pytest.mark.parametrize("method", OPTIONS)
@pytest.mark.parametrize("family", ["bart", "gpt2"])
def test_each_token_is_told_once_while_the_batch_runs(
    family: str, method: str, steps: list[Told]
) -> None:
    model, options = zoo.build(family), OPTIONS[method]
    expected = list(fastgen.generate_stream(model, SENTENCES, **options))
    told = Told()
    steps.append(told)
    found = list(fastgen.generate_stream(model, SENTENCES, on_tokens=told, **options))
    assert [one.tolist() for one in found] == [one.tolist() for one in expected]
    assert told.tokens == _texts(model, found)
    early = sum(step < told.step for steps in told.steps.values() for step in steps)
    assert early > len(SENTENCES), "what is told before the last step"
    if method in ("greedy", "ending"):
        for number, at in told.steps.items():
            assert at == list(range(at[0], at[0] + len(told.tokens[number]))), (
                "a token in each step"
            )


@pytest.mark.parametrize("method", ["beams", "early"])
def test_a_finished_text_is_told_to_its_end(method: str, steps: list[Told]) -> None:
    """Finished sentences are reported as such while others of their batch run on."""
    model = zoo.build("bart")
    told = Told()
    steps.append(told)
    options = (
        OPTIONS["early"]
        if method == "early"
        else OPTIONS[method] | {"eos_token_id": [2, *range(20, 40)]}
    )
    found = list(fastgen.generate_stream(model, SENTENCES, on_tokens=told, **options))
    assert told.tokens == _texts(model, found)
    last = {number: at[-1] for number, at in told.steps.items()}
    assert min(last.values()) < told.step - 2


def test_what_is_certain_is_what_a_text_alone_has(steps: list[Told]) -> None:
    """In beam search, each step of a batch streams for a sentence what it streams alone."""
    model, options = zoo.build("gpt2"), OPTIONS["beams"]
    together = Told()
    steps.append(together)
    list(fastgen.generate_stream(model, SENTENCES, on_tokens=together, **options))
    for number, sentence in enumerate(SENTENCES):
        steps[:] = [alone := Told()]
        list(fastgen.generate_stream(model, [sentence], on_tokens=alone, **options))
        assert alone.tokens[0] == together.tokens[number]
        early = [step for step in alone.steps[0] if step < alone.step]
        assert together.steps[number][: len(early)] == early


def test_a_device_that_works_ahead_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph.DelayedRead, "ready", property(lambda self: False))
    for method in ("beams", "early"):
        model = zoo.build("bart")
        told, found = _told(model, OPTIONS[method])
        assert told.tokens == _texts(model, found)


def test_samples() -> None:
    model, options = zoo.build("bart"), {"max_new_tokens": 8, "do_sample": True}
    torch.manual_seed(0)
    told, found = _told(model, options)
    assert told.tokens == _texts(model, found)


@pytest.mark.parametrize("method", METHODS)
def test_batches_that_refill(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, together, gone = zoo.build("bart"), start_soon(monkeypatch), (2, 4, 7)
    told, found = _told(model, OPTIONS[method], max_tokens=8, wanted=Clients(gone, 2))
    texts = _texts(model, found)
    assert max(together) > 1
    for number in set(texts) - set(gone):
        assert told.tokens[number] == texts[number]


def test_windows() -> None:
    model = zoo.build("gpt2")
    told, found = _told(model, OPTIONS["greedy"], window=3)
    assert told.tokens == _texts(model, found)


@pytest.mark.parametrize("beams", [1, 3])
def test_nothing_is_told_twice_where_memory_runs_out(
    beams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, options, step = (
        zoo.build("bart"),
        {"max_new_tokens": 12, "num_beams": beams},
        DecoderStep.__call__,
    )
    made = 0

    def short(self: DecoderStep, ids: torch.Tensor, context: Any) -> torch.Tensor:
        nonlocal made
        made += 1
        if made > 5 and len(ids) > 4 * beams:
            raise torch.OutOfMemoryError("out of memory")
        return step(self, ids, context)

    monkeypatch.setattr(DecoderStep, "__call__", short)
    told, found = _told(model, options)
    assert made > 12
    assert told.tokens == _texts(model, found)


def test_a_sentence_that_nobody_waits_for_is_told_no_more() -> None:
    model, clients = zoo.build("bart"), Clients((1, 6), 3)
    told, found = _told(model, OPTIONS["greedy"], wanted=clients)
    texts = _texts(model, found)
    assert len(told.tokens[1]) == len(told.tokens[6]) == 4
    assert {i: tokens for i, tokens in told.tokens.items() if i not in (1, 6)} == {
        i: tokens for i, tokens in texts.items() if i not in (1, 6)
    }


def test_loops_that_tell_nothing_are_told_at_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build("bart")
    with fastgen.disabled():
        told, found = _told(model, OPTIONS["beams"])
    assert told.tokens == _texts(model, found)
    assert {len(at) for at in told.steps.values()} == {1}
    monkeypatch.setenv("FASTGEN_PARITY", "1")
    config.reload()
    try:
        told, found = _told(model, OPTIONS["greedy"])
    finally:
        monkeypatch.undo()
        config.reload()
    assert told.tokens == _texts(model, found)


def test_several_sequences_are_refused() -> None:
    with pytest.raises(
        ValueError, match="on_tokens follows one text of a sentence, and num_return_sequences is 2"
    ):
        _told(zoo.build("bart"), METHODS["beams"])
