"""Forwards put on single modules for the time of a call, and taken away again.

A forward is an attribute of the instance: no class is touched, and a model at rest is exactly what it was.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn


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


def untouched(module: nn.Module) -> bool:
    """Whether a module runs its class's own forward, without hooks. Copies of a model may carry that forward."""
    return runs_its_class(module) and not (module._forward_hooks or module._forward_pre_hooks)


def runs_its_class(module: nn.Module) -> bool:
    """Whether a module has no forward but its class's own."""
    own = module.__dict__.get("forward")
    return own is None or getattr(own, "__func__", None) is type(module).forward


def compiled_among(modules: Iterable[nn.Module]) -> nn.Module | None:
    """Return a module that `torch.compile` has been applied to in whatever way; None where there is none.

    Its graph would hold what is put on its parts for the time of a call.
    """
    kinds: set[type[nn.Module]] = set()
    for module in modules:
        own = module.__dict__
        if own.get("_compiled_call_impl") is not None or _is_compiled(own.get("forward")):
            return module
        if (kind := type(module)) not in kinds:
            if kind.__name__ == "OptimizedModule" or _is_compiled(kind.forward):
                return module
            kinds.add(kind)
    return None


def reason_compiled(model: nn.Module) -> str | None:
    """Why a model keeps to its own code, as `torch.compile` has been applied to it or to a part; None otherwise."""
    found = compiled_among(modules_of(model))
    if found is None:
        return None
    return "the model is compiled" if found is model else f"a {type(found).__name__} is compiled"


def _is_compiled(forward: object) -> bool:
    return forward is not None and hasattr(forward, "_torchdynamo_orig_callable")


def install(forwards: Mapping[nn.Module, Callable[..., Any]]) -> dict[nn.Module, Any]:
    """Put forwards in place; return what `restore` needs: the forward that each instance had, or None."""
    before = {module: module.__dict__.get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.__dict__["forward"] = forward
    return before


def restore(before: Mapping[nn.Module, Any]) -> None:
    """Undo `install`."""
    for module, own in before.items():
        if own is None:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = own
