"""Summary of a run, and the reports of the processes that it is made from."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import fastgen
from fastgen.corpus.run.identity import versions
from fastgen.corpus.run.journal import Entry, writing

Counts = dict[str, dict[str, int]]


@dataclass
class Report:
    """Report of a process at its end.

    Attributes:
        loading: seconds until the model was loaded.
        seconds: seconds from then on.
        reading: seconds of these in which it waited for input.
        writing: seconds of these in which it waited for the writer.
        memory: peak memory in bytes.
        device_memory: peak memory on its GPU in bytes.
        fallbacks: calls that ran the toolkit's own code, by patch and reason, from
            `fastgen.status()`.
        left_off: calls that ran without a feature, likewise.
        limit: where the length limit of outputs comes from.
    """

    loading: float = 0.0
    seconds: float = 0.0
    reading: float = 0.0
    writing: float = 0.0
    memory: int = 0
    device_memory: int = 0
    fallbacks: Counts = field(default_factory=Counts)
    left_off: Counts = field(default_factory=Counts)
    limit: str = ""

    def note_process(self, before: tuple[Counts, Counts]) -> None:
        """Record peak memory, and the counts since `before`."""
        self.memory = _peak()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            self.device_memory = torch.cuda.max_memory_allocated()
        now = counts()
        self.fallbacks, self.left_off = (_since(*both) for both in zip(before, now, strict=True))


@dataclass(frozen=True)
class Summary:
    """Summary of a run.

    Attributes:
        records: records of the whole output.
        tokens: generated tokens of the whole output.
        problems: number and reason of each record without an output.
        blank: records that are blank lines, whose outputs are blank too.
        at_limit: outputs that reached their length limit.
        limit: where that limit comes from; empty if this run has generated nothing.
        made: records that this run has generated; the others were finished before.
        seconds: duration of this run, including `loading`.
        loading: seconds until the model was loaded, in the slowest process.
        records_per_second: rate of this run, from when the model was loaded.
        tokens_per_second: likewise.
        waiting_for_reading: share of that time in which it waited for input.
        waiting_for_writing: share of that time in which it waited for the writer.
        peak_memory: bytes, of the process that used most.
        peak_device_memory: bytes, likewise.
        processes: number of processes that finished.
        lost: how the other processes ended.
        fallbacks: calls that ran the toolkit's own code, by patch and reason.
        left_off: calls that ran without a feature, by patch and reason.
        versions: versions of the packages that the output depends on, and of Python.
    """

    records: int
    tokens: int
    problems: list[tuple[int, str]]
    blank: int
    at_limit: int
    limit: str
    made: int
    seconds: float
    loading: float
    records_per_second: float
    tokens_per_second: float
    waiting_for_reading: float
    waiting_for_writing: float
    peak_memory: int
    peak_device_memory: int
    processes: int
    lost: list[str]
    fallbacks: Counts
    left_off: Counts
    versions: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as JSON-ready data."""
        return asdict(self)

    def write(self, file: Path) -> None:
        """Write the summary as JSON."""
        with writing(file, "The output is complete"):
            file.write_text(json.dumps(self.to_dict(), indent=2) + "\n", "utf-8")


def summarise(
    entries: Sequence[Entry], done: int, reports: Sequence[Report], lost: list[str], seconds: float
) -> Summary:
    """Return the summary of a run.

    Args:
        entries: all blocks of the output.
        done: number of blocks that were finished before this run.
        reports: the reports of the processes.
        lost: how processes without a report ended.
        seconds: duration of the run.
    """
    working = max((report.seconds for report in reports), default=0.0)
    all_seconds = sum(report.seconds for report in reports)
    records = sum(entry.records for entry in entries[done:])
    tokens = sum(entry.tokens for entry in entries[done:])
    return Summary(
        records=sum(entry.records for entry in entries),
        tokens=sum(entry.tokens for entry in entries),
        problems=[problem for entry in entries for problem in entry.problems],
        blank=sum(entry.blank for entry in entries),
        at_limit=sum(entry.at_limit for entry in entries),
        limit=next((report.limit for report in reports if report.limit), ""),
        made=records,
        seconds=round(seconds, 3),
        loading=round(max((report.loading for report in reports), default=0.0), 3),
        records_per_second=_ratio(records, working),
        tokens_per_second=_ratio(tokens, working),
        waiting_for_reading=_ratio(sum(report.reading for report in reports), all_seconds),
        waiting_for_writing=_ratio(sum(report.writing for report in reports), all_seconds),
        peak_memory=max((report.memory for report in reports), default=_peak()),
        peak_device_memory=max((report.device_memory for report in reports), default=0),
        processes=len(reports),
        lost=lost,
        fallbacks=_sum(report.fallbacks for report in reports),
        left_off=_sum(report.left_off for report in reports),
        versions=versions() | {"python": sys.version.split()[0]},
    )


def counts() -> tuple[Counts, Counts]:
    """Return the counts of `fastgen.status()` in this process: fallbacks, and disabled features."""
    rows = fastgen.status().rows
    return {row.name: row.fallbacks for row in rows}, {row.name: row.left_off for row in rows}


def _since(before: Counts, now: Counts) -> Counts:
    found = {name: dict(Counter(reasons) - Counter(before[name])) for name, reasons in now.items()}
    return {name: reasons for name, reasons in found.items() if reasons}


def _ratio(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0


def _sum(counts: Any) -> Counts:
    found: dict[str, Counter[str]] = {}
    for of_process in counts:
        for name, reasons in of_process.items():
            found.setdefault(name, Counter()).update(reasons)
    return {name: dict(reasons) for name, reasons in found.items()}


def _peak() -> int:
    """Return the peak memory of this process in bytes; 0 if the system does not report it."""
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
