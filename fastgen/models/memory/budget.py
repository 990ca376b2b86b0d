"""How much memory copies of weights and kept buffers may take: what the system has left, and ``FASTGEN_MEMORY``."""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fastgen import config

RESERVE, SHARE = 512 * 2**20, 8
"""Bytes, and one part in so many of all memory, of which the larger stays available when a weight is packed.

A call takes keys, values, activations and logits beside the weights, which nobody knows when weights are packed; a
process that the system ends for want of memory is worse than one that is slower.
"""


class SystemMemory(NamedTuple):
    """Memory of the machine within the limits of this process's control groups, in bytes.

    total: what there is. available: what can still be taken without swapping; file pages that can be dropped count.
    """

    total: int
    available: int


def shortage(needed: int, held: int, limit: int | None, system: SystemMemory | None) -> str | None:
    """Return why no memory of so many bytes is to be held between calls; None where it may be.

    Args:
        needed: bytes of what is to be made.
        held: bytes that are held already.
        limit: most bytes to hold in all, which alone decides then; None for as much as the system has room for.
        system: the system's memory; None where it does not say, which is no reason.
    """
    if limit is not None:
        if held + needed <= limit:
            return None
        return f"FASTGEN_MEMORY allows {mib(limit)} in all: {mib(held)} held, {mib(needed)} more needed"
    if system is None:
        return None
    wanted = needed + max(RESERVE, system.total // SHARE)
    if system.available >= wanted:
        return None
    return f"memory is short: {mib(system.available)} available, {mib(wanted)} needed"


def shortage_now(needed: int) -> str | None:
    """Return `shortage` under this process's settings, with what the system has left, or what is held, as it is now."""
    limit = config.settings().memory
    if limit is None:
        return shortage(needed, 0, None, system_memory())
    return shortage(needed, sum(held_bytes().values()), limit, None)


holders: "dict[str, Callable[[], Iterable[tuple[Any, int]]]]" = {}
"""What is held between calls, by name: functions that yield modules and the bytes that are held for each."""


def held_bytes() -> dict[str, int]:
    """Bytes that are held between calls now, by what holds them."""
    return {name: sum(size for _, size in held()) for name, held in holders.items()}


def held_by_model() -> dict[str, dict[str, int]]:
    """The same by model class and by what holds them, where there are any. Parts of a model count as the model."""
    found = [(name, owner, size) for name, held in holders.items() for owner, size in held()]
    parts: dict[int, list[Any]] = {id(owner): list(owner.modules()) for _, owner, _ in found}
    roots: dict[int, Any] = {}
    for owned in sorted(parts.values(), key=len, reverse=True):
        if id(owned[0]) not in roots:
            roots.update({id(part): owned[0] for part in owned})
    sizes: dict[str, dict[str, int]] = {}
    for name, owner, size in found:
        if size:
            of_class = sizes.setdefault(type(roots[id(owner)]).__name__, {})
            of_class[name] = of_class.get(name, 0) + size
    return sizes


def system_memory(root: Path = Path("/")) -> SystemMemory | None:
    """Return how much memory there is, and is left; None where the system does not say.

    Args:
        root: the folder that holds proc and sys.
    """
    found = [each for each in (_of_machine(root), *_of_groups(root)) if each is not None]
    if not found:
        return None
    return SystemMemory(
        min(each.total for each in found), max(0, min(each.available for each in found))
    )


def _of_machine(root: Path) -> SystemMemory | None:
    try:
        lines = (line.split() for line in (root / "proc/meminfo").read_text("utf-8").splitlines())
        sizes = {name: 1024 * int(size) for name, size, *_ in lines}
        return SystemMemory(sizes["MemTotal:"], sizes["MemAvailable:"])
    except (OSError, KeyError, ValueError):
        pass
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        return SystemMemory(
            page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")
        )
    except (AttributeError, OSError, ValueError):  # Windows has no sysconf, macOS not these names
        return None


_GROUPS = (
    ("", "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    (
        "memory",
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)
"""Control groups, version 2 and 1: the controller, where it is mounted, its files, and what it can drop of files."""


def _of_groups(root: Path) -> Iterator[SystemMemory]:
    """The limits of this process's control groups, and of those that these are in."""
    try:
        lines = [
            line.split(":", 2)
            for line in (root / "proc/self/cgroup").read_text("utf-8").splitlines()
        ]
    except OSError:
        lines = []
    paths = {
        controller: path for _, controllers, path in lines for controller in controllers.split(",")
    }
    for controller, mounted, limit, used, droppable in _GROUPS:
        base = root / mounted
        own = base / paths.get(controller, "/").lstrip(
            "/"
        )  # in a container it may be a path of the machine's
        for folder in (own, *own.parents):
            if not folder.is_relative_to(base):
                break
            try:
                most = int((folder / limit).read_text("utf-8"))
                now = int((folder / used).read_text("utf-8"))
            except (OSError, ValueError):  # version 2 writes "max"
                continue
            yield SystemMemory(most, most - now + _droppable(folder / "memory.stat", droppable))


def _droppable(table: Path, name: str) -> int:
    try:
        lines = (line.split() for line in table.read_text("utf-8").splitlines())
        return next((int(size) for key, size in lines if key == name), 0)
    except (OSError, ValueError):
        return 0


def mib(size: int) -> str:
    """Bytes as text, in MiB."""
    return f"{size / 2**20:.0f} MiB"
