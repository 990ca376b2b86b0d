"""Sequences with a score each, of callers that want no more of `generate`: no scores of steps are kept for them.

A beam search's scores are transformers' `sequences_scores`. Greedy search and sampling have none; theirs is the sum of
the log-probabilities of a text's tokens up to its end, by the processed scores: what
`compute_transition_scores(..., normalize_logits=True)` gives, but for the order in which fp32 numbers are added.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgen.decoding.search.sampling import chosen_of


class Scored(NamedTuple):
    """sequences (N, L) int64; scores (N,), natural logarithms."""

    sequences: Tensor
    scores: Tensor


def summed(chosen: list[Tensor]) -> Tensor:
    """Scores (R,) fp64 of texts, from their tokens' log-probabilities (R,) of each step."""
    return torch.stack(chosen, 1).double().sum(1)


def by_transformers(
    model: Any, inputs: dict[str, Tensor], kwargs: dict[str, Any], ends: Tensor
) -> Scored:
    """The same from what `generate` returns to anybody, with the scores of all steps.

    Args:
        ends: tokens that end a text, int64.
    """
    found = model.generate(**inputs, **kwargs, return_dict_in_generate=True, output_scores=True)
    if getattr(found, "sequences_scores", None) is not None:
        return Scored(found.sequences, found.sequences_scores)
    generated = found.sequences[:, -len(found.scores) :]
    ended = torch.isin(generated, ends.to(generated.device)).long()
    behind = (ended.cumsum(1) - ended) > 0
    chosen = map(chosen_of, found.scores, generated.unbind(1))
    return Scored(
        found.sequences,
        summed([c.masked_fill(b, 0.0) for c, b in zip(chosen, behind.T, strict=True)]),
    )
