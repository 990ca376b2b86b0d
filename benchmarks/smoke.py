"""Look closely at one model on one device for a minute: what runs, and the time of each step.

    python -m benchmarks.smoke --device cuda --look machine call profile exact

- machine: versions, the device, the bandwidth of a copy and the rate of a matrix product;
- call: BART-large's shape in bfloat16 with one sentence and with 32. Reports the seconds of the
  first calls (the first one compiles kernels), the CUDA graphs captured, the disabled features with
  their reasons, and the time of a decode step relative to its floor;
- profile: the kernels of some decode steps (profile_batch1.txt, profile_batch32.txt);
- exact: tokens in float32, compared with those of the unpatched toolkit.

smoke.json is rewritten after each result, so a later failure loses nothing.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fastgen
from benchmarks.cases import CASES, Case
from benchmarks.harness import begin, folder_of, option, parser_of, write_whole
from benchmarks.ops import copy_bandwidth
from benchmarks.session import Session, profiled
from benchmarks.step_time import floor, product_rate
from fastgen.cli.bench.measure import environment
from fastgen.models.cuda_graphs import graph
from fastgen.patches.transformers.generate.report import last_call

LOOKS = ("machine", "call", "profile", "exact")
NEW_TOKENS, PROFILED = 40, 8
TINY_TOKENS = 16  # enough for steps to be captured


class Looks:
    """The looks at one machine; each is a method that yields names and JSON-ready data.

    Args:
        session: device, dtype and scale.
        out: folder for the profile tables.
    """

    def __init__(self, session: Session, out: Path) -> None:
        self.session, self.out = session, out
        self._models: dict[torch.dtype, Any] = {}

    def machine(self) -> Iterator[tuple[str, Any]]:
        device, session = self.session.device, self.session
        found: dict[str, Any] = {
            "copy_bytes_per_s": copy_bandwidth(device),
            "flop_per_s": product_rate(session),
        }
        if device.startswith("cuda"):
            properties = torch.cuda.get_device_properties(device)
            found |= {
                "multiprocessors": properties.multi_processor_count,
                "bytes": properties.total_memory,
            }
            found["nvidia_smi"] = subprocess.run(
                ["nvidia-smi"], capture_output=True, text=True
            ).stdout
        yield "machine", found

    def call(self) -> Iterator[tuple[str, Any]]:
        bandwidth, rate = copy_bandwidth(self.session.device), product_rate(self.session)
        for case in self._cases():
            model = self._model(case, self.session.dtype)
            inputs, options = case.inputs(model), case.generate_options
            seconds = []
            with captures() as captured:
                for _ in range(3):
                    began = time.perf_counter()
                    model.generate(**inputs, **options)
                    self.session.synchronize()
                    seconds.append(time.perf_counter() - began)
                    captured.append("|")
            report = last_call()
            steps = [] if report is None else [s for _, s in report.steps[:-1]]
            least = [floor(model, case, t, bandwidth, rate) for t in range(1, len(steps) + 1)]
            yield f"call_batch{case.batch}", {
                "seconds": seconds, "captured": " ".join(captured),
                "plan": report and asdict(report.plan), "step_seconds": steps,
                "over_floor": statistics.median(s / f for s, f in zip(steps, least, strict=True))
                if steps else None,
            }  # fmt: skip

    def profile(self) -> Iterator[tuple[str, Any]]:
        key = (
            "self_device_time_total"
            if self.session.device.startswith("cuda")
            else "self_cpu_time_total"
        )
        for case in self._cases():
            model = self._model(case, self.session.dtype)
            tables, counts = {}, []
            for tokens in (PROFILED, 2 * PROFILED):
                sized = replace(case, new_tokens=tokens)
                inputs, options = sized.inputs(model), sized.generate_options
                model.generate(**inputs, **options)
                events = profiled(
                    partial(model.generate, **inputs, **options), self.session.device
                ).key_averages()
                counts.append(sum(event.count for event in events))
                tables[tokens] = events.table(sort_by=key, row_limit=60, max_name_column_width=100)
            file = self.out / f"profile_batch{case.batch}.txt"
            file.write_text(
                "\n\n".join(f"{tokens} new tokens\n{table}" for tokens, table in tables.items()),
                "utf-8",
            )
            yield (
                f"profile_batch{case.batch}",
                {"launches_per_step": (counts[1] - counts[0]) / PROFILED, "table": file.name},
            )

    def exact(self) -> Iterator[tuple[str, Any]]:
        self._models.clear()
        for case in self._cases():
            model = self._model(case, torch.float32)
            inputs, options = case.inputs(model), case.generate_options
            with fastgen.disabled():
                stock = model.generate(**inputs, **options)
            found = model.generate(**inputs, **options)
            same = [a == b for a, b in zip(stock.tolist(), found.tolist(), strict=True)]
            yield (
                f"exact_batch{case.batch}",
                {"equal": all(same), "sentences": len(same), "equal_sentences": sum(same)},
            )

    def _cases(self) -> Iterator[Case]:
        case, tokens = CASES["gpu_bart_large"], NEW_TOKENS
        if self.session.tiny:
            case, tokens = case.tiny(), TINY_TOKENS
        for batch in (1, case.batch):
            yield replace(case, batch=batch, new_tokens=tokens)

    def _model(self, case: Case, dtype: torch.dtype) -> Any:
        if dtype not in self._models:
            assert case.shape is not None
            self._models[dtype] = case.shape.build(dtype, self.session.device)
        return self._models[dtype]


@contextmanager
def captures() -> Iterator[list[str]]:
    """Record the names of the functions that are captured as CUDA graphs within the context."""
    names, capture = list[str](), graph.capture

    def noted(function: Any, *args: Any) -> Any:
        names.append(getattr(getattr(function, "func", function), "__name__", "?").lstrip("_"))
        return capture(function, *args)

    graph.capture = noted
    try:
        yield names
    finally:
        graph.capture = capture


def main(argv: Sequence[str] | None = None) -> int:
    """Run the looks that the arguments name; return 1 if one failed or found different tokens."""
    parser = parser_of("benchmarks.smoke", __doc__)
    parser.add_argument(
        "--look", nargs="+", choices=LOOKS, default=LOOKS, metavar="NAME", help="default: all"
    )
    option(parser, "device")
    option(parser, "scale", help="tiny: a test of the looks themselves")
    option(parser, "out")
    args = parser.parse_args(argv)
    begin(None)
    folder = folder_of(args)
    folder.mkdir(parents=True, exist_ok=True)
    looks = Looks(Session(args.device, torch.bfloat16, tiny=args.scale == "tiny"), folder)
    results: dict[str, Any] = {}
    succeeded = True
    for look in args.look:
        try:
            for key, found in getattr(looks, look)():
                results[key] = found
                succeeded &= found.get("equal", True)
                print(
                    key,
                    {
                        name: value
                        for name, value in found.items()
                        if name not in ("step_seconds", "nvidia_smi")
                    },
                    flush=True,
                )
                _save(folder, args.look, results)
        except Exception as error:  # the other looks still run
            traceback.print_exc()
            results[look] = {"error": f"{type(error).__name__}: {error}"}
            succeeded = False
            _save(folder, args.look, results)
    return 0 if succeeded else 1


def _save(folder: Path, looks: Sequence[str], results: dict[str, Any]) -> None:
    name = "machine" if list(looks) == ["machine"] else "smoke"
    write_whole(
        folder / f"{name}.json", {"kind": "smoke", "environment": environment(), "result": results}
    )


if __name__ == "__main__":
    sys.exit(main())
