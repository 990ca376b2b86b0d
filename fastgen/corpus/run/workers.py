"""Several worker processes on one machine for one output.

This process reads blocks, sends them to the workers, and writes what they return. A worker requests
a block when it has room for one, and returns its results in the order of its requests. It touches
no file and holds no lock; if it dies, its blocks are sent to others.
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
"""The most blocks in flight for each process, from the first unwritten one to the last one sent."""


def run(job: Job, blocks: Iterator[Block], append: Append) -> tuple[list[Report], list[str]]:
    """Generate all blocks in worker processes and append them in order.

    Returns:
        The processes' reports, and how processes without a report ended.

    Raises:
        CommandError: a process has failed, after the blocks before the failure are appended; or all
            processes have died.
    """
    return _Run(job, blocks, append).run()


@dataclass
class _Process:
    """A worker process as its parent sees it.

    Attributes:
        number: its index.
        process: the multiprocessing process.
        is_waiting: whether it waits for a block.
        blocks: blocks that it has received and not returned, in order.
        ended: whether it has sent its report, or the message of its failure.
    """

    number: int
    process: Any
    is_waiting: bool = False
    blocks: deque[Block] = field(default_factory=deque[Block])
    ended: bool = False


class _Run:
    def __init__(self, job: Job, blocks: Iterator[Block], append: Append) -> None:
        self.job, self.blocks, self.append = job, blocks, append
        self.processes: dict[Connection, _Process] = {}
        self.read_all = False
        # Numbers of the blocks that were sent and are not written yet, in ascending order.
        self.sent = deque[int]()
        self.made: dict[int, tuple[bytes, Entry]] = {}  # results for these
        self.again: list[Block] = []  # those of these that dead processes have left
        # Errors, each with the number of the first block that is missing because of it.
        self.errors: list[tuple[float, Exception]] = []
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
            parent_end, child_end = context.Pipe()
            process = context.Process(target=_work, args=(self.job, number, child_end), daemon=True)
            process.start()
            child_end.close()  # so that `recv` raises EOFError once the process has ended
            self.processes[parent_end] = _Process(number, process)

    def _is_done(self) -> bool:
        """Return whether everything is written, up to the first block that cannot be generated."""
        end = min((number for number, _ in self.errors), default=math.inf)
        return self.read_all and (not self.sent or self.sent[0] >= end)

    def _hear(self, connection: Connection, one: _Process) -> None:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            del self.processes[connection]
            one.process.join()
            if not one.ended:
                self.lost.append(f"process {one.number} ended with {_how(one.process.exitcode)}")
                self.again = sorted([*self.again, *one.blocks], key=lambda block: block.number)
            return
        if message is None:
            one.is_waiting = True
        elif isinstance(message, Report):
            one.ended = True
            self.reports.append(message)
        elif isinstance(message, str):
            one.ended, one.is_waiting = True, False
            self._fail(one.blocks[0].number if one.blocks else -1, CommandError(message))
        else:
            self.made[one.blocks.popleft().number] = message

    def _answer(self) -> None:
        for connection, one in self.processes.items():
            if not one.is_waiting:
                continue
            block = self._next()
            if block is None and not self._is_done():
                return  # another process may die and leave blocks
            one.is_waiting = False
            if block is not None:
                one.blocks.append(block)
            with suppress(OSError):  # it has died, which `_hear` will notice
                connection.send(block)

    def _next(self) -> Block | None:
        """Return the next block to send; None if there is none, or none yet."""
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
    """Run a worker process.

    It sends None to request a block, then the block's result and, at the end, its report or the
    message of its failure.
    """
    from transformers.utils import logging

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    logging.disable_progress_bar()  # bars of several processes would overwrite each other
    sending = threading.Lock()

    def send(what: Any) -> None:
        with sending:
            connection.send(what)

    def ask() -> Block | None:
        send(None)
        return connection.recv()

    try:
        message = Worker(_placed(job, number)).run(iter(ask, None), lambda *made: send(made))
    except CommandError as error:
        message = str(error)
    except Exception as error:
        traceback.print_exc()
        message = f"process {number}: {type(error).__name__}: {first_line(error)}"
    send(message)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _placed(job: Job, number: int) -> Job:
    """Return the job with a device of this process's own, or its share of the CPU's threads."""
    import torch

    options = job.options
    if options.device in (None, "cuda") and torch.cuda.is_available():
        options = replace(options, device=f"cuda:{number % torch.cuda.device_count()}")
    elif options.threads is None and "OMP_NUM_THREADS" not in os.environ:
        options = replace(options, threads=max(1, _cores() // job.processes))
    return replace(job, options=options)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
