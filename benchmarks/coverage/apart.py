"""Run a family in a process of its own, so that a crash loses no other one."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.coverage.family import timed, tried
from benchmarks.coverage.record import ALONE, FUSED, PART, SHARED, UNBUILT, WRONG
from benchmarks.harness import begin

SECONDS = 240
"""Time after which the process of a family is ended."""
_CONTEXT = multiprocessing.get_context("fork")


def apart(name: str, speed: bool) -> dict[str, Any]:
    """Return what `tried` and `timed` return, from a process of its own."""
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    child = _CONTEXT.Process(target=_child, args=(name, speed, sender))
    start = time.perf_counter()
    child.start()
    sender.close()
    try:
        found = receiver.recv() if receiver.poll(SECONDS) else None
    except EOFError:
        child.join()
        found = {"how": WRONG, "why": {f"its process ended with {child.exitcode}": []}}
    child.kill()
    child.join()
    found = found or {"how": UNBUILT, "why": {f"not done after {SECONDS} s": []}}
    seconds = time.perf_counter() - start
    print(f"{name:<26}{seconds:6.1f} s  {found['how']}: {'; '.join(found['why'])}", flush=True)
    return found


def _child(name: str, speed: bool, sender: Connection) -> None:
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        sys.stdout = nowhere  # some families print at each step
        begin(1)
        found = tried(name)
        if speed and found["how"] in (FUSED, SHARED, PART, ALONE):
            found["speed"] = timed(name)
        sender.send(found)
