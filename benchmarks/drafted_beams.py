"""Beam search of a trained pair with steps that the small model drafts, beside the large model's alone, at batch 1.

    python -m benchmarks.drafted_beams LARGE SMALL --input FILE --append-eos

For 2 and 4 beams, and steps drafted at a time: the steps of the search for each pass of the large model, the times of
both, round by round in turn, and whether all sequences are equal.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.run import RESULTS, hardware, positive

BEAMS, STEPS = (2, 4), (1, 2)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all; return 1 if an output differed."""
    args = _arguments().parse_args(argv)

    import torch

    from fastgen.cli.bench.measure import environment
    from fastgen.cli.bild import pair
    from fastgen.corpus import models

    if args.threads:
        torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    large, small = (pair.load_model(folder, args.device, "float32") for folder in (args.large, args.small))
    lines = pair.read_lines(args.input)[: args.sentences]
    sources = pair.encode(models.load_tokenizer(args.large), lines, args.append_eos, None)
    cells = {
        f"{beams} beams, {steps} drafted": _cell(large, small, sources, beams, steps, args)
        for beams in BEAMS
        for steps in STEPS
    }
    for name, cell in cells.items():
        speed = "{ratio:.2f} [{low:.2f}, {high:.2f}]".format(**cell) if cell["equal"] else "outputs differ"
        print(f"{name:<20}{speed:<22}{cell['steps_per_pass']:.2f} steps per pass")
    chosen = {name: value.name if isinstance(value, Path) else value for name, value in vars(args).items()}
    data = {
        "case": "drafted_beams", "kind": "drafted_beams", "arguments": chosen, "environment": environment(),
        "result": {"cells": cells, "sentences": len(sources)},
    }  # fmt: skip
    file = (args.out or RESULTS / hardware(args.device)) / "drafted_beams.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(data, indent=1) + "\n", "utf-8")
    return 0 if all(cell["equal"] for cell in cells.values()) else 1


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.drafted_beams", description=(__doc__ or "").split("\n\n", 1)[0]
    )
    parser.add_argument("large", type=Path, metavar="LARGE")
    parser.add_argument("small", type=Path, metavar="SMALL", help="folders of the pair")
    parser.add_argument("--input", type=Path, required=True, metavar="FILE")
    parser.add_argument("--append-eos", action="store_true", help="as of `fastgen bild align`")
    parser.add_argument("--sentences", type=positive, default=60, metavar="N", help="first lines (default: 60)")
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="default: 5")
    parser.add_argument("--threads", type=positive, metavar="N", help="torch's CPU threads (default: torch's choice)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="default: cpu")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder (default: benchmarks/results/<hardware>)")
    return parser


def _cell(
    large: Any, small: Any, sources: Sequence[Sequence[int]], beams: int, steps: int, args: argparse.Namespace
) -> dict[str, Any]:
    """The ratio of times of whole rounds with its interval, and what was saved."""
    import torch

    import fastgen
    from fastgen.cli.bench.measure import Verdict, compare

    inputs = [torch.tensor([list(source)], device=args.device) for source in sources]

    def run(**options: Any) -> list[Any]:
        settings: dict[str, Any] = {"num_beams": beams, "max_new_tokens": 128, "do_sample": False} | options
        return [large.generate(ids, **settings) for ids in inputs]

    def drafted() -> list[Any]:
        return run(assistant_model=small, lossless=True, speculative_beams=steps)

    def same(alone: list[Any], drafted: list[Any]) -> Verdict:
        return Verdict(all(map(torch.equal, alone, drafted)), note="other tokens")

    before = fastgen.status().bild
    outcome = compare(run, drafted, args.rounds, same)
    after = fastgen.status().bild
    counts = {name: after[name] - before.get(name, 0) for name in ("beam_steps", "large_calls", "small_calls")}
    per_pass = counts["beam_steps"] / counts["large_calls"]
    return outcome.to_dict() | {"beams": beams, "steps": steps, "counts": counts, "steps_per_pass": per_pass}


if __name__ == "__main__":
    sys.exit(main())
