"""Ask once per installed version, part by part, whether the patched toolkit gives what the unpatched one gives."""

import hashlib
import json
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from fastgen._version import __version__
from fastgen.context import assigned

_asking: ContextVar[bool] = ContextVar("fastgen_asking", default=False)


def asking() -> bool:
    """Whether the code that runs is a canary's, in this context."""
    return _asking.get()


@dataclass(frozen=True)
class Verdict:
    """What a canary found.

    Attributes:
        parts: the names of all parts that were tried.
        differing: those that differ, with what was found.
        failed: why nothing could be tried; empty where it could.
        kept: where the result is kept, or why it is not.
    """

    parts: tuple[str, ...] = ()
    differing: dict[str, str] = field(default_factory=dict[str, str])
    failed: str = ""
    kept: str = ""

    @property
    def equal(self) -> bool:
        """Whether all parts agree."""
        return not (self.failed or self.differing)

    def declines(self, parts: Iterable[str]) -> str | None:
        """Return why none of some parts can be relied on; None where one of them agrees.

        What needs no part by itself is relied on while any part agrees.
        """
        if self.failed:
            return self.failed
        found = [self.differing.get(part) for part in tuple(parts) or self.parts]
        return "; ".join(dict.fromkeys(filter(None, found))) if found and all(found) else None

    def __str__(self) -> str:
        if self.failed:
            return f"not tried: {self.failed} ({self.kept})"
        if self.equal:
            return f"all {len(self.parts)} parts agree ({self.kept})"
        differing = "; ".join(dict.fromkeys(self.differing.values()))
        agree = len(self.parts) - len(self.differing)
        return f"{len(self.differing)} of {len(self.parts)} parts differ: {differing}; {agree} agree ({self.kept})"


class Canary:
    """The question to one toolkit version, with the memory of its answer: in this process and in the cache folder.

    The answer holds for the versions of toolkit, fastgen, torch and Python. A part that raises counts as different, but
    then nothing is kept for other processes, since the cause (out of memory, say) may pass.

    Args:
        function: ``"module:function"``; it returns the parts by name, each a function that runs the toolkit both ways
            and returns what differs, or None. It must not wait for patched calls in threads of its own: they wait for
            its answer.
        toolkit: name of the toolkit.
        version: its version.
        folder: the cache folder, made when needed.
    """

    def __init__(self, function: str, toolkit: str, version: str, folder: Path) -> None:
        self.function = function
        self.toolkit = toolkit
        self.version = version
        self.folder = folder
        self.verdict: Verdict | None = None
        self._lock = threading.RLock()  # a signal handler of the same thread may ask as well

    def ask(self) -> Verdict:
        """Return the answer: the known one, the kept one, or the one of running the canary now.

        Other threads that ask meanwhile wait. A call out of the canary itself must look at `asking()` and not ask.
        """
        if self.verdict is None:
            with self._lock:
                self.verdict = self.verdict or self._recall()
                if self.verdict is None:
                    with assigned(_asking, True):
                        self.verdict = self._run()
        return self.verdict

    def _run(self) -> Verdict:
        again = "not kept, asked again in the next process"
        try:
            parts: dict[str, Callable[[], str | None]] = resolve(self.function)()
            differing, raised = dict[str, str](), False
            for name, part in parts.items():
                try:
                    found = part()
                except Exception as error:
                    found, raised = f"{name} raised {type(error).__name__}: {error}", True
                if found is not None:
                    differing[name] = found
        except Exception as error:
            return Verdict(failed=f"{type(error).__name__}: {error}", kept=again)
        return Verdict(
            tuple(parts), differing, kept=again if raised else self._keep(tuple(parts), differing)
        )

    def _key(self) -> dict[str, str]:
        # A patched call can only be where torch is imported; a toolkit without it is as good a key.
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
            pass  # absent or damaged: ask again, which writes it anew
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
            scratch.replace(file)  # at once, as other processes may read or write it
        except OSError as error:
            return f"not kept, asked again in the next process: {error}"
        return f"kept in {file}"


def resolve(target: str) -> Callable[..., Any]:
    """Import what ``"module:name"`` names."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)
