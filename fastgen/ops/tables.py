"""The tables of a beam search, a row per beam: in a step rows change places, get one more entry, and some finish.

A step reads and writes all its tables in one launch. Where they end may be known to the device alone, so that a launch
can be captured and replayed while the texts grow.

Source: FasterTransformer (one kernel for the tables of a beam search).
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from fastgen.ops import native
from fastgen.ops.cache import reorder_rows_reference
from fastgen.ops.dispatch import (
    TRITON,
    cdiv,
    chosen,
    constexpr,
    in_c,
    in_memory,
    jit,
    launch,
    power_of_two,
    tl,
)


class Table(NamedTuple):
    """A row per beam, which gets C columns in a step.

    rows: (B, M, N) of any dtype, last dim contiguous, with room for what comes: `prefix` columns that no step changes,
        then those of the steps so far.
    newest: (B, M, C) what the rows get next, or (B, K, C) what their candidates would get; any strides, cast to the
        rows' dtype.
    """

    rows: Tensor
    newest: Tensor
    prefix: int = 0


def extend_rows_reference(table: Table, parents: Tensor, steps: int | Tensor) -> Tensor:
    """Return a copy of the rows, row m of sentence b replaced by its row parents[b, m] and extended by its newest.

    Args:
        parents: (B, M) int64.
        steps: that there have been so far; column prefix + steps * C is the first that is written. A tensor (1,) int64
            where only the device knows.
    """
    rows = table.rows.clone()
    _extend(Table(rows, table.newest, table.prefix), parents, steps)
    return rows


def extend_rows_(tables: Sequence[Table], parents: Tensor, steps: int | Tensor) -> None:
    """Reorder and extend the rows of some tables in place, in one launch; arguments as `extend_rows_reference`.

    What lies behind the newest columns is nobody's. A `steps` that is on the device is not checked against the room.

    Raises:
        ValueError: on shapes that do not fit; the message holds them.
    """
    for table in tables:
        _check(table, steps)
        if parents.shape != table.rows.shape[:2] or table.newest.shape[:2] != parents.shape:
            raise ValueError(
                f"parents {tuple(parents.shape)} (B, M) and newest {tuple(table.newest.shape)} (B, M, C) do not fit "
                f"rows {tuple(table.rows.shape)} (B, M, N)"
            )
    in_c_too = lambda: _able_in_c(tables, steps, parents)
    by = chosen("tables", lambda: _able(tables), in_c_too, parents, *_tensors(tables, steps))
    if in_c(by) and native.move_rows(by, tables, (), parents, None, cast(int, steps)):
        return
    if by is not TRITON:
        if (
            parents.device.type == "cpu"
            and isinstance(steps, int)
            and all(t.rows.is_contiguous() for t in tables)
        ):
            _extend_all(tables, parents, steps)
            return
        for table in tables:
            _extend(table, parents, steps)
        return
    b, m = parents.shape
    block, blocks = _blocks(tables, 2 * m)
    launch(
        _extend_rows_kernel, (b, blocks, len(tables)), parents, parents.stride(), steps, m, *_columns(tables),
        COUNTED=isinstance(steps, Tensor), TABLES=len(tables), BEAMS=power_of_two(m), BLOCK=block,
    )  # fmt: skip


def finish_rows_reference(
    finished: Tensor, table: Table, order: Tensor, beams: Tensor, steps: int | Tensor
) -> Tensor:
    """Return the finished rows after a step, of those before and of candidates, which extend running rows.

    Args:
        finished: (B, M, N) as `table.rows`, whose prefix it has.
        table: the running rows, and the newest (B, K, 1) of each candidate.
        order: (B, M) int64 into M finished rows, then K candidates.
        beams: (B, K) int64, the running row that each candidate extends.
        steps: as `extend_rows_reference` has it.
    """
    rows = finished.clone()
    _finish(rows, table, order, beams, steps)
    return rows


def finish_rows_(
    finished: Sequence[Tensor],
    tables: Sequence[Table],
    order: Tensor,
    beams: Tensor,
    steps: int | Tensor,
) -> None:
    """Choose the finished rows of some tables anew, in place, in one launch; arguments as `finish_rows_reference`.

    Raises:
        ValueError: on shapes that do not fit; the message holds them.
    """
    for rows, table in zip(finished, tables, strict=True):
        _check(table, steps)
        shapes = rows.shape == table.rows.shape and order.shape == rows.shape[:2]
        if not shapes or rows.dtype != table.rows.dtype or table.newest.shape != (*beams.shape, 1):
            raise ValueError(
                f"finished {tuple(rows.shape)} {rows.dtype}, order {tuple(order.shape)} (B, M), beams "
                f"{tuple(beams.shape)} (B, K), newest {tuple(table.newest.shape)} (B, K, 1) do not fit rows "
                f"{tuple(table.rows.shape)} {table.rows.dtype} (B, M, N)"
            )
    able = lambda: _able(tables) and all(rows.stride(2) == 1 for rows in finished)
    in_c_too = lambda: _able_in_c(tables, steps, order, beams) and in_memory(*finished) and able()
    by = chosen("tables", able, in_c_too, order, beams, *finished, *_tensors(tables, steps))
    if in_c(by) and native.move_rows(by, tables, finished, beams, order, cast(int, steps)):
        return
    if by is not TRITON:
        for rows, table in zip(finished, tables, strict=True):
            _finish(rows, table, order, beams, steps)
        return
    b, m = order.shape
    block, blocks = _blocks(tables, 2 * m)
    launch(
        _finish_rows_kernel, (b, blocks, len(tables)), order, order.stride(), beams, beams.stride(), steps, m,
        tuple(finished), tuple(rows.stride() for rows in finished), *_columns(tables),
        COUNTED=isinstance(steps, Tensor), TABLES=len(tables), BEAMS=power_of_two(m), BLOCK=block,
    )  # fmt: skip


def _check(table: Table, steps: int | Tensor) -> None:
    rows, newest = table.rows, table.newest
    if rows.dim() != 3 or newest.dim() != 3 or newest.shape[0] != rows.shape[0]:
        raise ValueError(
            f"rows {tuple(rows.shape)} must be (B, M, N) and newest {tuple(newest.shape)} (B, M or K, C)"
        )
    if (
        not isinstance(steps, Tensor)
        and not 0 <= steps * newest.shape[2] <= rows.shape[2] - table.prefix - newest.shape[2]
    ):
        raise ValueError(
            f"{steps} steps of {tuple(newest.shape)} behind {table.prefix} of rows {tuple(rows.shape)}"
        )


def _able(tables: Sequence[Table]) -> bool:
    return all(table.rows.shape[1] <= 64 and table.rows.stride(2) == 1 for table in tables)


def _able_in_c(tables: Sequence[Table], steps: int | Tensor, *others: Tensor) -> bool:
    """Whether the numbers of all that is moved lie side by side, and what is new is copied as it is, or cut off."""
    if isinstance(steps, Tensor) or not in_memory(*others, dtype=torch.int64):
        return False
    for rows, newest, _ in tables:
        alike = newest.dtype == rows.dtype or (newest.dtype, rows.dtype) == (
            torch.int64,
            torch.int32,
        )
        if not (alike and rows.stride(2) == 1 and in_memory(rows, newest)):
            return False
    return True


def _tensors(tables: Sequence[Table], steps: int | Tensor) -> list[Tensor | None]:
    return [
        *(part for table in tables for part in table[:2]),
        steps if isinstance(steps, Tensor) else None,
    ]


def _columns(tables: Sequence[Table]) -> tuple[tuple[object, ...], ...]:
    """What the kernels know of the tables: rows, strides, newest, strides, C and prefix of each."""
    return (
        tuple(table.rows for table in tables),
        tuple(table.rows.stride() for table in tables),
        tuple(table.newest for table in tables),
        tuple(table.newest.stride() for table in tables),
        tuple(table.newest.shape[2] for table in tables),
        tuple(table.prefix for table in tables),
    )


def _blocks(tables: Sequence[Table], rows: int) -> tuple[int, int]:
    """Columns that a program moves of so many rows, and programs for those of the widest table."""
    widest = max(table.rows.shape[2] - table.prefix for table in tables)
    block = min(power_of_two(widest), max(16, 4096 // power_of_two(rows)))
    return block, cdiv(widest, block)


def _extend(table: Table, parents: Tensor, steps: int | Tensor) -> None:
    rows, newest, prefix = table
    count = newest.shape[2]
    if isinstance(steps, Tensor):
        moved = rows[:, :, prefix:]
        moved.copy_(reorder_rows_reference(moved, parents))
        columns = (
            torch.arange(prefix, prefix + count, device=rows.device, dtype=torch.int64)
            + steps * count
        )
        rows.index_copy_(2, columns, newest.to(rows.dtype))
    else:
        moved = rows.narrow(2, prefix, steps * count)
        moved.copy_(reorder_rows_reference(moved, parents))
        rows.narrow(2, prefix + steps * count, count).copy_(newest)


def _extend_all(tables: Sequence[Table], parents: Tensor, steps: int) -> None:
    """As `_extend`, of tables on a CPU: whole rows are copied, which takes a third of the time of single entries."""
    b, m = parents.shape
    index = (
        parents + torch.arange(0, b * m, m, device=parents.device, dtype=torch.int64)[:, None]
    ).view(-1)
    for rows, newest, prefix in tables:
        count = newest.shape[2]
        flat = rows.view(b * m, -1)
        if steps:
            moved = flat.narrow(1, prefix, steps * count)
            moved.copy_(moved.index_select(0, index))
        rows.narrow(2, prefix + steps * count, count).copy_(newest)


def _finish(
    finished: Tensor, table: Table, order: Tensor, beams: Tensor, steps: int | Tensor
) -> None:
    rows, newest, prefix = table
    end = rows.shape[2] if isinstance(steps, Tensor) else prefix + steps + 1
    candidates = reorder_rows_reference(rows[:, :, prefix:end], beams)
    if isinstance(steps, Tensor):
        candidates.index_copy_(2, steps, newest.to(rows.dtype))
    else:
        candidates[:, :, -1:] = newest
    kept = finished[:, :, prefix:end]
    kept.copy_(reorder_rows_reference(torch.cat([kept, candidates], 1), order))


@jit("steps", "beams", "parents_strides", "strides", "newest_strides", "prefixes")
def _extend_rows_kernel(
    parents_ptr, parents_strides, steps, beams, rows, strides, newest, newest_strides, counts, prefixes,
    COUNTED: constexpr, TABLES: constexpr, BEAMS: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Some columns of all beams of a sentence in one of the tables: every row is read before one is written."""
    sentence, beam = tl.program_id(0).to(tl.int64), tl.arange(0, BEAMS)
    if COUNTED:
        steps = tl.load(steps)
    is_beam = beam < beams
    parents_ptr += sentence * parents_strides[0]
    parents = tl.load(parents_ptr + beam * parents_strides[1], mask=is_beam, other=0)
    for i in tl.static_range(TABLES):
        if tl.program_id(2) == i:
            table = rows[i] + sentence * strides[i][0]
            filled = prefixes[i] + steps * counts[i]
            column = prefixes[i] + tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            old = is_beam[:, None] & (column < filled)[None, :]
            new = (
                is_beam[:, None]
                & (column >= filled)[None, :]
                & (column < filled + counts[i])[None, :]
            )
            at = (beam * newest_strides[i][1])[:, None] + (
                (column - filled) * newest_strides[i][2]
            )[None, :]
            added = tl.load(newest[i] + sentence * newest_strides[i][0] + at, mask=new)
            moved = tl.load(table + (parents * strides[i][1])[:, None] + column[None, :], mask=old)
            tl.debug_barrier()  # the rows of one column may lie with several threads
            values = tl.where(new, added.to(moved.dtype), moved)
            tl.store(
                table + (beam * strides[i][1])[:, None] + column[None, :], values, mask=old | new
            )


