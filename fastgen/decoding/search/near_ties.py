"""Margins of a search's decisions, computed from the scores that the toolkit's search returns."""

import math
from collections.abc import Sequence, Set
from typing import Any, cast

import torch
from torch import Tensor

NEAR_TIE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-1}
"""Margin below which rounding may change a decision, by the model's dtype; none in float64."""
_NEVER = -1e9
"""Score of beams that do not exist yet, as in transformers."""


def closest_decision(run: Any, row: int, beams: int, other: Sequence[int], ends: Set[int]) -> float:
    """Return the smallest margin by which a search may have diverged from another one's sequence.

    Args:
        run: output of the search: `scores` of each step, `sequences`, and with several beams
            `sequences_scores`. The last two hold all hypotheses of each sentence.
        row: row of `run.sequences` for which the other search returned `other`.
        beams: M.
        other: token ids, prompt and padding included.
        ends: token ids that end a sequence.
    """
    first, rank, prompt = row - row % beams, row % beams, prompt_length(run)
    rows = slice(first, first + beams)
    target = up_to_end(other[prompt:], ends)
    closest = replayed([step[rows] for step in run.scores], target, ends)
    finished = [up_to_end(tokens[prompt:], ends) for tokens in run.sequences[rows].tolist()]
    # The search kept the target but ranked another hypothesis higher.
    if target in finished and target != finished[rank]:
        final = run.sequences_scores[rows].tolist()
        closest = min(closest, abs(final[rank] - final[finished.index(target)]))
    return closest


def replayed(scores: Sequence[Tensor], wanted: Sequence[int], ends: Set[int]) -> float:
    """Return the smallest margin between the last kept and the first dropped candidate.

    The search is replayed for as long as it keeps a prefix of `wanted`. Another search that
    returned `wanted` diverged from this one at the step that drops the prefix, or earlier. Every
    margin up to that step therefore counts. In greedy search only the margin of the step that
    selects another token counts.

    Args:
        scores: (M, V) for each step, log-probabilities after the logits processors. If M is 1, any
            scale will do.
        wanted: generated tokens of the other search, end token included. Without an end token the
            sequence ended by its length.
        ends: token ids that end a sequence.
    """
    beams, vocabulary = scores[0].shape
    running = scores[0].new_full((beams, 1), _NEVER)
    running[0] = 0.0
    over = torch.zeros(vocabulary, dtype=torch.bool, device=running.device)
    over[[end for end in ends if end < vocabulary]] = True
    closest, mine = math.inf, 0
    for place, (step, token) in enumerate(zip(scores, wanted, strict=False), 1):
        if token >= vocabulary:
            return math.inf
        if beams == 1:
            if int(step.argmax()) != token:
                return float(step.max() - step[0, token])
            continue
        if place == len(wanted) and token not in ends:
            over[:] = True
        total = running + step
        values, order = total.flatten().topk(min(beams + 1, total.numel()))
        if bool(over[order[beams - 1 :] % vocabulary].any()):
            # A candidate that ends counts only if it is among the M best.
            closest = min(closest, _gap(values, beams))
        values, order = (
            total.masked_fill(over, -math.inf).flatten().topk(min(beams + 1, total.numel()))
        )
        closest = min(closest, _gap(values, beams))
        kept: list[int] = cast(Any, order[:beams]).tolist()
        if token in ends or mine * vocabulary + token not in kept:
            break
        mine, running = kept.index(mine * vocabulary + token), values[:beams, None]
    return closest


def _gap(values: Tensor, kept: int) -> float:
    """Return the margin between the last kept and the first dropped value.

    The margin is infinite if no candidate is dropped, or if the dropped one is banned or belongs to
    a beam that does not exist.
    """
    if len(values) <= kept or values[kept] < _NEVER / 2:
        return math.inf
    return float(values[kept - 1] - values[kept])


def prompt_length(run: Any) -> int:
    """Return the number of leading tokens in `run.sequences` that the search did not generate."""
    new = run.beam_indices.shape[1] if "beam_indices" in run else len(run.scores or run.logits)
    return run.sequences.shape[1] - new


def up_to_end(tokens: Sequence[int], ends: Set[int]) -> list[int]:
    """Return the tokens of a sequence without the padding after its end token."""
    return list(
        next((tokens[: place + 1] for place, token in enumerate(tokens) if token in ends), tokens)
    )


def end_tokens(eos: int | Sequence[int] | None) -> set[int]:
    """Return a configuration's `eos_token_id` as a set."""
    return {eos} if isinstance(eos, int) else set(eos or ())
