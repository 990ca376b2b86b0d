"""Attention of one decode step over a KV cache that the beams of a sentence share.

The M beams of a sentence are folded into the query dimension, so each key and value is read once
for all of them. Shared keys are of two kinds. Every beam sees the encoder's output or the prompt.
Of the slots of generated tokens, a beam sees only those of its ancestors. The mask alone tells the
two kinds apart.

Each program of the kernel handles one key head of one sentence and one partition of the keys. It
reads each key and value once, multiplies them with all beams and query heads that see them, and
keeps a running softmax in fp32. If there are several partitions, the last program to finish
combines them. The same launch writes the newest keys and values to their slots.

Sources: FastSeq (Yan et al. 2021), appendix A: the einsum formulation of attention over a cache
shared by beams; Dao 2023 (Flash-Decoding): parallel partitions of the keys, for few sentences.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastgen.ops import native
from fastgen.ops.cache import write_slots_
from fastgen.ops.dispatch import (
    INTERPRETED,
    TRITON,
    cdiv,
    constexpr,
    counters,
    in_c,
    jit,
    launch,
    plain,
    power_of_two,
    select_backend,
    tl,
)

FEW = 16
"""Sentences times key heads up to which, on a CPU, the fixed cost of each operation dominates."""

MANY, SHORT = 8, 128
"""Thresholds for the operand order of the products on a CPU.

