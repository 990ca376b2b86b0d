"""Journal of the finished blocks of a corpus, which is on disk before a block counts as done.

The body of an output is its blocks, concatenated in the order of the corpus. Its journal is JSON
lines: a header of everything that the bytes depend on, a line for each block, and a final line
after the last block of the corpus. A block's bytes are on disk before its line is, so the journal
is correct however a run ends.
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
"""Seconds to wait for a journal that another run holds."""

GOES_ON = "What is finished is safe; the same command goes on behind it"

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # the file system has no locks


@dataclass(frozen=True)
class Entry:
    """A finished block.

    Attributes:
        bytes: its size in the body.
        records: number of its records.
        tokens: number of its generated tokens.
        digest: digest of its records.
        problems: record number and reason of each record without an output.
        on_error: how these were handled; None if there are none.
        blank: number of records that are blank lines.
        at_limit: number of outputs that reached their length limit.
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
    """Return the path of the body of an incomplete output."""
    return output.with_name(f"{output.name}.part")


def journal_of(output: Path) -> Path:
    """Return the path of an output's journal."""
    return output.with_name(f"{output.name}.journal")


def in_progress(output: Path) -> bool:
    """Return whether a run for this output has begun and has not finished."""
    return journal_of(output).exists()


def remove(output: Path) -> None:
    """Remove everything that runs have left beside an output, the journal last.

    The journal determines what happens to the other files.
    """
    # A sink writes this file before it becomes the output.
    final = output.with_name(f"{output.name}.part.final")
    for file in (final, body_of(output), journal_of(output)):
        file.unlink(missing_ok=True)


def restart(output: Path) -> None:
    """Remove everything that runs have left beside an output.

    Raises:
        CommandError: a run is writing the output.
    """
    with held(journal_of(output)), writing(output):
        remove(output)


@dataclass
class Written:
    """Contents of a journal.

    Attributes:
        header: what the bytes depend on; empty if there is no journal or no complete header.
        entries: the finished blocks.
        whole: whether the entries are all blocks of the corpus.
        length: bytes of the journal up to the end of its last complete line.
    """

    header: dict[str, Any] = field(default_factory=dict[str, Any])
    entries: list[Entry] = field(default_factory=list[Entry])
    whole: bool = False
    length: int = 0

    @property
    def started(self) -> bool:
        """Whether there is more than a header. A header alone does not bind the next run."""
        return bool(self.entries) or self.whole

    @property
    def end(self) -> int:
        """Bytes of the body."""
        return sum(entry.bytes for entry in self.entries)


def read(output: Path) -> Written:
    """Read an output's journal. A last line that was cut off is ignored.

    Raises:
        CommandError: it is no journal, or bytes are missing from its body.
    """
    written, journal, body = Written(), journal_of(output), body_of(output)
    if not journal.exists():
        return written
    with journal.open("rb") as stream:
        for line in stream:
            try:
                _take(json.loads(line) if line.endswith(b"\n") else {}, written)
            except (KeyError, TypeError, ValueError) as error:
                if not line.endswith(b"\n") or not stream.read(1):
                    break
                raise CommandError(
                    f"{journal} is no journal of a run; --restart begins anew"
                ) from error
            written.length += len(line)
    size = body.stat().st_size if body.exists() else 0
    if size < written.end and not written.whole:
        raise CommandError(f"{body} has {size} bytes of {written.end}; --restart begins anew")
    return written


def _take(line: dict[str, Any], found: Written) -> None:
    if "header" in line:
        found.header = line["header"]
    elif "whole" in line:
        found.whole = True
    else:
        problems = [(number, reason) for number, reason in line.pop("problems")]
        found.entries.append(Entry(**line, problems=problems))


class Journal:
    """Writer of an output's body and journal, which continues existing ones.

    Args:
        output: the output file.
        header: what this run's bytes depend on.
        on_error: how it handles problems.

    Attributes:
        entries: the finished blocks.
        started: whether an earlier run has written more than a header.
        whole: whether all blocks are finished, and only the sink is left to run.

    Raises:
        CommandError: another run is writing it, or an earlier run had other options; the message
            says what differs.
    """

    def __init__(self, output: Path, header: dict[str, Any], on_error: str) -> None:
        self.output = output
        self._body: IO[bytes] | None = None
        self._journal = held(journal_of(output))
        try:
            written = read(output)
            self.entries, self.started, self.whole = written.entries, written.started, written.whole
            if self.started:
                self._compare(written.header, header, on_error)
            with writing(body_of(output)):
                self._journal.truncate(written.length if self.started else 0)
                if not self.whole:  # else the body is complete, or is the output already
                    self._body = body_of(output).open("ab", buffering=0)
                    self._body.truncate(written.end)
            if not self.started:
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
        """Record that all blocks are finished."""
        self._say({"whole": True})
        self.whole = True

    def close(self) -> None:
        """Close both files, which releases the lock."""
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
                    f"--on-error was {entry.on_error} and is {on_error}, "
                    f"and record {entry.problems[0][0]} is a problem that was handled so. "
                    "--restart begins anew"
                )

    def _say(self, line: dict[str, Any]) -> None:
        with writing(journal_of(self.output)):
            _write(self._journal, json.dumps(line, separators=(",", ":")).encode() + b"\n")


class Stdout:
    """Replacement for a journal if the output is standard output; it cannot be resumed."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def append(self, data: bytes, entry: Entry) -> None:
        """Write a block.

        Raises:
            BrokenPipeError: the reader is gone.
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
                # Python flushes standard output when it exits, which must not fail again.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise
        self.entries.append(entry)


@contextmanager
def writing(file: Path | str, meaning: str = GOES_ON) -> Generator[None]:
    """Convert OSErrors of the block to CommandErrors that say what they mean for the run.

    A BrokenPipeError propagates: the user has nothing to correct if a reader has stopped.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CommandError(
            f"{file} cannot be written: {error.strerror or error}. {meaning}"
        ) from error


def _write(stream: Any, data: bytes) -> None:
    """Write all bytes to an unbuffered file and sync it to disk."""
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[stream.write(remaining) :]
    os.fsync(stream.fileno())


def held(file: Path) -> IO[bytes]:
    """Open a file for appending and lock it until it is closed or the process ends.

    A previous holder may have removed the file. If it no longer exists under its name, it is opened
    again.

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
    """Lock a file, if its file system can; return whether no other process has locked it."""
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
            "%s: its file system has no locks (%s), so that nothing refuses a second run "
            "at this output",
            stream.name, error.strerror,
        )  # fmt: skip
    return True


def _is_at(stream: IO[bytes], file: Path) -> bool:
    """Return whether an open file is the one at this path."""
    try:
        return os.path.samestat(os.fstat(stream.fileno()), file.stat())
    except FileNotFoundError:
        return False
