"""The patch engine: declare what is to be patched; apply it when its toolkit is imported; undo it; report on it.

A patch is data (`Patch`): a target, and a replacement that gets the original as its first argument. The engine imports
no toolkit and not torch. An import hook puts a plain function into the target's place once its module is there; the
replacement's own module is imported at the first call that needs it, so that nothing is imported while a toolkit is.

A toolkit's author of patches needs `Toolkit`, `Patch` and, in replacements, `hit`, `fallback`, `note_call`,
`declined`, `compared`, `running`, `current_plan`, `asking`, `is_applied`, `is_on_top`, `is_disabled`, `counted`,
`count_too`, `on_disable` and `on_release`; users need `enable`, `disable`, `disabled`, `status` and `release`.
"""

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from types import CodeType, FrameType, ModuleType
from typing import Any, Generic, TypeVar, cast

from fastgen.config import Mode, settings
from fastgen.context import assigned, isolated
from fastgen.patches.engine import counts, notices
from fastgen.patches.engine.canary import Canary, asking, resolve
from fastgen.patches.engine.compilers import is_traced_by_torchscript
from fastgen.patches.engine.counts import (
    compared,
    count_too,
    counted,
    decoded_together,
    entries,
    entry_of,
    fallback,
    hit,
    left_alone,
    lock,
    note_call,
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
    "asking",
    "check",
    "compared",
    "count_too",
    "counted",
    "current_plan",
    "declare",
    "declined",
    "decoded_together",
    "disable",
    "disabled",
    "enable",
    "fallback",
    "hit",
    "is_applied",
    "is_disabled",
    "is_on_top",
    "left_alone",
    "note_call",
    "on_disable",
    "on_release",
    "release",
    "running",
    "start",
    "status",
]

_Plan = TypeVar("_Plan")
_Callback = TypeVar("_Callback", bound=Callable[[], object])


class DisabledMeanwhile(Exception):
    """`disable` came between the start of a patched call and the start of its plan."""


class _NotYet(Exception):
    """What a patch needs may still come, as ``module`` is half imported."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module


current_plan: ContextVar[Any] = ContextVar("fastgen_plan", default=None)
"""The plan that runs in this context, None outside of one: how an inner patch knows what the outermost decided."""

_mode: Mode = "0"  # what is switched on: all patches, those that mend, or none
_running: list[
    tuple[int, CodeType]
] = []  # the thread of each plan, and the code that has entered `running`
_installed: list[Entry] = []  # in the order of installation; undone from the end
_versions: dict[str, str] = {}  # toolkit name -> version found
_canaries: dict[str, Canary] = {}  # toolkit name -> the canary of a version newer than tested
_out_of_reach: list[
    Entry
] = []  # not applied, and no call of theirs can tell: to be warned of outside of `lock`
_disable_callbacks: list[Callable[[], object]] = []
_release_callbacks: list[Callable[[], object]] = []
_disabled_here: ContextVar[bool] = ContextVar("fastgen_disabled", default=False)


def declare(*patches: Patch) -> None:
    """Add patches to the table; `enable` applies them. Declaring the same patch again changes nothing.

    Raises:
        ValueError: another patch has the name or the target.
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
    """Apply what ``FASTGEN`` asks for: every patch, those that mend a toolkit (compat), or none (0).

    Raises:
        SetupError: a variable holds a value that it cannot have, or a package is missing; nothing has been changed.
        PatchError: as `enable` does.
    """
    check()
    if settings().mode != "0":
        _switch_on(settings().mode)


def enable() -> None:
    """Apply every declared patch: now where its module is imported, else when it is. Twice is harmless.

    Raises:
        SetupError: a variable holds a value that it cannot have, or a package is missing; nothing has been changed.
        PatchError: a patch failed and ``FASTGEN_STRICT=1``; all others have been applied.
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
    """Take all patches out again and drop the caches. Twice is harmless.

    An original is put back only where our wrapper is still what lies there. A wrapper that others have wrapped since
    stays below theirs and becomes transparent; `status` says so.

    Raises:
        RuntimeError: a plan is running, in whatever thread; nothing has been changed.
    """
    global _mode
    with lock:
        before, _mode = _mode, "0"  # from here on none begins
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
        for callback in (*_disable_callbacks, *_release_callbacks):
            callback()


@contextmanager
def disabled() -> Generator[None]:
    """In this context (thread, task) only, patched calls run the toolkit's own code, uncounted."""
    before = _disabled_here.get()
    try:
        _disabled_here.set(True)
        yield
    finally:
        _disabled_here.set(before)


def is_disabled() -> bool:
    """Whether patched calls of this context run the toolkit's own code."""
    return _mode != "1" or _disabled_here.get()


def is_applied(name: str) -> bool:
    """Whether a patch is in place."""
    return entry_of(name).state == "applied"


def release() -> None:
    """Drop what is kept between calls to save time, and give its memory back to the system.

    It comes back with the calls that need it:

    - packed copies of weights: a weight is packed again at its third use.
    - buffers, for keys and values and for large outputs: the next call allocates its own. What a running call uses
      stays until that call ends.
    - CUDA graphs and the memory they run over: the next call captures its own.

    A model that is deleted takes all of this with it; `release` is for models that stay. After a call that ran out of
    memory it also lets weights be packed again.
    """
    for callback in tuple(_release_callbacks):
        callback()


def is_on_top(name: str) -> bool:
    """Whether a patch is in place, and nobody has patched over it since."""
    entry = entry_of(name)
    return entry.state == "applied" and entry.layer is not None and entry.layer.on_top


