"""`fastgen generate --engine ray`: the same command on the machines of a Ray cluster."""

from __future__ import annotations

import argparse
import json

from fastgen.corpus import models
from fastgen.corpus.formats.readers import STDIN
from fastgen.corpus.texts import Options
from fastgen.errors import CommandError
from fastgen.number import COUNT, POSITIVE

_OF_ONE_MACHINE = (
    "block", "field_prefix", "header", "limit", "overwrite", "prefix_column", "processes", "quotes",
    "reference", "reference_column", "reference_format", "restart", "score_path", "summary",
)  # fmt: skip
"""Options that are not available on a cluster."""
_OF_A_CLUSTER = ("address", "rows", "rows_per_file", "worker_cpus", "worker_gpus", "workers")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a Ray cluster."""
    group = parser.add_argument_group(
        "a Ray cluster", "See docs/cluster.md. --output is then a folder."
    )
    add = group.add_argument
    add(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="engine that runs the models (%(default)s)",
    )
    add(
        "--address",
        metavar="ADDRESS",
        help="address of the cluster, as for ray.init (default: RAY_ADDRESS, or a local cluster)",
    )
    add("--workers", type=COUNT, nargs="+", default=[1], metavar="N",
        help="number of actors, or minimum and maximum; each has a model (1)")  # fmt: skip
    add(
        "--worker-cpus",
        type=POSITIVE,
        default=1.0,
        metavar="N",
        help="CPUs per actor (%(default)g)",
    )
    add(
        "--worker-gpus",
        type=POSITIVE,
        metavar="N",
        help="GPUs per actor, may be fractional (default: none)",
    )
    add(
        "--rows",
        type=COUNT,
        default=256,
        metavar="N",
        help="records that an actor gets at a time (%(default)s)",
    )
    add(
        "--rows-per-file",
        type=COUNT,
        default=50_000,
        metavar="N",
        help="records per output file (%(default)s)",
    )


def check_unused(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Raise CommandError if an option of a cluster is set without --engine ray."""
    _refuse(_OF_A_CLUSTER, args, parser, "requires --engine ray")


def run(args: argparse.Namespace, options: Options, parser: argparse.ArgumentParser) -> int:
    """Generate on a cluster and print a summary.

    Raises:
        CommandError: an option is not available on a cluster, or `fastgen.ray.engine.run` raises
            it.
    """
    models.need("ray", "pyarrow")
    _refuse(_OF_ONE_MACHINE, args, parser, "is not available with --engine ray")
    if len(args.input) > 1 or args.input[0] == STDIN:
        raise CommandError(
            f"--engine ray takes one file or folder as --input, not {' '.join(args.input)}"
        )
    if args.output == STDIN:
        raise CommandError("--engine ray needs --output: a new or empty folder")
    if len(args.workers) > 2:
        raise CommandError(
            f"--workers takes one number or two, not {' '.join(map(str, args.workers))}"
        )
    from fastgen.ray import engine

    try:
        summary = engine.run(
            options, input=args.input[0], output=args.output, address=args.address,
            column=args.column or "text",
            target_column=args.target_lang_column or args.forced_bos_column, on_error=args.on_error,
            input_format=_format(args.input_format), output_format=_format(args.output_format),
            workers=(args.workers[0], args.workers[-1]), cpus=args.worker_cpus,
            gpus=args.worker_gpus or 0.0, rows=args.rows, rows_per_file=args.rows_per_file,
        )  # fmt: skip
    except ValueError as error:
        raise CommandError(str(error)) from error
    names = ("rows", "problems", "blank", "tokens", "seconds", "at_limit", "fallbacks")
    print(json.dumps({name: getattr(summary, name) for name in names}))
    return 0


def _refuse(
    names: tuple[str, ...], args: argparse.Namespace, parser: argparse.ArgumentParser, why: str
) -> None:
    for name in names:
        if getattr(args, name) != parser.get_default(name):
            raise CommandError(f"--{name.replace('_', '-')} {why}")


def _format(name: str | None) -> str | None:
    """Return the name in `fastgen.ray` of a format of `fastgen.corpus`."""
    if name in ("tsv", "dataset"):
        raise CommandError(
            f"--engine ray reads and writes Parquet, JSONL, CSV and text, not {name}"
        )
    return "txt" if name == "text" else name
