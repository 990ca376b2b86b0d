"""Say what a `generate` call of a model would run and the size of its KV cache, without running it.

    fastgen explain MODEL --num-beams 4 --max-new-tokens 128
    fastgen explain MODEL --batch-size 16 --source-tokens 512 --do-sample --json

It prints what `fastgen.explain(model, ...)` finds for a batch of sources of equal length: the
decode loop, cache, decode steps and linear layers, the bytes of keys and values, and the reason for
whatever fastgen would not run.

The exit status is 0 if fastgen's decode loop would run, 1 if transformers' own would, and 2 if
`generate` would raise or the command has to be corrected.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import fastgen
from fastgen.cli.generate import generation_options
from fastgen.cli.parser import CommandParser
from fastgen.corpus import models
from fastgen.decoding.speculative import bild_options
from fastgen.errors import CommandError
from fastgen.number import COUNT

HELP = "predict what a generate call would run, without running it"

PYTHON_ONLY = dict.fromkeys(
    (*generation_options.ELSEWHERE, "assistant_model", *bild_options.NAMES),
    "pass it to fastgen.explain(model, ...) in Python",
)
"""Arguments of `generate` that are not options of the command, with the hint to print for each."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    call_arguments(parser, "explain")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def call_arguments(parser: argparse.ArgumentParser, command: str, several: bool = False) -> None:
    """Add the arguments of a call with placeholder text: model, batch size, options of `generate`.

    Args:
        parser: the parser to extend.
        command: name of the command, for the usage line.
        several: whether batch size and source length are lists.
    """
    models.need("transformers")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = f"fastgen {command} MODEL [option ...]"
    add = parser.add_argument
    size: dict[str, Any] = {"type": COUNT, "metavar": "N"} | ({"nargs": "+"} if several else {})
    batches, lengths = ([1, 8], [32, 512]) if several else (1, 32)
    add(
        "model",
        type=Path,
        metavar="MODEL",
        help="folder of the model, or its id on the hub; needs no tokenizer",
    )
    add("--batch-size", default=batches, help=f"sentences in the batch ({_words(batches)})", **size)
    add(
        "--source-tokens",
        default=lengths,
        help=f"tokens in each source or prompt ({_words(lengths)})",
        **size,
    )
    add("--dtype", default="float32", choices=["float64", "float32", "bfloat16", "float16"],
        help="dtype of the weights (%(default)s)")  # fmt: skip
    add("--device", help="default: cuda if available")
    generation_options.arguments(parser)
    if isinstance(parser, CommandParser):
        parser.answer({name.replace("_", "-"): hint for name, hint in PYTHON_ONLY.items()})


def _words(default: int | list[int]) -> str:
    return " ".join(map(str, default)) if isinstance(default, list) else str(default)


def run(args: argparse.Namespace) -> int:
    """Print the explanation.

    Returns:
        1 if transformers' own decode loop would run, else 0.
    """
    models.folder_of(args.model)
    options = generation_options.requested(args, PYTHON_ONLY)
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = models.load_model(args.model, models.usable_device(args.device, None), args.dtype)
    try:
        explanation = fastgen.explain(
            model, **placeholders(model, args.batch_size, args.source_tokens), **options
        )
    except Exception as error:  # `generate` may raise anything; a traceback would mean status 1
        problem = f"{type(error).__name__}: {models.first_line(error)}"
        raise CommandError(f"generate would raise {problem}") from error
    print(json.dumps(explanation.to_dict(), indent=2) if args.json else explanation)
    return 0 if explanation.plan is not None else 1


def placeholders(model: Any, batch: int, tokens: int) -> dict[str, Any]:
    """Return placeholder sources (B, S) without padding: the plan depends on their shape alone."""
    import torch

    config = model.generation_config
    ends = config.eos_token_id
    special = {config.pad_token_id, *(ends if isinstance(ends, list) else [ends])}
    token = next(token for token in itertools.count() if token not in special)
    ids = torch.full((batch, tokens), token, device=model.device, dtype=torch.int64)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
