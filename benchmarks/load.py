"""Load-test transformers' request manager: requests arrive at random; every answer is checked.

    python -m benchmarks.load --threads 2

Clients send requests of mixed lengths to one `ContinuousBatchingManager` at 50, 80 and 120% of its
capacity, by a Poisson process. The capacity is the speed of the same requests sent at once. Greedy
requests run with fastgen and with transformers' own manager, each at shares of its own capacity.
With fastgen, requests also run with mixed options: beams, penalties, streams, and clients that
leave. An answer is wrong if it is not that of `generate` for that request alone, by transformers,
except for near ties. If one is wrong or lost, the result holds no speed.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

import fastgen
from benchmarks.harness import begin, folder_of, option, parser_of, positive, write_result
from benchmarks.many_requests import MODELS
from benchmarks.setting import ENDS
from fastgen.cli.bench.agreement import Agreement

ARMS = ("fastgen", "fastgen, mixed", "stock")
LOADS = (0.5, 0.8, 1.2)
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"num_beams": 2},
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2, "num_beams": 3},
)
LEAVES = 9
"""One in so many requests of the mixed load is cancelled while it runs."""


@dataclass
class Request:
    """A request and its answer.

    Attributes:
        prompt: Token ids.
        options: Options of `generate`.
        leaves: Whether its client leaves.
        latency: Seconds from its arrival to its answer.
        answer: Its new tokens; None until it is answered.
    """

    prompt: list[int]
    options: dict[str, Any]
    leaves: bool = False
    latency: float = 0.0
    answer: list[int] | None = field(default=None)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the load test; return 1 if an answer is wrong or lost."""
    args = _parser().parse_args(argv)
    begin(args.threads)
    shape = MODELS["decoder-only"]
    model: Any = (shape.tiny_version() if args.scale == "tiny" else shape).build(
        torch.float32, args.device
    )
    file = folder_of(args) / "load.json"
    cells: dict[str, Any] = {}
    if args.arms and file.exists():
        cells = json.loads(file.read_text("utf-8"))["result"]["cells"]
    known: dict[str, list[int]] = {}
    for arm in args.arms or ARMS:
        capacity = 0.0
        for load in (None, *LOADS):
            requests = _requests(model, args.requests, "mixed" in arm)
            rate = None if load is None else load * capacity
            with fastgen.disabled() if arm == "stock" else nullcontext():
                if load is None:
                    _run(model, _requests(model, 16, "mixed" in arm), None)  # packs weights
                seconds, grown = _run(model, requests, rate)
            capacity = capacity or len(requests) / seconds
            cell = _verdicts(model, requests, known)
            if not cell["wrong or lost"]:
                cell |= _figures(requests, seconds, grown)
            name = "at once" if load is None else f"at {load:.0%} of capacity"
            cells[f"{arm}, {name}"] = cell
            print(f"{arm}, {name}: {cell}", flush=True)
    equal = not any(one["wrong or lost"] for one in cells.values())
    write_result(args, "load", {"equal": equal, "cells": cells, "requests": args.requests})
    return 0 if equal else 1


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.load", __doc__)
    parser.add_argument("--requests", type=positive, default=200, metavar="N", help="default: 200")
    parser.add_argument(
        "--arms", nargs="*", choices=ARMS, help="default: all; the results of others are kept"
    )
    for name in ("threads", "device", "scale", "out"):
        option(parser, name)
    return parser


def _requests(model: Any, count: int, is_mixed: bool) -> list[Request]:
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(8, 65, (count,), generator=generator).tolist()
    limits = torch.randint(8, 65, (count,), generator=generator).tolist()
    last = model.config.vocab_size - 1
    requests: list[Request] = []
    for number, (length, limit) in enumerate(zip(lengths, limits, strict=True)):
        prompt = torch.randint(4, last, (length,), generator=generator).tolist()
        options = {"max_new_tokens": limit}
        if is_mixed:
            options |= OPTIONS[number % len(OPTIONS)]
        requests.append(Request(prompt, options, is_mixed and number % LEAVES == LEAVES - 1))
    return requests


