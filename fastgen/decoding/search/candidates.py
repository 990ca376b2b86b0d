"""Candidates of a step: the best continuations of each sentence."""

from typing import NamedTuple

from torch import Tensor

from fastgen.ops.selection.kbest import LogitsUpdates, best_of_log_probs, kbest


class Candidates(NamedTuple):
    """The K >= M best continuations of each sentence, best first.

    Attributes:
        scores: (B, K), running scores.
        tokens: (B, K) int64.
        beams: (B, K) int64, the beam that each continues.
    """

    scores: Tensor
    tokens: Tensor
    beams: Tensor


def best(log_probs: Tensor, scores: Tensor, beams: int) -> Candidates:
    """Return the 2 * M best of log_probs (B, N, V) + scores (B, N).

    At most M of them end, so that M can continue.
    """
    vocabulary = log_probs.shape[2]
    values, index = best_of_log_probs(log_probs, scores, count_of(log_probs, beams))
    return Candidates(values, index % vocabulary, index // vocabulary)


def best_of_logits(
    logits: Tensor, scores: Tensor, beams: int, transforms: LogitsUpdates
) -> Candidates:
    """Return `best` of the log-softmax of logits (B, N, V).

    NaN is replaced by -inf before the transforms are applied.
    """
    vocabulary = logits.shape[2]
    selected = kbest(logits, scores, count_of(logits, beams), transforms, without_nan=True)
    return Candidates(
        selected.values, selected.indices % vocabulary, selected.indices // vocabulary
    )


def count_of(rows: Tensor, beams: int) -> int:
    """Return the number of candidates per sentence for rows (B, N, V)."""
    return min(2 * beams, rows.shape[1] * rows.shape[2] - 1)
