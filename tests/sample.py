"""Which combinations of parameters a command runs: `make test` a few, `make test-all` a cover, `make test-every` all.

A cover of a test function's combinations has every value of every parameter at least once ("each-choice coverage",
Ammann and Offutt 1994). The sample of `make test` has at most `MOST` of them, evenly spread.
"""

from collections.abc import Iterable, Sequence

import pytest

MOST = 3
"""Combinations of one test function."""


def beyond(items: Iterable[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the items that are in no cover, and those that are in one and not in the sample."""
    grids: dict[str, list[pytest.Item]] = {}
    for item in items:
        grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
    not_in_cover: list[pytest.Item] = []
    not_in_sample: list[pytest.Item] = []
    for grid in grids.values():
        cover = _cover(grid)
        not_in_cover += [item for item in grid if hasattr(item, "callspec") and item not in cover]
        not_in_sample += [item for item in cover if item not in _spread(cover)]
    return not_in_cover, not_in_sample


def _cover(grid: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return items of a grid that together have all values of its parameters, found greedily."""
    values = {item: _values(item) for item in grid if hasattr(item, "callspec")}
    missing = set().union(*values.values())
    rest = list(values)
    cover: list[pytest.Item] = []
    while missing:
        chosen = max(rest, key=lambda item: len(values[item] & missing))
        missing -= values[chosen]
        rest.remove(chosen)
        cover.append(chosen)
    return cover


def _spread(cover: Sequence[pytest.Item]) -> Sequence[pytest.Item]:
    """Return `MOST` items of a cover."""
    if len(cover) <= MOST:
        return cover
    return [cover[round(place * (len(cover) - 1) / (MOST - 1))] for place in range(MOST)]


def _values(item: pytest.Item) -> set[tuple[str, int]]:
    """Return the name and the identity of each value of an item: all items of a grid share the values' objects."""
    return {(name, id(value)) for name, value in item.callspec.params.items()}
