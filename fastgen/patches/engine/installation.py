"""Installation of patches once their modules are imported, and calls of the patched targets."""

import functools
import inspect
import sys
from types import ModuleType
from typing import Any

from fastgen.config import settings
from fastgen.context import isolated
from fastgen.patches.engine import notices
from fastgen.patches.engine.canary import Canary, resolve
from fastgen.patches.engine.compilers import is_traced_by_torchscript
from fastgen.patches.engine.counts import fallback, note_call
from fastgen.patches.engine.imports import unfinished, when_finished, when_imported
from fastgen.patches.engine.patch import Patch, PatchError
from fastgen.patches.engine.registry import Entry, registry
from fastgen.patches.engine.running import DisabledMeanwhile, Scope, current_scope, in_canary
from fastgen.patches.engine.slot import Function, Slot, Wrapper, function_in


class _NotYet(Exception):
    """Raised when a patch has to wait because ``module`` is only partially imported."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module


def hook(module: str) -> None:
    """Apply the patches that await a module, now or when it is imported."""
    top = module.partition(".")[0]
    # A failed import of the package left this submodule behind. It will be imported again.
    if module in sys.modules and top not in sys.modules:
        for name in [name for name in sys.modules if name.startswith(f"{top}.")]:
            del sys.modules[name]
    when_imported(module, lambda: _arrive(module))


def _arrive(module: str) -> None:
    """Apply the pending patches of a module that is in sys.modules, perhaps partially imported."""
    errors: list[PatchError] = []
    with registry.lock:
        for entry in registry.entries.values():
            if (
                entry.state != "pending"
                or entry.patch.awaited != module
                or module not in sys.modules
            ):
                continue
            try:
                _apply(entry)
            except _NotYet as wait:
                # The import may still fail and be retried, so hook the module again instead of
                # looking it up.
                try:
                    when_finished(wait.module, lambda: hook(module))
                except ValueError as error:
                    errors.append(_fail(entry, error))
            except Exception as error:  # never break the user's import
                errors.append(_fail(entry, error))
    _warn_of_unreachable()
    if errors and settings().strict:
        raise errors[0]


def _apply(entry: Entry) -> None:
    patch, toolkit = entry.patch, entry.patch.toolkit
    top, module = sys.modules[toolkit.module], sys.modules[patch.address.module]
    installed = getattr(top, "__version__", None)
    if installed is None:
        if unfinished(top):
            raise _NotYet(top)
        raise ValueError(f"{toolkit.module} has no __version__; {toolkit.versions} is supported")
    version = registry.versions[toolkit.name] = str(installed)
    if not toolkit.supports(version):
        advice = "; ".join(filter(None, (f"{toolkit.versions} is supported", toolkit.install_hint)))
        entry.settle("skipped", f"{toolkit.name} {version} found; {advice}")
        same_toolkit = (
            other
            for other in registry.entries.values()
            if other.patch.toolkit == toolkit and other.layer is not None
        )
        # One warning per toolkit is enough.
        if not any(other.state == "skipped" for other in same_toolkit):
            _watch(entry, module)
        return
    try:
        slot = patch.address.find(module)
    except LookupError:
        if unfinished(module):
            raise _NotYet(module) from None
        raise
    names = tuple(inspect.signature(function_in(slot.read())).parameters)
    if names[: len(patch.parameters)] != patch.parameters:
        raise TypeError(
            f"parameters ({', '.join(patch.parameters)}, ...) expected, ({', '.join(names)}) found"
        )
    newer = not toolkit.has_tested(version)
    if newer and toolkit.canary is not None and not patch.is_bugfix:
        canary = registry.canaries.get(toolkit.name)
        if canary is None or canary.version != version:
            registry.canaries[toolkit.name] = Canary(
                toolkit.canary, toolkit.name, version, settings().cache_dir
            )
    _install(entry, slot)
    entry.settle("applied", f"newer than {toolkit.tested}, the newest tested" if newer else "")


def _install(entry: Entry, slot: Slot) -> None:
    if entry.layer is not None and entry.layer.reachable:
        entry.layer.active = True  # `disable` left it below another wrapper
    else:
        entry.layer = Wrapper(slot, functools.partial(_call, entry))
        entry.layer.install()
        registry.installed[:] = [
            *(other for other in registry.installed if other is not entry),
            entry,
        ]


def _watch(entry: Entry, module: ModuleType) -> None:
    """Make the first call of a target warn that its patch could not be applied.

    Does nothing for patches that users would not miss.
    """
    if not entry.patch.covers:
        return
    try:
        _install(entry, entry.patch.address.find(module))
    except (LookupError, TypeError):  # the target cannot be wrapped
        registry.unreachable.append(entry)


def _warn_of_unreachable() -> None:
    """Warn of patches in `Registry.unreachable`, without holding the lock.

    Users can turn warnings into exceptions or handle them with their own code.
    """
    while registry.unreachable:
        notices.warn_of_patch(registry.unreachable.pop(0))


def _fail(entry: Entry, error: Exception) -> PatchError:
    reason = f"{type(error).__name__}: {error}"
    if entry.layer is not None:
        entry.layer.active = False
    entry.settle("failed", reason)
    module = sys.modules.get(entry.patch.address.module)
    if module is not None:
        _watch(entry, module)
    failure = PatchError(entry.patch.name, reason)
    failure.__cause__ = error
    return failure


def _call(entry: Entry, original: Function, /, *args: Any, **kwargs: Any) -> Any:
    """Run the replacement of a patched target, or the original if the patch is off or declined."""
    scope = current_scope()
    if _is_off(entry.patch, scope) or (entry.patch.inner and scope.plan is None):
        return original(*args, **kwargs)
    if entry.state != "applied":
        notices.warn_of_patch(entry)
        if args:
            note_call(
                entry.patch.toolkit.name,
                type(args[0]).__name__,
                entry.patch.covers,
                "not",
                [entry.reason],
            )
        return original(*args, **kwargs)
    replacement = _approved_replacement(entry)
    if replacement is None:
        return original(*args, **kwargs)
    try:
        if entry.patch.inner or scope.plan is not None:
            return replacement(original, *args, **kwargs)
        return isolated(replacement, original, *args, **kwargs)
    except DisabledMeanwhile:
        return original(*args, **kwargs)


def _is_off(patch: Patch, scope: Scope) -> bool:
    """Return whether the original runs in this context.

    Patches that fix a toolkit (`Patch.is_bugfix`) are off only when all patches are, and
    TorchScript may trace them.
    """
    if patch.is_bugfix:
        return registry.mode == "0"
    return registry.mode != "1" or scope.disabled or is_traced_by_torchscript()


def _approved_replacement(entry: Entry) -> Function | None:
    """Return the replacement, or None after counting a fallback to the original."""
    canary = None if entry.patch.is_bugfix else registry.canaries.get(entry.patch.toolkit.name)
    if (
        canary is not None
        and not in_canary()
        and (reason := canary.ask().declines(entry.patch.parts)) is not None
    ):
        if entry.patch.covers:
            notices.warn_of_difference(
                entry.patch.toolkit, canary.version, entry.patch.covers, reason
            )
        fallback(entry.patch.name, f"declined by the canary: {reason}")
        return None
    if entry.replacement is None:
        try:
            entry.replacement = resolve(entry.patch.replacement)
        except Exception as error:
            with registry.lock:
                failure = _fail(entry, error)
            _warn_of_unreachable()
            if in_canary() or settings().strict:
                raise failure from error
            fallback(entry.patch.name, "the replacement could not be imported")
            return None
    return entry.replacement
