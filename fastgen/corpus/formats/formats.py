"""Rows of a corpus in each format: each format is a function that yields them."""

from __future__ import annotations

import codecs
import csv
import io
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from fastgen.corpus.models import first_line, need
from fastgen.errors import CommandError

NAMES = ("text", "tsv", "csv", "jsonl", "parquet", "dataset")
BY_COLUMN = NAMES[1:]
DELIMITERS = {"tsv": "\t", "csv": ","}
_ENDINGS = {
    ".tsv": "tsv",
    ".tab": "tsv",
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}
_LONGEST_FIELD = 1 << 24  # keeps an unclosed quote from reading the whole file into memory
_AT_ONCE = 1024  # rows of Parquet and datasets to read at once


@dataclass(frozen=True)
class Row:
    """A line of text, or the fields of a row by column.

    Attributes:
        text: the line.
        fields: the fields.
        problem: why the row cannot be read, or None.
    """

    text: str | None = None
    fields: dict[str, Any] | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Layout:
    """Columns and dialect of a file.

    Attributes:
        names: columns that it must have.
        header: whether a table's first row names the columns; see `readers.Files`.
        quotes: whether a table's fields may be quoted; see `readers.Files`.
    """

    names: tuple[str, ...] = ()
    header: bool = True
    quotes: bool = True


def of_ending(ending: str) -> str:
    """Return the format for an ending; text if the ending is unknown."""
    return _ENDINGS.get(ending.lower(), "text")


def rows(kind: str, name: str, stream: BinaryIO, layout: Layout) -> Iterator[Row]:
    """Yield the rows of a file.

    Args:
        kind: one of `NAMES`.
        name: path of the file, for messages; a dataset is read from it.
        stream: the contents of the file; not used for a dataset.
        layout: its columns and dialect.

    Raises:
        CommandError: a column is missing, or the file is not of this format.
    """
    if kind == "text":
        return _lines(stream)
    if kind in DELIMITERS:
        return _table(name, stream, DELIMITERS[kind], layout)
    if kind == "jsonl":
        return _json_lines(name, stream, layout)
    return _parquet(name, stream, layout) if kind == "parquet" else _dataset(name, layout)


def length(kind: str, stream: BinaryIO) -> int:
    """Return the number of a file's rows, from Parquet's metadata; else the number of line ends."""
    if kind == "parquet":
        need("pyarrow")
        from pyarrow.parquet import ParquetFile

        return ParquetFile(stream).metadata.num_rows
    return sum(piece.count(b"\n") for piece in iter(lambda: stream.read(1 << 20), b""))


def columns(
    kind: str, name: str, opened: Callable[[], AbstractContextManager[BinaryIO]]
) -> list[str]:
    """Return the columns of a file's first row."""
    with opened() as stream:
        row = next(rows(kind, name, stream, Layout()), None)
    return list(row.fields) if row is not None and row.fields else []


def key_of(name: str, fields: dict[str, Any]) -> str:
    """Return the key of a column that is given by its name, or by its number from 1."""
    if name in fields or not name.isdecimal() or not 1 <= int(name) <= len(fields):
        return name
    return list(fields)[int(name) - 1]


def _check(name: str, fields: dict[str, Any], layout: Layout) -> None:
    for column in layout.names:
        if key_of(column, fields) not in fields:
            raise CommandError(f"{name} has no column {column!r}; there are {', '.join(fields)}")


def _lines(stream: BinaryIO) -> Iterator[Row]:
    for number, line in enumerate(_ended_by_newline(stream)):
        try:
            yield Row((line.removeprefix(codecs.BOM_UTF8) if number == 0 else line).decode())
        except UnicodeDecodeError as error:
            yield Row(problem=f"not UTF-8: {error.reason} at byte {error.start}")


def _ended_by_newline(stream: BinaryIO) -> Iterator[bytes]:
    r"""Yield lines without their ends, which are \n or \r\n and nothing else."""
    for line in stream:
        yield line.removesuffix(b"\n").removesuffix(b"\r") if line.endswith(b"\n") else line


def _table(name: str, stream: BinaryIO, delimiter: str, layout: Layout) -> Iterator[Row]:
    csv.field_size_limit(_LONGEST_FIELD)
    # Invalid UTF-8 becomes surrogates, so that it is a problem of its own row only.
    text = io.TextIOWrapper(
        stream, "utf-8-sig", "surrogateescape", newline="" if layout.quotes else "\n"
    )
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    found = reader if layout.quotes else (line.rstrip("\r\n").split(delimiter) for line in text)
    try:
        header: list[str] | None = None
        for cells in found:
            if header is None:
                header = cells if layout.header else [str(i) for i in range(1, len(cells) + 1)]
                if len(set(header)) < len(header):
                    raise CommandError(f"{name} has two columns of one name: {', '.join(header)}")
                _check(name, dict.fromkeys(header), layout)
                if layout.header:
                    continue
            # csv yields no cells for a blank line, which is a row of one empty field.
            if cells or len(header) == 1:
                yield _of_cells(header, cells or [""])
    except csv.Error as error:  # a misplaced quote: the start of the next row is unknown
        way_out = "; --no-quotes where a quote is a letter like others" if delimiter == "\t" else ""
        raise CommandError(f"{name}, line {reader.line_num}: {error}{way_out}") from error
    finally:
        text.detach()


def _of_cells(header: list[str], cells: list[str]) -> Row:
    clean = [cell.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for cell in cells]
    fields = dict.fromkeys(header, "") | dict(zip(header, clean, strict=False))
    if len(cells) != len(header):
        return Row(fields=fields, problem=f"{len(cells)} columns of {len(header)}")
    return Row(fields=fields, problem=None if clean == cells else "not UTF-8")


def _json_lines(name: str, stream: BinaryIO, layout: Layout) -> Iterator[Row]:
    first = True
    for number, line in enumerate(_ended_by_newline(stream)):
        data = line.removeprefix(codecs.BOM_UTF8) if number == 0 else line
        if not data.strip():
            continue
        try:
            fields = json.loads(data)
            if not isinstance(fields, dict):
                raise ValueError(f"a {type(fields).__name__}, not an object")
        except (ValueError, RecursionError) as error:  # ValueError includes invalid UTF-8
            yield Row(problem=f"not a JSON object: {first_line(error)}")
            continue
        if first:
            _check(name, fields, layout)
            first = False
        yield Row(fields=fields)


def _parquet(name: str, stream: BinaryIO, layout: Layout) -> Iterator[Row]:
    need("pyarrow")
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(stream)
        _check(name, dict.fromkeys(file.schema_arrow.names), layout)
        for batch in file.iter_batches(_AT_ONCE):
            yield from (Row(fields=fields) for fields in batch.to_pylist())
    except pa.ArrowException as error:
        raise CommandError(f"{name} cannot be read as Parquet: {first_line(error)}") from error


def _dataset(name: str, layout: Layout) -> Iterator[Row]:
    need("datasets")
    from datasets import DatasetDict, load_from_disk

    try:
        found = load_from_disk(name)
    except (OSError, ValueError, KeyError) as error:
        raise CommandError(
            f"{name} cannot be read as a dataset that save_to_disk wrote: {first_line(error)}"
        ) from error
    if isinstance(found, DatasetDict):
        raise CommandError(
            f"{name} has several parts, {', '.join(map(str, found))}: name one, as {name}/PART"
        )
    _check(name, dict.fromkeys(found.column_names), layout)
    for table in found.with_format("arrow").iter(_AT_ONCE):  # as stored, without decoding
        yield from (Row(fields=fields) for fields in cast(Any, table).to_pylist())
