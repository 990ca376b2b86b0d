"""Ask once per installed version whether the patched toolkit still gives what the unpatched one gives."""

import hashlib
import json
import os
import platform
import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from fastgen._version import __version__

_asking: ContextVar[bool] = ContextVar("fastgen_asking", default=False)


def asking() -> bool:
    """Whether the code that runs is a canary's, in this context."""
    return _asking.get()


@dataclass(frozen=True)
class Verdict:
    """What a canary found.

    Attributes:
        equal: whether both ways gave the same.
        reason: in the canary's words, or the exception that it raised.
        kept: where the result is kept, or why it is not.
    """

    equal: bool
    reason: str
    kept: str

    def __str__(self) -> str:
        return f"{'equal' if self.equal else 'different'}: {self.reason} ({self.kept})"


class Canary:
    """The question to one toolkit version, with the memory of its answer: in this process and in the cache folder.

    The answer holds for the versions of toolkit, fastgen, torch and Python. An exception counts as "different" but is
    not kept for other processes, since its cause (out of memory, say) may pass.

    Args:
        function: ``"module:function"``; it returns ``(equal, reason)`` after it ran the toolkit both ways. It must not
            wait for patched calls in threads of its own: they wait for its answer.
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
        self._lock = threading.Lock()

    def ask(self) -> Verdict:
        """Return the answer: the known one, the kept one, or the one of running the canary now.

        Other threads that ask meanwhile wait. A call out of the canary itself must look at `asking()` and not ask.
        """
        if self.verdict is None:
            with self._lock:
                self.verdict = self.verdict or self._recall() or self._run()
        return self.verdict

    def _run(self) -> Verdict:
        token = _asking.set(True)
        try:
            equal, reason = resolve(self.function)()
        except Exception as error:
            return Verdict(False, f"{type(error).__name__}: {error}", "not kept, asked again in the next process")
        finally:
            _asking.reset(token)
        return Verdict(bool(equal), str(reason), self._keep(bool(equal), str(reason)))

    def _key(self) -> dict[str, str]:
        # A patched call can only be where torch is imported; a toolkit without it is as good a key.
        torch = getattr(sys.modules.get("torch"), "__version__", "none")
        versions = {"fastgen": __version__, "torch": str(torch), "python": platform.python_version()}
        return {self.toolkit: self.version, **versions}

    def _file(self) -> Path:
        digest = hashlib.sha256(json.dumps(self._key()).encode()).hexdigest()[:12]
        return self.folder / f"canary-{self.toolkit}-{digest}.json"

    def _recall(self) -> Verdict | None:
        file = self._file()
        try:
            kept = json.loads(file.read_text(encoding="utf-8"))
            if kept["key"] == self._key() and isinstance(kept["equal"], bool):
                return Verdict(kept["equal"], str(kept["reason"]), f"kept in {file}")
        except (OSError, ValueError, KeyError, TypeError):
            pass  # absent or damaged: ask again, which writes it anew
        return None

    def _keep(self, equal: bool, reason: str) -> str:
        file = self._file()
        scratch = file.with_suffix(f".{os.getpid()}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"key": self._key(), "equal": equal, "reason": reason}, indent=1)
            scratch.write_text(text + "\n", encoding="utf-8")
            scratch.replace(file)  # at once, as other processes may read or write it
        except OSError as error:
            return f"not kept, asked again in the next process: {error}"
        return f"kept in {file}"


def resolve(target: str) -> Callable[..., Any]:
    """Import what ``"module:name"`` names."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)
