"""When finished sentences leave a batch, those that nobody waits for too, and which rows then take their places."""

from collections.abc import Callable, Sequence

Wanted = Callable[[int], bool]
"""Whether somebody waits for a sentence of a batch, by its number; once nobody does, nobody will."""


def closed_up(count: int, leaving: Sequence[int]) -> list[int]:
    """Say who stays of `count` rows: the last ones take the places of those that leave, so that few move."""
    gone, left = set(leaving), count - len(leaving)
    last = iter(row for row in range(left, count) if row not in gone)
    return [next(last) if place in gone else place for place in range(left)]


def who_leaves(finished: Sequence[int], count: int, captured: bool = False) -> Sequence[int]:
    """Say which of `count` sentences leave now, of those that have finished; none where they are too few.

    captured: whether decode steps are captured too, as they are anew for each number of rows. So there are few such
        numbers: half of the rows, a quarter and so on, and as many of the finished as that takes stay.
    """
    if len(finished) < fewest_leaving(count, captured):
        return ()
    if not captured:
        return finished
    left = count
    while left > 1 and -(-left // 2) >= count - len(finished):
        left = -(-left // 2)
    return finished[: count - left]


def fewest_leaving(count: int, captured: bool = False) -> int:
    """How many of `count` sentences leave together at least.

    Steps are captured in the time of two that are launched kernel by kernel, some ten replayed ones: so only for half
    of the rows, and half of those.
    """
    return max(1, -(-count // (2 if captured else 8)))
