"""Beam search that ends a sentence with its M-th finished hypothesis, and keeps hypotheses in the order they finish.

A candidate that ends is a hypothesis if it is among the M best of its step; from the others the M best running ones go
on. So a sentence has as many running beams as ever until it is over, and a better hypothesis found later never drives
out an earlier one. fairseq searches this way. What differs from `beam_search` is the finishing alone: keys and
values, ancestry, selection and shrinking are the same.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from fastgen.decoding.batching.batch_compaction import closed_up, who_leaves
from fastgen.decoding.kv_cache.ancestry import Ancestry
from fastgen.decoding.kv_cache.room import room_for
from fastgen.decoding.logits.transforms import LogitsTransform, Text
from fastgen.ops.selection.kbest import LogitsUpdates, best_of_log_probs, kbest
from fastgen.ops.tables import Table, extend_rows_


class Prediction(NamedTuple):
    """What a model says of the next token of each text.

    log_probs: makes log-probabilities (R, V), or (B, V) in the first step, the caller's to change.
    logits: of the same shape, whose log-softmax in fp32 they are, nobody's to change; None where there are none such.
    """

    log_probs: Callable[[], Tensor]
    logits: Tensor | None = None


StepOutput = tuple[Prediction, Tensor | None]
"""What a model's step returns: the prediction; attention over the source, (R, S) or (B, S), or None."""


