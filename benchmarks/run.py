"""Run benchmark cases: `generate` unpatched and with fastgen, on the same model and inputs.

    python -m benchmarks --list
    python -m benchmarks --case bart_large gpt2
    python -m benchmarks --case bart_large --peer ctranslate2
    python -m benchmarks --case never_worse --cells 'small/*' --resume

Both sides run in one process. One JSON file per case goes to benchmarks/results/<hardware>/. The
exit status is 1 if any output differed by more than the rounding of half precision explains.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import fastgen
from benchmarks import runners
from benchmarks.cases import CASES
from benchmarks.harness import (
    begin,
    chosen,
    folder_of,
    option,
    outcome_text,
    parser_of,
    positive,
    write_whole,
)
from benchmarks.session import Session
from benchmarks.setting import run_setting
from benchmarks.step_time import over_floor_text, run_step_time
from fastgen.cli.bench.measure import agrees, environment

PEERS = ("ctranslate2", "compiled", "openvino")
RUNNERS = runners.RUNNERS | {"step_time": run_step_time, "setting": run_setting}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases that the arguments name; return the exit status."""
    args = arguments().parse_args(argv)
    if args.list:
        for case in CASES.values():
            goal = f"at least {case.target:g}x" if case.target else ""
            print(f"{case.name:<14}{case.kind:<10}{goal:<16}{case.help}")
        return 0
    begin(args.threads)
    folder = folder_of(args)
    on_gpu = args.device.startswith("cuda")
    peer = importlib.import_module(f"benchmarks.peer_{args.peer}") if args.peer else None
    names = args.case or [
        name
        for name, case in CASES.items()
        if (on_gpu or not case.gpu) and (peer is None or peer.suits(case))
    ]
    lines, equal = [], True
    for name in names:
        case = runners.of_model(
            runners.sized(CASES[name], args.batch, args.scale == "tiny"), args.model
        )
        if on_gpu and case.gpu_target is not None:
            case = replace(case, target=case.gpu_target)
        suffixes = [args.peer] * bool(args.peer) + [args.dtype] * (
            args.dtype not in ("float32", "float64")
        )
        file = folder / f"{'_'.join([case.name, *suffixes])}.json"
        old = json.loads(file.read_text("utf-8")) if case.kind == "grid" and file.is_file() else {}
        cells = old.get("result", {}).get("cells", {})

        def save(result: dict[str, Any], case=case, file=file, cells=cells) -> None:
            whole = result | {"cells": cells | result["cells"]} if "cells" in result else result
            write(file, case, args, whole)

        session = Session(
            device=args.device,
            dtype=getattr(torch, args.dtype),
            rounds=args.rounds,
            tiny=args.scale == "tiny",
            cells=tuple(args.cells),
            done=frozenset(cells) if args.resume else frozenset(),
            save=save,
            say=lambda line: print(f"  {line}", flush=True),
            sentences=args.sentences,
            corpus=args.corpus,
            model=args.model,
            text=args.text,
            python=args.python,
        )
        print(f"{case.name}: {case.help}", flush=True)
        try:
            result = (peer.run if peer else RUNNERS[case.kind])(case, session)
        except FileNotFoundError as error:
            raise SystemExit(f"{case.name}: {error}") from error
        save(result)
        lines += table(case, result)
        equal &= agreed(result)
    print("\n" + "\n".join(lines))
    return 0 if equal else 1


