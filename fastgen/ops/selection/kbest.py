"""The k best continuations of each sentence, over its beams and the vocabulary.

On a GPU two kernels read the logits once (`ops.selection.kbest_kernels`); only the winners are ever normalised and no
log-probability is written. On a CPU log-probabilities are written, as the pass over memory that this saves there costs
less than the exponentials, and maxima of groups of tokens are ranked instead of the tokens; in C they are not written
either, unless some are changed.

Source: Hoang et al. 2018 (Amun), section 2.2: bias, softmax and k-best fused; Wang et al. 2021 (LightSeq), section 2.2
(hierarchical auto-regressive search): maxima of groups first, then an exact ranking of the survivors.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastgen.ops import native
from fastgen.ops.dispatch import (
    TRITON,
    cdiv,
    chosen,
    in_c,
    in_memory,
    plain,
    runs_kernels,
    use_triton,
)
from fastgen.ops.selection import kbest_kernels as kernels
from fastgen.ops.selection.log_softmax import log_softmax, log_softmax_reference
from fastgen.ops.selection.token_mask import unpacked

GROUP = 128
"""Tokens per group on a CPU, about: at V = 5,000 to 50,000 maxima of 40 to 400 groups are ranked, not the tokens."""

SMALL = 256 * 1024
"""Below this many log-probabilities in all, and a quarter of it per sentence, one `torch.topk` is faster on a CPU."""


MOST_IN_C = 64
"""Winners up to which C ranks: it keeps them in a sorted list."""


class SparseUpdate(NamedTuple):
    """Tokens whose log-probability p becomes p * factor + offset: a repetition penalty, a bias of some tokens.

    tokens: (R, N) int64, different ones in each row; those outside the vocabulary stand for none.
    factors, offsets: (R, N) fp32.
    """

    tokens: Tensor
    factors: Tensor
    offsets: Tensor


class LogitsUpdates(NamedTuple):
    """What is done to the log-probabilities of few tokens of each of the R = B * M rows, in this order.

    changes: tokens that get another log-probability.
    banned: (R, ceil(V / 32)) int32, a set of tokens for each row (`ops.selection.token_mask`) that become -inf.
    forced: (R,) int64: the token that alone is left, with log-probability 0, or a negative number for none.
    """

    changes: SparseUpdate | None = None
    banned: Tensor | None = None
    forced: Tensor | None = None


class KBest(NamedTuple):
    """values (B, k) descending, indices (B, k) int64 = beam * V + token, normalisers (B, M) or None."""

    values: Tensor
    indices: Tensor
    normalisers: Tensor | None


NO_UPDATES = LogitsUpdates()


def kbest_reference(
    logits: Tensor,
    scores: Tensor,
    k: int,
    updates: LogitsUpdates = NO_UPDATES,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    normalisers: bool = False,
    without_nan: bool = False,
) -> KBest:
    """Return the k best of log_softmax((logits + bias) / temperature), edited, plus scores over beams x vocabulary.

    Args:
        logits: (B, M, V) floating point, the last dimension contiguous. Not modified.
        scores: (B, M) fp32, or fp64 with logits of that type: the running score of each beam, natural log.
        k: 1 <= k <= M * V.
        bias: (V,), added to the logits of every row.
        normalisers: return log(sum(exp((logits + bias) / temperature))) of every row too.
        without_nan: log-probabilities that are NaN become -inf before the edits.
    """
    given = logits, scores.dtype, updates, bias, temperature, normalisers, without_nan
    log_probs, sums = _log_probs(*given, normalised=log_softmax_reference)
    return KBest(*best_of_log_probs_reference(log_probs, scores, k), sums)


def _log_probs(
    logits: Tensor,
    dtype: torch.dtype,
    updates: LogitsUpdates,
    bias: Tensor | None,
    temperature: float,
    normalisers: bool,
    without_nan: bool,
    scratch: Tensor | None = None,
    normalised: Callable[..., Tensor] = log_softmax,
) -> tuple[Tensor, Tensor | None]:
    """The edited log-probabilities (B, M, V), and the normalisers (B, M) where they are asked for."""
    b, m, v = logits.shape
    changes, banned, forced = updates
    rows = logits.flatten(0, 1).to(dtype)
    if bias is not None:
        rows = rows + bias.to(dtype)
    if temperature != 1.0:
        rows = rows / temperature
    log_probs = normalised(rows, out=None if scratch is None else scratch.flatten(0, 1))
    if without_nan:
        log_probs = log_probs.masked_fill_(log_probs.isnan(), -torch.inf)
    if changes is not None:
        inside = (changes.tokens >= 0) & (changes.tokens < v)
        tokens = torch.where(inside, changes.tokens, v)
        padded = torch.nn.functional.pad(log_probs, (0, 1))
        log_probs = padded.scatter(
            1, tokens, padded.gather(1, tokens) * changes.factors + changes.offsets
        )[:, :v]
    if banned is not None:
        log_probs.masked_fill_(unpacked(banned, v), -torch.inf)
    if forced is not None:
        one = torch.full_like(log_probs, -torch.inf).scatter_(1, forced.clamp(min=0)[:, None], 0.0)
        log_probs = torch.where((forced >= 0)[:, None], one, log_probs)
    return log_probs.view(b, m, v), torch.logsumexp(rows, -1).view(b, m) if normalisers else None


def kbest(
    logits: Tensor,
    scores: Tensor,
    k: int,
    updates: LogitsUpdates = NO_UPDATES,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    normalisers: bool = False,
    without_nan: bool = False,
    scratch: Tensor | None = None,
) -> KBest:
    """Return the k best continuations of each sentence; arguments as `kbest_reference`, and one more.

    Args:
        scratch: memory for the log-probabilities, of the logits' shape and the scores' dtype, contiguous; what is in it
            is lost. Fresh memory costs more on a CPU than what is written to it. Kernels need none.

    Ties: the kernels put the lowest index first among equal logits of a row and equal values of a sentence; the
    reference has the order of `torch.topk`. Candidates of -inf have any index.
    Numerics: fp32 accumulation. Traffic: one read of the logits, and of a thirty-second as much for bans.

    Raises:
        ValueError: on shapes, dtypes or a k that do not fit; the message holds them.
    """
    if logits.dim() != 3 or scores.shape != logits.shape[:2]:
        raise ValueError(
            f"logits {tuple(logits.shape)} must be (B, M, V) and scores {tuple(scores.shape)} (B, M)"
        )
    b, m, v = logits.shape
    changes, banned, forced = updates
    if not 1 <= k <= m * v:
        raise ValueError(f"k = {k} is not between 1 and beams x vocabulary = {m * v}")
    if temperature <= 0:
        raise ValueError(f"temperature = {temperature} must be positive")
    for name, tensor, shape in (
        ("bias", bias, (v,)),
        ("banned", banned, (b * m, cdiv(v, 32))),
        ("forced", forced, (b * m,)),
    ):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(
                f"{name} {tuple(tensor.shape)} must be {shape} for logits {tuple(logits.shape)}"
            )
    if changes is not None and any(
        t.dim() != 2 or t.shape != changes.tokens.shape for t in changes
    ):
        raise ValueError(f"changes {[tuple(t.shape) for t in changes]} must be (R, N) each")
    if scratch is not None and (
        scratch.shape != logits.shape
        or scratch.dtype != scores.dtype
        or not scratch.is_contiguous()
    ):
        found = f"scratch {tuple(scratch.shape)} in {scratch.dtype}"
        raise ValueError(f"{found} must be {tuple(logits.shape)} in {scores.dtype}, contiguous")
    able = lambda: _covered(logits, scores, k, 0 if changes is None else changes.tokens.shape[1])
    in_c_too = lambda: (
        _covered_in_c(logits, scores, k)
        and (banned is None or in_memory(banned, dtype=torch.int32))
    )
    by = chosen("kbest", able, in_c_too, logits, scores, bias, banned, forced)
    if by is TRITON:
        best = kernels.run(
            logits, scores, k, bias, temperature, changes, banned, forced, without_nan=without_nan
        )
        return KBest(best[0], best[1], best[2] if normalisers else None)
    if in_c(by) and changes is forced is bias is None and temperature == 1.0 and not normalisers:
        found = native.k_best(by, logits, scores, k, normalised=False, banned=banned)
        if found is not None:
            return KBest(*found, None)
    log_probs, sums = _log_probs(
        logits, scores.dtype, updates, bias, temperature, normalisers, without_nan, scratch
    )
    return KBest(*_ranked(by, log_probs, scores, k), sums)


def fused(logits: Tensor, k: int, bans_alone: bool) -> bool:
    """Whether `kbest` finds the k best of logits (B, M, V) without log-probabilities being written.

    bans_alone: whether edits, if there are any, do nothing but to ban tokens.
    """
    if runs_kernels(logits):
        return True
    return bans_alone and native.library() is not None and _covered_in_c(logits, logits, k)


def best_of_log_probs(log_probs: Tensor, scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return values (B, k) descending and indices (B, k) of the k best of log_probs (B, M, V) + scores (B, M).

    On a CPU equal values come in the order that `torch.topk` gives them, elsewhere as `kbest` has them.

    Raises:
        ValueError: on a wrong rank; the message holds the shapes.
        RuntimeError: k is larger than M * V, from `torch.topk`.
    """
    if log_probs.dim() != 3 or scores.shape != log_probs.shape[:2]:
        raise ValueError(
            f"log_probs {tuple(log_probs.shape)} must be (B, M, V) and scores {tuple(scores.shape)} (B, M)"
        )
    _, m, v = log_probs.shape
    able = lambda: 1 <= k <= m * v and _covered(log_probs, scores, k)
    by = chosen("kbest", able, lambda: _covered_in_c(log_probs, scores, k), log_probs, scores)
    if by is TRITON:
        return kernels.run(log_probs, scores, k, normalised=True)[:2]
    return _ranked(by, log_probs, scores, k)


