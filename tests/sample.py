"""Select the parameter combinations that each `make` target runs.

`make test` runs a few, `make test-all` a cover, `make test-every` all. A cover of a test function's
combinations has every value of every parameter at least once ("each-choice coverage", Ammann and
Offutt 1994). The sample of `make test` has at most `MOST` of them, evenly spread.
"""

from collections.abc import Iterable, Sequence

import pytest

MOST = 3
"""Maximum number of combinations per test function in the sample."""


def beyond(items: Iterable[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the items outside every cover, and the items in a cover but not in the sample."""
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
    """Return items of a grid that together have every value of its parameters, chosen greedily."""
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
    """Return at most `MOST` items of a cover, evenly spread."""
    if len(cover) <= MOST:
        return cover
    return [cover[round(place * (len(cover) - 1) / (MOST - 1))] for place in range(MOST)]


def _values(item: pytest.Item) -> set[tuple[str, int]]:
    """Return name and identity of each parameter value; the items of a grid share the objects."""
    return {(name, id(value)) for name, value in item.callspec.params.items()}
