"""The k best continuations of each sentence, over its beams and the vocabulary.

The kernels read the logits once. Programs of the first take a row and a part of the vocabulary each: they keep the k
best of it and the maximum and sum of exponentials that the normaliser of the row is made of. The second kernel, a
program per sentence, merges the parts: only the winners are ever normalised, no log-probability is written. Sparse
edits ride along: banned tokens take no part in the choice but do in the normaliser; changed ones enter the merge with
their new value.

A candidate is one int64: the value's bits in an order that integers have too, then the token, the lowest first. So a
reduction ranks values and settles ties at once.

Source: Hoang et al. 2018 (Amun), section 2.2: bias, softmax and k-best fused; Wang et al. 2021 (LightSeq), section 2.2
(hierarchical auto-regressive search): maxima of groups first, then an exact ranking of the survivors.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fastgen.ops.dispatch import cdiv, constexpr, jit, launch, power_of_two, tl, use_triton
from fastgen.ops.token_mask import add_tokens_, empty_mask, unpacked

GROUP = 128
"""Tokens per group on a CPU: at V = 5,000 to 50,000 maxima of 40 to 400 groups are ranked instead of the vocabulary."""

SMALL = 256 * 1024
"""Below this many log-probabilities in all, and a quarter of it per sentence, one `torch.topk` is faster on a CPU."""

PART = 4096
"""Tokens per program of the first kernel: enough programs for the device from a few rows on, all in registers."""

MOST = 16 * 1024
"""Candidates per sentence that the second kernel holds at most; with more the reference runs."""


class Changes(NamedTuple):
    """Tokens whose log-probability p becomes p * factor + offset: a repetition penalty, a bias of some tokens.

    tokens: (R, N) int64, different ones in each row; those outside the vocabulary stand for none.
    factors, offsets: (R, N) fp32.
    """

    tokens: Tensor
    factors: Tensor
    offsets: Tensor


class KBest(NamedTuple):
    """values (B, k) descending, indices (B, k) int64 = beam * V + token, normalisers (B, M) or None."""

    values: Tensor
    indices: Tensor
    normalisers: Tensor | None


def kbest_reference(
    logits: Tensor,
    scores: Tensor,
    k: int,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    banned: Tensor | None = None,
    changes: Changes | None = None,
    forced: Tensor | None = None,
    normalisers: bool = False,
) -> KBest:
    """Return the k best of log_softmax((logits + bias) / temperature), edited, plus scores over beams x vocabulary.

    Args:
        logits: (B, M, V) floating point, the last dimension contiguous. Not modified.
        scores: (B, M) fp32, or fp64 with logits of that type: the running score of each beam, natural log.
        k: 1 <= k <= M * V.
        bias: (V,), added to the logits of every row.
        banned: (B * M, ceil(V / 32)) int32, a set of tokens for each row (`ops.token_mask`) that become -inf.
        changes: tokens that get another log-probability.
        forced: (B * M,) int64: the token that alone is left, with log-probability 0, or a negative number for none.
        normalisers: return log(sum(exp((logits + bias) / temperature))) of every row too.
    """
    log_probs, sums = _log_probs(logits, scores.dtype, bias, temperature, banned, changes, forced, normalisers)
    return KBest(*best_of_log_probs_reference(log_probs, scores, k), sums)


def _log_probs(
    logits: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None,
    temperature: float,
    banned: Tensor | None,
    changes: Changes | None,
    forced: Tensor | None,
    normalisers: bool,
) -> tuple[Tensor, Tensor | None]:
    """The edited log-probabilities (B, M, V), and the normalisers (B, M) where they are asked for."""
    b, m, v = logits.shape
    rows = logits.flatten(0, 1).to(dtype)
    if bias is not None:
        rows = rows + bias.to(dtype)
    if temperature != 1.0:
        rows = rows / temperature
    log_probs = torch.log_softmax(rows, -1)
    if changes is not None:
        inside = (changes.tokens >= 0) & (changes.tokens < v)
        tokens = torch.where(inside, changes.tokens, v)
        padded = torch.nn.functional.pad(log_probs, (0, 1))
        log_probs = padded.scatter(1, tokens, padded.gather(1, tokens) * changes.factors + changes.offsets)[:, :v]
    if banned is not None:
        log_probs = log_probs.masked_fill(unpacked(banned, v), -torch.inf)
    if forced is not None:
        one = torch.full_like(log_probs, -torch.inf).scatter_(1, forced.clamp(min=0)[:, None], 0.0)
        log_probs = torch.where((forced >= 0)[:, None], one, log_probs)
    return log_probs.view(b, m, v), torch.logsumexp(rows, -1).view(b, m) if normalisers else None


def kbest(
    logits: Tensor,
    scores: Tensor,
    k: int,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    banned: Tensor | None = None,
    changes: Changes | None = None,
    forced: Tensor | None = None,
    normalisers: bool = False,
) -> KBest:
    """Return the k best continuations of each sentence; arguments as `kbest_reference`.

    Ties: the kernels put the lowest index first among equal logits of a row and equal values of a sentence; the
    reference has the order of `torch.topk`. Candidates of -inf have any index.
    Numerics: fp32 accumulation. Traffic: one read of the logits, and of a thirty-second as much for `banned`.

    Raises:
        ValueError: on shapes, dtypes or a k that do not fit; the message holds them.
    """
    if logits.dim() != 3 or scores.shape != logits.shape[:2]:
        raise ValueError(f"logits {tuple(logits.shape)} must be (B, M, V) and scores {tuple(scores.shape)} (B, M)")
    b, m, v = logits.shape
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
            raise ValueError(f"{name} {tuple(tensor.shape)} must be {shape} for logits {tuple(logits.shape)}")
    if changes is not None and any(t.dim() != 2 or t.shape != changes.tokens.shape for t in changes):
        raise ValueError(f"changes {[tuple(t.shape) for t in changes]} must be (R, N) each")
    able = lambda: _covered(logits, scores, k, changes)  # noqa: E731
    if use_triton("kbest", able, logits, scores, bias, banned, forced):
        best = _kbest_triton(logits, scores, k, bias, temperature, banned, changes, forced)
        return best if normalisers else best._replace(normalisers=None)
    log_probs, sums = _log_probs(logits, scores.dtype, bias, temperature, banned, changes, forced, normalisers)
    return KBest(*_ranked_in_groups(log_probs, scores, k), sums)


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
    able = lambda: 1 <= k <= m * v and _covered(log_probs, scores, k)  # noqa: E731
    if use_triton("kbest", able, log_probs, scores):
        return _kbest_triton(log_probs, scores, k, normalised=True)[:2]
    return _ranked_in_groups(log_probs, scores, k)


def _ranked_in_groups(log_probs: Tensor, scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Rank log-probabilities in torch.

    On a CPU the rows are not sorted: the maxima of groups of `GROUP` tokens are ranked, the k groups that can hold a
    winner are gathered, and their tokens ranked exactly. Rounding of the sum is monotone, so that the maximum of a
    group keeps its rank after the score is added. When any two of the k + 1 best values are equal, or one is NaN,
    `torch.topk` decides.
    """
    b, m, v = log_probs.shape
    whole = v // GROUP  # full groups; the rest of the vocabulary is ranked in full
    if log_probs.device.type != "cpu" or whole * m < 4 * k or max(log_probs.numel(), 4 * m * v) < SMALL:
        return best_of_log_probs_reference(log_probs, scores, k)
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
        return best_of_log_probs_reference(log_probs, scores, k)
    where = where[:, :k]
    from_group = where < wanted * GROUP
    slot = where.clamp(max=wanted * GROUP - 1)
    in_group = first.gather(1, slot // GROUP) + slot % GROUP
    in_tail = tail_first.flatten()[(where - wanted * GROUP).clamp(min=0)] if tail_first.numel() else in_group
    return top[:, :k], torch.where(from_group, in_group, in_tail)


def best_of_log_probs_reference(log_probs: Tensor, scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return what `best_of_log_probs` does, by one `torch.topk`."""
    return torch.topk((log_probs + scores[:, :, None]).flatten(1), k)


def argmax(logits: Tensor) -> Tensor:
    """Return the token (R,) int64 with the highest logit of each row of logits (R, V); ties: the lowest.

    No probability is computed (Hoang et al. 2018, algorithm 5). Traffic: one read of the logits.
    """
    if not use_triton("argmax", lambda: logits.dtype != torch.float64 and logits.stride(-1) == 1, logits):
        return torch.argmax(logits, -1)
    rows, v = logits.shape
    parts = cdiv(v, PART)
    keys = torch.empty(rows, parts, dtype=torch.int64, device=logits.device)
    launch(
        _part_kernel, (rows, parts), logits, logits, logits, keys, keys, keys, v, logits.stride(0), 0, 1.0, KEPT=1,
        BLOCK=min(PART, power_of_two(v)), BIAS=False, BANNED=False, SUMMED=False,
    )  # fmt: skip
    return 0x7FFFFFFF - (keys.amax(1) & 0xFFFFFFFF)


def _part(k: int) -> int:
    """Tokens per program of the first kernel."""
    return PART if k <= 32 else 2 * PART


def _covered(logits: Tensor, scores: Tensor, k: int, changes: Changes | None = None) -> bool:
    """Whether the kernels cover the case."""
    _, m, v = logits.shape
    candidates = cdiv(v, _part(k)) * min(k, _part(k))
    changed = 0 if changes is None else changes.tokens.shape[1]
    return (
        logits.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and scores.dtype == torch.float32
        and logits.stride(2) == 1
        and power_of_two(m) * power_of_two(max(candidates, changed)) <= MOST
    )


def _kbest_triton(
    logits: Tensor,
    scores: Tensor,
    k: int,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    banned: Tensor | None = None,
    changes: Changes | None = None,
    forced: Tensor | None = None,
    normalised: bool = False,
) -> KBest:
    """Run both kernels; normalised: `logits` are log-probabilities already."""
    b, m, v = logits.shape
    rows, device = logits.flatten(0, 1), logits.device
    part = _part(k)
    parts, kept, block = cdiv(v, part), min(k, part), min(part, power_of_two(v))
    taken_out = banned
    if changes is not None:  # they take no part in the choice of the parts; the merge sees them
        changed = add_tokens_(empty_mask(b * m, v, device), changes.tokens, v)
        taken_out = changed if banned is None else banned | changed
    keys = torch.empty(b * m, parts, kept, dtype=torch.int64, device=device)
    highest, sums = torch.empty(2, b * m, parts, device=device)
    launch(
        _part_kernel, (b * m, parts), rows, rows if bias is None else bias, rows if taken_out is None else taken_out,
        keys, highest, sums, v, rows.stride(0), 0 if taken_out is None else taken_out.stride(0), 1.0 / temperature,
        KEPT=kept, BLOCK=block, BIAS=bias is not None, BANNED=taken_out is not None, SUMMED=not normalised,
    )  # fmt: skip
    values = torch.empty(b, k, device=device)
    indices = torch.empty(b, k, dtype=torch.int64, device=device)
    normalisers = torch.empty(b, m, device=device)
    count = 0 if changes is None else changes.tokens.shape[1]
    given = changes if changes is not None and count else Changes(indices, values, values)
    tile = power_of_two(m) * power_of_two(max(parts * kept, count))
    launch(
        _merge_kernel, (b,), rows, rows if bias is None else bias, scores.contiguous(), keys, highest, sums,
        given.tokens.contiguous(), given.factors.contiguous(), given.offsets.contiguous(),
        indices if forced is None else forced, rows if banned is None else banned, values, indices, normalisers,
        m, v, parts, count, rows.stride(0), 0 if banned is None else banned.stride(0), 1.0 / temperature, K=k,
        KEPT=kept, BEAMS=power_of_two(m), PARTS=power_of_two(parts), CANDIDATES=power_of_two(parts * kept),
        CHANGES=power_of_two(count) if count else 0, BIAS=bias is not None, BANNED=banned is not None,
        FORCED=forced is not None, SUMMED=not normalised,
        num_warps=4 if tile <= 1024 else 8 if tile <= 4096 else 16,
    )  # fmt: skip
    return KBest(values, indices, None if normalised else normalisers)


@jit
def _key(value, index):
    """(value, index) as an int64 that sorts by the value, then by the lowest index; NaN comes first."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # + 0: both zeros are equal
    bits = tl.where(value != value, 0x7FC00000, bits)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@jit
def _value_of(key):
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def _index_of(key):
    return 0x7FFFFFFF - (key & 0xFFFFFFFF).to(tl.int32)


@jit
def _part_kernel(
    logits_ptr, bias_ptr, banned_ptr, keys_ptr, highest_ptr, sum_ptr, vocabulary, row_stride, banned_stride, sharpness,
    KEPT: constexpr, BLOCK: constexpr, BIAS: constexpr, BANNED: constexpr, SUMMED: constexpr,
):  # fmt: skip
    """The k best of one part of one row, and what its normaliser needs."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    value = tl.load(logits_ptr + row * row_stride + token, mask=inside, other=float("-inf")).to(tl.float32)
    if BIAS:
        value += tl.load(bias_ptr + token, mask=inside, other=0.0).to(tl.float32)
    value *= sharpness
    at = row * tl.num_programs(1) + part
    if SUMMED:
        highest = tl.max(value, 0)
        tl.store(highest_ptr + at, highest)
        tl.store(sum_ptr + at, tl.sum(tl.exp(value - tl.where(highest == float("-inf"), 0.0, highest)), 0))
    if BANNED:
        words = tl.load(banned_ptr + row * banned_stride + token // 32, mask=inside, other=0)
        value = tl.where((words >> (token % 32)) & 1 != 0, float("-inf"), value)
    lowest = tl.full([BLOCK], -0x7FFFFFFFFFFFFFFF, tl.int64)
    key = tl.where(inside, _key(value, token), lowest)
    for i in range(KEPT):
        best = tl.max(key, 0)
        tl.store(keys_ptr + at * KEPT + i, best)
        key = tl.where(key == best, lowest, key)


@jit
def _merge_kernel(
    logits_ptr, bias_ptr, scores_ptr, keys_ptr, highest_ptr, sum_ptr, tokens_ptr, factors_ptr, offsets_ptr, forced_ptr,
    banned_ptr, values_ptr, indices_ptr, normalisers_ptr, beams, vocabulary, parts, changes, row_stride, banned_stride,
    sharpness, K: constexpr, KEPT: constexpr, BEAMS: constexpr, PARTS: constexpr, CANDIDATES: constexpr,
    CHANGES: constexpr, BIAS: constexpr, BANNED: constexpr, FORCED: constexpr, SUMMED: constexpr,
):  # fmt: skip
    """The k best of one sentence, of the parts of its rows and of the changed tokens."""
    sentence = tl.program_id(0).to(tl.int64)
    beam = tl.arange(0, BEAMS)
    row, is_beam = sentence * beams + beam, beam < beams
    part = tl.arange(0, PARTS)
    at = row[:, None] * parts + part[None, :]
    there = is_beam[:, None] & (part < parts)[None, :]
    top = tl.zeros([BEAMS], tl.float32)
    rest = tl.zeros([BEAMS], tl.float32)
    if SUMMED:
        highest = tl.load(highest_ptr + at, mask=there, other=float("-inf"))
        sums = tl.load(sum_ptr + at, mask=there, other=0.0)
        top = tl.max(highest, 1)
        top = tl.where(top == float("-inf"), 0.0, top)
        rest = tl.log(tl.where(is_beam, tl.sum(sums * tl.exp(highest - top[:, None]), 1), 1.0))
        tl.store(normalisers_ptr + row, top + rest, mask=is_beam)
    score = tl.load(scores_ptr + row, mask=is_beam, other=0.0)
    lowest = tl.full([BEAMS, CANDIDATES], -0x7FFFFFFFFFFFFFFF, tl.int64)
    candidate = tl.arange(0, CANDIDATES)
    there = is_beam[:, None] & (candidate < parts * KEPT)[None, :]
    kept = tl.load(keys_ptr + row[:, None] * (parts * KEPT) + candidate[None, :], mask=there, other=0)
    there = there & (kept != -0x7FFFFFFFFFFFFFFF)  # a part with fewer tokens than are kept
    token = _index_of(kept)
    value = (_value_of(kept) - top[:, None]) - rest[:, None]
    forced = tl.full([BEAMS], -1, tl.int64)
    changed = lowest
    if FORCED:
        forced = tl.load(forced_ptr + row, mask=is_beam, other=-1)
        value = tl.where((forced >= 0)[:, None], float("-inf"), value)
    key = tl.where(there, _key(value + score[:, None], beam[:, None] * vocabulary + token), lowest)
    best_forced = tl.full([BEAMS], -0x7FFFFFFFFFFFFFFF, tl.int64)
    if FORCED:
        best_forced = tl.where(forced >= 0, _key(score, beam * vocabulary + forced.to(tl.int32)), best_forced)
    if CHANGES:
        change = tl.arange(0, CHANGES)
        given = is_beam[:, None] & (change < changes)[None, :]
        where = row[:, None] * changes + change[None, :]
        tokens = tl.load(tokens_ptr + where, mask=given, other=-1)
        given = given & (tokens >= 0) & (tokens < vocabulary)
        new = tl.load(logits_ptr + row[:, None] * row_stride + tokens, mask=given, other=0.0).to(tl.float32)
        if BIAS:
            new += tl.load(bias_ptr + tokens, mask=given, other=0.0).to(tl.float32)
        new = (new * sharpness - top[:, None]) - rest[:, None]
        new = new * tl.load(factors_ptr + where, mask=given, other=1.0)
        new += tl.load(offsets_ptr + where, mask=given, other=0.0)
        if BANNED:
            words = tl.load(banned_ptr + row[:, None] * banned_stride + tokens // 32, mask=given, other=0)
            new = tl.where((words >> (tokens % 32).to(tl.int32)) & 1 != 0, float("-inf"), new)
        if FORCED:
            new = tl.where((forced >= 0)[:, None], float("-inf"), new)
        changed = _key(new + score[:, None], beam[:, None] * vocabulary + tokens.to(tl.int32))
        changed = tl.where(given & (new > float("-inf")), changed, -0x7FFFFFFFFFFFFFFF)
    for i in range(K):
        best = tl.maximum(tl.max(tl.max(key, 1), 0), tl.max(best_forced, 0))
        if CHANGES:
            best = tl.maximum(best, tl.max(tl.max(changed, 1), 0))
            changed = tl.where(changed == best, -0x7FFFFFFFFFFFFFFF, changed)
        key = tl.where(key == best, lowest, key)
        best_forced = tl.where(best_forced == best, -0x7FFFFFFFFFFFFFFF, best_forced)
        tl.store(values_ptr + sentence * K + i, _value_of(best))
        tl.store(indices_ptr + sentence * K + i, _index_of(best).to(tl.int64))
