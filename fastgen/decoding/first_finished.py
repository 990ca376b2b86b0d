"""Beam search that ends a sentence with its M-th finished hypothesis, and keeps hypotheses in the order they finish.

A candidate that ends is a hypothesis if it is among the M best of its step; from the others the M best running ones go
on. So a sentence has as many running beams as ever until it is over, and a better hypothesis found later never drives
out an earlier one. fairseq searches this way. What differs from `decoding.beam` is the finishing alone: keys and
values, ancestry, selection and shrinking are the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from fastgen.decoding.leaving import closed_up, may_leave
from fastgen.decoding.text import Text
from fastgen.ops.cache import reorder_rows_
from fastgen.ops.kbest import SparseEdits, best_of_log_probs, kbest
from fastgen.ops.tables import Table, extend_rows_


class Prediction(NamedTuple):
    """What a model says of the next token of each text.

    log_probs: makes log-probabilities (R, V), or (B, V) in the first step, the caller's to change.
    logits: of the same shape, whose log-softmax in fp32 they are, nobody's to change; None where there are none such.
    """

    log_probs: Callable[[], Tensor]
    logits: Tensor | None = None


Made = tuple[Prediction, Tensor | None]
"""What a model's step returns: the prediction; attention over the source, (R, S) or (B, S), or None."""


class Stepper(Protocol):
    """A model that decodes R = B * M rows, one token each at a time."""

    def step(self, ids: Tensor) -> Made:
        """Run the newest token of each text.

        ids: (R, L) int64; in the first step (B, 1), what all beams of a sentence begin with.
        """
        ...

    def reorder(self, parents: Tensor) -> None:
        """Let row b * M + m continue beam parents[b, m]; parents (B, M) int64."""
        ...

    def keep(self, sentences: Tensor, in_order: bool) -> None:
        """Keep these sentences, int64 indices into the present ones.

        in_order: they are ascending; otherwise each stays at its place or comes from behind all that are kept.
        """
        ...


class Candidates(NamedTuple):
    """The K best continuations of each sentence, best first, K >= M: running scores, tokens and beams, (B, K) each."""

    scores: Tensor
    tokens: Tensor
    beams: Tensor


class Search(Protocol):
    """Edits what a model predicts and chooses the candidates of a step."""

    plain: bool
    """Whether it looks at nothing but one sentence's scores, so that sentences may leave late and change places."""

    def __call__(self, prediction: Prediction, state: "FirstFinished") -> Candidates:
        """Choose for R rows, or for B: then the first beam of each sentence is the only one."""
        ...

    def kept(self, sentences: Tensor) -> None:
        """Only these sentences go on."""
        ...

    def continued(self, order: Tensor) -> None:
        """These candidates (B, M) go on."""
        ...


class Hypothesis(NamedTuple):
    """tokens (T,) int64 with the end; score 0-dim; token_scores (T,), natural log; attention (S, T) or None."""

    tokens: Tensor
    score: Tensor
    token_scores: Tensor
    attention: Tensor | None


