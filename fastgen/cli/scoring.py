"""A finished output against references."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from operator import length_hint
from pathlib import Path

from fastgen.cli.quality import METRICS, Metric
from fastgen.corpus.readers import Files
from fastgen.corpus.writers import File
from fastgen.errors import CommandError


def arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("quality")
    add = group.add_argument
    add("--reference", "--reference-path", type=Path, metavar="FILE", help="UTF-8 text, a line for each record")
    add("--metric", nargs="+", choices=list(METRICS), help="(bleu)")
    add("--score-path", type=Path, metavar="FILE", help="write the metrics as JSON, too")


@dataclass(frozen=True)
class Scoring:
    """Metrics, by name, and the references that they need, one for each record."""

    metrics: dict[str, Metric]
    references: list[str]
    file: Path
    written: Path | None

    def check(self, source: Files) -> None:
        """Raise CommandError where it is known by now that there are not as many references as records."""
        if source.format in ("text", "parquet") and not source.once:
            records = length_hint(source)
            if abs(records - len(self.references)) > (source.format == "text"):  # whose last line may not be ended
                raise CommandError(
                    f"--reference {self.file} has {len(self.references)} lines for {records} records of the input"
                )

    def tell(self, sink: File, output: Path, records: int) -> None:
        """Print the metrics of an output; a record without text counts as an empty one.

        Raises:
            CommandError: there are not as many references as records.
        """
        if len(self.references) != records:
            raise CommandError(f"--reference {self.file} has {len(self.references)} lines for {records} records; "
                               f"{output} is complete")  # fmt: skip
        texts = [""] * records
        for number, text in sink.best(output):
            texts[number - 1] = text
        scores = {name: metric.score(texts, self.references) for name, metric in self.metrics.items()}
        for name, metric in self.metrics.items():
            print(f"{name} {scores[name]:.2f} ({metric.signature})")
        if self.written is not None:
            signatures = {name: metric.signature for name, metric in self.metrics.items()}
            try:
                self.written.write_text(json.dumps(scores | {"signatures": signatures}, indent=2) + "\n", "utf-8")
            except OSError as error:
                raise CommandError(f"--score-path {self.written}: {error.strerror}; {output} is complete") from error


def prepared(args: argparse.Namespace, output: Path | None) -> Scoring | None:
    """What is needed to score an output; None where nobody asks.

    Raises:
        CommandError: a library or the references are missing, or there will be no file to score.
    """
    if args.reference is None:
        for option in ("metric", "score_path"):
            if getattr(args, option) is not None:
                raise CommandError(f"--{option.replace('_', '-')} needs --reference FILE")
        return None
    if output is None:
        raise CommandError("--reference: standard output is not read again; name a file by --output")
    metrics = {name: METRICS[name]() for name in args.metric or ["bleu"]}
    references: list[str] = []
    for record in Files((str(args.reference),), "text", limit=args.limit).records():
        if record.problem is not None:
            raise CommandError(f"--reference {args.reference}, line {record.number}: {record.problem.reason}")
        references.append(record.text)
    return Scoring(metrics, references, args.reference, args.score_path)
