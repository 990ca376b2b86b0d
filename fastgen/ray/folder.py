"""The folder that a run writes: its parts, a summary of the run, and a mark that it is whole."""

from __future__ import annotations

import json
import posixpath
import uuid
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from pyarrow import fs

from fastgen.corpus.formats.writers import json_line, one_line
from fastgen.errors import CommandError

FORMATS = ("parquet", "jsonl", "csv", "txt")
SUCCESS, SUMMARY = "_SUCCESS", "_summary.json"
SCORE = "score"  # the column of CSV that has the best text's

_MOVES_FOLDERS = ("local", "hdfs")
"""Filesystems that rename a folder with all that is in it, at once."""


class Folder:
    """Parts of an output, in their order.

    Where the filesystem can rename a folder, all is written beside it and comes to its place with `finish`. Elsewhere,
    as in object stores, parts appear as they are written. Everywhere `_SUCCESS` is written last: what lies in a folder
    without it is not an output.

    Args:
        place: a path, or a URI of a filesystem that pyarrow knows (s3://, gs://, hdfs://, file://).
        kind: one of `FORMATS`. Of a text file's lines each is an output; in CSV there is no column `outputs`, and
            `score`, of the best text, in the place of `scores`.

    Raises:
        CommandError: there is something at that place, or it cannot be written.
    """

    def __init__(self, place: str, kind: str) -> None:
        if kind not in FORMATS:
            raise CommandError(f"output format {kind!r} must be one of {', '.join(FORMATS)}")
        self.place, self.kind, self.parts, self.whole = place, kind, list[str](), False
        try:
            self.system, path = located(place)
            self.path = path.rstrip("/")
            self._refuse_what_is_there()
            self.moves = self.system.type_name in _MOVES_FOLDERS
            self.scratch = f"{self.path}.part-{uuid.uuid4().hex[:8]}" if self.moves else self.path
            self.system.create_dir(self.scratch, recursive=True)
        except OSError as error:
            raise CommandError(f"{place} cannot be written: {error}") from error

    def check(self, schema: pa.Schema, scores: bool, several: bool) -> None:
        """Raise CommandError where the format cannot hold the input's columns, or what is asked for.

        scores: of the outputs. several: more than one output of a row.
        """
        if scores and self.kind == "txt":
            raise CommandError(
                "--scores: lines of text have no place for them; write Parquet, JSONL or CSV"
            )
        if several and self.kind in ("csv", "txt"):
            raise CommandError(
                f"--n-best: {self.kind} has no place for several outputs here; write Parquet or JSONL"
            )
        if self.kind != "csv":
            return
        for each in schema:
            if pa.types.is_nested(each.type):
                raise CommandError(
                    f"column {each.name!r} holds {each.type}, which CSV does not; write Parquet or JSONL"
                )
            if scores and each.name == SCORE:
                raise CommandError(
                    f"a column is named {SCORE!r}, as that of --scores in CSV: rename it"
                )

    def write(self, table: pa.Table) -> None:
        """Write the next part."""
        name = f"part-{len(self.parts):06}.{self.kind}"
        with self._file(name) as file:
            _WRITERS[self.kind](table, file)
        self.parts.append(name)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary, then the mark, and bring the folder to its place.

        Raises:
            CommandError: meanwhile something has come to that place; the message says where the output is now.
        """
        with self._file(SUMMARY) as file:
            file.write((json.dumps(summary, indent=1, ensure_ascii=False) + "\n").encode())
        with self._file(SUCCESS):
            pass
        self.whole = True
        if self.moves:
            try:
                self._refuse_what_is_there()
            except CommandError as error:
                raise CommandError(f"{error}; the finished output is {self.scratch}") from error
            if self.system.get_file_info(self.path).type != fs.FileType.NotFound:
                self.system.delete_dir(
                    self.path
                )  # it is empty; not every filesystem renames over it
            self.system.move(self.scratch, self.path)

    def discard(self) -> None:
        """Remove what was written of an output that is not whole, where nothing else can lie."""
        if self.moves and not self.whole:
            self.system.delete_dir(self.scratch)

    def _refuse_what_is_there(self) -> None:
        found = self.system.get_file_info(self.path)
        if found.type == fs.FileType.File:
            raise CommandError(f"{self.place} is a file; the output is a folder")
        if found.type == fs.FileType.Directory and self.system.get_file_info(
            fs.FileSelector(self.path)
        ):
            raise CommandError(
                f"{self.place} holds files already: name another folder, or empty it"
            )

    def _file(self, name: str) -> Any:
        return self.system.open_output_stream(posixpath.join(self.scratch, name))


def located(place: str) -> tuple[Any, str]:
    """The filesystem of a path or URI, and the path within."""
    if "://" in place:
        return fs.FileSystem.from_uri(place)
    from os.path import abspath

    return fs.LocalFileSystem(), abspath(place)


def _parquet(table: pa.Table, file: Any) -> None:
    import pyarrow.parquet

    pyarrow.parquet.write_table(table, file)


def _jsonl(table: pa.Table, file: Any) -> None:
    for row in table.to_pylist():
        file.write(json_line(row).encode())


def _csv(table: pa.Table, file: Any) -> None:
    import pyarrow.csv

    table = table.drop_columns(["outputs"])
    if "scores" in table.column_names:
        best = [scores[0] if scores else None for scores in table["scores"].to_pylist()]
        table = table.drop_columns(["scores"]).append_column(SCORE, pa.array(best, pa.float64()))
    pyarrow.csv.write_csv(table, file)


def _txt(table: pa.Table, file: Any) -> None:
    for text in table["output"].to_pylist():
        file.write((one_line(text) + "\n").encode())


_WRITERS = {"parquet": _parquet, "jsonl": _jsonl, "csv": _csv, "txt": _txt}
