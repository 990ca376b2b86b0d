"""Patch targets: locate an attribute of a module or class, install a wrapper, and remove it."""

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, cast

from fastgen.patches.engine.compilers import is_traced_by_dynamo, skip_frames, with_globals_of

Function = Callable[..., Any]

_TARGET = re.compile(r"(?P<module>\w+(?:\.\w+)*):(?P<path>\w+(?:\.\w+)*)")


@dataclass(frozen=True)
class Address:
    """A parsed target, ``module:name`` or ``module:Class.method``.

    Attributes:
        module: Name of the module to import.
        path: Dotted attribute path within the module.
    """

    module: str
    path: str

    @classmethod
    def parse(cls, target: str) -> "Address":
        """Parse a target.

        Raises:
            ValueError: The target has neither of the two forms.
        """
        match = _TARGET.fullmatch(target)
        if match is None:
            raise ValueError(f"target {target!r} is not 'module:name' or 'module:Class.method'")
        return cls(match["module"], match["path"])

    def find(self, module: ModuleType) -> "Slot":
        """Return the slot of the target in ``module``.

        Raises:
            LookupError: The target or one of its parents does not exist.
        """
        *parents, name = self.path.split(".")
        owner: object = module
        for parent in parents:
            owner = _attribute(owner, parent)
        slot = Slot(owner, name)
        slot.read()
        return slot


@dataclass(frozen=True)
class Slot:
    """An attribute of a module or class.

    Attributes:
        owner: The module or class.
        name: Name of the attribute.
    """

    owner: Any
    name: str

    def read(self) -> object:
        """Return the stored value without binding it, such as a classmethod or staticmethod object.

        Raises:
            LookupError: The attribute does not exist.
        """
        return _attribute(self.owner, self.name)

    def write(self, value: object) -> None:
        """Set the attribute to ``value``."""
        setattr(self.owner, self.name, value)

    @property
    def inherited(self) -> bool:
        """Whether the attribute is inherited from a base class."""
        return self.name not in vars(self.owner)


class Wrapper:
    """A wrapper around the function in a slot.

    An inactive wrapper calls the original. It can remain installed like that, because it cannot be
    removed once other wrappers are on top of it.

    Args:
        slot: The slot to wrap.
        replacement: Called as ``replacement(original, *args, **kwargs)`` instead of the function.

    Raises:
        TypeError: The slot holds no function.
    """

    def __init__(self, slot: Slot, replacement: Function) -> None:
        self.slot = slot
        self.active = False
        self._before = slot.read()
        self._inherited = slot.inherited
        original = function_in(self._before)
        kind: Any = type(self._before)

        is_traced = is_traced_by_dynamo

        def replaced(*args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return original(*args, **kwargs)
            return replacement(original, *args, **kwargs)

        # References no globals, because it runs with those of the original. Dynamo inspects its
        # closure, which may hold only functions.
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if is_traced():
                return original(*args, **kwargs)
            return replaced(*args, **kwargs)

        own: Any = with_globals_of(original, cast(FunctionType, wrapper))
        self._wrapper: Any = functools.update_wrapper(own, original)
        self._installed: object = (
            kind(self._wrapper) if issubclass(kind, (classmethod, staticmethod)) else self._wrapper
        )

    def install(self) -> None:
        """Install the wrapper in the slot and activate it."""
        skip_frames(self._wrapper)
        self.slot.write(self._installed)
        self.active = True

    def remove(self) -> bool:
        """Deactivate the wrapper, and restore the original if nothing is on top of the wrapper.

        Returns:
            Whether the slot now holds what it held before the wrapper was created.
        """
        self.active = False
        if self.on_top and self._inherited:
            delattr(self.slot.owner, self.slot.name)
        elif self.on_top:
            self.slot.write(self._before)
        return self._there is self._before

    @property
    def on_top(self) -> bool:
        """Whether the slot holds the wrapper itself, with no other wrapper on top."""
        return self._there is self._installed

    @property
    def _there(self) -> object:
        try:
            return self.slot.read()
        except LookupError:
            return None

    @property
    def reachable(self) -> bool:
        """Whether the wrapper is in the slot, or below wrappers that set ``__wrapped__``."""
        try:
            top = function_in(self.slot.read())
            return (
                inspect.unwrap(top, stop=lambda function: function is self._wrapper)
                is self._wrapper
            )
        except (LookupError, TypeError, ValueError):
            return False


def function_in(value: object) -> Function:
    """Return the function that a slot's value holds, unwrapping a classmethod or staticmethod.

    Raises:
        TypeError: The value is not a function. Classes are rejected, because patching them would
            miss their subclasses and instances.
    """
    function: Any = value
    if isinstance(value, (classmethod, staticmethod)):
        function = cast(Any, value).__func__
    if not callable(function) or isinstance(function, type):
        raise TypeError(f"a function was expected there, not {value!r}")
    return function


def _attribute(owner: object, name: str) -> Any:
    try:
        return inspect.getattr_static(owner, name)
    except AttributeError:
        raise LookupError(f"{getattr(owner, '__name__', repr(owner))} has no {name!r}") from None
