"""Greedy search and sampling without host synchronisation: token selection runs as a CUDA graph.

As in `captured_beam_search`, the token table has room for the longest text from the start, and a
length counter on the device selects the column to write. The host sees one step late that all rows
have ended. It then drops the column of that step and restores the random number generator.
"""

import contextlib
import functools
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from fastgen.decoding.backends.captured_selection import CapturedSelection
from fastgen.decoding.batching.batch_compaction import leaving_now
from fastgen.decoding.logits.pipeline import apply_transforms, phases
from fastgen.decoding.logits.text import Text
from fastgen.decoding.search.beam_search import RowStepper
from fastgen.decoding.search.sampling import Sampling, finished_rows
from fastgen.models.cuda_graphs import graph


@dataclass
class CapturedSampling(Sampling):
    """Greedy search or sampling with captured token selection.

    Takes the arguments of `Sampling`. All transforms must be `transforms.capturable`.

    Args:
        longest: maximum number of tokens of a text, prompt included.
    """

    longest: int = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        rows, self.length = self.ids.shape
        prompt = self.ids
        self.ids = prompt.new_zeros(rows, self.longest)
        if self.pad is not None:
            self.ids.copy_(self.pad)
        self.ids[:, : self.length] = prompt
        self.choices = CapturedSelection(graph.generator(prompt.device) if self.sample else None)
        self._has_room = True  # whether `ids` has unused columns after the text
        self._end = torch.empty(1, dtype=torch.int64, device=prompt.device)  # length of the text

    @property
    def text(self) -> Text:
        """Tokens of the rows in the batch."""
        return Text(self.ids[:, : self.length] if self._has_room else self.ids, self.prompt_length)

    def advance(self, model: RowStepper, logits: Tensor) -> bool:
        """Select the next token of every row; return False when all have ended.

        With a capture the end is seen one call late. Without one, `Sampling.advance` runs.
        """
        # A user's stopping criterion may allow texts longer than `longest`.
        if self.length < self.longest and self.choices.able(logits):
            with contextlib.suppress(graph.NotCaptured):
                return self._advance(model, logits)
        if self._has_room:
            self._has_room = False
            self._close()
            self.ids = self.ids[:, : self.length]
            before = self.choices.last()
            if before is not None and not before[0].any():
                return False
        return super().advance(model, logits)

    def _advance(self, model: RowStepper, logits: Tensor) -> bool:
        text = Text(self.ids, self.prompt_length, self.length, self._end)
        last = self.stop.ends_all(self.length + 1)
        self._end.fill_(self.length)
        choose = functools.partial(self._choose_next, logits, text, last)
        flags: Tensor = self.choices(
            choose, logits, self.ids, last, phases(self.transforms, self.length)
        )
        before = self.choices.look(flags)
        alive = [True] if before is None else self._alive(before[0])
        if not any(alive):  # all rows had already ended before this step
            self.choices.take_back()
            self._close()
            return False
        self.length += 1
        if last:
            if self.sample:
                self.choices.last()  # raises if the distribution was invalid
            self._close()
            return False
        if self.may_drop and leaving_now(finished_rows(alive), len(alive), self.captured):
            # Read the flags of this step now, because the compacted batch cannot use them later.
            alive = self._alive(cast(Tensor, self.choices.last())[0])
            if not any(alive):
                self._close()
                return False
            self._collect()
            self._leave(model, leaving_now(finished_rows(alive), len(alive), self.captured))
        return True

    def _choose_next(self, logits: Tensor, text: Text, last: bool) -> Tensor:
        """Select the next tokens and write them to the table. This function is captured.

        Returns:
            `CapturedSelection.seen` of the rows that are still running, (1, R) bool.
        """
        scores = (
            apply_transforms(logits.to(torch.float32, copy=True), text, self.transforms)
            if self.transforms
            else logits
        )
        tokens = self._picked(scores, self.choices.draw)
        if self.pad is not None:
            tokens = torch.where(self.running, tokens, self.pad)
        self.ids.index_copy_(1, self._end, tokens[:, None])
        return self.choices.seen(self.running.logical_and_(~self.stop.hits(tokens, last))[None])

    def _collect(self) -> None:
        """Write the rows of the batch to `outcome`."""
        if self.rows is None:
            self.outcome = self.ids
        else:
            self.outcome[self.rows] = self.ids

    def _close(self) -> None:
        self._collect()
        self.outcome = self.outcome[:, : self.length]
