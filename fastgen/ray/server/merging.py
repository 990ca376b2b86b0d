"""Merging of small requests into batches of similar lengths and equal options."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Source = TypeVar("Source", bound=Sized)
Options = TypeVar("Options", bound=Hashable)
Result = TypeVar("Result")

Listener = Callable[[list[int]], Result | None]
"""Receives tokens of one text as they are generated. Returning an answer completes the text."""
Tell = Callable[[int, list[int]], object]
"""Called with the index of a text in its batch, and new tokens of it."""


class QueueFull(Exception):
    """Error: more texts would wait than allowed. Nothing of the request was enqueued."""


@dataclass(eq=False)
class _Waiting(Generic[Source, Options, Result]):
    source: Source
    options: Options
    answer: asyncio.Future[Result]
    listener: Listener[Result] | None = None

    def hear(self, tokens: list[int]) -> None:
        if (
            self.listener is not None
            and not self.answer.done()
            and (found := self.listener(tokens)) is not None
        ):
            self.answer.set_result(found)


class RequestBatcher(Generic[Source, Options, Result]):
    """Merges concurrent requests into batches, which a thread generates one after the other.

    While a batch runs, requests queue. The next batch consists of the oldest text and those with
    the same options whose lengths are closest to its own, up to `batch_tokens`. Cancelled texts are
    dropped before their batch begins; in a running batch, `generate` can poll for cancellation.

    Args:
        generate: `generate(sources, options, wanted, tell)` returns the answers of a batch, in
            order, and runs in the thread. `wanted(i)` is False once text i is cancelled or
            answered. `tell(i, tokens)` reports new tokens of text i; it is None if no text has a
            listener.
        batch_tokens: the most tokens of a batch, padding included. A longer text is a batch by
            itself.
        most: the most texts that may wait.
        linger: seconds that a text waits for others if no batch is running.
        on_batch: called with the number of texts of each batch.

    Attributes:
        batches: number of batches so far.
        generated: number of texts in them.
        left: number of these texts that were cancelled while their batch ran.
        dropped: number of texts that were cancelled before they were in a batch.
    """

    def __init__(
        self,
        generate: Callable[
            [list[Source], Options, Callable[[int], bool], Tell | None], Sequence[Result]
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
        self.waiting: list[_Waiting[Source, Options, Result]] = []
        self.batches = self.generated = self.left = self.dropped = 0
        self.on_batch = on_batch
        self._thread = ThreadPoolExecutor(1, "fastgen-generate")
        self._task: asyncio.Task[None] | None = None

    async def submit(self, sources: Sequence[Source], options: Options) -> list[Result]:
        """Return the answers of some texts, in order.

        Raises:
            QueueFull: more texts would wait than allowed.
        """
        # Cancelling `gather` cancels the answers.
        return await asyncio.gather(*self.enqueue(sources, options))

    def enqueue(
        self, sources: Sequence[Source], options: Options, listener: Listener[Result] | None = None
    ) -> list[asyncio.Future[Result]]:
        """Enqueue some texts and return the futures of their answers.

        Cancelling a future cancels its text.

        Args:
            sources: the texts.
            options: options of generation, the same for all of them.
            listener: called in the event loop with new tokens of a text. Texts that share a batch
                need not all have one.

        Raises:
            QueueFull: more texts would wait than allowed.
        """
        self._drop()
        if len(self.waiting) + len(sources) > self.most:
            raise QueueFull(f"{len(self.waiting)} texts wait, {self.most} at most")
        loop = asyncio.get_running_loop()
        queued = [
            _Waiting[Source, Options, Result](one, options, loop.create_future(), listener)
            for one in sources
        ]
        self.waiting += queued
        if self._task is None:
            self._task = loop.create_task(self._run())
        return [one.answer for one in queued]

    def check(self) -> None:
        """Raise RuntimeError if no batch will run any more."""
        if self._task is not None and self._task.done():
            raise RuntimeError(f"no batch is taken any more: {self._task.exception()!r}")

    async def _run(self) -> None:
        """Generate batches until the queue is empty."""
        await asyncio.sleep(self.linger)
        while batch := self._take():
            await self._answer(batch)
        self._task = None

    async def _answer(self, batch: list[_Waiting[Source, Options, Result]]) -> None:
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
        except Exception as error:  # fails this batch's requests, not the next batch
            for one in batch:
                if not one.answer.done():
                    one.answer.set_exception(error)
            return
        self.left += sum(one.answer.cancelled() for one in batch)
        for one, answer in answers.items():
            if not one.answer.done():
                one.answer.set_result(answer)

    def _take(self) -> list[_Waiting[Source, Options, Result]]:
        """Remove and return the next batch; empty if nothing waits."""
        self._drop()
        if not self.waiting:
            return []
        oldest = self.waiting[0]
        length = len(oldest.source)
        matching = [one for one in self.waiting if one.options == oldest.options]
        # The sort is stable: of equals, the oldest comes first.
        matching.sort(key=lambda one: abs(len(one.source) - length))
        batch, width = list[_Waiting[Source, Options, Result]](), 0
        for one in matching:
            width = max(width, len(one.source))
            if batch and width * (len(batch) + 1) > self.batch_tokens:
                break
            batch.append(one)
        taken = set(batch)
        self.waiting = [one for one in self.waiting if one not in taken]
        return batch

    def _drop(self) -> None:
        """Drop texts that were cancelled or answered."""
        kept = [one for one in self.waiting if not one.answer.done()]
        self.dropped += len(self.waiting) - len(kept)
        self.waiting = kept
