"""The record of how families run: benchmarks/results/coverage.json."""

from __future__ import annotations

from collections import Counter
from typing import Any

from benchmarks.harness import RESULTS

FUSED, SHARED, PART, ALONE = "fused", "shared", "in part", "left alone"
WRONG, FAILS, UNBUILT = "wrong", "fails in transformers", "not built"
KINDS = FUSED, SHARED, PART, ALONE, FAILS, UNBUILT, WRONG
"""How a family runs, in the order of the tables."""

CALLS = 5
"""How many calls each family runs."""

FILE = RESULTS / "coverage.json"
LEAST = 164.0
"""How many families are accelerated at least; those in part count half."""


def accelerated(families: dict[str, dict[str, Any]]) -> float:
    """Return how many families are accelerated; those in part count half."""
    count = Counter(found["how"] for found in families.values())
    return count[FUSED] + count[SHARED] + count[PART] / 2


def counted(families: dict[str, dict[str, Any]]) -> str:
    """Return how many families run in which way, in words."""
    count = Counter(found["how"] for found in families.values())
    return ", ".join(f"{count[kind]} {kind}" for kind in KINDS)
