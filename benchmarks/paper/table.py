"""A table or figure of a paper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.session import Session

SIZES = ("paper", "reduced", "tiny")
"""The paper's shapes, shapes for a CPU, and a test whose figures mean nothing."""


class NotHere(Exception):
    """Raised if a requirement of a table is missing; the message names it."""


@dataclass(frozen=True)
class Curve:
    """The plot of a figure.

    Attributes:
        x: values of the horizontal axis, shared by all series.
        series: values by name of the series, None where there is no value.
        x_label: label of the horizontal axis.
        y_label: label of the vertical axis.
    """

    x: list[Any]
    series: dict[str, list[float | None]]
    x_label: str
    y_label: str


@dataclass(frozen=True)
class Result:
    """A measured table.

    Attributes:
        columns: headings.
        rows: cells as text.
        shape: what was run, in words.
        equal: whether all outputs were the same on both sides.
        curve: the plot, for figures.
        raw: all times that the rows are based on.
    """

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    shape: str
    equal: bool = True
    curve: Curve | None = None
    raw: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Order:
    """Settings from the command line.

    Attributes:
        session: device, precision and number of rounds.
        size: one of SIZES.
        pair: folders of a large and a small model, for BiLD.
        bild: results file of `benchmarks.bild` on this hardware.
    """

    session: Session
    size: str
    pair: tuple[Path, Path] | None
    bild: Path

    def of(self, paper: Any, reduced: Any, tiny: Any) -> Any:
        """Return the value for the selected size."""
        return (paper, reduced, tiny)[SIZES.index(self.size)]


@dataclass(frozen=True)
class Table:
    """A table or figure of a paper.

    Attributes:
        name: name of its results file.
        title: the paper, and the number of the table or figure in it.
        what: its content, in one sentence.
        hardware: hardware that the paper measured on.
        measure: runs the measurement; raises NotHere if a requirement is missing.
    """

    name: str
    title: str
    what: str
    hardware: str
    measure: Callable[[Order], Result]


def times(ratio: float, low: float, high: float) -> str:
    """Return a speed-up with its interval as text."""
    return f"{ratio:.2f}x [{low:.2f}, {high:.2f}]"


DIFFERS = "outputs differ"
