"""What beam searches have in common that keep finished hypotheses in pools, as those of transformers 4 did.

Candidates are looked at one by one, the best first: one that ends a text goes into a pool, others run on until there
are as many as beams. This happens on the host, from one read of a step's candidates.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fastgen.decoding.batching.batch_compaction import closed_up, who_leaves
from fastgen.decoding.logits.transforms import LogitsTransform, Text, keep_sentences
from fastgen.decoding.search.beam_search import Stepper, Trace
from fastgen.decoding.search.hypothesis_pools import Hypothesis, Pool, Ranking, best_of
from fastgen.decoding.search.stopping import Stop
from fastgen.ops.tables import Table, extend_rows_


class Next(NamedTuple):
    """What a beam becomes: its score, the beam of the sentence that it continues, and the new token."""

    score: float
    parent: int
    token: int


@dataclass
class PooledBeams:
    """The running beams of B sentences, and a pool of finished hypotheses for each group of a sentence's beams.

    Args:
        prompt: (B, P) int64, the tokens every beam starts with.
        beams: M. groups: G of them, of M / G beams each.
        ends: the tokens that end a text. pad: the token of beams of a group that is done.
        max_length: of prompt and new tokens.
        may_drop: whether finished sentences may leave the batch.
        captured: whether the model's steps are, for a number of rows.
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
        self.pools = [[Pool(self.size, self.ranking) for _ in range(self.groups)] for _ in range(b)]
        self.sentences = list(range(b))  # which of all sentences the present ones are

    @property
    def candidates(self) -> int:
        """K of a group: enough that all its beams live on when every one ends in every way it can."""
        return max(2, 1 + len(self.ends)) * self.size

    @property
    def present(self) -> int:
        """Sentences that have not left."""
        return len(self.sentences)

    @property
    def new_tokens(self) -> int:
        return self.length - self.prompt.shape[1]

    @property
    def text(self) -> Text:
        return Text(self.ids.flatten(0, 1)[:, : self.length], self.prompt.shape[1])

    def best(self, count: int) -> list[Hypothesis]:
        """The best hypotheses of each sentence, best first, once the search is over."""
        return [hypothesis for pools in self.pools for hypothesis in best_of(pools, count)]

    def chosen(self, place: int, group: int, candidates: Iterable[Next]) -> list[Next]:
        """What the beams of a group become, of its candidates, best first; those that end go into the pool."""
        found: list[Next] = []
        for rank, candidate in enumerate(candidates):
            if candidate.token not in self.ends:
                found.append(candidate)
                if len(found) == self.size:
                    break
            elif rank < self.size and self.may_end(place, candidate.parent):
                self._end(place, group, candidate)
        return found

    def may_end(self, place: int, beam: int) -> bool:
        """Whether a beam of the sentence at a place may end."""
        return True

    def idle(self, group: int) -> list[Next]:
        """What the beams of a group that is done become."""
        return [Next(0.0, group * self.size + i, self.pad) for i in range(self.size)]

    def move(self, model: Stepper, beams: list[list[Next]]) -> bool:
        """Let the M beams of each present sentence become what was chosen; False when the search is over."""
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
        """Keep the sentences at these places."""
        index = torch.tensor(staying, device=self.ids.device, dtype=torch.int64)
        self.sentences = [self.sentences[place] for place in staying]
        self.prompt, self.ids, self.came_from = (
            self.prompt[index],
            self.ids[index],
            self.came_from[index],
        )
        self.scores = self.scores[index]

    def close(self, place: int, totals: list[float]) -> None:
        """Put what still runs of a sentence into its pools; totals of its beams."""
        for beam, total in enumerate(totals):
            pool = self.pools[self.sentences[place]][beam // self.size]
            if not pool.done:
                pool.add(total, self.new_tokens, *self.of_beam(place, beam))

    def of_beam(self, place: int, beam: int) -> tuple[Tensor, Tensor]:
        """The tokens of a beam so far, and the rows that the new ones came from."""
        return self.ids[place, beam, : self.length].clone(), self.came_from[
            place, beam, : self.new_tokens
        ].clone()

    def _end(self, place: int, group: int, candidate: Next) -> None:
        sentence = self.sentences[place]
        ids, beams = self.of_beam(place, candidate.parent)
        row = beams.new_tensor([sentence * self.beams + candidate.parent])
        self.pools[sentence][group].add(
            candidate.score, self.new_tokens + 1, ids, torch.cat([beams, row])
        )

    def _close(self) -> None:
        totals: list[list[float]] = cast(Any, self.scores).tolist()
        for place, of_sentence in enumerate(totals):
            self.close(place, of_sentence)

    def _drop(self, model: Stepper, leaving: Sequence[int]) -> None:
        """Let finished sentences leave, when enough of them have gathered to pay for moving the others."""
        if leaving := who_leaves(leaving, self.present, self.captured):
            staying = closed_up(self.present, leaving)
            self.drop(staying)
            kept = torch.tensor(staying, device=self.ids.device, dtype=torch.int64)
            keep_sentences(self.transforms, kept, self.beams)
            model.keep(kept)


def next_of(values: Tensor, indices: Tensor, vocabulary: int, first: int = 0) -> list[list[Next]]:
    """The candidates of each sentence as plain numbers.

    Args:
        values: (B, K) descending. indices: (B, K) = beam * V + token, of beams from `first` on.
    """
    scores: list[list[float]] = cast(Any, values).tolist()
    where: list[list[int]] = cast(Any, indices).tolist()
    return [
        [
            Next(score, first + at // vocabulary, at % vocabulary)
            for score, at in zip(*of, strict=True)
        ]
        for of in zip(scores, where, strict=True)
    ]
