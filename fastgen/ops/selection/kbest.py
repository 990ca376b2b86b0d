"""The k best continuations of each sentence, over its beams and the vocabulary.

On a GPU two kernels read the logits once (`ops.selection.kbest_kernels`). They normalise only the
winners and write no log-probabilities.

On a CPU the torch path writes log-probabilities, because the pass over memory that this costs is
cheaper than the exponentials. It ranks maxima of groups of tokens instead of the tokens. C writes
no log-probabilities either, unless the call does more than ban tokens.

Source: Hoang et al. 2018 (Amun), section 2.2: bias, softmax and k-best fused; Wang et al. 2021
(LightSeq), section 2.2 (hierarchical auto-regressive search): maxima of groups first, then an exact
ranking of the survivors.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastgen.ops import native
from fastgen.ops.dispatch import (
    MOST_COUNTED,
    TRITON,
    cdiv,
    in_c,
    in_memory,
    plain,
    runs_kernels,
    select_backend,
    use_triton,
)
from fastgen.ops.native import selection as native_selection
from fastgen.ops.selection import kbest_kernels as kernels
from fastgen.ops.selection.log_softmax import log_softmax, log_softmax_reference
from fastgen.ops.selection.token_mask import unpacked

GROUP = 128
"""Approximate number of tokens per group on a CPU.

At V = 5,000 to 50,000 this ranks the maxima of 40 to 400 groups instead of the tokens.
"""

SMALL = 256 * 1024
"""Upper limit of log-probabilities for which one `torch.topk` is faster on a CPU.

