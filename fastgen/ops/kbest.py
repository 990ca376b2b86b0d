"""The k best continuations of each sentence, over its beams and the vocabulary.

Source: Hoang et al. 2018 (Amun), section 2.2: k-best without a pass over sorted rows; Wang et al. 2021 (LightSeq),
section 2.2 (hierarchical auto-regressive search): maxima of groups first, then an exact ranking of the survivors.
"""

import torch
from torch import Tensor

GROUP = 128
"""Tokens per group: at V = 5,000 to 50,000 the maxima of 40 to 400 groups are ranked instead of the vocabulary."""


SMALL = 64 * 1024
"""Below this many log-probabilities one `torch.topk` is faster than the steps around the groups."""


def kbest_reference(log_probs: Tensor, scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k best of log_probs + scores over beams x vocabulary.

    Args:
        log_probs: (B, M, V) fp32 or fp64. Not modified.
        scores: (B, M) of the same dtype, the running score of each beam.
        k: 1 <= k <= M * V.
    Returns:
        values (B, k) descending; indices (B, k) int64 = beam * V + token. Equal values come in the order
        `torch.topk` gives them.
    """
    return torch.topk((log_probs + scores[:, :, None]).flatten(1), k)


def kbest(log_probs: Tensor, scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k best of log_probs + scores over beams x vocabulary; arguments as `kbest_reference`.

    On a CPU the rows are not sorted: the maxima of groups of `GROUP` tokens are ranked, the k groups that can hold a
    winner are gathered, and their tokens ranked exactly. Rounding of the sum is monotone, so that the maximum of a
    group keeps its rank after the score is added. When any two of the k + 1 best values are equal, or one is NaN, which
    of them `torch.topk` returns depends on its own order of work, so the reference decides.

    Raises:
        ValueError: on a wrong rank; the message holds the shapes.
        RuntimeError: k is larger than M * V, from `torch.topk`.
    """
    if log_probs.dim() != 3 or scores.shape != log_probs.shape[:2]:
        raise ValueError(
            f"log_probs {tuple(log_probs.shape)} must be (B, M, V) and scores {tuple(scores.shape)} (B, M)"
        )
    b, m, v = log_probs.shape
    whole = v // GROUP  # full groups; the rest of the vocabulary is ranked in full
    if log_probs.device.type != "cpu" or whole * m < 4 * k or log_probs.numel() < SMALL:
        return kbest_reference(log_probs, scores, k)
    wanted = k + 1
    grouped = log_probs[:, :, : whole * GROUP].unflatten(2, (whole, GROUP))
    maxima = grouped.amax(3) + scores[:, :, None]
    best_groups = maxima.flatten(1).topk(wanted, sorted=False).indices
    sentence = torch.arange(b, device=log_probs.device)[:, None]
    beam, group = best_groups // whole, best_groups % whole
    values = grouped[sentence, beam, group] + scores[sentence, beam][:, :, None]
    first = beam * v + group * GROUP
    tail = log_probs[:, :, whole * GROUP :] + scores[:, :, None]
    tail_first = torch.arange(m, device=log_probs.device)[:, None] * v + torch.arange(
        whole * GROUP, v, device=log_probs.device
    )
    candidates = torch.cat([values.flatten(1), tail.flatten(1)], 1)
    top, where = candidates.topk(wanted)
    if not bool((top[:, 1:] < top[:, :-1]).all()):  # equal values, or NaN
        return kbest_reference(log_probs, scores, k)
    where = where[:, :k]
    from_group = where < wanted * GROUP
    slot = where.clamp(max=wanted * GROUP - 1)
    in_group = first.gather(1, slot // GROUP) + slot % GROUP
    in_tail = tail_first.flatten()[(where - wanted * GROUP).clamp(min=0)] if tail_first.numel() else in_group
    return top[:, :k], torch.where(from_group, in_group, in_tail)
