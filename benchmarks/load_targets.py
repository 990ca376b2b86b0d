"""What a load test sends requests to: a manager in this process, or a server on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

import fastgen

PATIENCE = 200.0
"""Seconds after the last request after which an answer is lost."""


@dataclass
class Request:
    """A request and its answer.

    Attributes:
        prompt: Token ids.
        options: Options of `generate`.
        leaves: Whether its client leaves.
        streams: Whether its answer comes token by token.
        latency: Seconds from its arrival to its answer.
        answer: Its new tokens; None until it is answered.
        is_refused: Whether the server has too many.
    """

    prompt: list[int]
    options: dict[str, Any]
    leaves: bool = False
    streams: bool = False
    latency: float = 0.0
    answer: list[int] | None = None
    is_refused: bool = False


@dataclass
class Target:
    """Something that answers requests.

    Attributes:
        run: Sends requests at times in seconds, and returns the seconds until the last answer.
        pid: The process that generates.
    """

    run: Callable[[list[Request], list[float]], float]
    pid: int

    def send(self, requests: list[Request], due: Sequence[float] = ()) -> float:
        """Send requests; by default all at once."""
        return self.run(requests, list(due) or [0.0] * len(requests))

    def memory(self) -> int:
        """Return the bytes of memory of the process that generates."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text("utf-8").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


def save(model: Any, folder: Path) -> None:
    """Save a model with a tokenizer whose words are numbers of tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(n): n for n in range(model.config.vocab_size)}, "0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


@contextmanager
def manager(model: Any, folder: Path, threads: int, is_patched: bool = True) -> Iterator[Target]:
    """Run a `ContinuousBatchingManager` in this process."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    pages = ContinuousBatchingConfig(num_blocks=4 * 128, page_size=64)
    config = GenerationConfig(**model.generation_config.to_diff_dict(), max_new_tokens=64)

    def run(requests: list[Request], due: list[float]) -> float:
        arrived: dict[str, tuple[Request, float]] = {}

        def send() -> None:
            for number, (request, when) in enumerate(zip(requests, due, strict=True)):
                time.sleep(max(0.0, start + when - time.perf_counter()))
                name = f"r{number}-{start}"
                arrived[name] = request, time.perf_counter()
                options = {k: v for k, v in request.options.items() if k != "max_new_tokens"}
                running.add_request(
                    request.prompt, name, request.options["max_new_tokens"],
                    streaming=request.streams, **options,
                )  # fmt: skip
                if request.leaves:
                    running.cancel_request(name)

        start = time.perf_counter()
        sender = threading.Thread(target=send)
        sender.start()
        missing, limit = sum(not one.leaves for one in requests), start + due[-1] + PATIENCE
        while missing and time.perf_counter() < limit:
            result = running.get_result(timeout=0.5)
            if result is None or not result.is_finished() or result.request_id not in arrived:
                continue
            request, since = arrived[result.request_id]
            request.latency = time.perf_counter() - since
            request.answer = list(result.generated_tokens)
            missing -= not request.leaves
        seconds = time.perf_counter() - start
        sender.join()
        return seconds

    with (
        nullcontext() if is_patched else fastgen.disabled(),
        model.continuous_batching_context_manager(
            config, continuous_batching_config=pages
        ) as running,
    ):
        yield Target(run, os.getpid())


@contextmanager
def transformers_serve(
    model: Any, folder: Path, threads: int, is_patched: bool = True, is_batched: bool = True,
    waiting: int = 0,
) -> Iterator[Target]:  # fmt: skip
    """Run `transformers serve`."""
    command = [
        "-m", "fastgen", "run", "transformers", "serve", str(folder), "--device", "cpu", "--dtype",
        "float32",
    ]  # fmt: skip
    command += ["--continuous-batching"] if is_batched else []
    variables = {
        "OMP_NUM_THREADS": str(threads),
        "FASTGEN": "1" if is_patched else "0",
        "FASTGEN_MAX_WAITING": str(waiting),
    }

    def body(request: Request) -> dict[str, Any]:
        return {
            "model": str(folder),
            "prompt": " ".join(map(str, request.prompt)),
            "max_tokens": request.options["max_new_tokens"],
            "temperature": 0,
            "stream": request.streams,
        }

    def text(answer: Any) -> str:
        return "".join(one.get("text") or "" for one in answer["choices"])

    with _process(command, variables, "/health") as (address, pid):
        yield Target(_client(f"{address}/v1/completions", body, text), pid)


@contextmanager
def ray_serve(model: Any, folder: Path, threads: int, waiting: int = 1024) -> Iterator[Target]:
    """Run `fastgen serve`."""
    command = [
        "-m", "fastgen.ray.serve", str(folder), "--cpus", str(threads), "--max-waiting",
        str(waiting),
    ]  # fmt: skip

    def body(request: Request) -> dict[str, Any]:
        text = " ".join(map(str, request.prompt))
        return {"text": text, "options": request.options, "stream": request.streams}

    def text(answer: Any) -> str:
        return answer["text" if "text" in answer else "output"]

    with _process(command, {}, "/health") as (address, pid):
        yield Target(_client(f"{address}/generate", body, text), pid)


def _client(
    address: str, body: Callable[[Request], dict[str, Any]], text: Callable[[Any], str]
) -> Callable[[list[Request], list[float]], float]:
    """Return a function that sends requests over HTTP.

    Args:
        address: Where to.
        body: Makes the JSON of a request.
        text: Reads the text of an answer, or of an event of a stream.
    """

    async def streamed(session: httpx.AsyncClient, request: Request) -> str | None:
        pieces = list[str]()
        async with session.stream("POST", address, json=body(request)) as found:
            request.is_refused = found.status_code in (429, 503)
            if found.status_code != 200:
                return None
            async for line in found.aiter_lines():
                if line.startswith("data: {"):
                    pieces.append(text(json.loads(line.removeprefix("data: "))))
                    if request.leaves:
                        return None
        return "".join(pieces)

    async def whole(session: httpx.AsyncClient, request: Request) -> str | None:
        timeout = 0.2 if request.leaves else PATIENCE
        found = await session.post(address, json=body(request), timeout=timeout)
        request.is_refused = found.status_code in (429, 503)
        return text(found.json()) if found.status_code == 200 else None

    async def one(session: httpx.AsyncClient, request: Request, when: float) -> None:
        await asyncio.sleep(max(0.0, when - time.perf_counter()))
        since = time.perf_counter()
        try:
            found = await (streamed if request.streams else whole)(session, request)
        except httpx.HTTPError:
            return
        request.latency = time.perf_counter() - since
        request.answer = None if found is None else [int(word) for word in found.split()]

    async def all_of(requests: list[Request], due: list[float]) -> float:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=PATIENCE, limits=limits) as session:
            start = time.perf_counter()
            await asyncio.gather(*(
                one(session, request, start + when)
                for request, when in zip(requests, due, strict=True)
            ))  # fmt: skip
            return time.perf_counter() - start

    return lambda requests, due: asyncio.run(all_of(requests, due))


@contextmanager
def _process(command: list[str], variables: dict[str, str], path: str) -> Iterator[tuple[str, int]]:
    """Run a server until it answers; yield its address and process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    process = subprocess.Popen(
        [sys.executable, *command, "--host", "127.0.0.1", "--port", str(port)],
        env=inherited | variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + 120
        while not _answers(address + path):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{' '.join(command)} did not start")
            time.sleep(0.1)
        yield address, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:  # transformers' own manager keeps its process alive
            process.kill()
            process.wait()


def _answers(address: str) -> bool:
    try:
        return httpx.get(address, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
