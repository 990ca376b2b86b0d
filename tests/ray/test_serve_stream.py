"""Streaming: pieces add up to the text, events are as documented, and batches are merged."""

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="needs fastgen[ray]")
import tokenizers as tk
import torch
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fastgen.corpus.texts import Sequences, TextGenerator
from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.ray.server.answers import Answer
from fastgen.ray.server.api import Api
from fastgen.ray.server.metrics import Metrics, exposition
from fastgen.ray.server.streaming import DONE, Pieces
from fastgen.ray.settings import Settings
from tests.ray.test_serve import GENERATION, LIMITS, MODEL, TEXTS, _until

TRICKY = [
    "Return the list, won't you?", "¿Qué tal?  Dos  espacios.", "naïve café — ½ × 3 ≠ 1",
    "日本語のテキスト と 中文。", "👩‍👩‍👧‍👦 family 🇪🇸 and 🎉🎉", "line\nbreaks\n\nand\ttabs",
    "it 's , . ! n't 've", "x" * 40 + " " + "ab " * 30,
]  # fmt: skip


UNKNOWN = ["<unk>"]


def _bytes() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, like GPT-2's for rare characters."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made = tk.Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(byte_level.alphabet()))}, merges=[])
    )
    made.pre_tokenizer, made.decoder = byte_level, decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


def _trained(kind: str) -> PreTrainedTokenizerFast:
    small: dict[str, Any] = {"vocab_size": 300, "special_tokens": UNKNOWN}
    if kind == "unigram":
        made, trainer = (
            tk.Tokenizer(models.Unigram()),
            trainers.UnigramTrainer(unk_token="<unk>", **small),
        )
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    else:
        made, trainer = (
            tk.Tokenizer(models.WordPiece(unk_token="<unk>")),
            trainers.WordPieceTrainer(**small),
        )
        made.pre_tokenizer, made.decoder = (
            pre_tokenizers.BertPreTokenizer(),
            decoders.WordPiece(cleanup=False),
        )
    made.train_from_iterator([*TEXTS, *TRICKY], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="<end>")


TOKENIZERS = {
    "model": lambda: AutoTokenizer.from_pretrained(MODEL), "bytes": _bytes,
    "unigram": lambda: _trained("unigram"), "wordpiece": lambda: _trained("wordpiece"),
}  # fmt: skip


@pytest.mark.parametrize("cleans", [False, True])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_pieces_are_the_text(kind: str, cleans: bool) -> None:
    """For any tokenizer, pieces of single tokens are final and break no character or space."""
    tokenizer = TOKENIZERS[kind]()

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=cleans)

    for text in [*TRICKY, *TEXTS]:
        ids = tokenizer(text)["input_ids"]
        whole = decode(ids).strip()
        pieces = Pieces(decode, cleans)
        heard = [pieces.add([token]) for token in ids]
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in heard)
        assert "".join(heard) == pieces.sent == whole[: len(pieces.sent)]
        assert len(whole) - len(pieces.sent) <= 12, "what is held back"
        assert "".join([*heard, pieces.end(whole)]) == whole
        if len(ids) > 12:
            assert sum(map(bool, heard)) > len(whole.split()) / 2
    assert Pieces(decode).add([]) == ""


@pytest.fixture(scope="module")
def api() -> Api:
    return Api(
        Settings(
            model=MODEL, name="en-es", dtype="float64", generation=GENERATION, linger=0.05, **LIMITS
        ),
        "r1",
    )


