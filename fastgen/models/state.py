"""What is kept between calls: `ModelState` per module, and one state of the whole process.

Each layer of the package declares what it keeps as a subclass of `CachedState`, and finds it by
that class. A module's state is held weakly by the module, so that it is freed with the module, and
the module itself has no attribute for it: copying and pickling a model do not see it.
"""

import ctypes
import sys
import threading
from collections.abc import Iterator
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary

_T = TypeVar("_T", bound="CachedState")


class CachedState:
    """Base of the values in a state. `ModelState.of` creates them without arguments.

    Attributes:
        label: Name in `fastgen.status` of the memory that these values hold; "" for none.
    """

    label: ClassVar[str] = ""

    @property
    def nbytes(self) -> int:
        """Bytes held to save time."""
        return 0

    def release(self) -> bool:
        """Free what is held to save time; return whether the state should drop this value."""
        return False


class ModelState:
    """The values that are kept for one module, or for the process, by their class."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values: dict[type[CachedState], Any] = {}

    def get(self, kind: type[_T]) -> _T | None:
        """Return the value of a class; None if there is none."""
        return self._values.get(kind)

    def of(self, kind: type[_T]) -> _T:
        """Return the value of a class, created at its first use."""
        value = self._values.get(kind)
        return self._values.setdefault(kind, kind()) if value is None else value

    def keep(self, value: CachedState) -> None:
        """Store a value in place of the one of the same class."""
        self._values[type(value)] = value

    def drop(self, kind: type[CachedState]) -> None:
        """Remove the value of a class, if there is one."""
        self._values.pop(kind, None)

    def release(self, kinds: tuple[type[CachedState], ...] = (CachedState,)) -> None:
        """Release the values of some classes."""
        for value in self.values():
            if isinstance(value, kinds) and value.release():
                self.drop(type(value))

    def values(self) -> tuple[CachedState, ...]:
        """Return all values."""
        return tuple(self._values.values())


class _States:
    """The states of all modules and of the process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # reentrant, as a signal handler may need a state as well
        self.of_modules: WeakKeyDictionary[Any, ModelState] = WeakKeyDictionary()
        self.of_process = ModelState()


_states = _States()


def state_of(module: object) -> ModelState:
    """Return the state of a model, or of one of its modules, created at its first use."""
    state = _states.of_modules.get(module)
    if state is not None:
        return state
    with _states.lock:
        return _states.of_modules.setdefault(module, ModelState())


def cached_state_of(module: object, kind: type[_T]) -> _T | None:
    """Return what is kept of a module, by its class; None if there is none."""
    state = _states.of_modules.get(module)
    return None if state is None else state.get(kind)


def process_state() -> ModelState:
    """Return the state of the process: values whose keys are weights, devices or classes."""
    return _states.of_process


def iter_cached_states(kind: type[_T]) -> Iterator[tuple[Any, _T]]:
    """Yield each module that has a value of a class, and the value."""
    with _states.lock:
        states = list(_states.of_modules.items())
    for module, state in states:
        value = state.get(kind)
        if value is not None:
            yield module, value


def held() -> Iterator[tuple[str, Any, int]]:
    """Yield label, module and bytes of each value; modules may share one, which counts once."""
    for kind in CachedState.__subclasses__():
        if kind.label:
            values = {id(value): (module, value) for module, value in iter_cached_states(kind)}
            yield from ((kind.label, module, value.nbytes) for module, value in values.values())


def release(*kinds: type[CachedState]) -> None:
    """Release what is kept, of some classes or all, and return its memory to the system."""
    with _states.lock:
        states = list(_states.of_modules.values())
    for state in (*states, _states.of_process):
        state.release(kinds or (CachedState,))
    if (
        sys.platform.startswith("linux")
        and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None
    ):
        # Only glibc has and needs `malloc_trim`: by itself it returns only blocks over 32 MiB.
        trim(0)
