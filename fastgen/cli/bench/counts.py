"""What fastgen counted between two moments: which patches ran, and why others did not."""

from __future__ import annotations

from dataclasses import dataclass, field

import fastgen


@dataclass(frozen=True)
class Counts:
    """Numbers of calls. The dicts hold no zeros.

    Attributes:
        hits: calls that ran fastgen's code, by patch.
        fallbacks: calls that ran the toolkit's own code, by patch and fallback reason.
        left_off: hits that ran without a feature, by feature and reason.
    """

    hits: dict[str, int] = field(default_factory=dict[str, int])
    fallbacks: dict[str, int] = field(default_factory=dict[str, int])
    left_off: dict[str, int] = field(default_factory=dict[str, int])

    def since(self, before: Counts) -> Counts:
        """Return what was added since `before`."""
        return Counts(
            _grown(before.hits, self.hits),
            _grown(before.fallbacks, self.fallbacks),
            _grown(before.left_off, self.left_off),
        )


def counts() -> Counts:
    """Return what was counted since the start of the process."""
    rows = fastgen.status().rows
    return Counts(
        {row.name: row.hits for row in rows if row.hits},
        {f"{row.name}, {reason}": count for row in rows for reason, count in row.fallbacks.items()},
        {what: count for row in rows for what, count in row.left_off.items()},
    )


def _grown(old: dict[str, int], new: dict[str, int]) -> dict[str, int]:
    return {key: count - old.get(key, 0) for key, count in new.items() if count > old.get(key, 0)}
