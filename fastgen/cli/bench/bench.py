"""Measure a model of your own: is the output the same, and how much faster is it?

    fastgen bench MODEL --input text.en
    fastgen bench MODEL --num-beams 1 5 --batch-size 16 --output FOLDER
    fastgen bench MODEL --input text.en --reference text.de --lines 500 --precision int8

For each number of beams and each batch size, transformers' own code and fastgen generate in turn,
in one process, and every output is compared. No speed is shown where outputs differ.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from fastgen.cli.bild.pair import check_parent, read_lines
from fastgen.config import Precision, settings
from fastgen.corpus import models
from fastgen.errors import CommandError, needs
from fastgen.number import COUNT, POSITIVE

if TYPE_CHECKING:
    from fastgen.cli.bench.benchmark_cell import Cell
    from fastgen.cli.bench.rounded import Quality
    from fastgen.corpus.texts import TextGenerator

HELP = "measure the speed-up on your own model and compare the outputs"
HEAD = (
    f"{'beams':>5}{'batch':>7}{'tokens/s':>12}{'fastgen':>10}{'times as fast':>15}"
    f"{'95% interval':>16}  output"
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", type=Path, metavar="MODEL", help=models.HELP)
    parser.add_argument(
        "--input",
        type=Path,
        metavar="FILE",
        help="UTF-8 text, one source or prompt per line (default: random tokens)",
    )
    parser.add_argument(
        "--lines",
        type=COUNT,
        metavar="N",
        help="sources per round (default: the size of the largest batch)",
    )
    parser.add_argument("--source-tokens", type=COUNT, default=32, metavar="N",
                        help="tokens of a random source (%(default)s)")  # fmt: skip
    parser.add_argument(
        "--num-beams",
        type=COUNT,
        nargs="+",
        default=[1, 4],
        metavar="N",
        help="numbers of beams to measure (1 4)",
    )
    parser.add_argument(
        "--batch-size",
        type=COUNT,
        nargs="+",
        default=[1, 8],
        metavar="N",
        help="sentences per batch to measure, each with each number of beams (1 8)",
    )
    parser.add_argument("--max-new-tokens", type=COUNT, default=32, metavar="N",
                        help="maximum length of an output; for random sources, its exact length"
                             " (%(default)s)")  # fmt: skip
    parser.add_argument("--dtype", default="float32",
                        choices=["float64", "float32", "bfloat16", "float16"],
                        help="dtype of the weights (%(default)s)")  # fmt: skip
    parser.add_argument(
        "--precision",
        choices=get_args(Precision),
        default="model",
        help="int8: fastgen runs with weights rounded to int8; outputs differ, and the table says "
        "how much (%(default)s)",
    )
    parser.add_argument(
        "--reference",
        type=Path,
        metavar="FILE",
        help="with --precision int8 and --input: one reference per line, for BLEU and chrF",
    )
    parser.add_argument("--device", help="default: cuda if available")
    parser.add_argument("--threads", type=COUNT, metavar="N", help="number of torch's CPU threads")
    parser.add_argument(
        "--rounds",
        type=COUNT,
        default=5,
        metavar="N",
        help="maximum number of rounds per cell (%(default)s)",
    )
    parser.add_argument(
        "--minutes",
        type=POSITIVE,
        default=10.0,
        metavar="X",
        help="time limit of the whole table; reduces rounds, then cells (%(default)g)",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="folder for bench.json and bench.svg"
    )


def run(args: argparse.Namespace) -> int:
    """Measure and print.

    Returns:
        1 if an output differed, a model failed or nothing was measured; else 0.
    """
    if not settings().enabled:
        raise CommandError(f"FASTGEN={settings().mode} disables what is to be measured")
    if args.output is not None:
        check_parent(args.output)
        if args.output.is_file():
            raise CommandError(f"--output {args.output} is a file, not a folder")
    lines = (
        None if args.input is None else [line for line in read_lines(args.input) if line.strip()]
    )
    references = _references(args)
    models.need("transformers", "numpy")
    models.folder_of(args.model)
    from transformers.utils import logging

    from fastgen.cli.bench.measure import environment
    from fastgen.corpus.texts import Options, TextGenerator

    logging.disable_progress_bar()
    generation = {"max_new_tokens": args.max_new_tokens}
    generator = TextGenerator(
        Options(
            args.model,
            generation,
            device=args.device,
            dtype=args.dtype,
            precision=args.precision,
            threads=args.threads,
            truncate=True,
        )
    )
    sources = _sources(generator, lines, args)
    place = environment()
    print(
        f"{args.model}: {generator.model.config.model_type}, "
        f"{generator.model.num_parameters() / 1e6:.1f}M parameters, "
        f"{args.dtype}; {len(sources)} sources of "
        f"{sum(map(len, sources)) / len(sources):.0f} tokens\n"
        f"fastgen {place['fastgen']}, transformers {place['transformers']}, "
        f"torch {place['torch']}, {place['threads']} threads, "
        f"{place['gpu'] or place['cpu']}\n\n{HEAD}"
    )
    quality = None
    if args.precision != "model":
        from fastgen.cli.bench.rounded import Quality

        quality = Quality(generator.tokenizer, references[: len(sources)])
    cells = _measured(generator.model, sources, args, quality)
    if args.output is not None:
        _write(
            args,
            {"model": str(args.model), "environment": place, "arguments": _json_ready(args)},
            cells,
        )
    return 0 if all(cell.good for cell in cells) and any(cell.outcome for cell in cells) else 1


def _references(args: argparse.Namespace) -> list[str]:
    """Return the references, one for each line of the input; none without --reference.

    Raises:
        CommandError: there are no lines of input that they belong to.
    """
    if args.reference is None:
        return []
    if args.input is None or args.precision == "model":
        raise CommandError("--reference needs --input and --precision int8")
    lines, references = read_lines(args.input), read_lines(args.reference)
    if len(lines) != len(references):
        raise CommandError(
            f"--reference {args.reference}: {len(references)} lines for {len(lines)} of the input"
        )
    return [wanted for line, wanted in zip(lines, references, strict=True) if line.strip()]


def _measured(
    model: Any, sources: list[list[int]], args: argparse.Namespace, quality: Quality | None
) -> list[Cell]:
    """Measure and print cell by cell; each gets an equal share of the time that is left."""
    from fastgen.cli.bench.benchmark_cell import Cell, measure
    from fastgen.cli.bench.measure import frozen

    options: dict[str, Any] = {
        "do_sample": False,
        "num_return_sequences": 1,
        "max_new_tokens": args.max_new_tokens,
    }
    if args.input is None:
        options["min_new_tokens"] = args.max_new_tokens
    # With both limits set, transformers warns at every call.
    model.generation_config.max_length = None
    cells: list[Cell] = []
    grid = list(itertools.product(dict.fromkeys(args.num_beams), dict.fromkeys(args.batch_size)))
    end = time.monotonic() + 60 * args.minutes
    with frozen():
        for place, (beams, batch) in enumerate(grid):
            seconds = (end - time.monotonic()) / (len(grid) - place)
            if seconds > 0:
                given = model, sources, beams, batch, options, args.rounds, seconds
                cells.append(measure(*given, quality))
            else:
                cells.append(Cell(beams, batch))
            print("\n".join(_lines(cells[-1], args.minutes)), flush=True)
    return cells


def _lines(cell: Cell, minutes: float) -> list[str]:
    """Return the lines of the table for one cell."""
    start, outcome = f"{cell.beams:5}{cell.batch:7}", cell.outcome
    if outcome is None:
        return [f"{start}  not measured: {cell.problem or f'the {minutes:g} minutes are over'}"]
    if not outcome.agrees:
        figures, says = f"{'-':>12}{'-':>10}{'-':>15}{'-':>16}", f"DIFFERS: {outcome.note}"
    else:
        before, after = (
            cell.tokens / seconds
            for seconds in (outcome.baseline_seconds, outcome.candidate_seconds)
        )
        spread = (
            f"{outcome.low:.2f} to {outcome.high:.2f}" if len(outcome.rounds) > 1 else "one round"
        )
        figures = f"{before:12.1f}{after:10.1f}{outcome.ratio:15.2f}{spread:>16}"
        ties = f", near ties: {outcome.near_ties}" if outcome.near_ties else ""
        same = "the same" if outcome.equal else f"within rounding: {outcome.note}"
        if cell.quality:
            same = outcome.note
        says = f"{same} (rounds: {len(outcome.rounds)}{ties})"
    notes = cell.notes() if cell.ran else ["fastgen's loops did not run", *cell.notes()]
    notes += [
        f"{name}: {exact:.2f} in the model's precision, {rounded:.2f} in int8"
        for name, (exact, rounded) in cell.quality.items()
    ]
    return [f"{start}{figures}  {says}", *(f"{'':14}{note}" for note in notes)]


def _sources(
    generator: TextGenerator, lines: list[str] | None, args: argparse.Namespace
) -> list[list[int]]:
    """Return the token ids of the first lines, or random ones without a file."""
    from fastgen.corpus.texts import Source

    count, largest = args.lines or max(args.batch_size), max(args.batch_size)
    if lines is None:
        sources = _random(generator, count, args.source_tokens)
    else:
        sources = [
            source.ids for source in generator.encode(lines[:count]) if isinstance(source, Source)
        ]
    if len(sources) < largest:
        raise CommandError(
            f"{len(sources)} sources do not fill a batch of {largest}: "
            "--lines, --input or --batch-size"
        )
    return sources


def _random(generator: TextGenerator, count: int, length: int) -> list[list[int]]:
    """Return sources of random tokens, the same in every run."""
    tokenizer, draw = generator.tokenizer, random.Random(0)
    special = set(tokenizer.all_special_ids)
    size = min(len(tokenizer), generator.model.get_input_embeddings().num_embeddings)
    tokens = [token for token in range(size) if token not in special]
    return [draw.choices(tokens, k=length) for _ in range(count)]


def _json_ready(args: argparse.Namespace) -> dict[str, Any]:
    values = {name: value for name, value in vars(args).items() if name not in ("command", "run")}
    return {
        name: str(value) if isinstance(value, Path) else value for name, value in values.items()
    }


def _write(args: argparse.Namespace, header: dict[str, Any], cells: list[Cell]) -> None:
    """Write every figure as JSON and, if matplotlib is installed, a plot."""
    import fastgen

    args.output.mkdir(exist_ok=True)
    data = header | {
        "cells": [cell.to_dict() for cell in cells],
        "status": fastgen.status().to_dict(),
    }
    file = args.output / "bench.json"
    file.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", "utf-8")
    print(f"\n{file}: all results")
    try:
        from fastgen.cli.bench.bench_plot import draw

        figure = draw(data)
    except ModuleNotFoundError as error:
        print(f"no plot: {needs(str(error.name))}")
        return
    if figure is not None:
        figure.savefig(file.with_suffix(".svg"))
        print(f"{file.with_suffix('.svg')}: times as fast")
