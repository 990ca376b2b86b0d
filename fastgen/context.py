"""Context variables: values for the time of a block, and calls that leave none of them set.

An exception that comes from outside (Ctrl-C, a signal handler, `PyThreadState_SetAsyncExc`) may strike between any two
instructions, also within `__enter__` and `__exit__`.
"""

from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")

PREFIX = "fastgen_"
"""What the names of all context variables of this package begin with."""


class assigned(Generic[_T]):  # a context manager, named as `contextlib` names its own
    """Have a context variable hold a value within a `with` block, of a call that is `isolated`."""

    def __init__(self, variable: ContextVar[_T], value: _T) -> None:
        self._variable, self._value = variable, value

    def __enter__(self) -> _T:
        self._before = self._variable.get()
        self._variable.set(self._value)
        return self._value

    def __exit__(self, *_: object) -> None:
        self._variable.set(self._before)


def isolated(function: Callable[..., _T], /, *args: Any, **kwargs: Any) -> _T:
    """Call a function so that nothing of it is left behind, wherever it is interrupted.

    It runs in a copy of the context, so that none of this package's variables is left set. Other variables keep what
    the function, or a callback of the user's, assigns. Then what was registered by `at_end` is called.
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
    """Have a callback called when the `isolated` call under way ends; outside of one, nothing happens."""
    callbacks = _callbacks.get()
    if callbacks is not None:
        callbacks.append(callback)


def not_at_end(callback: Callable[[], object]) -> None:
    """Undo `at_end`, as a call may be a whole corpus."""
    callbacks = _callbacks.get()
    if callbacks is not None and callback in callbacks:
        callbacks.remove(callback)
