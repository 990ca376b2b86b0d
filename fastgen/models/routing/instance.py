"""Forwards put on single modules for the time of a call, and taken away again.

A forward is an attribute of the instance: no class is touched, and a model at rest is exactly what it was.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

TOOLKITS = ("torch", "transformers", "fairseq", "fastgen")
"""Packages whose code is known here."""


class Routed:
    """A forward that stands in for a module's own.

    Where a user's compiled function gets to a module by another way than those that `compiled_among` looks for, Dynamo
    traces this forward: it then has to be the module's own.
    """

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


def touched_among(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Those that carry a hook, a forward or a compiled call of their own."""
    return [
        module
        for module in modules
        if (own := module.__dict__)["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or "forward" in own
        or own.get("_compiled_call_impl") is not None
    ]


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
        if (
            getattr(forward, "__globals__", {}).get("__name__", "").partition(".")[0]
            not in TOOLKITS
        ):
            return False
        forward = getattr(forward, "__wrapped__", None)
    return True


def runs_its_class(module: nn.Module) -> bool:
    """Whether a module has no forward but its class's own."""
    own = module.__dict__.get("forward")
    return own is None or getattr(own, "__func__", None) is type(module).forward


def compiled_among(
    modules: Sequence[nn.Module], touched: Sequence[nn.Module] | None = None
) -> nn.Module | None:
    """Return a module that `torch.compile` has been applied to in whatever way; None where there is none.

    Its graph would hold what is put on its parts for the time of a call, or be made anew for the next call.

    touched: what `touched_among` says of the modules, where it is known.
    """
    for module in touched_among(modules) if touched is None else touched:
        own = module.__dict__
        forward, before, behind = (
            own.get("forward"),
            own["_forward_pre_hooks"],
            own["_forward_hooks"],
        )
        if own.get("_compiled_call_impl") is not None:
            return module
        if forward is not None and not isinstance(forward, Routed) and _runs_compiled(forward):
            return module
        if (before or behind) and any(map(_runs_compiled, (*before.values(), *behind.values()))):
            return module
    kinds = {type(module): module for module in modules}
    return next((module for kind, module in kinds.items() if _is_compiled_class(kind)), None)


def reason_compiled(
    model: nn.Module,
    modules: Sequence[nn.Module] | None = None,
    touched: Sequence[nn.Module] | None = None,
) -> str | None:
    """Why a model keeps to its own code, as `torch.compile` has been applied to it or to a part; None otherwise.

    modules, touched: those of the model, where they are known.
    """
    found = compiled_among(modules_of(model) if modules is None else modules, touched)
    if found is None:
        return None
    return "the model is compiled" if found is model else f"a {type(found).__name__} is compiled"


def _is_compiled_class(kind: type[nn.Module]) -> bool:
    forward = kind.forward
    return not _is_toolkits_plain(forward) and (
        kind.__name__ == "OptimizedModule" or _runs_compiled(forward)
    )


@functools.cache
def _is_toolkits_plain(forward: Any) -> bool:
    return is_toolkits(forward) and not _is_compiled(forward)


def _runs_compiled(function: Any) -> bool:
    """Whether a function is a compiled one, or a user's own that names one: in its closure, or in its globals."""
    if _is_compiled(function):
        return True
    code = getattr(function, "__code__", None)
    if code is None or function.__globals__.get("__name__", "").startswith(
        ("torch.", "transformers.", "fairseq.")
    ):
        return False
    held = (cell.cell_contents for cell in function.__closure__ or () if cell != _EMPTY)
    return any(map(_is_compiled, held)) or any(
        _is_compiled(function.__globals__.get(name)) for name in code.co_names
    )


def _is_compiled(function: object) -> bool:
    return isinstance(function, (FunctionType, MethodType)) and hasattr(
        function, "_torchdynamo_orig_callable"
    )


_EMPTY = CellType()


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
