"""How close the decisions of a beam search were, told from the scores that a toolkit returns of its own search."""

import math
from collections.abc import Sequence, Set
from typing import Any, cast

import torch
from torch import Tensor

_NEVER = -1e9
"""The score of beams that do not exist yet, as transformers has it."""


def closest_decision(scores: Sequence[Tensor], wanted: Sequence[int], ends: Set[int]) -> float:
    """Return the smallest gap by which a search may have left the way to `wanted`.

    The search is replayed for as long as it keeps the beginning of `wanted`. Another search that ended with `wanted`
    parted from this one at the step where this one drops it, or before. So up to there each gap between the last
    candidate that was kept and the first that was dropped counts.

    Args:
        scores: of each step (M, V), log-probabilities after the logits processors.
        wanted: generated tokens of the other search, up to and with the end token.
        ends: the tokens that end a sequence.
    """
    beams = scores[0].shape[0]
    running = scores[0].new_full((beams, 1), _NEVER)
    running[0] = 0.0
    closest, mine = math.inf, 0
    for step, token in zip(scores, wanted, strict=False):
        total = running + step
        vocabulary = total.shape[1]
        ending = torch.zeros(vocabulary, dtype=torch.bool, device=total.device)
        ending[[end for end in ends if end < vocabulary]] = True
        values, order = total.flatten().topk(min(beams + 1, total.numel()))
        if len(values) > beams and bool(ending[order[beams - 1 :] % vocabulary].any()):
            closest = min(closest, _gap(values, beams))  # to end counts among the M best only
        values, order = total.masked_fill(ending, -math.inf).flatten().topk(min(beams + 1, total.numel()))
        closest = min(closest, _gap(values, beams))
        kept: list[int] = cast(Any, order[:beams]).tolist()
        if token in ends or mine * vocabulary + token not in kept:
            break
        mine, running = kept.index(mine * vocabulary + token), values[:beams, None]
    return closest


def _gap(values: Tensor, kept: int) -> float:
    """The distance of the last value kept from the first dropped; what is banned or does not exist is no choice."""
    if len(values) <= kept or values[kept] < _NEVER / 2:
        return math.inf
    return float(values[kept - 1] - values[kept])
