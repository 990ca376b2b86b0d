"""Nucleus (top-p) filtering."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from fastgen.decoding.logits.text import Text
from fastgen.decoding.logits.transform import LogitsTransform, Warper
from fastgen.ops.selection.sample import nucleus


@dataclass
class TopP(LogitsTransform):
    """Nucleus (top-p) filtering.

    Attributes:
        top_p: Probability mass of the tokens that are kept.
        least: Minimum number of tokens that are kept.
        dense: The toolkit's function of (ids, scores), for rows that keep many tokens or in which
            rounding decides.

    Source: Holtzman et al. 2020, section 3.1.
    """

    top_p: float
    least: int
    dense: Callable[[Tensor, Tensor], Tensor]
    # Number of highest scores per row that are examined.
    _count: int = field(default=64, init=False)
    # Number of steps for which the toolkit's function runs right away.
    _pause: int = field(default=0, init=False)
    # Number of consecutive attempts in which `_count` scores were too few.
    _failed: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.least == 1:
            self.warper = Warper("top-p", self.top_p)

    @property
    def capturable(self) -> bool:
        """Whether the transform can be captured as part of a CUDA graph."""
        return True

    def __call__(self, scores: Tensor, text: Text) -> Tensor:
        if scores.device.type == "cpu" and text.filled is None and not self._pause:
            filtered, is_certain = nucleus(scores, self.top_p, self.least, self._count)
            uncertain = (~is_certain).nonzero()[:, 0]
            if 4 * len(uncertain) <= len(scores):
                if len(uncertain):
                    filtered[uncertain] = self.dense(text.ids[uncertain], scores[uncertain])
                self._failed = 0
                return filtered
            self._failed += 1
            self._count = 512  # With 50,000 tokens as fast as 64.
            self._pause = min(2**self._failed, 64)
        self._pause = max(0, self._pause - 1)
        return self.dense(text.ids, scores)
