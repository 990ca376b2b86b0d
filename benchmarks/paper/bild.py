"""Kim et al. 2023 (BiLD), table 1 and figure 8."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.paper.table import NotHere, Order, Result, Table

_HARDWARE = "T4"
_DEGRADED = 1.0  # BLEU points
_SIGNIFICANT = 0.05
# For the four tasks IWSLT, WMT, XSUM and CNN/DailyMail.
_PAPER = {
    ("unaligned", "no loss"): "1.43x 1.34x 1.48x 1.71x",
    ("unaligned", "1 point"): "1.58x 1.43x 1.72x 2.05x",
    ("aligned", "no loss"): "1.62x 1.47x 1.50x 1.85x",
    ("aligned", "1 point"): "1.78x 1.70x 1.80x 2.12x",
}

_FIGURE_8 = "the paper (CNN/DailyMail) has slightly over 1, about 1/5, about 5, 1.85x"


def table1(order: Order) -> Result:
    """Return the fastest point of each kind that `benchmarks.bild` measured at batch 1."""
    cells, arguments = _cells(order)
    plain = cells["batch 1, large alone"]
    rows: list[tuple[str, ...]] = [
        ("the large model alone", "-", f"{plain['bleu']:.2f}", "1.00x", "")
    ]
    for (which, loss), paper in _PAPER.items():
        candidates = [
            cell
            for cell in cells.values()
            if cell["batch"] == 1 and cell["small"] == which and cell["ratio"]
        ]
        lossy = [
            cell for cell in candidates if cell["point"] and cell["point"]["rollback"] is not None
        ]
        accepted = [cell for cell in lossy if plain["bleu"] - cell["bleu"] <= _DEGRADED]
        if loss == "no loss":
            accepted = [
                cell
                for cell in lossy
                if cell["bleu"] >= plain["bleu"] or cell["p_value"] >= _SIGNIFICANT
            ]
        best = max(accepted, key=lambda cell: cell["ratio"], default=None)
        shown: tuple[str, ...] = ("", "none", "")
        if best is not None:
            point = best["point"]
            shown = (
                f"{best['bleu']:.2f}",
                f"{best['ratio']:.2f}x [{best['low']:.2f}, {best['high']:.2f}]",
                f"fallback {point['fallback']}, rollback {point['rollback']}",
            )
        rows.append((f"BiLD, {which}, {loss}", paper, *shown))
    heads = ("", "paper (IWSLT, WMT, XSUM, CNN/DM)", "BLEU here", "here", "at")
    pair = f"{arguments['large']} with {arguments['small']}"
    shape = (
        f"{pair}, {arguments['sentences']} sentences, batch 1; "
        "the large model alone is accelerated too"
    )
    return Result(
        heads, rows, shape, raw={"cells": {k: v for k, v in cells.items() if v["batch"] == 1}}
    )


def figure8(order: Order) -> Result:
    """Return the compute and memory traffic of each run, relative to the large model alone.

    They follow by arithmetic from the number of passes of the run.
    """
    cells, arguments = _cells(order)
    if order.pair is None:
        raise NotHere("--pair names the folders of the models that benchmarks.bild has measured")
    large, small = map(_Model.of, order.pair)
    rows = [("the large model alone", "1", "1", "1", "1.00x")]
    tokens = next(
        cell["counts"]["tokens"] for cell in cells.values() if cell["batch"] == 1 and cell["counts"]
    )
    flops, read = 2 * large.weights * tokens, large.weights * tokens
    for name, cell in cells.items():
        if (
            cell["batch"] != 1
            or not cell["counts"]
            or cell["ratio"] is None
            or cell["small"] != "aligned"
        ):
            continue
        counts = cell["counts"]
        passed = counts["drafted"] + counts["large_calls"]  # tokens in the large model's passes
        computed = 2 * (large.weights * passed + small.weights * counts["small_calls"])
        moved = large.weights * counts["large_calls"] + small.weights * counts["small_calls"]
        intensity = (computed / moved) / (flops / read)
        label = name.removeprefix("batch 1, ")
        rows.append(
            (
                label,
                f"{computed / flops:.2f}",
                f"{moved / read:.2f}",
                f"{intensity:.2f}",
                f"{cell['ratio']:.2f}x",
            )
        )
    heads = ("", "FLOPs", "memory operations", "arithmetic intensity", "speed-up")
    pair = f"{arguments['large']} with {arguments['small']}"
    shape = f"{pair}, relative to the large model alone, from the decoders' weights; {_FIGURE_8}"
    return Result(heads, rows, shape)


class _Model:
    """Size of a decoder.

    Args:
        weights: number of weights that the decoder reads per token: linear layers and output
            projection.
    """

    def __init__(self, weights: int) -> None:
        self.weights = weights

    @classmethod
    def of(cls, folder: Path) -> _Model:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(folder)
        width, wide = config.d_model, config.decoder_ffn_dim
        # Per layer and token, self-attention has four matrix products. Cross-attention has two,
        # since its keys and values are computed once per source.
        return cls(
            config.decoder_layers * (6 * width**2 + 2 * width * wide) + width * config.vocab_size
        )


def _cells(order: Order) -> tuple[dict[str, Any], dict[str, Any]]:
    if not order.bild.is_file():
        raise NotHere(f"needs {order.bild.name} of `python -m benchmarks.bild`, a trained pair's")
    data = json.loads(order.bild.read_text("utf-8"))
    return data["result"]["cells"], data["arguments"]


TABLES = (
    Table(
        "bild_table1",
        "BiLD, table 1",
        "speed without loss of quality, and with a loss of one point",
        _HARDWARE,
        table1,
    ),
    Table("bild_figure8", "BiLD, figure 8", "operations and memory traffic", _HARDWARE, figure8),
)
