"""Measure the papers' tables and figures, side by side with the unpatched toolkits.

    python -m benchmarks.paper --list
    python -m benchmarks.paper --table fastseq_table3 amun_table3

One JSON file for each goes to benchmarks/results/<hardware>/paper/. `make tables plot` creates
docs/paper.md and its plots from these files. The exit status is 1 if any output differed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.harness import begin, folder_of, option, parser_of, write_whole
from benchmarks.paper import amun, bild, fastseq, lightseq
from benchmarks.paper.table import SIZES, NotHere, Order
from benchmarks.session import Session
from fastgen.cli.bench.measure import environment

TABLES = {
    table.name: table for table in (*fastseq.TABLES, *lightseq.TABLES, *amun.TABLES, *bild.TABLES)
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what the arguments name; return the exit status."""
    args = _arguments().parse_args(argv)
    if args.list:
        for table in TABLES.values():
            print(f"{table.name:<18}{table.title}: {table.what}")
        return 0
    begin(args.threads)
    folder = folder_of(args)
    size = args.size or ("reduced" if args.device == "cpu" else "paper")
    session = Session(args.device, getattr(torch, args.dtype), args.rounds, size == "tiny")
    order = Order(session, size, tuple(args.pair) if args.pair else None, folder / "bild.json")
    equal = True
    for name in args.table or TABLES:
        table, began = TABLES[name], time.perf_counter()
        try:
            result = table.measure(order)
        except NotHere as missing:
            print(f"\n{table.title}: not measured. {missing}", flush=True)
            continue
        seconds = time.perf_counter() - began
        equal &= result.equal
        print(f"\n{table.title}: {table.what} ({result.shape}; {seconds:.0f} s)")
        for row in (result.columns, *result.rows):
            print("  " + "".join(f"{cell:<38} " for cell in row).rstrip(), flush=True)
        data = {
            "case": name, "kind": "paper", "title": table.title, "what": table.what,
            "paper_hardware": table.hardware, "size": size, "seconds": seconds,
            "arguments": {"threads": args.threads, "dtype": args.dtype},
            "environment": environment(), "result": asdict(result),
        }  # fmt: skip
        write_whole(folder / "paper" / f"{name}.json", data)
    return 0 if equal else 1


def _arguments() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.paper", __doc__)
    add = parser.add_argument
    add("--table", nargs="+", choices=list(TABLES), metavar="NAME", help="default: all")
    add("--list", action="store_true", help="print the tables and figures, and end")
    add(
        "--size",
        choices=SIZES,
        help="the paper's shapes (default on a GPU), reduced (default on a CPU), or tiny: a test",
    )
    option(parser, "device")
    add(
        "--dtype",
        default="float32",
        choices=["float32", "float16", "bfloat16"],
        help="default: float32",
    )
    option(parser, "threads")
    option(parser, "rounds", default=3, help="of each comparison (default: 3)")
    add(
        "--pair",
        nargs=2,
        type=Path,
        metavar=("LARGE", "SMALL"),
        help="folders of the models of `benchmarks.bild`",
    )
    option(parser, "out")
    return parser


if __name__ == "__main__":
    sys.exit(main())
