"""How much work a decode step hands to the device: kernel launches on CUDA, operators of torch on a CPU.

    python -m benchmarks.launches
    python -m benchmarks.launches --device cuda --case bart_large gpt2

`generate` runs with two numbers of new tokens; what the longer run launches more, divided by the steps it makes more,
is what a step launches. One JSON file, launches.json, goes to benchmarks/results/<hardware>/.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.cases import CASES
from benchmarks.run import RESULTS, hardware, write_whole

SHORT, LONG = 8, 24


def launched(call: Any, device: str) -> int:
    """Return how many kernels (CUDA) or operators (CPU) a call launches."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    cuda = device.startswith("cuda")
    activities = [ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        call()
        if cuda:
            torch.cuda.synchronize(device)
    events = profiler.events() or []
    if cuda:
        return sum("CUDA" in str(event.device_type) and "memcpy" not in event.name.lower() for event in events)
    return sum(_works(event.name) and not _made_of_others(event) for event in events)


NOTHING = ("empty", "empty_like", "empty_strided", "new_empty", "resize_", "_unsafe_view")
"""Operators that write nothing, though what they return is not declared a view."""


@functools.cache
def _works(name: str) -> bool:
    """Whether an operator writes memory itself, as a kernel would: views do not, nor do those that call others."""
    import torch

    space, _, short = name.partition("::")
    packet = getattr(getattr(torch.ops, space), short, None) if space in ("aten", "mkldnn") else None
    if packet is None or short in NOTHING:
        return False
    returned = [of.alias_info for overload in packet.overloads() for of in getattr(packet, overload)._schema.returns]
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    made_of_others = torch._C._dispatch_has_kernel(name) and has(name, "CompositeImplicitAutograd")
    return all(info is None or info.is_write for info in returned) and not made_of_others


def _made_of_others(event: Any) -> bool:
    """Whether an operator leaves its work to others, as matmul does to bmm."""
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
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.launches", description=(__doc__ or "").split("\n\n", 1)[0]
    )
    names = [name for name, case in CASES.items() if case.kind == "generate"]
    parser.add_argument("--case", nargs="+", choices=names, default=names, metavar="NAME", help="default: all")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument("--scale", default="full", choices=["full", "tiny"], help="tiny: a test of the count itself")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder (default: benchmarks/results/<hardware>)")
    args = parser.parse_args(argv)
    import torch
    from transformers.utils import logging

    import fastgen
    from fastgen.cli.bench.measure import environment

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_grad_enabled(False)
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
        data = {"kind": "launches", "environment": environment(), "scale": args.scale, "result": results}
        write_whole((args.out or RESULTS / hardware(args.device)) / "launches.json", data)
        del model
    return 0


if __name__ == "__main__":
    sys.exit(main())
