"""Small requests become batches: those that wait together, of like lengths and with the same options."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Source = TypeVar("Source", bound=Sized)
Options = TypeVar("Options", bound=Hashable)
Found = TypeVar("Found")

Listener = Callable[[list[int]], Found | None]
"""Hears tokens of one text as they come; where it returns an answer, the text is answered and no longer waited for."""
Tell = Callable[[int, list[int]], object]
"""Called with the place of a text in its batch, and tokens of it."""


class QueueFull(Exception):
    """More would wait than may; nothing of the request was taken."""


@dataclass(eq=False)
class _Waiting(Generic[Source, Options, Found]):
    source: Source
    options: Options
    answer: asyncio.Future[Found]
    listener: Listener[Found] | None = None

    def hear(self, tokens: list[int]) -> None:
        if (
            self.listener is not None
            and not self.answer.done()
            and (found := self.listener(tokens)) is not None
        ):
            self.answer.set_result(found)


class Merger(Generic[Source, Options, Found]):
    """Merges what is asked for at one time into batches, which a thread of its own generates one after the other.

    While a batch runs, requests gather; then the one that has waited longest goes next, with those of its options
    whose lengths are closest to its own, as many as make a batch. A request that nobody waits for any more is dropped
    before its batch begins; in a batch that runs, whoever generates is told.

    Attributes:
        batches, generated: that were taken, and texts in them. left: of those, texts whose client left.
        dropped: texts that were in none.
    Args:
        generate: makes the answers of some sources under the same options, in their order; it runs in the thread. It is
            given whether somebody still waits for one of them, by its place, and what tells the tokens of a text; None
            where nobody listens.
        batch_tokens: of a batch, padding counted; a longer text is a batch by itself.
        most: texts that may wait.
        linger: seconds that a text waits for others where none is under way.
        on_batch: called with the number of texts of each batch.
    """

    def __init__(
        self,
        generate: Callable[
            [list[Source], Options, Callable[[int], bool], Tell | None], Sequence[Found]
        ],
        *,
        batch_tokens: int,
        most: int,
        linger: float,
        on_batch: Callable[[int], object] = lambda texts: None,
    ) -> None:
        self.generate, self.batch_tokens, self.most, self.linger = (
            generate,
            batch_tokens,
            most,
            linger,
        )
        self.waiting: list[_Waiting[Source, Options, Found]] = []
        self.batches = self.generated = self.left = self.dropped = 0
        self.on_batch = on_batch
        self._thread = ThreadPoolExecutor(1, "fastgen-generate")
        self._task: asyncio.Task[None] | None = None

    async def submit(self, sources: Sequence[Source], options: Options) -> list[Found]:
        """The answers of some texts, in their order.

        Raises:
            QueueFull: they would be more than may wait.
        """
        return await asyncio.gather(
            *self.enqueue(sources, options)
        )  # which cancels them with the caller

    def enqueue(
        self, sources: Sequence[Source], options: Options, listener: Listener[Found] | None = None
    ) -> list[asyncio.Future[Found]]:
        """Let some texts wait; return their answers to be. A text whose answer is cancelled leaves.

        Args:
            listener: called in the event loop with tokens of a text; texts that share a batch need not all have one.

        Raises:
            QueueFull: they would be more than may wait.
        """
        self._drop()
        if len(self.waiting) + len(sources) > self.most:
            raise QueueFull(f"{len(self.waiting)} texts wait, {self.most} at most")
        loop = asyncio.get_running_loop()
        asked = [
            _Waiting[Source, Options, Found](one, options, loop.create_future(), listener)
            for one in sources
        ]
        self.waiting += asked
        if self._task is None:
            self._task = loop.create_task(self._run())
        return [one.answer for one in asked]

    def check(self) -> None:
        """Raise RuntimeError where what waits would wait for ever."""
        if self._task is not None and self._task.done():
            raise RuntimeError(f"no batch is taken any more: {self._task.exception()!r}")

    async def _run(self) -> None:
        """Generate until nothing waits."""
        await asyncio.sleep(self.linger)
        while batch := self._take():
            await self._answer(batch)
        self._task = None

    async def _answer(self, batch: list[_Waiting[Source, Options, Found]]) -> None:
        self.batches += 1
        self.generated += len(batch)
        self.on_batch(len(batch))
        loop = asyncio.get_running_loop()
        heard = any(one.listener is not None for one in batch)
        tell: Tell | None = (
            (lambda i, ids: loop.call_soon_threadsafe(batch[i].hear, ids)) if heard else None
        )
        call: Any = (
            self.generate,
            [one.source for one in batch],
            batch[0].options,
            lambda i: not batch[i].answer.done(),
        )
        try:
            found = await loop.run_in_executor(self._thread, *call, tell)
            answers = dict(zip(batch, found, strict=True))
        except Exception as error:  # it is theirs who asked, and not the next batch's affair
            for one in batch:
                if not one.answer.done():
                    one.answer.set_exception(error)
            return
        self.left += sum(one.answer.cancelled() for one in batch)
        for one, answer in answers.items():
            if not one.answer.done():
                one.answer.set_result(answer)

    def _take(self) -> list[_Waiting[Source, Options, Found]]:
        """The next batch; none where nothing waits."""
        self._drop()
        if not self.waiting:
            return []
        oldest = self.waiting[0]
        length = len(oldest.source)
        alike = [one for one in self.waiting if one.options == oldest.options]
        alike.sort(
            key=lambda one: abs(len(one.source) - length)
        )  # stable: the oldest first of equals
        batch, width = list[_Waiting[Source, Options, Found]](), 0
        for one in alike:
            width = max(width, len(one.source))
            if batch and width * (len(batch) + 1) > self.batch_tokens:
                break
            batch.append(one)
        taken = set(batch)
        self.waiting = [one for one in self.waiting if one not in taken]
        return batch

    def _drop(self) -> None:
        """Forget what nobody waits for."""
        kept = [one for one in self.waiting if not one.answer.done()]
        self.dropped += len(self.waiting) - len(kept)
        self.waiting = kept
