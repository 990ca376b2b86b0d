"""Wang et al. 2021 (LightSeq), figures 4 to 6."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import fastgen
from benchmarks.cases import SHAPES, Case
from benchmarks.paper.table import DIFFERS, Curve, Order, Result, Table, times
from benchmarks.session import profiled
from fastgen.cli.bench import measure
from fastgen.cli.bench.agreement import Agreement
from fastgen.cli.bench.measure import Verdict, both

_HARDWARE = "T4 16 GB"
_BASE = SHAPES["marian_base"]  # 6 + 6 layers of 512, vocabulary of 58,101 (paper: 50,000)

# Kinds of operators (CPU) or kernels (CUDA), recognised by parts of their names.
_PRODUCTS = (
    "mm",
    "linear",
    "gemm",
    "scaled_dot_product",
    "nvjet",
    "cutlass",
    "xmma",
    "flash",
    "attention",
)
_CACHE = ("index_select", "cat", "index_copy", "gather", "write_slots", "index_put")


def figure4(order: Order) -> Result:
    """Measure the share of time by kind of operator, or of kernel on CUDA, with the profiler."""
    case = _case(order, order.of(8, 8, 2), order.of(64, 32, 8))
    model = _model(order)
    inputs, options = case.inputs(model), case.generate_options
    stock, patched = both(lambda: model.generate(**inputs, **options))
    if not Agreement(model, inputs, options)(stock(), patched()).equal:
        return Result((), [], "", equal=False)
    shares = {
        "toolkit": _shares(stock, order.session.device),
        "fastgen": _shares(patched, order.session.device),
    }
    papers = {"matrix products": ("25%", "82%, 87%"), "cache": ("", "10%, 6%"), "others": ("", "")}
    rows = [
        (kind, *papers[kind], *(f"{share[kind]:.0%}" for share in shares.values()))
        for kind in papers
    ]
    series: dict[str, list[float | None]] = {
        kind: [share[kind] for share in shares.values()] for kind in papers
    }
    heads = (
        "",
        "paper, TensorFlow",
        "paper, LightSeq (fp32, fp16)",
        "toolkit here",
        "fastgen here",
    )
    curve = Curve(list(shares), series, "", "share of the time")
    return Result(heads, rows, _shape(case, model), curve=curve, raw=shares)


def _shares(call: Callable[[], Any], device: str) -> dict[str, float]:
    cuda = device.startswith("cuda")
    spent = {"matrix products": 0.0, "cache": 0.0, "others": 0.0}
    for event in profiled(call, device).key_averages():
        name = event.key.lower()
        kind = "matrix products" if any(part in name for part in _PRODUCTS) else "others"
        if kind == "others" and any(part in name for part in _CACHE):
            kind = "cache"
        spent[kind] += event.self_device_time_total if cuda else event.self_cpu_time_total
    return {kind: time / sum(spent.values()) for kind, time in spent.items()}


def figure5(order: Order) -> Result:
    """Measure beam search with a Transformer-base over batch and length."""
    return _grid(order, {}, beams=4)


def figure6(order: Order) -> Result:
    """Measure top-k and top-p sampling from the same random numbers over batch and length."""
    return _grid(
        order, {"top-k 32": {"top_k": 32}, "top-p 0.75": {"top_k": 0, "top_p": 0.75}}, beams=1
    )


def _grid(order: Order, draws: dict[str, dict[str, Any]], beams: int) -> Result:
    batches, lengths = (
        order.of((1, 8, 32, 64), (1, 8, 32), (2,)),
        order.of((16, 32, 64, 128), (16, 64), (6,)),
    )
    points = list(itertools.product(batches, lengths))
    model = _model(order)
    rows: list[tuple[str, ...]] = []
    raw: dict[str, Any] = {}
    series: dict[str, list[float | None]] = {}
    for label, (batch, length) in itertools.product(draws or ("beam search",), points):
        options = draws.get(label)
        case = replace(_case(order, batch, length), beams=beams)
        if options:
            case = replace(case, options=options | {"do_sample": True})
        outcome = _compare(case, model, order)
        raw[f"{label}/{batch}/{length}"] = outcome.to_dict()
        series.setdefault(label, []).append(outcome.ratio if outcome.equal else None)
        here = times(outcome.ratio, outcome.low, outcome.high) if outcome.equal else DIFFERS
        rows.append((f"{label}, ({batch}, {length})", here))
    curve = Curve(
        [f"({batch}, {length})" for batch, length in points],
        series,
        "(batch, length)",
        "times as fast as the toolkit",
    )
    equal = all(one["equal"] for one in raw.values())
    return Result(
        ("(batch, length)", "here"),
        rows,
        _shape(replace(_case(order, 1, 1), beams=beams), model),
        equal,
        curve,
        raw,
    )


def _compare(case: Case, model: Any, order: Order) -> measure.Outcome:
    inputs, options = (
        case.inputs(model),
        case.generate_options | {"do_sample": "do_sample" in case.options},
    )

    def call() -> Any:
        torch.manual_seed(0)
        return model.generate(**inputs, **options)

    def drawn(stock: Any, ours: Any) -> Verdict:
        return Verdict(torch.equal(stock, ours), note="other tokens")

    same = drawn if options["do_sample"] else Agreement(model, inputs, options)
    fastgen.release()
    session = order.session
    return measure.compare(*both(call), session.rounds or 3, same, synchronize=session.synchronize)


def _model(order: Order) -> Any:
    shape = order.of(_BASE, _BASE, _BASE.tiny_version())
    return shape.build(order.session.dtype, order.session.device)


def _case(order: Order, batch: int, length: int) -> Case:
    """Return a case that generates as many tokens as the source has."""
    return Case("", "", "", batch=batch, source=length, beams=4, new_tokens=length)


def _shape(case: Case, model: Any) -> str:
    config = model.config
    sizes = f"{config.encoder_layers} + {config.decoder_layers} layers of {config.d_model}"
    return (
        f"{sizes}, {config.vocab_size:,} words, random weights, "
        f"{case.beams} beam{'s' if case.beams > 1 else ''}"
    )


_SAYS = "the paper reports up to 14 times TensorFlow and 1.4 times FasterTransformer"

TABLES = (
    Table(
        "lightseq_figure4",
        "LightSeq, figure 4",
        "share of time by kind of operation",
        _HARDWARE,
        figure4,
    ),
    Table(
        "lightseq_figure5",
        "LightSeq, figure 5",
        f"speed of beam search by batch size and length; {_SAYS}",
        "P4, T4",
        figure5,
    ),
    Table(
        "lightseq_figure6",
        "LightSeq, figure 6",
        "speed of sampling by batch size and length",
        _HARDWARE,
        figure6,
    ),
)
