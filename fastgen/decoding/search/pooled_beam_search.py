"""Base of beam searches that keep finished hypotheses in pools, as in transformers 4.

Candidates are visited one by one, best first. A candidate that ends goes into a pool; the others
continue until all beams are filled. This runs on the host, from one device read per step.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fastgen.decoding.batching.batch_compaction import compacted, leaving_now
from fastgen.decoding.logits.pipeline import keep_sentences
from fastgen.decoding.logits.text import Text
from fastgen.decoding.logits.transform import LogitsTransform
from fastgen.decoding.search.beam_search import RowStepper, Trace
from fastgen.decoding.search.hypothesis_pools import BeamHypotheses, Hypothesis, Ranking, best_of
from fastgen.decoding.search.stopping import Stop
from fastgen.ops.tables import Table, extend_rows_


class ScoredToken(NamedTuple):
    """Candidate of a sentence.

    Attributes:
        score: running score.
        parent: beam that it continues, from 0 to M - 1.
        token: new token.
    """

    score: float
    parent: int
    token: int


@dataclass
class PooledBeams:
    """Running beams of B sentences, with one pool of finished hypotheses per beam group.

    Args:
        prompt: (B, P) int64, the tokens every beam starts with.
        beams: M.
        ends: token ids that end a text.
        pad: token of the beams of a group that is done.
        max_length: maximum number of tokens, prompt included.
        ranking: how hypotheses are ranked.
        stop: stopping criteria, checked after the beams have moved.
        transforms: applied to the log-probabilities in this order.
        groups: G, the number of groups of M / G beams each.
        may_drop: whether finished sentences may leave the batch (batch compaction).
        captured: whether decode steps are captured, which takes one capture per batch size.
        trace: per-step tensors to record.
    """

    prompt: Tensor
    beams: int
    ends: frozenset[int]
    pad: int
    max_length: int
    ranking: Ranking
    stop: Stop
    transforms: Sequence[LogitsTransform]
    groups: int = 1
    may_drop: bool = True
    captured: bool = False
    trace: Trace = field(default_factory=Trace)

    def __post_init__(self) -> None:
        (b, p), m, device = self.prompt.shape, self.beams, self.prompt.device
        self.size = m // self.groups
        self.length = p
        self.ids = torch.full((b, m, self.max_length), self.pad, dtype=torch.int64, device=device)
        self.ids[:, :, :p] = self.prompt[:, None]
        self.came_from = torch.full(
            (b, m, self.max_length - p), -1, dtype=torch.int32, device=device
        )
        self.scores = torch.full((b, m), -1.0e9, dtype=torch.float32, device=device)
        self.scores[:, :: self.size] = 0.0
        self.pools = [
            [BeamHypotheses(self.size, self.ranking) for _ in range(self.groups)] for _ in range(b)
        ]
        self.sentences = list(range(b))  # index of each sentence in the original batch

    @property
    def candidates(self) -> int:
        """K of a group, so large that all its beams continue even if each ends in every way."""
        return max(2, 1 + len(self.ends)) * self.size

    @property
    def batch_size(self) -> int:
        """Number of sentences still in the batch."""
        return len(self.sentences)

    @property
    def new_tokens(self) -> int:
        """Number of new tokens of each beam."""
        return self.length - self.prompt.shape[1]

    @property
    def eager_selection(self) -> str:
        """Why token selection cannot be captured as a CUDA graph."""
        return "finished hypotheses are kept on the host"

    @property
    def text(self) -> Text:
        """Tokens of the running beams."""
        return Text(self.ids.flatten(0, 1)[:, : self.length], self.prompt.shape[1])

    def best(self, count: int) -> list[Hypothesis]:
        """Return the `count` best hypotheses of each sentence, best first, of a finished search."""
        return [hypothesis for pools in self.pools for hypothesis in best_of(pools, count)]

    def chosen(
        self, place: int, group: int, candidates: Iterable[ScoredToken]
    ) -> list[ScoredToken]:
        """Select the candidates that continue and add those that end to the group's pool.

        Args:
            place: batch index of the sentence.
            group: index of the group.
            candidates: candidates of the group, best first.
        """
        selected: list[ScoredToken] = []
        for rank, candidate in enumerate(candidates):
            if candidate.token not in self.ends:
                selected.append(candidate)
                if len(selected) == self.size:
                    break
            elif rank < self.size and self.may_end(place, candidate.parent):
                self._end(place, group, candidate)
        return selected

    def may_end(self, place: int, beam: int) -> bool:
        """Return whether a beam of the sentence at batch index `place` may end."""
        return True

    def idle(self, group: int) -> list[ScoredToken]:
        """Return padding candidates for the beams of a group that is done."""
        return [ScoredToken(0.0, group * self.size + i, self.pad) for i in range(self.size)]

    def move(self, model: RowStepper, beams: list[list[ScoredToken]]) -> bool:
        """Continue with the selected candidates.

        Args:
            model: runs the decode steps.
            beams: M candidates of each sentence in the batch.

        Returns:
            False when the search is over.
        """
        device = self.ids.device
        parents = torch.tensor(
            [[one.parent for one in of] for of in beams], device=device, dtype=torch.int64
        )
        tokens = torch.tensor(
            [[one.token for one in of] for of in beams], device=device, dtype=torch.int64
        )
        self.scores = torch.tensor(
            [[one.score for one in of] for of in beams], dtype=torch.float32, device=device
        )
        rows = (
            parents
            + torch.tensor(self.sentences, device=device, dtype=torch.int64)[:, None] * self.beams
        )
        tables = [
            Table(self.ids, tokens[:, :, None], self.prompt.shape[1]),
            Table(self.came_from, rows[:, :, None]),
        ]
        extend_rows_(tables, parents, self.new_tokens)
        model.reorder(parents)
        self.length += 1
        scores = None if self.trace.scores is None else tuple(self.trace.scores)
        hits = self.stop(tokens, self.length, lambda: self.text.ids, scores)
        done = [all(pool.done for pool in self.pools[sentence]) for sentence in self.sentences]
        if all(done) or bool(hits.all()):
            self._close()
            return False
        if self.may_drop:
            self._drop(model, [place for place, is_done in enumerate(done) if is_done])
        return True

    def drop(self, staying: list[int]) -> None:
        """Keep only the sentences at these batch indices."""
        index = torch.tensor(staying, device=self.ids.device, dtype=torch.int64)
        self.sentences = [self.sentences[place] for place in staying]
        self.prompt, self.ids, self.came_from = (
            self.prompt[index],
            self.ids[index],
            self.came_from[index],
        )
        self.scores = self.scores[index]

    def close(self, place: int, totals: list[float]) -> None:
        """Add the running beams of a sentence to its pools; totals: scores of its M beams."""
        for beam, total in enumerate(totals):
            pool = self.pools[self.sentences[place]][beam // self.size]
            if not pool.done:
                pool.add(total, self.new_tokens, *self.of_beam(place, beam))

    def of_beam(self, place: int, beam: int) -> tuple[Tensor, Tensor]:
        """Return the tokens of a beam so far, and the row that each new token came from."""
        return self.ids[place, beam, : self.length].clone(), self.came_from[
            place, beam, : self.new_tokens
        ].clone()

    def _end(self, place: int, group: int, candidate: ScoredToken) -> None:
        sentence = self.sentences[place]
        ids, beams = self.of_beam(place, candidate.parent)
        row = beams.new_tensor([sentence * self.beams + candidate.parent])
        self.pools[sentence][group].add(
            candidate.score, self.new_tokens + 1, ids, torch.cat([beams, row])
        )

    def _close(self) -> None:
        totals: list[list[float]] = cast(Any, self.scores).tolist()
        for place, beam_totals in enumerate(totals):
            self.close(place, beam_totals)

    def _drop(self, model: RowStepper, leaving: Sequence[int]) -> None:
        """Compact the batch if enough sentences leave to pay for moving the others."""
        if leaving := leaving_now(leaving, self.batch_size, self.captured):
            staying = compacted(self.batch_size, leaving)
            self.drop(staying)
            kept = torch.tensor(staying, device=self.ids.device, dtype=torch.int64)
            keep_sentences(self.transforms, kept, self.beams)
            model.keep(kept)


def next_of(
    values: Tensor, indices: Tensor, vocabulary: int, first: int = 0
) -> list[list[ScoredToken]]:
    """Copy the candidates of each sentence to the host.

    Args:
        values: (B, K), running scores, descending.
        indices: (B, K) = beam * V + token, beams counted from `first` on.
        vocabulary: V.
        first: first beam of the group.
    """
    scores: list[list[float]] = cast(Any, values).tolist()
    where: list[list[int]] = cast(Any, indices).tolist()
    return [
        [
            ScoredToken(score, first + at // vocabulary, at % vocabulary)
            for score, at in zip(*of, strict=True)
        ]
        for of in zip(scores, where, strict=True)
    ]
