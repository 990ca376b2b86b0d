"""Progress display of a run: sentences and tokens per second, and the first problems."""

from __future__ import annotations

import logging
import operator
import sys
import time
from collections.abc import Sequence
from typing import Any

from fastgen.corpus import models
from fastgen.corpus.formats.records import Source
from fastgen.corpus.run.journal import Entry

_logger = logging.getLogger("fastgen")

FIRST = 5
"""Problems to report while a run goes on."""

LISTED = 20
"""Problems whose record numbers are listed at the end."""


class Meter:
    """Reporter of the first problems, with a progress bar on stderr.

    The bar shows the remaining time if the source has a length hint.

    Args:
        source: the source.
        done: records that were finished before this run.
        shown: whether there is a bar.
    """

    def __init__(self, source: Source, done: int, shown: bool) -> None:
        self._bar: Any = None
        if shown:
            models.need("tqdm")
            from tqdm import tqdm

            length = operator.length_hint(source, 0) or None
            self._bar = tqdm(
                total=length, initial=done, unit=" sentences", file=sys.stderr, mininterval=0.5
            )
        self._begin, self._tokens, self._shown = time.perf_counter(), 0, 0

    def show(self, entry: Entry) -> None:
        """Report a block that is on disk."""
        for number, reason in entry.problems[: FIRST - self._shown]:
            _logger.warning("record %d has no output: %s", number, reason)
            self._shown += 1
        if self._bar is not None:
            self._tokens += entry.tokens
            rate = self._tokens / max(time.perf_counter() - self._begin, 1e-9)
            self._bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
            self._bar.update(entry.records)

    def close(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()


def tell_all(problems: Sequence[tuple[int, str]], records: int) -> None:
    """Log the record numbers of the problems, at most `LISTED` of them."""
    if problems:
        numbers = ", ".join(str(number) for number, _ in problems[:LISTED])
        more = f" and {len(problems) - LISTED} more" if len(problems) > LISTED else ""
        _logger.warning(
            "%d of %d records have no output: %s%s", len(problems), records, numbers, more
        )
