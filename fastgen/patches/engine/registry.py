"""All that the patch engine keeps in a process: patches, toolkits, running plans, and counts."""

import threading
from collections import Counter
from dataclasses import dataclass, field
from types import CodeType
from typing import TYPE_CHECKING, Literal

from fastgen.config import Mode
from fastgen.patches.engine.patch import Patch, Toolkit
from fastgen.patches.engine.slot import Function, Wrapper

if TYPE_CHECKING:
    from fastgen.patches.engine.canary import Canary

State = Literal["pending", "applied", "skipped", "failed", "off"]


@dataclass(eq=False)
class Entry:
    """A declared patch and its current state. Changes are made under `Registry.lock`."""

    patch: Patch
    state: State = "off"
    reason: str = ""
    hits: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter[str])
    left_off: Counter[str] = field(default_factory=Counter[str])
    layer: Wrapper | None = None
    replacement: Function | None = None

    def settle(self, state: State, reason: str = "") -> None:
        """Set the state and its reason."""
        self.state, self.reason = state, reason

    def clear_counts(self) -> None:
        """Set what is counted to zero."""
        self.hits = 0
        self.fallbacks.clear()
        self.left_off.clear()


@dataclass(eq=False)
class Counts:
    """Counters of users' calls; those of single patches are in their `Entry`.

    Attributes:
        outcomes: Number of calls by (toolkit, model class, method, outcome).
        reasons: Number of calls by (toolkit, model class, method, outcome, reason), for those that
            were not fully accelerated.
        parity: Number of parity-mode calls by outcome.
        bild: Counters of big-little decoding, summed over all texts.
    """

    outcomes: Counter[tuple[str, ...]] = field(default_factory=Counter[tuple[str, ...]])
    reasons: Counter[tuple[str, ...]] = field(default_factory=Counter[tuple[str, ...]])
    parity: Counter[str] = field(default_factory=Counter[str])
    bild: Counter[str] = field(default_factory=Counter[str])

    def clear(self) -> None:
        """Set all counters to zero."""
        for counter in (self.outcomes, self.reasons, self.parity, self.bild):
            counter.clear()


@dataclass(eq=False)
class Registry:
    """The state of the engine.

    Attributes:
        lock: Guards everything here. It is never held during an import or while a replacement or a
            canary runs.
        mode: Which patches are enabled: all, those that fix a toolkit, or none.
        entries: The declared patches, by name.
        installed: Patches with a wrapper, in the order of installation; undone in reverse.
        unreachable: Patches that are not applied and whose target cannot warn at its first call.
            The warnings are issued without holding `lock`.
        versions: Installed version by toolkit name.
        canaries: Canary by toolkit name, for versions newer than tested.
        hooked: Modules whose import is awaited.
        running: For each running plan: its thread, and the code object that entered `running`.
        warnings: Texts of the warnings that were issued, each once.
        counts: Counters of users' calls.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)
    mode: Mode = "0"
    entries: dict[str, Entry] = field(default_factory=dict[str, Entry])
    installed: list[Entry] = field(default_factory=list[Entry])
    unreachable: list[Entry] = field(default_factory=list[Entry])
    versions: dict[str, str] = field(default_factory=dict[str, str])
    canaries: "dict[str, Canary]" = field(default_factory=dict[str, "Canary"])
    hooked: set[str] = field(default_factory=set[str])
    running: list[tuple[int, CodeType]] = field(default_factory=list[tuple[int, CodeType]])
    warnings: set[str] = field(default_factory=set[str])
    counts: Counts = field(default_factory=Counts)

    def entry(self, name: str) -> Entry:
        """Return the record of a declared patch.

        Raises:
            ValueError: No declared patch has this name.
        """
        try:
            return self.entries[name]
        except KeyError:
            names = ", ".join(self.entries)
            raise ValueError(f"no patch is named {name!r}; there are {names}") from None

    def toolkit(self, name: str) -> Toolkit:
        """Return the toolkit of this name, of which patches are declared."""
        toolkits = (entry.patch.toolkit for entry in self.entries.values())
        return next(toolkit for toolkit in toolkits if toolkit.name == name)


registry = Registry()
