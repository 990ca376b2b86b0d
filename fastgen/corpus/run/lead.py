"""What the process that leads a run does: looks at what earlier runs have left, and makes the output in the end."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastgen.corpus.models import folder_of
from fastgen.corpus.run import assembly
from fastgen.corpus.run.assembly import Assembly
from fastgen.corpus.run.identity import digest
from fastgen.corpus.run.journal import Journal, Part
from fastgen.corpus.run.summary import Report, Summary, summarise, versions
from fastgen.errors import CommandError

if TYPE_CHECKING:
    from fastgen.corpus.run.job import Job

_NO_MATTER = ("threads",)  # options that change the speed, and rounding, alone


def header_of(job: Job) -> dict[str, Any]:
    """All that an output's bytes depend on, JSON-ready."""
    options = {
        option.name: _told(getattr(job.options, option.name))
        for option in fields(job.options)
        if option.name not in _NO_MATTER
    }
    header = {
        "source": job.source.identity(), "sink": job.sink.identity(), "options": options | {"device": _device(job)},
        "block": job.block, "versions": versions(),
    }  # fmt: skip
    return json.loads(json.dumps(header))


def _told(value: Any) -> Any:
    return digest(folder_of(value)) if isinstance(value, Path) else value


def _device(job: Job) -> str:
    """The kind of device; which of several does not matter."""
    import torch

    named = job.options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return named.partition(":")[0]


def _file(path: Path) -> tuple[int, int] | None:
    """Which file is there under a name; None where none is."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


class Lead:
    """A run that is written to a file, seen as a whole. It holds the journal without a name until it is closed.

    Attributes:
        known: digests of the blocks of earlier runs.
    Raises:
        CommandError: another run is writing the output or has just finished it, or an earlier one has begun it
            otherwise.
    """

    def __init__(self, job: Job, output: Path) -> None:
        self.job, self.output = job, output
        self.begin = time.perf_counter()
        before = _file(output)
        self.header = header_of(job)
        if job.restart:
            assembly.restart(output)
        self.journal = Journal(Part(output), self.header)
        try:
            self.found = self._found()
            if not self.found.begun and _file(output) != before:
                assembly.remove(output)  # the header of this run, which would have the next one write over it
                raise CommandError(f"{output}: another run has just finished it; --overwrite writes over it")
        except BaseException:
            self.close()
            raise
        self.known = {entry.block: entry.digest for entry in self.found.entries}

    def close(self) -> None:
        self.journal.close()

    @property
    def done(self) -> int:
        """Records of earlier runs."""
        return sum(entry.records for entry in self.found.entries)

    def deliver(self) -> Summary | None:
        """Make the output, where an earlier run has made all but that."""
        whole = self.found.whole
        if whole is None:
            return None
        assembly.deliver(self.output, whole, self.job.sink)
        return self._summary([], [])

    def finish(self, total: int, reports: Sequence[Report], lost: list[str]) -> Summary:
        """Make the output of `total` blocks."""
        self.found = self._found()
        self.found.finish(total, self.journal, self.job.sink)
        return self._summary(reports, lost)

    def _found(self) -> Assembly:
        return Assembly(self.output, self.header, self.job.on_error)

    def _summary(self, reports: Sequence[Report], lost: list[str]) -> Summary:
        return summarise(self.found.entries, reports, lost, time.perf_counter() - self.begin)
