"""The patch engine: declares patches, applies them when their toolkit is imported, and undoes them.

A patch is data (`Patch`): a target, and a replacement that gets the original as its first argument.
The engine imports neither a toolkit nor torch. Once the target's module is imported, an import hook
installs a plain function in the target's place. The module of the replacement is imported at the
first call that needs it, so that nothing else is imported while a toolkit is.

Authors of patches use `Toolkit`, `Patch` and, in replacements, `hit`, `fallback`, `note_call`,
`declined`, `compared`, `running`, `current_plan`, `in_canary`, `is_applied`, `is_on_top`,
`is_disabled`, `counted` and `count_too`. Users call `enable`, `disable`, `disabled`, `status` and
`release`.
"""

import functools
import inspect
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from types import CodeType, FrameType, ModuleType
from typing import Any, Generic, TypeVar, cast

from fastgen.config import Mode, settings
from fastgen.context import assigned, isolated
from fastgen.models import state
from fastgen.patches.engine import counts, notices
from fastgen.patches.engine.canary import Canary, in_canary, resolve
from fastgen.patches.engine.compilers import is_traced_by_torchscript
from fastgen.patches.engine.counts import (
    compared,
    count_too,
    counted,
    entries,
    entry_of,
    fallback,
    hit,
    lock,
    note_call,
    note_drafting,
    note_skipped,
)
from fastgen.patches.engine.imports import unfinished, when_finished, when_imported
from fastgen.patches.engine.patch import FallbackError, Patch, PatchError, Toolkit
from fastgen.patches.engine.slot import Function, Layer, Slot, function_in
from fastgen.patches.engine.startup import check
from fastgen.patches.engine.status import Entry, Status, report

__all__ = [
    "DisabledMeanwhile",
    "FallbackError",
    "Patch",
    "PatchError",
    "Toolkit",
    "check",
    "compared",
    "count_too",
    "counted",
    "current_plan",
    "declare",
    "declined",
    "disable",
    "disabled",
    "enable",
    "fallback",
    "hit",
    "in_canary",
    "is_applied",
    "is_disabled",
    "is_on_top",
    "note_call",
    "note_drafting",
    "note_skipped",
    "release",
    "running",
    "start",
    "status",
]

_Plan = TypeVar("_Plan")


class DisabledMeanwhile(Exception):
    """Raised when `disable` ran after a patched call began and before its plan started."""


class _NotYet(Exception):
    """Raised when a patch has to wait because ``module`` is only partially imported."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module


current_plan: ContextVar[Any] = ContextVar("fastgen_plan", default=None)
"""The plan that is running in this context, or None. Inner patches read the outermost plan here."""

_mode: Mode = "0"  # which patches are enabled: all, those that fix a toolkit, or none
# For each running plan: its thread, and the code object that entered `running`.
_running: list[tuple[int, CodeType]] = []
_installed: list[Entry] = []  # in the order of installation; undone in reverse
_versions: dict[str, str] = {}  # installed version by toolkit name
_canaries: dict[str, Canary] = {}  # canary by toolkit name, for versions newer than tested
# Patches that are not applied and whose target cannot warn at its first call. The warnings are
# issued without holding `lock`.
_out_of_reach: list[Entry] = []
_disabled_here: ContextVar[bool] = ContextVar("fastgen_disabled", default=False)


def declare(*patches: Patch) -> None:
    """Register patches for `enable` to apply. Registering the same patch again has no effect.

    Raises:
        ValueError: Another patch has the same name or target.
    """
    with lock:
        for patch in patches:
            for other in (entry.patch for entry in entries.values()):
                if patch != other and (patch.name == other.name or patch.target == other.target):
                    raise ValueError(
                        f"{patch.name} ({patch.target}) collides with {other.name} ({other.target})"
                    )
            entries.setdefault(patch.name, Entry(patch))


def start() -> None:
    """Apply the patches that ``FASTGEN`` selects.

    ``1`` selects all, ``compat`` those that fix a toolkit, and ``0`` none.

    Raises:
        SetupError: A variable has an invalid value, or a package is missing. Nothing has changed.
        PatchError: A patch failed and ``FASTGEN_STRICT=1`` is set. All others are applied.
    """
    check()
    if settings().mode != "0":
        _switch_on(settings().mode)


def enable() -> None:
    """Apply every declared patch, now or as soon as its module is imported. Idempotent.

    Raises:
        SetupError: A variable has an invalid value, or a package is missing. Nothing has changed.
        PatchError: A patch failed and ``FASTGEN_STRICT=1`` is set. All others are applied.
    """
    check()
    _switch_on("1")


def _switch_on(mode: Mode) -> None:
    global _mode
    with lock:
        _mode = mode
        for entry in entries.values():
            if entry.state == "off" and any(entry.patch.within(name) for name in settings().skip):
                entry.settle("skipped", "FASTGEN_SKIP")
            elif entry.state == "off" and (mode == "1" or entry.patch.mends):
                entry.settle("pending")
        modules = dict.fromkeys(e.patch.awaited for e in entries.values() if e.state == "pending")
    first_error: PatchError | None = None
    for module in modules:
        try:
            _hook(module)
        except PatchError as error:
            first_error = first_error or error
    if first_error is not None:
        raise first_error


def disable() -> None:
    """Undo all patches and drop the caches. Idempotent.

    An original is restored only if our wrapper is still on top. A wrapper that others have wrapped
    since stays below theirs and becomes transparent; `status` reports it.

    Raises:
        RuntimeError: A plan is running in some thread. Nothing has changed.
    """
    global _mode
    with lock:
        before, _mode = _mode, "0"  # no new plan can start from here on
        if running_now := _count_running():
            _mode = before
            raise RuntimeError(
                f"fastgen.disable() while {running_now} patched generate call(s) are running"
            )
        kept = [
            entry
            for entry in reversed(_installed)
            if entry.layer is not None and not entry.layer.remove()
        ]
        _installed[:] = reversed(kept)
        for entry in entries.values():
            entry.settle("off", "disabled")
            if entry not in kept:
                entry.layer = None
    if before != "0":
        state.release()


@contextmanager
def disabled() -> Generator[None]:
    """Run the toolkit's own code for patched calls in this context (thread or task) only.

    These calls are not counted.
    """
    before = _disabled_here.get()
    try:
        _disabled_here.set(True)
        yield
    finally:
        _disabled_here.set(before)


def is_disabled() -> bool:
    """Return whether patched calls in this context run the toolkit's own code."""
    return _mode != "1" or _disabled_here.get()


