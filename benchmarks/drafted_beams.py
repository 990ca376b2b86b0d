"""Measure beam search with steps that a small model drafts, against the large model alone.

    python -m benchmarks.drafted_beams LARGE SMALL --input FILE --append-eos

Runs at batch 1, for 2 and 4 beams and for 1 and 2 steps drafted at a time. The results are the
steps of the search per pass of the large model, the times of both, which take turns in every round,
and whether all sequences are equal. With `int8` as SMALL, the large model on rounded weights
drafts. They are stored in fp32, so the times say nothing, but the steps per pass do.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import fastgen
from benchmarks.harness import begin, option, parser_of, positive, write_result
from fastgen.cli.bench.measure import Verdict, compare
from fastgen.cli.bild import pair
from fastgen.corpus import models

BEAMS, STEPS = (2, 4), (1, 2)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all; return 1 if an output differed."""
    args = _arguments().parse_args(argv)
    begin(args.threads)
    large = pair.load_model(args.large, args.device, "float32")
    is_int8 = args.small == Path("int8")
    small = rounded(large) if is_int8 else pair.load_model(args.small, args.device, "float32")
    lines = pair.read_lines(args.input)[: args.sentences]
    sources = pair.encode(models.load_tokenizer(args.large), lines, args.append_eos, None)
    cells = {
        f"{beams} beams, {steps} drafted": _cell(large, small, sources, beams, steps, args)
        for beams in BEAMS
        for steps in STEPS
    }
    for name, cell in cells.items():
        speed = (
            "{ratio:.2f} [{low:.2f}, {high:.2f}]".format(**cell)
            if cell["equal"]
            else "outputs differ"
        )
        print(f"{name:<20}{speed:<22}{cell['steps_per_pass']:.2f} steps per pass")
    name = "drafted_beams_int8" if is_int8 else "drafted_beams"
    write_result(args, name, {"cells": cells, "sentences": len(sources)})
    return 0 if all(cell["equal"] for cell in cells.values()) else 1


def _arguments() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.drafted_beams", __doc__)
    parser.add_argument("large", type=Path, metavar="LARGE")
    parser.add_argument("small", type=Path, metavar="SMALL", help="folders of the pair; or int8")
    parser.add_argument("--input", type=Path, required=True, metavar="FILE")
    parser.add_argument("--append-eos", action="store_true", help="as of `fastgen bild align`")
    parser.add_argument(
        "--sentences", type=positive, default=60, metavar="N", help="first lines (default: 60)"
    )
    option(parser, "rounds", default=5, help="default: 5")
    option(parser, "threads")
    option(parser, "device", choices=["cpu", "cuda"], help="default: cpu")
    option(parser, "out")
    return parser


def rounded(model: Any) -> Any:
    """Return a copy of a model whose matrices are rounded to int8, a scale for each output."""
    other = copy.deepcopy(model)
    for weight in other.parameters():
        if weight.dim() == 2:
            scale = weight.abs().amax(1, keepdim=True) / 127
            weight.copy_((weight / scale).round_() * scale)
    return other


def _cell(
    large: Any,
    small: Any,
    sources: Sequence[Sequence[int]],
    beams: int,
    steps: int,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Return the speed-up over whole rounds with its interval, and the counters of the drafts."""
    inputs = [torch.tensor([list(source)], device=args.device) for source in sources]

    def run(**options: Any) -> list[Any]:
        settings: dict[str, Any] = {
            "num_beams": beams,
            "max_new_tokens": 128,
            "do_sample": False,
        } | options
        return [large.generate(ids, **settings) for ids in inputs]

    def drafted() -> list[Any]:
        return run(assistant_model=small, lossless=True, speculative_beams=steps)

    def same(alone: list[Any], drafted: list[Any]) -> Verdict:
        return Verdict(all(map(torch.equal, alone, drafted)), note="other tokens")

    before = fastgen.status().bild
    outcome = compare(run, drafted, args.rounds, same)
    after = fastgen.status().bild
    counts = {
        name: after[name] - before.get(name, 0)
        for name in ("beam_steps", "large_calls", "small_calls")
    }
    per_pass = counts["beam_steps"] / counts["large_calls"]
    return outcome.to_dict() | {
        "beams": beams,
        "steps": steps,
        "counts": counts,
        "steps_per_pass": per_pass,
    }


if __name__ == "__main__":
    sys.exit(main())
