"""Lookup of a live model's parts, and checks for parts and hooks that a fused step would ignore."""

from collections.abc import Container, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from fastgen.models.routing.instance import (
    TOOLKITS,
    Routed,
    compiled_among,
    is_toolkits,
    modules_of,
    runs_its_class,
    touched_among,
)


class NotFused(Exception):
    """A model cannot be fused; the message is the reason shown by `fastgen.status()`."""


@contextmanager
def reading(part: str) -> Generator[None]:
    """Context manager that turns errors while reading a model's part into `NotFused`.

    Raises:
        NotFused: The part is not what its name says.
    """
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise NotFused(f"its {part} cannot be read: {error}") from error


def at(module: nn.Module, path: str) -> Any:
    """Return a submodule, or a function held as an attribute, by its dotted path.

    Raises:
        NotFused: There is no such part.
    """
    part: Any = module
    for name in path.split(".") if path else ():
        part = part._modules.get(name) if name in part._modules else getattr(part, name, None)
        if part is None:
            raise NotFused(f"its decoder has no {path}")
    return part


def part_or_none(module: nn.Module, path: str) -> Any:
    """Return a part by its path; None where there is none."""
    try:
        return at(module, path)
    except NotFused:
        return None


def is_there(module: nn.Module, path: str) -> bool:
    """Return whether a module has a part at a dotted path."""
    return part_or_none(module, path) is not None


def name_of(thing: object) -> str:
    """Return the class name of an object, prefixed with its top-level package."""
    return f"{type(thing).__module__.partition('.')[0]}.{type(thing).__name__}"


def check_unread(
    model: nn.Module,
    paths: Sequence[str],
    read: Container[nn.Module],
    free: Container[nn.Module] = (),
    called: bool = True,
) -> None:
    """Raise `NotFused` where a decoder contains a part that was not read and is not a dropout.

    Args:
        model: The model.
        paths: Paths from the model: that of the decoder, then those of the parts after it.
        read: The modules that were read.
        free: Those of them that may run code of other packages.
        called: Whether the toolkit calls the model and the decoder as modules.
    """
    along = [found for path in paths for found in _along(model, path)]
    decoder = at(model, paths[0])
    around = _along(model, paths[0])[:-1]  # their own parameters are for prompts, if for anything
    parts = [*along, *(part for path in paths for part in modules_of(at(model, path)))]
    check_plain(parts, () if called else (model, decoder))
    for module in parts:
        kind, outer = type(module).__name__, module is model
        if module not in free and not is_toolkits(type(module).forward):
            raise NotFused(f"a replaced forward of a {kind}")
        if outer or module in read or "Dropout" in kind:
            continue
        if type(module).__module__.partition(".")[0] not in TOOLKITS:
            raise NotFused(f"{name_of(module)} is a class of its own")
        if module in around:
            continue
        parameter = next((n for n, p in module._parameters.items() if p is not None), None)
        if parameter is not None or not module._modules:
            whole = decoder if module not in along else model
            name = next(name for name, part in whole.named_modules() if part is module)
            where = name if parameter is None else f"{name}.{parameter}"
            raise NotFused(f"a part of its own, {where}")


def check_plain(modules: Sequence[nn.Module], uncalled: Container[nn.Module] = ()) -> None:
    """Raise `NotFused` where modules are in training mode, hooked, compiled or overridden.

    Args:
        modules: The modules to check.
        uncalled: Modules whose `forward` is called directly, so that their hooks do not run.
    """
    if any(getattr(nn.modules.module, name) for name in _GLOBAL_HOOKS):
        raise NotFused("a hook on all modules")
    for module in modules:
        # Those of `torch.ao` are made in training mode, which makes no difference to them.
        if module.training and not type(module).__module__.startswith("torch.ao."):
            raise NotFused(f"a {type(module).__name__} is in training mode")
    touched = touched_among(modules)
    for module in touched:
        if module not in uncalled and foreign_hook(module):
            raise NotFused(f"a hook on a {type(module).__name__}")
    called = [module for module in modules if module not in uncalled]
    if (compiled := compiled_among(called)) is not None:
        raise NotFused(f"a {type(compiled).__name__} is compiled")
    for module in touched:
        if not (runs_its_class(module) or isinstance(module.__dict__["forward"], Routed)):
            raise NotFused(f"a replaced forward of a {type(module).__name__}")


def foreign_hook(module: nn.Module) -> bool:
    """Return whether a module has a hook that is not transformers' own."""
    if not (module._forward_hooks or module._forward_pre_hooks):  # the common case
        return False
    return any(
        map(_foreign, (*module._forward_hooks.values(), *module._forward_pre_hooks.values()))
    )


def reads_rows(module: nn.Module) -> str | None:
    """Describe a hook or forward put on a module that may inspect its rows; None for none.

    Such code selects an adapter per sentence (PEFT's `adapter_names`) or adds steering vectors.
    """
    if foreign_hook(module):
        return f"a hook on a {type(module).__name__}"
    own = module.__dict__.get("forward")
    if own is None or isinstance(own, Routed) or runs_its_class(module):
        return None
    # accelerate's `add_hook_to_module` sets `_hf_hook`.
    if (hook := getattr(module, "_hf_hook", None)) is not None:
        if all(map(_moves_only, getattr(hook, "hooks", [hook]))):
            return None
        return f"a hook on a {type(module).__name__}"
    return f"a replaced forward of a {type(module).__name__}"


_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")


def _along(model: nn.Module, path: str) -> list[nn.Module]:
    """Return the modules on the path from a model to a part, both included."""
    modules = [model]
    for name in path.split(".") if path else ():
        modules.append(at(modules[-1], name))
    return modules


def _moves_only(hook: object) -> bool:
    """Return whether a hook is accelerate's own: those only move or cast tensors, row by row."""
    return type(hook).__module__.partition(".")[0] == "accelerate"


def _foreign(hook: Any) -> bool:
    """Return whether a hook is not transformers' own; those only record outputs on request."""
    return not getattr(hook, "__module__", "").startswith("transformers.utils.output_capturing")