def is_applied(name: str) -> bool:
    """Return whether a patch is applied."""
    return entry_of(name).state == "applied"


def release() -> None:
    """Free everything that is kept between calls to save time, and return its memory to the system.

    Later calls create it again when they need it:

    - Packed copies of weights: a weight is packed again at its third use.
    - Buffers for keys and values and for large outputs: the next call allocates new ones. Buffers
      of a running call stay until that call ends.
    - CUDA graphs and their static buffers: the next call captures new ones.

    Deleting a model frees all of this for that model; `release` is for models that stay in use.
    After a call that ran out of memory, it also re-enables the packing of weights.
    """
    state.release()


def is_on_top(name: str) -> bool:
    """Return whether a patch is applied and no other wrapper is on top of it."""
    entry = entry_of(name)
    return entry.state == "applied" and entry.layer is not None and entry.layer.on_top


class running(Generic[_Plan]):
    """Context manager that sets `current_plan`. While any plan runs, `disable` raises.

    Enter it with a `with` statement before the call has side effects. If `disable` ran first, it
    raises an exception of the engine, which then runs the original.

    Args:
        plan: The plan of the call.

    Raises:
        DisabledMeanwhile: The patches have been disabled.
    """

    def __init__(self, plan: _Plan) -> None:
        self._assigned = assigned(current_plan, plan)

    def __enter__(self) -> _Plan:
        self._place = (
            threading.get_ident(),
            cast(FrameType, cast(FrameType, inspect.currentframe()).f_back).f_code,
        )
        _running.append(self._place)
        if _mode != "1":
            _running.remove(self._place)
            raise DisabledMeanwhile
        return self._assigned.__enter__()

    def __exit__(self, *_: object) -> None:
        self._assigned.__exit__()
        _running.remove(self._place)


def _count_running() -> int:
    """Return the number of running plans.

    Plans that are on no thread's stack were left in the list by an interrupt, and are removed.
    """
    on_stacks = {
        (thread, code)
        for thread, top in cast(Any, sys)._current_frames().items()
        for code in _codes(top)
    }
    for place in [place for place in _running if place not in on_stacks]:
        _running.remove(place)
    return len(_running)


def _codes(frame: FrameType | None) -> Iterator[CodeType]:
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def declined(toolkit: str, part: str) -> str | None:
    """Return why the canary declined a part, or None if that part can be used.

    Runs the canary if the toolkit is newer than tested, and warns once if the part differs.

    Args:
        toolkit: Toolkit name.
        part: Name of a part of the toolkit's canary.
    """
    canary = _canaries.get(toolkit)
    if canary is None or in_canary():
        return None
    reason = canary.ask().declines([part])
    if reason is None:
        return None
    notices.warn_of_difference(_toolkit(toolkit), canary.version, part, reason)
    return f"declined by the canary: {reason}"


