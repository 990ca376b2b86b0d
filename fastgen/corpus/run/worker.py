"""Worker of a process: reads its blocks, generates, and returns bytes and journal entries."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from fastgen.corpus.formats.records import Record
from fastgen.corpus.run import pipeline
from fastgen.corpus.run.blocks import Block
from fastgen.corpus.run.journal import Entry
from fastgen.corpus.run.summary import Report, counts
from fastgen.corpus.texts import Blank, Output, Problem, Source, TextGenerator
from fastgen.errors import CommandError

if TYPE_CHECKING:
    from fastgen.corpus.run.job import Job

Sources = Sequence["Source | Problem"]
Results = Sequence["Output | Problem"]
Append = Callable[[bytes, Entry], None]
"""Receives the bytes of a block and its journal entry."""


class Worker:
    """Generator of blocks of outputs from blocks of records.

    A block's bytes depend only on its records, the options and its number: batches are formed
    within a block, and sampling starts from a random state of its own.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        # Tokenizing changes the tokenizer's settings, so that only one thread may use it.
        self._tokenizer = threading.Lock()

    def run(self, blocks: Iterable[Block], append: Append) -> Report:
        """Generate all blocks and append them in order.

        Args:
            blocks: iterated once the model is loaded.
            append: receives each block.

        Raises:
            CommandError: a record has no output; see `Job.on_error`.
        """
        begin = time.perf_counter()
        self.generator = TextGenerator(self.job.options)
        self._warm_up()
        report, before = (
            Report(loading=time.perf_counter() - begin, limit=self.generator.limit.origin),
            counts(),
        )
        begin, waits = time.perf_counter(), pipeline.Waits()
        pipeline.run(
            self._read(blocks), self._generate, lambda item: append(*self._texts(*item)), waits
        )
        report.seconds = time.perf_counter() - begin
        report.reading, report.writing = waits.reading, waits.writing
        report.note_process(before)
        return report

    def _warm_up(self) -> None:
        """Generate from one word, so that a block's numbers do not depend on its position in a run.

        A model's first step runs in two ways (`equivalence_check`) and returns the slower one's
        result, which may round differently.
        """
        generator = self.generator
        with suppress(Exception):  # an error will occur again in the blocks
            word = generator.tokenizer(".", return_tensors="pt")["input_ids"]
            generator.model.generate(word.to(generator.model.device), max_new_tokens=3)

    def _read(self, blocks: Iterable[Block]) -> Iterator[tuple[Block, Sources]]:
        for block in blocks:
            yield block, self._encode(block.records)

    def _encode(self, records: Sequence[Record]) -> Sources:
        good = [record for record in records if not record.problem]
        with self._tokenizer:
            texts, targets = (
                [record.prefix + record.text for record in good],
                [record.target for record in good],
            )
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
                    raise CommandError(
                        f"record {record.number}: {one.reason.rstrip('.')}. "
                        "The blocks before it are safe, and the same command with "
                        "--on-error skip goes on behind them; where the input is mended, "
                        "--restart begins anew"
                    )

    def _texts(self, block: Block, found: Sequence[Any]) -> tuple[bytes, Entry]:
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
        data = self.job.sink.block(block.records, shown)
        return data, Entry(
            len(data), len(shown), tokens, block.digest, problems, handled, blank, at_limit
        )


def _problems(block: Block, results: Results) -> list[tuple[int, str]]:
    return [
        (record.number, one.reason)
        for record, one in zip(block.records, results, strict=True)
        if isinstance(one, Problem)
    ]
