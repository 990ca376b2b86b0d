"""Batches that several processes translate, each with one thread; what they find comes out in the order of the batches.

Two threads share small matrices badly, and while Python runs between them one thread rests. A process per core that
translates batches of its own leaves no core idle. The processes are forked, so that they have the models in the memory
of this one.
"""

import logging
import os
import pickle
import signal
import sys
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from fairseq import search
from fairseq.sequence_generator import SequenceGenerator

from fastgen.config import settings
from fastgen.ops.processor import usable_cores
from fastgen.patches import _engine
from fastgen.patches.fairseq.bild import asked

_logger = logging.getLogger("fastgen")

BATCHES = 8
"""Batches per process from which several begin by themselves: in the end they wait for the last, half a batch each."""

_ORPHANED = 5.0
"""Seconds after which a process looks whether its parent is still there."""

_Translate = Callable[[Iterator[Any]], Iterator[Any]]


def reason_against(task: Any, generator: Any, models: list[Any]) -> str | None:
    """Why batches must be translated by one process: because something else than speed would differ, or is unproven."""
    own: Any = getattr(type(task).inference_step, "__module__", None)
    kind, of_search = type(generator), type(getattr(generator, "search", None))
    if not sys.platform.startswith("linux"):
        return f"processes are not forked on {sys.platform}"
    if {parameter.device.type for model in models for parameter in model.parameters()} != {"cpu"}:
        return "the model is not on a CPU"
    if not str(own).startswith("fairseq.tasks.") or "inference_step" in vars(task):
        return f"{type(task).__name__} has its own inference_step"
    if not issubclass(kind, SequenceGenerator) or not kind.__module__.startswith("fairseq."):
        return f"{kind.__name__} is no SequenceGenerator of fairseq's"
    if of_search.__module__ != search.__name__ or of_search is search.Sampling:
        return f"{of_search.__name__} may depend on the batches before"
    if any(module.training for model in models for module in model.modules()):
        return "dropout is retained"
    if asked() is not None:
        return "a small model drafts"
    if settings().parity:
        return "FASTGEN_PARITY=1 compares batch by batch"
    return None


def number_for(batches: int, models: list[Any]) -> int:
    """How many processes translate so many batches soonest: one for each thread, or one.

    Several where each has `BATCHES` at least, where it has a core for itself, and where each may hold the weights
    twice more, packed, in half of the memory that is free.
    """
    threads = torch.get_num_threads()
    weights = sum(parameter.nbytes for model in models for parameter in model.parameters())
    fits = threads <= usable_cores() and 4 * threads * weights <= _free_memory()
    return threads if fits and batches >= BATCHES * threads else 1


def _free_memory() -> int:
    """Bytes, as Linux says."""
    lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


@dataclass(frozen=True)
class _Wanted:
    """A process asks for a batch."""


@dataclass(frozen=True)
class _Found:
    """What a process has found for the first of its batches."""

    result: Any


@dataclass(frozen=True)
class _Failed:
    """What came in its place."""

    error: Exception


@dataclass(frozen=True)
class _Ended:
    """A process has translated its last batch; what it counted."""

    counted: Counter[tuple[str, ...]]


@dataclass(eq=False)
class _Worker:
    """A process: the way to it, and its batches with their numbers, in the order in which it got them."""

    process: Any
    connection: Connection
    batches: deque[tuple[int, Any]] = field(default_factory=deque[tuple[int, Any]])