def status(verbose: bool = False, reset: bool = False) -> Status:
    """Return what fastgen has done in this process: calls, patches, operations and memory.

    Args:
        verbose: Whether the status prints every patch and operation instead of a summary.
        reset: Whether to set all counts to zero after reading them.
    """
    # Imported lazily, to keep `import fastgen` fast.
    from fastgen.patches.engine.calls import groups

    modules = {entry.patch.toolkit.module for entry in tuple(entries.values())}
    absent = frozenset(
        module for module in modules if module not in sys.modules and find_spec(module) is None
    )
    with lock:
        current = report(
            _mode,
            tuple(entries.values()),
            _versions,
            _canaries,
            absent,
            groups(counts.outcomes, counts.reasons),
            counts.parity,
            counts.bild,
            verbose,
        )
        if reset:
            counts.forget_all()
    return current


def _hook(module: str) -> None:
    top = module.partition(".")[0]
    # A failed import of the package left this submodule behind. It will be imported again.
    if module in sys.modules and top not in sys.modules:
        for name in [name for name in sys.modules if name.startswith(f"{top}.")]:
            del sys.modules[name]
    when_imported(module, lambda: _arrive(module))


def _arrive(module: str) -> None:
    """Apply the pending patches of a module that is in sys.modules, perhaps partially imported."""
    errors: list[PatchError] = []
    with lock:
        for entry in entries.values():
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
                    when_finished(wait.module, lambda: _hook(module))
                except ValueError as error:
                    errors.append(_fail(entry, error))
            except Exception as error:  # never break the user's import
                errors.append(_fail(entry, error))
    _warn_of_those_out_of_reach()
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
    version = _versions[toolkit.name] = str(installed)
    if not toolkit.supports(version):
        advice = "; ".join(filter(None, (f"{toolkit.versions} is supported", toolkit.install_hint)))
        entry.settle("skipped", f"{toolkit.name} {version} found; {advice}")
        same_toolkit = (
            other
            for other in entries.values()
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
    if newer and toolkit.canary is not None and not patch.mends:
        canary = _canaries.get(toolkit.name)
        if canary is None or canary.version != version:
            _canaries[toolkit.name] = Canary(
                toolkit.canary, toolkit.name, version, settings().cache_dir
            )
    _install(entry, slot)
    entry.settle("applied", f"newer than {toolkit.tested}, the newest tested" if newer else "")


def _install(entry: Entry, slot: Slot) -> None:
    if entry.layer is not None and entry.layer.reachable:
        entry.layer.active = True  # `disable` left it below another wrapper
    else:
        entry.layer = Layer(slot, functools.partial(_call, entry))
        entry.layer.install()
        _installed[:] = [*(other for other in _installed if other is not entry), entry]


def _watch(entry: Entry, module: ModuleType) -> None:
    """Make the first call of a target warn that its patch could not be applied.

    Does nothing for patches that users would not miss.
    """
    if not entry.patch.covers:
        return
    try:
        _install(entry, entry.patch.address.find(module))
    except (LookupError, TypeError):  # the target cannot be wrapped
        _out_of_reach.append(entry)


def _warn_of_those_out_of_reach() -> None:
    """Warn of patches in `_out_of_reach`, without holding `lock`.

    Users can turn warnings into exceptions or handle them with their own code.
    """
    while _out_of_reach:
        notices.warn_of_patch(_out_of_reach.pop(0), _versions)


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
    if _is_off(entry.patch) or (entry.patch.inner and current_plan.get() is None):
        return original(*args, **kwargs)
    if entry.state != "applied":
        notices.warn_of_patch(entry, _versions)
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
        if entry.patch.inner or current_plan.get() is not None:
            return replacement(original, *args, **kwargs)
        return isolated(replacement, original, *args, **kwargs)
    except DisabledMeanwhile:
        return original(*args, **kwargs)


def _is_off(patch: Patch) -> bool:
    """Return whether the original runs in this context.

    Patches that fix a toolkit (`Patch.mends`) are off only when all patches are, and TorchScript
    may trace them.
    """
    return _mode == "0" if patch.mends else is_disabled() or is_traced_by_torchscript()


def _approved_replacement(entry: Entry) -> Function | None:
    """Return the replacement, or None after counting a fallback to the original."""
    canary = None if entry.patch.mends else _canaries.get(entry.patch.toolkit.name)
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
            with lock:
                failure = _fail(entry, error)
            _warn_of_those_out_of_reach()
            if in_canary() or settings().strict:
                raise failure from error
            fallback(entry.patch.name, "the replacement could not be imported")
            return None
    return entry.replacement


def _toolkit(name: str) -> Toolkit:
    return next(
        entry.patch.toolkit for entry in entries.values() if entry.patch.toolkit.name == name
    )
