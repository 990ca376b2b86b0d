"""Run a family in a process of its own, so that a crash loses no other one."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.coverage.record import UNBUILT, WRONG
from benchmarks.harness import begin

_CONTEXT = multiprocessing.get_context("fork")


def apart(run: Callable[[str], dict[str, Any]], name: str, limit: float) -> dict[str, Any]:
    """Return what `tried` or `timed` returns of a family, from a process of its own.

    Args:
        run: The function.
        name: The family.
        limit: Seconds after which the process is ended.
    """
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    child = _CONTEXT.Process(target=_child, args=(run, name, sender))
    start = time.perf_counter()
    child.start()
    sender.close()
    try:
        found = receiver.recv() if receiver.poll(limit) else None
    except EOFError:
        child.join()
        found = {"how": WRONG, "why": {f"its process ended with {child.exitcode}": []}}
    child.kill()
    child.join()
    found = found or {"how": UNBUILT, "why": {f"not done after {limit} s": []}}
    seconds = time.perf_counter() - start
    note = f"{found['how']}: {'; '.join(found['why'])}" if "how" in found else str(found)
    print(f"{name:<26}{seconds:6.1f} s  {note}", flush=True)
    return found


def _child(run: Callable[[str], dict[str, Any]], name: str, sender: Connection) -> None:
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        sys.stdout = nowhere  # some families print at each step
        begin(1)
        sender.send(run(name))
