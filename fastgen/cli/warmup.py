"""Compile what the calls of a service need, before its first user waits for it.

    fastgen warmup MODEL --dtype bfloat16 --batch-size 1 8 32 --source-tokens 32 512 --num-beams 4

On a GPU, the first call of each kind compiles Triton kernels, which takes seconds. Triton keeps
them on disk (`~/.triton/cache`, or TRITON_CACHE_DIR), where every later process finds them. Run
this command once in a container's image, or after an update of fastgen, Triton or the driver, with
the options of `generate` that the service uses. On a CPU there is nothing to compile.

For each batch size and source length it generates three times and prints how long each call took.
"""

from __future__ import annotations

import argparse
import itertools
import time
from typing import Any

from fastgen.cli.explain import PYTHON_ONLY, call_arguments, placeholders
from fastgen.cli.generate import generation_options
from fastgen.corpus import models
from fastgen.errors import CommandError

HELP = "compile the GPU kernels of a service's calls before its first user waits for them"
CALLS = 3
"""The first compiles kernels, the second captures CUDA graphs, the third shows the final speed."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    call_arguments(parser, "warmup", several=True)


def run(args: argparse.Namespace) -> int:
    """Generate and print.

    Returns:
        0 if fastgen's decode loop ran, else 1.
    """
    models.folder_of(args.model)
    options = {"max_new_tokens": 32} | generation_options.requested(args, PYTHON_ONLY)
    from transformers.utils import logging

    from fastgen.cli.bench.benchmark_cell import LOOPS
    from fastgen.cli.bench.counts import counts

    logging.disable_progress_bar()
    model = models.load_model(args.model, models.usable_device(args.device, None), args.dtype)
    before, head = counts(), f"{'sentences':>9}{'tokens':>8}"
    print(head + "".join(f"{f'call {i + 1}':>12}" for i in range(CALLS)))
    for batch, tokens in itertools.product(args.batch_size, args.source_tokens):
        seconds = [_seconds(model, batch, tokens, options) for _ in range(CALLS)]
        print(f"{batch:9}{tokens:8}" + "".join(f"{each:10.3f} s" for each in seconds), flush=True)
    ran = counts().since(before)
    for reason, calls in sorted(ran.fallbacks.items()):
        print(f"declined {calls} calls: {reason}")
    return 0 if any(name in ran.hits for name in LOOPS) else 1


def _seconds(model: Any, batch: int, tokens: int, options: dict[str, Any]) -> float:
    import torch

    inputs = placeholders(model, batch, tokens)
    began = time.perf_counter()
    try:
        model.generate(**inputs, **options)
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
    except Exception as error:  # `generate` may raise anything
        problem = f"{type(error).__name__}: {models.first_line(error)}"
        raise CommandError(
            f"{batch} sentences of {tokens} tokens: generate raises {problem}"
        ) from error
    return time.perf_counter() - began
