"""Measure a decode step against text length, sentences, beams and source length, and its floor.

The floor is the time that the machine cannot avoid. It is the longer of two times: computing the
matrix products of the decoder's linear layers at the rate of a large matrix product, or reading
their weights at the speed of a copy. The time to read the keys and values that the step attends to,
each once, is added.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import torch

from benchmarks.cases import Case
from benchmarks.harness import outcome_text
from benchmarks.ops import copy_bandwidth
from benchmarks.runners import pair, stock_steps
from benchmarks.session import Session
from fastgen.cli.bench.measure import agrees
from fastgen.ops import linear
from fastgen.patches.transformers.generate.report import last_call

PASSES = 2


def run_step_time(case: Case, session: Session) -> dict[str, Any]:
    """Measure the decode steps of both sides, and their floor.

    The result has one cell for each value that the case's grid changes.
    """
    assert case.shape is not None
    model: Any = case.shape.build(session.dtype, session.device)
    bandwidth, rate = copy_bandwidth(session.device), product_rate(session)
    cells: dict[str, Any] = {}
    sizes = {name: getattr(case, name) for name in ("batch", "beams", "source", "new_tokens")}
    result = {"cells": cells, "copy_bytes_per_s": bandwidth, "flop_per_s": rate, "sizes": sizes}
    for name, values in case.grid.items():
        for value in values:
            cell = replace(case, **{name: value})
            # Compares the outputs: if they differ, there are no times.
            found = pair(cell, model, session, precision=1.0, budget=0.0)
            if agrees(found):
                found["steps"] = _steps(cell, model, session)
                found["floor"] = [
                    floor(model, cell, t, bandwidth, rate) for t in range(1, cell.new_tokens - 1)
                ]
                found["over_floor"] = {
                    side: _over(steps, found["floor"]) for side, steps in found["steps"].items()
                }
            key = f"{name}{value}"
            cells[key] = found | {"axis": name, "value": value}
            session.say(f"{key:<16}{outcome_text(found)}{over_floor_text(cell, found)}")
            session.save(result)
    return result


def _steps(case: Case, model: Any, session: Session) -> dict[str, list[float]]:
    """Return the seconds of every decode step but the last: the median over some passes.

    The toolkit does not expose the end of the last step.
    """
    inputs, options = case.inputs(model), case.generate_options
    ours, stock = [], []
    for _ in range(PASSES):
        model.generate(**inputs, **options)
        session.synchronize()
        report = last_call()
        assert report is not None
        ours.append([seconds for _, seconds in report.steps[:-1]])
        stock.append(
            [seconds for _, seconds in stock_steps(model, [inputs], options, session)[0][1:]]
        )
    return {
        name: [statistics.median(step) for step in zip(*passes, strict=True)]
        for name, passes in (("fastgen", ours), ("stock", stock))
    }


def _over(steps: list[float], floors: list[float]) -> float:
    """Return the median ratio of a step to its floor."""
    return statistics.median(step / least for step, least in zip(steps, floors, strict=True))


def over_floor_text(case: Case, found: dict[str, Any]) -> str:
    """Return the ratios of a cell's steps to their floor, in words; "" if they are unknown.

    A remark follows if the ratio is above the case's target.
    """
    if "over_floor" not in found:
        return ""
    ours, stock = (found["over_floor"][side] for side in ("fastgen", "stock"))
    most = case.floor_target if case.batch == 1 else None
    remark = "" if most is None or ours <= most else f"  ABOVE TARGET {most:g}x"
    return f"  a step takes {ours:.2f}x its floor ({stock:.2f}x stock){remark}"


def floor(model: Any, case: Case, generated: int, bandwidth: float, rate: float) -> float:
    """Return the least seconds of the decode step that follows `generated` generated tokens.

    Args:
        model: an encoder-decoder model.
        case: number of sentences, beams and source tokens.
        generated: number of tokens generated before the step.
        bandwidth: bytes per second of a copy.
        rate: floating-point operations per second.
    """
    decoder = model.get_decoder()
    element = next(model.parameters()).element_size()
    linears = {name: m for name, m in decoder.named_modules() if isinstance(m, torch.nn.Linear)}
    read = [
        m
        for name, m in linears.items()
        if not name.endswith(("encoder_attn.k_proj", "encoder_attn.v_proj"))
    ]
    weights = sum(m.weight.numel() for m in (*read, model.get_output_embeddings()))
    products = 2 * case.batch * case.beams * weights / rate
    slots = case.source + case.beams * generated
    entries = 2 * len(decoder.layers) * case.batch * slots * model.config.d_model
    return max(products, weights * element / bandwidth) + entries * element / bandwidth


def product_rate(session: Session, size: int = 2048, passes: int = 5) -> float:
    """Return the floating-point operations per second of a large matrix product.

    It is the fastest product available, so on a CPU in fp32 the weights are packed.
    """
    if session.tiny:
        size = 64
    x = torch.randn(size, size, dtype=session.dtype, device=session.device)
    packed = linear.pack(x) if session.device == "cpu" and session.dtype == torch.float32 else None
    seconds = []
    for _ in range(passes):
        session.synchronize()
        began = time.perf_counter()
        torch.nn.functional.linear(x, x) if packed is None else linear.linear(x, packed)
        session.synchronize()
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds)
