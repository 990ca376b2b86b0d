"""A journal: which blocks of a corpus lie where in a body, on disk before anyone is told that they are done.

A body is bytes, block behind block. Its journal is JSON lines: a header of all that the bytes depend on, a line for
each block, and behind the last one, once all blocks of the corpus are there, where the whole body lies. A block's bytes
are on disk before its line is, so that what a journal says is true however a run ends.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from fastgen.errors import CommandError

_logger = logging.getLogger("fastgen")

LOCKED = 10.0
"""Seconds for which a journal that another process writes is waited for: as long as one takes to notice its end."""

GOES_ON = "What is finished is safe; the same command goes on behind it"

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # a file system's answers that has none


@dataclass(frozen=True)
class Entry:
    """A finished block.

    Attributes:
        block: its number. offset, bytes: where it lies in the body.
        records, tokens: how many were read and written. blank: records that are blank lines. at_limit: outputs that
            ended because they may not be longer.
        digest: of its records.
        problems: number of the record and reason, of each that has no output.
        on_error: what was done about them; None where there are none.
    """

    block: int
    offset: int
    bytes: int
    records: int
    tokens: int
    digest: str
    problems: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    on_error: str | None = None
    blank: int = 0
    at_limit: int = 0


@dataclass(frozen=True)
class Part:
    """A body and its journal, beside the output: of a run (no name), of one of its processes, or of all, joined."""

    output: Path
    name: str = ""

    @property
    def body(self) -> Path:
        return self.output.with_name(f"{self.output.name}.part{self._suffix}")

    @property
    def journal(self) -> Path:
        return self.output.with_name(f"{self.output.name}.journal{self._suffix}")

    @property
    def _suffix(self) -> str:
        return f".{self.name}" if self.name else ""


@dataclass
class Written:
    """What a journal says.

    Attributes:
        header: what all the bytes depend on; empty where there is no journal, or not even its first line.
        whole: name of the part that holds all blocks in their order; None as long as none does.
        together: all blocks as if they were one, where there is a whole.
        length: bytes of the journal up to the end of its last whole line.
    """

    header: dict[str, Any] = field(default_factory=dict[str, Any])
    entries: list[Entry] = field(default_factory=list[Entry])
    whole: str | None = None
    together: Entry | None = None
    length: int = 0

    @property
    def begun(self) -> bool:
        """Whether there is more than a header, which alone binds nobody."""
        return bool(self.entries) or self.whole is not None

    @property
    def end(self) -> int:
        """Bytes of the body."""
        return self.entries[-1].offset + self.entries[-1].bytes if self.entries else 0


def read(part: Part) -> Written:
    """What a part's journal says; a last line that was being written when the run ended is none.

    Raises:
        CommandError: it is no journal, or its body has lost bytes.
    """
    found = Written()
    if not part.journal.exists():
        return found
    with part.journal.open("rb") as stream:
        for line in stream:
            try:
                _take(json.loads(line) if line.endswith(b"\n") else {}, found)
            except (KeyError, TypeError, ValueError) as error:
                if not line.endswith(b"\n") or not stream.read(1):
                    break
                raise CommandError(f"{part.journal} is no journal of a run; --restart begins anew") from error
            found.length += len(line)
    size = part.body.stat().st_size if part.body.exists() else 0
    if size < found.end and found.whole is None:
        raise CommandError(f"{part.body} has {size} bytes of {found.end}; --restart begins anew")
    return found


def _take(line: dict[str, Any], found: Written) -> None:
    if "header" in line:
        found.header = line["header"]
    elif "whole" in line:
        found.whole, found.together = line["whole"], _entry(line["together"])
    else:
        found.entries.append(_entry(line))


def _entry(line: dict[str, Any]) -> Entry:
    problems = [(number, reason) for number, reason in line.pop("problems")]
    return Entry(**line, problems=problems)


class Journal:
    """Writes a part, behind what it holds.

    Raises:
        CommandError: another process is writing it.
    """

    def __init__(self, part: Part, header: dict[str, Any]) -> None:
        self.part = part
        self._journal = held(part.journal)
        written = read(part)
        self.entries = written.entries
        self._end = written.end
        self._body: IO[bytes] | None = None
        with writing(part.body):
            self._journal.truncate(written.length if written.begun else 0)
            if written.whole is None:  # else the body is complete, or has become the output already
                self._body = part.body.open("ab", buffering=0)
                self._body.truncate(self._end)
        if not written.begun:
            self._say({"header": header})

    def append(self, data: bytes, entry: Entry) -> None:
        """Add a block; it is on disk when this returns. The entry's place is set here."""
        with writing(self.part.body):
            _write(self._body, data)
        placed = replace(entry, offset=self._end, bytes=len(data))
        self._say(asdict(placed))
        self._end += len(data)
        self.entries.append(placed)

    def whole(self, part: Part, entries: Sequence[Entry]) -> None:
        """Say that a part holds all blocks in their order, these."""
        together = Entry(
            block=len(entries), offset=0, bytes=sum(entry.bytes for entry in entries),
            records=sum(entry.records for entry in entries), tokens=sum(entry.tokens for entry in entries),
            digest="", problems=[problem for entry in entries for problem in entry.problems],
            on_error=next((entry.on_error for entry in entries if entry.on_error is not None), None),
            blank=sum(entry.blank for entry in entries), at_limit=sum(entry.at_limit for entry in entries),
        )  # fmt: skip
        self._say({"whole": part.name, "together": asdict(together)})

    def close(self) -> None:
        """Close both files, and let others write them."""
        if self._body is not None:
            self._body.close()
        self._journal.close()

    def _say(self, line: dict[str, Any]) -> None:
        with writing(self.part.journal):
            _write(self._journal, json.dumps(line, separators=(",", ":")).encode() + b"\n")