def _run(api: Api, asked: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine, and keep the event loop until the last batch ends.

    A stream may end before its batch.
    """

    async def run() -> Any:
        found = await asked
        await _until(lambda: api.batcher._task is None)
        return found

    return asyncio.run(run())


async def _call(api: Api, path: str = "/generate", **body: Any) -> Answer:
    return await api("POST", path, json.dumps(body).encode())


async def _events(answer: Answer) -> list[Any]:
    """Return the events of a stream, without the end marker."""
    assert isinstance(answer.content, AsyncIterator), answer
    events = [event async for event in answer.content]
    assert all(event.startswith("data: ") and event.endswith("\n\n") for event in events)
    if "error" not in events[-1]:
        assert events.pop() == DONE
    return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 1}, {"num_beams": 4, "no_repeat_ngram_size": 2}]
)
def test_streams_share_batches_with_others(api: Api, options: dict[str, Any]) -> None:
    before = api.batcher.batches

    async def ask() -> tuple[list[Any], list[list[Any]]]:
        whole = [_call(api, text=text, options=options) for text in TEXTS[:8]]
        streams = [_streamed(api, text=text, options=options) for text in TEXTS[:8]]
        answers, events = await asyncio.gather(asyncio.gather(*whole), asyncio.gather(*streams))
        return [one.content for one in answers], events

    answers, streams = _run(api, ask())
    assert api.batcher.batches == before + 1
    assert sum(map(len, streams)) > 3 * len(streams)
    for answer, events in zip(answers, streams, strict=True):
        *_, last = events
        assert "".join(event["text"] for event in events) == answer["output"]
        assert last["usage"]["completion_tokens"] == answer["tokens"]
        assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + answer["tokens"]
        assert last["model"] == "en-es"
        assert last["finish_reason"] in ("stop", "length")


def test_text_comes_before_the_batch_ends_and_a_finished_text_ends_its_stream(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step waits until the first piece, and later the end of the short text, have been read."""
    step, steps = DecoderStep.__call__, 0
    reached, first, ended = threading.Event(), threading.Event(), threading.Event()

    def stepped(self: DecoderStep, ids: torch.Tensor, context: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if steps == 8:
            reached.set()
            assert first.wait(60)
        if steps == 40:
            assert ended.wait(60)
        return step(self, ids, context)

    monkeypatch.setattr(DecoderStep, "__call__", stepped)
    options = {"num_beams": 1, "max_new_tokens": 60}

    async def run() -> None:
        long = asyncio.create_task(
            _call(api, text=" ".join(TEXTS[:4]), options=options | {"min_new_tokens": 0})
        )
        short = await _call(
            api, text="Return the list.", options=options | {"min_new_tokens": 0}, stream=True
        )
        assert isinstance(short.content, AsyncIterator)
        events = short.content
        assert json.loads((await anext(events)).removeprefix("data: "))["text"]
        first.set()
        last = [
            json.loads(event.removeprefix("data: ")) async for event in events if event != DONE
        ][-1]
        assert last["finish_reason"] == "stop"
        assert not long.done()
        ended.set()
        assert (await long).status == 200

    batches, left = api.batcher.batches, api.batcher.left
    _run(api, run())
    assert (api.batcher.batches, api.batcher.left) == (batches + 1, left)
    assert steps >= 40


def test_who_leaves_a_stream_frees_its_text(api: Api) -> None:
    async def run() -> None:
        answer = await _call(
            api, text=TEXTS[0], options={"num_beams": 1, "max_new_tokens": 64}, stream=True
        )
        assert isinstance(answer.content, AsyncIterator)
        await anext(answer.content)
        await answer.content.aclose()  # type: ignore[attr-defined]
        await _until(lambda: api.batcher.left > left)

    left = api.batcher.left
    _run(api, run())
    assert 'fastgen_requests_total{path="/generate",replica="r1",status="499"} 1.0' in exposition(
        [api.metrics.families()]
    )


def test_why_a_text_ends(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def last(tokens: int) -> Any:
        return _run(api, _streamed(api, text=TEXTS[0], options={"max_new_tokens": tokens}))[-1]

    assert (last(3)["finish_reason"], last(3)["usage"]["completion_tokens"]) == ("length", 3)
    (end,) = api.generator.ends
    monkeypatch.setitem(api.generator.generation, "forced_eos_token_id", end)
    assert (last(3)["finish_reason"], last(3)["usage"]["completion_tokens"]) == ("length", 2)
    assert last(64)["finish_reason"] == "stop"


async def _streamed(api: Api, path: str = "/generate", **body: Any) -> list[Any]:
    return await _events(await _call(api, path, stream=True, **body))


def test_completions(api: Api) -> None:
    path = "/v1/completions"
    whole = _run(
        api,
        _call(
            api,
            path,
            prompt=TEXTS[:2],
            model="en-es",
            max_tokens=24,
            temperature=0,
            n=2,
            num_beams=2,
        ),
    )
    assert isinstance(whole.content, dict)
    assert [choice["index"] for choice in whole.content["choices"]] == [0, 1, 2, 3]
    own = _run(
        api, _call(api, texts=TEXTS[:2], options={"num_return_sequences": 2, "num_beams": 2})
    )
    assert isinstance(own.content, dict)
    assert [choice["text"] for choice in whole.content["choices"]] == [
        text for one in own.content["answers"] for text in one["outputs"]
    ]
    assert whole.content["usage"]["completion_tokens"] == sum(
        one["tokens"] for one in own.content["answers"]
    )
    events = _run(
        api, _streamed(api, path, prompt=TEXTS[0], stream_options={"include_usage": True})
    )
    *_, last, counted = events
    assert (
        "".join(event["choices"][0]["text"] for event in events[:-1])
        == own.content["answers"][0]["output"]
    )
    assert (last["choices"][0]["finish_reason"], last["usage"]) == ("stop", None)
    assert (counted["choices"], counted["usage"]["completion_tokens"] > 3) == ([], True)
    assert {event["id"] for event in events} == {events[0]["id"]}
    (*_, last) = _run(api, _streamed(api, path, prompt=TEXTS[0]))
    assert "usage" not in last


@pytest.mark.parametrize(
    ("path", "body", "status", "shown"),
    [
        ("/generate", {"texts": ["a", "b"]}, 400, "2 texts: a stream has one"),
        (
            "/generate",
            {"text": "a", "options": {"num_return_sequences": 2}},
            400,
            "num_return_sequences = 2: a stream",
        ),
        ("/generate", {"text": "list " * 300}, 413, "tokens, 200 at most"),
        (
            "/v1/completions",
            {"prompt": "a", "model": "gpt"},
            404,
            "there is no model 'gpt', but 'en-es'",
        ),
        (
            "/v1/completions",
            {"prompt": "a", "temperature": 0.7},
            400,
            "temperature = 0.7: a request cannot ask for",
        ),
        (
            "/v1/completions",
            {"prompt": "a", "seed": 1},
            400,
            "seed: Extra inputs are not permitted",
        ),
        (
            "/v1/completions",
            {"prompt": "a", "max_tokens": 65},
            400,
            "max_new_tokens = 65, 64 at most",
        ),
        (
            "/v1/completions",
            {"prompt": "a", "stream": False, "stream_options": {}},
            400,
            "is for stream=true",
        ),
    ],
)
def test_refused(api: Api, path: str, body: dict[str, Any], status: int, shown: str) -> None:
    answer = _run(api, _call(api, path, **{"stream": True} | body))
    assert isinstance(answer.content, dict)
    error = answer.content["error"]
    assert answer.status == status
    assert shown in (error if path == "/generate" else error["message"])


def test_an_error_in_the_middle_is_the_last_event(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, steps = DecoderStep.__call__, 0

    def failing(self: DecoderStep, ids: torch.Tensor, context: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if steps >= 6:
            raise RuntimeError("the model broke")
        return step(self, ids, context)

    own = {"text": TEXTS[0], "options": {"num_beams": 1}}
    for path, body in (
        ("/generate", own),
        ("/v1/completions", {"prompt": TEXTS[0], "num_beams": 1}),
    ):
        steps = 0
        with monkeypatch.context() as patch:
            patch.setattr(DecoderStep, "__call__", failing)
            *pieces, last = _run(api, _streamed(api, path, **body))
        assert pieces
        error = last["error"]
        assert "the model broke" in (error["message"] if "v1" in path else error)


def test_a_text_that_is_drawn_anew_is_an_error(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(self: TextGenerator, sources: Any, wanted: Any, tell: Any) -> list[Sequences]:
        tell(0, [5, 6])
        return [Sequences(torch.tensor([[5, 7]]), None)]

    monkeypatch.setattr(TextGenerator, "generate", drawn)
    *_, last = _run(api, _streamed(api, text=TEXTS[0]))
    assert last == {"error": "the text was generated anew and has become another"}


def test_metrics(caplog: pytest.LogCaptureFixture) -> None:
    api = Api(
        Settings(model=MODEL, name="en-es", dtype="float64", generation=GENERATION, **LIMITS), "r2"
    )

    async def run() -> Answer:
        await asyncio.gather(*(_call(api, text=text) for text in TEXTS[:3]))
        await _streamed(api, text=TEXTS[0])
        await _call(api, text="")
        await api("GET", "/nowhere")
        return await api("GET", "/metrics")

    with caplog.at_level(logging.INFO, "ray.serve"):
        answer = _run(api, run())
    assert answer.headers["Content-Type"].startswith("text/plain; version=")
    families = {one.name: one for one in text_string_to_metric_families(str(answer.content))}
    values = {
        (s.name, *sorted(s.labels.items())): s.value
        for one in families.values()
        for s in one.samples
    }

    def value(name: str, **labels: str) -> float:
        return values[(name, *sorted((labels | {"replica": "r2"}).items()))]

    assert value("fastgen_requests_total", path="/generate", status="200") == 4
    assert value("fastgen_requests_total", path="/generate", status="400") == 1
    assert value("fastgen_requests_total", path="other", status="404") == 1
    assert value("fastgen_request_seconds_count", path="/generate") == 5
    assert value("fastgen_time_to_first_token_seconds_count", path="/generate") == 1
    assert (value("fastgen_batch_texts_count"), value("fastgen_batch_texts_sum")) == (2, 4)
    assert value("fastgen_waiting_texts") == 0
    assert value("fastgen_generated_tokens_total") > 20
    (info,) = families["fastgen_info"].samples
    assert (info.name, info.labels["model"]) == ("fastgen_info", "en-es")
    assert not any(name.endswith("_created") for name in families)
    lines = [record.getMessage() for record in caplog.records]
    assert sum(line.startswith("POST /generate 200 ") for line in lines) == 4
    assert sum(line.startswith("GET /nowhere 404 ") for line in lines) == 1


def test_metrics_of_replicas_are_one_text() -> None:
    counted = [Metrics("m", name, lambda: 2) for name in ("a", "b")]
    for one in counted:
        one.tokens.inc(3)
    text = exposition([one.families() for one in counted])
    assert text.count("# TYPE fastgen_generated_tokens_total counter") == 1
    assert 'fastgen_generated_tokens_total{replica="a"} 3.0' in text
    assert 'fastgen_waiting_texts{replica="b"} 2.0' in text
