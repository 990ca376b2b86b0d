"""The log-probability of one token of each row of logits: some rows at a time, so that log_softmax is never stored.

log_softmax over all rows would write as many values as there are logits, to read one of each row.
"""

import torch
from torch import Tensor

CHUNK = 2**21
"""Bytes of log-probabilities that are made at a time: they stay in the cache."""


def token_scores_reference(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return log_softmax(logits) (N, V) at tokens (N,): (N,), in fp32, of fp64 logits in fp64."""
    return (
        logits.to(torch.promote_types(logits.dtype, torch.float32))
        .log_softmax(-1)
        .gather(1, tokens[:, None])[:, 0]
    )


def token_scores(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probability of one token of each row; equal to `token_scores_reference` bit by bit.

    Args:
        logits: (N, V) floating point.
        tokens: (N,) int64, each in [0, V).
    Returns:
        (N,) in fp32, of fp64 logits in fp64.
    Raises:
        ValueError: on shapes that do not fit; the message holds them.
    """
    if logits.dim() != 2 or tokens.shape != logits.shape[:1]:
        raise ValueError(f"tokens {tuple(tokens.shape)} do not fit logits {tuple(logits.shape)}")
    found = logits.new_empty(len(logits), dtype=torch.promote_types(logits.dtype, torch.float32))
    step = max(1, CHUNK // max(1, logits.shape[1] * found.element_size()))
    for start in range(0, len(logits), step):
        part = slice(start, start + step)
        found[part] = token_scores_reference(logits[part], tokens[part])
    return found
