"""How much faster each cell is, from the JSON that `fastgen bench` writes; and what `benchmarks/plot.py` draws with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from fastgen.cli.bench.measure import agrees

STOCK, FASTGEN, GOAL = "#9a9a9a", "#1f6fb2", "#b3261e"


class Bar(NamedTuple):
    """One comparison: its name, its result, what stands behind its ratio, and the ratio to reach."""

    name: str
    result: Mapping[str, Any]
    text: str = ""
    target: float | None = None


def panels(
    title: str, size: tuple[float, float], columns: int = 1, fontsize: int = 11
) -> tuple[Any, Any]:
    """Return a figure of matplotlib's and its axes, side by side."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["svg.hashsalt"] = "fastgen"
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title, fontsize=fontsize)
    found = figure.subplots(1, columns, squeeze=False)[0]
    for ax in found:
        ax.spines[["top", "right"]].set_visible(False)
    return figure, found


def draw_bars(
    ax: Any, bars: Iterable[Bar], fontsize: float | None = None, names: float | None = None
) -> None:
    """Draw how many times as fast each is, with its interval.

    Args:
        fontsize, names: sizes of what stands behind the bars, and of their names; None for matplotlib's own.
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
    """Return a matplotlib figure of the cells whose outputs agree; None where there is none."""
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
