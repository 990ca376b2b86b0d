"""What a process does with the blocks that are its own: reads, generates, writes, notes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from fastgen.corpus.formats.records import Record
from fastgen.corpus.run import pipeline
from fastgen.corpus.run.blocks import Block, Blocks
from fastgen.corpus.run.claims import Claims
from fastgen.corpus.run.journal import Entry
from fastgen.corpus.run.progress import Meter, Problems
from fastgen.corpus.run.summary import Report, counts
from fastgen.corpus.texts import Blank, Output, Problem, Source, TextGenerator
from fastgen.errors import CommandError

if TYPE_CHECKING:
    from fastgen.corpus.run.job import Job

Sources = Sequence["Source | Problem"]
Results = Sequence["Output | Problem"]


class BadRecord(CommandError):
    """A record that has no output, where that ends the run."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(
            f"record {number}: {reason.rstrip('.')}. The blocks before it are safe, and the same command with "
            "--on-error skip goes on behind them; where the input is mended, --restart begins anew"
        )
        self.number = number


class Journalling(Protocol):
    """Where blocks go."""

    def append(self, data: bytes, entry: Entry) -> None: ...


class Worker:
    """Makes the blocks that it claims.

    A block's bytes depend on its records, the options and its number alone: its stream of batches is its own, and
    where it samples, so is the state of random numbers.

    Args:
        known: digests of the blocks of earlier runs.
    """

    def __init__(
        self, job: Job, claims: Claims, journal: Journalling, known: Mapping[int, str], meter: Meter | None = None
    ) -> None:
        self.job, self.claims, self.journal, self.meter = job, claims, journal, meter
        self.blocks = Blocks(job.source, job.block, known)
        self.report = Report()
        self.problems = Problems()
        self._tokenizer = threading.Lock()  # its settings are set while it reads, and nobody may use it meanwhile

    def run(self) -> Report:
        """Make blocks until there are no more.

        Raises:
            BadRecord: see `Job.on_error`.
        """
        begin = time.perf_counter()
        self.generator = TextGenerator(self.job.options)
        self.report.limit = self.generator.limit.said
        self._warm_up()
        self.report.loading, before = time.perf_counter() - begin, counts()
        begin, waits = time.perf_counter(), pipeline.Waits()
        try:
            pipeline.run(self._read(), self._generate, self._write, waits)
        except BaseException:
            self.claims.stop()
            raise
        self.report.seconds = time.perf_counter() - begin
        self.report.reading, self.report.writing = waits.reading, waits.writing
        self.report.note_process(before)
        return self.report

    def _warm_up(self) -> None:
        """Generate from a word: a model's first step is made in two ways (`equivalence_check`), and rounds as the
        slower one does; with that behind it, a block's numbers are the same wherever it stands in a run."""
        generator = self.generator
        with suppress(Exception):  # the blocks will say what is wrong
            word = generator.tokenizer(".", return_tensors="pt")["input_ids"]
            generator.model.generate(word.to(generator.model.device), max_new_tokens=3)

    def _read(self) -> Iterator[tuple[Block, Sources]]:
        for number in self.claims:
            block = self.blocks.get(number)
            if block is None:
                self.claims.end(self.blocks.passed)
            else:
                yield block, self._encode(block.records)

    def _encode(self, records: Sequence[Record]) -> Sources:
        good = [record for record in records if not record.problem]
        with self._tokenizer:
            texts, targets = [record.prefix + record.text for record in good], [record.target for record in good]
            found = iter(self.generator.encode(texts, targets))
        return [record.problem or next(found) for record in records]

    def _generate(self, item: tuple[Block, Sources]) -> tuple[Block, Sequence[Any]]:
        import torch

        block, sources = item
        self._check(block, sources)
        torch.manual_seed(self.job.options.seed + block.number)
        found = self.generator.generate(sources)
        self._check(block, found)
        return block, found

    def _check(self, block: Block, found: Sequence[object]) -> None:
        if self.job.on_error == "fail":
            for record, one in zip(block.records, found, strict=True):
                if isinstance(one, Problem) and not isinstance(one, Blank):
                    raise BadRecord(record.number, one.reason)

    def _write(self, item: tuple[Block, Sequence[Any]]) -> None:
        block, found = item
        with self._tokenizer:
            results = self.generator.decode(found)
        blank = sum(isinstance(one, Blank) for one in results)
        results = [Output([""], 0) if isinstance(one, Blank) else one for one in results]
        problems = _problems(block, results)
        skips = self.job.on_error == "skip"
        shown = [None if skips and isinstance(one, Problem) else one for one in results]
        outputs = [one for one in results if isinstance(one, Output)]
        tokens, at_limit = sum(one.tokens for one in outputs), sum(one.at_limit for one in outputs)
        handled = self.job.on_error if problems else None
        entry = Entry(
            block.number, 0, 0, len(block.records), tokens, block.digest, problems, handled, blank, at_limit
        )  # fmt: skip
        self.journal.append(self.job.sink.block(block.records, shown), entry)
        self.problems.tell(problems)
        self.report.records += entry.records
        self.report.tokens += tokens
        made = self.claims.finished(block.number, entry.records, tokens)
        if self.meter is not None:
            self.meter.show(*made)


def _problems(block: Block, results: Results) -> list[tuple[int, str]]:
    return [
        (record.number, one.reason)
        for record, one in zip(block.records, results, strict=True)
        if isinstance(one, Problem)
    ]
