"""The kernels of `ops.selection.kbest`: two strategies that read the logits once.

Both normalise only the winners.

*Groups* (hierarchical auto-regressive search). Each program of the first kernel takes a row and a
part of the vocabulary. It writes the highest logit of every group of 32 or more tokens, and the
maximum and the sum of exponentials for the row's normaliser. The second kernel, one program per
sentence, picks the k groups with the highest maxima and ranks their tokens. This is exact: a token
among the k best has fewer than k groups ranked before its own.

*Peeling*. The first kernel finds the k best of each part itself, by taking the maximum of the part
k times; the second kernel merges them.

Predicted from instruction counts, not yet measured, for an H200 and 128 rows of 50,264 fp32 logits
(25.7 MB, 6.4 us at 4 TB/s): one maximum over a part of 4,096 tokens costs some 200 instructions of
each of its 4 warps, 1.4 us for the whole table. Peeling therefore adds 1.4 us for each of the k.
Group maxima add 2.2 us once. The choice of groups, over 8,192 of them by one program per sentence,
adds 0.3 us for each of the k. Hence k up to `PEELED` is peeled, and groups are used beyond.

The kernels apply sparse updates too. Banned tokens are excluded from the choice but count in the
normaliser. Changed tokens enter the second kernel with their new value. A candidate is one int64:
the value's bits, mapped to an order that integers share, then the inverted token. One reduction
therefore ranks values and puts the lowest token first among ties.

Sources: Wang et al. 2021 (LightSeq), section 2.2 (groups); Hoang et al. 2018 (Amun), section 2.2
(fusion).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fastgen.ops.dispatch import cdiv, constexpr, counters, jit, launch, power_of_two, tl
from fastgen.ops.selection.token_mask import add_tokens_, empty_mask

PART = 4096
"""Tokens per program of the first kernel, all in registers.

With few rows a program takes fewer tokens, so that there are enough programs.
"""

PROGRAMS = 264
"""Sufficient number of programs of the first kernel: two per multiprocessor of an H200."""

MOST = 16 * 1024
"""Largest number of candidates of each kind that a program of the second kernel holds."""

PEELED = 2
"""Largest k for which peeling is faster."""

Changed = tuple[Tensor, Tensor, Tensor]
"""Tokens (R, N) int64, their factors and offsets (R, N) fp32."""


class Merge(NamedTuple):
    """The second launch of k-best: arguments of `merge` and its results.

    Attributes:
        pointers: tensors.
        counts: numbers that Triton must not specialise.
        strides: strides of rows, and the inverse of the temperature.
        constants: constants by name, and the number of warps.
        values: (B, k) fp32.
        indices: (B, k) int64.
        normalisers: (B, M) fp32.
    """

    pointers: tuple[Tensor, ...]
    counts: tuple[int, ...]
    strides: tuple[int | float, ...]
    constants: dict[str, int]
    values: Tensor
    indices: Tensor
    normalisers: Tensor


def group_size(beams: int, vocabulary: int, k: int, changed: int = 0) -> int | None:
    """Return the tokens per group for this shape.

    Returns:
        0 for peeling; None if no kernel covers the shape.
    """
    if power_of_two(beams) * power_of_two(changed or 1) > MOST:
        return None
    part = _peeled_part(k)
    peelable = power_of_two(beams) * power_of_two(cdiv(vocabulary, part) * min(k, part)) <= MOST
    if peelable and k <= PEELED:
        return 0
    for group in (32, 64, 128, 256):
        if (
            power_of_two(beams) * power_of_two(cdiv(vocabulary, group)) <= MOST
            and power_of_two(k) * max(group, power_of_two(beams)) <= MOST
        ):
            return group
    return 0 if peelable else None


def _peeled_part(k: int) -> int:
    return PART if k <= 32 else 2 * PART


def run(
    logits: Tensor,
    scores: Tensor,
    k: int,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    changes: Changed | None = None,
    banned: Tensor | None = None,
    forced: Tensor | None = None,
    normalised: bool = False,
    without_nan: bool = False,
    group: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return values, indices and normalisers as `kbest` does; further arguments as there.

    Args:
        changes: updates of single tokens.
        banned: a token mask.
        forced: the forced token of each row, or a negative number.
        normalised: whether `logits` are log-probabilities already.
        without_nan: whether NaN becomes -inf.
        group: a result of `group_size`; None to compute it.

    Returns:
        values (B, k) fp32, indices (B, k) int64, normalisers (B, M) fp32 or None if `normalised`.
    """
    merging = first_launch(
        logits, scores, k, bias, temperature, changes, banned, forced, normalised, without_nan,
        group,
    )  # fmt: skip
    pointers, counts, strides, constants, values, indices, normalisers = merging
    launch(_merge_kernel, (len(values),), *pointers, *counts, *strides, **constants)
    return values, indices, None if normalised else normalisers