def arguments() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks", __doc__)
    parser.add_argument(
        "--case", nargs="+", choices=list(CASES), metavar="NAME", help="cases to run (default: all)"
    )
    parser.add_argument(
        "--list", action="store_true", help="print the cases and their targets, and end"
    )
    option(parser, "rounds", help="rounds (default: the case's; for cells, at most)")
    option(parser, "threads")
    option(parser, "device")
    dtypes = ["float32", "float64", "float16", "bfloat16"]
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=dtypes,
        help="default: float32; else the file says which",
    )
    parser.add_argument(
        "--batch", type=positive, metavar="B", help="another batch size; the file's name says so"
    )
    option(parser, "scale")
    parser.add_argument(
        "--sentences",
        type=positive,
        metavar="N",
        help="first lines of the test text only (trained)",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="another Marian model than the example's (trained); the file's name says so",
    )
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="what it translates, a sentence a line"
    )
    parser.add_argument(
        "--corpus",
        type=Path,
        metavar="DIR",
        help="train, valid, test.{en,es} for fairseq_command (default: the example)",
    )
    parser.add_argument(
        "--cells",
        nargs="+",
        default=["*"],
        metavar="PATTERN",
        help="cells of never_worse, as in small/batch4/beams*/source128 (default: all)",
    )
    parser.add_argument(
        "--resume", action="store_true", help="leave out cells that the results file already holds"
    )
    parser.add_argument(
        "--peer",
        choices=PEERS,
        help="three-way comparison with this system, for the cases that have one; "
        "compiled: transformers' own fastest",
    )
    parser.add_argument(
        "--python",
        type=Path,
        metavar="FILE",
        help="Python of the environment with optimum-intel (--peer openvino)",
    )
    option(parser, "out")
    return parser


def write(file: Path, case: Any, args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Write everything that the figures are based on; a plot needs nothing else."""
    data = {
        "case": case.name,
        "kind": "peer" if args.peer else case.kind,
        "help": case.help,
        "target": case.target,
        "peer_target": case.peer_target,
        "floor_target": case.floor_target,
        "arguments": {name: value for name, value in chosen(args).items() if name != "out"},
        "environment": environment(),
        "status": fastgen.status().to_dict(),
        "result": result,
    }
    write_whole(file, data)


def agreed(result: dict[str, Any]) -> bool:
    """Return whether all outputs agreed. A table of memory compares none."""
    return all(map(agrees, result.get("cells", {}).values())) and (
        "equal" not in result or agrees(result)
    )


def table(case: Any, result: dict[str, Any]) -> list[str]:
    """Return the printed lines of a case: one, or one for each cell, model or system."""
    if "models" in result:
        return [
            f"{case.name} {name:<14}{side:<10}{runners.memory_text(model, side)}"
            for name, model in result["models"].items()
            for side in ("stock", "fastgen")
        ]
    if case.kind == "step_time":
        return [f"{case.name} {key:<36}{outcome_text(cell)}"
                + over_floor_text(replace(case, **{cell["axis"]: cell["value"]}), cell)
                for key, cell in result["cells"].items()]  # fmt: skip
    if "cells" in result:
        return [f"{case.name} {key:<36}{outcome_text(cell)}{missed(cell, case.target)}"
                for key, cell in result["cells"].items()]  # fmt: skip
    if "systems" in result:
        lines = [
            f"{case.name} {name:<14}{seconds:8.3f} s" for name, seconds in result["systems"].items()
        ]
        over = [
            f"{case.name} fastgen over {name:<14}"
            f"{figure['ratio']:.2f}x [{figure['low']:.2f}, {figure['high']:.2f}]"
            + missed(figure, case.peer_target if name != "stock" else case.target)
            for name, figure in result["over"].items()
        ]
        same = [f"{case.name} {name:<14}{count} of {result['sentences']} texts are transformers'"
                for name, count in result.get("same_texts", {}).items()]  # fmt: skip
        return [*lines, *over, *same]
    return [f"{case.name:<13} {outcome_text(result)}{missed(result, case.target)}"]


def missed(result: dict[str, Any], target: float | None) -> str:
    """Return a remark if the target was missed, else ""."""
    ratio = result.get("ratio")
    return (
        f"  BELOW TARGET {target:g}x"
        if target is not None and ratio is not None and ratio < target
        else ""
    )


if __name__ == "__main__":
    sys.exit(main())
