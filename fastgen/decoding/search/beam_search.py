"""Beam search over any model that can make steps, with the finishing rules of a toolkit.

The state is small: running scores, the tokens of the running beams, and the finished hypotheses. Keys and values never
move (`kv_cache`), hypotheses are gathered only in a step in which one finished, and sentences that can gain
nothing more leave the batch (Hoang et al. 2018, section 2.1).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from fastgen.decoding.batching.batch_compaction import Wanted, closed_up, who_leaves
from fastgen.decoding.kv_cache.ancestry import Ancestry
from fastgen.decoding.logits.transforms import (
    LogitsTransform,
    Text,
    apply_transforms,
    keep_sentences,
    only_ban,
    sparse,
)
from fastgen.decoding.search.finishing_rules import Merged, TransformersRule
from fastgen.decoding.search.stopping import Stop
from fastgen.models.memory.scratch import Memory
from fastgen.ops.selection.choice import Candidates
from fastgen.ops.selection.kbest import best_of_log_probs, fused, kbest
from fastgen.ops.selection.log_softmax import log_softmax, log_softmax_reference
from fastgen.ops.tables import Table, extend_rows_, finish_rows_


class Stepper(Protocol):
    """A model that decodes R = B * M rows, one token each at a time."""

    @property
    def ancestry(self) -> Ancestry | None:
        """What `reorder` changes, if there is such a table and nothing else."""
        ...

    def prefill(self) -> Tensor:
        """Run the prompt; return the logits (R, V) of the first new token, which nobody may change.

        They are fp32, or of the model's type where a captured step has made them.
        """
        ...

    def step(self, ids: Tensor) -> Tensor:
        """Run the newest token of ids (R, L); return logits as `prefill`."""
        ...

    def reorder(self, parents: Tensor) -> None:
        """Let row b * M + m continue beam parents[b, m]; parents (B, M) int64."""
        ...

    def keep(self, sentences: Tensor) -> None:
        """Keep these sentences, int64 indices into the present ones; each stays at its place or comes from behind."""
        ...


@dataclass
class Trace:
    """What a caller asked to see of every step: processed log-probabilities and raw logits, (R, V) fp32.

    chosen: of `Sampling`, the log-probability (R,) of each token by the processed scores, 0 behind a row's end.
    """

    scores: list[Tensor] | None = None
    logits: list[Tensor] | None = None
    chosen: list[Tensor] | None = None

    @property
    def wanted(self) -> bool:
        return self.scores is not None or self.logits is not None


@dataclass
class Hypotheses:
    """The M best finished hypotheses of each sentence, best first.

    ids (B, M, L) int64 with the prompt; beams (B, M, T) int32, the row each token came from, -1 beyond the end;
    scores (B, M) fp32; done (B, M) whether the slot is filled.
    """

    ids: Tensor
    beams: Tensor
    scores: Tensor
    done: Tensor

    def keep(self, sentences: Tensor) -> "Hypotheses":
        return Hypotheses(*(t[sentences] for t in (self.ids, self.beams, self.scores, self.done)))

    def put(self, sentences: Tensor, rows: "Hypotheses") -> None:
        """Write the rows of some sentences into the table of all."""
        for mine, theirs in zip(
            (self.ids, self.beams, self.scores, self.done),
            (rows.ids, rows.beams, rows.scores, rows.done),
            strict=True,
        ):
            mine[sentences] = theirs


class Choice(NamedTuple):
    """What runs on, and what has finished.

    parents, tokens, scores: (B, M), of the running beams. improvable: (B,), whether they could still finish better.
    flags: (4, B) bool: whether the finished hypotheses have changed, whether one can still become better, whether all
    M are there, and whether the search is over, for every sentence the same.
    """

    parents: Tensor
    tokens: Tensor
    scores: Tensor
    merged: Merged
    improvable: Tensor
    flags: Tensor


def read(flags: Tensor) -> list[list[bool]]:
    """The values of flags (4, B), once the device has come so far."""
    return cast(Any, flags).tolist()


def gather(table: Tensor, index: Tensor) -> Tensor:
    """Return table (B, N) or (B, N, L) at index (B, K) of its second dimension."""
    return table.gather(
        1, index if table.dim() == 2 else index[:, :, None].expand(-1, -1, table.shape[2])
    )


@dataclass
class BeamSearch:
    """One beam search: the running beams of B sentences and what has finished.

    Args:
        prompt: (B, P) int64, the tokens every beam starts with.
        rule: candidates kept, ranking and stopping as the toolkit has them.
        fill: token that fills a hypothesis beyond its end.
        sample: draw the candidates instead of taking the best.
        rank_drawn: sort the drawn candidates by score, best first; else they keep the order of the draw.
        may_drop: whether finished sentences may leave the batch.
        captured: whether the model's steps are, for a number of rows.
        exact: whether log-probabilities are to be the toolkit's to the last bit, as those of models in fp64 can be.
        wanted: asked behind every step; a sentence that is not leaves as one that has finished, with what it has.
        on_step: called with this search behind every step but the last, before sentences leave.
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
    wanted: Wanted | None = None
    on_step: Callable[["BeamSearch"], None] | None = None
    memory: Memory = field(default_factory=Memory, init=False)  # of a step's log-probabilities

    def __post_init__(self) -> None:
        b, p = self.prompt.shape
        m, longest, device = self.rule.beams, self.rule.max_length, self.prompt.device
        self.length = p
        self.ids = torch.full((b, m, longest), self.fill, dtype=torch.int64, device=device)
        self.ids[:, :, :p] = self.prompt[:, None]
        self.beams = torch.full((b, m, longest - p), -1, dtype=torch.int32, device=device)
        self.scores = torch.zeros(b, m, dtype=torch.float32, device=device)
        self.scores[:, 1:] = self.rule.never
        self.improvable = torch.ones(b, dtype=torch.bool, device=device)
        self.finished: Hypotheses = Hypotheses(
            self.ids.clone(),
            self.beams.clone(),
            torch.full((b, m), self.rule.never, dtype=torch.float32, device=device),
            torch.zeros(b, m, dtype=torch.bool, device=device),
        )
        self.sentences = torch.arange(
            b, device=device, dtype=torch.int64
        )  # which of all sentences the running rows are
        self._first_rows = (
            self.sentences[:, None] * m
        )  # in the whole batch, as the toolkit counts them
        self.result = self.finished  # all sentences; another table once some have left

    @property
    def outcome(self) -> Hypotheses:
        """The finished hypotheses of all sentences, once the search is over."""
        if self.result is not self.finished:
            self.result.put(self.sentences, self.finished)
        return self.result

    @property
    def present(self) -> int:
        """Sentences that have not left."""
        return self.prompt.shape[0]

    @property
    def text(self) -> Text:
        return Text(self.ids.flatten(0, 1)[:, : self.length], self.prompt.shape[1])

    def advance(self, model: Stepper, logits: Tensor) -> bool:
        """Choose the next token of every beam; False when the search is over."""
        values, beam, token = self._candidates(logits, self.text, torch.multinomial)
        hits = self.stop(
            token,
            self.length + 1,
            lambda: self._extended(self.ids, beam, token),
            self._scores_so_far(),
        )
        chosen = self._chosen(Candidates(values, beam, token, hits), self._new_tokens() + 1)
        changed, improvable, done, over = read(chosen.flags)  # the one read of the device in a step
        # What finished is gathered from the tables as they are before the running beams move on.
        if any(changed):
            self._finish(chosen.merged.order, beam, token, self._new_tokens())
        self.finished.scores, self.finished.done = chosen.merged.scores, chosen.merged.done
        extend_rows_(
            self._tables(chosen.parents, chosen.tokens), chosen.parents, self._new_tokens()
        )
        self.scores, self.improvable = chosen.scores, chosen.improvable
        model.reorder(chosen.parents)
        self.length += 1
        leaving = self._leaving(improvable, done)
        if over[0] or len(leaving) == self.present:
            return False
        if self.on_step is not None:
            self.on_step(self)
        self._drop(model, leaving)
        return True

    def _chosen(self, candidates: Candidates, new_tokens: int) -> Choice:
        """What becomes of the candidates (B, K), of so many new tokens."""
        if not self.sample:
            so_far = self.finished.scores, self.finished.done
            found = self.rule.all_at_once(*candidates, so_far, self.improvable, new_tokens)
            if found is not None:
                merged = Merged(found.merged, found.merged_done, found.order)
                return Choice(
                    found.parents, found.tokens, found.scores, merged, found.flags[1], found.flags
                )
        return self.by_rules(candidates, new_tokens)

    def by_rules(self, candidates: Candidates, new_tokens: int | Tensor) -> Choice:
        """What becomes of the candidates (B, K), in torch; new_tokens: (1,) int64 where only the device knows."""
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

    def _candidates(
        self, logits: Tensor, text: Text, draw: Callable[[Tensor, int], Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The K candidates of each sentence: running score, beam, token, each (B, K).

        draw: `torch.multinomial` or alike.
        """
        b, m = self.scores.shape
        rows = logits.view(b, m, -1)
        if (
            not (self.trace.wanted or self.sample or self.exact)
            and fused(rows, self.rule.candidates, only_ban(self.transforms, text))
        ):  # fmt: skip
            transforms = sparse(self.transforms, text, logits.shape[1])
            if transforms is not None:  # the log-probabilities are never written
                best = kbest(rows, self.scores, self.rule.candidates, transforms)
                return (
                    best.values,
                    best.indices // logits.shape[-1],
                    best.indices % logits.shape[-1],
                )
        logits = logits.float()
        if self.trace.logits is not None:
            self.trace.logits.append(logits.clone())
        normalised = log_softmax_reference if self.exact else log_softmax
        log_probs = normalised(logits, out=self.memory.take(logits, *logits.shape))
        log_probs = apply_transforms(log_probs, text, self.transforms)
        if self.trace.scores is not None:
            self.trace.scores.append(log_probs.clone())
        vocabulary = log_probs.shape[-1]
        log_probs = log_probs.view(b, m, vocabulary)
        if self.sample:
            total = (log_probs + self.scores[:, :, None]).flatten(1)
            index = draw(torch.softmax(total, -1), self.rule.candidates)
            values = total.gather(1, index)
            if self.rank_drawn:
                values, order = values.sort(-1, descending=True)
                index = index.gather(1, order)
        else:
            values, index = best_of_log_probs(log_probs, self.scores, self.rule.candidates)
        return values, index // vocabulary, index % vocabulary

    def _new_tokens(self) -> int:
        return self.length - self.prompt.shape[1]

    def _scores_so_far(self) -> tuple[Tensor, ...] | None:
        return None if self.trace.scores is None else tuple(self.trace.scores)

    def _extended(self, ids: Tensor, beam: Tensor, token: Tensor) -> Tensor:
        """The candidates' tokens, (B * K, L + 1)."""
        return torch.cat([gather(ids[:, :, : self.length], beam), token[:, :, None]], 2).flatten(
            0, 1
        )

    def _tables(self, beam: Tensor, token: Tensor) -> list[Table]:
        """The running beams' tables and what comes next to them: tokens (B, N) behind beams (B, N)."""
        rows = beam + self._first_rows
        return [
            Table(self.ids, token[:, :, None], self.prompt.shape[1]),
            Table(self.beams, rows[:, :, None]),
        ]

    def _finish(self, order: Tensor, beam: Tensor, token: Tensor, steps: int | Tensor) -> None:
        """Rebuild the table of finished hypotheses: `order` (B, M) indexes finished ones, then candidates."""
        finished = self.finished.ids, self.finished.beams
        finish_rows_(finished, self._tables(beam, token), order, beam, steps)

    def _leaving(self, improvable: list[bool], done: list[bool]) -> list[int]:
        """The places of sentences that have finished, or that nobody waits for."""
        leaving = [
            self.rule.settled(open_, full) for open_, full in zip(improvable, done, strict=True)
        ]
        if self.wanted is not None:
            numbers: list[int] = cast(Any, self.sentences).tolist()
            leaving = [
                leaves or not self.wanted(i) for leaves, i in zip(leaving, numbers, strict=True)
            ]
        return [place for place, leaves in enumerate(leaving) if leaves]

    def drop(self, model: Stepper, improvable: list[bool], done: list[bool]) -> None:
        """Let the sentences leave that have finished, as `read` says of each."""
        self._drop(model, self._leaving(improvable, done))

    def _drop(self, model: Stepper, leaving: Sequence[int]) -> bool:
        """Let sentences leave, when enough of them have gathered to pay for moving the others."""
        leaving = who_leaves(leaving, self.present, self.captured) if self.may_drop else ()
        if not leaving:
            return False
        staying = torch.tensor(
            closed_up(self.present, leaving), device=self.ids.device, dtype=torch.int64
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
