"""Who makes which block: processes take numbers from a counter that all share, and the blocks of those that are gone.

What is claimed twice is made twice, with the same bytes, and written once (`assembly.py`): claims save work, nothing
depends on them.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Collection, Iterator
from typing import Self

from fastgen.corpus.run import store
from fastgen.corpus.run.store import Store
from fastgen.errors import CommandError

BEAT = 1.0
"""Seconds between two signs of life of a process."""

LEASE = 60.0
"""Seconds without one behind which a process is taken to be gone."""

POLL = 0.1


class Claims:
    """The numbers of blocks that this process is to make, in the order in which it is to read them.

    Args:
        shared: the store of all processes.
        done: blocks of earlier runs.
    """

    def __init__(self, shared: Store, rank: int, world: int, done: Collection[int]) -> None:
        self.store, self.rank, self.done = shared, rank, done
        self.pulse = Pulse(shared, world)
        self.total: int | None = None
        self._own: set[int] = set()

    @classmethod
    def alone(cls, done: Collection[int]) -> Self:
        """Those of a process that has no others beside it."""
        return cls(store.alone(), 0, 1, done)

    def __iter__(self) -> Iterator[int]:
        while self.total is None and not self.stopped:
            number = self.store.add("next", 1) - 1
            if number not in self.done:
                yield self._take(number)
        left = [number for number in range(self.total or 0) if number not in self.done]
        while not self.stopped:
            left = [number for number in left if not self.store.check([_done(number)])]
            others = [number for number in left if number not in self._own]
            if not others:
                return
            orphan = next((number for number in others if self._is_orphan(number)), None)
            if orphan is None:
                time.sleep(POLL)
            else:
                yield self._take(orphan)

    def end(self, total: int) -> None:
        """There are so many blocks and no more.

        Raises:
            CommandError: another process has found another number.
        """
        others = int(self.store.compare_set("total", "", str(total)))
        if others != total:
            raise CommandError(f"the input has {total} blocks here, and {others} where another process has read it")
        self.total = total

    def finished(self, number: int, records: int, tokens: int) -> tuple[int, int]:
        """A block is safe. Returns the records and tokens of all processes so far."""
        self.store.set(_done(number), "1")
        return self.store.add("records", records), self.store.add("tokens", tokens)

    def stop(self) -> None:
        """Let no process take another block."""
        self.store.set("stop", "1")

    @property
    def stopped(self) -> bool:
        return self.store.check(["stop"])

    def _take(self, number: int) -> int:
        self._own.add(number)
        self.store.set(_owner(number), str(self.rank))
        return number

    def _is_orphan(self, number: int) -> bool:
        """Whether nobody makes a block; one without an owner was taken by a process that did not live to say so."""
        owned = self.store.check([_owner(number)])
        return not owned or self.pulse.is_gone(int(self.store.get(_owner(number))))


def _done(number: int) -> str:
    return f"done/{number}"


def _owner(number: int) -> str:
    return f"owner/{number}"


class Pulse:
    """Signs of life of processes, as one of them sees them: its own clock is the only one that counts."""

    def __init__(self, shared: Store, world: int) -> None:
        self.store = shared
        self._seen: dict[int, tuple[int, float]] = {rank: (-1, time.monotonic()) for rank in range(world)}

    def is_gone(self, rank: int) -> bool:
        """Whether a process has ended before its work, as its parent knows, or has not been heard of for long."""
        if self.store.check([f"gone/{rank}"]):
            return True
        beats, heard = self._seen[rank]
        now = self.store.add(f"beat/{rank}", 0)
        if now != beats:
            self._seen[rank] = now, time.monotonic()
            return False
        return time.monotonic() - heard > LEASE

    def bury(self, rank: int) -> None:
        """Say that a process has ended before its work."""
        self.store.set(f"gone/{rank}", "1")


class Heart:
    """Gives signs of life until it is closed. Ends this process at once where the one that holds the store is gone:
    what it would write now belongs to no run any more."""

    def __init__(self, shared: Store, rank: int) -> None:
        self._closed = threading.Event()
        threading.Thread(target=self._run, args=(shared, rank), name="fastgen-heart", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _run(self, shared: Store, rank: int) -> None:
        while not self._closed.is_set():
            try:
                shared.add(f"beat/{rank}", 1)
            except RuntimeError:
                if not self._closed.is_set():
                    print(f"process {rank}: the process that leads this run has gone", file=sys.stderr, flush=True)
                    os._exit(1)
            self._closed.wait(BEAT)
