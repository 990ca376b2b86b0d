"""Draw one plot per table into docs/plots, from the JSON in benchmarks/results alone.

python -m benchmarks.plot
python -m benchmarks.plot --results benchmarks/results/cpu --out /tmp/plots
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, ROOT, parser_of
from fastgen.cli.bench.bench_plot import FASTGEN, GOAL, STOCK, Bar, draw_bars, panels
from fastgen.cli.bench.measure import agrees

PEER = "#d98a29"
RATIOS = "times as fast; red: target; line: bootstrap 95% interval of the median"
Data = dict[str, dict[str, Any]]


def main(argv: Sequence[str] | None = None) -> int:
    """Draw everything that the results folders hold; return the exit status."""
    parser = parser_of("benchmarks.plot", __doc__)
    parser.add_argument(
        "--results", type=Path, nargs="+", metavar="DIR", help="default: all of benchmarks/results"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "docs" / "plots",
        metavar="DIR",
        help="default: docs/plots",
    )
    args = parser.parse_args(argv)
    folders = args.results or sorted(path for path in RESULTS.glob("*") if path.is_dir())
    drawn = False
    for folder in folders:
        for name, figure in _figures(folder):
            args.out.mkdir(parents=True, exist_ok=True)
            file = args.out / f"{folder.name}-{name}.svg"
            # Without a date, the same data give the same file.
            figure.savefig(file, bbox_inches="tight", metadata={"Date": None})
            print(file)
            drawn = True
    if not drawn:
        print(
            f"nothing to draw in {', '.join(map(str, folders)) or 'benchmarks/results'}",
            file=sys.stderr,
        )
    return 0 if drawn else 1


def _figures(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield the figures of a folder of results, each with its name."""
    data = {
        path.stem: json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))
    }
    figures = [(name, draw(data)) for name, draw in PLOTS.items()]
    figures += [
        (path.stem, paper(json.loads(path.read_text("utf-8"))))
        for path in sorted(folder.glob("paper/*.json"))
    ]
    yield from ((name, figure) for name, figure in figures if figure is not None)


def _where(data: Data, toolkit: str = "transformers") -> str:
    place = next(iter(data.values()))["environment"]
    hardware = place["gpu"] or place["cpu"]
    return f"{hardware}, {place['threads']} threads, {toolkit} {place.get(toolkit) or ''}"


def paper(data: dict[str, Any]) -> Any:
    """Draw a figure of a paper: lines if the horizontal axis has numbers, else bars."""
    curve = data["result"]["curve"]
    if curve is None:
        return None
    x, colours = curve["x"], (STOCK, FASTGEN, PEER)
    figure, (ax,) = panels(f"{data['title']}: {data['what']}\n{_where({'': data})}", (7, 3.6))
    numbers = all(isinstance(value, int) for value in x)
    width = 0.8 / len(curve["series"])
    for i, (name, values) in enumerate(curve["series"].items()):
        colour = colours[i % len(colours)]
        if numbers:
            heights = [math.nan if v is None else v for v in values]
            ax.plot(x, heights, color=colour, label=name, marker="." if len(x) < 20 else None)
        else:
            ax.bar(
                [at + i * width for at in range(len(x))],
                [v or 0 for v in values],
                width,
                color=colour,
                label=name,
            )
    if numbers and x[-1] >= 8 * x[0] and len(x) < 20:
        ax.set_xscale("log")
        ax.set_xticks(x, [str(value) for value in x], minor=False)
    if not numbers:
        ax.set_xticks([at + (len(curve["series"]) - 1) * width / 2 for at in range(len(x))], x)
    ax.set_xlabel(curve["x_label"])
    ax.set_ylabel(curve["y_label"])
    ax.legend(frameon=False, fontsize=8)
    return figure


def speed(data: Data) -> Any:
    """Draw the speed-up over transformers of each case, with its interval and target."""
    return _speed(data, ("generate", "text"), "transformers")


def fairseq_speed(data: Data) -> Any:
    """Draw the speed-up over fairseq; both sides have the fixed n-gram blocking."""
    return _speed(data, ("fairseq", "command"), "fairseq")


