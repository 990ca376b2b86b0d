"""Shared parts of all benchmarks: options, process setup, child processes, results files."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


_OPTIONS: dict[str, dict[str, Any]] = {
    "rounds": {"type": positive, "metavar": "N"},
    "threads": {
        "type": positive,
        "metavar": "N",
        "help": "torch's CPU threads (default: torch's choice)",
    },
    "device": {"default": "cpu", "help": "cpu, cuda or cuda:N (default: cpu)"},
    "scale": {
        "default": "full",
        "choices": ["full", "tiny"],
        "help": "tiny: a test of the benchmark itself",
    },
    "out": {
        "type": Path,
        "metavar": "DIR",
        "help": "folder (default: benchmarks/results/<hardware>)",
    },
}


def parser_of(module: str, doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of a module; the first paragraph of `doc` describes it."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}", description=(doc or "").split("\n\n", 1)[0]
    )


def option(parser: argparse.ArgumentParser, name: str, **changes: Any) -> None:
    """Add one of the options that benchmarks share, with `changes` to its settings."""
    parser.add_argument(f"--{name}", **_OPTIONS[name] | changes)


def common(parser: argparse.ArgumentParser, rounds: int) -> argparse.ArgumentParser:
    """Add the options of every benchmark of many small models."""
    option(parser, "rounds", default=rounds, help=f"default: {rounds}")
    for name in ("threads", "device", "scale", "out"):
        option(parser, name)
    return parser


def begin(threads: int | None) -> None:
    """Prepare a benchmark process.

    Imports fastgen, which patches the toolkits (baselines run inside `fastgen.disabled()`). Turns
    off transformers' warnings and progress bars, turns off gradients, and sets the number of CPU
    threads.
    """
    import torch
    from transformers.utils import logging

    import fastgen  # noqa: F401

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_grad_enabled(False)
    if threads:
        torch.set_num_threads(threads)


def finished(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a process to its end, with additional environment variables.

    Raises:
        RuntimeError: the process failed; the message holds the end of its output.
    """
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | environment
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
    return done


def hardware(device: str) -> str:
    """Return the name of the results folder for a device.

    A GPU's folder has its name, such as h200. A processor's is cpu-intel, cpu-zen5, cpu-avx2, or
    cpu for all others.
    """
    if not device.startswith("cuda"):
        from fastgen.cli.bench.measure import processor_kind

        return f"{device}-{processor_kind()}".removesuffix("-")
    import torch

    return (
        re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower())
        .strip("-")
        .removeprefix("nvidia-")
    )


def folder_of(args: argparse.Namespace) -> Path:
    """Return the folder for the results of a command line."""
    return args.out or RESULTS / hardware(getattr(args, "device", "cpu"))


def chosen(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments for a results file.

    A path is reduced to its name, since its location on this machine is irrelevant.
    """
    return {
        name: value.name if isinstance(value, Path) else value for name, value in vars(args).items()
    }


def write_result(args: argparse.Namespace, name: str, result: dict[str, Any], **more: Any) -> None:
    """Write a benchmark's results, arguments, environment and `more` to a file of its name."""
    from fastgen.cli.bench.measure import environment

    about = {
        "case": name,
        "kind": name,
        "arguments": chosen(args),
        "environment": environment(),
        **more,
    }
    write_whole(folder_of(args) / f"{name}.json", about | {"result": result})


def write_whole(file: Path, data: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")  # an interrupted run keeps the old file intact
    part.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", "utf-8")
    part.replace(file)


def measured(
    args: argparse.Namespace, name: str, cells: Iterable[tuple[str, str, dict[str, Any]]]
) -> int:
    """Print the results of a benchmark of many small models, and write them as they come.

    Args:
        args: the command line.
        name: name of the benchmark.
        cells: model, call, and result of each measurement.
    Returns:
        1 if any output differed, else 0.
    """
    from fastgen.cli.bench.measure import agrees

    results: dict[str, dict[str, Any]] = {}
    for model, call, found in cells:
        results.setdefault(model, {})[call] = found
        print(f"{model:<20}{call:<20}{outcome_text(found)}", flush=True)
        arguments = {"threads": args.threads, "rounds": args.rounds}
        if (dtype := getattr(args, "dtype", "float32")) != "float32":
            write_result(
                args, f"{name}_{dtype}", results, kind=name, arguments=arguments | {"dtype": dtype}
            )
        else:
            write_result(args, name, results, arguments=arguments)
    return 0 if all(agrees(found) for calls in results.values() for found in calls.values()) else 1


def outcome_text(result: dict[str, Any]) -> str:
    """Return a result in one line; the speed only if the outputs agree."""
    from fastgen.cli.bench.measure import agrees

    if not agrees(result):
        return f"OUTPUTS DIFFER: {result['note']}"
    ties = f", {result['near_ties']} near ties" if result["near_ties"] else ""
    ties += "" if result["equal"] else f", within rounding: {result['note']}"
    ran = "" if result.get("hits", True) else ", fastgen did not run"
    interval = f"[{result['low']:.2f}, {result['high']:.2f}]"
    seconds = f"{result['baseline_seconds']:.3f} s -> {result['candidate_seconds']:.3f} s"
    return (
        f"{result['ratio']:.2f}x {interval}  {seconds}, {len(result['rounds'])} rounds{ties}{ran}"
    )
