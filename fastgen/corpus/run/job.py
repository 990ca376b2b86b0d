"""A job: a corpus, what is to be made of it, and where it goes; `run` does it."""

from __future__ import annotations

import os
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fastgen.corpus.formats.records import Sink, Source
from fastgen.corpus.run import workers
from fastgen.corpus.run.blocks import blocks
from fastgen.corpus.run.identity import header_of
from fastgen.corpus.run.journal import Entry, Journal, Stdout, body_of, remove, restart, writing
from fastgen.corpus.run.progress import Meter, tell_all
from fastgen.corpus.run.summary import Report, Summary, summarise
from fastgen.corpus.run.worker import Worker
from fastgen.corpus.texts import Options
from fastgen.errors import CommandError
from fastgen.number import COUNT

BLOCK = 1024


@dataclass(frozen=True)
class Job:
    """Texts of a source, through a model, into a sink.

    Attributes:
        source: its length (`len`), where it has one, is the number of its records. Several processes are sent the job,
            so that it and the sink can be pickled.
        output: None for standard output, which cannot be gone on with.
        on_error: what a record without an output does: end the run, be left out, or give an empty output.
        block: records that are written, and lost, together; batches of like lengths are made within one.
        processes: on this machine.
        restart: forget what an earlier run has left beside the output.
        progress: show a bar on standard error.
        summary: file for the summary, as JSON.
    """

    options: Options
    source: Source
    sink: Sink
    output: Path | None
    on_error: Literal["fail", "skip", "empty"] = "fail"
    block: int = BLOCK
    processes: int = 1
    restart: bool = False
    progress: bool = False
    summary: Path | None = None


def run(job: Job) -> Summary:
    """Do a job, or what an earlier run has left of it; the output is there as a whole in the end, or not at all.

    Raises:
        CommandError: the run cannot be, or cannot go on; the message says why, and what has changed since it began. A
            record without an output is one, where `on_error` is "fail".
        SystemExit: of status 1, and nothing is said: nobody reads standard output any more.
    """
    _check(job)
    summary = _to_stdout(job) if job.output is None else _to_file(job, job.output)
    tell_all(summary.problems, summary.records)
    if job.summary is not None:
        summary.write(job.summary)
    return summary


def _check(job: Job) -> None:
    for name, value in (("block", job.block), ("processes", job.processes)):
        if (problem := COUNT.problem(value)) is not None:
            raise CommandError(f"--{name} {value}: {problem}")
    if "RANK" in os.environ and (world := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise CommandError(
            f"WORLD_SIZE={world}: each process that torchrun starts would generate the whole corpus; start one, with "
            "--processes N for several on this machine, or --engine ray for many machines"
        )
    if job.processes > 1 and job.source.once:
        raise CommandError(
            "several processes cannot read standard input or another pipe; name a file"
        )


def _to_stdout(job: Job) -> Summary:
    begin, stdout = time.perf_counter(), Stdout()
    try:
        reports, lost = _make(job, stdout)
    except BrokenPipeError:
        raise SystemExit(1) from None
    return summarise(stdout.entries, 0, reports, lost, time.perf_counter() - begin)


def _to_file(job: Job, output: Path) -> Summary:
    begin, before = time.perf_counter(), _file(output)
    header = header_of(job)
    if job.restart:
        restart(output)
    with closing(Journal(output, header, job.on_error)) as journal:
        if not journal.begun and _file(output) != before:
            remove(output)  # the header of this run, which would have the next one write over it
            raise CommandError(
                f"{output}: another run has just finished it; --overwrite writes over it"
            )
        done = len(journal.entries)
        reports, lost = ([], []) if journal.whole else _make(job, journal)
        if not journal.whole:
            journal.end()
        _deliver(output, job.sink)
        return summarise(journal.entries, done, reports, lost, time.perf_counter() - begin)


def _make(job: Job, journal: Journal | Stdout) -> tuple[list[Report], list[str]]:
    """Make the blocks that are not there. Returns what processes report, and how those have ended that do not."""
    left = blocks(job.source, job.block, [entry.digest for entry in journal.entries])
    with closing(
        Meter(job.source, sum(entry.records for entry in journal.entries), job.progress)
    ) as meter:

        def append(data: bytes, entry: Entry) -> None:
            journal.append(data, entry)
            meter.show(entry)

        if job.processes > 1:
            return workers.run(job, left, append)
        return [Worker(job).run(left, append)], []


def _deliver(output: Path, sink: Sink) -> None:
    """Make the output of a whole body. Runs again where it, or what follows it, was interrupted."""
    body = body_of(output)
    if body.exists():
        with writing(output):
            sink.finish(body, output)
    elif not output.exists():
        raise CommandError(f"{body} is missing, and {output} too; --restart begins anew")
    remove(output)


def _file(path: Path) -> tuple[int, int] | None:
    """Which file is there under a name; None where none is."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