def _speed(data: Data, kinds: tuple[str, ...], toolkit: str) -> Any:
    """Draw bars for some kinds of cases, without those whose outputs differed."""
    rows = {name: d for name, d in data.items() if d["kind"] in kinds and agrees(d["result"])}
    if not rows:
        return None
    same = (
        "same output"
        if all(d["result"]["equal"] for d in rows.values())
        else "output equal or within rounding"
    )
    title = f"Speed-up over unpatched {toolkit}, {same}\n{_where(rows, toolkit)}"
    figure, (ax,) = panels(title, (7, 1.2 + len(rows) / 2))
    draw_bars(ax, (Bar(name, d["result"], target=d["target"]) for name, d in rows.items()))
    ax.set_xlabel(RATIOS)
    return figure


def peer(data: Data) -> Any:
    """Draw the seconds of the toolkit, fastgen and the peer side by side."""
    rows = {name: d for name, d in data.items() if d["kind"] == "peer" and agrees(d["result"])}
    if not rows:
        return None
    colours = {"stock": STOCK, "fastgen": FASTGEN}
    title = f"Seconds, fp32, same weights\n{_where(rows)}"
    figure, axes = panels(title, (max(6, 2.6 * len(rows) + 1), 3.2), len(rows))
    for ax, d in zip(axes, rows.values(), strict=True):
        systems = d["result"]["systems"]
        bars = ax.bar(
            list(systems),
            list(systems.values()),
            color=[colours.get(name, PEER) for name in systems],
        )
        ax.bar_label(bars, fmt="%.3g")
        ax.set_title(d["case"], fontsize=10)
    axes[0].set_ylabel("seconds (median)")
    return figure


def grid(data: Data) -> Any:
    """Draw the speed-up of every cell, one panel per model.

    Rows are batch and beams, columns the source length.
    """
    rows = {name: d for name, d in data.items() if d.get("case") == "never_worse"}
    if not rows:
        return None
    cells = [cell for d in rows.values() for cell in d["result"]["cells"].values()]
    models = list(dict.fromkeys(cell["model"] for cell in cells))
    if not models:
        return None
    figure, axes = panels(
        f"Speed-up of every cell\n{_where(rows)}", (3.4 * len(models) + 1, 4.2), len(models)
    )
    for ax, model in zip(axes, models, strict=True):
        mine = {(c["batch"], c["beams"], c["source"]): c for c in cells if c["model"] == model}
        lines = sorted({key[:2] for key in mine})
        sources = sorted({key[2] for key in mine})
        values = [[_ratio(mine.get((*line, source))) for source in sources] for line in lines]
        image = ax.imshow(values, cmap="RdYlGn", vmin=0.5, vmax=1.5, aspect="auto")
        for y, line in enumerate(values):
            for x, value in enumerate(line):
                cell = mine.get((*lines[y], sources[x]))
                text = "" if cell is None else "differs" if not cell["equal"] else f"{value:.2f}"
                # A cell without a figure has no colour, so its background is white.
                colour = _readable_on(image.to_rgba(value)) if text and cell["equal"] else "black"
                ax.text(x, y, text, ha="center", va="center", fontsize=8, color=colour)
        ax.set_xticks(range(len(sources)), sources)
        ax.set_yticks(range(len(lines)), [f"{b} x {m}" for b, m in lines])
        ax.set_xlabel("source length")
        ax.set_title(model, fontsize=10)
    axes[0].set_ylabel("batch x beams")
    return figure


def _readable_on(colour: tuple[float, ...]) -> str:
    """Return black or white, whichever has the higher contrast on a colour in sRGB.

    Args:
        colour: red, green and blue from 0 to 1; further components are ignored.

    Source: relative luminance and contrast ratio of WCAG 2.2.
    """
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour[:3]
    ]
    luminance = sum(
        weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True)
    )
    return "black" if (luminance + 0.05) ** 2 > 1.05 * 0.05 else "white"


def _ratio(cell: dict[str, Any] | None) -> float:
    return cell["ratio"] if cell and cell["equal"] else float("nan")