It is faster below this number in all, if there are also fewer than a quarter of it per sentence.
"""


MOST_IN_C = 64
"""Largest number of winners that C ranks; it keeps them in a sorted list."""


class SparseUpdate(NamedTuple):
    """Tokens whose log-probability p becomes p * factor + offset.

    Examples are a repetition penalty and a bias of some tokens.

    Attributes:
        tokens: (R, N) int64, distinct within a row; ids outside the vocabulary are padding.
        factors: (R, N) fp32.
        offsets: (R, N) fp32.
    """

    tokens: Tensor
    factors: Tensor
    offsets: Tensor


class LogitsUpdates(NamedTuple):
    """Sparse updates of the log-probabilities of R = B * M rows, applied in this order.

    Attributes:
        changes: tokens whose log-probability is replaced.
        banned: (R, ceil(V / 32)) int32, a token mask (`ops.selection.token_mask`) of the tokens
            that become -inf.
        forced: (R,) int64, the only token that remains, with log-probability 0; negative for none.
    """

    changes: SparseUpdate | None = None
    banned: Tensor | None = None
    forced: Tensor | None = None


class KBest(NamedTuple):
    """The k best continuations of each sentence.

    Attributes:
        values: (B, k), descending.
        indices: (B, k) int64, beam * V + token.
        normalisers: (B, M), or None if not requested.
    """

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
    """Return the k best continuations of each sentence.

    Top-k of log_softmax((logits + bias) / temperature), after the updates, plus scores, over beams
    x vocabulary.

    Args:
        logits: (B, M, V) floating point, the last dimension contiguous. Not modified.
        scores: (B, M) fp32, or fp64 with fp64 logits: the running score of each beam, natural log.
        k: 1 <= k <= M * V.
        updates: updates of the log-probabilities.
        bias: (V,), added to the logits of every row.
        temperature: > 0, divides the logits.
        normalisers: also return log(sum(exp((logits + bias) / temperature))) of every row.
        without_nan: replace NaN log-probabilities by -inf before the updates.
    """
    args = logits, scores.dtype, updates, bias, temperature, normalisers, without_nan
    log_probs, sums = _log_probs(*args, normalised=log_softmax_reference)
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
    """Return the updated log-probabilities (B, M, V), and the normalisers (B, M) if requested."""
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
    """Return the k best continuations of each sentence.

    Args:
        logits: as in `kbest_reference`, like the arguments up to `without_nan`.
        scratch: memory for the log-probabilities, of the logits' shape and the scores' dtype,
            contiguous. Its contents are overwritten. On a CPU, fresh memory costs more than writing
            to it. Kernels need none.

    Ties: the kernels put the lowest index first among equal logits of a row and equal values of a
    sentence. The reference has the order of `torch.topk`. Candidates of -inf have arbitrary
    indices.
    Numerics: fp32 accumulation. Traffic: one read of the logits, and of a thirty-second as much for
    bans.

    Raises:
        ValueError: the shapes, dtypes or k do not fit; the message holds them.
    """
    if logits.dim() != 3 or scores.shape != logits.shape[:2]:
        raise ValueError(
            f"logits {tuple(logits.shape)} must be (B, M, V) and scores {tuple(scores.shape)} "
            "(B, M)"
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
    supported = lambda: covered(  # noqa: E731
        logits, scores, k, 0 if changes is None else changes.tokens.shape[1]
    )
    able_in_c = lambda: (  # noqa: E731
        _covered_in_c(logits, scores, k)
        and (banned is None or in_memory(banned, dtype=torch.int32))
    )
    backend = select_backend("kbest", supported, able_in_c, logits, scores, bias, banned, forced)
    if backend is TRITON:
        best = kernels.run(
            logits, scores, k, bias, temperature, changes, banned, forced, without_nan=without_nan
        )
        return KBest(best[0], best[1], best[2] if normalisers else None)
    if (
        in_c(backend)
        and changes is forced is bias is None
        and temperature == 1.0
        and not normalisers
    ):
        found = native_selection.k_best(backend, logits, scores, k, normalised=False, banned=banned)
        if found is not None:
            return KBest(*found, None)
    log_probs, sums = _log_probs(
        logits, scores.dtype, updates, bias, temperature, normalisers, without_nan, scratch
    )
    return KBest(*_ranked(backend, log_probs, scores, k), sums)


def fused(logits: Tensor, k: int, bans_alone: bool) -> bool:
    """Return whether `kbest` ranks logits (B, M, V) without writing log-probabilities.

    Args:
        bans_alone: whether the updates, if any, only ban tokens.
    """
    if runs_kernels(logits):
        return True
    return bans_alone and native.library() is not None and _covered_in_c(logits, logits, k)


def best_of_log_probs(log_probs: Tensor, scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k best of log_probs (B, M, V) + scores (B, M).

    On a CPU, equal values have the order of `torch.topk`; elsewhere they have that of `kbest`.

    Returns:
        values (B, k), descending; indices (B, k) int64 = beam * V + token.

    Raises:
        ValueError: a wrong rank; the message holds the shapes.
        RuntimeError: k is larger than M * V; raised by `torch.topk`.
    """
    if log_probs.dim() != 3 or scores.shape != log_probs.shape[:2]:
        raise ValueError(
            f"log_probs {tuple(log_probs.shape)} must be (B, M, V) and scores "
            f"{tuple(scores.shape)} (B, M)"
        )
    _, m, v = log_probs.shape
    supported = lambda: 1 <= k <= m * v and covered(log_probs, scores, k)  # noqa: E731
    backend = select_backend(
        "kbest", supported, lambda: _covered_in_c(log_probs, scores, k), log_probs, scores
    )
    if backend is TRITON:
        return kernels.run(log_probs, scores, k, normalised=True)[:2]
    return _ranked(backend, log_probs, scores, k)


