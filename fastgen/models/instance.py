"""Forwards put on single modules for the time of a call, and taken away again.

A forward is an attribute of the instance: no class is touched, and a model at rest is exactly what it was.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

TOOLKITS = ("torch", "transformers", "fairseq", "fastgen")
"""Packages whose code is known here."""


class Routed:
    """A forward that stands in for a module's own."""

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module  # as nn.Module knows no weight

    def __reduce__(self) -> Any:
        """A model copied or pickled while it generates gets its modules' own forward."""
        return getattr, (self.module, "forward")


def modules_of(model: nn.Module) -> list[nn.Module]:
    """What `model.modules()` has, in another order and a third of its time, which every call of a model takes."""
    found, seen = [model], {model}
    for module in found:  # which grows
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                found.append(child)
    return found


def untouched(module: nn.Module) -> bool:
    """Whether a module runs its class's own forward, without hooks. Copies of a model may carry that forward."""
    hooked = module._forward_hooks or module._forward_pre_hooks
    return not hooked and runs_its_class(module) and is_toolkits(type(module).forward)


@functools.cache
def is_toolkits(forward: Any) -> bool:
    """Whether a class's forward is defined in a toolkit, and was not put there by somebody else.

    Asked of the function itself and of all that it wraps: a wrapper may have taken over the names of what it wraps, and
    a toolkit's decorator may stand around a function of somebody else's.
    """
    while forward is not None:
        if getattr(forward, "__globals__", {}).get("__name__", "").partition(".")[0] not in TOOLKITS:
            return False
        forward = getattr(forward, "__wrapped__", None)
    return True


def runs_its_class(module: nn.Module) -> bool:
    """Whether a module has no forward but its class's own."""
    own = module.__dict__.get("forward")
    return own is None or getattr(own, "__func__", None) is type(module).forward


def own_forwards(modules: Iterable[nn.Module]) -> dict[nn.Module, Any]:
    """The forward that each instance has, or None: what `restore` needs."""
    return {module: module.__dict__.get("forward") for module in modules}


def install(forwards: Mapping[nn.Module, Callable[..., Any]]) -> None:
    """Put forwards in place."""
    for module, forward in forwards.items():
        module.__dict__["forward"] = forward


def restore(before: Mapping[nn.Module, Any]) -> None:
    """Undo `install`, also one that was interrupted, and as often as one likes."""
    for module, own in before.items():
        if own is None:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = own
