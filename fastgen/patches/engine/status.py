"""The report that `fastgen.status()` returns: plain data that prints as a summary."""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fastgen._version import __version__
from fastgen.config import settings
from fastgen.models.memory import budget
from fastgen.ops.counts import calls
from fastgen.patches.engine.canary import Canary
from fastgen.patches.engine.patch import Patch, Toolkit
from fastgen.patches.engine.registry import Entry, Registry, State

if TYPE_CHECKING:
    from fastgen.patches.engine.calls import CallGroup

_PATHS = ("triton", "native", "reference")


@dataclass(frozen=True)
class Row:
    """The status of one patch.

    Attributes:
        name: Name, as used in ``FASTGEN_SKIP``.
        help: One-line description.
        target: The function or method that it wraps.
        state: One of

            - ``"pending"``: the module that it waits for is not imported yet;
            - ``"applied"``;
            - ``"skipped"``: FASTGEN_SKIP names it, the toolkit's version is not supported, or the
              canary found differences;
            - ``"failed"``: the toolkit's code is not as expected;
            - ``"off"``: disabled.
        reason: Why it is in this state; may be empty for an applied patch.
        hits: Number of calls that ran fastgen's code.
        fallbacks: Number of calls that ran the toolkit's own code instead, by reason.
        left_off: Number of calls without some feature, by feature and reason. Also holds the calls
            that were skipped because the original is faster, by reason.
    """

    name: str
    help: str
    target: str
    state: State
    reason: str
    hits: int
    fallbacks: dict[str, int]
    left_off: dict[str, int]


@dataclass(frozen=True)
class ToolkitRow:
    """The status of one toolkit.

    Attributes:
        name: Name of the toolkit.
        found: The imported version, ``"not imported"`` or ``"not installed"``.
        supported: Supported version range.
        tested: Newest tested version.
        canary: For a newer version, the result of comparing it with the unpatched toolkit.
    """

    name: str
    found: str
    supported: str
    tested: str
    canary: str


