"""The patch engine: declares patches, applies them when their toolkit is imported, and undoes them.

A patch is data (`Patch`): a target, and a replacement that gets the original as its first argument.
The engine imports neither a toolkit nor torch. Once the target's module is imported, an import hook
installs a plain function in the target's place. The module of the replacement is imported at the
first call that needs it, so that nothing else is imported while a toolkit is.

Authors of patches use `Toolkit`, `Patch` and, in replacements, `hit`, `fallback`, `note_call`,
`declined`, `compared`, `running`, `current_plan`, `in_canary`, `is_applied`, `is_on_top`,
`is_disabled`, `counted` and `merge_counts`. Users call `enable`, `disable`, `disabled`, `status`
and `release`.
"""

import sys
from importlib.util import find_spec

from fastgen.config import Mode, settings
from fastgen.models import state
from fastgen.patches.engine import counts, notices
from fastgen.patches.engine.counts import (
    compared,
    counted,
    fallback,
    hit,
    merge_counts,
    note_call,
    note_drafting,
    note_skipped,
)
from fastgen.patches.engine.installation import hook
from fastgen.patches.engine.patch import FallbackError, Patch, PatchError, Toolkit
from fastgen.patches.engine.registry import Entry, registry
from fastgen.patches.engine.running import (
    DisabledMeanwhile,
    count_running,
    current_plan,
    disabled,
    in_canary,
    is_disabled,
    running,
)
from fastgen.patches.engine.startup import check
from fastgen.patches.engine.status import Status, report

__all__ = [
    "DisabledMeanwhile",
    "FallbackError",
    "Patch",
    "PatchError",
    "Toolkit",
    "check",
    "compared",
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
    "merge_counts",
    "note_call",
    "note_drafting",
    "note_skipped",
    "release",
    "running",
    "start",
    "status",
]


def declare(*patches: Patch) -> None:
    """Register patches for `enable` to apply. Registering the same patch again has no effect.

    Raises:
        ValueError: Another patch has the same name or target.
    """
    with registry.lock:
        for patch in patches:
            for other in (entry.patch for entry in registry.entries.values()):
                if patch != other and (patch.name == other.name or patch.target == other.target):
                    raise ValueError(
                        f"{patch.name} ({patch.target}) collides with {other.name} ({other.target})"
                    )
            registry.entries.setdefault(patch.name, Entry(patch))


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
    with registry.lock:
        registry.mode = mode
        for entry in registry.entries.values():
            if entry.state == "off" and any(entry.patch.within(name) for name in settings().skip):
                entry.settle("skipped", "FASTGEN_SKIP")
            elif entry.state == "off" and (mode == "1" or entry.patch.is_bugfix):
                entry.settle("pending")
        modules = dict.fromkeys(
            e.patch.awaited for e in registry.entries.values() if e.state == "pending"
        )
    first_error: PatchError | None = None
    for module in modules:
        try:
            hook(module)
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
    with registry.lock:
        before, registry.mode = registry.mode, "0"  # no new plan can start from here on
        if running_now := count_running():
            registry.mode = before
            raise RuntimeError(
                f"fastgen.disable() while {running_now} patched generate call(s) are running"
            )
        kept = [
            entry
            for entry in reversed(registry.installed)
            if entry.layer is not None and not entry.layer.remove()
        ]
        registry.installed[:] = reversed(kept)
        for entry in registry.entries.values():
            entry.settle("off", "disabled")
            if entry not in kept:
                entry.layer = None
    if before != "0":
        state.release()


def is_applied(name: str) -> bool:
    """Return whether a patch is applied."""
    return registry.entry(name).state == "applied"


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
    entry = registry.entry(name)
    return entry.state == "applied" and entry.layer is not None and entry.layer.on_top


def declined(toolkit: str, part: str) -> str | None:
    """Return why the canary declined a part, or None if that part can be used.

    Runs the canary if the toolkit is newer than tested, and warns once if the part differs.

    Args:
        toolkit: Toolkit name.
        part: Name of a part of the toolkit's canary.
    """
    canary = registry.canaries.get(toolkit)
    if canary is None or in_canary():
        return None
    reason = canary.ask().declines([part])
    if reason is None:
        return None
    notices.warn_of_difference(registry.toolkit(toolkit), canary.version, part, reason)
    return f"declined by the canary: {reason}"


def status(verbose: bool = False, reset: bool = False) -> Status:
    """Return what fastgen has done in this process: calls, patches, operations and memory.

    Args:
        verbose: Whether the status prints every patch and operation instead of a summary.
        reset: Whether to set all counts to zero after reading them.
    """
    # Imported lazily, to keep `import fastgen` fast.
    from fastgen.patches.engine.calls import groups

    modules = {entry.patch.toolkit.module for entry in tuple(registry.entries.values())}
    absent = frozenset(
        module for module in modules if module not in sys.modules and find_spec(module) is None
    )
    with registry.lock:
        calls = groups(registry.counts.outcomes, registry.counts.reasons)
        current = report(registry, absent, calls, verbose)
        if reset:
            counts.clear()
    return current
