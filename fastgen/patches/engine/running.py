"""The scope of a patched call: its plan, and whether patches run in this context at all."""

import inspect
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import CodeType, FrameType
from typing import Any, Generic, TypeVar, cast

from fastgen.context import PREFIX, changed
from fastgen.patches.engine.registry import registry

_Plan = TypeVar("_Plan")


class DisabledMeanwhile(Exception):
    """Raised when `disable` ran after a patched call began and before its plan started."""


@dataclass(frozen=True)
class Scope:
    """What holds for patched calls in a context (thread or task).

    Attributes:
        plan: The plan that is running, or None. Inner patches read the outermost plan here.
        disabled: Whether the toolkit's own code runs (`fastgen.disabled`).
        canary: Whether a canary is running.
    """

    plan: Any = None
    disabled: bool = False
    canary: bool = False


_OUTSIDE = Scope()
_scope: ContextVar[Scope] = ContextVar(f"{PREFIX}scope", default=_OUTSIDE)


def current_scope() -> Scope:
    """Return the scope of this context."""
    return _scope.get()


def current_plan() -> Any:
    """Return the plan that is running in this context, or None."""
    return _scope.get().plan


def in_canary() -> bool:
    """Return whether a canary is running in this context."""
    return _scope.get().canary


def is_disabled() -> bool:
    """Return whether patched calls in this context run the toolkit's own code."""
    return registry.mode != "1" or _scope.get().disabled


@contextmanager
def disabled() -> Generator[None]:
    """Run the toolkit's own code for patched calls in this context (thread or task) only.

    These calls are not counted.
    """
    before = _scope.get().disabled
    try:
        _scope.set(replace(_scope.get(), disabled=True))
        yield
    finally:
        _scope.set(replace(_scope.get(), disabled=before))


def canary_scope() -> changed[Scope]:
    """Return a context manager within which `in_canary` returns True."""
    return changed(_scope, canary=True)


class running(Generic[_Plan]):
    """Context manager that sets `current_plan`. While any plan runs, `disable` raises.

    Enter it with a `with` statement before the call has side effects. If `disable` ran first, it
    raises an exception of the engine, which then runs the original.

    Args:
        plan: The plan of the call.

    Raises:
        DisabledMeanwhile: The patches have been disabled.
    """

    def __init__(self, plan: _Plan) -> None:
        self._plan, self._changed = plan, changed(_scope, plan=plan)

    def __enter__(self) -> _Plan:
        self._place = (
            threading.get_ident(),
            cast(FrameType, cast(FrameType, inspect.currentframe()).f_back).f_code,
        )
        registry.running.append(self._place)
        if registry.mode != "1":
            registry.running.remove(self._place)
            raise DisabledMeanwhile
        self._changed.__enter__()
        return self._plan

    def __exit__(self, *_: object) -> None:
        self._changed.__exit__()
        registry.running.remove(self._place)


def count_running() -> int:
    """Return the number of running plans.

    Plans that are on no thread's stack were left in the list by an interrupt, and are removed.
    """
    on_stacks = {
        (thread, code)
        for thread, top in cast(Any, sys)._current_frames().items()
        for code in _codes(top)
    }
    for place in [place for place in registry.running if place not in on_stacks]:
        registry.running.remove(place)
    return len(registry.running)


def _codes(frame: FrameType | None) -> Iterator[CodeType]:
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back
