"""A data loader that is read several batches ahead, for the calls of `generate` to come."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

from fastgen.patches.transformers.loops.upcoming_calls import UpcomingCalls

MOST, MOST_LAZILY = 64, 16
"""Batches that are read ahead at most: if all of them are needed, and if a consumer may stop."""


def may_read_ahead(loader: Any) -> bool:
    """Return whether a data loader has a length and reads rows of a dataset by their index."""
    try:
        len(loader)
    except TypeError:
        return False
    dataset = getattr(loader, "dataset", None)
    return dataset is not None and not isinstance(dataset, IterableDataset)


@dataclass
class _Read:
    """What the loader gave: a batch, or the exception that it raised in place of one.

    Attributes:
        batch: The batch; None if there is an error.
        error: The exception, or None.
        is_last: `end_of_dataloader` of accelerate's loaders at that time; None for others.
    """

    batch: Any
    error: Exception | None
    is_last: bool | None


class ReadAhead:
    """Gives the batches of a data loader, and its exceptions, one by one as the loader does.

    Reads one batch at a time until `calls` has seen a call of `generate` that it expects to recur.

    Args:
        loader: The data loader, see `may_read_ahead`.
        calls: Is told each batch that is given and those that were read ahead.
        is_lazy: Whether the consumer may stop before the end. The number of batches read ahead
            then begins with two and doubles, so that little is read in vain.
        begun: Called when an iteration begins.
    """

    def __init__(
        self,
        loader: Any,
        calls: UpcomingCalls,
        is_lazy: bool,
        begun: Callable[[], object] = lambda: None,
    ) -> None:
        self.loader, self.calls, self.is_lazy, self.begun = loader, calls, is_lazy, begun

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # copying asks for attributes before there are any
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        self.begun()
        self.calls.restart()
        return _Iterator(self)


class _Iterator:
    def __init__(self, source: ReadAhead) -> None:
        self._loader, self._calls = source.loader, source.calls
        self._unread, self._batches = len(source.loader), iter(source.loader)
        self._most = MOST_LAZILY if source.is_lazy else MOST
        self._size = 2 if source.is_lazy else MOST
        self._waiting: deque[_Read] = deque()

    def __iter__(self) -> "_Iterator":
        return self

    def __next__(self) -> Any:
        if not self._waiting:
            self._read()
        read = self._waiting.popleft()
        if read.is_last is not None:
            self._loader.end_of_dataloader = read.is_last
        if read.error is not None:
            raise read.error
        self._calls.proceed(read.batch, [each.batch for each in self._waiting if not each.error])
        return read.batch

    def _read(self) -> None:
        """Read batches up to the first exception, and not past the last batch."""
        count = 1
        if self._calls.recur:
            count, self._size = self._size, min(2 * self._size, self._most)
        for _ in range(max(1, min(count, self._unread))):
            batch = error = None
            try:
                batch = next(self._batches)
                self._unread -= 1
            except Exception as raised:  # also StopIteration
                error = raised
            is_last = getattr(self._loader, "end_of_dataloader", None)
            self._waiting.append(_Read(batch, error, is_last))
            if error is not None:
                return
