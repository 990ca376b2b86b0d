"""Beam search that ends a sentence with its M-th finished hypothesis, as fairseq does.

A candidate that ends becomes a hypothesis if it is among the M best of its step. The M best of the
other candidates continue. A sentence therefore keeps M running beams until it is over, and a better
hypothesis never replaces an earlier one. Only the finishing differs from `beam_search`: KV cache,
ancestry, token selection and batch compaction are the same.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from fastgen.decoding.batching.batch_compaction import compacted, leaving_now
from fastgen.decoding.logits.text import Text
from fastgen.decoding.logits.transform import LogitsTransform
from fastgen.decoding.search.attention_weights import AttentionWeights
from fastgen.decoding.search.candidates import Candidates
from fastgen.decoding.search.finishing_rules import length_powers, per_power
from fastgen.decoding.search.prediction import Prediction, PredictionStepper, StepOutput
from fastgen.ops.tables import Table, extend_rows_


class CandidateSelector(Protocol):
    """Selection of a step's candidates from the model's prediction."""

    plain: bool
    """Whether selection depends on the scores of one sentence alone.

    If so, finished sentences may stay in the batch for a while, and sentences may be reordered.
    """

    @property
    def eager_selection(self) -> str | None:
        """Why the selection cannot be captured as a CUDA graph; None if it can."""
        ...

    @property
    def transforms(self) -> Sequence[LogitsTransform]:
        """Transforms applied to the log-probabilities in steps whose `phase` is not None."""
        ...

    def __call__(self, prediction: Prediction, state: "FirstFinished") -> Candidates:
        """Select candidates from a prediction for R rows, or for B rows with one beam each."""
        ...

    def of_logits(self, logits: Tensor, text: Text, scores: Tensor, beams: int) -> Candidates:
        """Select candidates from logits alone.

        Args:
            logits: (B, N, V), of texts with N beams per sentence.
            text: tokens of these texts.
            scores: (B, N), running scores.
            beams: M.
        """
        ...

    def phase(self, step: int) -> Hashable | None:
        """Return a key of what `of_logits` does at a step: equal keys mean equal operations.

        Returns:
            None if the step selects its candidates without `of_logits`.
        """
        ...

    def keep(self, sentences: Tensor) -> None:
        """Keep only the given sentences of the batch, int64 indices."""
        ...

    def reorder(self, order: Tensor) -> None:
        """Note which candidates continue; order is (B, M) int64 into the K candidates."""
        ...


class Hypothesis(NamedTuple):
    """Finished hypothesis.

    Attributes:
        tokens: (T,) int64, end token included.
        score: 0-dim.
        token_scores: (T,), natural log.
        attention: (S, T), cross-attention weights, or None.
    """

    tokens: Tensor
    score: Tensor
    token_scores: Tensor
    attention: Tensor | None


@dataclass
class FirstFinished:
    """State of one search over B sentences.

    Args:
        sentences: B.
        beams: M.
        start: token that every text starts with.
        end: token that ends a text.
        pad: token that fills unused columns of the token table.
        longest: maximum number of tokens of a hypothesis, end token excluded.
        selector: selects the candidates of each step.
        device: device of the tables.
        normalize: divide a hypothesis' score by its length to the power of `length_penalty`.
        length_penalty: exponent of a hypothesis' length.
        no_longer_than: (B,), maximum length of a hypothesis of each sentence, end token excluded;
            longer ones score -inf. None for no limit.
        stop_at_longest: whether the search is over at `longest`, whatever has finished.
        captured: whether decode steps are captured, which takes one capture per batch size.
    """

    sentences: int
    beams: int
    start: int
    end: int
    pad: int
    longest: int
    selector: CandidateSelector
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
        self.attention: AttentionWeights | None = None
        self.finished: list[list[Hypothesis]] = [[] for _ in range(b)]
        # Index of each sentence of the current batch in the original one; whether it is over.
        self.running = list(range(b))
        self.over: list[bool] = [False] * b

    def begin_after(self, prefix: Tensor, token_scores: Tensor) -> None:
        """Start every text with a prefix.

        Only the first beam of a sentence is live. The others score -inf until the first selection.

        Args:
            prefix: (B, P) int64.
            token_scores: (B, P), log-probabilities of its tokens.
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
    def batch_size(self) -> int:
        """Number of sentences still in the batch."""
        return len(self.running)

    @property
    def eager_selection(self) -> str | None:
        """Why token selection cannot be captured as a CUDA graph; None if it can."""
        return self.selector.eager_selection

    @property
    def text(self) -> Text:
        """Tokens of all beams so far."""
        return Text(self.tokens[:, : self.step + 1], 1)

    def running_scores(self, beams: int) -> Tensor:
        """Return running scores (B, N) of the first `beams` beams; zeros before the first step."""
        scores = self.scores.view(-1, self.beams, self.scores.shape[1])
        return scores[:, :beams, self.step - 1 if self.step else 0]

    def advance(self, model: PredictionStepper, output: StepOutput) -> bool:
        """Select the next token of every beam; return False when the search is over.

        Args:
            model: runs the decode steps.
            output: output of its newest step.
        """
        step = self.step
        prediction, attention = output
        if attention is not None:
            self.attention_with_room(attention).write(attention, step)
        candidates = self.selector(prediction, self)
        self.scores = self.scores.to(candidates.scores.dtype)
        ends = self.ends(candidates)
        # The only device-to-host read of a step.
        hits: list[list[bool]] = cast(Any, ends[:, : self.beams]).tolist()
        ending = [
            (b, k)
            for b, row in enumerate(hits)
            if not self.over[b]
            for k, hit in enumerate(row)
            if hit
        ]
        finished = self._finish(candidates, ending) if ending else []
        for sentence in finished:
            self.over[sentence] = True
        if all(self.over) or (self.stop_at_longest and step >= self.longest):
            return False
        assert step < self.longest, f"{step} < {self.longest}"
        if finished and (staying := self.staying()) is not None:
            kept = self.keep(model, staying)
            candidates, ends = Candidates(*(part[kept] for part in candidates)), ends[kept]
        order, running = self.continuing(candidates, ends)
        extend_rows_(self.tables(running), running.beams, step)
        self.selector.reorder(order)
        model.reorder(running.beams)
        self.step += 1
        return True

    def attention_with_room(self, attention: Tensor, steps: int = 1) -> AttentionWeights:
        """Return the attention weights, created on first use, with room for the next steps.

        Args:
            attention: cross-attention weights (B * M, S) or (B, S); they determine S.
            steps: number of steps.
        """
        if self.attention is None:
            self.attention = AttentionWeights(
                self.batch_size, self.beams, self.longest + 1, attention.shape[1], self.device
            )
        self.attention.ensure_capacity(self.step, steps)
        return self.attention

    def ends(self, candidates: Candidates) -> Tensor:
        """Return which candidates end, (B, K) bool."""
        ends = candidates.tokens.eq(self.end) & candidates.scores.ne(-torch.inf)
        ends[:, : self.beams].masked_fill_(self.ignored, False)
        return ends

    def _finish(self, candidates: Candidates, ending: list[tuple[int, int]]) -> list[int]:
        """Store the hypotheses that end in candidates (sentence, k) of `ending`.

        Returns:
            Batch indices of the sentences that are over now.
        """
        step = self.step
        sentence, candidate = (
            torch.tensor(column, device=self.device, dtype=torch.int64)
            for column in zip(*ending, strict=True)
        )
        beam = candidates.beams[sentence, candidate]
        rows = sentence * self.beams + beam
        tokens = self.tokens.index_select(0, rows)[:, 1 : step + 2]
        tokens[:, step] = self.end
        scores = self.scores.index_select(0, rows)[:, : step + 1]
        scores[:, step] = candidates.scores[sentence, candidate]
        attention = None
        if self.attention is not None:
            origins = self.attention.origins.flatten(0, 1).index_select(0, rows)[:, : step + 1]
            origins[:, step] = beam
            attention = self.attention.of(sentence, origins)
        self.store(
            [self.running[b] for b, _ in ending],
            [step + 1] * len(ending),
            tokens,
            scores,
            attention,
        )
        touched = dict.fromkeys(b for b, _ in ending)
        full = step == self.longest
        return [b for b in touched if full or len(self.finished[self.running[b]]) == self.beams]

    def store(
        self,
        sentences: Sequence[int],
        lengths: Sequence[int],
        tokens: Tensor,
        scores: Tensor,
        attention: Tensor | None,
    ) -> None:
        """Store N finished hypotheses, those that ended first first; a sentence keeps its first M.

        Args:
            sentences: index of each hypothesis' sentence in the original batch.
            lengths: number of tokens of each, end token included.
            tokens: (N, T) int64; what follows the end token is ignored, as in the other tables.
            scores: (N, T), running scores; overwritten.
            attention: (N, S, T), cross-attention weights, or None.
        """
        sizes = torch.tensor(lengths, device=self.device, dtype=torch.int64)
        totals = scores.gather(1, sizes[:, None] - 1)[:, 0]
        if self.normalize:
            totals = per_power(totals, length_powers(lengths, self.length_penalty, totals))
        if self.no_longer_than is not None:
            index = torch.tensor(sentences, device=self.device, dtype=torch.int64)
            limits = self.no_longer_than.to(self.device)[index]
            totals = torch.where(sizes - 1 > limits, -torch.inf, totals)
        scores[:, 1:] = scores[:, 1:] - scores[:, :-1]
        for i, (sentence, size) in enumerate(zip(sentences, lengths, strict=True)):
            if len(self.finished[sentence]) < self.beams:
                weights = None if attention is None else attention[i, :, :size]
                self.finished[sentence].append(
                    Hypothesis(tokens[i, :size], totals[i], scores[i, :size], weights)
                )

    def staying(self) -> list[int] | None:
        """Return the batch indices that stay, in their new order; None if nothing changes.

        With a `plain` selector, sentences that are over leave only when there are enough of them.
        """
        over = [b for b, is_over in enumerate(self.over) if is_over]
        if not self.selector.plain:
            return [b for b, is_over in enumerate(self.over) if not is_over] if over else None
        leaving = leaving_now(over, self.batch_size, self.captured)
        return compacted(self.batch_size, leaving) if leaving else None

    def keep(self, model: PredictionStepper, staying: list[int]) -> Tensor:
        """Compact the batch to the sentences in `staying`; return their indices as a tensor."""
        kept, m = torch.tensor(staying, device=self.device, dtype=torch.int64), self.beams
        self.running = [self.running[b] for b in staying]
        self.over = [self.over[b] for b in staying]
        beams = torch.arange(m, device=self.device, dtype=torch.int64)
        rows = (kept[:, None] * m + beams).flatten()
        self.tokens, self.scores = self.tokens[rows], self.scores[rows]
        self.ignored = self.ignored[kept]
        if self.attention is not None:
            self.attention.keep(kept)
        model.keep(kept, in_order=not self.selector.plain)
        self.selector.keep(kept)
        return kept

    def continuing(self, candidates: Candidates, ends: Tensor) -> tuple[Tensor, Candidates]:
        """Return the M best candidates that do not end.

        Updates `ignored` and overwrites `ends`.

        Returns:
            Their indices (B, M) into the K candidates, and the candidates themselves.
        """
        m = self.beams
        ends[:, :m].logical_or_(self.ignored)
        rank = ends * (2 * m) + torch.arange(ends.shape[1], device=self.device, dtype=torch.int64)
        lowest, order = rank.topk(m, 1, largest=False)
        torch.ge(lowest, 2 * m, out=self.ignored)
        return order, Candidates(*(part.gather(1, order) for part in candidates))

    @property
    def rows(self) -> list[Tensor]:
        """Tables (B, M, N) of the running texts: tokens, scores and, if any, attention origins."""
        rows = [table.view(-1, self.beams, table.shape[1]) for table in (self.tokens, self.scores)]
        return rows if self.attention is None else [*rows, self.attention.origins]

    def tables(self, candidates: Candidates) -> list[Table]:
        """Return `rows` with the columns that candidates (B, N) append."""
        newest = [
            part[:, :, None] for part in (candidates.tokens, candidates.scores, candidates.beams)
        ]
        return [
            Table(rows, new, at)
            for rows, new, at in zip(self.rows, newest, (1, 0, 0), strict=False)
        ]
