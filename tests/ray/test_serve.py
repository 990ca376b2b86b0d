"""Serving: merged requests are answered as if alone; limits; a real server on a free port."""

import asyncio
import contextlib
import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="needs fastgen[ray]")
import httpx
import ray
import torch
from ray import serve

from fastgen.cli import main as fastgen_command
from fastgen.corpus import models
from fastgen.corpus.texts import Options, Output, Source, TextGenerator
from fastgen.errors import CommandError
from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.models.runtime.first_token import FirstTokenInputs
from fastgen.ray import app
from fastgen.ray.serve import main, start, stop
from fastgen.ray.server.answers import Answer
from fastgen.ray.server.api import Api
from fastgen.ray.server.merging import QueueFull, RequestBatcher, Tell
from fastgen.ray.server.routing import MORE, beginning_of, by_load
from fastgen.ray.settings import Settings

MODEL = Path(__file__).parents[2] / "examples/en-es/model"
TEXTS = (MODEL.parent / "test.en").read_text("utf-8").splitlines()[:24]
GENERATION = {"num_beams": 2, "max_new_tokens": 24}
LIMITS: dict[str, Any] = {
    "max_source_tokens": 200, "max_new_tokens": 64, "max_beams": 4, "max_texts": 30,
    "max_waiting": 25, "max_bytes": 20_000, "retry_after": 7,
}  # fmt: skip


def _alone(texts: list[str], **generation: Any) -> list[str]:
    generator = TextGenerator(Options(MODEL, GENERATION | generation, dtype="float64"))
    found = [generator([text])[0] for text in texts]
    return [one.texts[0] for one in found if isinstance(one, Output)]


@pytest.fixture(scope="module")
def alone() -> list[str]:
    return _alone(TEXTS)


@pytest.fixture
def api() -> Api:
    return Api(
        Settings(model=MODEL, name="en-es", dtype="float64", generation=GENERATION, **LIMITS)
    )


def _post(api: Api, **body: Any) -> Any:
    return api("POST", "/generate", json.dumps(body).encode())


def test_merged_requests_are_answered_as_if_alone(api: Api, alone: list[str]) -> None:
    wide = _alone(TEXTS[:3], num_beams=3)

    async def ask() -> tuple[list[Answer], Answer]:
        single = [_post(api, text=text) for text in TEXTS[:20]]
        *first, last = await asyncio.gather(
            *single, _post(api, texts=TEXTS[:3], options={"num_beams": 3})
        )
        return first, last

    answers, several = asyncio.run(ask())
    assert [answer.content["output"] for answer in answers] == alone[:20]
    assert [one["output"] for one in several.content["answers"]] == wide
    assert {answer.status for answer in answers} == {several.status} == {200}
    assert {answer.content["model"] for answer in answers} == {"en-es"}
    # One batch for each set of options.
    assert (api.batcher.batches, api.batcher.generated) == (2, 23)


@pytest.mark.parametrize(
    ("body", "status", "shown"),
    [
        ({}, 400, "either text or texts"),
        ({"text": "a", "texts": ["a"]}, 400, "either text or texts"),
        ({"text": " "}, 400, "text 1 is empty"),
        ({"texts": ["a", ""]}, 400, "text 2 is empty"),
        ({"texts": []}, 400, "texts: "),
        ({"text": 3}, 400, "text: "),
        ({"text": "a", "beams": 3}, 400, "beams: "),
        ({"text": "a", "options": {"do_sample": True}}, 400, "options.do_sample"),
        ({"text": "a", "options": {"num_beams": "3"}}, 400, "options.num_beams"),
        ({"text": "a", "options": {"num_beams": 5}}, 400, "num_beams = 5, 4 at most"),
        ({"text": "a", "options": {"max_new_tokens": 65}}, 400, "max_new_tokens = 65, 64 at most"),
        (
            {"text": "a", "options": {"num_return_sequences": 3}},
            400,
            "num_return_sequences = 3, 2 at most",
        ),
        ({"text": "list " * 300}, 413, "tokens, 200 at most"),
        ({"texts": ["a"] * 31}, 413, "31 texts, 30 at most"),
        ({"text": "a" * 20_001}, 413, "bytes, 20000 at most"),
        ({"texts": ["a"] * 26}, 503, "0 texts wait, 25 at most"),
    ],
)
def test_limits(api: Api, body: dict[str, Any], status: int, shown: str) -> None:
    answer = asyncio.run(_post(api, **body))
    assert answer.status == status, answer
    assert shown in answer.content["error"]
    assert answer.headers == ({"Retry-After": "7"} if status == 503 else {})
    assert api.batcher.batches == 0


