"""Scoped context variables, and calls that leave none of them set.

An asynchronous exception (Ctrl-C, a signal handler, `PyThreadState_SetAsyncExc`) may arrive
between any two instructions, also within `__enter__` and `__exit__`.
"""

from collections.abc import Callable
from contextvars import ContextVar, copy_context
from dataclasses import replace
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")

PREFIX = "fastgen_"
"""Prefix of the names of all context variables of this package."""


class assigned(Generic[_T]):  # a context manager, named in lower case as in `contextlib`
    """Context manager that assigns a context variable within a `with` block.

    The block must run inside an `isolated` call, which resets the variable after an interrupt.
    """

    def __init__(self, variable: ContextVar[_T], value: _T) -> None:
        self._variable, self._value = variable, value

    def __enter__(self) -> _T:
        self._before = self._variable.get()
        self._variable.set(self._value)
        return self._value

    def __exit__(self, *_: object) -> None:
        self._variable.set(self._before)


class changed(Generic[_T]):
    """Context manager that changes fields of the frozen dataclass in a context variable.

    At its end it restores these fields alone, so that contexts may end in any order. As for
    `assigned`, the block must run inside an `isolated` call.
    """

    def __init__(self, variable: ContextVar[_T], **changes: Any) -> None:
        self._variable: ContextVar[Any] = variable
        self._changes = changes

    def __enter__(self) -> _T:
        record = self._variable.get()
        self._before = {name: getattr(record, name) for name in self._changes}
        new: _T = replace(record, **self._changes)
        self._variable.set(new)
        return new

    def __exit__(self, *_: object) -> None:
        self._variable.set(replace(self._variable.get(), **self._before))


def isolated(function: Callable[..., _T], /, *args: Any, **kwargs: Any) -> _T:
    """Call a function in a copy of the context, so that no state leaks wherever it is interrupted.

    None of this package's context variables stays set. Other variables keep what the function, or a
    user's callback, assigns to them. The callbacks registered with `at_end` run when the call ends.
    """
    context, callbacks = copy_context(), list[Callable[[], object]]()
    try:
        context.run(_callbacks.set, callbacks)
        return context.run(function, *args, **kwargs)
    finally:
        for callback in callbacks:
            callback()
        for variable, value in context.items():
            if not variable.name.startswith(PREFIX) and variable.get(_UNSET) is not value:
                variable.set(value)


_UNSET: Any = object()
_callbacks: ContextVar[list[Callable[[], object]] | None] = ContextVar(
    f"{PREFIX}callbacks", default=None
)


def at_end(callback: Callable[[], object]) -> None:
    """Register a callback for the end of the current `isolated` call; no effect outside of one."""
    callbacks = _callbacks.get()
    if callbacks is not None:
        callbacks.append(callback)


def not_at_end(callback: Callable[[], object]) -> None:
    """Unregister a callback of `at_end`: one call may process a whole corpus and collect many."""
    callbacks = _callbacks.get()
    if callbacks is not None and callback in callbacks:
        callbacks.remove(callback)
