"""Repetition penalty."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastgen.decoding.logits.text import Text
from fastgen.decoding.logits.transform import LogitsTransform, Penalty
from fastgen.ops.selection.kbest import SparseUpdate

_FINITE = 1e30
"""Largest factor or divisor of a penalty that is certainly finite in fp32."""


@dataclass
class RepetitionPenalty(LogitsTransform):
    """A repetition penalty on the tokens of a row's own text.

    Negative scores are multiplied by `factor`, others are divided by it. Log-probabilities are
    never positive, so the sparse update is a multiplication.

    Attributes:
        factor: The penalty.
        start: Index of the first token that counts, for all rows or (R,) per row.
        dense: The toolkit's function of (ids, scores) for all scores.

    Source: Keskar et al. 2019 (CTRL), section 4.1.
    """

    factor: float
    start: int | Tensor
    dense: Callable[[Tensor, Tensor], Tensor]
    # Whether no row has left, so that `dense`, which may depend on the rows, still applies.
    _whole: bool = field(default=True, init=False)

    form = "sparse update"
    needs_log_probs = True
    unread = ("dense", "_whole")

    @property
    def depends_on_rows(self) -> bool:
        """Whether each row has a start of its own."""
        return isinstance(self.start, Tensor)

    @property
    def update(self) -> Penalty | None:
        """The same as C reads it."""
        return Penalty(self.factor, self.start) if 1 / _FINITE < self.factor < _FINITE else None

    def keep_sentences(self, sentences: Tensor, beams: int) -> None:
        """Keep the starts of only the given sentences."""
        if isinstance(self.start, Tensor):
            beam = torch.arange(beams, device=sentences.device, dtype=torch.int64)
            rows = (sentences[:, None] * beams + beam).flatten()
            self.start, self._whole = self.start.to(rows.device)[rows], False

    def sparse_update(self, text: Text, vocabulary: int) -> SparseUpdate:
        """Return the transform as a sparse update of log-probabilities."""
        tokens = self._tokens(text, vocabulary).sort(1).values
        is_repeated = torch.nn.functional.pad(tokens[:, 1:] == tokens[:, :-1], (1, 0))
        factors = torch.full(tokens.shape, self.factor, dtype=torch.float32, device=tokens.device)
        return SparseUpdate(
            tokens.masked_fill(is_repeated, vocabulary), factors, torch.zeros_like(factors)
        )

    def __call__(self, scores: Tensor, text: Text) -> Tensor:
        if text.filled is None and self._whole:
            return self.dense(text.ids, scores)
        rows, vocabulary = scores.shape
        seen = torch.zeros(rows, vocabulary + 1, dtype=torch.bool, device=scores.device)
        seen = seen.scatter_(1, self._tokens(text, vocabulary), True)[:, :vocabulary]
        return torch.where(
            seen, torch.where(scores < 0, scores * self.factor, scores / self.factor), scores
        )

    def _tokens(self, text: Text, outside: int) -> Tensor:
        """Return the token ids (R, L), replaced by `outside` where they do not count."""
        if isinstance(self.start, Tensor):
            self.start = self.start.to(text.ids.device)
        start = self.start[:, None] if isinstance(self.start, Tensor) else self.start
        column = torch.arange(text.ids.shape[1], device=text.ids.device, dtype=torch.int64)
        ignored = column < start
        if text.filled is not None:
            ignored = ignored | (column >= text.filled)
        return text.ids.masked_fill(ignored, outside)