class Stepper(Protocol):
    """A model that decodes R = B * M rows, one token each at a time."""

    @property
    def ancestry(self) -> Ancestry:
        """What `reorder` changes, and nothing else."""
        ...

    def step(self, ids: Tensor) -> StepOutput:
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

    @property
    def transforms(self) -> Sequence[LogitsTransform]:
        """What it does to log-probabilities before it chooses, where `phase` is not None."""
        ...

    def __call__(self, prediction: Prediction, state: "FirstFinished") -> Candidates:
        """Choose for R rows, or for B: then the first beam of each sentence is the only one."""
        ...

    def of_logits(self, logits: Tensor, text: Text, scores: Tensor, beams: int) -> Candidates:
        """Choose by logits (B, N, V) alone, of texts with N beams per sentence and running scores (B, N)."""
        ...

    def phase(self, step: int) -> Hashable | None:
        """What `of_logits` makes of the number of a step: where it is equal it does the same.

        None where the candidates of a step come in another way.
        """
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
    values, index = best_of_log_probs(log_probs, scores, count_of(log_probs, beams))
    return Candidates(values, index % vocabulary, index // vocabulary)


def best_of_logits(
    logits: Tensor, scores: Tensor, beams: int, transforms: LogitsUpdates
) -> Candidates:
    """What `best` finds in the log-softmax of logits (B, N, V), with NaN replaced by -inf and edited."""
    vocabulary = logits.shape[2]
    found = kbest(logits, scores, count_of(logits, beams), transforms, without_nan=True)
    return Candidates(found.values, found.indices % vocabulary, found.indices // vocabulary)


def differences(reached: Tensor) -> Tensor:
    """The scores of single tokens, of running scores (N, T); may work in place."""
    reached[:, 1:] = reached[:, 1:] - reached[:, :-1]
    return reached


def count_of(rows: Tensor, beams: int) -> int:
    """How many candidates of rows (B, N, V) there are."""
    return min(2 * beams, rows.shape[1] * rows.shape[2] - 1)


class Attention:
    """What each beam's tokens attended to: written once per step, never moved; a table says whose row is whose.

    Attributes:
        origins: (B, M, T) int64, the beams that a beam's text came by: in which it was when it got each token.
        rows: (T, B, M, S), with room to grow.
    """

    def __init__(
        self, sentences: int, beams: int, longest: int, width: int, device: torch.device
    ) -> None:
        self.origins = torch.zeros(sentences, beams, longest, dtype=torch.int64, device=device)
        self.rows = torch.empty(0, sentences, beams, width, dtype=torch.float32, device=device)

    def make_room(self, step: int, steps: int = 1) -> None:
        """Make room for what is written in so many steps, of which this is the first."""
        longest = self.origins.shape[2]
        least = min(step + steps, max(step + 1, longest))
        if least > self.rows.shape[0]:
            elements = self.rows.shape[1:].numel()
            grown = self.rows.new_empty(
                max(least, step + room_for(step, longest, self.rows, elements)),
                *self.rows.shape[1:],
            )
            grown[: self.rows.shape[0]] = self.rows
            self.rows = grown

    def write(self, attention: Tensor, step: int | Tensor) -> None:
        """Note a step's attention over the source, (B * M, S) or (B, S).

        step: its number; (1,) int64 where only the device knows.
        """
        attention = attention.view(self.rows.shape[1], -1, attention.shape[1])
        if isinstance(step, Tensor):
            self.rows.index_copy_(
                0, step, attention.to(self.rows.dtype).expand(self.rows.shape[1:])[None]
            )
        else:
            self.rows[step] = attention

    def keep(self, sentences: Tensor) -> None:
        self.origins, self.rows = self.origins[sentences], self.rows[:, sentences]

    def of(self, sentences: Tensor, origins: Tensor) -> Tensor:
        """(N, S, T) fp32 of texts of sentences (N,) that came by the beams origins (N, T)."""
        step = torch.arange(origins.shape[1], device=sentences.device, dtype=torch.int64)
        return self.rows[step, sentences[:, None], origins].transpose(1, 2)


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
        self.step: int = 0
        self.tokens = torch.full(
            (b * m, self.longest + 2), self.pad, dtype=torch.int64, device=self.device
        )
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
            scores = torch.tensor(
                [float(hypothesis.score) for hypothesis in hypotheses],
                dtype=torch.float32,
                device="cpu",
            )
            order: list[int] = cast(Any, torch.sort(scores, descending=True).indices).tolist()
            hypotheses[:] = [hypotheses[i] for i in order]
        return self.finished

    @property
    def present(self) -> int:
        """Sentences that have not left."""
        return len(self.running)

    @property
    def left_off(self) -> tuple[str, ...]:
        """What does not run, each with its reason."""
        return ()

    @property
    def text(self) -> Text:
        """The tokens of all beams so far."""
        return Text(self.tokens[:, : self.step + 1], 1)

    def running_scores(self, beams: int) -> Tensor:
        """(B, N) of the first `beams` texts of each sentence; zeros before the first choice."""
        scores = self.scores.view(-1, self.beams, self.scores.shape[1])
        return scores[:, :beams, self.step - 1 if self.step else 0]

    def advance(self, model: Stepper, made: StepOutput) -> bool:
        """Choose the next token of every beam; False when the search is over.

        made: what the model's step returns.
        """
        step = self.step
        prediction, attention = made
        if attention is not None:
            self._attended(attention).write(attention, step)
        found = self.search(prediction, self)
        self.scores = self.scores.to(found.scores.dtype)
        ends = self._ends(found)
        seen: list[list[bool]] = cast(
            Any, ends[:, : self.beams]
        ).tolist()  # the one read of the device in a step
        ending = [
            (b, k)
            for b, row in enumerate(seen)
            if not self.over[b]
            for k, hit in enumerate(row)
            if hit
        ]
        leaving = self._finish(found, ending) if ending else []
        for sentence in leaving:
            self.over[sentence] = True
        if all(self.over) or (self.stop_at_longest and step >= self.longest):
            return False
        assert step < self.longest, f"{step} < {self.longest}"
        if leaving and (kept := self.let_leave(model)) is not None:
            found, ends = Candidates(*(part[kept] for part in found)), ends[kept]
        order, running = self._running(found, ends)
        extend_rows_(self._tables(running), running.beams, step)
        self.search.continued(order)
        model.reorder(running.beams)
        self.step += 1
        return True

    def let_leave(self, model: Stepper) -> Tensor | None:
        """Let sentences that are over leave, if it is time for it; return those that stay, as a tensor."""
        staying = self._staying()
        return None if staying is None else self._keep(model, staying)

    def _attended(self, attention: Tensor, steps: int = 1) -> Attention:
        """Where attention over the source (B * M, S) or (B, S) is noted, with room for so many steps from now on."""
        if self.attention is None:
            self.attention = Attention(
                self.present, self.beams, self.longest + 1, attention.shape[1], self.device
            )
        self.attention.make_room(self.step, steps)
        return self.attention

    def _ends(self, found: Candidates) -> Tensor:
        """Which candidates end, (B, K) bool."""
        ends = found.tokens.eq(self.end) & found.scores.ne(-torch.inf)
        ends[:, : self.beams].masked_fill_(self.ignored, False)
        return ends

    def _finish(self, found: Candidates, ending: list[tuple[int, int]]) -> list[int]:
        """Note the hypotheses that end in candidates (sentence, k); return the present sentences that are over."""
        step = self.step
        sentence, candidate = (
            torch.tensor(column, device=self.device, dtype=torch.int64)
            for column in zip(*ending, strict=True)
        )
        beam = found.beams[sentence, candidate]
        rows = sentence * self.beams + beam
        tokens = self.tokens.index_select(0, rows)[:, 1 : step + 2]
        tokens[:, step] = self.end
        reached = self.scores.index_select(0, rows)[:, : step + 1]
        reached[:, step] = found.scores[sentence, candidate]
        origins = None
        if self.attention is not None:
            origins = self.attention.origins.flatten(0, 1).index_select(0, rows)[:, : step + 1]
            origins[:, step] = beam
        self.note_finished(sentence, tokens, reached, origins)
        touched = dict.fromkeys(b for b, _ in ending)
        full = step == self.longest
        return [b for b in touched if full or len(self.finished[self.running[b]]) == self.beams]

    def note_finished(
        self, sentence: Tensor, tokens: Tensor, reached: Tensor, origins: Tensor | None
    ) -> None:
        """Note hypotheses of present sentences (N,) that have ended, as far as they are among the first M.

        Args:
            tokens: (N, T) with the end. reached: (N, T), running scores, which may be overwritten.
            origins: (N, T), beams that texts came by; None where there is no attention.
        """
        scores, length = reached[:, -1].clone(), reached.shape[1]
        if self.normalize:
            scores = scores / length**self.length_penalty
        attention = None
        if self.attention is not None and origins is not None:
            attention = self.attention.of(sentence, origins)
        numbers = [self.running[b] for b in cast("list[int]", cast(Any, sentence).tolist())]
        scores, token_scores = self._limited(scores, numbers, length), differences(reached)
        for i, number in enumerate(numbers):
            seen = None if attention is None else attention[i]
            self._note(number, Hypothesis(tokens[i], scores[i], token_scores[i], seen))

    def _limited(self, scores: Tensor, sentences: Sequence[int], lengths: int | Tensor) -> Tensor:
        """Scores (N,) of hypotheses of some of all sentences, -inf where they are too long; lengths with the end."""
        if self.no_longer_than is None:
            return scores
        limit = self.no_longer_than.to(self.device)[
            torch.tensor(sentences, device=self.device, dtype=torch.int64)
        ]
        return torch.where(lengths - 1 > limit, -torch.inf, scores)

    def _note(self, sentence: int, hypothesis: Hypothesis) -> None:
        """One of all sentences has finished a hypothesis, which counts if it is among the first M."""
        if len(self.finished[sentence]) < self.beams:
            self.finished[sentence].append(hypothesis)

    def _staying(self) -> list[int] | None:
        """Who stays and in which order, where those that are over leave; None where all stay.

        Where the search allows it, they leave when enough of them have gathered.
        """
        gone = [b for b, over in enumerate(self.over) if over]
        if not self.search.plain:
            return [b for b, over in enumerate(self.over) if not over] if gone else None
        leaving = who_leaves(gone, self.present, self.captured)
        return closed_up(self.present, leaving) if leaving else None

    def _keep(self, model: Stepper, staying: list[int]) -> Tensor:
        """Let all other sentences leave; return those that stay, as a tensor."""
        kept, m = torch.tensor(staying, device=self.device, dtype=torch.int64), self.beams
        self.running = [self.running[b] for b in staying]
        self.over = [self.over[b] for b in staying]
        rows = (
            kept[:, None] * m + torch.arange(m, device=self.device, dtype=torch.int64)
        ).flatten()
        self.tokens, self.scores, self.ignored = (
            self.tokens[rows],
            self.scores[rows],
            self.ignored[kept],
        )
        if self.attention is not None:
            self.attention.keep(kept)
        model.keep(kept, in_order=not self.search.plain)
        self.search.kept(kept)
        return kept

    def _running(self, found: Candidates, ends: Tensor) -> tuple[Tensor, Candidates]:
        """The M best candidates that do not end: which they are, (B, M), and what they are. Changes `ends`."""
        m = self.beams
        ends[:, :m].logical_or_(self.ignored)
        rank = ends * (2 * m) + torch.arange(ends.shape[1], device=self.device, dtype=torch.int64)
        lowest, order = rank.topk(m, 1, largest=False)
        torch.ge(lowest, 2 * m, out=self.ignored)
        return order, Candidates(*(part.gather(1, order) for part in found))

    @property
    def _rows(self) -> list[Tensor]:
        """The tables of the running texts, (B, M, N): tokens, scores and, where there is attention, its origins."""
        rows = [table.view(-1, self.beams, table.shape[1]) for table in (self.tokens, self.scores)]
        return rows if self.attention is None else [*rows, self.attention.origins]

    def _tables(self, found: Candidates) -> list[Table]:
        """`_rows`, and what comes next to them with candidates (B, N)."""
        newest = [part[:, :, None] for part in (found.tokens, found.scores, found.beams)]
        return [
            Table(rows, new, at)
            for rows, new, at in zip(self._rows, newest, (1, 0, 0), strict=False)
        ]
