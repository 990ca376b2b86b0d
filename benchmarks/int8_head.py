"""Measure greedy search whose logits an int8 copy of the head bounds, against all logits.

    python -m benchmarks.int8_head --shape qwen2 --texts 1 2 3

Models have random weights at the real shapes. Each cell also counts the steps that bounds decided.
The outputs are compared in every round.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.cases import SHAPES
from benchmarks.harness import begin, option, parser_of, positive, write_result
from fastgen import config
from fastgen.cli.bench.measure import Verdict, compare
from fastgen.models.runtime.head_bounds import HeadUse
from fastgen.models.state import state_of

PROMPT = 16
"""Tokens of a prompt."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all; return 1 if an output differed."""
    args = _arguments().parse_args(argv)
    begin(args.threads)
    os.environ["FASTGEN_SELF_DRAFT"] = "off"
    model: Any = SHAPES[args.shape].build(getattr(torch, args.dtype), "cpu")
    cells = {f"{texts} texts": _cell(model, texts, args) for texts in args.texts}
    for name, cell in cells.items():
        speed = "outputs differ"
        if cell["equal"]:
            speed = "{ratio:.2f} [{low:.2f}, {high:.2f}]".format(**cell)
        steps = "{steps} steps, {all_logits} with all logits".format(**cell["counts"])
        print(f"{args.dtype:<10}{name}   {speed:<22}{steps}")
    write_result(args, "int8_head", {"cells": cells})
    return 0 if all(cell["equal"] for cell in cells.values()) else 1


def _arguments() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.int8_head", __doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2")
    parser.add_argument(
        "--texts", type=positive, nargs="+", default=[1, 2, 3], help="texts per call"
    )
    parser.add_argument("--tokens", type=positive, default=32, metavar="N", help="new tokens")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    option(parser, "rounds", default=5, help="default: 5")
    option(parser, "threads")
    option(parser, "out")
    return parser


def _cell(model: Any, texts: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the speed-up over whole rounds with its interval, and the counts of steps."""
    generator = torch.Generator().manual_seed(texts)
    ids = torch.randint(4, model.config.vocab_size - 1, (texts, PROMPT), generator=generator)

    def run(mode: str) -> Any:
        os.environ["FASTGEN_INT8_HEAD"] = mode
        config.reload()
        settings = {"max_new_tokens": args.tokens, "do_sample": False, "eos_token_id": None}
        return model.generate(ids, attention_mask=torch.ones_like(ids), **settings)

    counts = state_of(model.get_output_embeddings()).of(HeadUse).counts
    for mode in ("off", "on", "on"):
        run(mode)  # packs weights, counts steps, then makes the copy
    before = counts.tolist()
    same = lambda one, other: Verdict(torch.equal(one, other), note="other tokens")  # noqa: E731
    outcome = compare(lambda: run("off"), lambda: run("on"), args.rounds, same)
    _, tried, missed = (after - start for after, start in zip(counts.tolist(), before, strict=True))
    return outcome.to_dict() | {"counts": {"steps": tried, "all_logits": missed}}


if __name__ == "__main__":
    sys.exit(main())
