"""How close the decisions of a search were, told from the scores that a toolkit returns of its own search."""

import math
from collections.abc import Sequence, Set
from typing import Any, cast

import torch
from torch import Tensor

NEAR_TIE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-1}
"""The margin under which rounding may turn a decision, by the model's dtype; none in float64."""
_NEVER = -1e9
"""The score of beams that do not exist yet, as transformers has it."""


def closest_decision(run: Any, row: int, beams: int, other: Sequence[int], ends: Set[int]) -> float:
    """Return the smallest gap by which a search may have left the way to another one's sequence.

    Args:
        run: what the search returned: `scores` of each step, `sequences`, and with several beams `sequences_scores`,
            both of all hypotheses of each sentence.
        row: of `run.sequences`, in whose place the other search has `other`.
        other: token ids, with the prompt and what fills them beyond their end.
        ends: the tokens that end a sequence.
    """
    first, rank, prompt = row - row % beams, row % beams, prompt_length(run)
    rows = slice(first, first + beams)
    wanted = up_to_end(other[prompt:], ends)
    closest = replayed([step[rows] for step in run.scores], wanted, ends)
    finished = [up_to_end(tokens[prompt:], ends) for tokens in run.sequences[rows].tolist()]
    if (
        wanted in finished and wanted != finished[rank]
    ):  # the search kept it, and ranked another before it
        final = run.sequences_scores[rows].tolist()
        closest = min(closest, abs(final[rank] - final[finished.index(wanted)]))
    return closest


def replayed(scores: Sequence[Tensor], wanted: Sequence[int], ends: Set[int]) -> float:
    """Return the smallest gap between the last candidate kept and the first dropped, on the way to `wanted`.

    The search is replayed for as long as it keeps the beginning of `wanted`. Another search that ended with `wanted`
    parted from this one at the step where this one drops it, or before. So up to there each gap counts; in a greedy
    search only that of the step where it takes another token.

    Args:
        scores: of each step (M, V), log-probabilities after the logits processors; of any scale where M is 1.
        wanted: generated tokens of the other search, up to and with the end token; without one its length ended it.
        ends: the tokens that end a sequence.
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
            closest = min(closest, _gap(values, beams))  # to end counts among the M best only
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
    """The distance of the last value kept from the first dropped; what is banned or does not exist is no choice."""
    if len(values) <= kept or values[kept] < _NEVER / 2:
        return math.inf
    return float(values[kept - 1] - values[kept])


def prompt_length(run: Any) -> int:
    """Return how many tokens of what a search returned it did not generate."""
    new = run.beam_indices.shape[1] if "beam_indices" in run else len(run.scores or run.logits)
    return run.sequences.shape[1] - new


def up_to_end(tokens: Sequence[int], ends: Set[int]) -> list[int]:
    """Cut what fills a sequence beyond its end."""
    return list(
        next((tokens[: place + 1] for place, token in enumerate(tokens) if token in ends), tokens)
    )


def end_tokens(eos: int | Sequence[int] | None) -> set[int]:
    """Return a configuration's `eos_token_id` as a set."""
    return {eos} if isinstance(eos, int) else set(eos or ())
