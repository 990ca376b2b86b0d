"""Memory budget of packed weights and kept buffers: free memory, or `FASTGEN_MEMORY`."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fastgen import config
from fastgen.models.state import CachedState, held

RESERVE, SHARE = 512 * 2**20, 8
"""Memory to leave available when a weight is packed: bytes, or 1/`SHARE` of the total if larger.

A call needs memory for keys, values, activations and logits as well, in amounts unknown when
weights are packed. A slower process is better than one killed for lack of memory.
"""


class SystemMemory(NamedTuple):
    """Memory of the machine in bytes, within the limits of this process's control groups.

    Attributes:
        total: Total memory.
        available: Memory that can be allocated without swapping, droppable file pages included.
    """

    total: int
    available: int


def shortage(needed: int, held: int, limit: int | None, system: SystemMemory | None) -> str | None:
    """Return why memory must not be held between calls; None where it may be.

    Args:
        needed: Bytes to allocate.
        held: Bytes held already.
        limit: Maximum number of bytes to hold, the only criterion if given; None to use what the
            system has available.
        system: The system's memory; None where unknown, which allows any allocation.
    """
    if limit is not None:
        if held + needed <= limit:
            return None
        return (
            f"FASTGEN_MEMORY allows {mib(limit)} in all: {mib(held)} held, "
            f"{mib(needed)} more needed"
        )
    if system is None:
        return None
    required = needed + max(RESERVE, system.total // SHARE)
    if system.available >= required:
        return None
    return f"memory is short: {mib(system.available)} available, {mib(required)} needed"


def shortage_now(needed: int) -> str | None:
    """Return `shortage` for this process's settings and the current state of memory."""
    limit = config.settings().memory
    if limit is None:
        return shortage(needed, 0, None, system_memory())
    return shortage(needed, sum(held_bytes().values()), limit, None)


def held_bytes() -> dict[str, int]:
    """Return the bytes held between calls now, by label (`models.state.CachedState`)."""
    sizes = {kind.label: 0 for kind in CachedState.__subclasses__() if kind.label}
    for label, _, size in held():
        sizes[label] += size
    return sizes


def held_by_model() -> dict[str, dict[str, int]]:
    """Return the bytes held now, by model class and label; submodules count as their model."""
    parts = [(name, list(owner.modules()), size) for name, owner, size in held() if size]
    roots: dict[int, Any] = {}
    for _, modules, _ in sorted(parts, key=lambda part: len(part[1]), reverse=True):
        if id(modules[0]) not in roots:
            roots.update({id(module): modules[0] for module in modules})
    sizes: dict[str, dict[str, int]] = {}
    for name, modules, size in parts:
        of_class = sizes.setdefault(type(roots[id(modules[0])]).__name__, {})
        of_class[name] = of_class.get(name, 0) + size
    return sizes


def system_memory(root: Path = Path("/")) -> SystemMemory | None:
    """Return the total and available memory; None where the system does not report it.

    Args:
        root: Directory that contains proc and sys.
    """
    limits = [each for each in (_of_machine(root), *_of_groups(root)) if each is not None]
    if not limits:
        return None
    return SystemMemory(
        min(each.total for each in limits), max(0, min(each.available for each in limits))
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
    except (AttributeError, OSError, ValueError):  # Windows lacks sysconf, macOS these names
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
"""Control groups v2 and v1: controller, mount point, limit, usage, key of droppable file pages."""


def _of_groups(root: Path) -> Iterator[SystemMemory]:
    """Yield the limits of this process's control groups and of their ancestors."""
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
        # In a container the path may be one of the host.
        own = base / paths.get(controller, "/").lstrip("/")
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
    """Format a number of bytes in MiB."""
    return f"{size / 2**20:.0f} MiB"
