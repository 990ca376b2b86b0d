"""A headless Chromium, controlled by its DevTools protocol through two pipes.

This needs no driver, no port and no package.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-sync", "--disable-background-networking", "--disable-component-update",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
# The browser reads commands from descriptor 3 and writes answers to 4, which Popen cannot set.
START = (
    "import os, sys; r, w, *c = sys.argv[1:]; os.dup2(int(r), 3); os.dup2(int(w), 4); "
    "os.execv(c[0], c)"
)
WAIT = 60
"""Timeout of an answer, in seconds."""


def found() -> str | None:
    """Return the path of Chromium, or None.

    The variable CHROMIUM comes first, then the first of NAMES that is on PATH.
    """
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Chromium:
    """A browser with one page, used as a context manager."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        pipes = [*os.pipe(), *os.pipe()]
        commands, self._write, self._read, answers = (
            fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in pipes
        )
        for fd in pipes:
            os.close(fd)
        command = [sys.executable, "-c", START, str(commands), str(answers), self._path, *OPTIONS]
        command.append(f"--user-data-dir={self._folder.name}")
        self._process = subprocess.Popen(
            command,
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._buffer, self._number, self._session = b"", 0, ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        self.call("Page.enable")
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._write)  # ends the browser
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        self._folder.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result.

        Raises:
            RuntimeError: the browser answers with an error, or has ended.
            TimeoutError: no answer within WAIT seconds.
        """
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        answer = self._next(lambda found: found.get("id") == self._number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, url: str, width: int, dark: bool = False) -> None:
        """Open a URL in a window `width` CSS pixels wide, and wait until it has loaded."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        self._next(lambda found: found.get("method") == "Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        """Evaluate a JavaScript expression, await its value and return it."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def screenshot(self, height: int) -> bytes:
        """Return a PNG of the page, from its top down to at most `height` CSS pixels."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {
            "x": 0,
            "y": 0,
            "width": size["width"],
            "height": min(size["height"], height),
            "scale": 1,
        }
        shot = self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip
        )
        return base64.b64decode(shot["data"])

    def _next(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        end = time.monotonic() + WAIT
        while True:
            message, zero, rest = self._buffer.partition(b"\0")
            if zero:
                self._buffer = rest
                if wanted(found := json.loads(message)):
                    return found
                continue
            if not select.select([self._read], [], [], max(0, end - time.monotonic()))[0]:
                raise TimeoutError(f"Chromium did not answer within {WAIT} s")
            if not (read := os.read(self._read, 1 << 20)):
                raise RuntimeError(f"Chromium has ended, with status {self._process.wait()}")
            self._buffer += read
