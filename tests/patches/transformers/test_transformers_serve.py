"""Check `transformers serve` with fastgen: accelerated, with the same answers."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

pytest.importorskip("openai", reason="transformers serve needs it")
pytest.importorskip("uvicorn", reason="transformers serve needs it")
import httpx
from transformers.cli.serve import Serve

import fastgen
from fastgen import config
from fastgen.decoding.batching import continuous_batching
from fastgen.patches.transformers import compat
from fastgen.patches.transformers.streaming.manager import RequestManager
from tests.support import zoo

TOKENIZER = Path(__file__).parents[3] / "examples/en-es/model"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
ENDPOINTS: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "messages": [{"role": "user", "content": "What is a list?"}],
        "max_tokens": 20,
    },
    "completions": {"prompt": "The list", "max_tokens": 20},
}


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _until_it_answers(address: str) -> None:
    end = time.monotonic() + 60
    while True:
        try:
            assert httpx.get(f"{address}/health").json() == {"status": "ok"}
            return
        except httpx.ConnectError:
            assert time.monotonic() < end
            time.sleep(0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny Llama for chats."""
    tokenizer = tf.AutoTokenizer.from_pretrained(TOKENIZER)
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    tokens = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": 1,
        "eos_token_id": tokenizer.eos_token_id,
    }
    model = tf.LlamaForCausalLM(
        tf.LlamaConfig(**zoo._DECODER | tokens | {"vocab_size": len(tokenizer)})
    )
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _start(folder: Path, **options: Any) -> tuple[Serve, str]:
    """Start a server in this process; return it and its address."""
    port = _free_port()
    server = Serve(
        str(folder), device="cpu", dtype="float64", host="127.0.0.1", port=port, non_blocking=True,
        **options,
    )  # fmt: skip
    _until_it_answers(f"http://127.0.0.1:{port}")
    return server, f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    server, found = _start(folder)
    yield found
    server.kill_server()


def _ask(address: str, folder: Path, endpoint: str, **more: Any) -> str:
    """Return the text of a greedy answer; join the pieces of a streamed one."""
    body = ENDPOINTS[endpoint] | {"model": str(folder), "temperature": 0} | more
    found = httpx.post(f"{address}/v1/{endpoint}", json=body, timeout=60)
    assert found.status_code == 200, found.text
    if not more.get("stream"):
        return _text(found.json()["choices"])
    events = [
        line.removeprefix("data: ") for line in found.text.splitlines() if line.startswith("data: ")
    ]
    pieces = [_text(json.loads(event)["choices"]) for event in events if event != "[DONE]"]
    assert sum(map(bool, pieces)) > 3
    return "".join(pieces)


def _idle(patch: str) -> Any:
    """Return the patch's status row once no call runs.

    The last piece of a stream is sent before the call ends.
    """
    end = time.monotonic() + 10
    while True:
        try:
            fastgen.disable()
        except RuntimeError:
            assert time.monotonic() < end
            time.sleep(0.01)
        else:
            fastgen.enable()
            return fastgen.status()[patch]


def _text(choices: list[Any]) -> str:
    return "".join(
        choice.get("text") or choice.get("message", choice.get("delta", {})).get("content") or ""
        for choice in choices
    )


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_answers_are_the_same_and_accelerated(
    endpoint: str, stream: bool, address: str, folder: Path
) -> None:
    before = fastgen.status()["transformers.sample"]
    ours = _ask(address, folder, endpoint, stream=stream)
    after = _idle("transformers.sample")
    assert (after.hits, after.fallbacks) == (before.hits + 1, before.fallbacks)
    modules = [why for why in after.left_off if "the model gets tokenizer" in why]
    assert modules == []  # its steps run from the weights
    fastgen.disable()
    try:
        assert _ask(address, folder, endpoint, stream=stream) == ours
    finally:
        fastgen.enable()
    assert fastgen.status()["transformers.sample"].hits == after.hits
    assert len(ours) > 20


@pytest.mark.slow
@pytest.mark.parametrize("batched", [False, True], ids=["one by one", "batched"])
def test_the_command(batched: bool, address: str, folder: Path) -> None:
    port = _free_port()
    serve = ["transformers", "serve", str(folder), "--device", "cpu", "--dtype", "float64"]
    serve += ["--port", str(port), *(["--continuous-batching"] if batched else [])]
    process = subprocess.Popen(
        [sys.executable, "-m", "fastgen", "run", *serve],
        env=os.environ | {"FASTGEN_STRICT": "1"},  # a fallback would be an error
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _until_it_answers(f"http://localhost:{port}")
        found = _ask(f"http://localhost:{port}", folder, "chat/completions")
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)
    assert found == _ask(address, folder, "chat/completions")


