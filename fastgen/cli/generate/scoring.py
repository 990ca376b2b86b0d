"""Scores of a finished output against references."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from fastgen.cli.generate.quality import METRICS, Metric
from fastgen.corpus.formats import formats
from fastgen.corpus.formats.readers import Files
from fastgen.corpus.formats.writers import File
from fastgen.corpus.texts import Blank
from fastgen.errors import CommandError


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of scoring."""
    group = parser.add_argument_group("quality")
    add = group.add_argument
    add(
        "--reference",
        "--reference-path",
        metavar="FILE",
        help="file with a reference for each record, in any format of --input",
    )
    add(
        "--reference-format",
        choices=formats.NAMES,
        help="default: from the file name, else text",
    )
    add(
        "--reference-column",
        metavar="NAME",
        help="column with the references: its name, or its number from 1",
    )
    add(
        "--metric",
        nargs="+",
        choices=list(METRICS),
        help="metrics that compare the outputs with the references (bleu)",
    )
    add("--score-path", type=Path, metavar="FILE", help="also write the metrics as JSON")


@dataclass(frozen=True)
class Scoring:
    """Metrics and the references that they need.

    Attributes:
        metrics: by name.
        references: one for each record.
        file: name of the file of references, for messages.
        written: file for the scores as JSON, or None.
    """

    metrics: dict[str, Metric]
    references: list[str]
    file: str
    written: Path | None

    def check(self, source: Files) -> None:
        """Raise CommandError if the numbers of references and records differ.

        An input that can be read only once is not checked.
        """
        if not source.once and (records := sum(1 for _ in source.records())) != len(
            self.references
        ):
            raise CommandError(self._differ(records))

    def tell(self, sink: File, output: Path, records: int) -> bool:
        """Print the metrics of an output. A record without text counts as an empty text.

        Returns:
            False if the numbers of references and records differ; no metric is computed then.
        """
        if len(self.references) != records:
            print(
                f"{self._differ(records)}; {output} is complete, and no metric is computed",
                file=sys.stderr,
            )
            return False
        texts = [""] * records
        for number, text in sink.best(output):
            texts[number - 1] = text
        scores = {
            name: metric.score(texts, self.references) for name, metric in self.metrics.items()
        }
        for name, metric in self.metrics.items():
            print(f"{name} {scores[name]:.2f} ({metric.signature})")
        if self.written is not None:
            signatures = {name: metric.signature for name, metric in self.metrics.items()}
            try:
                self.written.write_text(
                    json.dumps(scores | {"signatures": signatures}, indent=2) + "\n", "utf-8"
                )
            except OSError as error:
                raise CommandError(
                    f"--score-path {self.written}: {error.strerror}; {output} is complete"
                ) from error
        return True

    def _differ(self, records: int) -> str:
        return (
            f"--reference {self.file} has {len(self.references)} references "
            f"for {records} records of the input"
        )


def prepared(args: argparse.Namespace, output: Path | None) -> Scoring | None:
    """Return what is needed to score an output, or None without --reference.

    Raises:
        CommandError: a library or the references are missing, or there will be no file to score.
    """
    if args.reference is None:
        for option in ("metric", "score_path", "reference_format", "reference_column"):
            if getattr(args, option) is not None:
                raise CommandError(f"--{option.replace('_', '-')} needs --reference FILE")
        return None
    if output is None:
        raise CommandError(
            "--reference: outputs on standard output cannot be scored; name a file with --output"
        )
    metrics = {name: METRICS[name]() for name in args.metric or ["bleu"]}
    options = ("--reference-column", "--reference-format")
    files = Files(
        (args.reference,),
        args.reference_format,
        args.reference_column,
        limit=args.limit,
        options=options,
    )
    if files.format == "tsv":
        files = replace(files, quotes=args.quotes)
    references: list[str] = []
    for record in files.records():
        if record.problem is not None and not isinstance(record.problem, Blank):
            raise CommandError(
                f"--reference {args.reference}, record {record.number}: {record.problem.reason}"
            )
        references.append(record.text)
    return Scoring(metrics, references, args.reference, args.score_path)
