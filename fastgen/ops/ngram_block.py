"""Blocking of repeated n-grams: a token that would complete an n-gram already in its row is banned.

Source: Paulus et al. 2018 (trigram blocking); FastSeq section 3.2 (blocking on the device).
"""

import torch
from torch import Tensor


def ngram_block_reference(scores: Tensor, ids: Tensor, n: int) -> Tensor:
    """Return a copy of scores with every token banned that would repeat an n-gram of its row; a plain loop.

    Args:
        scores: (R, V) floating point.
        ids: (R, L) int64, the tokens so far; ids outside the vocabulary are never banned.
        n: >= 1, the size of the n-grams.
    Returns:
        (R, V), -inf at banned tokens.
    """
    scores = scores.clone()
    for row, tokens in enumerate(ids.tolist()):
        if len(tokens) + 1 < n:
            continue
        last = tokens[len(tokens) - n + 1 :]
        for start in range(len(tokens) - n + 1):
            gram = tokens[start : start + n]
            if gram[:-1] == last and 0 <= gram[-1] < scores.shape[1]:
                scores[row, gram[-1]] = -torch.inf
    return scores


def ngram_block_(scores: Tensor, ids: Tensor, n: int) -> Tensor:
    """Ban, in place, every token that would repeat an n-gram of its row.

    All earlier n-grams are compared with the newest n - 1 tokens at once, and the bans are one scatter; a device is
    never waited for. Arguments and result as `ngram_block_reference`, but scores is modified and returned.
    Traffic: n reads of ids and, on a CPU, a sparse write; elsewhere one pass over scores.

    Raises:
        ValueError: when n < 1 or the numbers of rows differ.
    """
    if n < 1 or ids.shape[0] != scores.shape[0]:
        raise ValueError(f"n = {n} (>= 1), ids {tuple(ids.shape)} (R, L), scores {tuple(scores.shape)} (R, V)")
    length, vocabulary = ids.shape[1], scores.shape[1]
    starts = length - n + 1
    if starts < 1:
        return scores
    follower = ids[:, n - 1 :]
    hit = (follower >= 0) & (follower < vocabulary)
    for i in range(n - 1):
        hit = hit & (ids[:, i : i + starts] == ids[:, starts + i, None])
    if scores.device.type == "cpu":
        row, start = hit.nonzero(as_tuple=True)
        return scores.index_put_((row, follower[row, start]), scores.new_tensor(-torch.inf))
    # What is not banned goes to a column of its own beyond the vocabulary.
    banned = torch.zeros(scores.shape[0], vocabulary + 1, dtype=torch.bool, device=scores.device)
    banned.scatter_(1, torch.where(hit, follower, vocabulary), True)
    return scores.masked_fill_(banned[:, :vocabulary], -torch.inf)