def test_beams_are_streamed(address: str, folder: Path) -> None:
    """transformers does not stream several beams; fastgen streams the same text in pieces."""
    beams = tf.GenerationConfig(
        num_beams=3, max_new_tokens=20, pad_token_id=0, eos_token_id=zoo.EOS
    ).to_json_string()
    before = fastgen.status()["transformers.beam_streamer"].hits
    whole, pieces = (
        _ask(address, folder, "chat/completions", generation_config=beams, stream=stream)
        for stream in (False, True)
    )
    assert pieces == whole
    _idle("transformers.beam_streamer")
    assert fastgen.status()["transformers.beam_streamer"].hits == before + 1


def test_continuous_batching(address: str, folder: Path) -> None:
    """`--continuous-batching` runs on fastgen's batches, with the answers of single requests."""
    before = fastgen.status()["transformers.request_manager"]
    server, batched = _start(folder, continuous_batching=True)
    try:
        asked = [(endpoint, stream) for endpoint in ENDPOINTS for stream in (False, True)] * 2
        with ThreadPoolExecutor(8) as clients:
            answers = list(clients.map(lambda one: _ask(batched, folder, one[0], stream=one[1]),
                                       asked))  # fmt: skip
    finally:
        server.kill_server()
    for (endpoint, _), answer in zip(asked, answers, strict=True):
        assert answer == _ask(address, folder, endpoint)
    after = fastgen.status()["transformers.request_manager"]
    assert (after.hits, after.fallbacks) == (before.hits + 1, before.fallbacks)


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Slow decode steps down; return the rows of each."""
    rows, advance = list[int](), continuous_batching.advance

    def slow(running: Any, replay: Any) -> Any:
        rows.append(sum(cohort.search.batch_size for cohort in running))
        time.sleep(0.02)
        return advance(running, replay)

    monkeypatch.setattr("fastgen.patches.transformers.streaming.refill.advance", slow)
    return rows


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_client_that_leaves_frees_its_rows(
    stream: bool, folder: Path, one_at_a_time: list[int]
) -> None:
    server, address = _start(folder, continuous_batching=True)
    long = {"prompt": "The list", "max_tokens": 2000, "stream": stream, "model": str(folder)}
    try:
        manager = _manager(server, address, folder)
        if stream:
            with httpx.stream("POST", f"{address}/v1/completions", json=long, timeout=10) as one:
                next(one.iter_text())
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{address}/v1/completions", json=long, timeout=1)
        end = time.monotonic() + 5
        while not manager.loop.is_idle:
            assert time.monotonic() < end, "the request runs on"
            time.sleep(0.01)
        assert 5 < len(one_at_a_time) < 300
        assert not manager.results._handlers
        assert not manager.results
        assert _ask(address, folder, "completions")
    finally:
        server.kill_server()


def test_overload_is_answered_with_503(
    folder: Path, one_at_a_time: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 12 requests at once, those that may neither run nor wait are refused; no other is lost."""
    monkeypatch.setenv("FASTGEN_MAX_WAITING", "3")
    monkeypatch.setattr("fastgen.patches.transformers.streaming.request_loop.MAX_IN_FLIGHT", 1)
    config.reload()
    server, address = _start(folder, continuous_batching=True)
    body = ENDPOINTS["completions"] | {"model": str(folder), "temperature": 0}
    try:
        expected = _ask(address, folder, "completions")
        _manager(server, address, folder)

        def ask(number: int) -> httpx.Response:
            time.sleep(0.2 * (number > 0))  # the first runs by itself, and others wait for it
            more = {"stream": number % 2 == 0}
            return httpx.post(f"{address}/v1/completions", json=body | more, timeout=60)

        with ThreadPoolExecutor(12) as clients:
            answers = list(clients.map(ask, range(12)))
        refused = [one for one in answers if one.status_code != 200]
        assert [one.status_code for one in refused] == [503] * 8
        assert all(one.headers["Retry-After"] == "1" for one in refused)
        assert refused[0].json() == {"error": "3 requests wait, 3 at most"}
        assert _ask(address, folder, "completions") == expected
        assert not _manager(server, address, folder).results._handlers
    finally:
        server.kill_server()
        monkeypatch.undo()
        config.reload()


def _manager(server: Serve, address: str, folder: Path) -> RequestManager:
    """Return a server's manager, which its first request makes."""
    _ask(address, folder, "completions")
    manager = compat.served_manager(server._generation_state._cb_manager)
    assert isinstance(manager, RequestManager)
    return manager