@dataclass(frozen=True)
class Status:
    """What fastgen has done in this process.

    ``print(status)`` shows a summary. ``status["transformers.beam_search"]`` returns one patch.

    Attributes:
        version: Version of fastgen.
        enabled: Whether all patches are enabled.
        compat: Whether only the patches that fix a toolkit are enabled (``FASTGEN=compat``).
        toolkits: The supported toolkits and the versions found.
        calls: Calls in this process, by model class and decoding method.
        rows: The patches.
        parity: Parity-mode calls (``FASTGEN_PARITY=1``) by outcome: equal, near tie, different, or
            why a call was not compared.
        operations: Calls of the operations that have a Triton kernel or a C implementation, by
            operation and path (triton, native, reference).
        native: State of the C operations for the CPU, with the reason if they do not run; empty
            before any operation has run.
        bild: Counters of drafts, summed over all texts. Big-little decoding: tokens, drafted,
            large_calls, small_calls, fallbacks, rollbacks. Greedy search: tokens_drafted,
            tokens_accepted, passes. Empty if nothing was drafted.
        memory: Bytes held between calls to save time, by holder: packed weights, buffers, CUDA
            graph buffers. `fastgen.release` frees them.
        memory_by_model: The same by model class, for the classes that hold memory.
        not_packed: How many MiB of weights could not be packed for lack of memory, and why; empty
            if all were.
        verbose: Whether to print every patch and operation.
    """

    version: str
    enabled: bool
    compat: bool
    toolkits: tuple[ToolkitRow, ...]
    calls: "tuple[CallGroup, ...]"
    rows: tuple[Row, ...]
    parity: dict[str, int]
    operations: dict[str, dict[str, int]]
    native: str
    bild: dict[str, int]
    memory: dict[str, int]
    memory_by_model: dict[str, dict[str, int]]
    not_packed: str
    verbose: bool = False

    def __getitem__(self, name: str) -> Row:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    def to_dict(self) -> dict[str, Any]:
        """Return the status as plain dicts and tuples, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        parts = [
            self._header(),
            *self._of_calls(),
            *(self._in_full() if self.verbose else self._in_short()),
        ]
        return "\n\n".join("\n".join(lines) for lines in parts if lines)

    def _header(self) -> list[str]:
        """Return the lines on versions, patches in each state, and patches that do not run."""
        state = (
            "enabled"
            if self.enabled
            else "disabled but for what mends toolkits"
            if self.compat
            else "disabled"
        )
        lines = [f"fastgen {self.version}, {state}"]
        for toolkit in self.toolkits:
            rows = [row for row in self.rows if row.name.startswith(f"{toolkit.name}.")]
            states = Counter(row.state for row in rows)
            counts = [f"{states[state]} {text}" for state, text in _STATES.items() if states[state]]
            is_imported = toolkit.found[0].isdigit()
            tested = f" ({toolkit.tested} is the newest tested)" if is_imported else ""
            detail = f": {', '.join(counts)}" if is_imported or not self.enabled else ""
            lines.append(f"{toolkit.name} {toolkit.found}{tested}{detail}")
            if toolkit.canary not in ("", "not needed"):
                lines.append(f"  newer than tested, so that it is compared first: {toolkit.canary}")
            for reason in dict.fromkeys(
                row.reason for row in rows if row.state in ("skipped", "failed")
            ):
                names = [
                    row.name
                    for row in rows
                    if row.state in ("skipped", "failed") and row.reason == reason
                ]
                which = ", ".join(names) if len(names) < 4 else f"{len(names)} patches"
                lines.append(f"  not running, {which}: {reason}")
        return lines

    def _of_calls(self) -> list[list[str]]:
        if not self.calls:
            return [["no calls of generate so far"]]
        head = ("calls", "method", "accelerated", "partly", "not")
        rows = [
            (
                group.model,
                group.method,
                str(group.accelerated),
                str(group.partly),
                str(group.not_accelerated),
            )
            for group in self.calls
        ]
        table, lines = _table(head, rows, numbers=(2, 3, 4)), list[str]()
        for line, group in zip(table[1:], self.calls, strict=True):
            lines.append(line)
            for reason in group.reasons:
                lines.append(f"  {reason.calls} {reason.outcome}: {reason.text}")
                lines += [f"    -> {reason.remedy}"] if reason.remedy else []
        return [[table[0], *lines]]

    def _in_short(self) -> list[list[str]]:
        outcomes = [f"{outcome} {count}" for outcome, count in sorted(self.parity.items())]
        bild = [f"{name} {count}" for name, count in self.bild.items()]
        return [
            [f"operations in C for the CPU: {self.native}"] if self.native else [],
            self._of_memory(),
            [f"parity mode: {', '.join(outcomes)}"] if outcomes else [],
            [f"drafts: {', '.join(bild)}"] if bild else [],
            [
                (
                    "every patch, with all counts: fastgen.status(verbose=True), "
                    "or `fastgen status --all`"
                )
            ],
        ]

    def _of_memory(self) -> list[str]:
        """Return the lines on memory held between calls and on weights that were not packed."""
        lines: list[str] = []
        if any(self.memory.values()):
            lines.append(
                f"memory held for later calls: {_listed(self.memory)}; fastgen.release() drops it"
            )
            lines += [
                f"  {model}: {_listed(sizes)}" for model, sizes in self.memory_by_model.items()
            ]
        return [*lines, *([f"not packed, {self.not_packed}"] if self.not_packed else [])]

    def _in_full(self) -> list[list[str]]:
        toolkits = [(t.name, t.found, t.supported, t.tested, t.canary) for t in self.toolkits]
        patches: list[tuple[str, ...]] = []
        for row in self.rows:
            patches.append(
                (row.name, row.state, str(row.hits), str(sum(row.fallbacks.values())), row.reason)
            )
            patches += [
                ("", "", str(count), "", f"  left off: {what}")
                for what, count in sorted(row.left_off.items())
            ]
            patches += [
                ("", "", "", str(count), f"  fallback: {why}")
                for why, count in sorted(row.fallbacks.items())
            ]
        outcomes = [(outcome, str(count)) for outcome, count in sorted(self.parity.items())]
        bild = [(name, str(count)) for name, count in self.bild.items()]
        operations = [
            (name, *(str(by.get(path, 0)) for path in _PATHS))
            for name, by in self.operations.items()
        ]
        return [
            _table(("toolkit", "found", "supported", "tested", "canary"), toolkits),
            _table(("patch", "state", "hits", "fallbacks", "reason"), patches, numbers=(2, 3)),
            _table(("operation", *_PATHS), operations, numbers=(1, 2, 3)) if operations else [],
            [f"operations in C for the CPU: {self.native}"] if self.native else [],
            self._of_memory(),
            _table(("parity", "calls"), outcomes, numbers=(1,)) if outcomes else [],
            _table(("drafts", "sum"), bild, numbers=(1,)) if bild else [],
        ]


_STATES: dict[State, str] = {
    "applied": "patches run",
    "pending": "wait for modules that are not imported",
    "skipped": "are skipped",
    "failed": "have failed",
    "off": "are off",
}


def _listed(sizes: Mapping[str, int]) -> str:
    ordered = sorted(((count, name) for name, count in sizes.items() if count), reverse=True)
    return ", ".join(f"{name} {readable(count)}" for count, name in ordered)


def readable(count: float) -> str:
    """Format a number of bytes, such as ``1.5 GiB``."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def report(
    registry: Registry, absent: frozenset[str], groups: "tuple[CallGroup, ...]", verbose: bool
) -> Status:
    """Return the current status.

    Args:
        registry: The state of the engine.
        absent: Top-level modules of toolkits that are not installed.
        groups: Calls by model class and decoding method.
        verbose: Whether the status prints every patch.
    """
    entries, versions, canaries = registry.entries.values(), registry.versions, registry.canaries
    toolkits = dict.fromkeys(entry.patch.toolkit for entry in entries)
    return Status(
        __version__,
        registry.mode == "1",
        registry.mode == "compat",
        tuple(
            _toolkit_row(t, versions.get(t.name), canaries.get(t.name), t.module in absent)
            for t in toolkits
        ),
        groups,
        tuple(
            _row(e, canaries.get(e.patch.toolkit.name), e.patch.toolkit.module in absent)
            for e in entries
        ),
        dict(registry.counts.parity),
        {
            name: {p: calls[name, p] for p in _PATHS if calls[name, p]}
            for name in sorted({name for name, _ in calls})
        },
        _native(),
        dict(registry.counts.bild),
        budget.held_bytes(),
        budget.held_by_model(),
        _not_packed(),
        verbose,
    )


