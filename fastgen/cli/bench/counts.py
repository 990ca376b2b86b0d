"""What fastgen has counted between two moments: which patches ran, and why not."""

from __future__ import annotations

from dataclasses import dataclass, field

import fastgen


@dataclass(frozen=True)
class Counts:
    """Calls, each dict without those that are 0.

    Attributes:
        hits: that ran fastgen's code, by patch.
        fallbacks: that ran the toolkit's own code, by patch and reason.
        left_off: hits that did without something, by what and why.
    """

    hits: dict[str, int] = field(default_factory=dict[str, int])
    fallbacks: dict[str, int] = field(default_factory=dict[str, int])
    left_off: dict[str, int] = field(default_factory=dict[str, int])

    def since(self, before: Counts) -> Counts:
        """What has been added since an earlier moment."""
        return Counts(
            _grown(before.hits, self.hits),
            _grown(before.fallbacks, self.fallbacks),
            _grown(before.left_off, self.left_off),
        )


def counts() -> Counts:
    """What has been counted since the start of the process."""
    rows = fastgen.status().rows
    return Counts(
        {row.name: row.hits for row in rows if row.hits},
        {f"{row.name}, {reason}": count for row in rows for reason, count in row.fallbacks.items()},
        {what: count for row in rows for what, count in row.left_off.items()},
    )


def _grown(old: dict[str, int], new: dict[str, int]) -> dict[str, int]:
    return {key: count - old.get(key, 0) for key, count in new.items() if count > old.get(key, 0)}
