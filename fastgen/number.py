"""Numeric ranges that validate user input, for `argparse` and for settings passed by name."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Number:
    """A range of numbers that is also an argparse type.

    Attributes:
        kind: `int` or `float`; a float must be finite.
        least: Inclusive lower bound.
        most: Inclusive upper bound.
        above: Exclusive lower bound.
        below: Exclusive upper bound.
    """

    kind: type[int] | type[float] = int
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None

    def __call__(self, text: str) -> int | float:
        """Parse a number.

        Raises:
            argparse.ArgumentTypeError: The text is not a number or is out of range; the message
                contains it.
        """
        try:
            value = self.kind(text)
        except ValueError:
            wanted = "a whole number" if self.kind is int else "a number"
            raise argparse.ArgumentTypeError(f"must be {wanted}, not {text!r}") from None
        if (problem := self.problem(value)) is not None:
            raise argparse.ArgumentTypeError(problem)
        return value

    def problem(self, value: float) -> str | None:
        """Return what is wrong with a number; None if it lies in the range."""
        good = (
            math.isfinite(value)
            and (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )
        return (
            None
            if good
            else f"must be {self}, not {f'{value:g}' if isinstance(value, float) else value}"
        )

    def __str__(self) -> str:
        """Describe the range: "at least 1", "above 0 and below 1"."""
        bounds = {
            "at least": self.least,
            "above": self.above,
            "at most": self.most,
            "below": self.below,
        }
        return (
            " and ".join(f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None)
            or "finite"
        )


COUNT = Number(least=1)
POSITIVE = Number(float, above=0)
