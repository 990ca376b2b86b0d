"""How much faster each cell is, from the JSON that `fastgen bench` writes."""

from __future__ import annotations

from typing import Any

from fastgen.cli.bench.measure import agrees

_STOCK, _FASTGEN = "#9a9a9a", "#1f6fb2"


def draw(data: dict[str, Any]) -> Any:
    """Return a matplotlib figure of the cells whose outputs agree; None where there is none."""
    from matplotlib.figure import Figure

    cells = [cell for cell in data["cells"] if cell["outcome"] and agrees(cell["outcome"])]
    if not cells:
        return None
    figure = Figure(figsize=(7, 1.4 + 0.4 * len(cells)), layout="constrained")
    place = data["environment"]
    hardware = place["gpu"] or f"{place['cpu']}, {place['threads']} threads"
    title = f"{data['model']}: speed-up over unpatched transformers, same output"
    figure.suptitle(f"{title}\n{hardware}, {data['arguments']['dtype']}", fontsize=10)
    ax = figure.subplots()
    ax.spines[["top", "right"]].set_visible(False)
    for y, cell in enumerate(cells):
        outcome = cell["outcome"]
        before, after = (cell["tokens"] / outcome[f"{side}_seconds"] for side in ("baseline", "candidate"))
        ax.barh(y, outcome["ratio"], color=_FASTGEN, height=0.6)
        ax.plot([outcome["low"], outcome["high"]], [y, y], color="black", linewidth=1.5)
        text = f"  {outcome['ratio']:.2f}x, {before:.0f} → {after:.0f} tokens/s"
        ax.text(max(outcome["ratio"], outcome["high"]), y, text, va="center", fontsize=8)
    ax.axvline(1, color=_STOCK, linewidth=1)
    ax.set_xlim(right=1.5 * max(cell["outcome"]["high"] for cell in cells))
    ax.set_yticks(range(len(cells)), [_name(cell) for cell in cells])
    ax.invert_yaxis()
    ax.set_xlabel("times as fast; line: bootstrap 95% interval of the median")
    return figure


def _name(cell: dict[str, Any]) -> str:
    return f"{cell['beams']} beam{'s' if cell['beams'] > 1 else ''}, batch {cell['batch']}"
