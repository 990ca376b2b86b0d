"""What a run shows while it runs: sentences and tokens per second, and the first problems."""

from __future__ import annotations

import logging
import operator
import sys
import time
from collections.abc import Sequence
from typing import Any

from fastgen.corpus import models
from fastgen.corpus.formats.records import Source

_logger = logging.getLogger("fastgen")

FIRST = 5
"""Problems that a process tells while it runs."""

LISTED = 20
"""Problems whose numbers are told at the end."""


class Meter:
    """A bar on standard error, with the time that is left where the source has a length.

    Args:
        shown: whether there is one at all.
        done: records that were there before this run.
    """

    def __init__(self, source: Source, done: int, shown: bool) -> None:
        self._bar: Any = None
        self._done = done
        if shown:
            models.need("tqdm")
            from tqdm import tqdm

            length = operator.length_hint(source, 0) or None
            self._bar = tqdm(total=length, initial=done, unit=" sentences", file=sys.stderr, mininterval=0.5)
        self._begin = time.perf_counter()

    def show(self, records: int, tokens: int) -> None:
        """So many have been made by this run."""
        if self._bar is not None:
            rate = tokens / max(time.perf_counter() - self._begin, 1e-9)
            self._bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
            self._bar.update(self._done + records - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class Problems:
    """Tells the first problems of a process."""

    def __init__(self) -> None:
        self._told = 0

    def tell(self, problems: Sequence[tuple[int, str]]) -> None:
        for number, reason in problems[: FIRST - self._told]:
            _logger.warning("record %d has no output: %s", number, reason)
            self._told += 1


def tell_all(problems: Sequence[tuple[int, str]], records: int) -> None:
    """Tell the numbers of all problems, or of as many as a reader may want to read."""
    if problems:
        numbers = ", ".join(str(number) for number, _ in problems[:LISTED])
        more = f" and {len(problems) - LISTED} more" if len(problems) > LISTED else ""
        _logger.warning("%d of %d records have no output: %s%s", len(problems), records, numbers, more)
