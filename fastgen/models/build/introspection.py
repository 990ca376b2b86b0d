"""The parts of a live model, and those that nobody has read: what a decode step from the weights must not overlook."""

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
    """A model's decode step cannot be made from its weights; the message is the reason, as status() shows it."""


@contextmanager
def reading(part: str) -> Generator[None]:
    """Within it, a part that is not what its name says is a reason not to read the whole.

    Raises:
        NotFused: there was such a part.
    """
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise NotFused(f"its {part} cannot be read: {error}") from error


def at(module: nn.Module, path: str) -> Any:
    """A part by its path: a module, or a function that a module has as an attribute.

    Raises:
        NotFused: there is none.
    """
    found: Any = module
    for name in path.split(".") if path else ():
        found = found._modules.get(name) if name in found._modules else getattr(found, name, None)
        if found is None:
            raise NotFused(f"its decoder has no {path}")
    return found


def part_or_none(module: nn.Module, path: str) -> Any:
    """A part by its path; None where there is none."""
    try:
        return at(module, path)
    except NotFused:
        return None


def is_there(module: nn.Module, path: str) -> bool:
    return part_or_none(module, path) is not None


def name_of(thing: object) -> str:
    """A thing's class and the package it is of."""
    return f"{type(thing).__module__.partition('.')[0]}.{type(thing).__name__}"


def check_unread(
    model: nn.Module, paths: Sequence[str], read: Container[nn.Module], called: bool = True
) -> None:
    """Raise NotFused where a decoder has a part that was not read, and is more than a dropout.

    paths: of the decoder, and of what comes behind it, from the model. read: the modules that were.
    called: whether the model and the decoder are called.
    """
    along = [found for path in paths for found in _along(model, path)]
    decoder = at(model, paths[0])
    parts = [*along, *modules_of(decoder)]
    check_plain(parts, () if called else (model, decoder))
    for module in parts:
        kind, outer = type(module).__name__, module is model
        if not is_toolkits(type(module).forward):
            raise NotFused(f"a forward of its own of a {kind}")
        if outer or module in read or "Dropout" in kind:
            continue
        if type(module).__module__.partition(".")[0] not in TOOLKITS:
            raise NotFused(f"{name_of(module)} is a class of its own")
        holds = next((n for n, p in module._parameters.items() if p is not None), None)
        if holds is not None or not module._modules:
            around = at(model, paths[0]) if module not in along else model
            name = next(name for name, part in around.named_modules() if part is module)
            where = name if holds is None else f"{name}.{holds}"
            raise NotFused(f"a part of its own, {where}")


def check_plain(modules: Sequence[nn.Module], uncalled: Container[nn.Module] = ()) -> None:
    """Raise NotFused where more runs than the forwards of the modules' classes, or those do more than compute.

    uncalled: those whose `forward` is called in place of themselves, so that their hooks do not run.
    """
    if any(getattr(nn.modules.module, name) for name in _GLOBAL_HOOKS):
        raise NotFused("a hook on all modules")
    for module in modules:
        if module.training:
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
            raise NotFused(f"a forward of its own of a {type(module).__name__}")


def foreign_hook(module: nn.Module) -> bool:
    """Whether a module has a hook that is not transformers' own."""
    if not (module._forward_hooks or module._forward_pre_hooks):  # seldom there are any
        return False
    return any(
        map(_foreign, (*module._forward_hooks.values(), *module._forward_pre_hooks.values()))
    )


def reads_rows(module: nn.Module) -> str | None:
    """What somebody has put on a module that may look at the rows it is given: a hook, or a forward; None for neither.

    Adapters for each sentence are chosen by such code (PEFT's `adapter_names`), and vectors are added by it.
    """
    if foreign_hook(module):
        return f"a hook on a {type(module).__name__}"
    own = module.__dict__.get("forward")
    if own is None or isinstance(own, Routed) or runs_its_class(module):
        return None
    if (
        hook := getattr(module, "_hf_hook", None)
    ) is not None:  # accelerate's `add_hook_to_module` put it there
        if all(map(_moves_only, getattr(hook, "hooks", [hook]))):
            return None
        return f"a hook on a {type(module).__name__}"
    return f"a forward of its own of a {type(module).__name__}"


_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")


def _along(model: nn.Module, path: str) -> list[nn.Module]:
    """The modules on the way from a model to a part, itself included."""
    found = [model]
    for name in path.split(".") if path else ():
        found.append(at(found[-1], name))
    return found


def _moves_only(hook: object) -> bool:
    """Whether a hook of accelerate's is one of its own, which move or cast what a module computes with, row by row."""
    return type(hook).__module__.partition(".")[0] == "accelerate"


def _foreign(hook: Any) -> bool:
    """Whether a hook is not transformers' own, which only notes outputs, where they are asked for."""
    return not getattr(hook, "__module__", "").startswith("transformers.utils.output_capturing")
