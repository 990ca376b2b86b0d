"""Call and launch counters of the operations.

The module imports nothing of the package, so a report can read it at no cost.
"""

from collections import Counter

calls: Counter[tuple[str, str]] = Counter()
"""Calls by (operation, path) of the operations that have a Triton kernel or a C implementation.

The path is triton, native or reference.
"""

launches: Counter[str] = Counter()
"""Launches by kernel name; tests read it to see which branch ran."""
