"""A journal: the blocks of a corpus that lie in a body, on disk before anyone is told that they are done.

A body is bytes, block behind block, in the order of the corpus. Its journal is JSON lines: a header of all that the
bytes depend on, a line for each block, and behind the last one of the corpus a line that says so. A block's bytes are
on disk before its line is, so that what a journal says is true however a run ends.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from fastgen.corpus.run.identity import differences
from fastgen.errors import CommandError

_logger = logging.getLogger("fastgen")

LOCKED = 10.0
"""Seconds for which a journal that another run writes is waited for."""

GOES_ON = "What is finished is safe; the same command goes on behind it"

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # a file system's answers that has none


@dataclass(frozen=True)
class Entry:
    """A finished block.

    Attributes:
        bytes: of the body.
        records, tokens: how many were read and written. blank: records that are blank lines. at_limit: outputs that
            ended because they may not be longer.
        digest: of its records.
        problems: number of the record and reason, of each that has no output.
        on_error: what was done about them; None where there are none.
    """

    bytes: int
    records: int
    tokens: int
    digest: str
    problems: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    on_error: str | None = None
    blank: int = 0
    at_limit: int = 0


def body_of(output: Path) -> Path:
    """The body of an output that is not whole yet."""
    return output.with_name(f"{output.name}.part")


def journal_of(output: Path) -> Path:
    return output.with_name(f"{output.name}.journal")


def in_progress(output: Path) -> bool:
    """Whether a run that writes this output has begun and has not ended."""
    return journal_of(output).exists()


def remove(output: Path) -> None:
    """Take away all that runs have left beside an output; the journal, which says what to do with the rest, last."""
    final = output.with_name(
        f"{output.name}.part.final"
    )  # what a sink makes of the whole, before it is the output
    for file in (final, body_of(output), journal_of(output)):
        file.unlink(missing_ok=True)


def restart(output: Path) -> None:
    """The same, unless a run is writing it."""
    with held(journal_of(output)), writing(output):
        remove(output)


@dataclass
class Written:
    """What a journal says.

    Attributes:
        header: what all the bytes depend on; empty where there is no journal, or not even its first line.
        whole: whether the entries are all blocks of the corpus.
        length: bytes of the journal up to the end of its last whole line.
    """

    header: dict[str, Any] = field(default_factory=dict[str, Any])
    entries: list[Entry] = field(default_factory=list[Entry])
    whole: bool = False
    length: int = 0

    @property
    def begun(self) -> bool:
        """Whether there is more than a header, which alone binds nobody."""
        return bool(self.entries) or self.whole

    @property
    def end(self) -> int:
        """Bytes of the body."""
        return sum(entry.bytes for entry in self.entries)


def read(output: Path) -> Written:
    """What an output's journal says; a last line that was being written when the run ended is none.

    Raises:
        CommandError: it is no journal, or its body has lost bytes.
    """
    found, journal, body = Written(), journal_of(output), body_of(output)
    if not journal.exists():
        return found
    with journal.open("rb") as stream:
        for line in stream:
            try:
                _take(json.loads(line) if line.endswith(b"\n") else {}, found)
            except (KeyError, TypeError, ValueError) as error:
                if not line.endswith(b"\n") or not stream.read(1):
                    break
                raise CommandError(
                    f"{journal} is no journal of a run; --restart begins anew"
                ) from error
            found.length += len(line)
    size = body.stat().st_size if body.exists() else 0
    if size < found.end and not found.whole:
        raise CommandError(f"{body} has {size} bytes of {found.end}; --restart begins anew")
    return found


def _take(line: dict[str, Any], found: Written) -> None:
    if "header" in line:
        found.header = line["header"]
    elif "whole" in line:
        found.whole = True
    else:
        problems = [(number, reason) for number, reason in line.pop("problems")]
        found.entries.append(Entry(**line, problems=problems))


class Journal:
    """Writes an output's body and journal, behind what they hold.

    Args:
        header: what this run's bytes depend on.
        on_error: what it does about problems.
    Attributes:
        begun: whether an earlier run has written more than a header.
        whole: whether all blocks are there, and only the sink is left to run.
    Raises:
        CommandError: another run is writing it, or what lies there was made otherwise; the message says what differs.
    """

    def __init__(self, output: Path, header: dict[str, Any], on_error: str) -> None:
        self.output = output
        self._body: IO[bytes] | None = None
        self._journal = held(journal_of(output))
        try:
            written = read(output)
            self.entries, self.begun, self.whole = written.entries, written.begun, written.whole
            if self.begun:
                self._compare(written.header, header, on_error)
            with writing(body_of(output)):
                self._journal.truncate(written.length if self.begun else 0)
                if not self.whole:  # else the body is complete, or has become the output already
                    self._body = body_of(output).open("ab", buffering=0)
                    self._body.truncate(written.end)
            if not self.begun:
                self._say({"header": header})
        except BaseException:
            self.close()
            raise

    def append(self, data: bytes, entry: Entry) -> None:
        """Add a block; it is on disk when this returns."""
        with writing(body_of(self.output)):
            _write(self._body, data)
        self._say(asdict(entry))
        self.entries.append(entry)

    def end(self) -> None:
        """Say that all blocks are there."""
        self._say({"whole": True})
        self.whole = True

    def close(self) -> None:
        """Close both files, and let others write them."""
        if self._body is not None:
            self._body.close()
        self._journal.close()

    def _compare(self, was: dict[str, Any], header: dict[str, Any], on_error: str) -> None:
        if changed := differences(was, header):
            journal = journal_of(self.output)
            raise CommandError(
                f"{journal} was begun otherwise: {'; '.join(changed)}. --restart begins anew"
            )
        for entry in self.entries:
            if entry.on_error not in (None, on_error):
                raise CommandError(
                    f"--on-error was {entry.on_error} and is {on_error}, and record {entry.problems[0][0]} is a "
                    "problem that was handled so. --restart begins anew"
                )

    def _say(self, line: dict[str, Any]) -> None:
        with writing(journal_of(self.output)):
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
        with writing(
            "standard output",
            "What was written to it cannot be gone on with; --output names a file",
        ):
            try:
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
            except OSError:
                os.dup2(
                    os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
                )  # for what Python writes at its own end
                raise
        self.entries.append(entry)


@contextmanager
def writing(file: Path | str, meaning: str = GOES_ON) -> Generator[None]:
    """Within it, what the system refuses is a CommandError that says what it means for the run, but for a
    BrokenPipeError: that somebody has stopped reading is nothing to put right."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CommandError(
            f"{file} cannot be written: {error.strerror or error}. {meaning}"
        ) from error


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
