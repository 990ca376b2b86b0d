"""A job: a corpus, what is to be made of it, and where it goes; `run` does it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fastgen.corpus.formats.records import Sink, Source
from fastgen.corpus.run import workers
from fastgen.corpus.run.claims import Claims
from fastgen.corpus.run.journal import Stdout
from fastgen.corpus.run.lead import Lead
from fastgen.corpus.run.progress import Meter, tell_all
from fastgen.corpus.run.summary import Summary, summarise
from fastgen.corpus.run.worker import Worker
from fastgen.corpus.texts import Options
from fastgen.errors import CommandError
from fastgen.number import COUNT

BLOCK = 1024


@dataclass(frozen=True)
class Job:
    """Texts of a source, through a model, into a sink.

    Attributes:
        source: its length (`len`), where it has one, is the number of its records. With several processes it is sent
            to each of them, as the sink is, and read by each.
        output: None for standard output, which cannot be gone on with.
        on_error: what a record without an output does: end the run, be left out, or give an empty output.
        block: records that are written, and lost, together; batches of like lengths are made within one.
        processes: on this machine; 1 where torchrun starts several.
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


def run(job: Job) -> Summary | None:
    """Do a job, or what an earlier run has left of it; the output is there as a whole in the end, or not at all.

    Returns:
        None in a process that torchrun has started, but for the first one, which makes the output.
    Raises:
        CommandError: the run cannot be, or cannot go on; the message says why, and what has changed since it began.
        BadRecord: of these: a record without an output, where `on_error` is "fail".
        SystemExit: of status 1, and nothing is said: nobody reads standard output any more.
    """
    place = workers.Place.of_environment(os.environ)
    _check(job, place)
    if job.output is None:
        summary = _to_stdout(job)
    elif place is not None:
        summary = workers.ranked(job, job.output, place)
    elif job.processes > 1:
        summary = workers.spawned(job, job.output)
    else:
        summary = _alone(job, job.output)
    if summary is not None:
        tell_all(summary.problems, summary.records)
        if job.summary is not None:
            summary.write(job.summary)
    return summary


def _check(job: Job, place: workers.Place | None) -> None:
    for name, value in (("block", job.block), ("processes", job.processes)):
        if (problem := COUNT.problem(value)) is not None:
            raise CommandError(f"--{name} {value}: {problem}")
    if place is not None and job.processes > 1:
        raise CommandError(f"--processes {job.processes}: RANK is set, so that processes are started by somebody else")
    if job.processes == 1 and place is None:
        return
    if job.output is None:
        raise CommandError("several processes cannot write to standard output; name a file")
    if job.source.once:
        raise CommandError("several processes cannot read standard input, which is there once; name a file")


def _to_stdout(job: Job) -> Summary:
    begin = time.perf_counter()
    journal, meter = Stdout(), Meter(job.source, 0, job.progress)
    try:
        report = Worker(job, Claims.alone(()), journal, {}, meter).run()
    except BrokenPipeError:
        raise SystemExit(1) from None
    finally:
        meter.close()
    return summarise(journal.entries, [report], [], time.perf_counter() - begin)


def _alone(job: Job, output: Path) -> Summary:
    lead = Lead(job, output)
    try:
        if (summary := lead.deliver()) is not None:
            return summary
        claims, meter = Claims.alone(lead.known), Meter(job.source, lead.done, job.progress)
        try:
            report = Worker(job, claims, lead.journal, lead.known, meter).run()
        finally:
            meter.close()
        assert claims.total is not None
        return lead.finish(claims.total, [report], [])
    finally:
        lead.close()
