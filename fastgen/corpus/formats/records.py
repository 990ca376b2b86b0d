"""What a corpus is made of: records that a source yields, and the bytes that a sink makes of their outputs."""

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
        number: of its line or row, from 1.
        text: what is to be generated from; empty where there is a `problem`.
        prefix: what stands before this text, from a column of its own.
        fields: the row it comes from, by column, where the format has columns.
        problem: why it could not be read.
        target: what the first token of its output is named, from a column of its own.
    """

    number: int
    text: str
    prefix: str = ""
    fields: Mapping[str, Any] | None = None
    problem: Problem | None = None
    target: str = ""


class Source(Protocol):
    """Where records come from."""

    @property
    def once(self) -> bool:
        """Whether it can be read one time only, as standard input."""
        ...

    def records(self) -> Iterator[Record]:
        """The records in their order, from the first; each call begins anew, where the source can be read twice."""
        ...

    def identity(self) -> dict[str, Any]:
        """What tells this source from another, JSON-ready: a run that goes on compares it."""
        ...


class Sink(Protocol):
    """What outputs become."""

    def block(self, records: Sequence[Record], outputs: Sequence[Output | Problem | None]) -> bytes:
        """The bytes of some records in a row; None stands for a record that is left out.

        The blocks of a corpus, one behind the other, are the body of its output.
        """
        ...

    def finish(self, body: Path, output: Path) -> None:
        """Make the output of a whole body, at once: it is there as a whole or not at all."""
        ...

    def identity(self) -> dict[str, Any]:
        """What the bytes depend on, JSON-ready."""
        ...
