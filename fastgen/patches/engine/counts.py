"""Counting of patched calls: hits, fallbacks, disabled features, and the outcome of users' calls.

The counters are in `registry`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal

from fastgen.config import settings
from fastgen.ops.counts import calls as operations
from fastgen.patches.engine.patch import FallbackError
from fastgen.patches.engine.registry import registry
from fastgen.patches.engine.running import in_canary

Outcome = Literal["accelerated", "partly", "not"]
OUTCOMES: tuple[Outcome, ...] = ("accelerated", "partly", "not")


def hit(name: str, left_off: Iterable[str] = ()) -> None:
    """Count a call that fastgen's code served. Calls made by a canary are not counted.

    Args:
        name: Name of the patch.
        left_off: Features that were disabled in this call, each with its reason.
    """
    entry = registry.entry(name)
    if not in_canary():
        with registry.lock:
            entry.hits += 1
            # Without `iter`, `update` would read the values of a mapping as counts.
            entry.left_off.update(iter(left_off))


def note_skipped(name: str, reason: str) -> None:
    """Count a call that runs the original because that is faster: neither a hit nor a fallback."""
    entry = registry.entry(name)
    if not in_canary():
        with registry.lock:
            entry.left_off[reason] += 1


def fallback(name: str, reason: str, of: tuple[str, str] | None = None) -> None:
    """Count a call that falls back to the original.

    Inside a canary this raises, because a call that falls back verifies nothing.

    Args:
        name: Name of the patch.
        reason: Fallback reason.
        of: Model class and decoding method of a user's call to list in `status`; None for others.

    Raises:
        FallbackError: ``FASTGEN_STRICT=1`` is set or a canary is running.
    """
    entry = registry.entry(name)
    if not in_canary():
        with registry.lock:
            entry.fallbacks[reason] += 1
        if of is not None:
            note_call(entry.patch.toolkit.name, *of, "not", [reason])
    if in_canary() or settings().strict:
        raise FallbackError(name, reason)


def note_call(
    toolkit: str, model: str, method: str, outcome: Outcome, why: Iterable[str] = ()
) -> None:
    """Count a user's call by model class, decoding method and outcome.

    Args:
        toolkit: Toolkit name.
        model: Model class name.
        method: Decoding method.
        outcome: Whether the call was accelerated in full, partly or not at all.
        why: Reasons why the call was not fully accelerated.
    """
    if not in_canary():
        with registry.lock:
            registry.counts.outcomes[toolkit, model, method, outcome] += 1
            registry.counts.reasons.update((toolkit, model, method, outcome, text) for text in why)


def compared(outcome: str) -> None:
    """Count a parity-mode call by outcome: the result of comparison, or why it ran only once."""
    with registry.lock:
        registry.counts.parity[outcome] += 1


def note_drafting(counts: Mapping[str, int]) -> None:
    """Add the counters of a call that drafted tokens, by name."""
    with registry.lock:
        registry.counts.bild.update(counts)


def counted() -> Counter[tuple[str, ...]]:
    """Return all counts so far, keyed by kind and name.

    A forked process sends them to its parent, which adds them with `merge_counts`.
    """
    totals = Counter[tuple[str, ...]](
        {("operation", *key): count for key, count in operations.items()}
    )
    with registry.lock:
        for name, entry in registry.entries.items():
            totals["hit", name] = entry.hits
            totals.update(
                {("fallback", name, why): count for why, count in entry.fallbacks.items()}
            )
            totals.update(
                {("left off", name, what): count for what, count in entry.left_off.items()}
            )
        totals.update({("call", *key): count for key, count in registry.counts.outcomes.items()})
        totals.update({("reason", *key): count for key, count in registry.counts.reasons.items()})
    return totals


def merge_counts(counts: Mapping[tuple[str, ...], int]) -> None:
    """Add the counts that another process got from `counted`."""
    with registry.lock:
        for (kind, name, *rest), count in counts.items():
            if kind == "operation":
                operations[name, rest[0]] += count
            elif kind == "hit":
                registry.entry(name).hits += count
            elif kind == "call":
                registry.counts.outcomes[(name, *rest)] += count
            elif kind == "reason":
                registry.counts.reasons[(name, *rest)] += count
            else:
                entry = registry.entry(name)
                (entry.fallbacks if kind == "fallback" else entry.left_off)[rest[0]] += count


def clear() -> None:
    """Set all counts to zero."""
    with registry.lock:
        for entry in registry.entries.values():
            entry.clear_counts()
        registry.counts.clear()
        operations.clear()
