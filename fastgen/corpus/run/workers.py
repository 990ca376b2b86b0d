"""Several processes at one output: started here, or by torchrun and its like on one machine or many.

Each reads the whole source, makes the blocks that it claims, and writes them to a part of its own. Source: PyTorch's
`TCPStore`, which the process that leads holds.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastgen.corpus.models import first_line
from fastgen.corpus.run import store
from fastgen.corpus.run.claims import POLL, Claims, Heart, Pulse
from fastgen.corpus.run.identity import differences
from fastgen.corpus.run.journal import GOES_ON, Journal, Part
from fastgen.corpus.run.lead import Lead, header_of
from fastgen.corpus.run.progress import Meter
from fastgen.corpus.run.store import Store
from fastgen.corpus.run.summary import Report, Summary
from fastgen.corpus.run.worker import BadRecord, Worker
from fastgen.errors import CommandError

if TYPE_CHECKING:
    from fastgen.corpus.run.job import Job

GRACE = 10.0
"""Seconds that processes have to end by themselves when their parent is interrupted."""


@dataclass(frozen=True)
class Place:
    """Where a process stands among those of a run."""

    rank: int
    world: int
    local_rank: int
    local_world: int

    @classmethod
    def of_environment(cls, environ: Mapping[str, str]) -> Place | None:
        """As torchrun says it; None where a process is alone.

        Raises:
            CommandError: a variable is missing or no number.
        """
        if "RANK" not in environ or environ.get("WORLD_SIZE") == "1":
            return None
        missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in environ]
        if missing:
            raise CommandError(f"RANK={environ['RANK']} is set and {', '.join(missing)} not")
        try:
            rank, world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
            return cls(rank, world, int(environ.get("LOCAL_RANK", rank)), int(environ.get("LOCAL_WORLD_SIZE", world)))
        except ValueError as error:
            raise CommandError(f"RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE must be numbers: {error}") from error


def spawned(job: Job, output: Path) -> Summary:
    """Run a job in processes of its own, which this one watches over."""
    lead = Lead(job, output)
    try:
        if (summary := lead.deliver()) is not None:
            return summary
        shared, port = store.held()
        _publish(shared, lead)
        meter = Meter(job.source, lead.done, job.progress)
        context = multiprocessing.get_context("spawn")
        processes = {
            rank: context.Process(target=_spawned, args=(job, output, port, rank), daemon=True)
            for rank in range(job.processes)
        }
        try:
            for process in processes.values():
                process.start()
            lost = _watch(processes, shared, meter)
        except KeyboardInterrupt:
            for process in processes.values():  # they are interrupted too
                process.join(GRACE)
            raise
        finally:
            meter.close()
            for process in processes.values():
                if process.is_alive():
                    process.terminate()
        return lead.finish(_total(shared), _reports(shared, job.processes, lost), list(lost.values()))
    finally:
        lead.close()


def ranked(job: Job, output: Path, place: Place) -> Summary | None:
    """Run a job as one of the processes that somebody else has started; the first one returns the summary."""
    shared = store.found(place.rank, place.world)
    if place.rank:
        _work(job, output, shared, place, header_of(job))
        return None
    try:
        lead = Lead(job, output)
    except CommandError as error:
        shared.set("plan", json.dumps({"error": str(error)}))
        raise
    try:
        if (summary := lead.deliver()) is not None:
            shared.set("plan", json.dumps({"finished": True}))
            _wait(shared, place.world, first=1)  # the store may go with this process
            return summary
        _publish(shared, lead)
        meter = Meter(job.source, lead.done, job.progress)
        try:
            _work(job, output, shared, place, lead.header, meter)
        except CommandError:
            pass  # told below, with those of the others
        finally:
            meter.close()
        lost = _wait(shared, place.world)
        return lead.finish(_total(shared), _reports(shared, place.world, lost), list(lost.values()))
    finally:
        lead.close()


def _publish(shared: Store, lead: Lead) -> None:
    shared.set("plan", json.dumps({"header": lead.header, "known": lead.known}))


def _spawned(job: Job, output: Path, port: int, rank: int) -> None:
    """The main function of a process that `spawned` has started."""
    try:
        _work(job, output, store.joined(port), Place(rank, job.processes, rank, job.processes), None)
    except (CommandError, KeyboardInterrupt):
        sys.exit(1)  # the parent tells


def _work(
    job: Job, output: Path, shared: Store, place: Place, header: dict[str, Any] | None, meter: Meter | None = None
) -> None:
    """Do this process's share of a run, and report.

    header: what this process finds that the output depends on; None where its parent has found it.
    Raises:
        CommandError: it has failed, or the leading process has.
    """
    heart = Heart(shared, place.rank)
    said: dict[str, Any] = {}
    try:
        plan = _plan(shared, header)
        if plan is None:
            said = asdict(Report())
            return
        known = {int(number): digest for number, digest in plan["known"].items()}
        claims = Claims(shared, place.rank, place.world, known)
        journal = Journal(Part(output, str(place.rank)), plan["header"])
        try:
            said = asdict(Worker(_placed(job, place), claims, journal, known, meter).run())
        finally:
            journal.close()
    except Exception as error:
        shared.set("stop", "1")
        told = isinstance(error, CommandError)
        if not told:
            traceback.print_exc()
        message = str(error) if told else f"process {place.rank}: {type(error).__name__}: {first_line(error)}"
        said = {"error": message, "record": error.number if isinstance(error, BadRecord) else None}
        raise CommandError(message) from error
    finally:
        heart.close()  # before the report: behind it the store may go
        if said:
            shared.set(f"report/{place.rank}", json.dumps(said))


def _plan(shared: Store, header: dict[str, Any] | None) -> dict[str, Any] | None:
    """What the leading process says of the run; None where nothing is left to do."""
    while not shared.check(["plan"]):
        time.sleep(POLL)
    plan = json.loads(shared.get("plan"))
    if "error" in plan:
        raise CommandError(plan["error"])
    if "finished" in plan:
        return None
    if header is not None and (changed := differences(plan["header"], header)):
        raise CommandError(f"this process finds other things than the first one: {'; '.join(changed)}")
    return plan


def _placed(job: Job, place: Place) -> Job:
    """The job with a device of this process's own, or its share of the CPU's threads."""
    import torch

    options = job.options
    if options.device in (None, "cuda") and torch.cuda.is_available():
        options = replace(options, device=f"cuda:{place.local_rank % torch.cuda.device_count()}")
    elif options.threads is None and "OMP_NUM_THREADS" not in os.environ:
        options = replace(options, threads=max(1, _cores() // place.local_world))
    return replace(job, options=options)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _watch(processes: Mapping[int, Any], shared: Store, meter: Meter) -> dict[int, str]:
    """Wait until all processes have ended; return how those did that did not report."""
    pulse, lost = Pulse(shared, len(processes)), dict[int, str]()
    alive = dict(processes)
    while alive:
        wait([process.sentinel for process in alive.values()], timeout=0.5)
        meter.show(shared.add("records", 0), shared.add("tokens", 0))
        for rank, process in list(alive.items()):
            if process.exitcode is None:
                continue
            del alive[rank]
            if not shared.check([f"report/{rank}"]):
                pulse.bury(rank)
                lost[rank] = f"process {rank} ended with {_how(process.exitcode)}"
    return lost


def _how(exitcode: int) -> str:
    return f"signal {-exitcode}" if exitcode < 0 else f"status {exitcode}"


def _wait(shared: Store, world: int, first: int = 0) -> dict[int, str]:
    """Wait until all processes from the first on have reported; return those that have gone."""
    pulse, lost = Pulse(shared, world), dict[int, str]()
    for rank in range(first, world):
        while not shared.check([f"report/{rank}"]):
            if pulse.is_gone(rank):
                lost[rank] = f"process {rank} has not been heard of"
                break
            time.sleep(POLL)
    return lost


def _reports(shared: Store, world: int, lost: Mapping[int, str]) -> list[Report]:
    """What all processes have reported.

    Raises:
        CommandError: one of them has failed; where records were bad, with the first of these. Or all are lost.
    """
    said = [json.loads(shared.get(f"report/{rank}")) for rank in range(world) if rank not in lost]
    failed = [one for one in said if "error" in one]
    if failed:
        first = min(failed, key=lambda one: one["record"] if one["record"] is not None else float("-inf"))
        raise CommandError(first["error"])
    if not said:
        raise CommandError(f"{'; '.join(lost.values())}. {GOES_ON}")
    return [Report(**one) for one in said]


def _total(shared: Store) -> int:
    """Blocks of the source; 0 as long as no process has seen its end."""
    return int(shared.get("total")) if shared.check(["total"]) else 0
