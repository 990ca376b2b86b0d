"""Fair comparison of a candidate's speed with a baseline's: alternating, paired, outputs compared.

Used by `fastgen demo`, `fastgen bench` and `benchmarks/`. Machines drift (frequency, neighbours,
page cache), so the arms take turns, the order is reversed from round to round (A B, B A, ...), and
the speed-up is the median of the ratios *within* rounds.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import fastgen

T = TypeVar("T")

RESAMPLES = 4000
MIN_ROUNDS = 5
"""Rounds before `precision` or `budget` may end a comparison; fewer give no usable interval."""
WRITTEN_BY_RUNS = ("benchmarks/results", "docs/plots")
"""Paths that do not count as modified, since measuring itself writes them."""


@dataclass(frozen=True)
class Verdict:
    """Result of comparing two outputs.

    Attributes:
        equal: the outputs are equal, exactly or apart from near ties.
        near_ties: how many parts of the output (sentences) differ only by a near tie.
        note: what differs, in words.
        within_noise: the outputs differ, and the rounding of half precision explains it
            (`fastgen.patches.transformers.introspection.noise`).
    """

    equal: bool
    near_ties: int = 0
    note: str = ""
    within_noise: bool = False

    @property
    def agrees(self) -> bool:
        """Whether neither output is wrong. Only then is a time meaningful."""
        return self.equal or self.within_noise


@dataclass(frozen=True)
class Outcome:
    """Result of `compare`. If the outputs did not agree, it holds no times and no ratio.

    Attributes:
        equal: the outputs were equal in the warm-up and in every round.
        near_ties: the most near ties in one round.
        rounds: seconds (baseline, candidate) of each round.
        ratio: median over the rounds of baseline / candidate; above 1 the candidate is faster.
        low: lower end of the bootstrap 95% interval of that median.
        high: upper end of that interval.
        note: what differs, in words.
        within_noise: outputs differed, and the rounding of half precision explains all differences.
    """

    equal: bool
    near_ties: int
    rounds: list[tuple[float, float]] = field(default_factory=list)
    ratio: float = math.nan
    low: float = math.nan
    high: float = math.nan
    note: str = ""
    within_noise: bool = False

    @property
    def agrees(self) -> bool:
        """Whether there are times: the outputs were equal, or rounding explains the differences."""
        return self.equal or self.within_noise

    @property
    def baseline_seconds(self) -> float:
        """Median time of a round of the baseline; NaN without rounds."""
        return statistics.median(a for a, _ in self.rounds) if self.rounds else math.nan

    @property
    def candidate_seconds(self) -> float:
        """Median time of a round of the candidate; NaN without rounds."""
        return statistics.median(b for _, b in self.rounds) if self.rounds else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as JSON-ready data, with None for each figure that does not exist."""
        figures = {
            "ratio": self.ratio,
            "low": self.low,
            "high": self.high,
            "baseline_seconds": self.baseline_seconds,
            "candidate_seconds": self.candidate_seconds,
        }
        return {
            "equal": self.equal,
            "within_noise": self.within_noise,
            "near_ties": self.near_ties,
            "note": self.note,
            **{name: None if math.isnan(value) else value for name, value in figures.items()},
            "rounds": [list(pair) for pair in self.rounds],
        }


def both(call: Callable[..., T]) -> tuple[Callable[..., T], Callable[..., T]]:
    """Return `call` with fastgen disabled, and `call` itself."""
    return fastgen.disabled()(call), call


