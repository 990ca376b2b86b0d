"""Records from files: lines of text, a column of a table, JSON lines, Parquet or a stored dataset.

Files are read lazily. An error in a record is a problem of that record and does not shift the
others; an error of a file is a CommandError.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any, BinaryIO, cast

from fastgen.corpus.formats import compression, formats
from fastgen.corpus.formats.formats import Layout, Row
from fastgen.corpus.formats.records import Record
from fastgen.corpus.texts import NO_TEXT, Blank, Problem
from fastgen.errors import CommandError

STDIN = "-"


@dataclass(frozen=True)
class Files:
    """Records of some files, one file after the other.

    Attributes:
        names: paths, or `-` for standard input. Folders are datasets as `save_to_disk` writes them.
        format: one of `formats.NAMES`; None: by the ending of the names.
        column: column of the text, by its name, or by its number from 1.
        prefix_column: column of a prefix for each text.
        header: whether a table's first row names the columns; None: yes, unless all columns are
            given by number.
        quotes: whether a table's fields may be quoted.
        limit: number of records to read, from the first on; None for all.
        target_column: column that names the first token of each output.
        options: the command's options for `column` and `format`, for messages.

    Raises:
        CommandError: the files have several formats, a column is missing or not possible in the
            format, or the format does not allow standard input or `quotes=False`.
    """

    names: tuple[str, ...]
    format: str | None = None
    column: str | None = None
    prefix_column: str | None = None
    header: bool | None = None
    quotes: bool = True
    limit: int | None = None
    target_column: str | None = None
    options: tuple[str, str] = ("--column", "--input-format")

    def __post_init__(self) -> None:
        if not self.names:
            raise CommandError("--input: no file is named")
        if self.names.count(STDIN) > 1:
            raise CommandError("--input - -: there is one standard input")
        kinds = {self.format or _format_of(name) for name in self.names}
        if len(kinds) > 1:
            raise CommandError(
                f"--input: files of {' and '.join(sorted(kinds))}; "
                "--input-format says which they are"
            )
        object.__setattr__(self, "format", kinds.pop())
        if self.format in formats.BY_COLUMN and self.column is None:
            raise CommandError(f"{self.options[0]} is needed: {self._columns_said()}")
        if self.format == "text" and (self.column or self.prefix_column):
            raise CommandError(
                f"{self.options[0]} {self.column or self.prefix_column}: "
                f"lines of text have no columns; {self.options[1]} says what else the file is"
            )
        if self.format == "text" and self.target_column:
            raise CommandError(f"lines of text have no column {self.target_column!r}; "
                               "--input-format says what else the file is")  # fmt: skip
        if self.format == "csv" and not self.quotes:
            raise CommandError(
                "--no-quotes: a comma in a field of CSV needs quotes; TSV does without"
            )
        if self.format in ("parquet", "dataset") and STDIN in self.names:
            raise CommandError(f"--input-format {self.format} is not read from standard input")

    @property
    def once(self) -> bool:
        """Whether a file can be read only once."""
        return any(map(_is_stream, self.names))

    def __length_hint__(self) -> int:
        """Return the approximate number of records, if that takes less work than reading them."""
        if self.once or self.format not in ("text", "jsonl", "parquet"):
            return NotImplemented
        total = sum(self._length(name) for name in self.names)
        return total if self.limit is None else min(total, self.limit)

    def check(self) -> dict[str, Any] | None:
        """Return the fields of the first record of the first file.

        Returns:
            The fields; None if the format has none, or the file can be read only once.

        Raises:
            CommandError: a file cannot be read, is empty, lacks a column, or has other columns than
                the first file.
        """
        first = None
        for position, name in enumerate(self.names):
            if not _is_stream(name):
                with closing(self._rows(name)) as rows:
                    row = next(rows, None)
                fields = None if row is None else row.fields
                if position == 0:
                    first = fields
                elif (
                    self.format != "jsonl"
                    and first is not None
                    and fields is not None
                    and [*fields] != [*first]
                ):
                    raise CommandError(
                        f"{name} has the columns {', '.join(fields)}, "
                        f"and {self.names[0]} {', '.join(first)}"
                    )
        return first

    def records(self) -> Iterator[Record]:
        """Yield the records in order."""
        numbers = count(1)
        rows = (row for name in self.names for row in self._rows(name))
        for row in islice(rows, self.limit):
            yield self._record(next(numbers), row)

    def identity(self) -> dict[str, Any]:
        """Return what identifies the records, JSON-ready: digests of the files and all settings."""
        return {
            "files": [_identity(name) for name in self.names], "format": self.format,
            "column": self.column, "prefix_column": self.prefix_column,
            "target_column": self.target_column, "header": self.layout.header,
            "quotes": self.quotes, "limit": self.limit,
        }  # fmt: skip

    @property
    def layout(self) -> Layout:
        """The columns that the files must have, and their dialect."""
        names = tuple(self._columns.values())
        numbered = bool(names) and all(name.isdecimal() for name in names)
        return Layout(names, not numbered if self.header is None else self.header, self.quotes)

    @property
    def _columns(self) -> dict[str, str]:
        """The columns that are read, by the field of a record that they fill."""
        columns = {"text": self.column, "prefix": self.prefix_column, "target": self.target_column}
        return {field: name for field, name in columns.items() if name is not None}

    def _rows(self, name: str) -> Generator[Row]:
        any_row = False
        assert self.format is not None
        with _opened(name, self.format) as stream:
            for row in formats.rows(self.format, name, stream, self.layout):
                any_row = True
                yield row
        if not any_row:
            raise CommandError(f"{_called(name)} is empty")

    def _record(self, number: int, row: Row) -> Record:
        fields, problem = row.fields, row.problem
        values: dict[str, Any] = {"text": row.text}
        if problem is None and self.format != "text":
            assert fields is not None
            values = {
                field: fields.get(formats.key_of(name, fields))
                for field, name in self._columns.items()
            }
            problem = next(filter(None, map(_problem_of, self.layout.names, values.values())), None)
        if problem is not None:
            return Record(number, "", fields=fields, problem=Problem(problem))
        if self.format == "text" and not values["text"].strip():
            return Record(number, values["text"], problem=Blank(NO_TEXT))
        record = Record(number, fields=fields, **values)
        if record.prefix and not record.text.strip():
            return replace(record, text="", problem=Problem(NO_TEXT))
        return record

    def _length(self, name: str) -> int:
        assert self.format is not None
        with _opened(name, self.format) as stream:
            return formats.length(self.format, stream)

    def _columns_said(self) -> str:
        name = next((name for name in self.names if not _is_stream(name)), None)
        if name is None:
            return f"which column of {self.format} holds the text"
        found = formats.columns(
            cast(str, self.format), name, lambda: _opened(name, cast(str, self.format))
        )
        return f"{name} has {', '.join(found)}"


def _problem_of(name: str, value: Any) -> str | None:
    if value is None:
        return f"{name!r} is empty or missing"
    if not isinstance(value, str):
        return f"{name!r} is of type {type(value).__name__}, not text"
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return f"{name!r} is no text: {error.reason} at {error.start}"
    return None


def _format_of(name: str) -> str:
    if name == STDIN:
        return "text"
    path = Path(name)
    return "dataset" if path.is_dir() else formats.of_ending(compression.split(path)[0])


@contextmanager
def _opened(name: str, kind: str) -> Generator[BinaryIO]:
    """Open a file for reading, decompressed. Datasets are not opened here.

    Raises:
        CommandError: the file cannot be read, or is truncated.
    """
    try:
        if name == STDIN:
            with _stdin() as stream:
                yield stream
        elif kind == "dataset":
            yield cast(BinaryIO, None)
        else:
            with Path(name).open("rb") as packed:
                yield compression.unpacked(packed, compression.split(Path(name))[1])
    except CommandError:
        raise
    except compression.TORN as error:
        raise CommandError(f"{name} is torn or damaged: {error}") from error
    except OSError as error:
        raise CommandError(f"{_called(name)} cannot be read: {error.strerror or error}") from error


def _stdin() -> BinaryIO:
    """Open standard input through a descriptor of its own.

    Python closes sys.stdin when it exits, while a thread may still be waiting for input.

    Raises:
        CommandError: it is closed.
    """
    if sys.stdin is None:
        raise CommandError("standard input is closed")
    try:
        return os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    except OSError:  # sys.stdin has no file descriptor
        return sys.stdin.buffer


def _is_stream(name: str) -> bool:
    """Return whether a file can be read only once: standard input or a pipe."""
    path = Path(name)
    return name == STDIN or (path.exists() and not path.is_file() and not path.is_dir())


def _called(name: str) -> str:
    return "standard input" if name == STDIN else name


def _identity(name: str) -> dict[str, Any]:
    """Return name, size and SHA-256 of a file or of a dataset's files; of a pipe only the name."""
    path = Path(name)
    if name == STDIN or not (path.is_file() or path.is_dir()):
        return {"name": name}
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    try:
        digests = [_digest(file) for file in files]
    except OSError as error:
        raise CommandError(f"{name} cannot be read: {error.strerror}") from error
    whole = (
        digests[0] if path.is_file() else hashlib.sha256("\n".join(digests).encode()).hexdigest()
    )
    return {"name": name, "size": sum(file.stat().st_size for file in files), "sha256": whole}


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
