"""When finished sentences leave a batch, those that nobody waits for too, and which rows then take their places."""

from collections.abc import Callable, Sequence

Wanted = Callable[[int], bool]
"""Whether somebody waits for a sentence of a batch, by its number; once nobody does, nobody will."""


def closed_up(count: int, leaving: Sequence[int]) -> list[int]:
    """Say who stays of `count` rows: the last ones take the places of those that leave, so that few move."""
    gone, left = set(leaving), count - len(leaving)
    last = iter(row for row in range(left, count) if row not in gone)
    return [next(last) if place in gone else place for place in range(left)]


def may_leave(leaving: int, count: int, captured: bool = False) -> bool:
    """Say whether enough of `count` sentences have finished for them to leave, which moves some of the others.

    captured: whether decode steps are captured too, as they are anew for fewer rows.
    """
    return leaving >= fewest_leaving(count, captured)


def fewest_leaving(count: int, captured: bool = False) -> int:
    """How many of `count` sentences leave together at least.

    Steps are captured in the time of two that are launched kernel by kernel, some ten replayed ones: so only for half
    of the rows, and half of those.
    """
    return max(1, -(-count // (2 if captured else 8)))
