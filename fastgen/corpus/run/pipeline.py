"""Three concurrent stages, in order: a thread reads ahead, the caller generates, a thread writes.

An exception in any stage ends the run and is raised in the caller's thread, after the finished
items are written.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from queue import Full, Queue
from typing import Generic, TypeVar

T = TypeVar("T")
S = TypeVar("S")

DEPTH = 2
"""The most items that wait between two stages."""


@dataclass
class Waits:
    """Seconds in which nothing was generated.

    Attributes:
        reading: seconds of waiting for input.
        writing: seconds of waiting for the writer.
    """

    reading: float = 0.0
    writing: float = 0.0


def run(
    items: Iterable[T], make: Callable[[T], S], write: Callable[[S], None], waits: Waits
) -> None:
    """Write what `make` returns for each item.

    Args:
        items: iterated in a thread, up to `DEPTH` items ahead.
        make: called in this thread.
        write: called in a thread, item after item; not called again after it has failed.
        waits: times are added to it.
    """
    reader, writer = _ReadAhead(items), _WriteBehind(write)
    begin = time.perf_counter()
    try:
        for item in reader:
            waits.reading += time.perf_counter() - begin
            output = make(item)
            begin = time.perf_counter()
            writer.put(output)
            waits.writing += time.perf_counter() - begin
            begin = time.perf_counter()
        waits.reading += time.perf_counter() - begin
    finally:
        reader.close()
        begin = time.perf_counter()
        writer.close()
        waits.writing += time.perf_counter() - begin


class _ReadAhead(Generic[T]):
    """Iterator in a daemon thread, so that a source that blocks forever does not block the exit."""

    def __init__(self, items: Iterable[T]) -> None:
        self._queue: Queue[tuple[list[T], BaseException | None]] = Queue(DEPTH)
        self._closed = threading.Event()
        threading.Thread(
            target=self._fill, args=(items,), name="fastgen-reading", daemon=True
        ).start()

    def __iter__(self) -> Iterator[T]:
        while True:
            items, error = self._queue.get()
            if error is not None:
                raise error
            if not items:
                return
            yield items[0]

    def close(self) -> None:
        self._closed.set()

    def _fill(self, items: Iterable[T]) -> None:
        try:
            for item in items:
                self._put(([item], None))
                if self._closed.is_set():
                    return
            self._put(([], None))
        except BaseException as error:
            self._put(([], error))

    def _put(self, what: tuple[list[T], BaseException | None]) -> None:
        while not self._closed.is_set():
            try:
                self._queue.put(what, timeout=0.1)
            except Full:
                continue
            return


class _WriteBehind(Generic[S]):
    """Writer in a thread."""

    def __init__(self, write: Callable[[S], None]) -> None:
        self._write = write
        self._queue: Queue[list[S]] = Queue(DEPTH)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._drain, name="fastgen-writing", daemon=True)
        self._thread.start()

    def put(self, item: S) -> None:
        if self._error is not None:
            raise self._error
        self._queue.put([item])

    def close(self) -> None:
        """Wait until everything is written; raise the thread's exception, if any."""
        self._queue.put([])
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _drain(self) -> None:
        while item := self._queue.get():
            # Nothing is written after a failure, so that the output has no gap.
            if self._error is None:
                try:
                    self._write(item[0])
                except BaseException as error:
                    self._error = error
