"""The input of a run as tables of a few rows, from files of any filesystem that pyarrow knows."""

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
_KINDS = {"parquet": "parquet", "jsonl": "jsonl", "json": "jsonl", "ndjson": "jsonl", "csv": "csv", "txt": "txt"}


class Tables:
    """Files of one format, in the order of their names.

    Args:
        place: a file, or a folder of files (those whose names begin with a dot or an underscore aside).
        kind: one of `FORMATS`; None: what the names say, before a suffix such as .gz.

    Raises:
        CommandError: there are none, or their format is not known.
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
            raise CommandError(f"{place}: its format is not told by names; say which of {', '.join(FORMATS)} it is")
        self.kind = found

    def read(self, rows: int) -> Iterator[pa.Table]:
        """All rows in their order, in tables of at most so many.

        Raises:
            CommandError: a file does not hold what its format says.
        """
        for path in self.paths:
            try:
                yield from _READERS[self.kind](self.system, path, rows)
            except (OSError, ValueError) as error:  # what pyarrow raises is one of them, as is a wrong letter or JSON
                raise CommandError(f"{path}: {models.first_line(error)}") from error

    def _files(self, path: str) -> Iterator[str]:
        found = self.system.get_file_info(path)
        if found.type == fs.FileType.NotFound:
            raise CommandError(f"{self.place}: there is no such file or folder")
        if found.type == fs.FileType.File:
            yield path
            return
        inside = self.system.get_file_info(fs.FileSelector(path))
        yield from sorted(one.path for one in inside if one.is_file and one.base_name[0] not in "._")


def _kind(path: str) -> str | None:
    for compression in _COMPRESSIONS:
        path = path.removesuffix(compression)
    return _KINDS.get(path.rpartition(".")[2].lower())


def _lines(system: Any, path: str) -> Iterator[str]:
    """Lines end at line feeds, with or without a carriage return, and at nothing else."""
    with io.TextIOWrapper(system.open_input_stream(path), "utf-8-sig", newline="\n") as file:
        for line in file:
            yield line.removesuffix("\n").removesuffix("\r")


def _txt(system: Any, path: str, rows: int) -> Iterator[pa.Table]:
    lines = _lines(system, path)
    while some := list(islice(lines, rows)):
        yield pa.table({"text": some})


def _jsonl(system: Any, path: str, rows: int) -> Iterator[pa.Table]:
    lines = (line for line in _lines(system, path) if line.strip())
    while some := [json.loads(line) for line in islice(lines, rows)]:
        yield pa.Table.from_pylist(some)


def _csv(system: Any, path: str, rows: int) -> Iterator[pa.Table]:
    import pyarrow.csv

    # Texts hold line breaks where they are quoted, and a column is of the type that its first block says.
    options = pyarrow.csv.ParseOptions(newlines_in_values=True)
    with system.open_input_stream(path) as file, pyarrow.csv.open_csv(file, parse_options=options) as reader:
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