def first_launch(
    logits: Tensor,
    scores: Tensor,
    k: int,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    changes: Changed | None = None,
    banned: Tensor | None = None,
    forced: Tensor | None = None,
    normalised: bool = False,
    without_nan: bool = False,
    group: int | None = None,
) -> Merge:
    """Run the first kernel and return the arguments of the second; arguments as `run`."""
    b, m, v = logits.shape
    count = 0 if changes is None else changes[0].shape[1]
    if group is None:
        group = group_size(m, v, k, count)
        assert group is not None, "a shape that no kernel covers"
    rows, device = logits.flatten(0, 1), logits.device
    excluded = banned
    if changes is not None:  # the first kernel skips changed tokens; the second adds them
        changed = add_tokens_(empty_mask(b * m, v, device), changes[0], v)
        excluded = changed if banned is None else banned | changed
    block = min(PART if group else _peeled_part(k), max(32, power_of_two(v)))
    if group:
        block = max(block, group)
        while b * m * cdiv(v, block) < PROGRAMS and block > max(group, 1024):
            block //= 2
    parts = cdiv(v, block)
    highest, sums = torch.empty(2, b * m, parts, dtype=torch.float32, device=device)
    inputs = rows, rows if bias is None else bias, rows if excluded is None else excluded
    strides = rows.stride(0), 0 if excluded is None else excluded.stride(0)
    flags = {"BIAS": bias is not None, "BANNED": excluded is not None, "SUMMED": not normalised}
    if group:
        kept, groups = 0, cdiv(v, group)
        found = torch.empty(b * m, groups, dtype=torch.int32, device=device)
        launch(
            _group_kernel, (b * m, parts), *inputs, found, highest, sums, v, groups, *strides,
            1.0 / temperature, GROUP=group, BLOCK=block, **flags,
        )  # fmt: skip
    else:
        kept, groups = min(k, block), 0
        found = torch.empty(b * m, parts, kept, dtype=torch.int64, device=device)
        launch(
            _part_kernel, (b * m, parts), *inputs, found, highest, sums, v, *strides,
            1.0 / temperature, KEPT=kept, BLOCK=block, **flags,
        )  # fmt: skip
    values = torch.empty(b, k, dtype=torch.float32, device=device)
    indices = torch.empty(b, k, dtype=torch.int64, device=device)
    normalisers = torch.empty(b, m, dtype=torch.float32, device=device)
    new = (indices, values, values) if changes is None or not count else changes
    forces, forced = forced is not None, indices if forced is None else forced.contiguous()
    beams = power_of_two(m)
    tile = beams * power_of_two(max(groups, parts * kept, count))
    pointers = (
        *inputs, rows if banned is None else banned, scores.contiguous(), found, highest, sums,
        *(t.contiguous() for t in new), forced, values, indices, normalisers,
    )  # fmt: skip
    constants = {
        "K": k, "KEPT": kept, "GROUP": group, "SLOTS": power_of_two(k), "BEAMS": beams,
        "PARTS": power_of_two(parts),
        "CANDIDATES": power_of_two(groups if group else parts * kept),
        "CHANGES": power_of_two(count) if count else 0, "BIAS": bias is not None,
        "TAKEN_OUT": excluded is not None, "BANNED": banned is not None, "FORCED": forces,
        "SUMMED": not normalised, "WITHOUT_NAN": without_nan,
        "num_warps": 4 if tile <= 1024 else 8 if tile <= 4096 else 16,
    }  # fmt: skip
    return Merge(
        pointers, (m, v, parts, groups, count),
        (*strides, 0 if banned is None else banned.stride(0), 1.0 / temperature), constants,
        values, indices, normalisers,
    )  # fmt: skip


def argmax(logits: Tensor) -> Tensor:
    """Return the token (R,) int64 with the highest logit of each row (R, V); ties: the lowest."""
    (rows, v), device = logits.shape, logits.device
    parts = cdiv(v, PART)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    keys = ended = tokens  # which a single part does not use
    if parts > 1:
        keys = torch.empty(rows, parts, dtype=torch.int64, device=device)
        ended = counters(device, rows)
    launch(
        _argmax_kernel, (rows, parts), logits, keys, ended, tokens, v, logits.stride(0),
        BLOCK=min(PART, power_of_two(v)), PARTS=power_of_two(parts),
    )  # fmt: skip
    return tokens


