"""Load-test request managers and servers: requests arrive at random; every answer is checked.

    python -m benchmarks.load --threads 2 --arms manager "manager, stock"

200 clients send requests of mixed lengths at 50, 80 and 120% of an arm's capacity, by a Poisson
process. The capacity is the speed of the same requests sent at once. An arm is a
`ContinuousBatchingManager` in this process, `transformers serve`, or `fastgen serve`, each on
this machine. In mixed arms, requests also have different options, stream, or are cancelled by
clients that leave. Other arms overload a server, or send an hour's worth of requests and watch its
memory. An answer is wrong if it is not that of `generate` for that request alone, by transformers,
except for near ties. If one is wrong or lost, the result holds no speed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import fastgen
from benchmarks.harness import begin, folder_of, option, parser_of, positive, write_result
from benchmarks.load_targets import Request, Target, manager, ray_serve, save, transformers_serve
from benchmarks.many_requests import MODELS
from benchmarks.setting import ENDS
from fastgen.cli.bench.agreement import Agreement

LOADS = (0.5, 0.8, 1.2)
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"num_beams": 2},
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2, "num_beams": 3},
)
LEAVES = 9
"""One in so many requests of a mixed load is cancelled by its client."""

STREAMS = 3
"""One in so many requests of a mixed load is streamed."""

DISTINCT = 64
"""Number of different requests; clients send them again and again."""

WAITING = 20
"""Requests that may wait in an overloaded server."""

ARMS: dict[str, dict[str, Any]] = {
    "manager": {"target": manager},
    "manager, stock": {"target": manager, "is_patched": False},
    "manager, mixed": {"target": manager, "is_mixed": True},
    "manager, an hour": {"target": manager, "is_mixed": True, "is_hour": True},
    "serve": {"target": transformers_serve},
    "serve, stock": {"target": transformers_serve, "is_patched": False},
    "serve, stock, one by one": {
        "target": transformers_serve, "is_patched": False, "is_batched": False, "loads": (),
    },
    "serve, an hour": {"target": transformers_serve, "is_hour": True},
    "serve, overload": {"target": transformers_serve, "waiting": WAITING, "loads": ()},
    "ray": {"target": ray_serve},
    "ray, mixed": {"target": ray_serve, "is_mixed": True},
    "ray, overload": {"target": ray_serve, "waiting": WAITING, "loads": ()},
}  # fmt: skip
"""Servers, and what is sent to them.

