"""A job: a corpus, what to generate from it, and where to write it; `run` executes it."""

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
    """Generation from the texts of a source with a model, into a sink.

    With several processes, the job is pickled, including its source and sink.

    Attributes:
        options: the model and the options of generation.
        source: the records. Its length hint, if any, is the number of records.
        sink: the output format.
        output: the output file; None for standard output, which cannot be resumed.
        on_error: what a record without an output does: end the run, be left out, or give an empty
            output.
        block: records that are written, and lost, together. Batches are formed within a block.
        processes: worker processes on this machine.
        restart: discard what an earlier run has left beside the output.
        progress: show a progress bar on stderr.
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
    """Run a job, or what is left of it after an earlier run. The output is complete or absent.

    Raises:
        CommandError: the job is invalid or cannot be resumed; the message says why, and what has
            changed. Also if a record has no output and `on_error` is "fail".
        SystemExit: status 1 without a message: the reader of standard output is gone.
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
            f"WORLD_SIZE={world}: each process that torchrun starts would generate the whole "
            "corpus; start one, with --processes N for several on this machine, "
            "or --engine ray for many machines"
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
        if not journal.started and _file(output) != before:
            remove(output)  # else this run's header would make the next run overwrite the output
            raise CommandError(
                f"{output}: another run has just finished it; --overwrite replaces it"
            )
        done = len(journal.entries)
        reports, lost = ([], []) if journal.whole else _make(job, journal)
        if not journal.whole:
            journal.end()
        _deliver(output, job.sink)
        return summarise(journal.entries, done, reports, lost, time.perf_counter() - begin)


def _make(job: Job, journal: Journal | Stdout) -> tuple[list[Report], list[str]]:
    """Generate the missing blocks.

    Returns:
        The processes' reports, and how processes without a report ended.
    """
    missing = blocks(job.source, job.block, [entry.digest for entry in journal.entries])
    with closing(
        Meter(job.source, sum(entry.records for entry in journal.entries), job.progress)
    ) as meter:

        def append(data: bytes, entry: Entry) -> None:
            journal.append(data, entry)
            meter.show(entry)

        if job.processes > 1:
            return workers.run(job, missing, append)
        return [Worker(job).run(missing, append)], []


def _deliver(output: Path, sink: Sink) -> None:
    """Make the output from a complete body. Runs again if this or a later step was interrupted."""
    body = body_of(output)
    if body.exists():
        with writing(output):
            sink.finish(body, output)
    elif not output.exists():
        raise CommandError(f"{body} is missing, and {output} too; --restart begins anew")
    remove(output)


def _file(path: Path) -> tuple[int, int] | None:
    """Return device and inode of a file; None if there is none."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
