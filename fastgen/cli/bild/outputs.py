"""The large model's outputs for the lines of a file, kept on disk so that a killed run can resume.

The file begins with a header of everything that the outputs depend on. Each line after it holds the
token ids of one output, as JSON. The name ends in `.part` until the last output is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fastgen.corpus.run.identity import differences
from fastgen.errors import CommandError

Header = dict[str, Any]
Outputs = list[list[int]]


def finished(
    file: Path, header: Header, make: Callable[[int], Iterable[list[int]]], restart: bool
) -> Outputs:
    """Return the outputs of all lines; those that the file does not hold yet are generated.

    Args:
        file: where the outputs are kept.
        header: everything that they depend on, JSON-ready; `header["lines"]` is their number.
        make: `make(n)` yields the outputs from number n on, counted from 0.
        restart: delete existing outputs first.

    Raises:
        CommandError: the file's outputs were made under other conditions; the message says which.
    """
    part = file.with_name(f"{file.name}.part")
    if restart:
        file.unlink(missing_ok=True)
        part.unlink(missing_ok=True)
    if file.exists():
        done, _ = _read(file, header)
        if len(done) != header["lines"]:
            raise CommandError(
                f"{file} holds {len(done)} outputs of {header['lines']}; "
                "--restart generates them again"
            )
        return done
    done, length = _read(part, header) if part.exists() else ([], 0)
    with part.open("r+b" if length else "wb") as stream:
        stream.truncate(length)  # drops a line that a killed run wrote in part
        stream.seek(length)
        if not length:
            stream.write(_line(header))
        for tokens in make(len(done)) if len(done) < header["lines"] else ():
            stream.write(_line(tokens))
            stream.flush()
            done.append(tokens)
    if len(done) != header["lines"]:
        raise RuntimeError(f"{len(done)} outputs for {header['lines']} lines")
    part.replace(file)
    return done


def _line(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _read(file: Path, header: Header) -> tuple[Outputs, int]:
    """Return the outputs in a file, and its size in bytes without an incomplete last line."""
    *lines, incomplete = file.read_bytes().split(b"\n")
    if not lines:
        return [], 0
    try:
        found, *outputs = (json.loads(line) for line in lines)
    except ValueError:
        found, outputs = None, []
    if not isinstance(found, dict) or not all(isinstance(tokens, list) for tokens in outputs):
        raise CommandError(
            f"{file} does not hold outputs of a large model; --restart generates them again"
        )
    changed = differences(found, header)
    if changed:
        raise CommandError(
            f"{file} was made with other settings: {'; '.join(changed)}. "
            "--restart generates its outputs again"
        )
    return outputs, file.stat().st_size - len(incomplete)
