"""Min-p filtering."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fastgen.decoding.logits.text import Text
from fastgen.decoding.logits.transform import LogitsTransform, Warper


@dataclass
class MinP(LogitsTransform):
    """Removal of tokens that are improbable beside the most probable one.

    Attributes:
        min_p: Least share of its probability that a token must have, from 0 to 1.
        least: Minimum number of tokens that are kept.
        removed: Score of removed tokens.

    Source: Nguyen et al. 2024.
    """

    min_p: float
    least: int = 1
    removed: float = -torch.inf

    def __post_init__(self) -> None:
        if self.least == 1 and self.removed == -torch.inf:
            self.warper = Warper("min-p", self.min_p)

    @property
    def capturable(self) -> bool:
        """Whether the transform can be captured as part of a CUDA graph."""
        return True

    def __call__(self, scores: Tensor, text: Text) -> Tensor:
        probabilities = scores.softmax(-1)
        highest = probabilities.amax(-1, keepdim=True)
        is_removed = probabilities < self.min_p * highest
        if self.least > 1:  # The most probable token is never removed.
            kept = probabilities.topk(min(self.least, scores.shape[1])).indices
            is_removed.scatter_(1, kept, False)
        return scores.masked_fill_(is_removed, self.removed)
