"""Greedy search and sampling over any model that can make steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from fastgen.decoding.batching.batch_compaction import Wanted, closed_up, who_leaves
from fastgen.decoding.batching.stable_prefix import OnTokens
from fastgen.decoding.logits.transforms import (
    LogitsTransform,
    Text,
    apply_transforms,
    keep_sentences,
)
from fastgen.decoding.search.beam_search import Stepper, Trace
from fastgen.decoding.search.stopping import Stop
from fastgen.ops.selection.kbest import argmax


def chosen_of(scores: Tensor, tokens: Tensor) -> Tensor:
    """The log-probability (R,) of one token each, by scores (R, V) that need not be normalised."""
    return torch.log_softmax(scores, -1).gather(1, tokens[:, None]).squeeze(1)


@dataclass
class Sampling:
    """One run of greedy search (sample=False) or sampling over R rows.

    Args:
        ids: (R, P) int64, the prompt of each row.
        pad: token id that finished rows go on with, None to let them run on.
        may_drop: whether finished rows may leave the batch (one row per sentence).
        captured: whether the model's steps are, for a number of rows.
        on_step: called with the new tokens (R,) of every step.
        on_tokens: called with the new token of each row that has not ended.
        wanted: of rows, asked behind every step; one that is not leaves as one that has ended.
    """

    ids: Tensor
    stop: Stop
    transforms: Sequence[LogitsTransform]
    pad: Tensor | None
    sample: bool = False
    may_drop: bool = True
    captured: bool = False
    trace: Trace = field(default_factory=Trace)
    on_step: Callable[[Tensor], None] | None = None
    on_tokens: OnTokens | None = None
    wanted: Wanted | None = None

    def __post_init__(self) -> None:
        self.prompt_length = self.ids.shape[1]
        self.running = torch.ones(self.ids.shape[0], dtype=torch.bool, device=self.ids.device)
        self.rows: Tensor | None = None  # which of all rows are running, once some have left
        self.outcome = self.ids  # (R, P + T), those that have left included

    @property
    def present(self) -> int:
        """Rows that have not left."""
        return self.ids.shape[0]

    @property
    def text(self) -> Text:
        return Text(self.ids, self.prompt_length)

    def advance(self, model: Stepper, logits: Tensor) -> bool:
        """Choose the next token of every row; False when all have ended."""
        tokens = self._choose(logits, self.text)
        if self.pad is not None:
            tokens = torch.where(self.running, tokens, self.pad)
        self.extend(tokens[:, None])
        ended = self.stop(tokens, self.ids.shape[1], lambda: self.ids, self._scores_so_far())
        began, self.running = self.running, self.running & ~ended
        if self.on_step is not None:
            self.on_step(tokens)
        if self.on_tokens is not None:
            self._tell(self.on_tokens, tokens.where(began, -1))
        alive = self._alive(self.running)
        if not any(alive):
            return False
        if self.may_drop and (leaving := who_leaves(not_alive(alive), len(alive), self.captured)):
            self._leave(model, leaving)
        return True

    def extend(self, tokens: Tensor) -> None:
        """Add tokens (R, N) to the rows; those that have left are padded."""
        self.ids = torch.cat([self.ids, tokens], 1)
        if self.rows is not None and self.pad is not None:
            columns = self.pad.expand(self.outcome.shape[0], tokens.shape[1]).clone()
            columns[self.rows] = tokens
            self.outcome = torch.cat([self.outcome, columns], 1)
        else:
            self.outcome = self.ids

    def leave(self, model: Any, running: Tensor) -> None:
        """Let the rows go on that are running, and no others."""
        self._leave(model, not_alive(self._alive(running)))

    def _alive(self, running: Tensor) -> list[bool]:
        """Which of the present rows run on, of those that somebody waits for."""
        alive: list[bool] = cast(Any, running).tolist()
        if self.wanted is None:
            return alive
        return [runs and self.wanted(row) for runs, row in zip(alive, self._numbers(), strict=True)]

    def _numbers(self) -> Sequence[int]:
        """Which of all rows the present ones are."""
        return (
            range(self.present)
            if self.rows is None
            else cast("list[int]", cast(Any, self.rows).tolist())
        )

    def _tell(self, on_tokens: OnTokens, tokens: Tensor) -> None:
        """Tell the newest tokens (R,), -1 where there is none."""
        place, newest = (
            self.ids.shape[1] - self.prompt_length - 1,
            cast("list[int]", cast(Any, tokens).tolist()),
        )
        for row, token in zip(self._numbers(), newest, strict=True):
            if token >= 0:
                on_tokens(row, place, [token])

    def _leave(self, model: Stepper, leaving: Sequence[int]) -> None:
        """Let the rows go on that do not leave."""
        stay = torch.tensor(
            closed_up(len(self.ids), leaving), device=self.ids.device, dtype=torch.int64
        )
        self.rows = stay if self.rows is None else self.rows[stay]
        self.ids, self.running = self.ids[stay], self.running[stay]
        keep_sentences(self.transforms, stay)
        model.keep(stay)

    def _choose(self, logits: Tensor, text: Text) -> Tensor:
        kept = self.trace.logits is not None
        if self.transforms or self.trace.wanted:  # the model's next step may overwrite its logits
            logits = logits.to(torch.float32, copy=True)
        if self.trace.logits is not None:
            self.trace.logits.append(logits)
        scores = apply_transforms(logits, text, self.transforms, kept)
        if self.trace.scores is not None:
            self.trace.scores.append(scores)
        tokens = self._picked(scores, torch.multinomial)
        if self.trace.chosen is not None:
            self.trace.chosen.append(
                self._of_all(chosen_of(scores.float(), tokens).where(self.running, 0.0))
            )
        return tokens

    def _picked(self, scores: Tensor, draw: Callable[[Tensor, int], Tensor]) -> Tensor:
        """One token (R,) of each row; `draw` is `torch.multinomial` or alike."""
        return (
            draw(torch.softmax(scores.float(), -1), 1).squeeze(1) if self.sample else argmax(scores)
        )

    def _of_all(self, values: Tensor) -> Tensor:
        """Values of the present rows among those of all, 0 for those that have left."""
        if self.rows is None:
            return values
        return values.new_zeros(self.outcome.shape[0]).index_copy_(0, self.rows, values)

    def _scores_so_far(self) -> tuple[Tensor, ...] | None:
        return None if self.trace.scores is None else tuple(self.trace.scores)


def not_alive(alive: Sequence[bool]) -> list[int]:
    """The rows that do not run on."""
    return [row for row, runs in enumerate(alive) if not runs]
