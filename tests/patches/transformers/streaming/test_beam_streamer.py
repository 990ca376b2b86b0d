"""Check streamers in beam search: a token arrives as soon as it is final, and no sooner."""

import itertools
import threading
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
import transformers as tf
from transformers import TextIteratorStreamer, TextStreamer
from transformers.generation.streamers import BaseStreamer

import fastgen
from fastgen.decoding.search.beam_search import BeamSearch
from fastgen.models.cuda_graphs import graph
from tests.fuzz import tokenizer
from tests.patches.transformers.bild.test_bild_transformers import pair
from tests.support import zoo
from tests.support.parity import fallbacks, notes

NAME = "transformers.beam_streamer"
REFUSED = "`streamer` cannot be used with beam search"


class Heard(BaseStreamer):
    """Records the prompt and the tokens after it."""

    def __init__(self) -> None:
        self.prompt: list[int] | None = None
        self.tokens: list[int] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        assert value.device.type == "cpu"
        assert not self.ended
        if self.prompt is None:
            assert value.shape[0] == 1
            self.prompt = value[0].tolist()
            return
        assert value.dim() == 1
        assert len(value), "a put of nothing"
        self.tokens += value.tolist()

    def end(self) -> None:
        self.ended += 1

    @property
    def text(self) -> list[int]:
        assert self.prompt is not None
        return self.prompt + self.tokens


def _common(search: BeamSearch) -> list[int]:
    """Return the common prefix of all texts that may still be returned, or their ancestors."""
    texts: list[list[int]] = search.ids[0, :, : search.length].tolist()
    finished, prompt = search.finished, search.prompt.shape[1]
    scores = finished.scores[0].tolist()
    for beam, done in enumerate(finished.done[0].tolist()):
        if done and scores[beam] == scores[0]:
            length = prompt + sum(row >= 0 for row in finished.beams[0, beam].tolist())
            texts.append(finished.ids[0, beam, :length].tolist())
    alike = itertools.takewhile(lambda tokens: len(set(tokens)) == 1, zip(*texts, strict=False))
    return [tokens[0] for tokens in alike]


