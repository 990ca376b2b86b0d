"""Finished hypotheses as transformers 4 kept them: the best of a sentence, or of a group of its beams.

Totals are fp32, what is ranked is computed from them in fp64, as there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class Ranking:
    """How hypotheses are compared.

    Args:
        length_penalty: the exponent of a hypothesis' length. early_stopping: True, False or "never".
        longest: new tokens at most.
    """

    length_penalty: float
    early_stopping: bool | Literal["never"]
    longest: int

    def score(self, total: float, new_tokens: int) -> float:
        return total / new_tokens**self.length_penalty

    def attainable(self, total: float, new_tokens: int) -> float:
        """What a running hypothesis counts as, when it is asked whether it could still become one of the best."""
        furthest = self.early_stopping == "never" and self.length_penalty > 0.0
        return self.score(total, self.longest if furthest else new_tokens)


class Hypothesis(NamedTuple):
    """ids (L,) int64 with the prompt, without what ended it; beams (T,) int32, the row each new token came from."""

    score: float
    ids: Tensor
    beams: Tensor


@dataclass
class Pool:
    """The best finished hypotheses of a sentence, or of a group of its beams.

    Attributes:
        done: that none of the running ones comes in any more.
    """

    capacity: int
    ranking: Ranking
    hypotheses: list[Hypothesis] = field(default_factory=list[Hypothesis])
    done: bool = False
    _worst: float = 1.0e9

    def add(self, total: float, new_tokens: int, ids: Tensor, beams: Tensor) -> None:
        """Keep a hypothesis of so many new tokens, its end counted, if there is room or it drives out a worse one."""
        score = self.ranking.score(total, new_tokens)
        if len(self.hypotheses) >= self.capacity and score <= self._worst:
            return
        self.hypotheses.append(Hypothesis(score, ids, beams))
        if len(self.hypotheses) > self.capacity:
            worst = min(range(len(self.hypotheses)), key=lambda i: self.hypotheses[i].score)
            del self.hypotheses[worst]
        self._worst = min(map(_score, self.hypotheses))

    def settle(self, best: float, new_tokens: int) -> None:
        """Note whether it is done, where the best candidate of a step has such a total and so many new tokens."""
        if self.done or len(self.hypotheses) < self.capacity:
            return
        at_once = self.ranking.early_stopping is True
        self.done = at_once or self._worst >= self.ranking.attainable(best, new_tokens)


def best_of(pools: Sequence[Pool], count: int) -> list[Hypothesis]:
    """The best hypotheses of a sentence, best first; of equal ones the last."""
    found = [hypothesis for pool in pools for hypothesis in pool.hypotheses]
    return sorted(found, key=_score)[::-1][:count]


def _score(hypothesis: Hypothesis) -> float:
    return hypothesis.score
