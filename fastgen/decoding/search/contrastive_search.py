"""Contrastive search: select a probable token whose hidden state differs from those of the text.

The M most probable tokens of each sentence are its candidates. They run through the model as its
beams, each one token after the same text. The selected candidate has therefore already run, and its
logits are those of the next step.

Source: Su et al. 2022 (A Contrastive Framework for Neural Text Generation), section 4.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from fastgen.decoding.batching.batch_compaction import compacted, leaving_now
from fastgen.decoding.logits.pipeline import apply_transforms, keep_sentences
from fastgen.decoding.logits.text import Text
from fastgen.decoding.logits.transform import LogitsTransform
from fastgen.decoding.search.beam_search import RowStepper, Trace
from fastgen.decoding.search.sampling import chosen_of
from fastgen.decoding.search.stopping import Stop


class SeeingStepper(RowStepper, Protocol):
    """Stepper that exposes the last hidden states, the input of the model's head."""

    @property
    def hidden(self) -> Tensor:
        """Last hidden states of the newest call.

        (B or R, P, C) after prefill, where all rows of a sentence are equal; (R, 1, C) after a
        decode step.
        """
        ...


@dataclass
class ContrastiveSearch:
    """State of one contrastive search over B sentences with M candidates each.

    Args:
        ids: (B, P) int64, the prompt of each sentence.
        mask: (B, P), 0 at padding, which takes no part in the comparison; None without padding.
        candidates: M.
        penalty: weight of the degeneration penalty, from 0 to 1 (alpha).
        stop: decides which sentences end.
        transforms: applied to the logits in this order.
        pad: token that extends finished sentences; None to keep extending them with their own.
        may_drop: whether finished sentences may leave the batch (batch compaction).
        trace: per-step tensors to record.
        on_step: called with the new tokens (B,) of every step.
    """

    captured = False  # the search reads hidden states of every step
    eager_selection = None

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
        # Index of each sentence of the current batch in the original one.
        self.rows = torch.arange(len(self.ids), device=self.ids.device, dtype=torch.int64)
        self.outcome = self.ids  # (B, P + T), of all sentences, including those that have left
        self.seen: Tensor | None = None  # (B, L, C), hidden states of the text, normalised
        self.tokens = self.probabilities = self.ids[:, :0]  # (B, M), the candidates

    @property
    def batch_size(self) -> int:
        """Number of sentences still in the batch."""
        return len(self.ids)

    @property
    def text(self) -> Text:
        """Tokens of the B * M rows: each sentence extended by each of its candidates."""
        ids = self.ids.repeat_interleave(self.candidates, 0)
        return Text(torch.cat([ids, self.tokens.reshape(-1, 1)], 1), self.prompt_length)

    def advance(self, model: SeeingStepper, logits: Tensor) -> bool:
        """Select a candidate per sentence, then propose the next ones.

        Returns:
            False when all sentences have ended.
        """
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
        """Return the best candidate (B, 1) of each sentence and append its hidden state to `seen`.

        Args:
            seen: (B, L, C), normalised hidden states of the text.
            hidden: (B, M, C), normalised hidden states of the candidates.
        """
        similarity = torch.matmul(hidden, seen.transpose(1, 2))
        if self.mask is not None:
            padding = torch.nn.functional.pad(
                self.mask == 0, (0, seen.shape[1] - self.mask.shape[1])
            )
            similarity = similarity.masked_fill(padding[:, None], torch.finfo(similarity.dtype).min)
        scores = (1.0 - self.penalty) * self.probabilities - self.penalty * similarity.amax(2)
        chosen = scores.argmax(1, keepdim=True)
        newest = hidden.gather(1, chosen[:, :, None].expand(-1, -1, hidden.shape[2]))
        self.seen = torch.cat([seen, newest], 1)
        return chosen

    def _extend(self, tokens: Tensor) -> bool:
        """Append one token to each sentence; return False when all have ended."""
        if self.pad is not None:
            tokens = torch.where(self.running, tokens, self.pad)
        self.ids = torch.cat([self.ids, tokens[:, None]], 1)
        if self.trace.chosen is not None:
            log_probs = chosen_of(self._scores, tokens).where(self.running, 0.0)
            self.trace.chosen.append(
                log_probs.new_zeros(len(self.outcome)).index_copy_(0, self.rows, log_probs)
            )
        column = tokens
        if self.pad is not None and self.batch_size < len(self.outcome):
            column = self.pad.expand(len(self.outcome)).clone().index_copy_(0, self.rows, tokens)
        self.outcome = torch.cat([self.outcome, column[:, None]], 1)
        if self.on_step is not None:
            self.on_step(tokens)
        scores = None if self.trace.scores is None else tuple(self.trace.scores)
        self.running = self.running & ~self.stop(
            tokens, self.ids.shape[1], lambda: self.ids, scores
        )
        return bool(self.running.any())

    def _leave(self, model: RowStepper, logits: Tensor) -> Tensor:
        """Compact the batch if enough sentences have finished; return the logits of the others."""
        if not self.may_drop:
            return logits
        alive: list[bool] = cast(Any, self.running).tolist()
        leaving = leaving_now([row for row, runs in enumerate(alive) if not runs], len(alive))
        if not leaving:
            return logits
        stay = torch.tensor(
            compacted(len(alive), leaving), device=self.ids.device, dtype=torch.int64
        )
        self.rows, self.ids, self.running = self.rows[stay], self.ids[stay], self.running[stay]
        self.mask = None if self.mask is None else self.mask[stay]
        self.seen = None if self.seen is None else self.seen[stay]
        keep_sentences(self.transforms, stay)
        model.keep(stay)
        return logits[stay]

    def _propose(self, logits: Tensor) -> None:
        """Make the M most probable tokens under logits (B, V) the candidates of the next step."""
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
