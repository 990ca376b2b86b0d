"""Token selection in C: log-probabilities, k-best, finished hypotheses, and token masks."""

from typing import NamedTuple

import torch
from torch import Tensor

from fastgen.ops import native
from fastgen.ops.native import Library


def log_softmax(by: Library, logits: Tensor, out: Tensor) -> Tensor:
    """Write the log-probabilities of logits to out, and return it.

    Args:
        logits: (R, V) fp32 with contiguous rows.
        out: (R, V) fp32, contiguous.
    """
    rows, vocabulary = logits.shape
    by.log_softmax(
        by.run,
        native.threads_for(logits.numel()),
        out.data_ptr(),
        logits.data_ptr(),
        rows,
        vocabulary,
        logits.stride(0),
    )
    return out


def k_best(
    by: Library,
    rows: Tensor,
    scores: Tensor,
    k: int,
    normalised: bool,
    banned: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Return the k best of log-probabilities + scores over beams x vocabulary, in fp32.

    Args:
        rows: (B, M, V), log-probabilities if `normalised`, else logits.
        scores: (B, M).
        k: the number of winners per sentence.
        normalised: whether rows are log-probabilities.
        banned: (B * M, ceil(V / 32)) int32, a token mask of excluded tokens of each row
            (`ops.selection.token_mask`).

    Returns:
        values (B, k) and indices (B, k) int64; None if any two of the k + 1 best of a sentence are
        equal, or a sum is NaN.
    """
    b, m, v = rows.shape
    scores = scores.contiguous()
    room = scores.new_empty(b * m * (-(-v // native.LEAST_BLOCK) + 2))
    values, indices = scores.new_empty(b, k + 1), scores.new_empty(b, k + 1, dtype=torch.int64)
    maxima = room.data_ptr() + 8 * b * m
    if banned is not None and banned.stride(1) != 1:
        banned = banned.contiguous()
    decided = by.k_best(
        by.run, native.threads_for(rows.numel()), values.data_ptr(), indices.data_ptr(), maxima,
        None if normalised else room.data_ptr(), rows.data_ptr(), scores.data_ptr(),
        None if banned is None else banned.data_ptr(), b, m, v, k + 1, *rows.stride()[:2],
        0 if banned is None else banned.stride(0),
    )  # fmt: skip
    return (values[:, :k], indices[:, :k]) if decided else None


class Chosen(NamedTuple):
    """The result of `choose`.

    Attributes:
        parents: (B, M) int64, the beams that the running beams continue.
        tokens: (B, M) int64, the next tokens of the running beams.
        order: (B, M) int64, the finished hypotheses: an index into M old ones, then K candidates.
        scores: (B, M) fp32, the scores of the running beams.
        merged: (B, M) fp32, the scores of the finished hypotheses.
        merged_done: (B, M) bool, which slots hold a finished hypothesis.
        flags: (4, B) bool, as in `decoding.search.beam_search.Choice`.
    """

    parents: Tensor
    tokens: Tensor
    order: Tensor
    scores: Tensor
    merged: Tensor
    merged_done: Tensor
    flags: Tensor


def choose(
    by: Library, values: Tensor, beam: Tensor, token: Tensor, hits: Tensor, finished: Tensor,
    done: Tensor, improvable: Tensor, mask_value: float, power: float, far: float,
    stops_early: bool,
) -> Chosen | None:  # fmt: skip
    """Choose running beams and finished hypotheses of a step of beam search by `TransformersRule`.

    Args:
        values: (B, K) fp32, the candidates' scores, descending.
        beam: (B, K) int64, the beams that the candidates extend.
        token: (B, K) int64, the candidates' tokens.
        hits: (B, K) bool, which candidates end.
        finished: (B, M) fp32, the scores of the finished hypotheses.
        done: (B, M) bool, which slots hold a finished hypothesis.
        improvable: (B,) bool, whether a running beam can still become a better hypothesis.
        mask_value: added to scores that must not be chosen.
        power: divisor of scores for the current length.
        far: divisor of scores for the length by which running beams are judged.
        stops_early: whether a sentence is finished once it has M hypotheses.

    Returns:
        The choice; None if C cannot decide it, for example because two values are equal.
    """
    (sentences, candidates), beams = values.shape, finished.shape[1]
    inputs = [each.contiguous() for each in (values, beam, token, hits, finished, done, improvable)]
    indices = token.new_empty(3, sentences, beams)
    scores = values.new_empty(2, sentences, beams)
    merged_done, flags = hits.new_empty(sentences, beams), hits.new_empty(4, sentences)
    (parents, tokens, order), (running, merged) = indices.unbind(), scores.unbind()
    choice = Chosen(parents, tokens, order, running, merged, merged_done, flags)
    decided = by.choose(
        by.run, 1, *(each.data_ptr() for each in (*inputs, *choice)), sentences, beams, candidates,
        stops_early, mask_value, power, far,
    )  # fmt: skip
    return choice if decided else None


def add_tokens(by: Library, mask: Tensor, tokens: Tensor, vocabulary: int) -> None:
    """Add tokens to the sets of a token mask (`ops.selection.token_mask`).

    Args:
        mask: (R, W) int32, contiguous.
        tokens: (R or 1, N) int64.
        vocabulary: V.
    """
    (rows, words), tokens = mask.shape, tokens.contiguous()
    by.add_tokens(
        by.run, 1, mask.data_ptr(), tokens.data_ptr(), rows, words, tokens.shape[1], vocabulary,
        tokens.stride(0) if tokens.shape[0] > 1 else 0,
    )  # fmt: skip


def add_repeats(
    by: Library, mask: Tensor, ids: Tensor, n: int, texts: Tensor, vocabulary: int
) -> None:
    """Add to a token mask the tokens that would complete a repeated n-gram.

    Args:
        mask: (R, W) int32, contiguous.
        ids: (R, L) int64, the tokens so far.
        n: the size of the n-grams.
        texts: (B, S) int64, whose n-grams must not be repeated.
        vocabulary: V.
    """
    (rows, words), (ids, texts) = (
        mask.shape,
        (x if x.stride(1) == 1 else x.contiguous() for x in (ids, texts)),
    )
    by.add_repeats(
        by.run, native.threads_for(rows * texts.shape[1]), mask.data_ptr(), ids.data_ptr(),
        texts.data_ptr(), rows, words, n, ids.shape[1], texts.shape[1], vocabulary,
        rows // texts.shape[0], ids.stride(0), texts.stride(0),
    )  # fmt: skip