Queries come first from `MANY` queries per key head on, or up to `SHORT` keys.
"""

DIMS = 256
"""Largest head dimension that the kernel covers."""

ROWS = 128
"""Largest number of beams times query heads per key head that the kernel covers."""


def beam_attention_reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
    seen: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention of M beams over the keys of their sentence, written as two einsums.

    Args:
        query: (B, M, H, D) floating point; one token per beam.
        keys: (B, Hkv, N, D), H a multiple of Hkv; query head h reads key head h // (H / Hkv).
        values: (B, Hkv, N, D).
        mask: additive, broadcastable to (B, H, M, N), 0 where visible and -inf (or very low)
            elsewhere; or None.
        scale: the factor of query times key.
        softcap: if given, scores become softcap * tanh(scores / softcap) before the mask is added.
        seen: (1,) int64 on the device. If given, only the first `seen` keys take part, whatever the
            other keys, values and mask entries hold.
        sinks: (H,), one more score of each query head, whose weight belongs to no key; or None.

    Returns:
        (B, M, H, D) in the query's dtype.
    Numerics: fp32 (fp64 for fp64) up to the weights, which are rounded to the dtype of the values.
    """
    groups = query.shape[2] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = torch.einsum("bmhd,bhnd->bhmn", query.to(wide), keys.to(wide)).mul(scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if seen is not None:
        unseen = torch.arange(keys.shape[2], device=keys.device, dtype=torch.int64) >= seen
        scores, values = (
            scores.masked_fill(unseen, -torch.inf),
            values.masked_fill(unseen[:, None], 0.0),
        )
    weights = _weights(scores, sinks).to(values.dtype)
    return torch.einsum("bhmn,bhnd->bmhd", weights, values)


def _weights(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax of scores (B, H, M, N), in fp32 or fp64, next to a sink of each head."""
    wide = torch.promote_types(scores.dtype, torch.float32)
    if sinks is None:
        return torch.softmax(scores, -1, dtype=wide)
    sink = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
    return torch.softmax(torch.cat([scores, sink], -1), -1, dtype=wide)[..., :-1]


def beam_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
    seen: Tensor | None = None,
    newest: "Newest | None" = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention of M beams over the keys of their sentence.

    On a CPU without the C operations this runs two batched matrix products over strided views. They
    copy neither keys nor values, and read grouped key heads (GQA) once for all their query heads.
    For the few queries of a decode step this beats `scaled_dot_product_attention` (32 sentences, 8
    heads, 40 keys, 4 beams: 589 against 922 us, 2 cores).

    Queries times keys is the faster order from `MANY` queries on and up to `SHORT` keys (8
    sentences, 8 key heads of 32 heads, 512 keys: 1.9 against 2.5 ms). Otherwise keys times queries
    is faster (4 sentences, 16 heads, 512 keys: 1.1 against 1.3 ms).

    A single call of `scaled_dot_product_attention` beats both with up to `FEW` key heads in all (1
    sentence, 4 heads, 32 keys: 17 against 48 us).

    A beam with every key masked by -inf gets NaN, or zeros where torch's own attention runs.

    Args:
        query: as in `beam_attention_reference`, like the arguments up to `seen`.
        newest: keys and values of the newest tokens. If given, they are written to the last M
            visible slots before attention is computed.
        sinks: as in `beam_attention_reference`.

    Raises:
        ValueError: the shapes do not fit; the message holds them.
    """
    b, m, h, d = query.shape
    kv_heads, n = keys.shape[1], keys.shape[2]
    if keys.shape[0] != b or h % kv_heads or keys.shape[3] != d:
        raise ValueError(
            f"query {tuple(query.shape)} (B, M, H, D) does not fit keys {tuple(keys.shape)} "
            "(B, Hkv, N, D)"
        )
    groups = h // kv_heads
    supported = lambda: (  # noqa: E731
        query.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and d <= DIMS
        and groups * m <= ROWS
        and n > 0
    )
    able_in_c = lambda: (  # noqa: E731
        softcap is None
        and seen is None
        and plain(query, keys, values, mask, sinks)
        and native.covers_attention(query, keys, values, mask)
    )
    backend = select_backend(
        "beam_attention", supported, able_in_c, query, keys, values, mask, seen, sinks
    )
    if backend is TRITON:
        return _beam_attention_triton(
            query, keys, values, mask, scale, softcap, seen, newest, sinks
        )
    if newest is not None:
        start = n - m if seen is None else seen - m
        write_slots_(keys, values, newest.keys[:, :, None], newest.values[:, :, None], start)
    if in_c(backend):
        return native.beam_attention(backend, query, keys, values, mask, scale, sinks)
    if seen is not None:
        return beam_attention_reference(query, keys, values, mask, scale, softcap, seen, sinks)
    if query.device.type == "cpu" and softcap is sinks is None and b * kv_heads <= FEW:
        rows = query.transpose(1, 2)
        return F.scaled_dot_product_attention(
            rows, keys, values, mask, scale=scale, enable_gqa=groups > 1
        ).transpose(1, 2)
    # (B, M, Hkv * G, D) -> (B * Hkv, G * M, D), contiguous: products of a transposed copy take
    # twice as long.
    folded = (
        query.view(b, m, kv_heads, groups, d)
        .permute(0, 2, 3, 1, 4)
        .reshape(b * kv_heads, groups * m, d)
    )
    keys, values, unused = keys.flatten(0, 1), values.flatten(0, 1), query.new_empty(1)
    if groups * m >= MANY or n <= SHORT:
        scores = torch.baddbmm(unused, folded, keys.transpose(1, 2), beta=0, alpha=scale)
    else:
        scores = torch.baddbmm(unused, keys, folded.transpose(1, 2), beta=0, alpha=scale).transpose(
            1, 2
        )
    if softcap is not None:
        scores = torch.tanh_(scores.div_(softcap)).mul_(softcap)
    if mask is not None:
        # A mask per query head, (B, H, M, N), is grouped by key head like the queries.
        per_head = mask.shape[1] != 1
        grouped = (
            mask.view(-1, kv_heads, groups, *mask.shape[2:]) if per_head else mask.unsqueeze(1)
        )
        scores.view(b, kv_heads, groups, m, n).add_(grouped)
    if sinks is None:
        weights = _weights(scores, None)
    else:
        by_head = scores.view(b, kv_heads, groups, m, n).flatten(1, 2)
        weights = _weights(by_head, sinks).reshape(scores.shape)
    out = torch.bmm(weights.to(values.dtype), values)
    return out.view(b, kv_heads, groups, m, -1).permute(0, 3, 1, 2, 4).reshape(b, m, h, -1)


def beam_attention_with_weights(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the attention output and its weights averaged over the heads.

    The output is that of `beam_attention` with H key heads. The weights are (B, M, N) fp32.
    """
    rows = query.transpose(1, 2) * scale
    scores = torch.matmul(rows, keys.transpose(2, 3))
    if mask is not None:
        scores += mask
    weights = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32))
    mixed = torch.matmul(weights.to(values.dtype), values).transpose(1, 2)
    return mixed, weights.float().mean(1)


class Newest(NamedTuple):
    """Keys and values of the newest token of every beam.

    Attributes:
        keys: (B * M, Hkv, D), the last dimension contiguous.
        values: (B * M, Hkv, D), the last dimension contiguous.
    """

    keys: Tensor
    values: Tensor


class _Tile(NamedTuple):
    """Tile sizes and launch options of a program.

    Attributes:
        rows: queries that a program holds.
        block: keys per iteration.
        warps: number of warps.
        stages: pipeline stages of the loads of keys.
    """

    rows: int
    block: int
    warps: int
    stages: int


def _tile(dtype: torch.dtype, rows: int, dims: int) -> _Tile:
    """Choose the tile for `rows` queries of a key head.

    The sizes avoid nearly all register spills and fit the shared memory of the smallest devices (99
    KiB; `tests/compiled.py` compiles them for compute capability 8.6 and 9.0). Products in fp32 do
    not run on tensor cores and hold their operands in registers: 64 rows of 128 dimensions would
    spill 32 KB per thread.
    """
    held = max(16, power_of_two(rows))
    if dtype == torch.float32:
        return _Tile(min(held, 32 if dims <= 128 else 16), 32, 8, 2)
    if dims <= 64:
        return _Tile(min(held, 64), 64, 4, 3)
    return _Tile(min(held, 32), 64 if dims <= 128 else 32, 4, 3)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 3
    )


def _beam_attention_triton(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    seen: Tensor | None,
    newest: Newest | None,
    sinks: Tensor | None,
) -> Tensor:
    b, m, h, d = query.shape
    kv_heads, n = keys.shape[1], keys.shape[2]
    rows = (h // kv_heads) * m
    tile = _tile(query.dtype, rows, d)
    chunks = cdiv(rows, tile.rows)
    # Launch about two programs per multiprocessor, each with several blocks of keys.
    parts = max(
        1,
        min(
            cdiv(n, 4 * tile.block), cdiv(2 * _multiprocessors(query.device), b * kv_heads * chunks)
        ),
    )
    length = cdiv(cdiv(n, parts), tile.block) * tile.block
    parts = cdiv(n, length)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    mixed, highest, sums, ended = out, out, out, out
    if parts > 1:
        mixed = torch.empty(parts, b, m, h, d, dtype=torch.float32, device=query.device)
        highest, sums = torch.empty(2, parts, b, m, h, dtype=torch.float32, device=query.device)
        ended = counters(query.device, b * kv_heads * chunks)
    expanded_mask = query if mask is None else mask.expand(b, h, m, n)
    new_keys, new_values = (query, query) if newest is None else newest
    launch(
        _attention_kernel, (b * kv_heads * chunks, parts), query, keys, values, expanded_mask,
        query if seen is None else seen, query if sinks is None else sinks.contiguous(), new_keys,
        new_values, mixed, highest, sums, ended, out, b, m, kv_heads, h // kv_heads, chunks, d, n,
        length, scale, softcap or 0.0, *query.stride(), *keys.stride(), *values.stride(),
        *expanded_mask.stride(), *new_keys.stride()[:2], *new_values.stride()[:2], ROWS=tile.rows,
        DIMS=max(16, power_of_two(d)), BLOCK=tile.block,
        NEW=0 if newest is None else power_of_two(m), MASKED=mask is not None,
        CAPPED=softcap is not None, SUNK=sinks is not None, WHOLE=parts == 1,
        COUNTED=seen is not None, WIDE=INTERPRETED and query.dtype == torch.bfloat16,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


@jit("sentences", "beams", "kv_heads", "groups", "chunks", "new_keys_r", "new_values_r")
def _attention_kernel(
    query_ptr, keys_ptr, values_ptr, mask_ptr, seen_ptr, sinks_ptr, new_keys_ptr, new_values_ptr,
    mixed_ptr, highest_ptr, sum_ptr, ended_ptr, out_ptr, sentences, beams, kv_heads, groups, chunks,
    dims, count, length, scale, softcap, query_b, query_m, query_h, query_d, keys_b, keys_h, keys_n,
    keys_d, values_b, values_h, values_n, values_d, mask_b, mask_h, mask_m, mask_n, new_keys_r,
    new_keys_h, new_values_r, new_values_h, ROWS: constexpr, DIMS: constexpr, BLOCK: constexpr,
    NEW: constexpr, MASKED: constexpr, CAPPED: constexpr, SUNK: constexpr, WHOLE: constexpr,
    COUNTED: constexpr, WIDE: constexpr,
):  # fmt: skip
    """Compute attention for the queries of one key head, or a chunk of them, over one partition."""
    pair, part = tl.program_id(0) // chunks, tl.program_id(1)
    sentence, kv_head = (pair // kv_heads).to(tl.int64), (pair % kv_heads).to(tl.int64)
    # Adjacent programs read the same keys.
    row = tl.program_id(0) % chunks * ROWS + tl.arange(0, ROWS)
    beam, head = row % beams, kv_head * groups + row // beams
    is_row = row < groups * beams
    dim = tl.arange(0, DIMS)
    is_dim = dim < dims
    seen = is_row[:, None] & is_dim[None, :]
    query = tl.load(
        query_ptr + sentence * query_b + (beam * query_m + head * query_h)[:, None]
        + (dim * query_d)[None, :],
        mask=seen, other=0.0,
    )  # fmt: skip
    if WIDE:  # the interpreter multiplies bfloat16 as integers
        query = query.to(tl.float32)
    keys_ptr += sentence * keys_b + kv_head * keys_h
    values_ptr += sentence * values_b + kv_head * values_h
    mask_ptr += sentence * mask_b
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIMS], tl.float32)
    if SUNK:  # a key without a value, which the first partition has
        sink = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32)
        highest = tl.where(part == 0, sink, highest)
        total = tl.where(part == 0, 1.0, total)
    room = tl.minimum(count, (part + 1) * length)
    last = count
    if COUNTED:
        last = tl.minimum(last, tl.load(seen_ptr)).to(tl.int32)
    end = tl.minimum(room, last)
    if NEW > 0:
        # Each program writes all the slots that it will read.
        if (last > part * length) & (last - beams < end):
            new = tl.arange(0, NEW)
            new_row = sentence * beams + new
            slot = (last - beams + new).to(tl.int64)
            is_new = (new < beams)[:, None] & is_dim[None, :]
            keys = tl.load(
                new_keys_ptr
                + (new_row * new_keys_r + kv_head * new_keys_h)[:, None]
                + dim[None, :],
                mask=is_new,
            )
            values = tl.load(
                new_values_ptr
                + (new_row * new_values_r + kv_head * new_values_h)[:, None]
                + dim[None, :],
                mask=is_new,
            )
            tl.store(
                keys_ptr + (slot * keys_n)[:, None] + (dim * keys_d)[None, :], keys, mask=is_new
            )
            tl.store(
                values_ptr + (slot * values_n)[:, None] + (dim * values_d)[None, :],
                values,
                mask=is_new,
            )
        tl.debug_barrier()
    for start in range(part * length, end, BLOCK):
        slot = (start + tl.arange(0, BLOCK)).to(tl.int64)
        is_slot = slot < end
        key_mask = is_slot[:, None] & is_dim[None, :]
        keys = tl.load(
            keys_ptr + (slot * keys_n)[:, None] + (dim * keys_d)[None, :], mask=key_mask, other=0.0
        )
        if WIDE:
            keys = keys.to(tl.float32)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        if CAPPED:
            scores = (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0) * softcap
        if MASKED:
            mask_offset = (head * mask_h + beam * mask_m)[:, None] + (slot * mask_n)[None, :]
            # The bound is the end of the room, a multiple of 16. With another bound the loads would
            # be scalar and not pipelined.
            in_room = is_row[:, None] & (slot < room)[None, :]
            scores += tl.load(mask_ptr + mask_offset, mask=in_room, other=0.0).to(tl.float32)
        scores = tl.where(is_slot[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(scores - base[:, None])
        shrink = tl.exp(highest - base)
        total = total * shrink + tl.sum(weights, 1)
        values = tl.load(
            values_ptr + (slot * values_n)[:, None] + (dim * values_d)[None, :],
            mask=key_mask,
            other=0.0,
        )
        if WIDE:
            values = values.to(tl.float32)
        mixed = mixed * shrink[:, None] + tl.dot(
            weights.to(values.dtype), values, input_precision="ieee"
        )
        highest = higher
    out_row = (sentence * beams + beam) * (kv_heads * groups) + head
    out = (out_row * dims)[:, None] + dim[None, :]
    if WHOLE:
        tl.store(out_ptr + out, (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=seen)
    else:
        rows = (sentences * beams * kv_heads * groups).to(tl.int64)
        tl.store(highest_ptr + part * rows + out_row, highest, mask=is_row)
        tl.store(sum_ptr + part * rows + out_row, total, mask=is_row)
        tl.store(mixed_ptr + part * rows * dims + out, mixed, mask=seen)
        tl.debug_barrier()  # all writes of this program precede its increment of the counter
        if tl.atomic_add(ended_ptr + tl.program_id(0), 1, sem="acq_rel") == tl.num_programs(1) - 1:
            highest = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            mixed = tl.zeros([ROWS, DIMS], tl.float32)
            for part in range(tl.num_programs(1)):
                part_row = part * rows + out_row
                part_highest = tl.load(
                    highest_ptr + part_row, mask=is_row, other=float("-inf"), cache_modifier=".cg"
                )
                higher = tl.maximum(highest, part_highest)
                base = tl.where(higher == float("-inf"), 0.0, higher)
                shrink, share = tl.exp(highest - base), tl.exp(part_highest - base)
                part_sum = tl.load(sum_ptr + part_row, mask=is_row, other=0.0, cache_modifier=".cg")
                part_mixed = tl.load(
                    mixed_ptr + part * rows * dims + out, mask=seen, other=0.0, cache_modifier=".cg"
                )
                total = total * shrink + part_sum * share
                mixed = mixed * shrink[:, None] + part_mixed * share[:, None]
                highest = higher
            tl.store(
                out_ptr + out, (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=seen
            )
            tl.store(ended_ptr + tl.program_id(0), 0)  # reset for the next launch
