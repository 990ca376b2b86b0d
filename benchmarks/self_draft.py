"""Measure greedy search over a model's own drafts on int8 weights, against greedy search alone.

    python -m benchmarks.self_draft MODEL --input FILE --append-eos --copies 3

MODEL is a folder of a Marian model. With --copies N it is widened first (`benchmarks/widen.py`), so
that its weights do not fit the processor's cache. The outputs are compared in every round. A cell
also has the speed-up that the passes allow: the one if drafts cost nothing but the passes in C.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import PreTrainedTokenizerFast

import fastgen
from benchmarks.harness import begin, option, parser_of, positive, write_result
from benchmarks.widen import widened
from fastgen import config
from fastgen.cli.bench.measure import Verdict, compare
from fastgen.cli.bild import pair
from fastgen.ops.native import products, search, step


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all; return 1 if an output differed."""
    args = _arguments().parse_args(argv)
    begin(args.threads)
    model: Any = pair.load_model(args.model, "cpu", "float32")
    if args.copies > 1:
        model = widened(model, args.copies)
    model = model.to(getattr(torch, args.dtype)).eval()
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(args.model)
    lines = pair.read_lines(args.input)[: args.sentences]
    lines = [line + tokenizer.eos_token * args.append_eos for line in lines]
    cells: dict[str, Any] = {}
    for texts in args.texts:
        batches = [
            tokenizer(lines[i : i + texts], return_tensors="pt", padding=True).data
            for i in range(0, len(lines), texts)
        ]
        cell = cells[f"{texts} texts"] = _cell(model, batches, args)
        speed = "outputs differ"
        if cell["equal"]:
            speed = "{ratio:.2f} [{low:.2f}, {high:.2f}]".format(**cell)
        accepted = cell["counts"]["tokens_accepted"] / max(1, cell["counts"]["tokens_drafted"])
        print(
            f"{args.dtype:<10}{texts} texts   {speed:<22}{accepted:.3f} of the drafts stand, "
            f"the passes allow {cell['allowed']:.2f}"
        )
    size = sum(parameter.nbytes for parameter in model.parameters())
    result = {"cells": cells, "sentences": len(lines), "bytes": size}
    name = "_".join(filter(None, ("self_draft", args.name, args.dtype)))
    write_result(args, name, result, kind="self_draft")
    return 0 if all(cell["equal"] for cell in cells.values()) else 1


def _arguments() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.self_draft", __doc__)
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--input", type=Path, required=True, metavar="FILE")
    parser.add_argument("--append-eos", action="store_true", help="end sources with </s>")
    parser.add_argument(
        "--sentences", type=positive, default=40, metavar="N", help="first lines (default: 40)"
    )
    parser.add_argument("--copies", type=positive, default=3, metavar="N", help="default: 3")
    parser.add_argument(
        "--texts", type=positive, nargs="+", default=[1, 4], help="texts per call (default: 1 4)"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--mode", choices=["on", "auto"], default="on", help="FASTGEN_SELF_DRAFT (default: on)"
    )
    parser.add_argument(
        "--prompt-lookup", type=positive, metavar="N", help="drafts copy up to N tokens instead"
    )
    parser.add_argument("--name", default="", help="part of the result file's name")
    option(parser, "rounds", default=3, help="default: 3")
    option(parser, "threads")
    option(parser, "out")
    return parser


def _cell(
    model: Any, batches: Sequence[dict[str, Any]], args: argparse.Namespace
) -> dict[str, Any]:
    """Return the speed-up over whole rounds with its interval, and the counters of the drafts."""
    lookup = {"prompt_lookup_num_tokens": args.prompt_lookup} if args.prompt_lookup else {}

    def run(mode: str) -> list[Any]:
        os.environ["FASTGEN_SELF_DRAFT"] = "off" if lookup else mode
        config.reload()
        settings: dict[str, Any] = {"num_beams": 1, "max_new_tokens": 128, "do_sample": False}
        settings |= {} if mode == "off" else lookup
        return [
            model.generate(batch["input_ids"], attention_mask=batch["attention_mask"], **settings)
            for batch in batches
        ]

    def same(alone: list[Any], drafted: list[Any]) -> Verdict:
        return Verdict(all(map(torch.equal, alone, drafted)), note="other tokens")

    for mode in ("off", args.mode):
        run(mode)  # packs weights, and checks the first steps
    before = fastgen.status().bild
    outcome = compare(lambda: run("off"), lambda: run(args.mode), args.rounds, same)
    after = fastgen.status().bild
    names = "tokens_drafted", "tokens_accepted", "passes"
    counts = {name: after.get(name, 0) - before.get(name, 0) for name in names}
    timed = {"off": list[tuple[float, float]](), args.mode: list[tuple[float, float]]()}
    for mode in [*timed] * args.rounds:
        began = time.perf_counter()
        with _timed_in_c() as in_c:
            run(mode)
        timed[mode].append((time.perf_counter() - began, sum(in_c)))
    # Of each mode the fastest round, which nothing interrupted.
    (alone, alone_in_c), (_, drafted_in_c) = map(min, timed.values())
    allowed = alone / (alone - alone_in_c + drafted_in_c)
    return outcome.to_dict() | {"counts": counts, "allowed": allowed}


@contextmanager
def _timed_in_c() -> Iterator[list[float]]:
    """Yield a list that gets the seconds of each C call of a pass."""
    spent = list[float]()

    def timed(function: Any) -> Any:
        def call(*given: Any) -> Any:
            began = time.perf_counter()
            result = function(*given)
            spent.append(time.perf_counter() - began)
            return result

        return call

    with ExitStack() as patches:
        for module, name in ((search, "search_rows"), (step, "run"), (products, "_product")):
            function = timed(getattr(module, name))
            patches.enter_context(mock.patch.object(module, name, function))
        yield spent


if __name__ == "__main__":
    sys.exit(main())
