"""Beam search over any `Stepper`, with the finishing rules of a toolkit.

The state is small: running scores, the tokens of the running beams, and the finished hypotheses.
Keys and values never move (see `kv_cache`). Finished hypotheses are gathered only in steps in which
they change. Sentences whose hypotheses can no longer improve leave the batch (Hoang et al. 2018,
section 2.1).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from fastgen.decoding.batching.batch_compaction import CancellationCallback, compacted, leaving_now
from fastgen.decoding.kv_cache.ancestry import Ancestry
from fastgen.decoding.logits.pipeline import (
    apply_transforms,
    bans_alone,
    capturable,
    keep_sentences,
    sparse_updates,
)
from fastgen.decoding.logits.text import Text
from fastgen.decoding.logits.transform import LogitsTransform
from fastgen.decoding.search.finishing_rules import Merged, TransformersRule
from fastgen.decoding.search.multinomial import GeneratorUser, multinomial
from fastgen.decoding.search.stopping import Stop
from fastgen.models.cuda_graphs import graph
from fastgen.models.memory.scratch import ScratchPool
from fastgen.ops.selection.choice import Candidates
from fastgen.ops.selection.kbest import LogitsUpdates, best_of_log_probs, fused, kbest
from fastgen.ops.selection.log_softmax import log_softmax, log_softmax_reference
from fastgen.ops.tables import Table, extend_rows_, finish_rows_


class RowStepper(Protocol):
    """Model that runs prefill and decode steps over R = B * M rows, one token per row and step."""

    @property
    def ancestry(self) -> Ancestry | None:
        """Ancestry table, if it is the only state that `reorder` changes; otherwise None."""
        ...

    def prefill(self) -> Tensor:
        """Run the prompt and return the logits of the first new token.

        Returns:
            (R, V) fp32, or the model's dtype if a captured step produced them. Read-only.
        """
        ...

    def step(self, ids: Tensor) -> Tensor:
        """Run the newest token of ids (R, L) and return logits as `prefill` does."""
        ...

    def reorder(self, parents: Tensor) -> None:
        """Make row b * M + m continue beam parents[b, m]; parents is (B, M) int64."""
        ...

    def keep(self, sentences: Tensor) -> None:
        """Keep only the given sentences of the batch.

        Args:
            sentences: int64 indices into the current batch. A kept sentence either stays at its
                index or moves from the tail of the batch to a freed index.
        """
        ...


@dataclass
class Trace:
    """Per-step tensors that the caller requested; a field is None if it was not requested.

    Attributes:
        scores: processed scores of each step, (R, V) fp32.
        logits: raw logits of each step, (R, V) fp32.
        chosen: log-probability (R,) of each selected token under the processed scores, 0 after a
            row has ended. Only `Sampling` and `ContrastiveSearch` fill it.
    """

    scores: list[Tensor] | None = None
    logits: list[Tensor] | None = None
    chosen: list[Tensor] | None = None

    @property
    def enabled(self) -> bool:
        """Whether scores or logits are recorded."""
        return self.scores is not None or self.logits is not None


@dataclass
class Hypotheses:
    """The M best finished hypotheses of each sentence, best first.

    Attributes:
        ids: (B, M, L) int64, prompt included.
        beams: (B, M, T) int32, the row each token came from; -1 after the end.
        scores: (B, M) fp32.
        done: (B, M) bool, whether the slot holds a hypothesis.
    """

    ids: Tensor
    beams: Tensor
    scores: Tensor
    done: Tensor

    def keep(self, sentences: Tensor) -> "Hypotheses":
        """Return the rows of the given sentences."""
        return Hypotheses(*(t[sentences] for t in (self.ids, self.beams, self.scores, self.done)))

    def put(self, sentences: Tensor, rows: "Hypotheses") -> None:
        """Overwrite the rows of the given sentences."""
        for target, source in zip(
            (self.ids, self.beams, self.scores, self.done),
            (rows.ids, rows.beams, rows.scores, rows.done),
            strict=True,
        ):
            target[sentences] = source


class Choice(NamedTuple):
    """Result of one token selection: the beams that continue and the finished hypotheses.

    Attributes:
        parents: (B, M) int64, the beam that each running beam continues.
        tokens: (B, M) int64, the new token of each running beam.
        scores: (B, M) fp32, running scores.
        merged: finished hypotheses after this step.
        improvable: (B,) bool, whether a running beam could still finish with a better score.
        flags: (4, B) bool. Row 0: the finished hypotheses changed. Row 1: `improvable`. Row 2: all
            M hypotheses are finished. Row 3: the search is over, equal for every sentence.
    """

    parents: Tensor
    tokens: Tensor
    scores: Tensor
    merged: Merged
    improvable: Tensor
    flags: Tensor


def why_not_capturable(
    stop: Stop, transforms: Sequence[LogitsTransform], sample: bool, device: torch.device
) -> str | None:
    """Return why a CUDA graph cannot select tokens with these rules; None if it can."""
    if stop.others:
        return "a stopping criterion looks at all tokens"
    if not capturable(transforms):
        return "a logits processor may look at the text, or wait for the device"
    return (
        "a graph draws other random numbers" if sample and not graph.draws_alike(device) else None
    )


def read(flags: Tensor) -> list[list[bool]]:
    """Copy flags (4, B) to the host; blocks until the device has computed them."""
    return cast(Any, flags).tolist()


def gather(table: Tensor, index: Tensor) -> Tensor:
    """Gather table (B, N) or (B, N, L) along its second dimension at index (B, K)."""
    return table.gather(
        1, index if table.dim() == 2 else index[:, :, None].expand(-1, -1, table.shape[2])
    )


@dataclass
class BeamSearch:
    """State of one beam search: the running beams of B sentences and their finished hypotheses.

    Args:
        prompt: (B, P) int64, the tokens every beam starts with.
        rule: number of candidates, ranking and stopping, as in the toolkit.
        stop: decides which candidates end.
        transforms: applied to the log-probabilities in this order.
        fill: token that pads a hypothesis after its end.
        sample: sample the candidates instead of taking the best (beam sampling).
        rank_drawn: sort sampled candidates by score, best first; otherwise keep the draw order.
        may_drop: whether finished sentences may leave the batch (batch compaction).
        captured: whether decode steps are captured, which takes one capture per batch size.
        exact: compute log-probabilities that are bitwise equal to the toolkit's. This is possible
            where the logits are equal, as with fp64 models.
        trace: per-step tensors to record.
        wanted: cancellation callback, polled after every step. A cancelled sentence is treated as
            finished and returns the hypotheses it has.
        on_step: called with this search after every step but the last, before sentences leave.
    """

    prompt: Tensor
    rule: TransformersRule
    stop: Stop
    transforms: Sequence[LogitsTransform]
    fill: int
    sample: bool = False
    rank_drawn: bool = False
    may_drop: bool = True
    captured: bool = False
    exact: bool = False
    trace: Trace = field(default_factory=Trace)
    wanted: CancellationCallback | None = None
    on_step: Callable[["BeamSearch"], None] | None = None
    memory: ScratchPool = field(
        default_factory=ScratchPool, init=False
    )  # for a step's log-probabilities

    def __post_init__(self) -> None:
        self.user = GeneratorUser() if self.sample else None
        b, p = self.prompt.shape
        m, longest, device = self.rule.beams, self.rule.max_length, self.prompt.device
        self.length = p
        self.ids = torch.full((b, m, longest), self.fill, dtype=torch.int64, device=device)
        self.ids[:, :, :p] = self.prompt[:, None]
        self.beams = torch.full((b, m, longest - p), -1, dtype=torch.int32, device=device)
        self.scores = torch.zeros(b, m, dtype=torch.float32, device=device)
        self.scores[:, 1:] = self.rule.mask_value
        self.improvable = torch.ones(b, dtype=torch.bool, device=device)
        self.finished: Hypotheses = Hypotheses(
            self.ids.clone(),
            self.beams.clone(),
            torch.full((b, m), self.rule.mask_value, dtype=torch.float32, device=device),
            torch.zeros(b, m, dtype=torch.bool, device=device),
        )
        # Index of each running sentence in the original batch, and its first row there.
        self.sentences = torch.arange(b, device=device, dtype=torch.int64)
        self._first_rows = self.sentences[:, None] * m
        self.result = self.finished  # all sentences; a separate table once some have left

    @property
    def outcome(self) -> Hypotheses:
        """Finished hypotheses of all sentences; valid once the search is over."""
        if self.result is not self.finished:
            self.result.put(self.sentences, self.finished)
        return self.result

    @property
    def batch_size(self) -> int:
        """Number of sentences still in the batch."""
        return self.prompt.shape[0]

    @property
    def eager_selection(self) -> str | None:
        """Why token selection cannot be captured as a CUDA graph; None if it can."""
        if self.trace.enabled:
            return "scores are returned"
        if self.on_step is not None:
            return "a streamer is set"
        return why_not_capturable(self.stop, self.transforms, self.sample, self.ids.device)

    @property
    def text(self) -> Text:
        """Tokens of the running beams."""
        return Text(self.ids.flatten(0, 1)[:, : self.length], self.prompt.shape[1])

    def advance(self, model: RowStepper, logits: Tensor) -> bool:
        """Select the next token of every beam; return False when the search is over."""
        values, indices = self.candidates(logits, self.text, multinomial)
        beam, token = indices // logits.shape[1], indices % logits.shape[1]
        hits = self.stop(
            token,
            self.length + 1,
            lambda: self._extended(self.ids, beam, token),
            self._scores_so_far(),
        )
        chosen = self._choose(Candidates(values, beam, token, hits), self._new_tokens() + 1)
        # The only device-to-host read of a step.
        changed, improvable, done, over = read(chosen.flags)
        # Gather finished hypotheses before the tables of the running beams are reordered.
        if any(changed):
            self.finish(chosen.merged.order, beam, token, self._new_tokens())
        self.finished.scores, self.finished.done = chosen.merged.scores, chosen.merged.done
        extend_rows_(self.tables(chosen.parents, chosen.tokens), chosen.parents, self._new_tokens())
        self.scores, self.improvable = chosen.scores, chosen.improvable
        model.reorder(chosen.parents)
        self.length += 1
        leaving = self.leaving(improvable, done)
        if over[0] or len(leaving) == self.batch_size:
            return False
        if self.on_step is not None:
            self.on_step(self)
        self.compact(model, leaving)
        return True

    def _choose(self, candidates: Candidates, new_tokens: int) -> Choice:
        """Apply the finishing rules to candidates (B, K): fused in C if possible, else in torch."""
        if not self.sample:
            finished = self.finished.scores, self.finished.done
            fused_choice = self.rule.all_at_once(*candidates, finished, self.improvable, new_tokens)
            if fused_choice is not None:
                merged = Merged(fused_choice.merged, fused_choice.merged_done, fused_choice.order)
                return Choice(
                    fused_choice.parents,
                    fused_choice.tokens,
                    fused_choice.scores,
                    merged,
                    fused_choice.flags[1],
                    fused_choice.flags,
                )
        return self.by_rules(candidates, new_tokens)

    def by_rules(self, candidates: Candidates, new_tokens: int | Tensor) -> Choice:
        """Apply the finishing rules to candidates (B, K) in torch.

        Args:
            candidates: K continuations of each sentence.
            new_tokens: tokens that a candidate has after the prompt; a (1,) int64 tensor if only
                the device knows the count.
        """
        values, beam, token, hits = candidates
        scores, order = self.rule.running(values, hits)
        merged = self.rule.merged(
            self.finished.scores, self.finished.done, values, hits, self.improvable, new_tokens
        )
        improvable = self.improvable & self.rule.improvable(scores[:, 0], merged, new_tokens)
        changed = merged.order.ne(
            torch.arange(self.rule.beams, device=order.device, dtype=torch.int64)
        ).any(1)
        done = merged.done.all(1)
        over = self.rule.over(improvable, done, hits.all(1)).expand_as(done)
        flags = torch.stack([changed, improvable, done, over])
        return Choice(
            beam.gather(1, order), token.gather(1, order), scores, merged, improvable, flags
        )

    def candidates(
        self, logits: Tensor, text: Text, draw: Callable[[Tensor, int], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return running scores (B, K) and indices beam * V + token (B, K) of the candidates.

        Args:
            logits: (R, V), of the model's newest step.
            text: tokens of the running beams.
            draw: samples without replacement as `torch.multinomial` does.
        """
        updates = self.fused_updates(logits, text)
        if updates is not None:
            rows = logits.view(*self.scores.shape, -1)
            return kbest(rows, self.scores, self.rule.candidates, updates)[:2]
        return self.candidates_of_log_probs(logits, text, draw)

    def fused_updates(self, logits: Tensor, text: Text) -> LogitsUpdates | None:
        """Return the transforms of a step whose candidates are ranked from the logits.

        Arguments are as in `candidates`.

        Returns:
            The transforms; None if a step writes log-probabilities.
        """
        rows = logits.view(*self.scores.shape, -1)
        if self.trace.enabled or self.sample or self.exact:
            return None
        if not fused(rows, self.rule.candidates, bans_alone(self.transforms, text)):
            return None
        return sparse_updates(self.transforms, text, logits.shape[1])

    def candidates_of_log_probs(
        self, logits: Tensor, text: Text, draw: Callable[[Tensor, int], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return `candidates` by way of log-probabilities in memory."""
        logits = logits.float()
        if self.trace.logits is not None:
            self.trace.logits.append(logits.clone())
        normalise = log_softmax_reference if self.exact else log_softmax
        log_probs = normalise(logits, out=self.memory.take(logits, *logits.shape))
        log_probs = apply_transforms(log_probs, text, self.transforms)
        if self.trace.scores is not None:
            self.trace.scores.append(log_probs.clone())
        log_probs = log_probs.view(*self.scores.shape, -1)
        if self.sample:
            total = (log_probs + self.scores[:, :, None]).flatten(1)
            index = draw(torch.softmax(total, -1), self.rule.candidates)
            values = total.gather(1, index)
            if self.rank_drawn:
                values, order = values.sort(-1, descending=True)
                index = index.gather(1, order)
            return values, index
        return best_of_log_probs(log_probs, self.scores, self.rule.candidates)

    def _new_tokens(self) -> int:
        return self.length - self.prompt.shape[1]

    def _scores_so_far(self) -> tuple[Tensor, ...] | None:
        return None if self.trace.scores is None else tuple(self.trace.scores)

    def _extended(self, ids: Tensor, beam: Tensor, token: Tensor) -> Tensor:
        """Return the token ids of the candidates, (B * K, L + 1)."""
        return torch.cat([gather(ids[:, :, : self.length], beam), token[:, :, None]], 2).flatten(
            0, 1
        )

    def tables(self, beam: Tensor, token: Tensor) -> list[Table]:
        """Return the tables of the running beams with the next columns: beam and token (B, N)."""
        return self.tables_of_rows(self.rows_of(beam), token)

    def rows_of(self, beam: Tensor) -> Tensor:
        """Return beams (B, N) as rows of the original batch."""
        return beam + self._first_rows

    def tables_of_rows(self, row: Tensor, token: Tensor) -> list[Table]:
        """Return `tables` for row (B, N), beams as `rows_of` returns them."""
        return [
            Table(self.ids, token[:, :, None], self.prompt.shape[1]),
            Table(self.beams, row[:, :, None]),
        ]

    def finish(self, order: Tensor, beam: Tensor, token: Tensor, steps: int | Tensor) -> None:
        """Rebuild the finished hypotheses from the previous ones and the candidates.

        Args:
            order: (B, M), indexes the M finished hypotheses first, then the K candidates.
            beam: (B, K), the beam that each candidate continues.
            token: (B, K), the new token of each candidate.
            steps: new tokens of the running beams; a (1,) int64 tensor if only the device knows.
        """
        finished = self.finished.ids, self.finished.beams
        finish_rows_(finished, self.tables(beam, token), order, beam, steps)

    def leaving(self, improvable: list[bool], done: list[bool]) -> list[int]:
        """Return the batch indices of sentences that are settled or cancelled.

        Args:
            improvable: row 1 of the flags of `Choice`.
            done: row 2 of these flags.
        """
        leaving = [
            self.rule.settled(open_, full) for open_, full in zip(improvable, done, strict=True)
        ]
        if self.wanted is not None:
            numbers: list[int] = cast(Any, self.sentences).tolist()
            leaving = [
                leaves or not self.wanted(i) for leaves, i in zip(leaving, numbers, strict=True)
            ]
        return [place for place, leaves in enumerate(leaving) if leaves]

    def compact(self, model: RowStepper, leaving: Sequence[int]) -> bool:
        """Compact the batch if enough sentences leave to pay for moving the others.

        Returns:
            Whether it was compacted.
        """
        leaving = leaving_now(leaving, self.batch_size, self.captured) if self.may_drop else ()
        if not leaving:
            return False
        staying = torch.tensor(
            compacted(self.batch_size, leaving), device=self.ids.device, dtype=torch.int64
        )
        gone = torch.tensor(leaving, device=self.ids.device, dtype=torch.int64)
        if self.result is self.finished:
            self.result = self.finished.keep(self.sentences)
        self.result.put(self.sentences[gone], self.finished.keep(gone))
        self.finished = self.finished.keep(staying)
        self.prompt, self.ids, self.beams = (
            self.prompt[staying],
            self.ids[staying],
            self.beams[staying],
        )
        self.scores, self.improvable = self.scores[staying], self.improvable[staying]
        self.sentences = self.sentences[staying]
        self._first_rows = self._first_rows[staying]
        keep_sentences(self.transforms, staying, self.rule.beams)
        model.keep(staying)
        return True
