"""Load-test a server on this machine with many clients; every answer is checked.

    python -m benchmarks.serving --clients 200 --rounds 3

Measures latency and throughput. The same server runs twice, patched and with FASTGEN=0 in its
processes. Each round sends every client's texts to both servers, in alternating order. The loop is
closed: a client sends its next text when it has its answer. The reference is generated one text at
a time, by transformers alone. An answer that differs from the reference is wrong, unless it is a
near tie (`fastgen.cli.bench.agreement`). If an answer is wrong or missing, the result holds no
speed and the exit status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import httpx

import fastgen
from benchmarks.cases import EXAMPLE
from benchmarks.harness import option, parser_of, positive, write_result
from benchmarks.near_ties import is_near_tie
from fastgen.cli.bench.measure import environment, paired_ratio
from fastgen.corpus.texts import Options, Output, TextGenerator

ARMS = {"stock": "0", "fastgen": "1"}
Answer = tuple[float, str | None]  # seconds, and the text or None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the load test; return the exit status."""
    args = _parser().parse_args(argv)
    texts = (EXAMPLE / "test.en").read_text("utf-8").splitlines()[: args.clients * args.texts]
    if len(texts) < args.clients * args.texts:
        raise SystemExit(
            f"{args.clients} clients of {args.texts} texts need more than "
            f"the {len(texts)} there are"
        )
    generation = {"num_beams": args.beams, "max_new_tokens": args.new_tokens}
    reference = Reference(generation)
    print(f"{len(texts)} references, one text at a time", flush=True)
    reference.make(texts)
    with _server(args, generation, "stock") as stock, _server(args, generation, "fastgen") as ours:
        urls = {"stock": stock, "fastgen": ours}
        for url in urls.values():
            # Warm up: fills what the server keeps between calls.
            asyncio.run(_load(url, texts[: args.clients], args.clients))
        rounds = []
        for number in range(args.rounds):
            order = list(urls) if number % 2 == 0 else list(urls)[::-1]
            rounds.append(
                {name: _round(urls[name], texts, args.clients, reference) for name in order}
            )
            print({name: {key: figure for key, figure in one.items() if key != "latencies"}
                   for name, one in rounds[-1].items()}, flush=True)  # fmt: skip
        status = {name: httpx.get(f"{url}/status", timeout=60).json() for name, url in urls.items()}
    result = _result(rounds)
    more = {
        "environment": environment() | {"threads": int(args.cpus), "ray": version("ray")},
        "status": status,
    }
    write_result(args, "serving", result, help="a server on loopback, many clients", **more)
    print(json.dumps({key: value for key, value in result.items() if key != "rounds"}, indent=1))
    return 0 if result["equal"] else 1


class Reference:
    """Answers of transformers alone, one text at a time.

    Args:
        generation: arguments of `generate`.
    """

    def __init__(self, generation: dict[str, Any]) -> None:
        self.generation = generation
        self.generator = TextGenerator(Options(EXAMPLE / "model", generation))
        self.known: dict[str, str] = {}

    def make(self, texts: Sequence[str]) -> None:
        with fastgen.disabled():
            for text in texts:
                (found,) = self.generator([text])
                assert isinstance(found, Output), found
                self.known[text] = found.texts[0]

    def verdict(self, text: str, answer: str | None) -> str:
        """Return equal, near tie, wrong or lost."""
        if answer is None:
            return "lost"
        if answer == self.known[text]:
            return "equal"
        return "near tie" if is_near_tie(self.generator, self.generation, text, answer) else "wrong"


def _round(url: str, texts: Sequence[str], clients: int, reference: Reference) -> dict[str, Any]:
    begin = time.perf_counter()
    answers = asyncio.run(_load(url, texts, clients))
    seconds = time.perf_counter() - begin
    verdicts = [
        reference.verdict(text, answer) for text, (_, answer) in zip(texts, answers, strict=True)
    ]
    latencies = sorted(latency for latency, _ in answers)
    return {
        "seconds": seconds,
        "texts_per_second": len(texts) / seconds,
        "p50": statistics.median(latencies),
        "p95": statistics.quantiles(latencies, n=20)[-1],
        **{name: verdicts.count(name) for name in ("equal", "near tie", "wrong", "lost")},
        "latencies": [round(latency, 4) for latency in latencies],
    }


async def _load(url: str, texts: Sequence[str], clients: int) -> list[Answer]:
    """Return the answers to all texts; client c sends texts c, c + clients, ... in sequence."""
    answers: list[Answer] = [(0.0, None)] * len(texts)
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as session:

        async def client(first: int) -> None:
            for place in range(first, len(texts), clients):
                begin = time.perf_counter()
                try:
                    response = await session.post("/generate", json={"text": texts[place]})
                    text = response.json()["output"] if response.status_code == 200 else None
                except httpx.HTTPError:
                    text = None
                answers[place] = (time.perf_counter() - begin, text)

        await asyncio.gather(*map(client, range(clients)))
    return answers


@contextmanager
def _server(args: argparse.Namespace, generation: dict[str, Any], arm: str) -> Iterator[str]:
    """Start a server of one arm and yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "fastgen.ray.serve", str(EXAMPLE / "model"), "--port", str(port),
        "--generation", json.dumps(generation), "--cpus", str(args.cpus), "--batch-tokens",
        str(args.batch_tokens),
    ]  # fmt: skip
    # Ray gives a replica as many threads as it has processors, unless OMP_NUM_THREADS is set.
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("OMP_NUM_THREADS", "FASTGEN")
    }
    process = subprocess.Popen(
        command,
        env=inherited | {"FASTGEN": ARMS[arm]},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        if "serving" not in process.stdout.readline():
            raise RuntimeError(f"the server of {arm} did not start")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def _result(rounds: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return figures over all rounds; no speed if an answer was wrong or lost."""
    counts = {
        name: {
            what: sum(one[name][what] for one in rounds)
            for what in ("equal", "near tie", "wrong", "lost")
        }
        for name in ARMS
    }
    equal = not any(count["wrong"] or count["lost"] for count in counts.values())
    result: dict[str, Any] = {
        "equal": equal,
        "answers": counts,
        "near_ties": counts["fastgen"]["near tie"],
    }
    if equal:
        seconds = [[one[name]["seconds"] for one in rounds] for name in ARMS]
        result |= dict(zip(("ratio", "low", "high"), paired_ratio(*seconds), strict=True))
        for name in ARMS:
            result[name] = {
                key: statistics.median(one[name][key] for one in rounds)
                for key in ("texts_per_second", "p50", "p95")
            }
        result["rounds"] = rounds
    return result


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.serving", __doc__)
    parser.add_argument(
        "--clients", type=positive, default=200, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--texts",
        type=positive,
        default=5,
        metavar="N",
        help="of each client (default: %(default)s)",
    )
    option(parser, "rounds", default=5, help="default: %(default)s")
    parser.add_argument(
        "--beams", type=positive, default=4, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--new-tokens", type=positive, default=160, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--batch-tokens", type=positive, default=2048, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--cpus", type=positive, default=os.cpu_count(), metavar="N", help="of the server's replica"
    )
    option(parser, "out")
    return parser


if __name__ == "__main__":
    sys.exit(main())
