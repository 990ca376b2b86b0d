"""Pools of finished hypotheses, as in transformers 4: the best of a sentence or of a beam group.

As in transformers 4, total scores are fp32 and the length-penalised scores that rank them are fp64.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class Ranking:
    """Ranking of hypotheses.

    Args:
        length_penalty: exponent of a hypothesis' length.
        early_stopping: True, False or "never", as in GenerationConfig.
        longest: maximum number of new tokens.
    """

    length_penalty: float
    early_stopping: bool | Literal["never"]
    longest: int

    def score(self, total: float, new_tokens: int) -> float:
        """Return the length-penalised score of a hypothesis."""
        return total / new_tokens**self.length_penalty

    def attainable(self, total: float, new_tokens: int) -> float:
        """Return the score that decides whether a running hypothesis could still be kept."""
        furthest = self.early_stopping == "never" and self.length_penalty > 0.0
        return self.score(total, self.longest if furthest else new_tokens)


class Hypothesis(NamedTuple):
    """Finished hypothesis.

    Attributes:
        score: length-penalised score.
        ids: (L,) int64, prompt included, end token excluded.
        beams: (T,) int32, the row that each new token came from, end token included.
    """

    score: float
    ids: Tensor
    beams: Tensor


@dataclass
class BeamHypotheses:
    """Pool of the best finished hypotheses of a sentence or of a group of its beams.

    Attributes:
        capacity: maximum number of hypotheses.
        ranking: how hypotheses are ranked.
        hypotheses: kept hypotheses, in the order in which they finished.
        done: whether the pool is closed; running hypotheses are then ignored.
    """

    capacity: int
    ranking: Ranking
    hypotheses: list[Hypothesis] = field(default_factory=list[Hypothesis])
    done: bool = False
    _worst: float = 1.0e9

    def add(self, total: float, new_tokens: int, ids: Tensor, beams: Tensor) -> None:
        """Add a hypothesis if the pool has room or the hypothesis beats the worst one.

        Args:
            total: sum of its log-probabilities.
            new_tokens: its number of new tokens, end token included.
            ids: (L,) int64, see `Hypothesis`.
            beams: (T,) int32, see `Hypothesis`.
        """
        score = self.ranking.score(total, new_tokens)
        if len(self.hypotheses) >= self.capacity and score <= self._worst:
            return
        self.hypotheses.append(Hypothesis(score, ids, beams))
        if len(self.hypotheses) > self.capacity:
            worst = min(range(len(self.hypotheses)), key=lambda i: self.hypotheses[i].score)
            del self.hypotheses[worst]
        self._worst = min(map(_score, self.hypotheses))

    def settle(self, best: float, new_tokens: int) -> None:
        """Update `done` after a step whose best candidate has total `best` and `new_tokens`."""
        if self.done or len(self.hypotheses) < self.capacity:
            return
        at_once = self.ranking.early_stopping is True
        self.done = at_once or self._worst >= self.ranking.attainable(best, new_tokens)


def best_of(pools: Sequence[BeamHypotheses], count: int) -> list[Hypothesis]:
    """Return the `count` best hypotheses of a sentence, best first; the last one wins ties."""
    hypotheses = [hypothesis for pool in pools for hypothesis in pool.hypotheses]
    return sorted(hypotheses, key=_score)[::-1][:count]


def _score(hypothesis: Hypothesis) -> float:
    return hypothesis.score
