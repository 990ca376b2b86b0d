"""Blocks: the records of a source, so many in a row. A block is what a run writes, loses and makes again as a whole."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
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


class Blocks:
    """The blocks of a source, by their numbers. Numbers that rise take one pass; a lower one begins another.

    Args:
        size: records of a block; the last one may have fewer.
        known: digests of blocks as an earlier run has read them; what is passed is compared.
    """

    def __init__(self, source: Source, size: int, known: Mapping[int, str]) -> None:
        self.source, self.size, self.known = source, size, known
        self._begin()

    def _begin(self) -> None:
        self._records: Iterator[Record] = iter(self.source.records())
        self._next = 0

    def get(self, number: int) -> Block | None:
        """A block; None behind the last one.

        Raises:
            CommandError: a block that was passed has other records than an earlier run has read, or is not there.
        """
        if number < self._next:
            self._begin()
        while (block := self._read()) is not None and block.number < number:
            pass
        return block

    @property
    def passed(self) -> int:
        """How many blocks have been read in this pass: all, once `get` has returned None."""
        return self._next

    def _read(self) -> Block | None:
        records = list(islice(self._records, self.size))
        if not records:
            had = max(self.known, default=-1) + 1
            if had > self._next:
                raise CommandError(
                    f"the input has changed: it ends behind {self._next} blocks of {self.size} records, and an earlier "
                    f"run has read {had}. --restart begins anew"
                )
            return None
        block = Block(self._next, records)
        self._next += 1
        was = self.known.get(block.number)
        if was is not None and was != block.digest:
            first, last = records[0].number, records[-1].number
            raise CommandError(
                f"the input has changed: records {first} to {last} were {was} and are {block.digest}. "
                "--restart begins anew"
            )
        return block
