"""The log-probability of one token per row of logits, computed in chunks of rows.

log_softmax over all rows would write as many values as there are logits, to read one of each row.
"""

import torch
from torch import Tensor

CHUNK = 2**21
"""Bytes of log-probabilities computed at a time; they stay in the cache."""


def token_scores_reference(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return log_softmax(logits) (N, V) at tokens (N,).

    Returns:
        (N,) fp32, or fp64 for fp64 logits.
    """
    return (
        logits.to(torch.promote_types(logits.dtype, torch.float32))
        .log_softmax(-1)
        .gather(1, tokens[:, None])[:, 0]
    )


def token_scores(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probability of one token of each row.

    The result equals `token_scores_reference` bit by bit.

    Args:
        logits: (N, V) floating point.
        tokens: (N,) int64, each in [0, V).

    Returns:
        (N,) fp32, or fp64 for fp64 logits.

    Raises:
        ValueError: the shapes do not fit; the message holds them.
    """
    if logits.dim() != 2 or tokens.shape != logits.shape[:1]:
        raise ValueError(f"tokens {tuple(tokens.shape)} do not fit logits {tuple(logits.shape)}")
    out = logits.new_empty(len(logits), dtype=torch.promote_types(logits.dtype, torch.float32))
    step = max(1, CHUNK // max(1, logits.shape[1] * out.element_size()))
    for start in range(0, len(logits), step):
        rows = slice(start, start + step)
        out[rows] = token_scores_reference(logits[rows], tokens[rows])
    return out