def _native() -> str:
    """Return the state of the C operations; empty if no operation has run in this process.

    Calls of other processes may be counted although the library is not loaded here.
    """
    loaded = sys.modules.get("fastgen.ops.native")
    return loaded.state() if calls and loaded is not None else ""


def _not_packed() -> str:
    loaded = sys.modules.get("fastgen.models.layers.packed_weights")
    return "" if loaded is None else loaded.not_packed()


def _toolkit_row(
    toolkit: Toolkit, version: str | None, canary: Canary | None, absent: bool
) -> ToolkitRow:
    found = version or ("not installed" if absent else "not imported")
    canary_text = "not needed" if version else ""
    if canary is not None:
        canary_text = str(canary.verdict or "asked at the first patched call")
    return ToolkitRow(toolkit.name, found, toolkit.versions, toolkit.tested, canary_text)


def _row(entry: Entry, canary: Canary | None, absent: bool) -> Row:
    patch, state, reasons = entry.patch, entry.state, [entry.reason]
    if state == "pending" and absent:
        reasons = [f"{patch.toolkit.name} is not installed", patch.toolkit.install_hint]
    elif state == "pending":
        reasons = [f"{patch.awaited} is not imported yet"]
    elif state == "applied" and (verdict := _declined(patch, canary)) is not None:
        state, reasons = verdict
    elif state == "applied" and entry.layer is not None and not entry.layer.on_top:
        reasons += ["others have patched over it since"]
    elif state == "off":
        reasons = [entry.reason or f"FASTGEN={settings().mode}"]
        if entry.layer is not None:
            reasons += ["our wrapper stays below another's and is transparent"]
    reason = "; ".join(filter(None, reasons))
    return Row(
        patch.name,
        patch.help,
        patch.target,
        state,
        reason,
        entry.hits,
        dict(entry.fallbacks),
        dict(entry.left_off),
    )


def _declined(patch: Patch, canary: Canary | None) -> tuple[State, list[str]] | None:
    """Return the state and reasons of a patch that the canary declined, in full or in part.

    None if the canary declined nothing.
    """
    if canary is None or canary.verdict is None or patch.is_bugfix:
        return None
    if (reason := canary.verdict.declines(patch.parts)) is not None:
        return "skipped", [f"the canary found: {reason}"]
    differing = [
        canary.verdict.differing[part] for part in patch.parts if part in canary.verdict.differing
    ]
    return (
        ("applied", [f"in part, as the canary found: {'; '.join(differing)}"])
        if differing
        else None
    )


def _table(
    head: tuple[str, ...], rows: Sequence[tuple[str, ...]], numbers: tuple[int, ...] = ()
) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines: list[str] = []
    for row in (head, *rows):
        cells = (
            cell.rjust(width) if index in numbers else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return lines