`transformers serve` has no options per request but the number of new tokens, so its requests are
all greedy; a third of them are streamed, and some of their clients leave.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the load test; return 1 if an answer is wrong or lost."""
    args = _parser().parse_args(argv)
    begin(args.threads)
    file = folder_of(args) / "load.json"
    cells: dict[str, Any] = {}
    if args.arms and file.exists():
        cells = json.loads(file.read_text("utf-8"))["result"]["cells"]
    equal = True
    for arm in args.arms or ARMS:
        test = _Test(arm, args)
        cells = {name: cell for name, cell in cells.items() if cell["arm"] != arm}
        for name, cell in test.run().items():
            cells[f"{arm}, {name}"] = {"arm": arm} | cell
            print(f"{arm}, {name}: {cell}", flush=True)
        # The sort is stable: the rates of an arm stay in their order.
        cells = dict(sorted(cells.items(), key=lambda item: list(ARMS).index(item[1]["arm"])))
        equal = not any(one["wrong"] or one["lost"] for one in cells.values())
        write_result(args, "load", {"equal": equal, "cells": cells})
    return 0 if equal else 1


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.load", __doc__)
    parser.add_argument("--requests", type=positive, default=200, metavar="N", help="default: 200")
    parser.add_argument(
        "--hour", type=positive, default=3600, metavar="N", help="requests of an hour (3600)"
    )
    parser.add_argument(
        "--arms", nargs="*", choices=ARMS, metavar="ARM",
        help=f"default: all; the results of others are kept. {'; '.join(ARMS)}",
    )  # fmt: skip
    for name in ("threads", "scale", "out"):
        option(parser, name)
    return parser


class _Test:
    """The requests of one arm, sent at several rates.

    Args:
        arm: Its name.
        args: The command line.
    """

    def __init__(self, arm: str, args: argparse.Namespace) -> None:
        about = ARMS[arm]
        self.about, self.args = about, args
        self.is_mixed, self.is_hour = about.get("is_mixed", False), about.get("is_hour", False)
        self.limit = about.get("waiting")
        shape = MODELS["decoder-only"]
        is_tiny = self.is_hour or args.scale == "tiny"
        self.model: Any = (shape.tiny_version() if is_tiny else shape).build(torch.float32, "cpu")
        for name, value in _base(self.model).items():
            setattr(self.model.generation_config, name, value)
        self.known: dict[str, list[int]] = {}

    def run(self) -> dict[str, dict[str, Any]]:
        """Send all requests; return the results of each rate."""
        given = {name: self.about[name] for name in ("is_patched", "is_batched", "waiting")
                 if name in self.about}  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            save(self.model, Path(folder))
            threads = self.args.threads or torch.get_num_threads()
            with self.about["target"](self.model, Path(folder), threads, **given) as target:
                target.send(self._requests(16))  # packs weights
                return self._hour(target) if self.is_hour else self._rates(target)

    def _rates(self, target: Target) -> dict[str, dict[str, Any]]:
        """Send requests at once, and at shares of the speed of that."""
        cells: dict[str, dict[str, Any]] = {}
        capacity = 0.0
        for load in (None, *self.about.get("loads", LOADS)):
            requests = self._requests(self.args.requests)
            gaps = torch.zeros(len(requests), dtype=torch.float64)
            if load is not None:
                uniform = torch.rand(len(gaps), generator=torch.Generator().manual_seed(7))
                gaps = -uniform.log() / (load * capacity)
            seconds = target.send(requests, gaps.cumsum(0).tolist())
            capacity = capacity or len(requests) / seconds
            cell = self._verdicts(requests)
            if not cell["wrong"] and not cell["lost"]:
                cell |= _figures(requests, seconds)
            cells["at once" if load is None else f"at {load:.0%} of capacity"] = cell
        return cells

    def _hour(self, target: Target) -> dict[str, dict[str, Any]]:
        """Send an hour's worth of requests in waves, and watch the memory of the server."""
        total, bytes_, seconds = self._verdicts([]), list[int](), 0.0
        for _ in range(-(-self.args.hour // self.args.requests)):
            wave = self._requests(self.args.requests)
            seconds += target.send(wave)
            bytes_.append(target.memory())
            total = {name: n + total[name] for name, n in self._verdicts(wave).items()}
        settled = bytes_[len(bytes_) // 3]
        grown = {"bytes": bytes_, "grown": (bytes_[-1] - settled) / settled, "seconds": seconds}
        return {"in waves": total | grown}

    def _requests(self, count: int) -> list[Request]:
        generator = torch.Generator().manual_seed(1)
        lengths = torch.randint(8, 65, (DISTINCT,), generator=generator).tolist()
        limits = torch.randint(8, 65, (DISTINCT,), generator=generator).tolist()
        last = self.model.config.vocab_size - 1
        prompts = [torch.randint(5, last, (n,), generator=generator).tolist() for n in lengths]
        requests: list[Request] = []
        is_served = self.about["target"] is not manager
        for number in range(count):
            which = number % DISTINCT
            options = {"max_new_tokens": limits[which]}
            options |= OPTIONS[which % len(OPTIONS)] if self.is_mixed else {}
            varies = self.is_mixed or is_served
            requests.append(Request(
                prompts[which], options,
                leaves=varies and self.limit is None and number % LEAVES == LEAVES - 1,
                streams=varies and number % STREAMS == 0,
            ))  # fmt: skip
        return requests

    def _verdicts(self, requests: list[Request]) -> dict[str, int]:
        """Compare answers with `generate` of transformers for each request alone."""
        names = ("equal", "near tie", "wrong", "lost", "refused", "left")
        counts = dict.fromkeys(names, 0)
        for one in requests:
            if one.leaves:
                verdict = "left"
            elif one.is_refused and self.limit is not None:
                verdict = "refused"
            elif one.answer is None:
                verdict = "lost"
            else:
                verdict = self._verdict(one, one.answer)
            counts[verdict] += 1
        return counts

    def _verdict(self, one: Request, answer: list[int]) -> str:
        ids = torch.tensor([one.prompt])
        options = _base(self.model) | one.options
        key = repr((one.prompt, one.options))
        if key not in self.known:
            with fastgen.disabled():
                mask = torch.ones_like(ids)
                found = self.model.generate(ids, attention_mask=mask, **options)
            self.known[key] = found[0].tolist()
        if one.prompt + answer == self.known[key]:
            return "equal"
        whole, ours = torch.tensor([self.known[key]]), torch.tensor([one.prompt + answer])
        agrees = Agreement(self.model, {"input_ids": ids}, options)(whole, ours).agrees
        return "near tie" if agrees else "wrong"


def _base(model: Any) -> dict[str, Any]:
    return {
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": list(range(5, model.config.vocab_size - 1, ENDS)),
    }


def _figures(requests: list[Request], seconds: float) -> dict[str, float]:
    answered = [one for one in requests if one.answer is not None]
    latencies = [one.latency for one in answered]
    return {
        "seconds": seconds,
        "tokens_per_second": sum(len(one.answer or ()) for one in answered) / seconds,
        "p50": statistics.median(latencies),
        "p95": statistics.quantiles(latencies, n=20)[-1],
    }


if __name__ == "__main__":
    sys.exit(main())
