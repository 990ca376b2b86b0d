"""Input of a run as small tables, from files of any filesystem that pyarrow knows."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pyarrow as pa
from pyarrow import fs

from fastgen.corpus import models
from fastgen.errors import CommandError
from fastgen.ray.folder import FORMATS, located

_COMPRESSIONS = (".gz", ".bz2", ".zst", ".lz4")
_KINDS = {
    "parquet": "parquet",
    "jsonl": "jsonl",
    "json": "jsonl",
    "ndjson": "jsonl",
    "csv": "csv",
    "txt": "txt",
}


class Tables:
    """Files of one format, in the order of their names.

    Args:
        place: a file, or a folder of files. Files whose names begin with a dot or an underscore are
            ignored.
        kind: one of `FORMATS`; None: by the endings of the names, before a suffix such as .gz.

    Raises:
        CommandError: nothing can be read there, or the format is unknown.
    """

    def __init__(self, place: str, kind: str | None = None) -> None:
        self.place = place
        try:
            self.system, path = located(place)
            self.paths = list(self._files(path))
        except (OSError, ValueError) as error:
            raise CommandError(f"{place} cannot be read: {models.first_line(error)}") from error
        kinds = {_kind(path) for path in self.paths} if kind is None else {kind}
        found = kinds.pop() if len(kinds) == 1 else None
        if found not in FORMATS:
            raise CommandError(
                f"{place}: its format is not told by names; say which of {', '.join(FORMATS)} it is"
            )
        self.kind = found

    def read(self, rows: int) -> Iterator[pa.Table]:
        """Yield all rows in order, in tables of at most `rows` rows.

        For JSON lines, the columns of a table are the fields of its rows, in order of appearance,
        with nulls for missing fields. Columns of CSV are strings.

        Raises:
            CommandError: a file is not of its format.
        """
        for path in self.paths:
            try:
                yield from _READERS[self.kind](self.system, path, rows)
            except (pa.ArrowException, OSError, ValueError) as error:
                raise CommandError(f"{path}: {models.first_line(error)}") from error

    def _files(self, path: str) -> Iterator[str]:
        found = self.system.get_file_info(path)
        if found.type == fs.FileType.NotFound:
            raise CommandError(f"{self.place}: there is no such file or folder")
        if found.type == fs.FileType.File:
            yield path
            return
        inside = self.system.get_file_info(fs.FileSelector(path))
        yield from sorted(
            one.path for one in inside if one.is_file and one.base_name[0] not in "._"
        )


def _kind(path: str) -> str | None:
    for compression in _COMPRESSIONS:
        path = path.removesuffix(compression)
    return _KINDS.get(path.rpartition(".")[2].lower())


def _lines(system: Any, path: str) -> Iterator[tuple[int, str]]:
    """Yield lines and their numbers. Only line feeds end a line, with or without a carriage return.

    Raises:
        ValueError: a line is not UTF-8.
    """
    with io.BufferedReader(system.open_input_stream(path)) as file:
        for number, line in enumerate(file, 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"line {number}: {error}") from error
            yield number, text.removesuffix("\n").removesuffix("\r")


def _txt(system: Any, path: str, rows: int) -> Iterator[pa.Table]:
    lines = _lines(system, path)
    while some := [line for _, line in islice(lines, rows)]:
        yield pa.table({"text": some})


def _jsonl(system: Any, path: str, rows: int) -> Iterator[pa.Table]:
    lines = ((number, line) for number, line in _lines(system, path) if line.strip())
    while some := list(islice(lines, rows)):
        objects = [_object(number, line) for number, line in some]
        try:
            table = pa.Table.from_struct_array(pa.array(objects))  # works without fields, too
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            raise ValueError(
                f"lines {some[0][0]} to {some[-1][0]}: {models.first_line(error)}"
            ) from error
        yield table.select(list(dict.fromkeys(name for one in objects for name in one)))


def _object(number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (RecursionError, ValueError) as error:
        raise ValueError(f"line {number}: {models.first_line(error)}") from error
    if not isinstance(found, dict):
        raise ValueError(f"line {number}: a {type(found).__name__}, not an object")
    return found


def _csv(system: Any, path: str, rows: int) -> Iterator[pa.Table]:
    import pyarrow.csv

    # All columns are verbatim strings: "001" is no number, "NA" no null, and an empty line a row.
    parsing = pyarrow.csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False)
    with (
        system.open_input_stream(path) as file,
        pyarrow.csv.open_csv(file, parse_options=parsing) as reader,
    ):
        strings = dict.fromkeys(reader.schema.names, pa.string())
    converting = pyarrow.csv.ConvertOptions(column_types=strings, strings_can_be_null=False)
    with (
        system.open_input_stream(path) as file,
        pyarrow.csv.open_csv(file, parse_options=parsing, convert_options=converting) as reader,
    ):
        for batch in reader:
            yield from _slices(batch, rows)


def _parquet(system: Any, path: str, rows: int) -> Iterator[pa.Table]:
    import pyarrow.parquet

    with system.open_input_file(path) as file:
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=rows):
            yield pa.Table.from_batches([batch])


def _slices(batch: Any, rows: int) -> Iterator[pa.Table]:
    for start in range(0, len(batch), rows):
        yield pa.Table.from_batches([batch.slice(start, rows)])


_READERS = {"parquet": _parquet, "jsonl": _jsonl, "csv": _csv, "txt": _txt}
