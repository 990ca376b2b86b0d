"""What outputs depend on, as JSON: digests of files, and what differs between two runs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_MISSING = "not there"
_COMMIT = re.compile("[0-9a-f]{40}")


def digest(path: Path) -> str:
    """What tells a file, or the files of a model's folder, from any other.

    Tokenizers have files of many names: all of a folder count, but for hidden ones, a README, and other folders. A
    snapshot in the hub's cache is told by its commit, as files come to it when somebody needs them.
    """
    if path.parent.name == "snapshots" and _COMMIT.fullmatch(path.name):
        return path.name[:16]
    whole = hashlib.sha256()
    files = [path] if path.is_file() else sorted(f for f in path.iterdir() if _counts(f))
    for file in files:
        with file.open("rb") as stream:
            name = "" if file == path else file.name
            whole.update(f"{name} {hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return whole.hexdigest()[:16]


def _counts(file: Path) -> bool:
    return file.is_file() and not file.name.startswith((".", "README"))


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between the headers of two runs, in words; a mapping's values are told one by one."""
    before, after = _flat(was), _flat(now)
    return [
        f"{name} was {before.get(name, _MISSING)} and is {after.get(name, _MISSING)}"
        for name in after | before
        if before.get(name, _MISSING) != after.get(name, _MISSING)
    ]


def _flat(header: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in header.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found
