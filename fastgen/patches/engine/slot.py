"""The place of a patch's target: what lies there, and putting a wrapper there and taking it away again."""

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
    """A target as text: ``module:name`` or ``module:Class.method``.

    Attributes:
        module: the module to import.
        path: dotted attribute names below the module.
    """

    module: str
    path: str

    @classmethod
    def parse(cls, target: str) -> "Address":
        """Read a target.

        Raises:
            ValueError: not of one of the two forms.
        """
        match = _TARGET.fullmatch(target)
        if match is None:
            raise ValueError(f"target {target!r} is not 'module:name' or 'module:Class.method'")
        return cls(match["module"], match["path"])

    def find(self, module: ModuleType) -> "Slot":
        """Return the target's place in ``module``.

        Raises:
            LookupError: something on the way to it, or the target itself, is not there.
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
        owner: the module or class.
        name: the attribute's name.
    """

    owner: Any
    name: str

    def read(self) -> object:
        """Return what lies there as it is stored: a classmethod or staticmethod object, not what it binds to.

        Raises:
            LookupError: nothing is there.
        """
        return _attribute(self.owner, self.name)

    def write(self, value: object) -> None:
        """Put ``value`` there."""
        setattr(self.owner, self.name, value)

    @property
    def inherited(self) -> bool:
        """Whether what is read there belongs to a base class."""
        return self.name not in vars(self.owner)


class Layer:
    """One wrapper of ours in a slot. Inactive, it is transparent: it may have to stay, below the wrappers of others.

    Args:
        slot: where it goes.
        replacement: called as ``replacement(original, *args, **kwargs)`` in place of the function there.
    Raises:
        TypeError: there is no function in the slot.
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

        # It names no global, as it gets the original's. Dynamo reads its closure, which may hold functions alone.
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
        """Put the wrapper into the slot and make it active."""
        skip_frames(self._wrapper)
        self.slot.write(self._installed)
        self.active = True

    def remove(self) -> bool:
        """Make the wrapper transparent, and put back what was there if the wrapper is still what lies there.

        Returns:
            whether the slot is as it was before the wrapper came.
        """
        self.active = False
        if self.on_top and self._inherited:
            delattr(self.slot.owner, self.slot.name)
        elif self.on_top:
            self.slot.write(self._before)
        return self._there is self._before

    @property
    def on_top(self) -> bool:
        """Whether the wrapper itself lies in the slot."""
        return self._there is self._installed

    @property
    def _there(self) -> object:
        try:
            return self.slot.read()
        except LookupError:
            return None

    @property
    def reachable(self) -> bool:
        """Whether the wrapper lies in the slot, or below wrappers that name what they wrap."""
        try:
            top = function_in(self.slot.read())
            return (
                inspect.unwrap(top, stop=lambda function: function is self._wrapper)
                is self._wrapper
            )
        except (LookupError, TypeError, ValueError):
            return False


def function_in(value: object) -> Function:
    """Return the function that a slot's value holds: itself, or what a classmethod or staticmethod is made of.

    Raises:
        TypeError: it holds no function (a class is none: patching it would miss its subclasses and instances).
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
