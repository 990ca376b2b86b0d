"""Output folder of a run: its parts, a summary, and a marker that it is complete."""

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
SCORE = "score"  # CSV's column for the score of the best text

_MOVES_FOLDERS = ("local", "hdfs")
"""Filesystems that rename a folder and its contents atomically."""


class Folder:
    """Parts of an output, in order.

    If the filesystem can rename a folder, everything is written beside the destination and moved
    there by `finish`. Elsewhere, as in object stores, parts appear as they are written. In both
    cases `_SUCCESS` is written last: a folder without it is not a complete output.

    Args:
        place: a path, or a URI of a filesystem that pyarrow knows (s3://, gs://, hdfs://, file://).
        kind: one of `FORMATS`. A text file has one output per line. CSV has no column `outputs`,
            and `score`, of the best text, in place of `scores`.

    Raises:
        CommandError: the destination is not empty, or cannot be written.
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
        """Raise CommandError if the format cannot hold the input's columns or the outputs.

        Args:
            schema: of the input.
            scores: whether outputs have scores.
            several: whether a row has several outputs.
        """
        if scores and self.kind == "txt":
            raise CommandError(
                "--scores: lines of text have no place for them; write Parquet, JSONL or CSV"
            )
        if several and self.kind in ("csv", "txt"):
            raise CommandError(
                f"--n-best: {self.kind} has no place for several outputs here; "
                "write Parquet or JSONL"
            )
        if self.kind != "csv":
            return
        for each in schema:
            if pa.types.is_nested(each.type):
                raise CommandError(
                    f"column {each.name!r} holds {each.type}, which CSV does not; "
                    "write Parquet or JSONL"
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
        """Write the summary and the marker, and move the folder to its destination.

        Raises:
            CommandError: something has appeared at the destination meanwhile; the message says
                where the output is.
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
                # It is empty, but not every filesystem renames over it.
                self.system.delete_dir(self.path)
            self.system.move(self.scratch, self.path)

    def discard(self) -> None:
        """Remove the scratch folder of an incomplete output, if there is one."""
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
    """Return the filesystem of a path or URI, and the path within it."""
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