def synchronize(device: str) -> None:
    """Wait until a CUDA device has finished its work; do nothing for other devices."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize(device)


def compare(
    baseline: Callable[[], T],
    candidate: Callable[[], T],
    rounds: int,
    same: Callable[[T, T], Verdict],
    warmup: int = 1,
    synchronize: Callable[[], object] | None = None,
    precision: float | None = None,
    budget: float | None = None,
) -> Outcome:
    """Time `candidate` against `baseline` and compare their outputs in every round.

    Args:
        baseline: called without arguments. Its output goes to `same`, outside the timed part.
        candidate: called in the same way.
        rounds: rounds to run, each of which times both once. With `precision` or `budget`, the most
            rounds to run.
        same: `same(baseline_output, candidate_output)` decides whether the outputs agree. If they
            do not, the comparison ends.
        warmup: untimed calls of each before the first round. The last outputs are compared too.
        synchronize: waits for the device; called before the clock starts and before it stops.
        precision: stop once the half width of the interval is below this share of the ratio (0.01 =
            1%).
        budget: stop once the rounds have taken this many seconds.

    Raises:
        ValueError: rounds < 1 or warmup < 0.
    """
    ties, apart = 0, ""

    def check(outputs: Sequence[T]) -> str | None:
        nonlocal ties, apart
        verdict = same(outputs[0], outputs[1])
        ties = max(ties, verdict.near_ties)
        if not verdict.equal:
            apart = verdict.note or "no details"
        return None if verdict.agrees else apart

    def enough(times: list[tuple[float, ...]], elapsed: float) -> bool:
        if len(times) < MIN_ROUNDS:
            return False
        if budget is not None and elapsed > budget:
            return True
        if precision is None:
            return False
        ratio, low, high = paired_ratio([t[0] for t in times], [t[1] for t in times])
        return high - low < 2 * precision * ratio

    times, difference = interleave(
        (baseline, candidate), rounds, check, warmup, synchronize, enough
    )
    if difference is not None:
        return Outcome(False, ties, note=difference)
    ratio, low, high = paired_ratio([t[0] for t in times], [t[1] for t in times])
    return Outcome(
        not apart,
        ties,
        [(t[0], t[1]) for t in times],
        ratio,
        low,
        high,
        apart,
        within_noise=bool(apart),
    )


def interleave(
    arms: Sequence[Callable[[], T]],
    rounds: int,
    check: Callable[[Sequence[T]], str | None],
    warmup: int = 1,
    synchronize: Callable[[], object] | None = None,
    enough: Callable[[list[tuple[float, ...]], float], bool] | None = None,
) -> tuple[list[tuple[float, ...]], str | None]:
    """Time several arms in turn, in alternating order.

    Args:
        arms: called without arguments, each once per round.
        rounds: the most rounds to run.
        check: gets the outputs of one round in the order of `arms`. Returns None, or what differs,
            which ends the run.
        warmup: untimed calls of each arm before the first round. The last outputs are checked.
        synchronize: waits for the device; called before the clock starts and before it stops.
        enough: gets the times so far and the seconds elapsed. If it returns True, the run ends.

    Returns:
        The seconds of each arm in each round, and the first difference or None. With a difference
        there are no times.

    Raises:
        ValueError: rounds < 1 or warmup < 0.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    if warmup < 0:
        raise ValueError(f"warmup must not be negative, got {warmup}")
    outputs: list[T] = []
    for _ in range(warmup):
        outputs = [arm() for arm in arms]
    if outputs and (difference := check(outputs)) is not None:
        return [], difference

    times: list[tuple[float, ...]] = []
    with frozen():
        begin = time.perf_counter()
        for done in range(rounds):
            order = range(len(arms)) if done % 2 == 0 else reversed(range(len(arms)))
            measured = {i: _timed(arms[i], synchronize) for i in order}
            if (difference := check([measured[i][1] for i in range(len(arms))])) is not None:
                return [], difference
            times.append(tuple(measured[i][0] for i in range(len(arms))))
            if enough is not None and enough(times, time.perf_counter() - begin):
                break
    return times, None


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """Exclude all present objects from garbage collection, so that later collections are cheap."""
    already = gc.get_freeze_count() > 0  # the outermost context unfreezes
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not already:
            gc.unfreeze()


