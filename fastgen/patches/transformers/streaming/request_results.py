"""Results of requests on their way from the thread that generates to those who wait for them."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from transformers.generation.continuous_batching.requests import GenerationOutput

Callback = Callable[[GenerationOutput], object]


class Results:
    """A queue of results, of which those of a request can be taken out or sent to a handler."""

    def __init__(self) -> None:
        self._queue = deque[GenerationOutput]()
        self._handlers = dict[str, tuple[Callback, asyncio.AbstractEventLoop]]()
        self._is_closed = True  # whether no further results come
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._queue)

    def open(self) -> None:
        """Let `get` wait for results."""
        with self._changed:
            self._is_closed = False

    def close(self) -> None:
        """Let `get` wait for no further results."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def put(self, output: GenerationOutput) -> None:
        """Add a result, or send it to the handler of its request."""
        with self._changed:
            handler = self._handlers.get(output.request_id)
            if handler is not None:
                self._send(output, *handler)
            else:
                self._queue.append(output)
                self._changed.notify_all()

    def get(self, name: str | None, timeout: float | None) -> GenerationOutput | None:
        """Remove and return the next result.

        Args:
            name: Id of the request; None for any.
            timeout: Maximum seconds to wait; None for no limit.

        Returns:
            The result; None after the timeout, or if none is there and none will come.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._find(name) is not None or self._is_closed, timeout)
            found = self._find(name)
            if found is not None:
                self._queue.remove(found)
            return found

    def _find(self, name: str | None) -> GenerationOutput | None:
        return next((one for one in self._queue if name in (None, one.request_id)), None)

    def discard(self, name: str) -> None:
        """Forget the handler of a request, and its results that nobody has taken."""
        with self._changed:
            self._handlers.pop(name, None)
            while (one := self._find(name)) is not None:
                self._queue.remove(one)

    def register(self, name: str, callback: Callback, loop: asyncio.AbstractEventLoop) -> None:
        """Send results of a request to an event loop, also those that are there already.

        Args:
            name: Id of the request.
            callback: Called with each of them, until the request is finished.
            loop: The event loop that calls it.
        """
        with self._changed:
            self._handlers[name] = callback, loop
            while (one := self._find(name)) is not None:
                self._queue.remove(one)
                self._send(one, callback, loop)

    def _send(
        self, output: GenerationOutput, callback: Callback, loop: asyncio.AbstractEventLoop
    ) -> None:
        if output.is_finished():
            self._handlers.pop(output.request_id, None)
        with suppress(RuntimeError):  # the event loop of a client that has left is closed
            loop.call_soon_threadsafe(callback, output)
