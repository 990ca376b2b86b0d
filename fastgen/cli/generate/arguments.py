"""The arguments of `fastgen generate`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from fastgen.cli.generate import fastseq, generation_options, on_ray, scoring
from fastgen.cli.parser import CommandParser
from fastgen.config import Precision, settings
from fastgen.corpus import models
from fastgen.corpus.formats import formats, writers
from fastgen.corpus.formats.readers import STDIN
from fastgen.corpus.run.job import BLOCK
from fastgen.corpus.texts import Options
from fastgen.number import COUNT

_DTYPES = ("float32", "bfloat16", "float16", "float64")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    models.need("transformers")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "fastgen generate MODEL --input FILE ... [--output FILE] [option ...]"
    parser.add_argument("model", type=Path, metavar="MODEL", help=models.HELP)
    _input(parser)
    _output(parser)
    _texts(parser)
    _model(parser)
    _big_little(parser)
    scoring.arguments(parser)
    _run(parser)
    on_ray.arguments(parser)
    generation_options.arguments(parser)
    parser.set_defaults(defaults=parser)
    if isinstance(parser, CommandParser):
        parser.answer(
            fastseq.DROPPED
            | {name.replace("_", "-"): why for name, why in generation_options.ELSEWHERE.items()}
        )


def _input(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("input")
    add = group.add_argument
    add("--input", nargs="+", required=True, metavar="FILE",
        help="text, TSV, CSV, JSONL, Parquet, a folder of datasets' save_to_disk, or - for "
             "standard input; several are read in order; .gz, .bz2, .xz and .zst are "
             "decompressed")  # fmt: skip
    add(
        "--input-format",
        choices=formats.NAMES,
        help="default: from the file name, else text",
    )
    add("--column", metavar="NAME", help="column with the text: its name, or its number from 1")
    add(
        "--prefix-column",
        metavar="NAME",
        help="column with a prefix for each text, such as T5's task",
    )
    add(
        "--header",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="whether the first row of a table names the columns (default: unless --column is "
        "a number)",
    )
    add(
        "--no-quotes",
        dest="quotes",
        action="store_false",
        help="TSV without quoting; tabs and line breaks in outputs become spaces",
    )
    add("--limit", "--n-obs", type=COUNT, metavar="N", help="only the first N records")


def _output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    add = group.add_argument
    add(
        "--output", default=STDIN, metavar="FILE", help="output file; - or nothing: standard output"
    )
    add(
        "--output-format",
        choices=writers.NAMES,
        help="default: from the file name, else text",
    )
    add("--scores", action="store_true", help="write the score of each output")
    add(
        "--field-prefix",
        default="",
        metavar="TEXT",
        help="prefix of the names of added fields",
    )
    add("--overwrite", action="store_true", help="overwrite an existing output")
    add(
        "--on-error",
        choices=("fail", "skip", "empty"),
        default="fail",
        help="whether a record that cannot be processed ends the run, is skipped, or gets an "
        "empty output (%(default)s); a blank line of plain text always gets a blank "
        "output",
    )


def _texts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("texts and tokens")
    add = group.add_argument
    add(
        "--prefix",
        metavar="TEXT",
        help="prefix of each source (default: that of --task, or none)",
    )
    add(
        "--task",
        metavar="NAME",
        help="use the prefix and options of this name in the model's task_specific_params",
    )
    add("--max-source-tokens", "--max-tokenizer-length", type=COUNT, metavar="N",
        help="maximum length of a source; longer ones cannot be processed (default: the "
             "tokenizer's limit)")  # fmt: skip
    add("--truncate", "--truncation", action=argparse.BooleanOptionalAction, default=False,
        help="truncate longer sources instead")  # fmt: skip
    add(
        "--append-eos",
        action="store_true",
        help="append the end token to each source, if the tokenizer does not",
    )
    add("--source-lang", metavar="LANG", help="source language, by the tokenizer's name for it")
    add("--target-lang", metavar="LANG", help="target language, by the tokenizer's name for it")
    add("--forced-bos-token", metavar="TOKEN", help="first token of the output, by name")
    add(
        "--target-lang-column",
        metavar="NAME",
        help="column with the --target-lang of each text",
    )
    add(
        "--forced-bos-column",
        metavar="NAME",
        help="column with the --forced-bos-token of each text",
    )
    add("--include-special-tokens", action="store_true", help="keep special tokens in the output")
    add(
        "--clean-up-tokenization-spaces",
        action="store_true",
        help="remove spaces before punctuation",
    )


def _model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    add = group.add_argument
    add(
        "--dtype",
        choices=_DTYPES,
        default="float32",
        help="dtype of the model (%(default)s)",
    )
    add(
        "--precision",
        choices=get_args(Precision),
        default=settings().precision,
        help="int8: weights rounded to int8, faster on a CPU, with another output (%(default)s)",
    )
    add("--fp16", dest="dtype", action="store_const", const="float16", help="--dtype float16")
    add("--device", help="cpu, cuda, cuda:1 ... (default: cuda if available)")
    add("--threads", type=COUNT, metavar="N", help="number of torch's CPU threads")
    add("--batch-tokens", type=COUNT, default=Options.batch_tokens, metavar="N",
        help="maximum source tokens of a batch, padding included (%(default)s)")  # fmt: skip
    add(
        "--seed",
        type=int,
        default=0,
        help="random seed; the draws of a block depend only on it and the block's number",
    )


def _big_little(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "draft model", "See docs/bild.md. Lossless unless a threshold is given."
    )
    add = group.add_argument
    add("--assistant-model", type=Path, metavar="MODEL", help=models.HELP)
    add(
        "--fallback-threshold",
        type=float,
        metavar="P",
        help="minimum probability of a drafted token; below it, drafting stops",
    )
    add(
        "--rollback-threshold",
        type=float,
        metavar="COST",
        help="maximum loss of a drafted token under the large model; above it, the token is "
        "rejected",
    )
    add("--max-draft", type=int, metavar="N", help="maximum number of tokens per draft")
    add(
        "--lossless",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="reproduce the large model's own output",
    )
    add(
        "--adaptive-draft",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="draft only where that is faster",
    )
    add("--paper-compat", action="store_true", default=None, help="behave as the authors' program")
    add("--speculative-beams", type=int, metavar="STEPS", help="draft the steps of the beam search")


def _run(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("run")
    add = group.add_argument
    add(
        "--block",
        type=COUNT,
        default=BLOCK,
        metavar="N",
        help="records per block that is written at once (%(default)s)",
    )
    add(
        "--processes",
        type=COUNT,
        default=1,
        metavar="N",
        help="number of processes on this machine (%(default)s)",
    )
    add(
        "--restart",
        action="store_true",
        help="discard the progress of an earlier run",
    )
    add("--summary", type=Path, metavar="FILE", help="write a summary of the run as JSON")
    add("--quiet", action="store_true", help="show no progress")
