"""Plot of quality against speed, from the JSON that `fastgen bild tune` writes."""

from __future__ import annotations

from typing import Any

_LARGE, _POINT, _LOSSLESS, _CHOSEN = "#9a9a9a", "#1f6fb2", "#d98a29", "#b3261e"


def draw(data: dict[str, Any]) -> Any:
    """Return a matplotlib figure of the measurements of `tune`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    ax = figure.subplots()
    ax.spines[["top", "right"]].set_visible(False)
    quality = data["large"]["quality"]
    ax.axhline(quality, color=_LARGE, linewidth=1)
    if data["max_loss"]:
        ax.axhline(quality - data["max_loss"], color=_LARGE, linewidth=1, linestyle="--")
    ax.plot(1, quality, "x", color="black", label="the large model alone")
    for lossless, colour, label in (
        (False, _POINT, "big-little decoding"),
        (True, _LOSSLESS, "lossless"),
    ):
        points = [point for point in data["points"] if (point["rollback"] is None) == lossless]
        speeds = [point["ratio"] for point in points]
        spread = [[p["ratio"] - p["low"] for p in points], [p["high"] - p["ratio"] for p in points]]
        ax.errorbar(speeds, [p["quality"] for p in points], xerr=spread, fmt="o", markersize=4,
                    linewidth=0.8, color=colour, label=label)  # fmt: skip
        for point in points:
            rollback = "" if lossless else f" / {point['rollback']:g}"
            ax.annotate(f"{point['fallback']:g}{rollback}", (point["ratio"], point["quality"]),
                        fontsize=6, xytext=(3, 3), textcoords="offset points")  # fmt: skip
    if (chosen := data["chosen"]) is not None:
        ax.plot(
            chosen["ratio"],
            chosen["quality"],
            "o",
            markersize=11,
            fillstyle="none",
            color=_CHOSEN,
            label="chosen",
        )
    ax.set_xlabel("times as fast as the large model alone (labels: fallback / rollback)")
    ax.set_ylabel(data["metric"])
    ax.legend(frameon=False, fontsize=8)
    return figure
