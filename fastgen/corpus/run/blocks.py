"""Blocks: the records of a source, so many in a row. A block is what a run writes, loses and makes again as a whole."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from fastgen.corpus.formats.records import Record, Source
from fastgen.errors import CommandError


@dataclass(frozen=True)
class Block:
    """Records in a row, and their place among the blocks, from 0."""

    number: int
    records: list[Record]

    @property
    def digest(self) -> str:
        """What tells these records from any others."""
        whole = hashlib.sha256()
        for record in self.records:
            whole.update(repr(record).encode("utf-8", "backslashreplace"))
        return whole.hexdigest()[:16]


def blocks(source: Source, size: int, known: Sequence[str]) -> Iterator[Block]:
    """The blocks of a source behind those that an earlier run has made.

    Args:
        size: records of a block; the last one may have fewer.
        known: digests of the blocks of earlier runs, which are read over and compared.
    Raises:
        CommandError: a block has other records than an earlier run has read, or is not there.
    """
    records, number = iter(source.records()), 0
    while in_block := list(islice(records, size)):
        block = Block(number, in_block)
        if number >= len(known):
            yield block
        elif block.digest != known[number]:
            first, last = in_block[0].number, in_block[-1].number
            raise CommandError(
                f"the input has changed: records {first} to {last} were {known[number]} and are {block.digest}. "
                "--restart begins anew"
            )
        number += 1
    if number < len(known):
        raise CommandError(
            f"the input has changed: it ends behind {number} blocks of {size} records, and an earlier run has read "
            f"{len(known)}. --restart begins anew"
        )