def test_sequences_and_beams_of_model_settings_and_request(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limits apply to the combination of all options, wherever each one comes from."""

    def status(**options: Any) -> int:
        return asyncio.run(_post(api, text="a", options=options)).status

    api.generator.generation = {"max_new_tokens": 2}
    monkeypatch.setattr(api.generator.model.generation_config, "num_beams", 3)
    assert (status(num_return_sequences=3), status(num_return_sequences=4)) == (200, 400)
    api.generator.generation |= {"num_return_sequences": 2}
    assert (status(), status(num_beams=1), status(num_beams=1, num_return_sequences=1)) == (
        200,
        400,
        200,
    )
    api.generator.generation |= {"num_beams": 1}
    assert (status(), status(num_beams=2)) == (400, 200)
    api.generator.generation |= {"do_sample": True}
    assert status() == 200


def test_what_is_no_request(api: Api) -> None:
    assert asyncio.run(api("POST", "/generate", b"{")).status == 400
    assert asyncio.run(api("GET", "/generate")).status == 405
    assert asyncio.run(api("GET", "/elsewhere")).status == 404


def _fail_at(text: str, api: Api, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the model raise for each batch that contains a text."""
    generate = api.generator.model.generate
    (source,) = api.generator.encode([text])
    assert isinstance(source, Source)
    bad = source.ids

    def failing(input_ids: Any, **kwargs: Any) -> Any:
        if any(row[: len(bad)] == bad for row in input_ids.tolist()):
            raise error
        return generate(input_ids=input_ids, **kwargs)

    monkeypatch.setattr(api.generator.model, "generate", failing)


def test_a_text_that_fails_leaves_the_others(
    api: Api, alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _fail_at(TEXTS[2], api, RuntimeError("no such text"), monkeypatch)

    async def ask() -> list[Answer]:
        return await asyncio.gather(
            *(_post(api, text=text) for text in TEXTS[:5]), _post(api, texts=TEXTS[1:3])
        )

    *single, several = asyncio.run(ask())
    assert [answer.status for answer in single] == [200, 200, 500, 200, 200]
    assert single[2].content["error"] == "RuntimeError: no such text"
    assert [single[i].content["output"] for i in (0, 1, 3, 4)] == [alone[i] for i in (0, 1, 3, 4)]
    assert several.content["answers"][0]["output"] == alone[1]
    assert several.content["answers"][1] == {"problem": "RuntimeError: no such text"}


def test_a_text_that_takes_all_memory_leaves_the_others(
    api: Api, alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _fail_at(TEXTS[2], api, torch.OutOfMemoryError("no memory is left"), monkeypatch)

    async def ask() -> list[Answer]:
        return await asyncio.gather(*(_post(api, text=text) for text in TEXTS[:4]))

    answers = asyncio.run(ask())
    assert [answer.status for answer in answers] == [200, 200, 500, 200]
    assert "no memory is left" in answers[2].content["error"]
    assert [answers[i].content["output"] for i in (0, 1, 3)] == [alone[i] for i in (0, 1, 3)]
    api.check()


def test_a_device_that_has_failed_is_no_longer_healthy(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(**kwargs: Any) -> Any:
        raise torch.AcceleratorError("an illegal memory access")

    monkeypatch.setattr(api.generator.model, "generate", failing)
    monkeypatch.setattr(api, "_failed", None)
    answer = asyncio.run(_post(api, text=TEXTS[0]))
    assert answer.status == 500
    assert "an illegal memory access" in answer.content["error"]
    with pytest.raises(RuntimeError, match=r"the device has failed: .*an illegal memory access"):
        api.check()


def test_arguments_that_the_model_refuses_are_found_at_the_start() -> None:
    with pytest.raises(CommandError, match=r"num_return_sequences.*num_beams"):
        Api(Settings(model=MODEL, generation={"num_beams": 2, "num_return_sequences": 3}))


@pytest.mark.parametrize("stays", [True, False])
def test_who_leaves_frees_rows_of_a_batch_that_runs(
    api: Api, alone: list[str], stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, rows, left = DecoderStep.__call__, list[int](), threading.Event()

    async def run() -> Answer | None:
        loop = asyncio.get_running_loop()
        tasks = [asyncio.create_task(_post(api, text=text)) for text in TEXTS[:8]]

        def leave() -> None:
            for task in tasks[stays:]:
                task.cancel()
            loop.call_soon(left.set)  # once the tasks have been cancelled

        def stepped(self: DecoderStep, ids: Any, context: Any) -> Any:
            if isinstance(context, FirstTokenInputs):
                return step(self, ids, context)
            rows.append(len(ids))
            if len(rows) == 3:
                loop.call_soon_threadsafe(leave)
                assert left.wait(20)
            return step(self, ids, context)

        monkeypatch.setattr(DecoderStep, "__call__", stepped)
        answer = await tasks[0] if stays else None
        await _until(lambda: api.batcher.left == 8 - stays)
        return answer

    answer = asyncio.run(run())
    beams = GENERATION["num_beams"]
    assert rows[:3] == [8 * beams] * 3
    assert set(rows[3:]) == ({beams} if stays else set())
    assert answer is None or answer.content["output"] == alone[0]
    assert (
        json.loads(json.dumps(asyncio.run(api("GET", "/status")).content))["texts"]["left"]
        == 8 - stays
    )


class _Model:
    """A stand-in for a model that records its batches and waits until it may go on."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.tell: Tell | None = None
        self.may_go_on = asyncio.Event()
        self.loop = asyncio.get_running_loop()

    def __call__(
        self,
        sources: list[list[int]],
        options: str,
        wanted: Callable[[int], bool],
        tell: Tell | None,
    ) -> list[str]:
        self.batches.append([len(source) for source in sources])
        self.wanted, self.tell = wanted, tell
        asyncio.run_coroutine_threadsafe(self.may_go_on.wait(), self.loop).result(10)
        if options == "bad":
            raise RuntimeError("out of order")
        return [f"{options}{len(source)}" for source in sources]


def _merger(model: Callable[..., Any], **changed: Any) -> RequestBatcher[list[int], str, str]:
    return RequestBatcher(model, **{"batch_tokens": 20, "most": 100, "linger": 0.0} | changed)


def _submitted(
    batcher: RequestBatcher[list[int], str, str], lengths: list[int], options: str = "a"
) -> list["asyncio.Task[list[str]]"]:
    return [asyncio.create_task(batcher.submit([[7] * length], options)) for length in lengths]


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def test_batches_are_of_like_lengths_and_the_oldest_goes_first() -> None:
    async def run() -> None:
        model = _Model()
        batcher = _merger(model)
        tasks = _submitted(batcher, [1])
        await _until(lambda: len(model.batches) == 1)  # it runs, and the next requests queue up
        tasks += _submitted(batcher, [4, 9, 5, 30, 3, 8])
        tasks += _submitted(batcher, [4], "b")
        await asyncio.sleep(0)
        model.may_go_on.set()
        answers = [(await task)[0] for task in tasks]
        assert answers == ["a1", "a4", "a9", "a5", "a30", "a3", "a8", "b4"]
        assert model.batches == [[1], [4, 5, 3], [9, 8], [30], [4]]

    asyncio.run(run())


def test_what_nobody_waits_for_is_not_generated() -> None:
    async def run() -> None:
        model = _Model()
        batcher = _merger(model)
        running = _submitted(batcher, [1, 1])
        await _until(lambda: len(model.batches) == 1)
        waiting = _submitted(batcher, [2, 3, 4])
        await asyncio.sleep(0)
        waiting[1].cancel()
        running[0].cancel()  # already running: the model is told that nobody waits for it
        await asyncio.sleep(0)
        assert [model.wanted(i) for i in (0, 1)] == [False, True]
        model.may_go_on.set()
        assert [await task for task in (running[1], waiting[0], waiting[2])] == [
            ["a1"],
            ["a2"],
            ["a4"],
        ]
        assert model.batches == [[1, 1], [2, 4]]
        assert (batcher.dropped, batcher.generated, batcher.left) == (1, 4, 1)

    asyncio.run(run())


def test_a_full_queue_refuses_and_recovers() -> None:
    async def run() -> None:
        model = _Model()
        batcher = _merger(model, most=3)
        tasks = _submitted(batcher, [1])
        await _until(lambda: len(model.batches) == 1)
        tasks += _submitted(batcher, [2, 2])
        await asyncio.sleep(0)
        with pytest.raises(QueueFull, match="2 texts wait, 3 at most"):
            await batcher.submit([[7], [7]], "a")  # both or neither
        model.may_go_on.set()
        assert [await task for task in tasks] == [["a1"], ["a2"], ["a2"]]
        assert await batcher.submit([[7], [7]], "a") == ["a1", "a1"]

    asyncio.run(run())


def test_an_error_is_its_own_batch_s() -> None:
    async def run() -> None:
        model = _Model()
        model.may_go_on.set()
        batcher = _merger(model)
        bad, good = _submitted(batcher, [2], "bad"), _submitted(batcher, [2])
        with pytest.raises(RuntimeError, match="out of order"):
            await bad[0]
        assert await good[0] == ["a2"]
        batcher.check()

    asyncio.run(run())


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of the server's standard error."""
    return tmp_path_factory.mktemp("serve") / "log"


@pytest.fixture(scope="module")
def server(log: Path) -> Iterator[str]:
    port = _free_port()
    command = [
        sys.executable,
        "-m",
        "fastgen",
        "serve",
        str(MODEL),
        "--port",
        str(port),
        "--dtype",
        "float64",
    ]
    command += [
        "--generation",
        json.dumps(GENERATION),
        "--max-waiting",
        "40",
        "--name",
        "en-es",
        "--retry-after",
        "7",
    ]
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "FASTGEN_STRICT": "1"}
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=file, text=True, env=environment
        )
    assert process.stdout is not None
    ready = process.stdout.readline()
    assert "serving en-es" in ready, log.read_text()[-3000:]
    yield f"http://127.0.0.1:{port}"
    process.send_signal(signal.SIGTERM)
    assert process.wait(90) == 0


@pytest.mark.slow
def test_server(server: str, alone: list[str]) -> None:
    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server, timeout=60) as client:
            return await asyncio.gather(
                *(client.post("/generate", json={"text": text}) for text in TEXTS)
            )

    assert [answer.json()["output"] for answer in asyncio.run(ask())] == alone
    with httpx.Client(base_url=server, timeout=60) as client:
        assert client.get("/-/healthz").text == "success"
        health = client.get("/health").json()
        assert (health["status"], health["model"]) == ("ok", "en-es")
        status = client.get("/status").json()
        assert status["texts"]["generated"] == len(TEXTS)
        assert status["texts"]["batches"] < len(TEXTS)
        (row,) = (
            row for row in status["fastgen"]["rows"] if row["name"] == "transformers.beam_search"
        )
        assert row["hits"] > 0
        assert row["fallbacks"] == {}
        assert client.post("/generate", json={"text": "a " * 600}).status_code == 413
        assert client.post("/generate", content=b"{").status_code == 400
        full = client.post("/generate", json={"texts": ["a"] * 41})
        assert (full.status_code, full.headers["Retry-After"]) == (503, "7")


@pytest.mark.slow
def test_a_client_of_openai_s_streams(server: str, alone: list[str]) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)
    call: dict[str, Any] = {"model": "en-es", "prompt": TEXTS[1], "extra_body": {"num_beams": 2}}
    whole = client.completions.create(**call)
    assert whole.choices[0].text == alone[1]
    *events, counted = client.completions.create(
        **call, stream=True, stream_options={"include_usage": True}
    )
    assert "".join(event.choices[0].text for event in events) == alone[1]
    assert events[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert counted.usage == whole.usage
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(**call, temperature=0.5, stream=True)
    client.close()


@pytest.mark.slow
def test_a_client_that_leaves_its_stream_frees_its_text(server: str) -> None:
    long = {
        "text": " ".join(TEXTS[:8]),
        "options": {"num_beams": 6, "max_new_tokens": 200, "min_new_tokens": 200},
    }
    with httpx.Client(base_url=server, timeout=60) as client:
        before = client.get("/status").json()["texts"]["left"]
        with client.stream("POST", "/generate", json=long | {"stream": True}) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert json.loads(next(answer.iter_lines()).removeprefix("data: "))["text"]
        end = time.monotonic() + 60
        while client.get("/status").json()["texts"]["left"] == before:
            assert time.monotonic() < end
            time.sleep(0.05)


@pytest.mark.slow
def test_metrics_and_access_log(server: str, log: Path) -> None:
    with httpx.Client(base_url=server, timeout=60) as client:
        assert client.post("/generate", json={"text": TEXTS[0]}).status_code == 200
        assert client.get("/some/where").status_code == 404
        answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert re.search(
        r'^fastgen_requests_total\{path="/generate",replica="\w+",status="200"\} \d',
        answer.text,
        re.M,
    )
    assert 'fastgen_info{model="en-es"' in answer.text
    end = time.monotonic() + 60
    for line in (
        r"GET /some/where 404 [\d.]+ms",
        r"POST /generate 200 [\d.]+ms",
        r"GET /metrics 200 [\d.]+ms",
    ):
        while not re.search(line, log.read_text()):  # Ray forwards it from the replica
            assert time.monotonic() < end, log.read_text()[-2000:]
            time.sleep(0.1)
    assert not re.search(r"(GET|POST) / ", log.read_text())


@pytest.mark.slow
def test_waiting_texts_of_a_client_that_leaves_are_dropped(server: str) -> None:
    long = {
        "texts": [text * 2 for text in TEXTS],
        "options": {"num_beams": 6, "max_new_tokens": 100},
    }

    async def run() -> bool:
        """Return whether the client left while its texts were waiting.

        On a slow machine they may not have arrived in time.
        """
        async with httpx.AsyncClient(base_url=server, timeout=60) as client:

            async def texts() -> dict[str, int]:
                return (await client.get("/status")).json()["texts"]

            before = await texts()
            busy = asyncio.create_task(client.post("/generate", json=long))
            while not busy.done() and (await texts())["batches"] == before["batches"]:
                await asyncio.sleep(0.01)
            leaving = httpx.AsyncClient(base_url=server, timeout=60)
            tasks = [
                asyncio.create_task(leaving.post("/generate", json={"text": "a"})) for _ in range(5)
            ]
            while (await client.get("/health")).json()["waiting"] < 5:
                if busy.done():
                    await asyncio.gather(*tasks)
                    return False
                await asyncio.sleep(0.01)
            for task in tasks:
                task.cancel()
            await leaving.aclose()
            assert (await busy).status_code == 200
            assert (await client.post("/generate", json={"text": "a"})).status_code == 200
            after = await texts()
            assert after["dropped"] - before["dropped"] == 5
            assert after["generated"] - before["generated"] == len(TEXTS) + 1
            return True

    assert any(asyncio.run(run()) for _ in range(5))


@pytest.mark.slow
def test_other_applications_of_a_cluster_are_left_alone() -> None:
    """Start a second application at its own paths; the first one keeps running when it stops."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    settings = Settings(model=MODEL, dtype="float64", generation=GENERATION)
    port = _free_port()
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(serve.deployment(_Other).bind(), name="other", route_prefix="/other")
        connection = start(settings, port=port, application="texts", route_prefix="/en-es")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            assert client.get("/en-es/health").json()["status"] == "ok"
            assert client.get("/en-es").json() == {"error": "there is no /"}
            with pytest.raises(
                CommandError, match="--application texts: one of this name is running"
            ):
                start(settings, port=port, application="texts", route_prefix="/more")
            stop(connection, "texts")
            assert list(serve.status().applications) == ["other"]
            assert client.get("/other").text == "here"
    finally:
        # The controller may be gone before it has answered.
        with contextlib.suppress(ray.exceptions.RayActorError):
            serve.shutdown()
        ray.shutdown()


class _Other:
    def __call__(self) -> str:
        return "here"


def test_command_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "config.json is missing" in capsys.readouterr().err
    assert main([str(MODEL), "--batch-tokens", "0"]) == 2
    assert "--batch-tokens 0: Input should be greater" in capsys.readouterr().err
    assert main([str(MODEL), "--generation", "{"]) == 2
    assert "--generation {: Invalid JSON" in capsys.readouterr().err


def test_an_address_that_cannot_be_had_is_said_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for arguments, shown in (
            (["--port", port], f"--port {port}: Address already in use"),
            (["--port", "99999"], "--port 99999: must be from 1 to 65535"),
            (["--host", "no host"], "--host no host: "),
            (["--host", "192.0.2.1"], "--host 192.0.2.1: Cannot assign requested address"),
        ):
            assert fastgen_command(["serve", str(MODEL), *arguments]) == 1
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith(f"fastgen serve: {shown}")
    assert not ray.is_initialized()


def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    assert fastgen_command(["serve", str(MODEL)]) == 2
    assert (
        capsys.readouterr().err
        == 'fastgen serve: needs ray, pydantic: pip install "ray[data,serve]>=2.60"\n'
    )


def test_serve_run_makes_the_settings_of_words() -> None:
    """Ray Serve inspects the annotation, which must be the class rather than its name."""
    assert inspect.signature(app).parameters["settings"].annotation is Settings
    found = Settings(model=str(MODEL), cpus="2", append_eos="true", generation='{"num_beams": 4}')  # type: ignore[arg-type]
    assert (found.cpus, found.append_eos, found.generation) == (2.0, True, {"num_beams": 4})


def test_texts_that_begin_alike_have_one_name() -> None:
    start = "Return the list. " * 20
    bodies: list[dict[str, Any]] = [
        {"text": start + "a"}, {"texts": [start + "b", "c"]}, {"prompt": start, "stream": True},
        {"prompt": [start], "n": 2},
    ]  # fmt: skip
    names = {beginning_of(json.dumps(body).encode()) for body in bodies}
    assert len(names) == 1
    assert names != {beginning_of(b'{"text": "Return"}')}
    for body in (b"", b"{", b"[1]", b"{}", b'{"text": 3}', b'{"texts": []}', b'{"prompt": [[1]]}'):
        assert beginning_of(body) == ""


def test_a_busy_replica_comes_last() -> None:
    assert by_load("abc", [MORE, 0, 3]) == ["a", "b", "c"]
    assert by_load("abc", [MORE + 1, 0, 3]) == ["b", "c", "a"]
    assert by_load("abc", [90, 95, 91]) == ["a", "b", "c"]
    assert by_load("", []) == []


@pytest.mark.slow
def test_a_replica_gets_the_texts_that_begin_alike(alone: list[str]) -> None:
    port = _free_port()
    settings = Settings(
        model=MODEL, dtype="float64", generation=GENERATION, replicas=2, cpus=0.5,
        prefix_routing=True, max_waiting=4, max_bytes=20_000,
    )  # fmt: skip
    connection = start(settings, port=port)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            by_text = list[set[str]]()
            before = _answered(client)
            for text, expected in zip(TEXTS[:12], alone, strict=False):
                for stream in (False, True):
                    answer = client.post("/generate", json={"text": text, "stream": stream})
                    assert answer.status_code == 200
                    assert stream or answer.json()["output"] == expected
                    assert not stream or answer.text.endswith("data: [DONE]\n\n")
                after = _answered(client)
                by_text.append({name for name in after if after[name] != before.get(name, 0)})
                before = after
            assert {len(replicas) for replicas in by_text} == {1}
            assert len(set[str]().union(*by_text)) == 2
            assert client.post("/generate", content=b"{").status_code == 400
            full = client.post("/generate", json={"texts": ["a"] * 5})
            assert (full.status_code, full.headers["Retry-After"]) == (503, "1")
            assert client.get("/health").json()["status"] == "ok"
    finally:
        stop(connection)


def _answered(client: httpx.Client) -> dict[str, float]:
    """Return the number of texts that each replica has generated."""
    shown = client.get("/metrics").text
    pattern = r'^fastgen_requests_total\{path="/generate",replica="(\w+)",status="200"\} (\S+)'
    return {name: float(count) for name, count in re.findall(pattern, shown, re.M)}
