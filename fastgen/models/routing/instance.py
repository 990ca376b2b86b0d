"""Temporary forwards on module instances, installed for a call and removed afterwards.

A forward is an attribute of the instance: classes stay untouched, and between calls a model is
exactly what it was.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

TOOLKITS = ("torch", "transformers", "fairseq", "fastgen")
"""Packages whose code fastgen is written for."""


class Routed:
    """A forward that replaces a module's own.

    Under Dynamo it has to compute what the module's own forward does: a user's compiled function
    may reach the module in a way that `compiled_among` does not detect.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module  # nn.Module declares no weight

    def __reduce__(self) -> Any:
        """Reduce to the module's own forward, for models copied or pickled during generation."""
        return getattr, (self.module, "forward")


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules of `model.modules()` in another order.

    It takes a third of the time, which matters as every call runs it.
    """
    found, seen = [model], {model}
    for module in found:  # grows while it is iterated
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                found.append(child)
    return found


def touched_among(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules with a hook, a forward or a compiled call on the instance."""
    return [
        module
        for module in modules
        if (own := module.__dict__)["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or "forward" in own
        or own.get("_compiled_call_impl") is not None
    ]


def untouched(module: nn.Module) -> bool:
    """Return whether a module runs its class's own forward without hooks.

    Copies of a model may carry that forward on the instance.
    """
    hooked = module._forward_hooks or module._forward_pre_hooks
    return not hooked and runs_its_class(module) and is_toolkits(type(module).forward)


@functools.cache
def is_toolkits(forward: Any) -> bool:
    """Return whether a class's forward is defined in a toolkit rather than patched by someone else.

    This checks the function's globals and those of all functions it wraps: a wrapper may copy the
    name of what it wraps, and a toolkit's decorator may wrap foreign code.
    """
    while forward is not None:
        if (
            getattr(forward, "__globals__", {}).get("__name__", "").partition(".")[0]
            not in TOOLKITS
        ):
            return False
        forward = getattr(forward, "__wrapped__", None)
    return True


def toolkit_class(thing: Any) -> type | None:
    """Return the class of a callable object; None if its `__call__` is not toolkit code."""
    kind = type(thing)
    return kind if is_toolkits(kind.__call__) else None


def runs_its_class(module: nn.Module) -> bool:
    """Return whether a module has no forward other than its class's own."""
    own = module.__dict__.get("forward")
    return own is None or getattr(own, "__func__", None) is type(module).forward


def compiled_among(
    modules: Sequence[nn.Module], touched: Sequence[nn.Module] | None = None
) -> nn.Module | None:
    """Return a module to which `torch.compile` has been applied in any way; None for none.

    A compiled graph would keep the forwards installed for one call, or be recompiled for the next.

    Args:
        modules: The modules to check.
        touched: Result of `touched_among(modules)`, if known.
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
    """Return the fallback reason if a model or a part of it is compiled; None otherwise.

    Args:
        model: The model.
        modules: Its modules, if known.
        touched: Result of `touched_among(modules)`, if known.
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
    """Return whether a function is compiled, or is user code whose closure or globals name one."""
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
    """Return each instance's forward, or None, as `restore` needs it."""
    return {module: module.__dict__.get("forward") for module in modules}


def install(forwards: Mapping[nn.Module, Callable[..., Any]]) -> None:
    """Install forwards on module instances."""
    for module, forward in forwards.items():
        module.__dict__["forward"] = forward


def restore(before: Mapping[nn.Module, Any]) -> None:
    """Undo `install`, even if it was interrupted; idempotent."""
    for module, own in before.items():
        if own is None:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = own