class Workers:
    """Processes that translate batches, forked on entering the context and gone behind it.

    A process that dies, as where memory runs out, costs nothing but time: others translate its batches anew, or in the
    end this one.

    Args:
        translate: yields, for an iterator of batches, what is found for each, in order; it may read ahead.
        number: of processes.
    """

    def __init__(self, translate: _Translate, number: int) -> None:
        self.translate, self.number = translate, number
        self._running: dict[Any, _Worker] = {}  # by connection

    def __enter__(self) -> Self:
        context = get_context("fork")
        for _ in range(self.number):
            ours, theirs = Pipe()
            process = context.Process(target=_work, args=(self.translate, theirs, os.getpid()), daemon=True)
            process.start()
            theirs.close()  # or a process forked later would hold it, and the death of this one go unseen
            self._running[ours] = _Worker(process, ours)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._running.values():
            worker.process.terminate()
            worker.process.join()
        self._running.clear()

    def results(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield what is found for each batch, in order; an exception where it came, in the place of the result."""
        source = _numbered(batches)
        again: list[tuple[int, Any]] = []  # batches of processes that died
        found: dict[int, _Found | _Failed] = {}
        turn = 0
        while self._running:
            for connection in wait(list(self._running)):
                worker = self._running[connection]
                try:
                    message = pickle.loads(worker.connection.recv_bytes())
                    if isinstance(message, _Wanted):
                        self._hand(worker, again, source, found)
                except (EOFError, OSError):
                    again += self._lost(worker)
                    continue
                if isinstance(message, (_Found, _Failed)):
                    found[worker.batches.popleft()[0]] = message
                elif isinstance(message, _Ended):
                    _engine.count_too(message.counted)
                    worker.process.join()
                    del self._running[connection]
            while turn in found:
                yield _result(found.pop(turn))
                turn += 1
        yield from self._rest(turn, again, source, found)

    def _hand(
        self, worker: _Worker, again: list[tuple[int, Any]], source: Iterator[tuple[int, Any]], found: dict[int, Any]
    ) -> None:
        """Hand a batch to a process that asks for one; None where there is none, or nobody would come to see it."""
        over = any(isinstance(message, _Failed) for message in found.values())
        numbered = None if over else again.pop(0) if again else next(source, None)
        if numbered is not None and isinstance(numbered[1], _Failed):
            found[numbered[0]] = numbered[1]
            numbered = None
        if numbered is None:
            _send(worker.connection, None)
            return
        worker.batches.append(numbered)
        _send(worker.connection, numbered[1])

    def _lost(self, worker: _Worker) -> list[tuple[int, Any]]:
        """Give back the batches of a process that has died."""
        del self._running[worker.connection]
        worker.process.join()
        _logger.warning(
            "a process that translated has died (status %s; -9 is often for want of memory): its batches are "
            "translated anew, by %s",
            worker.process.exitcode,
            f"{len(self._running)} others" if self._running else "this process",
        )
        return list(worker.batches)

    def _rest(
        self, turn: int, again: list[tuple[int, Any]], source: Iterator[tuple[int, Any]], found: dict[int, Any]
    ) -> Iterator[Any]:
        """Translate in this process what no other one has."""
        numbers: deque[int] = deque()

        def batches() -> Iterator[Any]:
            for number, batch in chain(sorted(again), source):
                if isinstance(batch, _Failed):
                    found[number] = batch
                    return
                numbers.append(number)
                yield batch

        for result in chain(self.translate(batches()), [None]):
            if numbers:
                found[numbers.popleft()] = _Found(result)
            while turn in found:
                yield _result(found.pop(turn))
                turn += 1


def _numbered(batches: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """Batches with their numbers; what reading one raises is the last."""
    read, i = iter(batches), 0
    while True:
        try:
            yield i, next(read)
        except StopIteration:
            return
        except Exception as error:
            yield i, _Failed(error)
            return
        i += 1


def _result(message: _Found | _Failed) -> Any:
    if isinstance(message, _Failed):
        raise message.error
    return message.result


def _send(connection: Connection, message: Any) -> None:
    connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def _work(translate: _Translate, connection: Connection, parent: int) -> None:
    """The main function of a process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    torch.set_num_threads(1)
    before = _engine.counted()
    try:
        for result in translate(_handed(connection, parent)):
            _send(connection, _Found(result))
    except Exception as error:
        _send(connection, _Failed(_portable(error)))

    _send(connection, _Ended(_engine.counted() - before))


def _handed(connection: Connection, parent: int) -> Iterator[Any]:
    """The batches that this process is handed."""
    while True:
        _send(connection, _Wanted())
        while not connection.poll(_ORPHANED):
            if os.getppid() != parent:
                os._exit(1)
        batch = pickle.loads(connection.recv_bytes())
        if batch is None:
            return
        yield batch


def _portable(error: Exception) -> Exception:
    """An exception as another process can raise it, with a note of where it came from."""
    error.add_note("in a process that translated:\n" + "".join(traceback.format_exception(error)).rstrip())
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:  # of whatever kind: it is somebody's class
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        plain.__notes__ = error.__notes__
        return plain
