"""Output of decode steps as fairseq's searches read it: predictions and cross-attention weights."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from fastgen.decoding.kv_cache.ancestry import Ancestry


class Prediction(NamedTuple):
    """Model output for the next token of each text.

    Attributes:
        log_probs: computes log-probabilities (R, V), or (B, V) in the first step. The caller may
            modify the result.
        logits: logits of the same shape whose fp32 log-softmax equals `log_probs`; None if there
            are no such logits. Read-only.
    """

    log_probs: Callable[[], Tensor]
    logits: Tensor | None = None


StepOutput = tuple[Prediction, Tensor | None]
"""Result of a decode step: the prediction, and cross-attention weights (R, S) or (B, S) or None."""


class PredictionStepper(Protocol):
    """Model that runs decode steps over R = B * M rows, one token per row and step."""

    @property
    def ancestry(self) -> Ancestry:
        """Ancestry table, the only state that `reorder` changes."""
        ...

    def step(self, ids: Tensor) -> StepOutput:
        """Run the newest token of each text.

        Args:
            ids: (R, L) int64; (B, 1) in the first step, the token that all beams start with.
        """
        ...

    def reorder(self, parents: Tensor) -> None:
        """Make row b * M + m continue beam parents[b, m]; parents is (B, M) int64."""
        ...

    def keep(self, sentences: Tensor, in_order: bool) -> None:
        """Keep only the given sentences of the batch.

        Args:
            sentences: int64 indices into the current batch.
            in_order: whether they are ascending. Otherwise a kept sentence either stays at its
                index or moves from the tail of the batch to a freed index.
        """
        ...
