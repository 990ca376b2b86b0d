"""Canary tests for toolkit versions newer than the newest tested one.

A canary runs small models with and without fastgen, once per combination of installed versions, and
compares the outputs part by part. The verdict is cached on disk.
"""

import hashlib
import json
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from fastgen._version import __version__
from fastgen.patches.engine.running import canary_scope


@dataclass(frozen=True)
class Verdict:
    """The result of running a canary.

    Attributes:
        parts: Names of all parts that ran.
        differing: Description of the difference, for each part that differs.
        failed: Why the canary could not run; empty if it ran.
        kept: Where the result is cached, or why it is not.
    """

    parts: tuple[str, ...] = ()
    differing: dict[str, str] = field(default_factory=dict[str, str])
    failed: str = ""
    kept: str = ""

    @property
    def equal(self) -> bool:
        """Whether the canary ran and all parts agree."""
        return not (self.failed or self.differing)

    def declines(self, parts: Iterable[str]) -> str | None:
        """Return why none of the given parts can be relied on, or None if at least one agrees.

        Args:
            parts: Names of parts; if empty, all parts of the canary.
        """
        if self.failed:
            return self.failed
        differences = [self.differing.get(part) for part in tuple(parts) or self.parts]
        return (
            "; ".join(dict.fromkeys(filter(None, differences)))
            if differences and all(differences)
            else None
        )

    def __str__(self) -> str:
        if self.failed:
            return f"not tried: {self.failed} ({self.kept})"
        if self.equal:
            return f"all {len(self.parts)} parts agree ({self.kept})"
        differing = "; ".join(dict.fromkeys(self.differing.values()))
        agree = len(self.parts) - len(self.differing)
        return (
            f"{len(self.differing)} of {len(self.parts)} parts differ: {differing}; "
            f"{agree} agree ({self.kept})"
        )


class Canary:
    """Runs the canary of one toolkit version and caches its verdict in memory and on disk.

    The verdict is keyed by the versions of the toolkit, fastgen, torch and Python. A part that
    raises counts as different. The verdict is then not written to disk, because the cause (out of
    memory, for example) may be temporary.

    Args:
        function: ``"module:function"``. It returns the parts by name. Each part is a function that
            runs the toolkit both ways and returns a description of the difference, or None. It must
            not wait for patched calls in other threads, because those wait for the verdict.
        toolkit: Name of the toolkit.
        version: Version of the toolkit.
        folder: Cache folder; created when needed.
    """

    def __init__(self, function: str, toolkit: str, version: str, folder: Path) -> None:
        self.function = function
        self.toolkit = toolkit
        self.version = version
        self.folder = folder
        self.verdict: Verdict | None = None
        # Reentrant, because a signal handler of the same thread may call `ask`.
        self._lock = threading.RLock()

    def ask(self) -> Verdict:
        """Return the verdict from memory or disk, or run the canary now.

        Other threads that call this meanwhile block. Code that runs inside the canary must check
        `in_canary()` and not call this.
        """
        if self.verdict is None:
            with self._lock:
                self.verdict = self.verdict or self._recall()
                if self.verdict is None:
                    with canary_scope():
                        self.verdict = self._run()
        return self.verdict

    def _run(self) -> Verdict:
        again = "not kept, asked again in the next process"
        try:
            parts: dict[str, Callable[[], str | None]] = resolve(self.function)()
            differing, raised = dict[str, str](), False
            for name, part in parts.items():
                try:
                    difference = part()
                except Exception as error:
                    difference, raised = f"{name} raised {type(error).__name__}: {error}", True
                if difference is not None:
                    differing[name] = difference
        except Exception as error:
            return Verdict(failed=f"{type(error).__name__}: {error}", kept=again)
        return Verdict(
            tuple(parts), differing, kept=again if raised else self._keep(tuple(parts), differing)
        )

    def _key(self) -> dict[str, str]:
        # Patched calls imply that torch is imported. A toolkit without torch gets the key "none".
        torch = getattr(sys.modules.get("torch"), "__version__", "none")
        versions = {
            "fastgen": __version__,
            "torch": str(torch),
            "python": platform.python_version(),
        }
        return {self.toolkit: self.version, **versions}

    def _file(self) -> Path:
        digest = hashlib.sha256(json.dumps(self._key()).encode()).hexdigest()[:12]
        return self.folder / f"canary-{self.toolkit}-{digest}.json"

    def _recall(self) -> Verdict | None:
        file = self._file()
        try:
            kept = json.loads(file.read_text(encoding="utf-8"))
            parts, differing = kept["parts"], kept["differing"]
            texts = [*parts, *differing.values()]
            if (
                kept["key"] == self._key()
                and {*map(type, texts)} <= {str}
                and differing.keys() <= {*parts}
            ):
                return Verdict(tuple(parts), differing, kept=f"kept in {file}")
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass  # missing or corrupt: the canary runs again and rewrites it
        return None

    def _keep(self, parts: tuple[str, ...], differing: dict[str, str]) -> str:
        file = self._file()
        scratch = file.with_suffix(f".{os.getpid()}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(
                {"key": self._key(), "parts": parts, "differing": differing}, indent=1
            )
            scratch.write_text(text + "\n", encoding="utf-8")
            scratch.replace(file)  # atomic, because other processes may read or write the file
        except OSError as error:
            return f"not kept, asked again in the next process: {error}"
        return f"kept in {file}"


def resolve(target: str) -> Callable[..., Any]:
    """Import and return the object that ``"module:name"`` names."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)