def _base(model: Any) -> dict[str, Any]:
    return {
        "do_sample": False,
        "pad_token_id": model.config.pad_token_id,
        "eos_token_id": list(range(5, model.config.vocab_size - 1, ENDS)),
    }


def _run(model: Any, requests: list[Request], rate: float | None) -> tuple[float, int]:
    """Send requests, at a rate per second or at once.

    Returns:
        Seconds until the last answer, and by how many bytes the peak of the process's memory grew
        after the first half of the answers.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig

    pages = ContinuousBatchingConfig(num_blocks=4 * 128, page_size=64)
    gaps = torch.zeros(len(requests))
    if rate is not None:
        uniform = torch.rand(len(requests), generator=torch.Generator().manual_seed(7))
        gaps = -uniform.log() / rate
    due = gaps.cumsum(0).tolist()
    arrived: dict[str, tuple[Request, float]] = {}
    waited_for = sum(not one.leaves for one in requests)
    peaks: list[int] = []
    with model.continuous_batching_context_manager(
        GenerationConfig(**_base(model), max_new_tokens=64), continuous_batching_config=pages
    ) as manager:
        start = time.perf_counter()

        def send() -> None:
            for number, (request, when) in enumerate(zip(requests, due, strict=True)):
                time.sleep(max(0.0, start + when - time.perf_counter()))
                name = f"r{number}"
                arrived[name] = request, time.perf_counter()
                options = {k: v for k, v in request.options.items() if k != "max_new_tokens"}
                manager.add_request(
                    request.prompt, name, request.options["max_new_tokens"],
                    streaming=number % 3 == 0 and bool(options), **options,
                )  # fmt: skip
                if request.leaves:
                    manager.cancel_request(name)

        sender = threading.Thread(target=send)
        sender.start()
        answered, limit = 0, time.perf_counter() + 200
        while answered < waited_for and time.perf_counter() < limit:
            result = manager.get_result(timeout=0.5)
            if result is None or not result.is_finished():
                continue
            request, since = arrived[result.request_id]
            request.latency = time.perf_counter() - since
            request.answer = list(result.generated_tokens)
            answered += 1
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        seconds = time.perf_counter() - start
        sender.join()
    return seconds, peaks[-1] - peaks[len(peaks) // 2] if peaks else 0


def _figures(requests: list[Request], seconds: float, grown: int) -> dict[str, Any]:
    latencies = [one.latency for one in requests if one.answer is not None]
    tokens = sum(len(one.answer or ()) for one in requests)
    return {
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "p50": statistics.median(latencies),
        "p95": statistics.quantiles(latencies, n=20)[-1],
        "grown_bytes": grown,
    }


def _verdicts(model: Any, requests: list[Request], known: dict[str, list[int]]) -> dict[str, int]:
    """Compare answers with `generate` of transformers for each request alone."""
    counts: dict[str, Any] = {"equal": 0, "near tie": 0, "wrong or lost": 0}
    for one in requests:
        if one.leaves:
            continue
        ids = torch.tensor([one.prompt])
        options = _base(model) | one.options
        key = repr((one.prompt, sorted(one.options.items())))
        if key not in known:
            with fastgen.disabled():
                mask = torch.ones_like(ids)
                known[key] = model.generate(ids, attention_mask=mask, **options)[0].tolist()
        if one.answer is None:
            counts["wrong or lost"] += 1
            continue
        ours = torch.tensor([one.prompt + one.answer])
        whole = torch.tensor([known[key]])
        if torch.equal(ours, whole):
            counts["equal"] += 1
            continue
        agrees = Agreement(model, {"input_ids": ids}, options)(whole, ours).agrees
        counts["near tie" if agrees else "wrong or lost"] += 1
    return counts


if __name__ == "__main__":
    sys.exit(main())