def best_of_log_probs_reference(log_probs: Tensor, scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the result of `best_of_log_probs`, by one `torch.topk`."""
    return torch.topk((log_probs + scores[:, :, None]).flatten(1), k)


def argmax(logits: Tensor) -> Tensor:
    """Return the token (R,) int64 with the highest logit of each row of logits (R, V).

    Of equal logits the lowest token wins; in a row with NaN, the first NaN. No probability is
    computed (Hoang et al. 2018, algorithm 5). Traffic: one read of the logits.
    """
    supported = lambda: (  # noqa: E731
        logits.dtype != torch.float64 and logits.stride(-1) == 1 and len(logits) <= MOST_COUNTED
    )
    if use_triton("argmax", supported, logits):
        return kernels.argmax(logits)
    if logits.device.type != "cpu":
        return torch.argmax(logits, -1)
    if logits.numel() >= SMALL and logits.shape[1] >= 2 * GROUP:
        return _argmax_in_groups(logits)
    return logits.max(-1).indices  # equals torch.argmax, and is two to three times as fast on a CPU


def _argmax_in_groups(logits: Tensor) -> Tensor:
    """Find the group with the highest maximum, then read that group again.

    On a CPU only `amax` without indices is vectorised.
    """
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


def covered(logits: Tensor, scores: Tensor, k: int, changed: int = 0) -> bool:
    """Return whether the kernels cover these shapes and dtypes.

    Args:
        logits: as in `kbest`, like scores and k.
        changed: N of a sparse update.
    """
    return (
        logits.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and scores.dtype == torch.float32
        and logits.stride(2) == 1
        and kernels.group_size(logits.shape[1], logits.shape[2], k, changed) is not None
    )


def _covered_in_c(logits: Tensor, scores: Tensor, k: int) -> bool:
    """Whether C can rank the candidates of these logits."""
    return (
        plain(logits, scores)
        and logits.stride(2) == 1
        and 1 <= k <= MOST_IN_C
        and k < logits.shape[2]
    )


def _ranked(
    by: "native.Library | str", log_probs: Tensor, scores: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """Rank log-probabilities in C if `by` is a library, else in torch; ties by `torch.topk`."""
    if in_c(by) and plain(log_probs):  # `_covered_in_c` did not look at the bias
        best = native_selection.k_best(by, log_probs, scores, k, normalised=True)
        return best or best_of_log_probs_reference(log_probs, scores, k)
    return _ranked_in_groups(log_probs, scores, k)


def _ranked_in_groups(log_probs: Tensor, scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Rank log-probabilities in torch.

    On a CPU this does not sort the rows. It ranks the maxima of groups of about `GROUP` tokens,
    gathers the k + 1 best groups, and ranks their tokens exactly. Rounding of the sum is monotone,
    so the maximum of a group keeps its rank after the score is added. If any two of the k + 1 best
    values are equal, or one is NaN, `torch.topk` decides.
    """
    _, m, v = log_probs.shape
    size = _group_size(v, GROUP)
    groups = v // size  # full groups; the remaining tokens, if any, are all ranked
    if (
        log_probs.device.type != "cpu"
        or groups * m < 4 * k
        or max(log_probs.numel(), 4 * m * v) < SMALL
    ):
        return best_of_log_probs_reference(log_probs, scores, k)
    count, end = k + 1, groups * size
    grouped = log_probs[:, :, :end].unflatten(2, (groups, size))
    maxima = grouped.amax(3).add_(scores[:, :, None])
    best = maxima.flatten(1).topk(count, sorted=False).indices  # of the groups of all beams
    beam = best // groups
    values = _groups_at(grouped, best, beam).add_(scores.gather(1, beam)[:, :, None]).flatten(1)
    if end < v:
        values = torch.cat([values, (log_probs[:, :, end:] + scores[:, :, None]).flatten(1)], 1)
    top, position = values.topk(count)
    if not bool((top[:, 1:] < top[:, :-1]).all()):  # equal values, or NaN
        return best_of_log_probs_reference(log_probs, scores, k)
    position = position[:, :k]
    if end == v:
        return top[:, :k], best.gather(1, position // size).mul_(size).add_(position % size)
    slot = position.clamp(max=count * size - 1)
    first = best * size + beam * (v - end)  # the index of a group's first token
    rest = position - count * size
    in_rest = rest // (v - end) * v + end + rest % (v - end)
    return top[:, :k], torch.where(rest < 0, first.gather(1, slot // size) + slot % size, in_rest)


def _groups_at(grouped: Tensor, which: Tensor, beam: Tensor) -> Tensor:
    """Gather groups of each sentence.

    Args:
        grouped: (B, M, G, W).
        which: (B, K), indices into the M * G groups of each sentence.
        beam: which // G.

    Returns:
        (B, K, W).
    """
    b, m, count, width = grouped.shape
    sentence = torch.arange(b, device=grouped.device, dtype=torch.int64)[:, None]
    if not grouped.is_contiguous():
        return grouped[sentence, beam, which % count]
    rows = (sentence.mul_(m * count) + which).flatten()
    return grouped.view(-1, width).index_select(0, rows).view(*which.shape, width)


@functools.cache
def _group_size(vocabulary: int, near: int) -> int:
    """Return the divisor of the vocabulary nearest to `near`, from half to twice as large.

    Only multiples of four count: maxima of 100 tokens take a third of the time of 125 tokens.
    Without such a divisor, the result is `near` itself.
    """
    sizes = range(-(-near // 8) * 4, 2 * near + 1, 4)
    return min(
        (size for size in sizes if vocabulary % size == 0),
        key=lambda size: abs(size - near),
        default=near,
    )
