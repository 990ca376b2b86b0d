"""How often operations ran, by path. Nothing is imported here, so that a report costs nothing."""

from collections import Counter

calls: Counter[tuple[str, str]] = Counter()
"""Calls by operation and path (triton, native or reference), of the operations that have a kernel or are in C."""

launches: Counter[str] = Counter()
"""Launches by the kernel's name; the tests read it to see which branch ran."""
