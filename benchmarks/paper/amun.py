"""Hoang et al. 2018 (Amun), table 3 and figures 2 and 3."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks import ops
from benchmarks.cases import CASES
from benchmarks.paper.table import DIFFERS, Curve, NotHere, Order, Result, Table, times
from benchmarks.runners import run_text
from fastgen.cli.bench.measure import interleave, synchronize
from fastgen.ops.selection.kbest import kbest

_HARDWARE = "V100"
# For each number of beams the paper's seconds: product, bias, softmax and k best, each alone; the
# last three fused.
_PAPER = (
    (1, (5.39, 1.26, 1.69, 12.53), 2.07),
    (3, (14.18, 3.76, 4.75, 18.23), 3.43),
    (9, (38.35, 11.64, 14.4, 36.7), 17.5),
)


def table3(order: Order) -> Result:
    """Measure the output layer of a decode step: each part alone, and the last three fused."""
    sentences, states, words = order.of((128, 512, 30_000), (32, 512, 30_000), (2, 16, 300))
    device, dtype, rounds = order.session.device, order.session.dtype, order.session.rounds or 3
    rig = ops.Rig(device, dtype)
    weight, bias = rig.randn(words, states) * 0.1, rig.randn(words)
    rows: list[tuple[str, ...]] = []
    raw: dict[str, Any] = {}
    for beams, paper, fused in _PAPER:
        hidden = rig.randn(sentences * beams, states)
        logits, running = F.linear(hidden, weight), torch.zeros(sentences, beams, device=device)
        scratch = torch.empty_like(logits).view(sentences, beams, words)
        log_probs = torch.log_softmax((logits + bias).float(), -1)

        def best(beams: int = beams, log_probs: Any = log_probs, running: Any = running) -> Any:
            scores = log_probs.view(sentences, beams, words) + running[:, :, None]
            return torch.topk(scores.view(sentences, beams * words), beams)

        def together(
            beams: int = beams, logits: Any = logits, running: Any = running, scratch: Any = scratch
        ) -> Any:
            room = {} if device.startswith("cuda") else {"scratch": scratch}
            return kbest(logits.view(sentences, beams, words), running, beams, bias=bias, **room)[
                :2
            ]

        parts: dict[str, Callable[[], Any]] = {
            "product": lambda hidden=hidden: F.linear(hidden, weight),
            "bias": lambda logits=logits: logits + bias,
            "softmax": lambda logits=logits: torch.log_softmax(logits.float(), -1),
            "k best": best,
            "fused": together,
        }
        verdict = ops.same("kbest", torch.float32)(best(), together())
        if not verdict.equal:
            return Result((), [], f"{beams} beams: {verdict.note}", equal=False)
        spent = raw[str(beams)] = _medians(parts, device, rounds)
        label = f"{beams} beam{'s' if beams > 1 else ''}"
        for part, seconds in zip(("product", "bias", "softmax", "k best"), paper, strict=True):
            rows.append((f"{label}: {part}", f"{seconds:g} s", f"{spent[part] * 1e3:.2f} ms"))
        changes = (
            fused / sum(paper[1:]) - 1,
            spent["fused"] / (spent["bias"] + spent["softmax"] + spent["k best"]) - 1,
        )
        shown = (
            f"{fused:g} s ({changes[0]:+.0%})",
            f"{spent['fused'] * 1e3:.2f} ms ({changes[1]:+.0%})",
        )
        rows.append((f"{label}: the last three, fused", *shown))
    shape = (
        f"{sentences} sentences, hidden size {states}, {words:,} words; "
        "the paper's times are of a whole run"
    )
    return Result(("", "paper", "here, one step"), rows, shape, raw=raw)


def _medians(parts: dict[str, Callable[[], Any]], device: str, rounds: int) -> dict[str, float]:
    """Return the median seconds of a call of each part; the parts take turns."""
    many = {name: ops.repeated([call], device, 0.05) for name, call in parts.items()}
    spent, _ = interleave(
        [call for call, _ in many.values()],
        rounds,
        lambda _: None,
        synchronize=lambda: synchronize(device),
    )
    return {
        name: sorted(turn[i] for turn in spent)[len(spent) // 2] / count
        for i, (name, (_, count)) in enumerate(many.items())
    }


def figure2(order: Order) -> Result:
    """Measure the time of each decode step of one batch while its sentences end."""
    count = order.of(1280, 128, 4)
    result = _translate(order, count, count)
    if not result["equal"]:
        return Result((), [], f"{count} sentences", equal=False)
    steps = {side: result["steps"][side][0] for side in ("fastgen", "stock")}
    longest = max(map(len, steps.values()))
    curve = Curve(
        list(range(1, longest + 1)),
        {
            "the toolkit": _padded([seconds * 1e3 for _, seconds in steps["stock"]], longest),
            "fastgen": _padded([seconds * 1e3 for _, seconds in steps["fastgen"]], longest),
        },
        "step",
        "ms",
    )
    rows: list[tuple[str, ...]] = []
    for share in (0.1, 0.5, 0.9):
        step = int(share * (len(steps["fastgen"]) - 1))
        present, seconds = steps["fastgen"][step]
        stock = steps["stock"][min(step, len(steps["stock"]) - 1)][1]
        rows.append(
            (
                f"step {step + 1}",
                f"{present} of {count}",
                f"{stock * 1e3:.1f} ms",
                f"{seconds * 1e3:.1f} ms",
            )
        )
    heads = ("", "sentences in fastgen's batch", "toolkit", "fastgen")
    shape = f"the example's model, {count} sentences in one batch, 1 beam"
    return Result(heads, rows, shape, curve=curve, raw={"steps": steps})


def _padded(values: list[float], length: int) -> list[float | None]:
    return [*values, *[None] * (length - len(values))]


def figure3(order: Order) -> Result:
    """Measure sentences per second against the batch size, over the same sentences."""
    count, sizes = order.of(
        (1280, (1, 4, 16, 64, 256, 1280)), (128, (1, 4, 16, 64, 128)), (4, (1, 4))
    )
    rows: list[tuple[str, ...]] = []
    raw: dict[str, Any] = {}
    speeds: dict[str, list[float | None]] = {"the toolkit": [], "fastgen": []}
    for size in sizes:
        found = raw[str(size)] = _translate(order, size, count)
        found.pop("steps", None)
        shown: tuple[str, ...] = ("", "", DIFFERS)
        pair: list[float | None] = [None, None]
        if found["equal"]:
            pair = [
                found["sentences"] / found[side]
                for side in ("baseline_seconds", "candidate_seconds")
            ]
            shown = (
                *(f"{speed:.1f}" for speed in pair),
                times(found["ratio"], found["low"], found["high"]),
            )
        for side, speed in zip(speeds, pair, strict=True):
            speeds[side].append(speed)
        rows.append((f"batch {size}", *shown))
    curve = Curve(list(sizes), speeds, "batch", "sentences per second")
    shape = (
        f"the example's model, {count} sentences, 1 beam; "
        "the paper gains over 20 times from batch 1 to the largest"
    )
    equal = all(one["equal"] for one in raw.values())
    return Result(
        ("", "toolkit, sentences/s", "fastgen, sentences/s", "here"), rows, shape, equal, curve, raw
    )


def _translate(order: Order, batch: int, count: int) -> dict[str, Any]:
    case = replace(CASES["trained"], batch=batch, beams=1)
    session = replace(order.session, sentences=count, rounds=order.session.rounds or 3)
    try:
        return run_text(case, session)
    except FileNotFoundError as error:
        raise NotHere(str(error)) from error


TABLES = (
    Table("amun_table3", "Amun, table 3", "time of the output layer, by part", _HARDWARE, table3),
    Table(
        "amun_figure2",
        "Amun, figure 2",
        "time of a decode step as sentences finish",
        _HARDWARE,
        figure2,
    ),
    Table("amun_figure3", "Amun, figure 3", "speed by batch size", _HARDWARE, figure3),
)
