"""The parts of an output become the output: what runs have left beside it is found, compared, joined and taken away."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fastgen.corpus.formats.records import Sink
from fastgen.corpus.run.identity import differences
from fastgen.corpus.run.journal import Entry, Journal, Part, held, read, writing
from fastgen.errors import CommandError

_JOINED = "joined"
_FINAL = "final"  # what a sink makes of the whole, before it is the output
_CHUNK = 1 << 22


def in_progress(output: Path) -> bool:
    """Whether a run that writes this output has begun and has not ended."""
    return Part(output).journal.exists()


class Assembly:
    """What lies beside an output.

    Args:
        header: what this run's bytes depend on.
    Raises:
        CommandError: what lies there depends on something else, or is no journal; the message says what.
    """

    def __init__(self, output: Path, header: dict[str, Any], on_error: str) -> None:
        self.output = output
        main, *others = _parts(output)
        written = [(main, read(main))]
        if written[0][1].whole is None:  # else only the sink is left to run, and may have taken a part's body already
            written += [(part, read(part)) for part in others]
        self._written = [(part, found) for part, found in written if found.begun]
        for part, found in self._written:
            changed = differences(found.header, header)
            if changed:
                raise CommandError(f"{part.journal} was begun otherwise: {'; '.join(changed)}. --restart begins anew")
        blocks: dict[int, tuple[Part, Entry]] = {}
        for part, found in self._written:
            for entry in found.entries:
                blocks.setdefault(entry.block, (part, entry))
        self.blocks = blocks
        for entry in self.entries:
            if entry.on_error not in (None, on_error):
                raise CommandError(
                    f"--on-error was {entry.on_error} and is {on_error}, and record {entry.problems[0][0]} is a "
                    "problem that was handled so. --restart begins anew"
                )

    @property
    def begun(self) -> bool:
        """Whether there is more than headers."""
        return bool(self._written)

    @property
    def whole(self) -> Part | None:
        """The part that holds all blocks, where a run has come so far."""
        return next((Part(self.output, found.whole) for _, found in self._written if found.whole is not None), None)

    @property
    def entries(self) -> list[Entry]:
        """Of all blocks, in their order; where the whole is there, one entry for all."""
        together = [found.together for _, found in self._written if found.together is not None]
        return together or [self.blocks[number][1] for number in sorted(self.blocks)]

    def finish(self, total: int, journal: Journal, sink: Sink) -> None:
        """Make the output of `total` blocks, and take away what lies beside it.

        journal: of the part without a name.
        Raises:
            CommandError: blocks are missing, or the output cannot be written.
        """
        missing = [number for number in range(total) if number not in self.blocks]
        if missing:
            raise CommandError(
                f"{len(missing)} of {total} blocks are missing, from block {missing[0]} on: a process has ended before "
                "its work, or writes to a disk that is not shared. The same command goes on"
            )
        whole = self._whole(total)
        journal.whole(whole, self.entries)
        deliver(self.output, whole, sink)

    def _whole(self, total: int) -> Part:
        """The part that holds all blocks in their order: one that is there, or a copy."""
        in_order = list(range(total))
        for part, found in self._written:
            if [entry.block for entry in found.entries] == in_order and part.body.stat().st_size == found.end:
                return part
        joined = Part(self.output, _JOINED)
        with writing(joined.body), joined.body.open("wb") as stream:
            for number in in_order:
                part, entry = self.blocks[number]
                for chunk in _chunks(part.body, entry):
                    stream.write(chunk)
            stream.flush()
            os.fsync(stream.fileno())
        return joined


def deliver(output: Path, whole: Part, sink: Sink) -> None:
    """Make the output of a whole body. Runs again where it, or what follows it, was interrupted."""
    if whole.body.exists():
        with writing(output):
            sink.finish(whole.body, output)
    elif not output.exists():
        raise CommandError(f"{whole.body} is missing, and {output} too; --restart begins anew")
    remove(output)


def remove(output: Path) -> None:
    """Take away all that runs have left beside an output.

    A body is never without its journal's being gone before it, but for the part without a name, which says what to do
    with all others and goes last.
    """
    main, *others = _parts(output)
    for part in others:
        part.journal.unlink(missing_ok=True)
        part.body.unlink(missing_ok=True)
    main.body.unlink(missing_ok=True)
    main.journal.unlink(missing_ok=True)


def restart(output: Path) -> None:
    """The same, unless a run is writing it."""
    with held(Part(output).journal), writing(output):
        remove(output)


def _parts(output: Path) -> list[Part]:
    """All parts of which there is anything, the one without a name first."""
    names = {""}
    for kind in ("part", "journal"):
        pattern = re.compile(rf"{re.escape(output.name)}\.{kind}\.(\d+|{_JOINED}|{_FINAL})")
        names |= {found[1] for file in output.parent.iterdir() if (found := pattern.fullmatch(file.name))}
    return [Part(output, name) for name in sorted(names)]


def _chunks(body: Path, entry: Entry) -> Iterable[bytes]:
    with body.open("rb") as stream:
        stream.seek(entry.offset)
        left = entry.bytes
        while left:
            chunk = stream.read(min(left, _CHUNK))
            if not chunk:
                raise CommandError(f"{body} has lost bytes of block {entry.block}; --restart begins anew")
            left -= len(chunk)
            yield chunk
