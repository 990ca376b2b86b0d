"""Check that a model's own drafts change no token of greedy search and of sampling.

    python -m benchmarks.lossless MODEL --input FILE --append-eos --dtype float32 bfloat16
    python -m benchmarks.lossless --calls 5000

With MODEL, a folder of a Marian model, all lines of a text are generated with and without drafts,
for several numbers of texts per call. With --calls, tiny random models of several families run
random calls, with logits processors and stopping criteria. With --sample, tokens are drawn from the
same seeds with and without drafts. Every output has to be equal token by
token, in half precision too: no near tie counts as equal. Results are added to those in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import PreTrainedTokenizerFast

import fastgen
from benchmarks.harness import begin, folder_of, option, parser_of, positive, write_result
from fastgen import config
from fastgen.cli.bild import pair
from tests.models.test_in_c import widen
from tests.support.greedy_calls import FAMILIES, built, drawn_call, run_products_in_c, same

NAME, COUNTERS = "lossless", ("tokens_drafted", "tokens_accepted", "passes")
Cell = dict[str, int]


def main(argv: Sequence[str] | None = None) -> int:
    """Check all; return 1 if an output differed."""
    parser = _arguments()
    args = parser.parse_args(argv)
    begin(args.threads)
    if args.model is not None:
        if args.input is None:
            parser.error("MODEL needs --input FILE")
        found: Iterable[tuple[str, Cell]] = texts(args)
    elif args.calls is not None:
        found = calls(args.calls, args.seed)
    else:
        parser.error("give MODEL or --calls")
    file, differing = folder_of(args) / f"{NAME}.json", 0
    for name, cell in found:
        print(f"{name:<60}{cell}", flush=True)
        differing += cell["differing"]
        cells = json.loads(file.read_text("utf-8"))["result"] if file.exists() else {}
        write_result(args, NAME, cells | {name: cell}, arguments={"threads": args.threads})
    return 1 if differing else 0


def _arguments() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.lossless", __doc__)
    parser.add_argument("model", type=Path, nargs="?", metavar="MODEL")
    parser.add_argument("--input", type=Path, metavar="FILE", help="UTF-8 text, a source per line")
    parser.add_argument("--append-eos", action="store_true", help="end sources with </s>")
    parser.add_argument("--lines", type=positive, metavar="N", help="first lines (default: all)")
    parser.add_argument(
        "--texts", type=positive, nargs="+", default=[1, 2, 4], help="per call (default: 1 2 4)"
    )
    parser.add_argument(
        "--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"],
        help="default: both",
    )  # fmt: skip
    parser.add_argument(
        "--prompt-lookup", type=positive, metavar="N",
        help="drafts also copy up to N tokens of the source and the text",
    )  # fmt: skip
    parser.add_argument("--sample", action="store_true", help="sampling in place of greedy search")
    parser.add_argument("--calls", type=positive, metavar="N", help="number of random calls")
    parser.add_argument("--seed", type=int, default=0, help="of the first random call (default: 0)")
    option(parser, "threads")
    option(parser, "out")
    return parser


def texts(args: argparse.Namespace) -> Iterator[tuple[str, Cell]]:
    """Yield the name and the counts of each dtype and number of texts per call."""
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(args.model)
    lines = [line + tokenizer.eos_token * args.append_eos for line in pair.read_lines(args.input)]
    lines = lines[: args.lines]
    lookup = {} if args.prompt_lookup is None else {"prompt_lookup_num_tokens": args.prompt_lookup}
    folder = args.model.resolve()
    folder = folder.parent if folder.name == "model" else folder
    name = f"{folder.name}, {args.input.name}"
    if lookup:
        name += f", prompt lookup {args.prompt_lookup}"
    if args.sample:
        name += ", sampled"
    for dtype in args.dtype:
        model: Any = pair.load_model(args.model, "cpu", dtype)
        settings = pair.greedy(model, 128) | {"do_sample": args.sample}
        for count in args.texts:
            batches = [
                tokenizer(lines[i : i + count], return_tensors="pt", padding=True).data
                for i in range(0, len(lines), count)
            ]
            inputs = [
                {each: batch[each] for each in ("input_ids", "attention_mask")} | settings
                for batch in batches
            ]
            model.generate(**inputs[0])  # first steps are run by modules, which round otherwise
            cell = {"texts": len(lines), "tokens": 0, "differing": 0} | dict.fromkeys(COUNTERS, 0)
            for seed, call in enumerate(inputs):
                torch.manual_seed(seed)
                with _drafts("off"):
                    wanted = model.generate(**call)
                torch.manual_seed(seed)
                with _drafts("on"), _counted(cell):
                    found = model.generate(**call, **lookup)
                cell["tokens"] += int((wanted[:, 1:] != model.config.pad_token_id).sum())
                cell["differing"] += int(not torch.equal(wanted, found))
            yield f"{name}, {dtype}, {count} per call", cell


def calls(count: int, seed: int) -> Iterator[tuple[str, Cell]]:
    """Yield the name and the counts of the random calls of each family and dtype."""
    kinds = [(family, dtype) for family in FAMILIES for dtype in (torch.float32, torch.bfloat16)]
    for place, (family, dtype) in enumerate(kinds):
        cell = {"calls": 0, "differing": 0} | dict.fromkeys(COUNTERS, 0)
        with pytest.MonkeyPatch.context() as patch:
            widen(patch)
            run_products_in_c(patch)
            model = built(family, dtype)
            for each in range(seed + place, seed + count, len(kinds)):
                call, objects = drawn_call(model, draw := random.Random(each))
                if draw.random() < 0.3:
                    call["prompt_lookup_num_tokens"] = draw.choice((1, 3, 8))
                with _drafts("on"), _counted(cell):
                    found = model.generate(**call, **objects())
                call.pop("prompt_lookup_num_tokens", None)
                with _drafts("off"):
                    wanted = model.generate(**call, **objects())
                cell["calls"] += 1
                cell["differing"] += int(not same(wanted, found))
        yield f"random calls, {family}, {str(dtype).removeprefix('torch.')}", cell


@contextmanager
def _drafts(mode: str) -> Iterator[None]:
    with mock.patch.dict(os.environ, FASTGEN_SELF_DRAFT=mode):
        config.reload()
        yield
    config.reload()


@contextmanager
def _counted(cell: Cell) -> Iterator[None]:
    """Add what is drafted in the context to the counters of a cell."""
    before = dict(fastgen.status().bild)
    yield
    after = fastgen.status().bild
    for name in COUNTERS:
        cell[name] += after.get(name, 0) - before.get(name, 0)


if __name__ == "__main__":
    sys.exit(main())