def _timed(call: Callable[[], T], synchronize: Callable[[], object] | None) -> tuple[float, T]:
    """Return the seconds of one call, and its result.

    Garbage is collected first, so that no arm pays for another arm's.
    """
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        if synchronize is not None:
            synchronize()
        begin = time.perf_counter()
        result = call()
        if synchronize is not None:
            synchronize()
        return time.perf_counter() - begin, result
    finally:
        if enabled:
            gc.enable()


def agrees(result: Mapping[str, Any]) -> bool:
    """Return `Outcome.agrees` for a result read from JSON."""
    return result["equal"] or result.get("within_noise", False)


def paired_ratio(
    baseline: Sequence[float], candidate: Sequence[float], seed: int = 0
) -> tuple[float, float, float]:
    """Return the median of baseline[i] / candidate[i] and its bootstrap 95% interval.

    With a single pair, both ends of the interval equal the ratio.

    Raises:
        ValueError: the lengths differ, or there are no times.
    """
    if len(baseline) != len(candidate) or not baseline:
        raise ValueError(
            f"need equally many times of both, at least one; "
            f"got {len(baseline)} and {len(candidate)}"
        )
    ratios = np.asarray(baseline, dtype=np.float64) / np.asarray(candidate, dtype=np.float64)
    draws = np.random.default_rng(seed).integers(0, len(ratios), (RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(ratios[draws], axis=1), [2.5, 97.5])
    return float(np.median(ratios)), float(low), float(high)


def peak_memory(call: Callable[[], object], device: str = "cpu") -> int | None:
    """Return the most bytes that `call` held, or None if that cannot be measured.

    On CUDA this is the peak of torch's allocations, on Linux the growth of the resident set. The
    latter is coarse: memory that the allocator kept from an earlier call and reuses does not show
    as growth.
    """
    gc.collect()
    if device.startswith("cuda"):
        import torch

        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
        call()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - held
    try:
        # Resets the high-water mark to the present size of the resident set.
        Path("/proc/self/clear_refs").write_text("5")
        before = _status_bytes("VmRSS")
    except OSError:
        return None
    call()
    return max(0, _status_bytes("VmHWM") - before)


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


def environment() -> dict[str, Any]:
    """Return what a figure depends on: commit, hardware, threads, versions, date.

    Unknown entries are None.
    """
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **_git(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "fairseq": _version("fairseq"),
        "fastgen": getattr(sys.modules.get("fastgen"), "__version__", None) or _version("fastgen"),
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git() -> dict[str, Any]:
    """Return the commit of this source tree, and whether changed or new files differ from it."""
    root = Path(__file__).resolve().parents[3]
    unknown = {"git_sha": None, "git_dirty": None}
    if not (root / ".git").exists():  # installed: a repository further up is not fastgen's
        return unknown
    excluded = [f":(exclude){path}" for path in WRITTEN_BY_RUNS]
    try:
        sha, changes = (
            subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, timeout=20)
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--", ".", *excluded])
        )
    except (OSError, subprocess.TimeoutExpired):
        return unknown
    return {
        "git_sha": sha.stdout.strip() if sha.returncode == 0 else None,
        "git_dirty": bool(changes.stdout.strip()) if changes.returncode == 0 else None,
    }


def processor_kind() -> str:
    """Return a label for kinds of processors whose results differ: intel, zen5, avx2 or ""."""
    import torch

    capabilities = torch.cpu.get_capabilities()
    name = str(capabilities.get("cpu_name", ""))
    if "Intel" in name:
        return "intel"
    if capabilities.get("avx512_vp2intersect"):
        return "zen5"
    return "avx2" if capabilities.get("avx2") and not capabilities.get("avx512_f") else ""


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    name = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None
    )
    kind = {"zen5": " (Zen 5)", "avx2": " (AVX2)"}.get(processor_kind(), "")
    return name and f"{name}{kind}"
