"""Background work whose results are delivered in submission order."""

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
"""Maximum pending work items per worker; beyond it, submitting waits for the oldest one."""


# Linux: the signal that a process receives when the thread that forked it ends.
_PR_SET_PDEATHSIG = 1


class InOrder:
    """Executor that runs `work(piece)` in the background and passes results to `sink`, in order.

    `sink` runs in the caller's thread. An exception of `work` is raised where its result would have
    been passed, with its traceback. If an exception, such as Ctrl-C, leaves the context, pending
    work is dropped.

    Args:
        work: Function of one work item.
        sink: Function of one result.
        workers: 0: run in the caller's thread, immediately; 1: a thread; more: processes, forked on
            the first submission.
    """

    def __init__(
        self, work: Callable[[Any], Any], sink: Callable[[Any], None], workers: int
    ) -> None:
        self.work, self.sink, self.limit = work, sink, _PENDING * workers
        self._executor = _executor(work, workers)
        self._waiting: deque[Future[Any]] = deque()

    def hand_in(self, piece: Any) -> None:
        """Submit a work item, and pass finished results to `sink`."""
        if self._executor is None:
            self.sink(self.work(piece))
            return
        function = self.work if isinstance(self._executor, ThreadPoolExecutor) else _inherited
        self._waiting.append(self._executor.submit(function, piece))
        while self._waiting and (self._waiting[0].done() or len(self._waiting) > self.limit):
            self.sink(self._waiting.popleft().result())

    def finish(self) -> None:
        """Wait for all pending results."""
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


_work: Callable[[Any], Any] | None = None  # set in worker processes


def _executor(work: Callable[[Any], Any], workers: int) -> Executor | None:
    if workers == 0:
        return None
    if workers == 1:
        return ThreadPoolExecutor(1, "fastgen-postprocess")
    from multiprocessing import get_context

    # Forked processes inherit dictionaries and tokenizers, not all of which can be pickled.
    return ProcessPoolExecutor(
        workers, get_context("fork"), initializer=_inherit, initargs=(work, os.getpid())
    )


def _inherit(work: Callable[[Any], Any], parent: int) -> None:
    global _work
    _work = work
    end_with(parent)


def end_with(parent: int) -> None:
    """Make this forked process end when its parent does, and leave Ctrl-C to the parent.

    The parent's main thread must have forked it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _inherited(piece: Any) -> Any:
    assert _work is not None
    return _work(piece)
