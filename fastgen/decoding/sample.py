"""Greedy search and sampling over any model that can make steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from fastgen.decoding.beam import Stepper, Trace
from fastgen.decoding.text import Edit, Stop, Text, closed_up, edited, may_leave
from fastgen.ops.kbest import argmax


@dataclass
class Sampling:
    """One run of greedy search (sample=False) or sampling over R rows.

    Args:
        ids: (R, P) int64, the prompt of each row.
        pad: token id that finished rows go on with, None to let them run on.
        may_drop: whether finished rows may leave the batch (one row per sentence).
        captured: whether the model's steps are, for a number of rows.
        on_tokens: called with the new tokens (R,) of every step.
    """

    ids: Tensor
    stop: Stop
    edits: Sequence[Edit]
    pad: Tensor | None
    sample: bool = False
    may_drop: bool = True
    captured: bool = False
    trace: Trace = field(default_factory=Trace)
    on_tokens: Callable[[Tensor], None] | None = None

    def run(self, model: Stepper) -> Tensor:
        """Decode to the end; return ids (R, P + T)."""
        prompt = self.ids.shape[1]
        running = torch.ones(self.ids.shape[0], dtype=torch.bool, device=self.ids.device)
        rows: Tensor | None = None  # which of all rows are running, once some have left
        whole = self.ids
        logits = model.prefill()
        while True:
            tokens = self._choose(logits, Text(self.ids, prompt))
            if self.pad is not None:
                tokens = torch.where(running, tokens, self.pad)
            self.ids = torch.cat([self.ids, tokens[:, None]], 1)
            if rows is not None and self.pad is not None:
                column = self.pad.expand(whole.shape[0]).clone()
                column[rows] = tokens
                whole = torch.cat([whole, column[:, None]], 1)
            else:
                whole = self.ids
            ended = self.stop(tokens, self.ids.shape[1], lambda: self.ids, self._scores_so_far())
            running = running & ~ended
            if self.on_tokens is not None:
                self.on_tokens(tokens)
            alive: list[bool] = cast(Any, running).tolist()
            if not any(alive):
                return whole
            if self.may_drop and may_leave(alive.count(False), len(alive), self.captured):
                leaving = [row for row, runs in enumerate(alive) if not runs]
                stay = torch.tensor(closed_up(len(alive), leaving), device=self.ids.device)
                rows = stay if rows is None else rows[stay]
                self.ids, running = self.ids[stay], running[stay]
                model.keep(stay)
            logits = model.step(self.ids)

    def _choose(self, logits: Tensor, text: Text) -> Tensor:
        kept = self.trace.logits is not None
        if self.edits or kept:
            logits = logits.clone()
        if self.trace.logits is not None:
            self.trace.logits.append(logits)
        scores = edited(logits, text, self.edits, kept)
        if self.trace.scores is not None:
            self.trace.scores.append(scores)
        if self.sample:
            return torch.multinomial(torch.softmax(scores, -1), 1).squeeze(1)
        return argmax(scores)

    def _scores_so_far(self) -> tuple[Tensor, ...] | None:
        return None if self.trace.scores is None else tuple(self.trace.scores)
