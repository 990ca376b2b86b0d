"""Greedy search on a device that is never waited for: choices are captured as a graph, and looked at a step later.

As in `beam_replay`, the table of tokens has room for the longest text from the start, a column is written where the
device says, and the host learns a step late that all rows have ended. The column of that step is cut off again.
"""

import contextlib
import functools
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from fastgen.decoding.beam import Stepper
from fastgen.decoding.choices import Choices
from fastgen.decoding.leaving import may_leave
from fastgen.decoding.sample import Sampling
from fastgen.decoding.text import Text, edited, phases
from fastgen.models import graph
from fastgen.ops.kbest import argmax


@dataclass
class ReplayedSampling(Sampling):
    """One greedy search; arguments as `Sampling`, whose edits are all of few tokens (`text.all_sparse`).

    Args:
        longest: tokens of a text at most.
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
        self.choices = Choices()
        self._has_room = True  # behind the text
        self._end = torch.empty(1, dtype=torch.int64, device=prompt.device)  # the text's length

    @property
    def text(self) -> Text:
        return Text(self.ids[:, : self.length] if self._has_room else self.ids, self.prompt_length)

    def advance(self, model: Stepper, logits: Tensor) -> bool:
        if self.length < self.longest and self.choices.able(logits):  # a criterion of the user's may allow more
            with contextlib.suppress(graph.NotCaptured):
                return self._advance(model, logits)
        if self._has_room:
            self._has_room = False
            self._close()
            self.ids = self.ids[:, : self.length]
            before = self.choices.last()
            if before is not None and not before.any():
                return False
        return super().advance(model, logits)

    def _advance(self, model: Stepper, logits: Tensor) -> bool:
        text = Text(self.ids, self.prompt_length, self.length, self._end)
        last = self.stop.ends_all(self.length + 1)
        self._end.fill_(self.length)
        choose = functools.partial(self._choose_next, logits, text, last)
        running: Tensor = self.choices(choose, logits, self.ids, last, phases(self.edits, self.length))
        self.length += 1
        before = self.choices.last() if last else self.choices.look(running)
        alive = [True] if before is None else self._alive(before)
        if last or not any(alive):
            self.length -= not any(alive)  # nothing ran any more in this step
            self._close()
            return False
        if self.may_drop and may_leave(alive.count(False), len(alive), self.captured):
            alive = self._alive(cast(Tensor, self.choices.last()))  # of this step, so that none after it goes unseen
            if not any(alive):
                self._close()
                return False
            self._collect()
            self._leave(model, alive)
        return True

    def _choose_next(self, logits: Tensor, text: Text, last: bool) -> Tensor:
        """Write the next token of every row to the table; return (R,), which rows run on."""
        tokens = argmax(edited(logits.clone() if self.edits else logits, text, self.edits))
        if self.pad is not None:
            tokens = torch.where(self.running, tokens, self.pad)
        self.ids.index_copy_(1, self._end, tokens[:, None])
        return self.running.logical_and_(~self.stop.hits(tokens, last))

    def _collect(self) -> None:
        """Write the present rows to the table of all."""
        if self.rows is None:
            self.outcome = self.ids
        else:
            self.outcome[self.rows] = self.ids

    def _close(self) -> None:
        self._collect()
        self.outcome = self.outcome[:, : self.length]
