"""In-place updates of keys, values and beam tables in a decode step, one launch each.

Sources: FasterTransformer (reorders an indirection table, not the keys and values); Hoang et al.
2018 (Amun), section 2.1 (finished sentences leave the batch).
"""

import torch
from torch import Tensor

from fastgen.ops import native
from fastgen.ops.dispatch import (
    TRITON,
    cdiv,
    constexpr,
    in_c,
    in_memory,
    jit,
    launch,
    power_of_two,
    select_backend,
    tl,
    use_triton,
)


def write_slots_reference(buffer: Tensor, new: Tensor, start: int | Tensor) -> Tensor:
    """Return a copy of buffer with one token of every beam written to its KV slot.

    Args:
        buffer: (B, H, N, D), the slots of B sentences.
        new: (B * M, H, 1, D), keys or values of the newest token.
        start: the first of the M slots; beam m writes slot start + m. A tensor (1,) int64 if only
            the device knows it.
    """
    beams = new.shape[0] // max(1, buffer.shape[0])
    slots = torch.arange(beams, device=buffer.device, dtype=torch.int64) + start
    return buffer.index_copy(
        2, slots, new.view(-1, beams, new.shape[1], new.shape[3]).transpose(1, 2)
    )


def write_slots_(
    keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, start: int | Tensor
) -> None:
    """Write the keys and values of one token of every beam into their KV slots, in place.

    A `start` on the device is not checked against the size of the buffers.

    Args:
        keys: (B, H, N, D), the buffer of keys.
        values: (B, H, N, D), the buffer of values.
        new_keys: (B * M, H, 1, D).
        new_values: (B * M, H, 1, D).
        start: as in `write_slots_reference`.

    Raises:
        ValueError: the shapes do not fit; the message holds them.
    """
    b, h, _, d = keys.shape
    m = new_keys.shape[0] // max(1, b)
    on_device = isinstance(start, Tensor)
    for buffer, new in ((keys, new_keys), (values, new_values)):
        in_bounds = on_device or 0 <= start <= buffer.shape[2] - m
        if new.shape != (b * m, buffer.shape[1], 1, buffer.shape[3]) or not in_bounds:
            raise ValueError(
                f"{tuple(new.shape)} (B * M, H, 1, D) at slot {start} of {tuple(buffer.shape)} "
                "(B, H, N, D)"
            )
    if not use_triton(
        "cache", lambda: keys.shape == values.shape, keys, values, new_keys, new_values
    ):
        for buffer, new in ((keys, new_keys), (values, new_values)):
            new_slots = new.view(b, m, new.shape[1], new.shape[3]).transpose(1, 2)
            if isinstance(start, Tensor):
                buffer.index_copy_(
                    2, torch.arange(m, device=buffer.device, dtype=torch.int64) + start, new_slots
                )
            else:
                buffer.narrow(2, start, m).copy_(new_slots)
        return
    launch(
        _write_slots_kernel, (b * m, h), keys, values, new_keys, new_values, m, d, start,
        *keys.stride(), *values.stride(), *new_keys.stride()[:2], new_keys.stride(3),
        *new_values.stride()[:2], new_values.stride(3), COUNTED=on_device, BLOCK=power_of_two(d),
    )  # fmt: skip


def move_sentences_(buffer: Tensor, to: Tensor, origin: Tensor) -> None:
    """Copy sentences over other sentences of the same buffer, in place.

    Args:
        buffer: (B, H, N, D).
        to: (N,) int64, the sentences to overwrite, each at most once and none of `origin`.
        origin: (N,) int64, the sentences to copy.

    Raises:
        ValueError: the shapes do not fit; the message holds them.
    """
    if to.dim() != 1 or to.shape != origin.shape or buffer.dim() != 4:
        raise ValueError(
            f"to {tuple(to.shape)}, origin {tuple(origin.shape)}, buffer {tuple(buffer.shape)} "
            "(B, H, N, D)"
        )
    size = buffer.shape[2] * buffer.shape[3]
    supported = lambda: buffer[:1, :1].is_contiguous() and to.shape[0] > 0  # noqa: E731
    backend = select_backend(
        "cache",
        supported,
        lambda: in_memory(buffer) and in_memory(to, origin, dtype=torch.int64) and supported(),
        buffer,
        to,
        origin,
    )
    if in_c(backend) and native.move_sentences(backend, buffer, to, origin):
        return
    if backend is not TRITON:
        for target, sentence in zip(to.tolist(), origin.tolist(), strict=True):
            buffer[target] = buffer[sentence]
        return
    block = 4096
    launch(
        _move_sentences_kernel, (to.shape[0], buffer.shape[1], cdiv(size, block)), buffer, to,
        origin, size, *buffer.stride()[:2], BLOCK=block,
    )  # fmt: skip


