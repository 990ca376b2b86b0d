"""What patched calls count: hits, fallbacks, what they did without, and how the calls of users went.

`lock` guards these tables and the engine's own. It is never held while something is imported or a replacement or canary
runs.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal

from fastgen.config import settings
from fastgen.ops.counts import calls as operations
from fastgen.patches.engine.canary import asking
from fastgen.patches.engine.patch import FallbackError
from fastgen.patches.engine.status import Entry

Outcome = Literal["accelerated", "partly", "not"]
OUTCOMES: tuple[Outcome, ...] = ("accelerated", "partly", "not")

lock = threading.RLock()
entries: dict[str, Entry] = {}
"""The declared patches, by name."""
outcomes: Counter[tuple[str, ...]] = Counter()
"""Calls of users, by (toolkit, model class, method, outcome)."""
reasons: Counter[tuple[str, ...]] = Counter()
"""Why they were not accelerated in full, by the same and the reason."""
parity: Counter[str] = Counter()
"""Calls of parity mode, by outcome."""
bild: Counter[str] = Counter()
"""What big-little decoding counts, over all texts."""


def hit(name: str, left_off: Iterable[str] = ()) -> None:
    """Count a call that fastgen's code serves, and what it left off. A canary's calls are not counted."""
    entry = entry_of(name)
    if not asking():
        with lock:
            entry.hits += 1
            entry.left_off.update(iter(left_off))  # a mapping would be taken for counts


def left_alone(name: str, reason: str) -> None:
    """Count a call that is left to the original because that is the faster way: no fallback, and no hit."""
    entry = entry_of(name)
    if not asking():
        with lock:
            entry.left_off[reason] += 1


def fallback(name: str, reason: str, of: tuple[str, str] | None = None) -> None:
    """Count a call that is left to the original. A canary's call that falls back proves nothing, so there it raises.

    Args:
        of: model class and method, of a call that a user would look for in `status`.

    Raises:
        FallbackError: ``FASTGEN_STRICT=1``, or a canary runs.
    """
    entry = entry_of(name)
    if not asking():
        with lock:
            entry.fallbacks[reason] += 1
        if of is not None:
            note_call(entry.patch.toolkit.name, *of, "not", [reason])
    if asking() or settings().strict:
        raise FallbackError(name, reason)


def note_call(
    toolkit: str, model: str, method: str, outcome: Outcome, why: Iterable[str] = ()
) -> None:
    """Count a call of a user: of which model class and method, how it ran, and why not better."""
    if not asking():
        with lock:
            outcomes[toolkit, model, method, outcome] += 1
            reasons.update((toolkit, model, method, outcome, text) for text in why)


def compared(outcome: str) -> None:
    """Count a call of parity mode: how its two ways compare, or why it ran only once."""
    with lock:
        parity[outcome] += 1


def decoded_together(counts: Mapping[str, int]) -> None:
    """Add up what the calls of big-little decoding count."""
    with lock:
        bild.update(counts)


def counted() -> Counter[tuple[str, ...]]:
    """What has been counted so far: for a process that was forked, to tell its parent; see `count_too`."""
    found = Counter[tuple[str, ...]](
        {("operation", *key): count for key, count in operations.items()}
    )
    with lock:
        for name, entry in entries.items():
            found["hit", name] = entry.hits
            found.update({("fallback", name, why): count for why, count in entry.fallbacks.items()})
            found.update(
                {("left off", name, what): count for what, count in entry.left_off.items()}
            )
        found.update({("call", *key): count for key, count in outcomes.items()})
        found.update({("reason", *key): count for key, count in reasons.items()})
    return found


def count_too(counts: Mapping[tuple[str, ...], int]) -> None:
    """Add what another process has `counted`."""
    with lock:
        for (kind, name, *rest), count in counts.items():
            if kind == "operation":
                operations[name, rest[0]] += count
            elif kind == "hit":
                entry_of(name).hits += count
            elif kind == "call":
                outcomes[(name, *rest)] += count
            elif kind == "reason":
                reasons[(name, *rest)] += count
            else:
                entry = entry_of(name)
                (entry.fallbacks if kind == "fallback" else entry.left_off)[rest[0]] += count


def forget_all() -> None:
    """Set all counts to zero."""
    with lock:
        for entry in entries.values():
            entry.forget_counts()
        for counts in (outcomes, reasons, parity, bild, operations):
            counts.clear()


def entry_of(name: str) -> Entry:
    """Return a declared patch.

    Raises:
        ValueError: none has the name.
    """
    try:
        return entries[name]
    except KeyError:
        raise ValueError(f"no patch is named {name!r}; there are {', '.join(entries)}") from None
