"""Sequences with one score each, for callers that need no per-step scores from `generate`.

The scores of a beam search are transformers' `sequences_scores`. Greedy search and sampling have
none there. Their score is the sum of the log-probabilities of a text's tokens up to its end, under
the processed scores. `compute_transition_scores(..., normalize_logits=True)` gives the terms of
that sum; only the order of fp32 additions differs.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgen.decoding.search.sampling import chosen_of


class Scored(NamedTuple):
    """Sequences and their scores.

    Attributes:
        sequences: (N, L) int64.
        scores: (N,), natural logarithms.
    """

    sequences: Tensor
    scores: Tensor


def summed(chosen: list[Tensor]) -> Tensor:
    """Return scores (R,) fp64 of texts from the log-probabilities (R,) of each step's tokens."""
    return torch.stack(chosen, 1).double().sum(1)


def by_transformers(
    model: Any, inputs: dict[str, Tensor], kwargs: dict[str, Any], ends: Tensor
) -> Scored:
    """Compute scored sequences from the per-step scores that `generate` returns.

    Args:
        inputs: Model inputs.
        kwargs: Other arguments of `generate`.
        ends: (E,) int64, the tokens that end a text.
    """
    output = model.generate(**inputs, **kwargs, return_dict_in_generate=True, output_scores=True)
    if getattr(output, "sequences_scores", None) is not None:
        return Scored(output.sequences, output.sequences_scores)
    generated = output.sequences[:, -len(output.scores) :]
    ended = torch.isin(generated, ends.to(generated.device)).long()
    after_end = (ended.cumsum(1) - ended) > 0
    chosen = map(chosen_of, output.scores, generated.unbind(1))
    return Scored(
        output.sequences,
        summed([c.masked_fill(b, 0.0) for c, b in zip(chosen, after_end.T, strict=True)]),
    )