def reorder_rows_reference(table: Tensor, parents: Tensor) -> Tensor:
    """Return table with row m of sentence b replaced by its row parents[b, m].

    Args:
        table: (B, M, N).
        parents: (B, M) int64.
    """
    return table.gather(1, parents[:, :, None].expand(-1, -1, table.shape[2]))


def reorder_rows_(table: Tensor, parents: Tensor) -> None:
    """Reorder the beams of a table in place; arguments as `reorder_rows_reference`.

    Raises:
        ValueError: the shapes do not fit; the message holds them.
    """
    if table.dim() != 3 or parents.shape != table.shape[:2]:
        raise ValueError(
            f"table {tuple(table.shape)} must be (B, M, N) and parents {tuple(parents.shape)} "
            "(B, M)"
        )
    b, m, n = table.shape
    if not use_triton("cache", lambda: m <= 128, table, parents):
        table.copy_(reorder_rows_reference(table, parents))
        return
    block = min(power_of_two(n), max(16, 4096 // power_of_two(m)))
    launch(
        _reorder_rows_kernel, (b, cdiv(n, block)), table, parents, m, n, *table.stride(),
        *parents.stride(), BEAMS=power_of_two(m), BLOCK=block,
    )  # fmt: skip


@jit("beams", "start", "keys_b", "values_b", "new_keys_r", "new_values_r")
def _write_slots_kernel(
    keys_ptr, values_ptr, new_keys_ptr, new_values_ptr, beams, dims, start, keys_b, keys_h, keys_n,
    keys_d, values_b, values_h, values_n, values_d, new_keys_r, new_keys_h, new_keys_d,
    new_values_r, new_values_h, new_values_d, COUNTED: constexpr, BLOCK: constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    if COUNTED:
        start = tl.load(start)
    sentence, slot = row // beams, start + row % beams
    dim = tl.arange(0, BLOCK)
    is_dim = dim < dims
    keys = tl.load(
        new_keys_ptr + row * new_keys_r + head * new_keys_h + dim * new_keys_d, mask=is_dim
    )
    values = tl.load(
        new_values_ptr + row * new_values_r + head * new_values_h + dim * new_values_d, mask=is_dim
    )
    tl.store(
        keys_ptr + sentence * keys_b + head * keys_h + slot * keys_n + dim * keys_d,
        keys,
        mask=is_dim,
    )
    tl.store(
        values_ptr + sentence * values_b + head * values_h + slot * values_n + dim * values_d,
        values,
        mask=is_dim,
    )


@jit("size", "sentence_stride", "head_stride")
def _move_sentences_kernel(
    buffer_ptr, to_ptr, origin_ptr, size, sentence_stride, head_stride, BLOCK: constexpr
):
    pair, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    offset = head * head_stride + tl.program_id(2).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK) < size
    values = tl.load(
        buffer_ptr + tl.load(origin_ptr + pair) * sentence_stride + offset, mask=inside
    )
    tl.store(buffer_ptr + tl.load(to_ptr + pair) * sentence_stride + offset, values, mask=inside)


@jit("beams", "count", "table_b", "table_m", "parents_b", "parents_m")
def _reorder_rows_kernel(
    table_ptr, parents_ptr, beams, count, table_b, table_m, table_n, parents_b, parents_m,
    BEAMS: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Reorder a block of columns of one sentence; reads every row before it writes one."""
    sentence = tl.program_id(0).to(tl.int64)
    beam = tl.arange(0, BEAMS)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    parents = tl.load(
        parents_ptr + sentence * parents_b + beam * parents_m, mask=beam < beams, other=0
    )
    mask = (beam < beams)[:, None] & (column < count)[None, :]
    table_ptr += sentence * table_b
    rows = tl.load(
        table_ptr + (parents * table_m)[:, None] + (column * table_n)[None, :], mask=mask
    )
    tl.debug_barrier()  # several threads may hold the rows of one column
    tl.store(table_ptr + (beam * table_m)[:, None] + (column * table_n)[None, :], rows, mask=mask)
