"""Greedy search and sampling over any `Stepper`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from fastgen.decoding.batching.batch_compaction import CancellationCallback, compacted, leaving_now
from fastgen.decoding.batching.stable_prefix import OnTokens
from fastgen.decoding.logits.pipeline import apply_transforms, keep_sentences
from fastgen.decoding.logits.text import Text
from fastgen.decoding.logits.transform import LogitsTransform
from fastgen.decoding.search.beam_search import RowStepper, Trace, why_not_capturable
from fastgen.decoding.search.multinomial import GeneratorUser, multinomial
from fastgen.decoding.search.stopping import Stop
from fastgen.ops.selection.kbest import argmax


def chosen_of(scores: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probabilities (R,) of tokens (R,) under scores (R, V), which may be logits."""
    return torch.log_softmax(scores, -1).gather(1, tokens[:, None]).squeeze(1)


@dataclass
class Sampling:
    """State of one greedy search (sample=False) or sampling run over R rows.

    Args:
        ids: (R, P) int64, the prompt of each row.
        stop: decides which rows end.
        transforms: applied to the logits in this order.
        pad: token id that extends finished rows; None to keep extending them with their own.
        longest: maximum number of tokens of a row, prompt included. A user's stopping criterion may
            allow more.
        sample: sample tokens instead of taking the most probable ones.
        may_drop: whether finished rows may leave the batch (one row per sentence).
        captured: whether decode steps are captured, which takes one capture per batch size.
        trace: per-step tensors to record.
        on_step: called with the new tokens (R,) of every step.
        on_tokens: called with the new token of each row that has not ended.
        wanted: cancellation callback, polled with a row index after every step. A cancelled row is
            treated as ended.
    """

    ids: Tensor
    stop: Stop
    transforms: Sequence[LogitsTransform]
    pad: Tensor | None
    longest: int
    sample: bool = False
    may_drop: bool = True
    captured: bool = False
    trace: Trace = field(default_factory=Trace)
    on_step: Callable[[Tensor], None] | None = None
    on_tokens: OnTokens | None = None
    wanted: CancellationCallback | None = None

    def __post_init__(self) -> None:
        self.prompt_length = self.ids.shape[1]
        self.running = torch.ones(self.ids.shape[0], dtype=torch.bool, device=self.ids.device)
        # Index of each row of the current batch in the original one; None until rows leave.
        self.rows: Tensor | None = None
        self.user = GeneratorUser() if self.sample else None
        self.outcome = self.ids  # (R, P + T), of all rows, including those that have left

    @property
    def batch_size(self) -> int:
        """Number of rows still in the batch."""
        return self.ids.shape[0]

    @property
    def eager_selection(self) -> str | None:
        """Why token selection cannot be captured as a CUDA graph; None if it can."""
        if self.trace.enabled:
            return "scores are returned"
        if self.trace.chosen is not None:
            return "scores are summed up"
        if self.on_step is not None or self.on_tokens is not None:
            return "a streamer is set"
        return why_not_capturable(self.stop, self.transforms, self.sample, self.ids.device)

    @property
    def text(self) -> Text:
        """Tokens of the rows in the batch."""
        return Text(self.ids, self.prompt_length)

    def advance(self, model: RowStepper, logits: Tensor) -> bool:
        """Select the next token of every row; return False when all have ended."""
        tokens = self._select(logits, self.text)
        if self.pad is not None:
            tokens = torch.where(self.running, tokens, self.pad)
        self.extend(tokens[:, None])
        ended = self.stop(tokens, self.ids.shape[1], lambda: self.ids, self._scores_so_far())
        was_running, self.running = self.running, self.running & ~ended
        if self.on_step is not None:
            self.on_step(tokens)
        if self.on_tokens is not None:
            self._tell(self.on_tokens, tokens.where(was_running, -1))
        alive = self.alive(self.running)
        if not any(alive):
            return False
        if self.may_drop:
            self.drop_finished(model, alive)
        return True

    def drop_finished(self, model: RowStepper, alive: Sequence[bool]) -> None:
        """Compact the batch if enough of its rows are not alive."""
        if leaving := leaving_now(finished_rows(alive), len(alive), self.captured):
            self.compact(model, leaving)

    def extend(self, tokens: Tensor) -> None:
        """Append tokens (R, N) to the rows, and padding to rows that have left the batch."""
        self.ids = torch.cat([self.ids, tokens], 1)
        if self.rows is not None and self.pad is not None:
            columns = self.pad.expand(self.outcome.shape[0], tokens.shape[1]).clone()
            columns[self.rows] = tokens
            self.outcome = torch.cat([self.outcome, columns], 1)
        else:
            self.outcome = self.ids

    def alive(self, running: Tensor) -> list[bool]:
        """Return which rows of the batch are running and not cancelled."""
        alive: list[bool] = cast(Any, running).tolist()
        if self.wanted is None:
            return alive
        return [runs and self.wanted(row) for runs, row in zip(alive, self.numbers(), strict=True)]

    def numbers(self) -> Sequence[int]:
        """Return the index of each row of the batch in the original batch."""
        return (
            range(self.batch_size)
            if self.rows is None
            else cast("list[int]", cast(Any, self.rows).tolist())
        )

    def _tell(self, on_tokens: OnTokens, tokens: Tensor) -> None:
        """Report the newest tokens (R,); -1 marks rows that have none."""
        place, newest = (
            self.ids.shape[1] - self.prompt_length - 1,
            cast("list[int]", cast(Any, tokens).tolist()),
        )
        for row, token in zip(self.numbers(), newest, strict=True):
            if token >= 0:
                on_tokens(row, place, [token])

    def compact(self, model: RowStepper, leaving: Sequence[int]) -> None:
        """Compact the batch to the rows that do not leave."""
        stay = torch.tensor(
            compacted(len(self.ids), leaving), device=self.ids.device, dtype=torch.int64
        )
        self.rows = stay if self.rows is None else self.rows[stay]
        self.ids, self.running = self.ids[stay], self.running[stay]
        keep_sentences(self.transforms, stay)
        model.keep(stay)

    def _select(self, logits: Tensor, text: Text) -> Tensor:
        kept = self.trace.logits is not None
        # A copy, because the model's next step may overwrite its logits.
        if self.transforms or self.trace.enabled:
            logits = logits.to(torch.float32, copy=True)
        if self.trace.logits is not None:
            self.trace.logits.append(logits)
        scores = apply_transforms(logits, text, self.transforms, kept)
        if self.trace.scores is not None:
            self.trace.scores.append(scores)
        tokens = self.selected(scores, multinomial)
        if self.trace.chosen is not None:
            self.trace.chosen.append(
                self._of_all(chosen_of(scores.float(), tokens).where(self.running, 0.0))
            )
        return tokens

    def selected(self, scores: Tensor, draw: Callable[[Tensor, int], Tensor]) -> Tensor:
        """Select one token per row, (R,); `draw` samples as `torch.multinomial` does."""
        return (
            draw(torch.softmax(scores.float(), -1), 1).squeeze(1) if self.sample else argmax(scores)
        )

    def _of_all(self, values: Tensor) -> Tensor:
        """Scatter values of the batch into the original batch; rows that have left get 0."""
        if self.rows is None:
            return values
        return values.new_zeros(self.outcome.shape[0]).index_copy_(0, self.rows, values)

    def _scores_so_far(self) -> tuple[Tensor, ...] | None:
        return None if self.trace.scores is None else tuple(self.trace.scores)


def finished_rows(alive: Sequence[bool]) -> list[int]:
    """Return the indices of rows that are not alive."""
    return [row for row, runs in enumerate(alive) if not runs]
