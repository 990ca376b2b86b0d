"""The sample of tests that `make test` runs: every test function, with a few of its combinations of parameters.

A test function with several parameters runs once for each combination in `make test-all`. Of the
combinations that together have every value once ("each-choice coverage", Ammann and Offutt 1994),
the sample has at most `MOST`, evenly spread.
"""

from collections.abc import Iterable, Sequence

import pytest

MOST = 3
"""Combinations of one test function."""


def left_out(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the items that the sample leaves out, in the order of `items`."""
    grids: dict[str, list[pytest.Item]] = {}
    for item in items:
        grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return [item for grid in grids.values() for item in _beyond_each_choice(grid)]


def _beyond_each_choice(grid: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return all items of a grid but `MOST` of those of a greedy cover of the parameters' values."""
    values = {item: _values(item) for item in grid if hasattr(item, "callspec")}
    missing = set().union(*values.values())
    rest = list(values)
    cover: list[pytest.Item] = []
    while missing:
        chosen = max(rest, key=lambda item: len(values[item] & missing))
        missing -= values[chosen]
        rest.remove(chosen)
        cover.append(chosen)
    if len(cover) > MOST:
        kept = {cover[round(place * (len(cover) - 1) / (MOST - 1))] for place in range(MOST)}
        rest += [item for item in cover if item not in kept]
    return rest


def _values(item: pytest.Item) -> set[tuple[str, int]]:
    """Return the name and the identity of each value of an item: all items of a grid share the values' objects."""
    return {(name, id(value)) for name, value in item.callspec.params.items()}
