"""Shared parts of the runners: command-line settings, paired calls, counters, profiling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from fastgen.cli.bench.agreement import Agreement
from fastgen.cli.bench.counts import counts
from fastgen.cli.bench.measure import (
    Outcome,
    both,
    compare,
    interleave,
    paired_ratio,
    synchronize,
)

_Output = TypeVar("_Output")


@dataclass
class Session:
    """Command-line settings, for all cases.

    Attributes:
        device: device of the models.
        dtype: dtype of the models.
        rounds: number of rounds; None for the case's own.
        tiny: whether to shrink the cases for tests of the benchmark.
        cells: patterns of the grid's cells to measure.
        done: cells in the results file that are not measured again.
        save: called with the results so far, so that a table can be interrupted.
        say: prints a line.
        sentences: how many lines of the test text the text runner uses; None for all.
        corpus: folder with test.en, test.es and further training text; None for the example's.
        model: folder of a model; None for the example's.
        text: file for the model to translate; None for the example's.
        python: Python of another environment, for a peer that needs one.
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
    python: Path | None = None

    def synchronize(self) -> None:
        synchronize(self.device)


class Hits:
    """Counter of the calls that fastgen ran, and of its fallbacks, since its creation."""

    def __init__(self) -> None:
        self.before = counts()

    def since(self) -> dict[str, Any]:
        new = counts().since(self.before)
        fallbacks = {name.replace(", ", ": ", 1): count for name, count in new.fallbacks.items()}
        return {"hits": new.hits, "fallbacks": fallbacks}


def compared(
    model: Any,
    inputs: dict[str, Any],
    options: dict[str, Any],
    tokens: int,
    session: Session,
    rounds: int,
    **how: Any,
) -> dict[str, Any]:
    """Time one `generate` call with and without fastgen; return figures and what ran.

    Args:
        model: the transformers model.
        inputs: tensor arguments of `generate`.
        options: the other arguments of `generate`.
        tokens: number of tokens that the call generates.
        session: device.
        rounds: number of rounds.
        how: further arguments of `measure.compare`.
    """
    hits = Hits()
    outcome = compare(
        *both(lambda: model.generate(**inputs, **options)), rounds,
        Agreement(model, inputs, options), synchronize=session.synchronize, **how,
    )  # fmt: skip
    return figures(outcome, tokens) | hits.since()


def in_turn(
    arms: Mapping[str, Callable[[], _Output]],
    rounds: int,
    check: Callable[[Sequence[_Output]], str | None],
) -> dict[str, Any]:
    """Time several functions in turn; return the seconds of each, and ratios over fastgen.

    Args:
        arms: the functions by name; one of them is "fastgen".
        rounds: number of rounds.
        check: returns how the outputs of a round differ; None if they do not.
    """
    hits = Hits()
    times, difference = interleave(list(arms.values()), rounds, check)
    if difference is not None:
        return {"equal": False, "note": difference}
    seconds = dict(zip(arms, zip(*times, strict=True), strict=True))
    over = {
        name: dict(
            zip(("ratio", "low", "high"), paired_ratio(own, seconds["fastgen"]), strict=True)
        )
        for name, own in seconds.items()
        if name != "fastgen"
    }
    return {"equal": True, "seconds": seconds, "over": over} | hits.since()


def figures(outcome: Outcome, tokens: int) -> dict[str, Any]:
    """Return an outcome with tokens per second of both; no speed if the outputs differ."""
    result = outcome.to_dict()
    if outcome.agrees:
        result["tokens"] = tokens
        result["tokens_per_second"] = {
            "stock": tokens / outcome.baseline_seconds,
            "fastgen": tokens / outcome.candidate_seconds,
        }
    return result


def profiled(call: Callable[[], object], device: str) -> Any:
    """Return the profile of a call: its kernels on CUDA, its operators on a CPU."""
    activity = ProfilerActivity.CUDA if device.startswith("cuda") else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        call()
        synchronize(device)
    return profiler
