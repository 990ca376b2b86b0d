"""Output formats: lines of text, tables, JSON lines and Parquet.

The bytes of a block depend only on its records and outputs. All blocks, concatenated, are the body
of the output; if it is compressed, each block is a member of its own.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastgen.corpus.formats import compression, formats, parquet
from fastgen.corpus.formats.readers import Files
from fastgen.corpus.formats.records import Record
from fastgen.corpus.texts import Output, Problem
from fastgen.errors import CommandError

NAMES = ("text", "tsv", "csv", "jsonl", "parquet")
_BREAKS = re.compile(r"\r\n|[\r\n]")
_BREAKS_AND_TABS = re.compile(r"\r\n|[\r\n\t]")


@dataclass(frozen=True)
class File:
    """An output file, or standard output.

    Attributes:
        format: one of `NAMES`.
        compression: one of `compression.ENDINGS`, or "" for none.
        columns: columns of the input, which a table keeps. None: the input has none, and a table
            gets the column `text`.
        quotes: whether a table's fields may be quoted. If not, tabs and line breaks in fields
            become spaces.
        several: whether a record has several outputs.
        scores: whether outputs have scores.
        problems: whether a record without an output is written, with the reason.
        prefix: prefix of the names of added fields.

    Raises:
        CommandError: the input has a column with the name of an added field, or two attributes
            exclude each other.
    """

    format: str
    compression: str = ""
    columns: tuple[str, ...] | None = None
    quotes: bool = True
    several: bool = False
    scores: bool = False
    problems: bool = False
    prefix: str = ""

    def __post_init__(self) -> None:
        if self.format == "parquet" and self.compression:
            raise CommandError(
                f"--output: Parquet is compressed by itself; leave {self.compression} off the name"
            )
        if self.format == "csv" and not self.quotes:
            raise CommandError(
                "--no-quotes: a comma in a field of CSV needs quotes; TSV does without"
            )
        clashing = [name for name in self.added if name in (self.columns or ())]
        if self.format != "text" and clashing:
            raise CommandError(
                f"the input has a column {clashing[0]!r} already, which the output adds; "
                "--field-prefix TEXT goes before the names of what is added"
            )

    @property
    def added(self) -> list[str]:
        """Names of the fields that are added to those of a record."""
        if self.format in formats.DELIMITERS:
            names = ["rank"] * self.several + ["score"] * self.scores + ["output"]
        else:
            names = ["output"] + ["outputs"] * self.several + ["score"] * self.scores
            names += ["scores"] * (self.several and self.scores)
        return [self.prefix + name for name in ["number", *names, *["problem"] * self.problems]]

    def block(self, records: Sequence[Record], outputs: Sequence[Output | Problem | None]) -> bytes:
        """Return the bytes for consecutive records; see `Sink.block`."""
        pairs = list(zip(records, outputs, strict=True))
        if self.format in formats.DELIMITERS:
            data = self._table(pairs)
        else:
            one = self._lines if self.format == "text" else self._json
            data = "".join(line for record, output in pairs for line in one(record, output))
        return compression.packed(data.encode(), self.compression) if data else b""

    def finish(self, body: Path, output: Path) -> None:
        """Make the output from a complete body; see `Sink.finish`."""
        if self.format == "parquet":
            final = output.with_name(f"{output.name}.part.final")
            parquet.of_json_lines(body, final)
            with final.open("rb") as stream:
                os.fsync(stream.fileno())
            final.replace(output)
            body.unlink()
            return
        if self.compression and body.stat().st_size == 0:
            body.write_bytes(compression.packed(b"", self.compression))
        body.replace(output)

    def identity(self) -> dict[str, Any]:
        """Return what the bytes depend on, JSON-ready."""
        return asdict(self)

    def best(self, output: Path) -> Iterator[tuple[int, str]]:
        """Yield number and best text of each record of a finished output; "" for a failed text."""
        if self._numbered:
            files, number, rank = Files((str(output),), "tsv", "4", quotes=False), "1", "2"
        else:
            column = None if self.format == "text" else f"{self.prefix}output"
            files = Files((str(output),), self.format, column, quotes=self.quotes)
            number, rank = f"{self.prefix}number", f"{self.prefix}rank"
        for record in files.records():
            fields = record.fields or {}
            if (
                not (self.several and (self._numbered or self.format in formats.DELIMITERS))
                or fields[rank] == "1"
            ):
                yield int(fields.get(number, record.number)), record.text

    @property
    def _numbered(self) -> bool:
        """Whether lines of text include number, rank and score."""
        return self.format == "text" and (self.several or self.scores)

    def _lines(self, record: Record, output: Output | Problem | None) -> Iterator[str]:
        if not self._numbered:
            yield (one_line(output.texts[0]) if isinstance(output, Output) else "") + "\n"
        elif output is not None:
            for rank, (text, score) in enumerate(_ranked(output), 1):
                yield (
                    f"{record.number}\t{rank}\t{_cell(score)}\t{_BREAKS_AND_TABS.sub(' ', text)}\n"
                )

    def _table(self, pairs: Sequence[tuple[Record, Output | Problem | None]]) -> str:
        number, *names = self.added
        columns = self.columns or ("text",)
        written = io.StringIO()
        delimiter = formats.DELIMITERS[self.format]
        plain, quoted = (
            csv.writer(written, delimiter=delimiter, lineterminator="\n", quoting=quoting)
            for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_ALL)
        )

        def write(values: Sequence[Any]) -> None:
            cells = [_cell(value) for value in values]
            if not self.quotes:
                written.write(
                    delimiter.join(_BREAKS_AND_TABS.sub(" ", cell) for cell in cells) + "\n"
                )
            else:  # csv.writer does not quote a lone \r, which csv readers take for a line end
                (quoted if any("\r" in cell for cell in cells) else plain).writerow(cells)

        if pairs and pairs[0][0].number == 1:
            write([number, *columns, *names])
        for record, output in pairs:
            fields = _fields(record)
            for rank, (text, score) in enumerate(_ranked(output) if output is not None else (), 1):
                added = {"rank": rank, "score": score, "output": text, "problem": _reason(output)}
                write([record.number, *(fields.get(column) for column in columns),
                       *(added[name.removeprefix(self.prefix)] for name in names)])  # fmt: skip
        return written.getvalue()

    def _json(self, record: Record, output: Output | Problem | None) -> Iterator[str]:
        if output is None:
            return
        texts = output.texts if isinstance(output, Output) else []
        scores = (output.scores if isinstance(output, Output) else None) or []
        added = {
            "number": record.number, "output": texts[0] if texts else None, "outputs": texts,
            "score": scores[0] if scores else None, "scores": scores, "problem": _reason(output),
        }  # fmt: skip
        number, *names = ((name, added[name.removeprefix(self.prefix)]) for name in self.added)
        line = {**dict([number]), **_fields(record), **dict([number, *names])}
        yield json_line(line, floats=self.format == "parquet")


def json_line(value: Mapping[str, Any], floats: bool = False) -> str:
    """Return a line of JSON. Other types become text, and bytes become base64.

    Args:
        value: the object.
        floats: whether NaN and the infinities are written as Python's reader accepts them; else
            they are null.
    """
    try:
        line = json.dumps(value, ensure_ascii=False, default=_as_text, allow_nan=floats)
    except ValueError:
        value = _finite(value)
        line = json.dumps(value, ensure_ascii=False, default=_as_text)
    try:
        line.encode()
    except UnicodeEncodeError:  # an unpaired surrogate, which only an escape can represent
        line = json.dumps(value, default=_as_text)
    return line + "\n"


def one_line(text: str) -> str:
    """Return a text with line breaks replaced by spaces."""
    return _BREAKS.sub(" ", text)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def _as_text(value: Any) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _fields(record: Record) -> Mapping[str, Any]:
    return {"text": record.text} if record.fields is None else record.fields


def _ranked(output: Output | Problem) -> list[tuple[str, float | None]]:
    """Return texts and their scores, the best first; one empty text for a problem."""
    if isinstance(output, Problem):
        return [("", None)]
    return list(zip(output.texts, output.scores or [None] * len(output.texts), strict=True))


def _reason(output: Output | Problem | None) -> str | None:
    return output.reason if isinstance(output, Problem) else None


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        return repr(value)
    return json_line({"": value})[5:-2] if isinstance(value, dict | list) else _as_text(value)
