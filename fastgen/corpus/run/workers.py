"""Several processes at one output, on one machine: this one reads blocks, sends them out, and writes what comes back.

A process asks for a block when it has room for one, and sends what it has made in the order in which it asked. It
touches no file and holds no lock: where it dies, its blocks are sent to others.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from fastgen.corpus.models import first_line
from fastgen.corpus.run.blocks import Block
from fastgen.corpus.run.journal import GOES_ON, Entry
from fastgen.corpus.run.summary import Report
from fastgen.corpus.run.worker import Append, Worker
from fastgen.errors import CommandError

if TYPE_CHECKING:
    from fastgen.corpus.run.job import Job

WINDOW = 16
"""Blocks for each process, from the first that is not written to the last that is sent out."""


def run(job: Job, blocks: Iterator[Block], append: Append) -> tuple[list[Report], list[str]]:
    """Have processes make all of these blocks, and append them in their order.

    Returns:
        What processes report, and how those have ended that do not.
    Raises:
        CommandError: one of them has failed, and what was read before is appended; or all have died.
    """
    return _Run(job, blocks, append).run()


@dataclass
class _Process:
    """A process as its parent knows it.

    Attributes:
        asks: whether it waits for a block.
        blocks: what it has been sent and has not sent back, in that order.
        ended: whether it has reported, or said why it has failed.
    """

    number: int
    process: Any
    asks: bool = False
    blocks: deque[Block] = field(default_factory=deque[Block])
    ended: bool = False


class _Run:
    def __init__(self, job: Job, blocks: Iterator[Block], append: Append) -> None:
        self.job, self.blocks, self.append = job, blocks, append
        self.processes: dict[Connection, _Process] = {}
        self.read_all = False
        self.sent = deque[
            int
        ]()  # numbers of blocks that were sent out and are not written, as they rise
        self.made: dict[int, tuple[bytes, Entry]] = {}  # of these
        self.again: list[Block] = []  # of these, those of processes that have died
        self.errors: list[
            tuple[float, Exception]
        ] = []  # with the number of the block that is the first to be missing
        self.reports: list[Report] = []
        self.lost: list[str] = []

    def run(self) -> tuple[list[Report], list[str]]:
        try:
            self._start()
            while self.processes and not (self.errors and self._is_done()):
                heard = wait(list(self.processes))
                for connection in [one for one in self.processes if one in heard]:
                    self._hear(connection, self.processes[connection])
                while self.sent and self.sent[0] in self.made:
                    self.append(*self.made.pop(self.sent.popleft()))
                self._answer()
        finally:
            for one in self.processes.values():
                one.process.kill()
                one.process.join()
        if self.errors:
            raise min(self.errors, key=lambda one: one[0])[1]
        if not self._is_done():
            raise CommandError(f"{'; '.join(self.lost)}. {GOES_ON}")
        return self.reports, self.lost

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        for number in range(self.job.processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(self.job, number, theirs), daemon=True)
            process.start()
            theirs.close()  # so that the end of the process is the end of what is heard of it
            self.processes[ours] = _Process(number, process)

    def _is_done(self) -> bool:
        """Whether all is written, or all before the first block that cannot be made."""
        end = min((number for number, _ in self.errors), default=math.inf)
        return self.read_all and (not self.sent or self.sent[0] >= end)

    def _hear(self, connection: Connection, one: _Process) -> None:
        try:
            said = connection.recv()
        except (EOFError, OSError):
            del self.processes[connection]
            one.process.join()
            if not one.ended:
                self.lost.append(f"process {one.number} ended with {_how(one.process.exitcode)}")
                self.again = sorted([*self.again, *one.blocks], key=lambda block: block.number)
            return
        if said is None:
            one.asks = True
        elif isinstance(said, Report):
            one.ended = True
            self.reports.append(said)
        elif isinstance(said, str):
            one.ended, one.asks = True, False
            self._fail(one.blocks[0].number if one.blocks else -1, CommandError(said))
        else:
            self.made[one.blocks.popleft().number] = said

    def _answer(self) -> None:
        for connection, one in self.processes.items():
            if not one.asks:
                continue
            block = self._next()
            if block is None and not self._is_done():
                return  # somebody may die, and leave blocks
            one.asks = False
            if block is not None:
                one.blocks.append(block)
            with suppress(OSError):  # it has died, which will be heard
                connection.send(block)

    def _next(self) -> Block | None:
        """What is to be made next; None where there is nothing, or nothing yet."""
        if self.again:
            return self.again.pop(0)
        if self.read_all or len(self.sent) >= WINDOW * self.job.processes:
            return None
        try:
            block = next(self.blocks, None)
        except Exception as error:
            self._fail(math.inf, error)
            return None
        if block is None:
            self.read_all = True
        else:
            self.sent.append(block.number)
        return block

    def _fail(self, number: float, error: Exception) -> None:
        self.errors.append((number, error))
        self.read_all = True


def _how(exitcode: int) -> str:
    return f"signal {-exitcode}" if exitcode < 0 else f"status {exitcode}"


def _work(job: Job, number: int, connection: Connection) -> None:
    """The main function of a process: sends None to ask for a block, what it has made of one, and in the end its
    report, or the message of its failure."""
    from transformers.utils import logging

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent ends it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    logging.disable_progress_bar()  # those of several processes would write over each other
    sending = threading.Lock()

    def send(what: Any) -> None:
        with sending:
            connection.send(what)

    def ask() -> Block | None:
        send(None)
        return connection.recv()

    try:
        said = Worker(_placed(job, number)).run(iter(ask, None), lambda *made: send(made))
    except CommandError as error:
        said = str(error)
    except Exception as error:
        traceback.print_exc()
        said = f"process {number}: {type(error).__name__}: {first_line(error)}"
    send(said)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _placed(job: Job, number: int) -> Job:
    """The job with a device of this process's own, or its share of the CPU's threads."""
    import torch

    options = job.options
    if options.device in (None, "cuda") and torch.cuda.is_available():
        options = replace(options, device=f"cuda:{number % torch.cuda.device_count()}")
    elif options.threads is None and "OMP_NUM_THREADS" not in os.environ:
        options = replace(options, threads=max(1, _cores() // job.processes))
    return replace(job, options=options)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