@jit()
def _argmax_kernel(
    logits_ptr, keys_ptr, ended_ptr, tokens_ptr, vocabulary, row_stride, BLOCK: constexpr,
    PARTS: constexpr,
):  # fmt: skip
    """Find the highest logit of a part of a row; the last program of a row compares its parts."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    value = tl.load(logits_ptr + row * row_stride + token, mask=inside, other=0.0).to(tl.float32)
    lowest = -0x7FFFFFFFFFFFFFFF
    best = tl.max(tl.where(inside, key_of(value, token), lowest), 0)
    if PARTS == 1:
        tl.store(tokens_ptr + row, index_of(best).to(tl.int64))
    else:
        parts = tl.num_programs(1)
        tl.store(keys_ptr + row * parts + part, best)
        tl.debug_barrier()  # the key is written before the increment of the counter
        if tl.atomic_add(ended_ptr + row, 1, sem="acq_rel") == parts - 1:
            other = tl.arange(0, PARTS)
            keys = tl.load(
                keys_ptr + row * parts + other, mask=other < parts, other=lowest,
                cache_modifier=".cg",
            )  # fmt: skip
            tl.store(tokens_ptr + row, index_of(tl.max(keys, 0)).to(tl.int64))
            tl.store(ended_ptr + row, 0)  # reset for the next launch


@jit()
def _ordered(value):
    """Map floating-point numbers to int32 of the same order; NaN is the highest."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # + 0.0 turns -0.0 into 0.0
    bits = tl.where(value != value, 0x7FC00000, bits)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit()