def memory(data: Data) -> Any:
    """Draw the bytes of the KV cache: the toolkit's, fastgen's, and the formula's."""
    rows = {name: d for name, d in data.items() if d["kind"] == "memory"}
    if not rows:
        return None
    models = {name: model for d in rows.values() for name, model in d["result"]["models"].items()}
    figure, (ax,) = panels("Key-value cache at the last step", (7, 3.2))
    bars = (
        ("transformers", STOCK, lambda m: m["stock"]["measured"]),
        ("fastgen", FASTGEN, lambda m: m["fastgen"]["measured"]),
        ("B*S + B*M*T entries", "none", lambda m: m["expected"]["fastgen"]),
    )
    for i, (label, colour, value) in enumerate(bars):
        at = [x + (i - 1) * 0.27 for x in range(len(models))]
        heights = [value(m) / 2**20 for m in models.values()]
        edge = "black" if colour == "none" else colour
        container = ax.bar(at, heights, width=0.27, color=colour, edgecolor=edge, label=label)
        ax.bar_label(container, fmt="%.3g", fontsize=8)
    ax.set_xticks(range(len(models)), models)
    ax.set_ylabel("MiB")
    ax.legend(frameon=False, fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))
    return figure


def trained_steps(data: Data) -> Any:
    """Draw the time of a decode step on real text.

    The left panel shows it against the number of sentences in the batch, the right one over the
    steps of one batch.
    """
    rows = {
        name: d for name, d in data.items() if any(d["result"].get("steps", {}).get("fastgen", ()))
    }
    if not rows:
        return None
    steps = next(iter(rows.values()))["result"]["steps"]
    figure, (left, right) = panels(
        f"Time of a decode step on real text, 4 beams\n{_where(rows)}", (9, 3.6), 2
    )
    times = defaultdict(list)
    for batch in steps["fastgen"]:
        for active, seconds in batch[1:]:  # the first step is the prefill
            times[active].append(1000 * seconds)
    active = sorted(times)
    left.plot(
        active,
        [statistics.median(times[n]) for n in active],
        "o-",
        color=FASTGEN,
        markersize=3,
        label="fastgen",
    )
    full = [1000 * s for batch in steps["stock"] for _, s in batch[1:]]
    left.axhline(
        statistics.median(full), color=STOCK, label="transformers (never drops a sentence)"
    )
    left.set_xlabel("rows still in the batch (4 beams each)")
    left.set_ylabel("milliseconds per step (median)")
    middle = len(steps["fastgen"]) // 2
    for name, colour in (("stock", STOCK), ("fastgen", FASTGEN)):
        line = [1000 * seconds for _, seconds in steps[name][middle][1:]]
        right.plot(
            range(1, len(line) + 1),
            line,
            color=colour,
            label="transformers" if name == "stock" else name,
        )
    right.set_xlabel(f"step of batch {middle}")
    right.set_ylabel("milliseconds")
    for ax in (left, right):
        ax.set_ylim(bottom=0)
        ax.legend(frameon=False, fontsize=8)
    return figure


def step_time(data: Data) -> Any:
    """Draw the time of a decode step against each size it depends on, beside its floor.

    The floor is the least time that the machine needs for a step.
    """
    rows = {name: d for name, d in data.items() if d["kind"] == "step_time"}
    if not rows:
        return None
    result = next(iter(rows.values()))["result"]
    cells = [cell for cell in result["cells"].values() if agrees(cell)]
    names = {
        "new_tokens": "generated tokens",
        "batch": "sentences",
        "beams": "beams",
        "source": "source tokens",
    }
    sizes = ", ".join(
        f"{result['sizes'][key]} {text}" for key, text in names.items() if key != "new_tokens"
    )
    figure, axes = panels(
        f"Time of a decode step; else {sizes}\n{_where(rows)}", (13, 3.4), len(names)
    )
    sides = (
        ("stock", STOCK, "transformers"),
        ("fastgen", FASTGEN, "fastgen"),
        ("floor", GOAL, "floor"),
    )
    for ax, (axis, text) in zip(axes, names.items(), strict=True):
        mine = sorted(
            (cell for cell in cells if cell["axis"] == axis), key=lambda cell: cell["value"]
        )
        for side, colour, label in sides:
            steps = [cell["floor"] if side == "floor" else cell["steps"][side] for cell in mine]
            if axis == "new_tokens":
                values = [1000 * seconds for seconds in steps[-1]] if steps else []
                places = list(range(1, len(values) + 1))
            else:
                places, values = (
                    [cell["value"] for cell in mine],
                    [1000 * statistics.median(times) for times in steps],
                )
            style = (
                {"linestyle": "--"}
                if side == "floor"
                else {}
                if axis == "new_tokens"
                else {"marker": "o"}
            )
            ax.plot(places, values, color=colour, label=label, markersize=3, linewidth=1.2, **style)
        ax.set_xlabel(text)
        ax.set_ylim(bottom=0)
    axes[0].set_ylabel("milliseconds (median)")
    axes[0].legend(frameon=False, fontsize=8)
    return figure