class Recorder:
    """Records the streamed text and the final prefix after each step of a beam search."""

    def __init__(self, heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[tuple[list[int], list[int]]] = []
        advance = BeamSearch.advance

        def recorded(search: BeamSearch, model: Any, logits: torch.Tensor) -> bool:
            goes_on = advance(search, model, logits)
            if goes_on:
                self.steps.append((heard.text, _common(search)))
            return goes_on

        monkeypatch.setattr(BeamSearch, "advance", recorded)


def _options(r: Random) -> dict[str, Any]:
    new = r.choice([1, 9, 24])
    return {
        "num_beams": r.choice([2, 3, 4, 5]),
        "max_new_tokens": new,
        "early_stopping": r.choice([True, False, "never"]),
        "length_penalty": r.choice([-1.0, 0.0, 0.6, 1.0, 2.0]),
        "eos_token_id": r.choice([zoo.EOS, r.sample(range(2, 60), 3), list(range(2, 40))]),
        "no_repeat_ngram_size": r.choice([0, 0, 2, 3]),
        "min_new_tokens": r.choice([None, min(new, 5)]),
        "do_sample": r.random() < 0.2,
        "prefix_allowed_tokens_fn": r.choice(
            [None, lambda _, ids: [4 + len(ids) % 5, 20, 30, zoo.EOS]]
        ),
        "return_dict_in_generate": r.random() < 0.3,
        "output_scores": True,
    }


@pytest.mark.parametrize("family", ["gpt2", "bart", "t5"])
def test_what_is_certain_is_heard_at_once(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With random options, the streamed text equals the stable prefix after every step."""
    early = 0
    for seed in range(12):
        r = Random(seed)
        model = zoo.build(family, seed=seed)
        call = zoo.batch(model, 1, r.choice([1, 6]), seed=seed) | _options(r)
        torch.manual_seed(seed)
        with fastgen.disabled():
            stock = model.generate(**call)
        heard = Heard()
        with monkeypatch.context() as patch:
            recorder = Recorder(heard, patch)
            torch.manual_seed(seed)
            ours = model.generate(**call, streamer=heard)
        if call["return_dict_in_generate"]:
            assert torch.equal(ours.sequences_scores, stock.sequences_scores), seed
            ours, stock = ours.sequences, stock.sequences
        assert torch.equal(ours, stock), seed
        assert (heard.text, heard.ended) == (stock[0].tolist(), 1), seed
        for text, common in recorder.steps:
            assert text == common, seed
            early += len(text) > len(heard.prompt or [])
    assert early > 20


def test_a_device_that_works_ahead_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stable prefix of one step is then streamed after the next."""
    monkeypatch.setattr(graph.DelayedRead, "ready", property(lambda self: False))
    model, heard = zoo.build("gpt2"), Heard()
    recorder = Recorder(heard, monkeypatch)
    found = model.generate(**zoo.batch(model, 1, 6), num_beams=3, max_new_tokens=24, streamer=heard)
    assert heard.text == found[0].tolist()
    texts, common = zip(*recorder.steps, strict=True)
    assert texts == (heard.prompt, *common[:-1])
    assert texts != common


def test_texts() -> None:
    """transformers' own streamers print and forward the text of the result."""
    model, words = zoo.build("bart"), tokenizer()
    call = zoo.batch(model, 1, 6) | {
        "num_beams": 4,
        "max_new_tokens": 20,
        "no_repeat_ngram_size": 2,
    }
    pieces = TextIteratorStreamer(words, skip_prompt=True, timeout=60)
    thread = threading.Thread(target=model.generate, kwargs=call | {"streamer": pieces})
    thread.start()
    heard = list(pieces)
    thread.join()
    text = words.decode(model.generate(**call)[0, 1:])
    assert "".join(heard) == text
    assert sum(map(bool, heard)) > 3


def test_printed(capsys: pytest.CaptureFixture[str]) -> None:
    model, words = zoo.build("gpt2"), tokenizer()
    call = zoo.batch(model, 1, 6) | {"num_beams": 2, "max_new_tokens": 9}
    found = model.generate(
        **call, generation_config=tf.GenerationConfig(num_beams=3), streamer=TextStreamer(words)
    )
    assert capsys.readouterr().out == words.decode(found[0]) + "\n"


def test_prompt_as_embeddings() -> None:
    model, heard = zoo.build("llama"), Heard()
    embeds = model.get_input_embeddings()(zoo.batch(model, 1, 6)["input_ids"]).detach()
    found = model.generate(inputs_embeds=embeds, num_beams=3, max_new_tokens=9, streamer=heard)
    assert (heard.prompt, heard.text) == ([], found[0].tolist())


def test_drafted_steps() -> None:
    """The same holds when a small model drafts the steps of the search."""
    large, small = pair("bart")
    call = zoo.batch(large, 1, 6) | {"num_beams": 3, "max_new_tokens": 20}
    heard = Heard()
    drafted = large.generate(
        **call, assistant_model=small, lossless=True, speculative_beams=True, streamer=heard
    )
    assert torch.equal(drafted, large.generate(**call))
    assert (heard.text, heard.ended) == (drafted[0].tolist(), 1)


@pytest.mark.parametrize(
    ("sentences", "options", "message"),
    [
        (2, {}, "a streamer follows one text, and the batch has 2"),
        (
            1,
            {"num_return_sequences": 2},
            "a streamer follows one text, and num_return_sequences is 2",
        ),
    ],
)
def test_one_text_is_followed(sentences: int, options: dict[str, Any], message: str) -> None:
    model, heard = zoo.build("gpt2"), Heard()
    call = (
        zoo.batch(model, sentences, 6)
        | {"num_beams": 3, "max_new_tokens": 4, "streamer": heard}
        | options
    )
    for run in (model.generate, lambda **kwargs: fastgen.explain(model, **kwargs)):
        with pytest.raises(ValueError, match=message):
            run(**call)
    assert heard.prompt is None


def test_counted_and_explained() -> None:
    model, heard = zoo.build("gpt2"), Heard()
    call = zoo.batch(model, 1, 6) | {"num_beams": 3, "max_new_tokens": 4, "streamer": heard}
    plan = fastgen.explain(model, **call)
    assert plan.plan is not None
    assert plan.plan.method == "beam search"
    assert notes(plan) == [], "one sentence: there is none that could leave"
    assert heard.prompt is None
    served, fell = fastgen.status()[NAME].hits, fallbacks()
    model.generate(**call)
    assert fastgen.status()[NAME].hits == served + 1
    assert fallbacks() == fell


def _mamba() -> Any:
    shape: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    return tf.MambaForCausalLM(tf.MambaConfig(vocab_size=zoo.VOCABULARY, **shape))


class _OwnBeams(tf.GPT2LMHeadModel):
    def _beam_search(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("ran")


@pytest.mark.parametrize(
    ("build", "options", "reason"),
    [
        (_mamba, {}, "MambaForCausalLM keeps other state than keys and values"),
        (lambda: _OwnBeams(zoo.build("gpt2").config), {}, "_OwnBeams has a beam search of its own"),
        (lambda: zoo.build("gpt2"), {"synced_gpus": True}, "synced_gpus=True"),
    ],
    ids=["family", "class", "call"],
)
def test_refused_as_in_transformers(build: Any, options: dict[str, Any], reason: str) -> None:
    """With transformers' own beam search, transformers raises its error about streamers."""
    model, heard = build(), Heard()
    call = (
        zoo.batch(model, 1, 6) | {"num_beams": 3, "max_new_tokens": 4, "streamer": heard} | options
    )
    before = fastgen.status()[NAME].fallbacks.get(reason, 0)
    with pytest.raises(ValueError, match=REFUSED):
        model.generate(**call)
    assert fastgen.status()[NAME].fallbacks[reason] == before + 1
    assert heard.prompt is None


@pytest.fixture
def off() -> Iterator[None]:
    fastgen.disable()
    yield
    fastgen.enable()


def test_off(off: None) -> None:
    model, heard = zoo.build("gpt2"), Heard()
    call = zoo.batch(model, 1, 6) | {"num_beams": 3, "max_new_tokens": 4, "streamer": heard}
    with pytest.raises(ValueError, match=REFUSED):
        model.generate(**call)
    fastgen.enable()
    with fastgen.disabled(), pytest.raises(ValueError, match=REFUSED):
        model.generate(**call)
    assert heard.prompt is None
