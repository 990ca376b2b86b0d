"""Count the work that a decode step launches: CUDA kernels, or torch operators on a CPU.

    python -m benchmarks.launches
    python -m benchmarks.launches --device cuda --case bart_large gpt2

`generate` runs with two numbers of new tokens. The difference in launches, divided by the
difference in steps, is the number of launches per step. One JSON file, launches.json, goes to
benchmarks/results/<hardware>/.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

import fastgen
from benchmarks.cases import CASES
from benchmarks.harness import begin, folder_of, option, parser_of, write_whole
from benchmarks.session import profiled
from fastgen.cli.bench.measure import environment

SHORT, LONG = 8, 24


def launched(call: Any, device: str) -> int:
    """Return how many kernels (CUDA) or operators (CPU) a call launches."""
    events = profiled(call, device).events() or []
    if device.startswith("cuda"):
        return sum(
            "CUDA" in str(event.device_type) and "memcpy" not in event.name.lower()
            for event in events
        )
    return sum(_works(event.name) and not _made_of_others(event) for event in events)


NOTHING = ("empty", "empty_like", "empty_strided", "new_empty", "resize_", "_unsafe_view")
"""Operators that write no memory, although their schema does not declare a view."""


@functools.cache
def _works(name: str) -> bool:
    """Return whether an operator writes memory itself, as a kernel does.

    Views do not, nor do operators that only call others.
    """
    space, _, short = name.partition("::")
    packet = (
        getattr(getattr(torch.ops, space), short, None) if space in ("aten", "mkldnn") else None
    )
    if packet is None or short in NOTHING:
        return False
    returned = [
        output.alias_info
        for overload in packet.overloads()
        for output in getattr(packet, overload)._schema.returns
    ]
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    made_of_others = torch._C._dispatch_has_kernel(name) and has(name, "CompositeImplicitAutograd")
    return all(info is None or info.is_write for info in returned) and not made_of_others


def _made_of_others(event: Any) -> bool:
    """Return whether an operator delegates its work to others, as matmul does to bmm."""
    return any(_works(child.name) or _made_of_others(child) for child in event.cpu_children)


def per_step(model: Any, case: Any, device: str) -> float:
    """Return the launches of one decode step of a case."""
    counts = []
    for tokens in (SHORT, LONG):
        sized = replace(case, new_tokens=tokens)
        inputs, options = sized.inputs(model), sized.generate_options
        model.generate(**inputs, **options)
        counts.append(launched(lambda i=inputs, o=options: model.generate(**i, **o), device))
    return (counts[1] - counts[0]) / (LONG - SHORT)


def main(argv: Sequence[str] | None = None) -> int:
    """Count for the cases that the arguments name."""
    parser = parser_of("benchmarks.launches", __doc__)
    names = [name for name, case in CASES.items() if case.kind == "generate"]
    parser.add_argument(
        "--case", nargs="+", choices=names, default=names, metavar="NAME", help="default: all"
    )
    option(parser, "device")
    option(parser, "scale", help="tiny: a test of the count itself")
    option(parser, "out")
    args = parser.parse_args(argv)
    begin(None)
    results: dict[str, Any] = {}
    for name in args.case:
        case = CASES[name] if args.scale == "full" else CASES[name].tiny()
        assert case.shape is not None
        model = case.shape.build(torch.float32, args.device)
        with fastgen.disabled():
            stock = per_step(model, case, args.device)
        ours = per_step(model, case, args.device)
        results[name] = {"stock": stock, "fastgen": ours}
        print(f"{name:<14}{stock:>8.0f} -> {ours:>6.0f} per decode step", flush=True)
        data = {
            "kind": "launches",
            "environment": environment(),
            "scale": args.scale,
            "result": results,
        }
        write_whole(folder_of(args) / "launches.json", data)
        del model
    return 0


if __name__ == "__main__":
    sys.exit(main())