@jit(
    "steps",
    "beams",
    "order_strides",
    "candidates_strides",
    "finished_strides",
    "strides",
    "newest_strides",
    "prefixes",
)
def _finish_rows_kernel(
    order_ptr, order_strides, candidates_ptr, candidates_strides, steps, beams, finished, finished_strides, rows,
    strides, newest, newest_strides, counts, prefixes,
    COUNTED: constexpr, TABLES: constexpr, BEAMS: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Some columns of all finished rows of a sentence in one of the tables: all are read before one is written."""
    sentence, beam = tl.program_id(0).to(tl.int64), tl.arange(0, BEAMS)
    if COUNTED:
        steps = tl.load(steps)
    is_beam = beam < beams
    order = tl.load(
        order_ptr + sentence * order_strides[0] + beam * order_strides[1], mask=is_beam, other=0
    )
    candidate = order - beams  # below zero: a row that had finished before
    ends = is_beam & (candidate >= 0)
    candidates_ptr += sentence * candidates_strides[0]
    parents = tl.load(candidates_ptr + candidate * candidates_strides[1], mask=ends, other=0)
    for i in tl.static_range(TABLES):
        if tl.program_id(2) == i:
            table = finished[i] + sentence * finished_strides[i][0]
            filled = prefixes[i] + steps
            column = prefixes[i] + tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            inside = is_beam[:, None] & (column <= filled)[None, :]
            stays = inside & (candidate < 0)[:, None]
            kept = tl.load(
                table + (order * finished_strides[i][1])[:, None] + column[None, :], mask=stays
            )
            running = (
                rows[i]
                + sentence * strides[i][0]
                + (parents * strides[i][1])[:, None]
                + column[None, :]
            )
            ended = tl.load(running, mask=ends[:, None] & (column < filled)[None, :])
            last = newest[i] + sentence * newest_strides[i][0] + candidate * newest_strides[i][1]
            added = tl.load(last, mask=ends).to(ended.dtype)[:, None]
            tl.debug_barrier()  # the rows of one column may lie with several threads
            values = tl.where(stays, kept, tl.where((column == filled)[None, :], added, ended))
            tl.store(
                table + (beam * finished_strides[i][1])[:, None] + column[None, :],
                values,
                mask=inside,
            )
