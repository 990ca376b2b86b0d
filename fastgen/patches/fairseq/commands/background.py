"""Work in the background whose results come out in the order it was handed in."""

import ctypes
import os
import signal
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

_PENDING = 8
"""Pieces of work per worker that may wait: beyond, handing in another waits for the oldest."""


_PR_SET_PDEATHSIG = (
    1  # of Linux: the signal that a process gets when the thread that forked it has ended
)


class InOrder:
    """Runs `work(piece)` in the background and hands each result to `sink`, in order, in the caller's thread.

    What work raises comes out where the result would have, with its traceback. Left by an exception, as by Ctrl-C, what
    waits is dropped.

    Args:
        workers: 0: at once and in the caller's thread; 1: a thread; more: processes, forked at the first piece.
    """

    def __init__(
        self, work: Callable[[Any], Any], sink: Callable[[Any], None], workers: int
    ) -> None:
        self.work, self.sink, self.limit = work, sink, _PENDING * workers
        self._executor = _executor(work, workers)
        self._waiting: deque[Future[Any]] = deque()

    def hand_in(self, piece: Any) -> None:
        if self._executor is None:
            self.sink(self.work(piece))
            return
        function = self.work if isinstance(self._executor, ThreadPoolExecutor) else _inherited
        self._waiting.append(self._executor.submit(function, piece))
        while self._waiting and (self._waiting[0].done() or len(self._waiting) > self.limit):
            self.sink(self._waiting.popleft().result())

    def finish(self) -> None:
        """Wait for all results."""
        while self._waiting:
            self.sink(self._waiting.popleft().result())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            if self._executor is not None:
                self._executor.shutdown(wait=kind is None, cancel_futures=True)


_work: Callable[[Any], Any] | None = None  # of a worker process


def _executor(work: Callable[[Any], Any], workers: int) -> Executor | None:
    if workers == 0:
        return None
    if workers == 1:
        return ThreadPoolExecutor(1, "fastgen-postprocess")
    from multiprocessing import get_context

    # Forked processes have the dictionaries and tokenizers that this one has, which cannot all be sent.
    return ProcessPoolExecutor(
        workers, get_context("fork"), initializer=_inherit, initargs=(work, os.getpid())
    )


def _inherit(work: Callable[[Any], Any], parent: int) -> None:
    global _work
    _work = work
    end_with(parent)


def end_with(parent: int) -> None:
    """Let this process, which its parent's main thread has forked, end with it, and leave Ctrl-C to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _inherited(piece: Any) -> Any:
    assert _work is not None
    return _work(piece)