def _unordered(ordered):
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit()
def key_of(value, index):
    """Pack (value, index) into an int64 that sorts by the value, then by the lowest index."""
    return (_ordered(value).to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@jit()
def value_of(key):
    """Return the value of a sort key."""
    return _unordered((key >> 32).to(tl.int32))


@jit()
def index_of(key):
    """Return the index of a sort key; lower indices have higher keys."""
    return 0x7FFFFFFF - (key & 0xFFFFFFFF).to(tl.int32)


@jit()
def _tempered(logits_ptr, bias_ptr, token, inside, sharpness, BIAS: constexpr):
    """Load logits of a row, with bias and temperature applied; -inf outside."""
    value = tl.load(logits_ptr + token, mask=inside, other=float("-inf")).to(tl.float32)
    if BIAS:
        value += tl.load(bias_ptr + token, mask=inside, other=0.0).to(tl.float32)
    return value * sharpness


@jit()
def _has(mask_ptr, token, inside):
    """Return which tokens are set in a row of a token mask."""
    words = tl.load(mask_ptr + token // 32, mask=inside, other=0)
    return (words >> (token % 32).to(tl.int32)) & 1 != 0


@jit()
def _of_part(
    logits_ptr, bias_ptr, banned_ptr, highest_ptr, sum_ptr, token, inside, sharpness,
    BIAS: constexpr, BANNED: constexpr, SUMMED: constexpr,
):  # fmt: skip
    """Load the logits of a part of a row, with banned tokens at -inf.

    Stores the part's share of the row's normaliser, which includes banned tokens.
    """
    value = _tempered(logits_ptr, bias_ptr, token, inside, sharpness, BIAS)
    if SUMMED:
        highest = tl.max(value)
        tl.store(highest_ptr, highest)
        tl.store(sum_ptr, tl.sum(tl.exp(value - tl.where(highest == float("-inf"), 0.0, highest))))
    if BANNED:
        value = tl.where(_has(banned_ptr, token, inside), float("-inf"), value)
    return value


@jit()
def _part_kernel(
    logits_ptr, bias_ptr, banned_ptr, keys_ptr, highest_ptr, sum_ptr, vocabulary, row_stride,
    banned_stride, sharpness, KEPT: constexpr, BLOCK: constexpr, BIAS: constexpr, BANNED: constexpr,
    SUMMED: constexpr,
):  # fmt: skip
    """Peeling: find the k best of one part of one row, and its share of the normaliser."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    at = row * tl.num_programs(1) + part
    value = _of_part(
        logits_ptr + row * row_stride, bias_ptr, banned_ptr + row * banned_stride, highest_ptr + at,
        sum_ptr + at, token, inside, sharpness, BIAS, BANNED, SUMMED,
    )  # fmt: skip
    lowest = tl.full([BLOCK], -0x7FFFFFFFFFFFFFFF, tl.int64)
    key = tl.where(inside, key_of(value, token), lowest)
    for i in range(KEPT):
        best = tl.max(key, 0)
        tl.store(keys_ptr + at * KEPT + i, best)
        key = tl.where(key == best, lowest, key)


@jit("groups")
def _group_kernel(
    logits_ptr, bias_ptr, banned_ptr, maxima_ptr, highest_ptr, sum_ptr, vocabulary, groups,
    row_stride, banned_stride, sharpness, GROUP: constexpr, BLOCK: constexpr, BIAS: constexpr,
    BANNED: constexpr, SUMMED: constexpr,
):  # fmt: skip
    """Groups: find the highest value of each group of one part of one row.

    Also stores the part's share of the normaliser.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group = part * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = token < vocabulary
    at = row * tl.num_programs(1) + part
    value = _of_part(
        logits_ptr + row * row_stride, bias_ptr, banned_ptr + row * banned_stride, highest_ptr + at,
        sum_ptr + at, token, inside, sharpness, BIAS, BANNED, SUMMED,
    )  # fmt: skip
    maxima = tl.max(tl.where(inside, _ordered(value), -0x7FFFFFFF), 1)
    tl.store(maxima_ptr + row * groups + group, maxima, mask=group < groups)


@jit()
def _of_beam(values, beam, of):
    """Gather values (BEAMS,) at the beams `of` (SLOTS,)."""
    return tl.sum(tl.where(of[:, None] == beam[None, :], values[None, :], 0.0), 1)


@jit()
def _normalised(value, top, rest, WITHOUT_NAN: constexpr):
    """Turn logits into log-probabilities; the row's normaliser is top + rest."""
    value = (value - top) - rest
    if WITHOUT_NAN:
        value = tl.where(value != value, float("-inf"), value)
    return value


@jit("beams", "parts", "groups", "changes")
def _merge_kernel(
    logits_ptr, bias_ptr, taken_out_ptr, banned_ptr, scores_ptr, found_ptr, highest_ptr, sum_ptr,
    tokens_ptr, factors_ptr, offsets_ptr, forced_ptr, values_ptr, indices_ptr, normalisers_ptr,
    beams, vocabulary, parts, groups, changes, row_stride, taken_out_stride, banned_stride,
    sharpness, K: constexpr, KEPT: constexpr, GROUP: constexpr, SLOTS: constexpr, BEAMS: constexpr,
    PARTS: constexpr, CANDIDATES: constexpr, CHANGES: constexpr, BIAS: constexpr,
    TAKEN_OUT: constexpr, BANNED: constexpr, FORCED: constexpr, SUMMED: constexpr,
    WITHOUT_NAN: constexpr,
):  # fmt: skip
    """Rank the k best of one sentence.

    Candidates come from the first kernel, from changed tokens and from forced tokens.
    """
    sentence = tl.program_id(0).to(tl.int64)
    beam = tl.arange(0, BEAMS)
    row, is_beam = sentence * beams + beam, beam < beams
    top = tl.zeros([BEAMS], tl.float32)
    rest = tl.zeros([BEAMS], tl.float32)
    if SUMMED:
        part = tl.arange(0, PARTS)
        at = row[:, None] * parts + part[None, :]
        valid = is_beam[:, None] & (part < parts)[None, :]
        highest = tl.load(highest_ptr + at, mask=valid, other=float("-inf"))
        sums = tl.load(sum_ptr + at, mask=valid, other=0.0)
        top = tl.max(highest, 1)
        top = tl.where(top == float("-inf"), 0.0, top)
        rest = tl.log(tl.where(is_beam, tl.sum(sums * tl.exp(highest - top[:, None]), 1), 1.0))
        tl.store(normalisers_ptr + row, top + rest, mask=is_beam)
    score = tl.load(scores_ptr + row, mask=is_beam, other=0.0)
    forced = tl.full([BEAMS], -1, tl.int64)
    if FORCED:
        forced = tl.load(forced_ptr + row, mask=is_beam, other=-1)
    lowest = tl.full([BEAMS, CANDIDATES], -0x7FFFFFFFFFFFFFFF, tl.int64)
    candidate = tl.arange(0, CANDIDATES)
    if GROUP:
        valid = is_beam[:, None] & (candidate < groups)[None, :]
        at = row[:, None] * groups + candidate[None, :]
        value = _unordered(tl.load(found_ptr + at, mask=valid, other=0))
        value = _normalised(value, top[:, None], rest[:, None], WITHOUT_NAN)
        if FORCED:
            value = tl.where((forced >= 0)[:, None], float("-inf"), value)
        group_key = tl.where(
            valid,
            key_of(value + score[:, None], beam[:, None] * groups + candidate[None, :]),
            lowest,
        )
        slot = tl.arange(0, SLOTS)
        chosen = tl.full([SLOTS], -1, tl.int32)
        for i in range(K):
            best = tl.max(tl.max(group_key, 1), 0)
            chosen = tl.where((slot == i) & (best != -0x7FFFFFFFFFFFFFFF), index_of(best), chosen)
            group_key = tl.where(group_key == best, lowest, group_key)
        of = tl.where(chosen >= 0, chosen // groups, 0)
        token = (chosen - of * groups)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        valid = (chosen >= 0)[:, None] & (token < vocabulary)
        row_of = (sentence * beams + of)[:, None]
        value = _tempered(logits_ptr + row_of * row_stride, bias_ptr, token, valid, sharpness, BIAS)
        if TAKEN_OUT:
            value = tl.where(
                _has(taken_out_ptr + row_of * taken_out_stride, token, valid), float("-inf"), value
            )
        value = _normalised(
            value, _of_beam(top, beam, of)[:, None], _of_beam(rest, beam, of)[:, None], WITHOUT_NAN
        )
        if FORCED:
            value = tl.where(
                (_of_beam(forced.to(tl.float32), beam, of) >= 0)[:, None], float("-inf"), value
            )
        value += _of_beam(score, beam, of)[:, None]
        key = tl.where(valid, key_of(value, of[:, None] * vocabulary + token), -0x7FFFFFFFFFFFFFFF)
    else:
        valid = is_beam[:, None] & (candidate < parts * KEPT)[None, :]
        kept = tl.load(
            found_ptr + row[:, None] * (parts * KEPT) + candidate[None, :], mask=valid, other=0
        )
        valid = valid & (kept != -0x7FFFFFFFFFFFFFFF)  # a part may have fewer tokens than KEPT
        value = _normalised(value_of(kept), top[:, None], rest[:, None], WITHOUT_NAN)
        if FORCED:
            value = tl.where((forced >= 0)[:, None], float("-inf"), value)
        key = tl.where(
            valid,
            key_of(value + score[:, None], beam[:, None] * vocabulary + index_of(kept)),
            lowest,
        )
    best_forced = tl.full([BEAMS], -0x7FFFFFFFFFFFFFFF, tl.int64)
    if FORCED:
        best_forced = tl.where(
            forced >= 0, key_of(score, beam * vocabulary + forced.to(tl.int32)), best_forced
        )
    changed = best_forced
    if CHANGES:
        change = tl.arange(0, CHANGES)
        is_change = is_beam[:, None] & (change < changes)[None, :]
        change_offset = row[:, None] * changes + change[None, :]
        tokens = tl.load(tokens_ptr + change_offset, mask=is_change, other=-1)
        is_change = is_change & (tokens >= 0) & (tokens < vocabulary)
        new = _tempered(
            logits_ptr + row[:, None] * row_stride, bias_ptr, tokens, is_change, sharpness, BIAS
        )
        new = _normalised(new, top[:, None], rest[:, None], WITHOUT_NAN)
        new = new * tl.load(factors_ptr + change_offset, mask=is_change, other=1.0)
        new += tl.load(offsets_ptr + change_offset, mask=is_change, other=0.0)
        if BANNED:
            new = tl.where(
                _has(banned_ptr + row[:, None] * banned_stride, tokens, is_change),
                float("-inf"),
                new,
            )
        if FORCED:
            new = tl.where((forced >= 0)[:, None], float("-inf"), new)
        changed = key_of(new + score[:, None], beam[:, None] * vocabulary + tokens.to(tl.int32))
        changed = tl.where(is_change & (new > float("-inf")), changed, -0x7FFFFFFFFFFFFFFF)
    for i in range(K):
        best = tl.maximum(tl.max(tl.max(key, 1), 0), tl.max(best_forced, 0))
        if CHANGES:
            best = tl.maximum(best, tl.max(tl.max(changed, 1), 0))
            changed = tl.where(changed == best, -0x7FFFFFFFFFFFFFFF, changed)
        key = tl.where(key == best, -0x7FFFFFFFFFFFFFFF, key)
        best_forced = tl.where(best_forced == best, -0x7FFFFFFFFFFFFFFF, best_forced)
        tl.store(values_ptr + sentence * K + i, value_of(best))
        tl.store(indices_ptr + sentence * K + i, index_of(best).to(tl.int64))


merge = _merge_kernel
"""The second kernel, as a function that other kernels call."""
