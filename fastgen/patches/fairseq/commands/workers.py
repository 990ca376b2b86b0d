"""Translation by several processes with one thread each; results come in the order of the batches.

Two threads share small matrix products badly, and all but one idle while Python runs. A process per
core that translates its own batches keeps every core busy. The processes are forked, and so share
the memory of the models.
"""

import errno
import logging
import math
import os
import pickle
import sys
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing import Pipe, current_process, get_context
from multiprocessing.connection import Connection, wait
from operator import itemgetter
from types import TracebackType
from typing import Any, Self

import torch
from fairseq import search
from fairseq.sequence_generator import SequenceGenerator

from fastgen.config import settings
from fastgen.models.memory.budget import system_memory
from fastgen.models.memory.scratch import is_out_of_memory
from fastgen.ops.processor import usable_cores
from fastgen.patches.engine import engine
from fastgen.patches.fairseq.bild.bild import requested
from fastgen.patches.fairseq.commands.background import end_with

_logger = logging.getLogger("fastgen")

BATCHES = 8
"""Batches per process from which several processes are the default.

At the end processes wait for the last one, half a batch each on average.
"""

LEAD = 32
"""Maximum batches that wait for a process while others are idle; then the others wait for it."""


_Translate = Callable[[Iterator[Any]], Iterator[Any]]
_Numbered = tuple[int, "bytes | _Failed"]


def reason_against(task: Any, generator: Any, models: list[Any]) -> str | None:
    """Return why one process has to translate all batches; None if several may.

    The reasons are cases in which the output would differ, or may differ.
    """
    defined_in: Any = getattr(type(task).inference_step, "__module__", None)
    kind, search_type = type(generator), type(getattr(generator, "search", None))
    if not sys.platform.startswith("linux"):
        return f"processes are not forked on {sys.platform}"
    if current_process().daemon:
        return "this process is a daemon of another, and may start none"
    if {parameter.device.type for model in models for parameter in model.parameters()} != {"cpu"}:
        return "the model is not on a CPU"
    if not str(defined_in).startswith("fairseq.tasks.") or "inference_step" in vars(task):
        return f"{type(task).__name__} has its own inference_step"
    if not issubclass(kind, SequenceGenerator) or not kind.__module__.startswith("fairseq."):
        return f"{kind.__name__} is no SequenceGenerator of fairseq's"
    if search_type.__module__ != search.__name__ or search_type is search.Sampling:
        return f"{search_type.__name__} may depend on the batches before"
    if any(module.training for model in models for module in model.modules()):
        return "dropout is retained"
    if requested() is not None:
        return "a small model drafts"
    if settings().parity:
        return "FASTGEN_PARITY=1 compares batch by batch"
    return None


def _reason_unless_requested(models: list[Any]) -> str | None:
    """Return why several processes are not the default here; None if they may be.

    The output might differ, as far as can be told. `--generate-workers` overrides this.
    """
    if threading.active_count() > 1:
        return "other threads of this process may hold a lock"
    for module in (module for model in models for module in model.modules()):
        if not type(module).__module__.startswith(("fairseq.", "torch.")):
            return f"{type(module).__name__} may depend on the batches before"
    return None


def chosen(
    command: str,
    number_requested: int | None,
    batches: int,
    task: Any,
    generator: Any,
    models: list[Any],
) -> int | str:
    """Choose the number of processes.

    Args:
        command: Name of the command, with which messages start.
        number_requested: The value of `--generate-workers`; None if it is not set.
        batches: Number of batches.
        task: fairseq's task.
        generator: fairseq's generator.
        models: All models, a language model included.

    Returns:
        The number of processes; or the reason why a single one is used although several would be
        faster.

    Raises:
        SystemExit: Several processes are requested and not possible.
    """
    number = number_for(batches, models) if number_requested is None else number_requested
    if number == 1:
        return 1
    against = reason_against(task, generator, models)
    if number_requested is not None and against is not None:
        raise SystemExit(
            f"{command}: --generate-workers {number_requested} is not possible: {against}"
        )
    against = against or (_reason_unless_requested(models) if number_requested is None else None)
    return against or number


def number_for(batches: int, models: list[Any]) -> int:
    """Return the fastest number of processes for so many batches: one per thread, or one.

    Several are used if each gets at least `BATCHES` batches and a core of its own, and if half of
    the free memory can hold the weights twice more, packed, for each.
    """
    threads = torch.get_num_threads()
    if threads == 1 or batches < BATCHES * threads or threads > usable_cores():
        return 1
    parameters = [parameter for model in models for parameter in model.parameters()]
    if any(parameter.device.type != "cpu" for parameter in parameters):
        return 1
    system = system_memory()
    free = 0 if system is None else system.available
    return threads if 4 * threads * sum(parameter.nbytes for parameter in parameters) <= free else 1