def best_of_log_probs_reference(log_probs: Tensor, scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return what `best_of_log_probs` does, by one `torch.topk`."""
    return torch.topk((log_probs + scores[:, :, None]).flatten(1), k)


def argmax(logits: Tensor) -> Tensor:
    """Return the token (R,) int64 with the highest logit of each row of logits (R, V); ties: the lowest.

    No probability is computed (Hoang et al. 2018, algorithm 5). Traffic: one read of the logits. Of NaN, the first.
    """
    if use_triton(
        "argmax", lambda: logits.dtype != torch.float64 and logits.stride(-1) == 1, logits
    ):
        return kernels.argmax(logits)
    if logits.device.type != "cpu":
        return torch.argmax(logits, -1)
    if logits.numel() >= SMALL and logits.shape[1] >= 2 * GROUP:
        return _argmax_in_groups(logits)
    return logits.max(-1).indices  # the same, and two to three times as fast there


def _argmax_in_groups(logits: Tensor) -> Tensor:
    """The first group with the highest maximum is read again: `amax` alone is vectorised on a CPU."""
    v = logits.shape[1]
    end = v // GROUP * GROUP
    maxima = logits[:, :end].unflatten(1, (-1, GROUP)).amax(2)
    if end < v:
        maxima = torch.cat([maxima, logits[:, end:].amax(1, keepdim=True)], 1)
    start = maxima.max(1, keepdim=True).indices.mul_(GROUP).clamp_(max=v - GROUP)
    return (
        start
        + logits.gather(1, start + torch.arange(GROUP, dtype=torch.int64, device=logits.device))
        .max(1, keepdim=True)
        .indices
    )[:, 0]


def _covered(logits: Tensor, scores: Tensor, k: int, changed: int = 0) -> bool:
    """Whether the kernels cover the case."""
    return (
        logits.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and scores.dtype == torch.float32
        and logits.stride(2) == 1
        and kernels.group_size(logits.shape[1], logits.shape[2], k, changed) is not None
    )


def _covered_in_c(logits: Tensor, scores: Tensor, k: int) -> bool:
    """Whether C ranks what comes of these logits."""
    return (
        plain(logits, scores)
        and logits.stride(2) == 1
        and 1 <= k <= MOST_IN_C
        and k < logits.shape[2]
    )


def _ranked(
    by: "native.Library | str", log_probs: Tensor, scores: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """Rank log-probabilities in C, where `by` says so, else in torch; where values are equal, by `torch.topk`."""
    if in_c(by) and plain(log_probs):  # which a bias may have changed
        found = native.k_best(by, log_probs, scores, k, normalised=True)
        return found or best_of_log_probs_reference(log_probs, scores, k)
    return _ranked_in_groups(log_probs, scores, k)


def _ranked_in_groups(log_probs: Tensor, scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Rank log-probabilities in torch.

    On a CPU the rows are not sorted: the maxima of groups of about `GROUP` tokens are ranked, the k groups that can
    hold a winner are gathered, and their tokens ranked exactly. Rounding of the sum is monotone, so that the maximum of
    a group keeps its rank after the score is added. When any two of the k + 1 best values are equal, or one is NaN,
    `torch.topk` decides.
    """
    _, m, v = log_probs.shape
    size = _group_size(v, GROUP)
    whole = v // size  # full groups; the rest of the vocabulary, if any, is ranked in full
    if (
        log_probs.device.type != "cpu"
        or whole * m < 4 * k
        or max(log_probs.numel(), 4 * m * v) < SMALL
    ):
        return best_of_log_probs_reference(log_probs, scores, k)
    wanted, end = k + 1, whole * size
    grouped = log_probs[:, :, :end].unflatten(2, (whole, size))
    maxima = grouped.amax(3).add_(scores[:, :, None])
    best = maxima.flatten(1).topk(wanted, sorted=False).indices  # of the groups of all beams
    beam = best // whole
    values = _groups_at(grouped, best, beam).add_(scores.gather(1, beam)[:, :, None]).flatten(1)
    if end < v:
        values = torch.cat([values, (log_probs[:, :, end:] + scores[:, :, None]).flatten(1)], 1)
    top, where = values.topk(wanted)
    if not bool((top[:, 1:] < top[:, :-1]).all()):  # equal values, or NaN
        return best_of_log_probs_reference(log_probs, scores, k)
    where = where[:, :k]
    if end == v:
        return top[:, :k], best.gather(1, where // size).mul_(size).add_(where % size)
    slot = where.clamp(max=wanted * size - 1)
    first = best * size + beam * (v - end)  # the index of a group's first token
    beyond = where - wanted * size
    in_rest = beyond // (v - end) * v + end + beyond % (v - end)
    return top[:, :k], torch.where(beyond < 0, first.gather(1, slot // size) + slot % size, in_rest)


def _groups_at(grouped: Tensor, which: Tensor, beam: Tensor) -> Tensor:
    """grouped (B, M, G, W) at some (B, K) of the M * G groups of each sentence, (B, K, W); beam: which // G."""
    b, m, count, width = grouped.shape
    sentence = torch.arange(b, device=grouped.device, dtype=torch.int64)[:, None]
    if not grouped.is_contiguous():
        return grouped[sentence, beam, which % count]
    rows = (sentence.mul_(m * count) + which).flatten()
    return grouped.view(-1, width).index_select(0, rows).view(*which.shape, width)


@functools.cache
def _group_size(vocabulary: int, near: int) -> int:
    """A divisor of the vocabulary from half to twice `near`, the nearest one, or `near` itself where there is none.

    A multiple of four: maxima of 100 tokens take a third of the time that those of 125 take.
    """
    sizes = range(-(-near // 8) * 4, 2 * near + 1, 4)
    return min(
        (size for size in sizes if vocabulary % size == 0),
        key=lambda size: abs(size - near),
        default=near,
    )
