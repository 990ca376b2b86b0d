"""Measure a chat that sends its whole history in every turn, with and without the prefix cache.

    python -m benchmarks.chat --shape qwen2 --turns 6

The model has random weights at the real shape. A round is a whole chat: unpatched, with fastgen,
and with fastgen and its prefix cache. The outputs are compared in every round.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch

import fastgen
from benchmarks.cases import SHAPES
from benchmarks.harness import begin, option, parser_of, positive, write_result
from fastgen.cli.bench.measure import Verdict, compare


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both; return 1 if an output differed."""
    args = _arguments().parse_args(argv)
    begin(args.threads)
    model: Any = SHAPES[args.shape].build(getattr(torch, args.dtype), "cpu")

    def stock() -> list[int]:
        with fastgen.disabled():
            return _chat(model, args)

    def cached() -> list[int]:
        with fastgen.prefix_cache(bytes=2**31):
            return _chat(model, args)

    cells = {
        "fastgen": _compared(stock, lambda: _chat(model, args), args),
        "prefix cache": _compared(stock, cached, args),
    }
    for name, cell in cells.items():
        speed = "{ratio:.2f} [{low:.2f}, {high:.2f}]".format(**cell)
        print(f"{name:<14}{speed if cell['equal'] else 'outputs differ'}")
    write_result(args, "chat", {"cells": cells})
    return 0 if all(cell["equal"] for cell in cells.values()) else 1


def _arguments() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.chat", __doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    for name, value, what in (
        ("system", 400, "tokens of the system prompt"),
        ("turns", 6, "turns"),
        ("question", 20, "tokens of a question"),
        ("answer", 30, "tokens of an answer"),
    ):
        parser.add_argument(
            f"--{name}", type=positive, default=value, metavar="N", help=f"{what} ({value})"
        )
    option(parser, "rounds", default=3, help="default: 3")
    option(parser, "threads")
    option(parser, "out")
    return parser


def _compared(stock: Any, candidate: Any, args: argparse.Namespace) -> dict[str, Any]:
    candidate()  # packs weights
    same = lambda one, other: Verdict(one == other, note="other tokens")  # noqa: E731
    return compare(stock, candidate, args.rounds, same).to_dict()


def _chat(model: Any, args: argparse.Namespace) -> list[int]:
    """Return all tokens of a chat whose questions are random tokens."""
    generator = torch.Generator().manual_seed(0)
    history = torch.zeros(1, 0, dtype=torch.int64)
    for turn in range(args.turns):
        count = args.question + (0 if turn else args.system)
        asked = torch.randint(4, model.config.vocab_size - 1, (1, count), generator=generator)
        history = torch.cat([history, asked], 1)
        history = model.generate(
            history,
            attention_mask=torch.ones_like(history),
            max_new_tokens=args.answer,
            do_sample=False,
            eos_token_id=None,
        )
    return history[0].tolist()


if __name__ == "__main__":
    sys.exit(main())