@dataclass(frozen=True)
class _Wanted:
    """Message: a process requests a batch."""


@dataclass(frozen=True)
class _Found:
    """Message: the result of the oldest batch that a process holds."""

    result: Any


@dataclass(frozen=True)
class _Failed:
    """Message: an exception instead of a result."""

    error: Exception


@dataclass(frozen=True)
class _Ended:
    """Message: a process has translated its last batch; with the calls that it counted."""

    counted: Counter[tuple[str, ...]]


@dataclass(eq=False)
class _Worker:
    """A worker process.

    Attributes:
        process: The process.
        connection: Connection to it.
        dealt: Numbered batches that are reserved for it.
        got: Numbered batches that it has received and not finished.
    """

    process: Any
    connection: Connection
    dealt: deque[_Numbered] = field(default_factory=deque[_Numbered])
    got: deque[_Numbered] = field(default_factory=deque[_Numbered])


class Workers:
    """Worker processes that translate batches, forked on entering the context.

    Batches are dealt in turn, so that each process gets the same batches in every run. Results,
    down to the last digits of scores, therefore do not depend on timing. If a process dies, for
    example when memory runs out, other processes translate its batches again, or finally this one.

    Args:
        translate: Yields the result of each batch of an iterator, in order; it may read ahead.
        number: Number of processes.
    """

    def __init__(self, translate: _Translate, number: int) -> None:
        self.translate, self.number = translate, number
        self._running: dict[Any, _Worker] = {}  # by connection
        self._places: list[_Worker] = []  # in the order in which batches are dealt
        self._asking: list[_Worker] = []  # workers that have requested a batch
        self._again = deque[_Numbered]()  # batches of processes that died
        self._found: dict[int, _Found | _Failed] = {}

    def __enter__(self) -> Self:
        context = get_context("fork")
        try:
            for _ in range(self.number):
                connection, worker_end = Pipe()
                process = context.Process(
                    target=_work, args=(self.translate, worker_end, os.getpid()), daemon=True
                )
                process.start()
                # Processes forked later would inherit it and hide the death of this one.
                worker_end.close()
                self._running[connection] = _Worker(process, connection)
        except OSError as error:
            _logger.warning(
                "%d of %d processes translate: %s", len(self._running), self.number, error
            )
        self._places = list(self._running.values())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None and self._running:
                for _ in self.results([]):  # the processes end, and report what they counted
                    pass
        finally:
            for worker in self._running.values():
                worker.process.terminate()
                worker.process.join()
            self._running.clear()

    def results(self, batches: Iterable[Any], more: bool = False) -> Iterator[Any]:
        """Yield the result of each batch, in order.

        An exception is raised in place of its batch's result.

        Args:
            batches: The batches.
            more: Whether a later call passes further batches. `translate` must then yield each
                result before it requests the next batch.
        """
        source, turn = _numbered(batches), 0
        self._serve(source, more)
        while len(self._asking) < len(self._running):
            for connection in wait(list(self._running)):
                self._hear(self._running[connection])
            while turn in self._found:
                yield _result(self._found.pop(turn))
                turn += 1
            self._serve(source, more)
        yield from self._rest(turn, source)

    def _hear(self, worker: _Worker) -> None:
        """Receive a message of a process, or record that it has died."""
        try:
            message = pickle.loads(worker.connection.recv_bytes())
        except (EOFError, OSError):
            self._lose(worker)
            return
        if isinstance(message, _Wanted):
            self._asking.append(worker)
        elif isinstance(message, _Ended):
            engine.merge_counts(message.counted)
            worker.process.join()
            self._take_out(worker)
        elif worker.got:
            self._found[worker.got.popleft()[0]] = message
        else:  # an error before the first batch or after the last one
            raise message.error

    def _serve(self, source: Iterator[_Numbered], more: bool) -> None:
        """Send a batch to each process that requested one, or tell it that there are no more."""
        for worker in tuple(self._asking):
            waits = self._deal(worker, source) or more
            numbered = next(
                (q.popleft() for q in (worker.dealt, self._again) if q and q[0][0] < self._failed),
                None,
            )
            if numbered is None and waits:
                continue
            self._asking.remove(worker)
            batch = b""
            if numbered is not None:
                worker.got.append(numbered)
                assert isinstance(numbered[1], bytes)
                batch = numbered[1]
            try:
                worker.connection.send_bytes(batch)
            except OSError:
                self._lose(worker)

    def _deal(self, worker: _Worker, source: Iterator[_Numbered]) -> bool:
        """Read batches until one is dealt to this process.

        Returns:
            Whether the process has to wait because another one is too far behind.
        """
        while not worker.dealt and self._failed == math.inf:
            if max(len(each.dealt) for each in self._running.values()) >= LEAD:
                return True
            numbered = next(source, None)
            if numbered is None:
                return False
            number, batch = numbered
            if isinstance(batch, _Failed):
                self._found[number] = batch
                return False
            place = self._places[number % len(self._places)]
            (place.dealt if place.connection in self._running else self._again).append(numbered)
        return False

    @property
    def _failed(self) -> float:
        """The number of the first batch that raised an exception; infinity if there is none."""
        failed = (number for number, message in self._found.items() if isinstance(message, _Failed))
        return min(failed, default=math.inf)

    def _lose(self, worker: _Worker) -> None:
        """Requeue the batches of a process that has died."""
        worker.process.join()
        self._take_out(worker)
        _logger.warning(
            "a process that translated has died (status %s; -9 and %s mean that memory ran out): "
            "what it had in hand is translated anew",
            worker.process.exitcode,
            errno.ENOMEM,
        )

    def _take_out(self, worker: _Worker) -> None:
        del self._running[worker.connection]
        worker.connection.close()
        self._asking = [other for other in self._asking if other is not worker]
        self._again = deque(sorted([*self._again, *worker.got, *worker.dealt], key=itemgetter(0)))

    def _rest(self, turn: int, source: Iterator[_Numbered]) -> Iterator[Any]:
        """Translate the remaining batches in this process."""
        numbers: deque[int] = deque()
        again, self._again = self._again, deque[_Numbered]()

        def batches() -> Iterator[Any]:
            for number, batch in chain(again, source):
                if isinstance(batch, _Failed):
                    self._found[number] = batch
                if number >= self._failed or isinstance(batch, _Failed):
                    return
                numbers.append(number)
                yield pickle.loads(batch)

        for result in chain(self.translate(batches()), [None]):
            if numbers:
                self._found[numbers.popleft()] = _Found(result)
            while turn in self._found:
                yield _result(self._found.pop(turn))
                turn += 1


