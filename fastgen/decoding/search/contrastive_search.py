"""Contrastive search: of the likeliest tokens the one that is likely and unlike the text so far, as the model sees it.

The candidates of a step run as the beams of a sentence do, each one token behind the same text; the one that is chosen
has been run then, so that its logits are those of the next step.

Source: Su et al. 2022 (A Contrastive Framework for Neural Text Generation), section 4.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from fastgen.decoding.batching.batch_compaction import closed_up, who_leaves
from fastgen.decoding.logits.transforms import (
    LogitsTransform,
    Text,
    apply_transforms,
    keep_sentences,
)
from fastgen.decoding.search.beam_search import Stepper, Trace
from fastgen.decoding.search.sampling import chosen_of
from fastgen.decoding.search.stopping import Stop


class SeeingStepper(Stepper, Protocol):
    """A stepper that keeps what its model's head has read last."""

    @property
    def hidden(self) -> Tensor:
        """(B or R, P, C) behind the prompt, whose rows are alike within a sentence; (R, 1, C) behind a step."""
        ...


@dataclass
class ContrastiveSearch:
    """One contrastive search of B sentences with M candidates each.

    Args:
        ids: (B, P) int64, the prompt of each sentence.
        mask: (B, P), 0 where a prompt is padding, which no token is compared with; None where nothing is.
        penalty: how much being unlike counts, from 0 to 1 (alpha).
        pad: token that finished sentences go on with, None to let them run on.
        may_drop: whether finished sentences may leave the batch.
        on_step: called with the new tokens (B,) of every step.
    """

    ids: Tensor
    mask: Tensor | None
    candidates: int
    penalty: float
    stop: Stop
    transforms: Sequence[LogitsTransform]
    pad: Tensor | None
    may_drop: bool = True
    trace: Trace = field(default_factory=Trace)
    on_step: Callable[[Tensor], None] | None = None

    def __post_init__(self) -> None:
        self.prompt_length = self.ids.shape[1]
        self.running = torch.ones(len(self.ids), dtype=torch.bool, device=self.ids.device)
        self.rows = torch.arange(
            len(self.ids), device=self.ids.device, dtype=torch.int64
        )  # which of all sentences the present ones are
        self.outcome = self.ids  # (B, P + T), those that have left included
        self.seen: Tensor | None = (
            None  # (B, L, C), of length 1, what the model has seen of the text
        )
        self.tokens = self.probabilities = self.ids[:, :0]  # (B, M), the candidates

    @property
    def present(self) -> int:
        """Sentences that have not left."""
        return len(self.ids)

    @property
    def text(self) -> Text:
        """The sentences with each of their candidates."""
        ids = self.ids.repeat_interleave(self.candidates, 0)
        return Text(torch.cat([ids, self.tokens.reshape(-1, 1)], 1), self.prompt_length)

    def advance(self, model: SeeingStepper, logits: Tensor) -> bool:
        """Choose a candidate of every sentence, and the next ones; False when all have ended."""
        hidden = torch.nn.functional.normalize(model.hidden, dim=2)
        if self.seen is None:
            self.seen = hidden[:: len(hidden) // len(self.ids)]
            logits = logits[:: self.candidates]
        else:
            chosen = self._chosen(self.seen, hidden.view(len(self.ids), self.candidates, -1))
            model.reorder(chosen.expand(-1, self.candidates))
            logits = logits.view(len(self.ids), self.candidates, -1)[
                torch.arange(len(chosen), device=chosen.device, dtype=torch.int64), chosen[:, 0]
            ]
            if not self._extend(self.tokens.gather(1, chosen)[:, 0]):
                return False
            logits = self._leave(model, logits)
        self._propose(logits)
        return True

    def _chosen(self, seen: Tensor, hidden: Tensor) -> Tensor:
        """The best candidate (B, 1) of each sentence, from what the model sees in each, (B, M, C) of length 1."""
        likeness = torch.matmul(hidden, seen.transpose(1, 2))
        if self.mask is not None:
            padding = torch.nn.functional.pad(
                self.mask == 0, (0, seen.shape[1] - self.mask.shape[1])
            )
            likeness = likeness.masked_fill(padding[:, None], torch.finfo(likeness.dtype).min)
        scores = (1.0 - self.penalty) * self.probabilities - self.penalty * likeness.amax(2)
        chosen = scores.argmax(1, keepdim=True)
        newest = hidden.gather(1, chosen[:, :, None].expand(-1, -1, hidden.shape[2]))
        self.seen = torch.cat([seen, newest], 1)
        return chosen

    def _extend(self, tokens: Tensor) -> bool:
        """Let each sentence have one more token; False when all have ended."""
        if self.pad is not None:
            tokens = torch.where(self.running, tokens, self.pad)
        self.ids = torch.cat([self.ids, tokens[:, None]], 1)
        if self.trace.chosen is not None:
            of_present = chosen_of(self._scores, tokens).where(self.running, 0.0)
            self.trace.chosen.append(
                of_present.new_zeros(len(self.outcome)).index_copy_(0, self.rows, of_present)
            )
        column = tokens
        if self.pad is not None and self.present < len(self.outcome):
            column = self.pad.expand(len(self.outcome)).clone().index_copy_(0, self.rows, tokens)
        self.outcome = torch.cat([self.outcome, column[:, None]], 1)
        if self.on_step is not None:
            self.on_step(tokens)
        scores = None if self.trace.scores is None else tuple(self.trace.scores)
        self.running = self.running & ~self.stop(
            tokens, self.ids.shape[1], lambda: self.ids, scores
        )
        return bool(self.running.any())

    def _leave(self, model: Stepper, logits: Tensor) -> Tensor:
        """Let finished sentences leave, when enough of them have gathered; return the logits of those that stay."""
        if not self.may_drop:
            return logits
        alive: list[bool] = cast(Any, self.running).tolist()
        leaving = who_leaves([row for row, runs in enumerate(alive) if not runs], len(alive))
        if not leaving:
            return logits
        stay = torch.tensor(
            closed_up(len(alive), leaving), device=self.ids.device, dtype=torch.int64
        )
        self.rows, self.ids, self.running = self.rows[stay], self.ids[stay], self.running[stay]
        self.mask = None if self.mask is None else self.mask[stay]
        self.seen = None if self.seen is None else self.seen[stay]
        keep_sentences(self.transforms, stay)
        model.keep(stay)
        return logits[stay]

    def _propose(self, logits: Tensor) -> None:
        """Take the likeliest tokens, by logits (B, V), for candidates."""
        logits = logits.float()
        if self.trace.logits is not None:
            self.trace.logits.append(logits)
        scores = apply_transforms(
            logits.clone(), Text(self.ids, self.prompt_length), self.transforms
        )
        if self.trace.scores is not None:
            self.trace.scores.append(scores)
        self._scores = scores
        self.probabilities, self.tokens = torch.topk(torch.softmax(scores, -1), self.candidates)
