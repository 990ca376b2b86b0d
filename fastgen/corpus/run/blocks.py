"""Blocks of consecutive records, which a run writes, loses and generates again as a whole."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from fastgen.corpus.formats.records import Record, Source
from fastgen.errors import CommandError


@dataclass(frozen=True)
class Block:
    """Consecutive records.

    Attributes:
        number: index among the blocks, from 0.
        records: the records.
    """

    number: int
    records: list[Record]

    @property
    def digest(self) -> str:
        """Digest that identifies the records: 16 hexadecimal digits."""
        digest = hashlib.sha256()
        for record in self.records:
            digest.update(repr(record).encode("utf-8", "backslashreplace"))
        return digest.hexdigest()[:16]


def blocks(source: Source, size: int, known: Sequence[str]) -> Iterator[Block]:
    """Yield the blocks of a source after those that an earlier run has made.

    Args:
        source: the source.
        size: records of a block; the last one may have fewer.
        known: digests of the blocks of earlier runs, which are read again and compared.

    Raises:
        CommandError: a block has other records than in an earlier run, or is missing.
    """
    records, number = iter(source.records()), 0
    while in_block := list(islice(records, size)):
        block = Block(number, in_block)
        if number >= len(known):
            yield block
        elif block.digest != known[number]:
            first, last = in_block[0].number, in_block[-1].number
            raise CommandError(
                f"the input has changed: records {first} to {last} were {known[number]} "
                f"and are {block.digest}. --restart begins anew"
            )
        number += 1
    if number < len(known):
        raise CommandError(
            f"the input has changed: it ends behind {number} blocks of {size} records, "
            f"and an earlier run has read {len(known)}. --restart begins anew"
        )
