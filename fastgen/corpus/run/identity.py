"""Identity of outputs: what they depend on, as JSON, with digests of files."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fastgen
from fastgen.corpus.models import folder_of

if TYPE_CHECKING:
    from fastgen.corpus.run.job import Job

_MISSING = "not there"
_COMMIT = re.compile("[0-9a-f]{40}")
_NO_MATTER = ("threads",)  # options that change only speed and rounding


def header_of(job: Job) -> dict[str, Any]:
    """Return everything that the bytes of an output depend on, JSON-ready."""
    options = {
        option.name: _as_json(getattr(job.options, option.name))
        for option in fields(job.options)
        if option.name not in _NO_MATTER
    }
    header = {
        "source": job.source.identity(), "sink": job.sink.identity(),
        "options": options | {"device": _device(job)}, "block": job.block, "versions": versions(),
    }  # fmt: skip
    return json.loads(json.dumps(header))


def _as_json(value: Any) -> Any:
    return digest(folder_of(value)) if isinstance(value, Path) else value


def _device(job: Job) -> str:
    """Return the type of the device, without its index."""
    import torch

    named = job.options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return named.partition(":")[0]


def versions() -> dict[str, str]:
    """Return the versions of the packages that an output depends on."""
    installed = {
        name: importlib.metadata.version(name) for name in ("torch", "transformers", "tokenizers")
    }
    return installed | {"fastgen": fastgen.__version__}


def digest(path: Path) -> str:
    """Return a digest that identifies a file, or the files of a model's folder.

    In a folder, all files count except hidden ones, READMEs and subfolders, since tokenizers have
    files of many names. A snapshot in the hub's cache is identified by its commit, since files are
    added to it on demand.
    """
    if path.parent.name == "snapshots" and _COMMIT.fullmatch(path.name):
        return path.name[:16]
    sha256 = hashlib.sha256()
    files = [path] if path.is_file() else sorted(f for f in path.iterdir() if _counts(f))
    for file in files:
        with file.open("rb") as stream:
            name = "" if file == path else file.name
            sha256.update(f"{name} {hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return sha256.hexdigest()[:16]


def _counts(file: Path) -> bool:
    return file.is_file() and not file.name.startswith((".", "README"))


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what differs between the headers of two runs, in words, key by key.

    Args:
        was: header of the earlier run.
        now: header of this run.
    """
    before, after = _flat(was), _flat(now)
    return [
        f"{name} was {before.get(name, _MISSING)} and is {after.get(name, _MISSING)}"
        for name in after | before
        if before.get(name, _MISSING) != after.get(name, _MISSING)
    ]


def _flat(header: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in header.items():
        found |= (
            _flat(value, f"{prefix}{name}.")
            if isinstance(value, Mapping)
            else {f"{prefix}{name}": value}
        )
    return found
