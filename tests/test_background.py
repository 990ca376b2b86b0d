"""Work in the background: results in order, failures where the result would have been, nothing left hanging."""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool

import pytest

from fastgen.patches.fairseq.background import InOrder


def _through(
    work: Callable[[int], int], pieces: int, workers: int, found: list[int], then: BaseException | None = None
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


def test_no_thread_stays_behind() -> None:
    before = set(threading.enumerate())
    _through(_fails, 3, 1, [])
    assert set(threading.enumerate()) <= before