def _numbered(batches: Iterable[Any]) -> Iterator[_Numbered]:
    """Yield batches with their numbers, pickled; an exception of the iterator is the last item.

    Unpickled tensors of fairseq's data loaders would hold files open.
    """
    read, i = iter(batches), 0
    while True:
        try:
            batch = pickle.dumps(next(read), pickle.HIGHEST_PROTOCOL)
        except StopIteration:
            return
        except Exception as error:
            yield i, _Failed(error)
            return
        yield i, batch
        i += 1


def _result(message: _Found | _Failed) -> Any:
    if isinstance(message, _Failed):
        raise message.error
    return message.result


def _work(translate: _Translate, connection: Connection, parent: int) -> None:
    """Main function of a worker process."""
    end_with(parent)
    torch.set_num_threads(1)
    before = engine.counted()
    try:
        for result in translate(_handed(connection)):
            _send(connection, _Found(result))
    except Exception as error:
        if isinstance(error, MemoryError) or is_out_of_memory(error):
            os._exit(errno.ENOMEM)  # frees this process's memory for the others
        _send(connection, _Failed(_portable(error)))
    _send(connection, _Ended(engine.counted() - before))


def _handed(connection: Connection) -> Iterator[Any]:
    """Yield the batches sent to this process, until an empty message."""
    while True:
        _send(connection, _Wanted())
        batch = connection.recv_bytes()
        if not batch:
            return
        yield pickle.loads(batch)


def _send(connection: Connection, message: Any) -> None:
    connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def _portable(error: Exception) -> Exception:
    """Return an exception that another process can raise, with a note of its origin."""
    error.add_note(
        "in a process that translated:\n" + "".join(traceback.format_exception(error)).rstrip()
    )
    try:
        copied: Exception = pickle.loads(pickle.dumps(error))
    except Exception:  # a user's exception class may fail in any way
        copied = RuntimeError(f"{type(error).__name__}: {error}")
    copied.__notes__ = error.__notes__
    return copied