class running(Generic[_Plan]):
    """Make ``plan`` the context's `current_plan` within a `with` block. While any plan runs, `disable` raises.

    To be entered by a `with` statement before the call has any side effect: should `disable` have come first, this
    leaves the replacement by an exception that is the engine's own, and the original runs.

    Raises:
        DisabledMeanwhile: nothing is patched.
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
    """How many plans run. Those that an interrupt has left in the list, which no stack shows, are taken out."""
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
    """Return why a part of a toolkit newer than tested cannot be relied on, and warn once; None where it can."""
    canary = _canaries.get(toolkit)
    if canary is None or asking():
        return None
    found = canary.ask().declines([part])
    if found is None:
        return None
    notices.warn_of_difference(_toolkit(toolkit), canary.version, part, found)
    return f"declined by the canary: {found}"


def on_disable(callback: _Callback) -> _Callback:
    """Have ``callback()`` called after each `disable`. Usable as a decorator."""
    _disable_callbacks.append(callback)
    return callback


def on_release(callback: _Callback) -> _Callback:
    """Have ``callback()`` drop a cache at each `release` and `disable`. Usable as a decorator."""
    _release_callbacks.append(callback)
    return callback


def status(verbose: bool = False, reset: bool = False) -> Status:
    """Return what fastgen has done in this process: calls by model and method, patches, operations, memory.

    Args:
        verbose: let it print every patch and operation, and not the summary alone.
        reset: set all counts to zero, once they have been read.
    """
    from fastgen.patches.engine.calls import groups  # which `import fastgen` need not wait for

    modules = {entry.patch.toolkit.module for entry in tuple(entries.values())}
    absent = frozenset(
        module for module in modules if module not in sys.modules and find_spec(module) is None
    )
    with lock:
        found = report(
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
    return found


def _hook(module: str) -> None:
    top = module.partition(".")[0]
    if (
        module in sys.modules and top not in sys.modules
    ):  # left by an import that failed: to be imported anew
        for name in [name for name in sys.modules if name.startswith(f"{top}.")]:
            del sys.modules[name]
    when_imported(module, lambda: _arrive(module))


def _arrive(module: str) -> None:
    """Apply the pending patches of a module that is in sys.modules, perhaps half imported."""
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
                # The awaited import may yet fail and be tried again: hook the module anew rather than look for it.
                try:
                    when_finished(wait.module, lambda: _hook(module))
                except ValueError as error:
                    errors.append(_fail(entry, error))
            except Exception as error:  # whatever it is, the user's import goes on
                errors.append(_fail(entry, error))
    _warn_of_those_out_of_reach()
    if errors and settings().strict:
        raise errors[0]


def _apply(entry: Entry) -> None:
    patch, toolkit = entry.patch, entry.patch.toolkit
    top, module = sys.modules[toolkit.module], sys.modules[patch.address.module]
    found = getattr(top, "__version__", None)
    if found is None:
        if unfinished(top):
            raise _NotYet(top)
        raise ValueError(f"{toolkit.module} has no __version__; {toolkit.versions} is supported")
    version = _versions[toolkit.name] = str(found)
    if not toolkit.supports(version):
        advice = "; ".join(filter(None, (f"{toolkit.versions} is supported", toolkit.install_hint)))
        entry.settle("skipped", f"{toolkit.name} {version} found; {advice}")
        alike = (
            other
            for other in entries.values()
            if other.patch.toolkit == toolkit and other.layer is not None
        )
        if not any(other.state == "skipped" for other in alike):  # one says it for all
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
        entry.layer.active = True  # disable() had to leave it below another's wrapper
    else:
        entry.layer = Layer(slot, functools.partial(_call, entry))
        entry.layer.install()
        _installed[:] = [*(other for other in _installed if other is not entry), entry]


def _watch(entry: Entry, module: ModuleType) -> None:
    """Have the first call of a target warn, as its patch cannot be applied and users would miss it."""
    if not entry.patch.covers:
        return
    try:
        _install(entry, entry.patch.address.find(module))
    except (LookupError, TypeError):  # there is nothing to call
        _out_of_reach.append(entry)


def _warn_of_those_out_of_reach() -> None:
    """Warn of them with no lock held: a warning may be made an exception, or shown by code of the user's."""
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
    """Run what a patched target runs: the replacement, or the original where that is switched off or declined."""
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
    """Whether the original runs in this context; what mends is off where everything is, and can be traced."""
    return _mode == "0" if patch.mends else is_disabled() or is_traced_by_torchscript()


def _approved_replacement(entry: Entry) -> Function | None:
    """Return the replacement; None where the original must run, which is then counted."""
    canary = None if entry.patch.mends else _canaries.get(entry.patch.toolkit.name)
    if (
        canary is not None
        and not asking()
        and (found := canary.ask().declines(entry.patch.parts)) is not None
    ):
        if entry.patch.covers:
            notices.warn_of_difference(
                entry.patch.toolkit, canary.version, entry.patch.covers, found
            )
        fallback(entry.patch.name, f"declined by the canary: {found}")
        return None
    if entry.replacement is None:
        try:
            entry.replacement = resolve(entry.patch.replacement)
        except Exception as error:
            with lock:
                failure = _fail(entry, error)
            _warn_of_those_out_of_reach()
            if asking() or settings().strict:
                raise failure from error
            fallback(entry.patch.name, "the replacement could not be imported")
            return None
    return entry.replacement


def _toolkit(name: str) -> Toolkit:
    return next(
        entry.patch.toolkit for entry in entries.values() if entry.patch.toolkit.name == name
    )