def best(log_probs: Tensor, scores: Tensor, beams: int) -> Candidates:
    """The 2 * M best of log_probs (B, N, V) + scores (B, N), so that M go on whatever ends."""
    vocabulary = log_probs.shape[2]
    values, index = best_of_log_probs(log_probs, scores, _count(log_probs, beams))
    return Candidates(values, index % vocabulary, index // vocabulary)


def best_of_logits(logits: Tensor, scores: Tensor, beams: int, edits: SparseEdits) -> Candidates:
    """What `best` finds in the log-softmax of logits (B, N, V), with NaN replaced by -inf and edited."""
    vocabulary = logits.shape[2]
    found = kbest(logits, scores, _count(logits, beams), edits, without_nan=True)
    return Candidates(found.values, found.indices % vocabulary, found.indices // vocabulary)


def _count(rows: Tensor, beams: int) -> int:
    """How many candidates of rows (B, N, V) there are."""
    return min(2 * beams, rows.shape[1] * rows.shape[2] - 1)


class Attention:
    """What each beam's tokens attended to: written once per step, never moved; a table says whose row is whose."""

    def __init__(self, sentences: int, beams: int, longest: int, device: torch.device) -> None:
        self.steps = 0
        self._origin = torch.zeros(sentences, beams, longest, dtype=torch.int64, device=device)
        shape = (0, sentences, beams, 0)  # (T, B, M, S), with room to grow
        self._rows = torch.empty(shape, dtype=torch.float32, device=device)

    def add(self, attention: Tensor) -> None:
        """Note a step's attention over the source, (B * M, S) or (B, S)."""
        sentences, beams = self._origin.shape[:2]
        if self.steps == self._rows.shape[0]:
            grown = self._rows.new_empty(max(16, 2 * self.steps), sentences, beams, attention.shape[1])
            if self.steps:
                grown[: self.steps] = self._rows
            self._rows = grown
        self._rows[self.steps] = attention.view(sentences, -1, attention.shape[1])
        self._origin[:, :, self.steps] = torch.arange(beams, device=self._origin.device)
        self.steps += 1

    def reorder(self, parents: Tensor) -> None:
        reorder_rows_(self._origin[:, :, : self.steps], parents)

    def keep(self, sentences: Tensor) -> None:
        self._origin, self._rows = self._origin[sentences], self._rows[:, sentences]

    def of(self, sentences: Tensor, beams: Tensor) -> Tensor:
        """(N, S, T) fp32 of the texts of beams (N,) of sentences (N,)."""
        step = torch.arange(self.steps, device=sentences.device)
        return self._rows[step, sentences[:, None], self._origin[sentences, beams, : self.steps]].transpose(1, 2)


@dataclass
class FirstFinished:
    """One search over B sentences.

    Args:
        start: token that every text begins with.
        end: token that ends one.
        pad: token that fills the table of tokens.
        longest: tokens of a hypothesis at most, its end not counted.
        normalize: divide a hypothesis' score by its length to the power of `length_penalty`.
        no_longer_than: (B,), tokens beyond which a hypothesis' score is -inf, or None.
        captured: whether the model's steps are, for a number of rows.
        stop_at_longest: whether a search that has come to `longest` is over, whatever has finished.
    """

    sentences: int
    beams: int
    start: int
    end: int
    pad: int
    longest: int
    search: Search
    device: torch.device
    normalize: bool = True
    length_penalty: float = 1.0
    no_longer_than: Tensor | None = None
    stop_at_longest: bool = False
    captured: bool = False

    def __post_init__(self) -> None:
        b, m = self.sentences, self.beams
        self.step = 0
        self.tokens = torch.full((b * m, self.longest + 2), self.pad, dtype=torch.int64, device=self.device)
        self.tokens[:, 0] = self.start
        self.scores = torch.zeros(b * m, self.longest + 1, dtype=torch.float32, device=self.device)
        self.ignored = torch.zeros(b, m, dtype=torch.bool, device=self.device)
        self.attention: Attention | None = None
        self.finished: list[list[Hypothesis]] = [[] for _ in range(b)]
        self.running = list(range(b))  # which of all sentences the present ones are
        self.over: list[bool] = [False] * b  # of the present ones

    def begin_behind(self, prefix: Tensor, token_scores: Tensor) -> None:
        """Let every text begin with prefix (B, P) int64, whose tokens have these log-probabilities (B, P).

        It is one beam's: the others have score -inf until the first choice.
        """
        b, p = prefix.shape
        self.tokens.view(b, self.beams, -1)[:, :, 1 : p + 1] = prefix[:, None]
        scores = self.scores.view(b, self.beams, -1)[:, :, :p]
        scores[:, 0] = token_scores.cumsum(1)
        scores[:, 1:] = -torch.inf
        self.step = p

    def outcome(self) -> list[list[Hypothesis]]:
        """Return the finished hypotheses of each sentence, best first, once the search is over."""
        for hypotheses in self.finished:
            scores = torch.tensor([float(hypothesis.score) for hypothesis in hypotheses])
            order: list[int] = cast(Any, torch.sort(scores, descending=True).indices).tolist()
            hypotheses[:] = [hypotheses[i] for i in order]
        return self.finished

    @property
    def present(self) -> int:
        """Sentences that have not left."""
        return len(self.running)

    @property
    def text(self) -> Text:
        """The tokens of all beams so far."""
        return Text(self.tokens[:, : self.step + 1], 1)

    def running_scores(self, beams: int) -> Tensor:
        """(B, N) of the first `beams` texts of each sentence; zeros before the first choice."""
        scores = self.scores.view(-1, self.beams, self.scores.shape[1])
        return scores[:, :beams, self.step - 1 if self.step else 0]

    def advance(self, model: Stepper, made: Made) -> bool:
        """Choose the next token of every beam; False when the search is over.

        made: what the model's step returns.
        """
        step, m = self.step, self.beams
        prediction, attention = made
        if attention is not None:
            if self.attention is None:
                self.attention = Attention(len(self.running), m, self.longest + 1, self.device)
            self.attention.add(attention)
        found = self.search(prediction, self)
        self.scores = self.scores.to(found.scores.dtype)
        ends = found.tokens.eq(self.end) & found.scores.ne(-torch.inf)
        ends[:, :m].masked_fill_(self.ignored, False)
        seen: list[list[bool]] = cast(Any, ends[:, :m]).tolist()  # the one read of the device in a step
        ending = [(b, k) for b, row in enumerate(seen) if not self.over[b] for k, hit in enumerate(row) if hit]
        leaving = self._finish(found, ending) if ending else []
        for sentence in leaving:
            self.over[sentence] = True
        if all(self.over) or (self.stop_at_longest and step >= self.longest):
            return False
        assert step < self.longest, f"{step} < {self.longest}"
        if leaving:
            found, ends = self._drop(model, found, ends)
        self._go_on(model, found, ends)
        self.step += 1
        return True

    def _finish(self, found: Candidates, ending: list[tuple[int, int]]) -> list[int]:
        """Note the hypotheses that end in candidates (sentence, k); return the present sentences that are over."""
        step = self.step
        sentence, candidate = (torch.tensor(column, device=self.device) for column in zip(*ending, strict=True))
        beam = found.beams[sentence, candidate]
        rows = sentence * self.beams + beam
        tokens = self.tokens.index_select(0, rows)[:, 1 : step + 2]
        tokens[:, step] = self.end
        scores = found.scores[sentence, candidate]
        token_scores = self.scores.index_select(0, rows)[:, : step + 1]
        token_scores[:, step] = scores
        token_scores[:, 1:] = token_scores[:, 1:] - token_scores[:, :-1]
        if self.normalize:
            scores = scores / (step + 1) ** self.length_penalty
        if self.no_longer_than is not None:
            limit = self.no_longer_than.to(self.device)[self._of_all(sentence)]
            scores = torch.where(step > limit, -torch.inf, scores)
        attention = None if self.attention is None else self.attention.of(sentence, beam)
        for i, (b, _) in enumerate(ending):
            hypotheses = self.finished[self.running[b]]
            if len(hypotheses) < self.beams:
                seen = None if attention is None else attention[i]
                hypotheses.append(Hypothesis(tokens[i], scores[i], token_scores[i], seen))
        touched = dict.fromkeys(b for b, _ in ending)
        full = step == self.longest
        return [b for b in touched if full or len(self.finished[self.running[b]]) == self.beams]

    def _of_all(self, sentence: Tensor) -> Tensor:
        return torch.tensor(self.running, device=self.device)[sentence]

    def _drop(self, model: Stepper, found: Candidates, ends: Tensor) -> tuple[Candidates, Tensor]:
        """Let sentences that are over leave; where the search allows it, when enough of them have gathered."""
        gone = [b for b, over in enumerate(self.over) if over]
        if self.search.plain and not may_leave(len(gone), len(self.over), self.captured):
            return found, ends
        staying = (
            closed_up(len(self.over), gone)
            if self.search.plain
            else [b for b, over in enumerate(self.over) if not over]
        )
        kept, m = torch.tensor(staying, device=self.device), self.beams
        self.running = [self.running[b] for b in staying]
        self.over = [False] * len(staying)
        rows = (kept[:, None] * m + torch.arange(m, device=self.device)).flatten()
        self.tokens, self.scores, self.ignored = self.tokens[rows], self.scores[rows], self.ignored[kept]
        if self.attention is not None:
            self.attention.keep(kept)
        model.keep(kept, in_order=not self.search.plain)
        self.search.kept(kept)
        return Candidates(*(part[kept] for part in found)), ends[kept]

    def _go_on(self, model: Stepper, found: Candidates, ends: Tensor) -> None:
        """Let the M best candidates that do not end run on."""
        step, m, count = self.step, self.beams, ends.shape[1]
        ends[:, :m] |= self.ignored
        rank = ends * (2 * m) + torch.arange(count, device=self.device)
        lowest, order = rank.topk(m, 1, largest=False)
        self.ignored = lowest >= 2 * m
        parents = found.beams.gather(1, order)
        tokens, scores = (table.view(-1, m, table.shape[1]) for table in (self.tokens, self.scores))
        chosen, reached = (of.gather(1, order)[:, :, None] for of in (found.tokens, found.scores))
        extend_rows_([Table(tokens, chosen, 1), Table(scores, reached)], parents, step)
        self.search.continued(order)
        if self.attention is not None:
            self.attention.reorder(parents)
        model.reorder(parents)
