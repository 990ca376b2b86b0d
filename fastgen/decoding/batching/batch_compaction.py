"""Batch compaction: when finished or cancelled sentences leave a batch, and which rows move."""

from collections.abc import Callable, Sequence

CancellationCallback = Callable[[int], bool]
"""Cancellation callback: takes the index of a sentence, returns False once it is cancelled.

A cancelled sentence stays cancelled.
"""


def compacted(count: int, leaving: Sequence[int]) -> list[int]:
    """Return the row for each place after some of `count` rows leave.

    The last rows take the places of those that leave, so that few rows move.
    """
    dropped, remaining = set(leaving), count - len(leaving)
    last = iter(row for row in range(remaining, count) if row not in dropped)
    return [next(last) if place in dropped else place for place in range(remaining)]


def leaving_now(finished: Sequence[int], count: int, captured: bool = False) -> Sequence[int]:
    """Return the finished sentences that leave the batch now; none if they are too few.

    Args:
        finished: Indices of the finished sentences.
        count: Number of sentences in the batch.
        captured: Whether decode steps are captured as CUDA graphs. Every number of rows needs a new
            capture, so the batch only shrinks to a half, a quarter and so on; the finished
            sentences beyond that stay.
    """
    if len(finished) < fewest_leaving(count, captured):
        return ()
    if not captured:
        return finished
    remaining = count
    while remaining > 1 and -(-remaining // 2) >= count - len(finished):
        remaining = -(-remaining // 2)
    return finished[: count - remaining]


def fewest_leaving(count: int, captured: bool = False) -> int:
    """Return the minimum number of `count` sentences that leave the batch together.

    A capture costs as much as two uncaptured decode steps or some ten replayed ones. With captured
    steps at least half of the sentences leave at a time, otherwise at least an eighth.
    """
    return max(1, -(-count // (2 if captured else 8)))