class Stdout:
    """Stands for a journal where the output is standard output: nothing is kept, and nothing can be gone on with."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def append(self, data: bytes, entry: Entry) -> None:
        """Write a block.

        Raises:
            BrokenPipeError: nobody reads it any more.
            CommandError: it cannot be written for another reason.
        """
        with writing("standard output", "What was written to it cannot be gone on with; --output names a file"):
            try:
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
            except OSError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python writes at its own end
                raise
        self.entries.append(entry)

    def close(self) -> None:
        pass


@contextmanager
def writing(file: Path | str, meaning: str = GOES_ON) -> Generator[None]:
    """Within it, what the system refuses is a CommandError that says what it means for the run, but for a
    BrokenPipeError: that somebody has stopped reading is nothing to put right."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CommandError(f"{file} cannot be written: {error.strerror or error}. {meaning}") from error


def _write(stream: Any, data: bytes) -> None:
    """Write all of the bytes to an unbuffered file and to its disk."""
    left = memoryview(data)
    while left:
        left = left[stream.write(left) :]
    os.fsync(stream.fileno())


def held(file: Path) -> IO[bytes]:
    """Open a file behind its end, and hold it until it is closed, or its process ends.

    Who held it before may have taken it away: a file that is no longer there under its name is left, and opened anew.

    Raises:
        CommandError: another process holds it, or it cannot be written.
    """
    begin = time.monotonic()
    while True:
        with writing(file), ExitStack() as opened:
            stream = opened.enter_context(file.open("ab", buffering=0))
            if _lock(stream) and _is_at(stream, file):
                opened.pop_all()
                return stream
        if time.monotonic() - begin > LOCKED:
            raise CommandError(f"{file}: another run is writing it")
        time.sleep(0.1)


def _lock(stream: IO[bytes]) -> bool:
    """Lock a file, where its system can; whether no other process has."""
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        _logger.warning(
            "%s: its file system has no locks (%s), so that nothing refuses a second run at this output",
            stream.name, error.strerror,
        )  # fmt: skip
    return True


def _is_at(stream: IO[bytes], file: Path) -> bool:
    """Whether an open file is there under this name."""
    try:
        return os.path.samestat(os.fstat(stream.fileno()), file.stat())
    except FileNotFoundError:
        return False
