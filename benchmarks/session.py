"""What runners share: what the command line chose, a call beside itself unpatched, and what ran in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from fastgen.cli.bench.agreement import Agreement
from fastgen.cli.bench.counts import counts
from fastgen.cli.bench.measure import Outcome, both, compare, synchronize


@dataclass
class Session:
    """What the command line chose, for all cases.

    Attributes:
        rounds: None for the case's own number.
        cells: patterns of the grid's cells to measure.
        done: cells already in the results file that need not be measured again.
        save: called with the results so far, so that a table can be interrupted.
        say: prints a line.
        sentences: how many lines of the test text the text runner takes; None for all.
        corpus: a folder with test.en and test.es, and more to train on, instead of the example's.
        model, text: a folder with a model, and a file with what it translates, instead of the example's.
    """

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    rounds: int | None = None
    tiny: bool = False
    cells: tuple[str, ...] = ("*",)
    done: frozenset[str] = frozenset()
    save: Callable[[dict[str, Any]], None] = lambda result: None
    say: Callable[[str], None] = print
    sentences: int | None = None
    corpus: Path | None = None
    model: Path | None = None
    text: Path | None = None

    def synchronize(self) -> None:
        synchronize(self.device)


class Hits:
    """Counts what fastgen ran and what it left to the toolkit, since it was made."""

    def __init__(self) -> None:
        self.before = counts()

    def since(self) -> dict[str, Any]:
        found = counts().since(self.before)
        fallbacks = {name.replace(", ", ": ", 1): count for name, count in found.fallbacks.items()}
        return {"hits": found.hits, "fallbacks": fallbacks}


def compared(
    model: Any,
    inputs: dict[str, Any],
    options: dict[str, Any],
    tokens: int,
    session: Session,
    rounds: int,
    **how: Any,
) -> dict[str, Any]:
    """One `generate` call of so many tokens beside itself unpatched, and what ran in it."""
    hits = Hits()
    outcome = compare(
        *both(lambda: model.generate(**inputs, **options)), rounds, Agreement(model, inputs, options),
        synchronize=session.synchronize, **how,
    )  # fmt: skip
    return figures(outcome, tokens) | hits.since()


def figures(outcome: Outcome, tokens: int) -> dict[str, Any]:
    """Return an outcome with tokens per second of both; no speed where the outputs differ."""
    result = outcome.to_dict()
    if outcome.agrees:
        result["tokens"] = tokens
        result["tokens_per_second"] = {
            "stock": tokens / outcome.baseline_seconds,
            "fastgen": tokens / outcome.candidate_seconds,
        }
    return result


def profiled(call: Callable[[], object], device: str) -> Any:
    """Return the profiler that has seen a call: its kernels on CUDA, its operators on a CPU."""
    activity = ProfilerActivity.CUDA if device.startswith("cuda") else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        call()
        synchronize(device)
    return profiler
