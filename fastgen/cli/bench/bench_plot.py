"""Plot of the speed-ups in the JSON of `fastgen bench`, and helpers for `benchmarks/plot.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from fastgen.cli.bench.measure import agrees

STOCK, FASTGEN, GOAL = "#9a9a9a", "#1f6fb2", "#b3261e"


class Bar(NamedTuple):
    """One comparison in a bar chart.

    Attributes:
        name: label on the axis.
        result: an outcome as JSON-ready data: its `ratio`, `low` and `high` are drawn.
        text: what to print after the ratio.
        target: the ratio to reach, drawn as a mark; None for no mark.
    """

    name: str
    result: Mapping[str, Any]
    text: str = ""
    target: float | None = None


def panels(
    title: str, size: tuple[float, float], columns: int = 1, fontsize: int = 11
) -> tuple[Any, Any]:
    """Return a matplotlib figure and its axes, side by side.

    Args:
        title: title of the whole figure.
        size: width and height in inches.
        columns: number of axes.
        fontsize: of the title, in points.
    """
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["svg.hashsalt"] = "fastgen"
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title, fontsize=fontsize)
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def draw_bars(
    ax: Any, bars: Iterable[Bar], fontsize: float | None = None, names: float | None = None
) -> None:
    """Draw the speed-up of each comparison, with its interval.

    Args:
        ax: the axes to draw in.
        bars: the comparisons, from top to bottom.
        fontsize: of the text next to the bars, in points; None for matplotlib's default.
        names: font size of the labels on the axis, in points; None for matplotlib's default.
    """
    bars = list(bars)
    for y, (_, result, text, target) in enumerate(bars):
        ax.barh(y, result["ratio"], color=FASTGEN, height=0.6)
        ax.plot([result["low"], result["high"]], [y, y], color="black", linewidth=1.5)
        end = max(result["ratio"], result["high"])
        ax.text(end, y, f"  {result['ratio']:.2f}x{text}", va="center", fontsize=fontsize)
        if target:
            ax.plot([target] * 2, [y - 0.4, y + 0.4], color=GOAL, linewidth=2)
    ax.axvline(1, color=STOCK, linewidth=1)
    ax.set_yticks(range(len(bars)), [bar.name for bar in bars], fontsize=names)
    ax.invert_yaxis()


def draw(data: dict[str, Any]) -> Any:
    """Return a matplotlib figure of the cells whose outputs agree, or None if there are none."""
    cells = [cell for cell in data["cells"] if cell["outcome"] and agrees(cell["outcome"])]
    if not cells:
        return None
    place = data["environment"]
    hardware = place["gpu"] or f"{place['cpu']}, {place['threads']} threads"
    title = f"{data['model']}: speed-up over unpatched transformers, same output"
    size = 7, 1.4 + 0.4 * len(cells)
    figure, (ax,) = panels(f"{title}\n{hardware}, {data['arguments']['dtype']}", size, fontsize=10)
    draw_bars(ax, (Bar(_name(cell), cell["outcome"], _speeds(cell)) for cell in cells), fontsize=8)
    ax.set_xlim(right=1.5 * max(cell["outcome"]["high"] for cell in cells))
    ax.set_xlabel("times as fast; line: bootstrap 95% interval of the median")
    return figure


def _name(cell: dict[str, Any]) -> str:
    return f"{cell['beams']} beam{'s' if cell['beams'] > 1 else ''}, batch {cell['batch']}"


def _speeds(cell: dict[str, Any]) -> str:
    before, after = (
        cell["tokens"] / cell["outcome"][f"{side}_seconds"] for side in ("baseline", "candidate")
    )
    return f", {before:.0f} → {after:.0f} tokens/s"
