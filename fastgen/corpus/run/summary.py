"""What a run has done: its figures, and what went into them process by process."""

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
    """What a process says at its end.

    Attributes:
        loading, seconds: until the model was there, and from then on.
        reading, writing: seconds of them in which nothing was generated.
        memory: the most that it has held, in bytes; device_memory: of its GPU.
        fallbacks, left_off: of `fastgen.status()`, by patch and reason.
        limit: where the limit of outputs comes from.
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
        """Take memory as it is now, and what was counted since."""
        self.memory = _peak()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            self.device_memory = torch.cuda.max_memory_allocated()
        now = counts()
        self.fallbacks, self.left_off = (_since(*both) for both in zip(before, now, strict=True))


@dataclass(frozen=True)
class Summary:
    """What a run has done.

    Attributes:
        records, tokens: of the whole output. problems: number and reason of each record without an output.
        blank: records that are blank lines, whose outputs are such too.
        at_limit: outputs that ended because they may not be longer. limit: where that limit comes from; empty where
            this run has made none.
        made: records that this run has made; the others were there.
        seconds: of this run, `loading` the model counted.
        records_per_second, tokens_per_second: of what this run has made, from when the model was there.
        waiting_for_reading, waiting_for_writing: shares of that time in which nothing was generated.
        peak_memory, peak_device_memory: bytes, of the process that held most.
        processes: those that came to their end. lost: those that did not, and how they ended.
        fallbacks, left_off: what ran on the toolkit's own code and what was done without, by patch and reason: in how
            many calls.
        versions: of what the output depends on, and Python's.
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
        """Return the same as plain data, which JSON can hold."""
        return asdict(self)

    def write(self, file: Path) -> None:
        with writing(file, "The output is complete"):
            file.write_text(json.dumps(self.to_dict(), indent=2) + "\n", "utf-8")


def summarise(
    entries: Sequence[Entry], done: int, reports: Sequence[Report], lost: list[str], seconds: float
) -> Summary:
    """The summary of an output's blocks, of which the first `done` were there, and processes have made the others."""
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
    """What `fastgen.status()` counts in this process: fallbacks, and what was left off."""
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
    """The most memory that this process has held, in bytes; 0 where the system does not say."""
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
