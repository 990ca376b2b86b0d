"""A table or figure of a paper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.session import Session

SIZES = ("paper", "reduced", "tiny")
"""The paper's shapes; shapes for a CPU; a test of the measurement itself, whose figures mean nothing."""


class NotHere(Exception):
    """What a table needs is not there; the message says what."""


@dataclass(frozen=True)
class Curve:
    """What a plot of a figure shows: for each series its values, None where there is none, over the same `x`."""

    x: list[Any]
    series: dict[str, list[float | None]]
    x_label: str
    y_label: str


@dataclass(frozen=True)
class Result:
    """A table as it was measured.

    Attributes:
        columns: their heads. rows: their cells, as they are to be read.
        shape: what was run, in words.
        equal: all outputs were the same on both sides.
        raw: every time the rows rest on.
    """

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    shape: str
    equal: bool = True
    curve: Curve | None = None
    raw: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Order:
    """What the command line asks for.

    Attributes:
        size: one of SIZES.
        pair: folders of a large and a small model, for BiLD.
        bild: results of `benchmarks.bild` on this hardware.
    """

    session: Session
    size: str
    pair: tuple[Path, Path] | None
    bild: Path

    def of(self, paper: Any, reduced: Any, tiny: Any) -> Any:
        """The value for the size."""
        return (paper, reduced, tiny)[SIZES.index(self.size)]


@dataclass(frozen=True)
class Table:
    """A table or figure of a paper.

    Attributes:
        name: of its file. title: the paper and its number there. what: one sentence of what it shows.
        hardware: on which the paper measured it.
        measure: raises NotHere where something it needs is missing.
    """

    name: str
    title: str
    what: str
    hardware: str
    measure: Callable[[Order], Result]


def times(ratio: float, low: float, high: float) -> str:
    """A speed-up with its interval."""
    return f"{ratio:.2f}x [{low:.2f}, {high:.2f}]"


DIFFERS = "outputs differ"
