"""Records that a source yields, and interfaces of sources and sinks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fastgen.corpus.texts import Output, Problem


@dataclass(frozen=True)
class Record:
    """One text of a corpus.

    Attributes:
        number: number of its line or row, from 1.
        text: the text to generate from; may be empty if there is a `problem`.
        prefix: text before it, from a column of its own.
        fields: the row that it comes from, by column, if the format has columns.
        problem: why it could not be read.
        target: name of the first token of its output, from a column of its own.
    """

    number: int
    text: str
    prefix: str = ""
    fields: Mapping[str, Any] | None = None
    problem: Problem | None = None
    target: str = ""


class Source(Protocol):
    """Interface of a source of records."""

    @property
    def once(self) -> bool:
        """Whether it can be read only once, as standard input."""
        ...

    def records(self) -> Iterator[Record]:
        """Yield the records in order. Each call starts again from the first, unless `once`."""
        ...

    def identity(self) -> dict[str, Any]:
        """Return what identifies this source, JSON-ready. A resumed run compares it."""
        ...


class Sink(Protocol):
    """Interface of an output format."""

    def block(self, records: Sequence[Record], outputs: Sequence[Output | Problem | None]) -> bytes:
        """Return the bytes for consecutive records. An output of None leaves its record out.

        The blocks of a corpus, concatenated, are the body of its output.
        """
        ...

    def finish(self, body: Path, output: Path) -> None:
        """Make the output from a complete body, atomically."""
        ...

    def identity(self) -> dict[str, Any]:
        """Return what the bytes depend on, JSON-ready."""
        ...
