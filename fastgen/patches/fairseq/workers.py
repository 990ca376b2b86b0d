"""Batches that several processes translate, each with one thread; what they find comes out in the order of the batches.

Two threads share small matrices badly, and while Python runs between them one thread rests. A process per core that
translates batches of its own leaves no core idle. The processes are forked, so that they have the models in the memory
of this one.
"""

import logging
import math
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
from operator import itemgetter
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
_Numbered = tuple[int, Any]


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


def chosen(command: str, asked: int | None, batches: int, task: Any, generator: Any, models: list[Any]) -> int | str:
    """How many processes are to translate so many batches, or the reason for which one does where several would be
    faster.

    asked: for how many, with `--generate-workers`; None where nothing is said.
    Raises:
        SystemExit: several are asked for, and not possible.
    """
    number = number_for(batches, models) if asked is None else asked
    against = None if number == 1 else reason_against(task, generator, models)
    if against is None:
        return number
    if asked is not None:
        raise SystemExit(f"{command}: --generate-workers {asked} is not possible: {against}")
    return against


def number_for(batches: int, models: list[Any]) -> int:
    """How many processes translate so many batches soonest: one for each thread, or one.

    Several where each has `BATCHES` at least, where it has a core for itself, and where each may hold the weights
    twice more, packed, in half of the memory that is free.
    """
    threads = torch.get_num_threads()
    if threads == 1 or batches < BATCHES * threads or threads > usable_cores():
        return 1
    parameters = [parameter for model in models for parameter in model.parameters()]
    if any(parameter.device.type != "cpu" for parameter in parameters):
        return 1
    return threads if 4 * threads * sum(parameter.nbytes for parameter in parameters) <= _free_memory() else 1


def _free_memory() -> int:
    """Bytes, as Linux says; elsewhere none are known of."""
    table = Path("/proc/meminfo")
    lines = table.read_text("utf-8").splitlines() if table.exists() else ["MemAvailable: 0 kB"]
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
    """A process: the way to it, the batches dealt to it, with their numbers, and those of them that it has got."""

    process: Any
    connection: Connection
    dealt: deque[_Numbered] = field(default_factory=deque[_Numbered])
    got: deque[_Numbered] = field(default_factory=deque[_Numbered])


class Workers:
    """Processes that translate batches, forked on entering the context and gone behind it.

    Batches are dealt in turn, so that each process gets the same ones in every run: what they are computed together
    with, and so the last digits of scores, does not depend on the clock. A process that dies, as where memory runs out,
    costs nothing but time: others translate its batches anew, or in the end this one.

    Args:
        translate: yields, for an iterator of batches, what is found for each, in order; it may read ahead.
        number: of processes.
    """

    def __init__(self, translate: _Translate, number: int) -> None:
        self.translate, self.number = translate, number
        self._running: dict[Any, _Worker] = {}  # by connection
        self._places: list[_Worker] = []  # in which batches are dealt
        self._asking: list[_Worker] = []  # who asks for batches that are still to come
        self._again = deque[_Numbered]()  # batches of processes that died
        self._found: dict[int, _Found | _Failed] = {}

    def __enter__(self) -> Self:
        context = get_context("fork")
        for _ in range(self.number):
            ours, theirs = Pipe()
            process = context.Process(target=_work, args=(self.translate, theirs, os.getpid()), daemon=True)
            process.start()
            theirs.close()  # or a process forked later would hold it, and the death of this one go unseen
            self._running[ours] = _Worker(process, ours)
        self._places = list(self._running.values())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._running:
            for _ in self.results([]):  # they end, and say what they have counted
                pass
        for worker in self._running.values():
            worker.process.terminate()
            worker.process.join()
        self._running.clear()

    def results(self, batches: Iterable[Any], more: bool = False) -> Iterator[Any]:
        """Yield what is found for each batch, in order; an exception where it came, in the place of the result.

        more: whether others come later, in another call; then `translate` must yield each result before it asks on.
        """
        source, turn = _numbered(batches), 0
        asking, self._asking = self._asking, []
        for worker in asking:
            self._answer(worker, source, more)
        while len(self._asking) < len(self._running):
            for connection in wait(list(self._running)):
                self._hear(self._running[connection], source, more)
            while turn in self._found:
                yield _result(self._found.pop(turn))
                turn += 1
        yield from self._rest(turn, source)

    def _hear(self, worker: _Worker, source: Iterator[_Numbered], more: bool) -> None:
        """Take a message of a process, and give what it asks for."""
        try:
            message = pickle.loads(worker.connection.recv_bytes())
        except (EOFError, OSError):
            self._lose(worker)
            return
        if isinstance(message, _Wanted):
            self._answer(worker, source, more)
        elif isinstance(message, (_Found, _Failed)):
            self._found[worker.got.popleft()[0]] = message
        elif isinstance(message, _Ended):
            _engine.count_too(message.counted)
            worker.process.join()
            del self._running[worker.connection]

    def _answer(self, worker: _Worker, source: Iterator[_Numbered], more: bool) -> None:
        """Give a process the batch that it asks for, or None where none comes any more."""
        numbered = self._next_for(worker, source)
        if numbered is None and more:
            self._asking.append(worker)
            return
        if numbered is not None:
            worker.got.append(numbered)
        try:
            _send(worker.connection, None if numbered is None else numbered[1])
        except OSError:
            self._lose(worker)

    def _next_for(self, worker: _Worker, source: Iterator[_Numbered]) -> _Numbered | None:
        """The next batch of a process; None where there is none, or only such as nobody would come to see."""
        while not worker.dealt and self._failed == math.inf and (numbered := next(source, None)) is not None:
            number, batch = numbered
            if isinstance(batch, _Failed):
                self._found[number] = batch
                break
            place = self._places[number % self.number]
            (place.dealt if place.connection in self._running else self._again).append(numbered)
        for waiting in (worker.dealt, self._again):
            if waiting and waiting[0][0] < self._failed:
                return waiting.popleft()
        return None

    @property
    def _failed(self) -> float:
        """The number of the first batch in whose place an exception came; infinite where none has."""
        failed = (number for number, message in self._found.items() if isinstance(message, _Failed))
        return min(failed, default=math.inf)

    def _lose(self, worker: _Worker) -> None:
        """Have the batches of a process that has died translated by others."""
        del self._running[worker.connection]
        worker.process.join()
        self._again = deque(sorted([*self._again, *worker.got, *worker.dealt], key=itemgetter(0)))
        _logger.warning(
            "a process that translated has died (status %s; -9 is often for want of memory); what it had in hand is "
            "translated anew",
            worker.process.exitcode,
        )

    def _rest(self, turn: int, source: Iterator[_Numbered]) -> Iterator[Any]:
        """Translate in this process what no other one has."""
        numbers: deque[int] = deque()
        again, self._again = self._again, deque[_Numbered]()

        def batches() -> Iterator[Any]:
            for number, batch in chain(again, source):
                if isinstance(batch, _Failed):
                    self._found[number] = batch
                    return
                numbers.append(number)
                yield batch

        for result in chain(self.translate(batches()), [None]):
            if numbers:
                self._found[numbers.popleft()] = _Found(result)
            while turn in self._found:
                yield _result(self._found.pop(turn))
                turn += 1


def _numbered(batches: Iterable[Any]) -> Iterator[_Numbered]:
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