def ops(data: Data) -> Any:
    """Draw the speed-up of each operation at each shape over the code that runs without it.

    On a GPU the labels also hold its share of a copy's bandwidth.
    """
    tables = {name: d for name, d in data.items() if d["kind"] == "ops"}
    rows: list[Bar] = []
    for d in tables.values():
        precision = f" {d['arguments']['dtype']}" if len(tables) > 1 else ""
        for row, result in d["result"].items():
            if result["equal"]:
                share = f" ({result['share_of_copy']:.0%} of a copy)" if result["bytes"] else ""
                rows.append(Bar(f"{row}{precision}", result, share, result["target"]))
    if not rows:
        return None
    title = f"Operations: speed-up over what runs without them\n{_where(tables)}"
    figure, (ax,) = panels(title, (9, 1.2 + len(rows) / 3))
    draw_bars(ax, rows, fontsize=7, names=7)
    ax.set_xscale("log")
    ax.set_xlabel(RATIOS)
    return figure


def bild(data: Data) -> Any:
    """Draw quality against speed of big-little decoding, one panel per batch size."""
    rows = {name: d for name, d in data.items() if d["kind"] == "bild"}
    if not rows:
        return None
    cells = {
        name: c
        for d in rows.values()
        for name, c in d["result"]["cells"].items()
        if c["ratio"] is not None
    }
    sizes = sorted({cell["batch"] for cell in cells.values()})
    title = f"Big-little decoding over the large model alone, both by fastgen\n{_where(rows)}"
    figure, axes = panels(title, (4.4 * len(sizes), 3.8), len(sizes))
    for ax, size in zip(axes, sizes, strict=True):
        mine = {name: cell for name, cell in cells.items() if cell["batch"] == size}
        for small, colour in (("unaligned", STOCK), ("aligned", FASTGEN)):
            for lossless, marker in ((False, "o"), (True, "s")):
                points = [
                    (cell["ratio"], cell["bleu"])
                    for cell in mine.values()
                    if cell["small"] == small
                    and cell["point"]
                    and (cell["point"]["rollback"] is None) == lossless
                ]
                label = f"{small}, lossless" if lossless else small
                ax.plot(
                    *zip(*points, strict=True) if points else ((), ()),
                    marker,
                    color=colour,
                    markersize=4,
                    fillstyle="none" if lossless else "full",
                    label=label,
                )
        for name, cell in mine.items():
            if not cell["point"]:
                label = name.partition(", ")[2]
                ax.plot(
                    cell["ratio"],
                    cell["bleu"],
                    "x",
                    color=PEER if cell["small"] else "black",
                    markersize=5,
                )
                ax.annotate(
                    label,
                    (cell["ratio"], cell["bleu"]),
                    fontsize=6,
                    xytext=(3, 3),
                    textcoords="offset points",
                )
                if label == "large alone":
                    ax.axhline(cell["bleu"], color=STOCK, linewidth=0.8)
        ax.axvline(1, color=STOCK, linewidth=0.8)
        ax.set_title(f"batch {size}", fontsize=10)
        ax.set_xlabel("times as fast")
    axes[0].set_ylabel("BLEU")
    axes[0].legend(frameon=False, fontsize=7)
    return figure


PLOTS: dict[str, Callable[[Data], Any]] = {
    "speed": speed,
    "fairseq-speed": fairseq_speed,
    "peer": peer,
    "never-worse": grid,
    "kv-memory": memory,
    "trained-steps": trained_steps,
    "step-time": step_time,
    "ops": ops,
    "bild": bild,
}


if __name__ == "__main__":
    sys.exit(main())
