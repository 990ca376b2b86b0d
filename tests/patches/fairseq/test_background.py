"""Check background post-processing: order of results, order of failures, and cleanup."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from fastgen.patches.fairseq.commands.background import InOrder


def _through(
    work: Callable[[int], int],
    pieces: int,
    workers: int,
    found: list[int],
    then: BaseException | None = None,
) -> None:
    with InOrder(work, found.append, workers) as background:
        for piece in range(pieces):
            background.hand_in(piece)
        if then is not None:
            raise then


def _slow_at_first(piece: int) -> int:
    time.sleep(0.02 if piece < 3 else 0)
    return piece * piece


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_order(workers: int) -> None:
    found: list[int] = []
    _through(_slow_at_first, 60, workers, found)
    assert found == [piece * piece for piece in range(60)]


@pytest.mark.parametrize("workers", [1, 2])
def test_no_more_than_a_few_wait(workers: int) -> None:
    found: list[int] = []
    with InOrder(_slow_at_first, found.append, workers) as background:
        for piece in range(100):
            background.hand_in(piece)
            assert piece - len(found) <= background.limit


def _fails(piece: int) -> int:
    if piece == 5:
        raise ValueError(f"piece {piece}")
    return piece


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_failure_comes_out_in_its_place(workers: int) -> None:
    found: list[int] = []
    with pytest.raises(ValueError, match="piece 5"):
        _through(_fails, 100, workers, found)
    assert found == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupt_ends_at_once(workers: int) -> None:
    found: list[int] = []
    began = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        _through(_long, 8, workers, found, KeyboardInterrupt())
    assert time.perf_counter() - began < 2
    assert len(found) < 8


def test_processes_leave_ctrl_c_to_their_parent() -> None:
    """A terminal sends SIGINT to the whole process group; each worker would print a traceback."""
    found: list[int] = []
    with InOrder(_interrupted, found.append, 2) as background:
        for piece in range(4):
            background.hand_in(piece)
    assert found == [0, 1, 2, 3]


def _interrupted(piece: int) -> int:
    os.kill(os.getpid(), signal.SIGINT)
    return piece


def _long(piece: int) -> int:
    time.sleep(0.5)
    return piece


def test_a_worker_that_dies_ends_the_run() -> None:
    with pytest.raises(BrokenProcessPool, match="abruptly"):
        _through(_dies, 20, 2, [])


def _dies(piece: int) -> int:
    if piece == 3:
        os._exit(1)
    return piece


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_who_has_forked_it(how: signal.Signals) -> None:
    """A scheduler that ends a run sends such a signal."""
    code = (
        "import multiprocessing as m, time\n"
        "from fastgen.patches.fairseq.commands.background import InOrder\n"
        "with InOrder(time.sleep, print, 2) as background:\n"
        "    background.hand_in(0), background.hand_in(60)\n"
        "    print(*(p.pid for p in m.active_children()), flush=True)\n"
        "    background.finish()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        forked = next(line.split() for line in parent.stdout if "None" not in line)
        parent.send_signal(how)
    assert len(forked) == 2
    ended = time.monotonic() + 5
    while any(_runs(process) for process in forked) and time.monotonic() < ended:
        time.sleep(0.02)
    assert not any(_runs(process) for process in forked)


def _runs(process: str) -> bool:
    try:
        state = Path("/proc", process, "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # a zombie is dead, but not yet reaped


def test_no_thread_stays_behind() -> None:
    before = set(threading.enumerate())
    _through(_fails, 3, 1, [])
    assert set(threading.enumerate()) <= before
