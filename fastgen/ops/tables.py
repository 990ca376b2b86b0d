"""Tables of a beam search with one row per beam.

In a decode step rows are reordered, extended by the newest entries, and copied to the finished
rows. A step updates all its tables in one launch. The number of steps may be known to the device
alone, so a launch can be captured and replayed while the texts grow.

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
    """A table with a row per beam, which grows by C columns per step.

    Attributes:
        rows: (B, M, N) of any dtype, last dim contiguous, with spare columns. `prefix` columns that
            no step changes come first, then the columns of the steps so far.
        newest: (B, M, C), the next columns of the rows, or (B, K, C), those of the candidates. Any
            strides; cast to the rows' dtype.
        prefix: the number of unchanged columns.
    """

    rows: Tensor
    newest: Tensor
    prefix: int = 0


def extend_rows_reference(table: Table, parents: Tensor, steps: int | Tensor) -> Tensor:
    """Return a copy of the rows, reordered by `parents` and extended by the newest columns.

    Row m of sentence b becomes its former row parents[b, m].

    Args:
        table: the rows, and newest (B, M, C).
        parents: (B, M) int64.
        steps: the number of steps so far; column prefix + steps * C is the first that is written. A
            tensor (1,) int64 if only the device knows it.
    """
    rows = table.rows.clone()
    _extend(Table(rows, table.newest, table.prefix), parents, steps)
    return rows


def extend_rows_(tables: Sequence[Table], parents: Tensor, steps: int | Tensor) -> None:
    """Reorder and extend the rows of several tables in place, in one launch.

    Arguments as `extend_rows_reference`. Columns after the newest ones are undefined. A `steps` on
    the device is not checked against the size of the tables.

    Raises:
        ValueError: the shapes do not fit; the message holds them.
    """
    for table in tables:
        _check(table, steps)
        if parents.shape != table.rows.shape[:2] or table.newest.shape[:2] != parents.shape:
            raise ValueError(
                f"parents {tuple(parents.shape)} (B, M) and newest {tuple(table.newest.shape)} "
                f"(B, M, C) do not fit rows {tuple(table.rows.shape)} (B, M, N)"
            )
    able_in_c = lambda: _able_in_c(tables, steps, parents)  # noqa: E731
    backend = chosen("tables", lambda: _able(tables), able_in_c, parents, *_tensors(tables, steps))
    if in_c(backend) and native.move_rows(backend, tables, (), parents, None, cast(int, steps)):
        return
    if backend is not TRITON:
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
        _extend_rows_kernel, (b, blocks, len(tables)), parents, parents.stride(), steps, m,
        *_columns(tables), COUNTED=isinstance(steps, Tensor), TABLES=len(tables),
        BEAMS=power_of_two(m), BLOCK=block,
    )  # fmt: skip


def finish_rows_reference(
    finished: Tensor, table: Table, order: Tensor, beams: Tensor, steps: int | Tensor
) -> Tensor:
    """Return the finished rows after a step, selected from old finished rows and candidates.

    A candidate extends a running row by one column.

    Args:
        finished: (B, M, N) as `table.rows`, with the same prefix.
        table: the running rows, and the newest (B, K, 1) of each candidate.
        order: (B, M) int64 into M finished rows, then K candidates.
        beams: (B, K) int64, the running row that each candidate extends.
        steps: as in `extend_rows_reference`.
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
    """Select the finished rows of several tables in place, in one launch.

    Arguments as `finish_rows_reference`.

    Raises:
        ValueError: the shapes do not fit; the message holds them.
    """
    for rows, table in zip(finished, tables, strict=True):
        _check(table, steps)
        shapes = rows.shape == table.rows.shape and order.shape == rows.shape[:2]
        if not shapes or rows.dtype != table.rows.dtype or table.newest.shape != (*beams.shape, 1):
            raise ValueError(
                f"finished {tuple(rows.shape)} {rows.dtype}, order {tuple(order.shape)} (B, M), "
                f"beams {tuple(beams.shape)} (B, K), newest {tuple(table.newest.shape)} (B, K, 1) "
                f"do not fit rows {tuple(table.rows.shape)} {table.rows.dtype} (B, M, N)"
            )
    able = lambda: _able(tables) and all(rows.stride(2) == 1 for rows in finished)  # noqa: E731
    able_in_c = lambda: (  # noqa: E731
        _able_in_c(tables, steps, order, beams) and in_memory(*finished) and able()
    )
    backend = chosen("tables", able, able_in_c, order, beams, *finished, *_tensors(tables, steps))
    if in_c(backend) and native.move_rows(
        backend, tables, finished, beams, order, cast(int, steps)
    ):
        return
    if backend is not TRITON:
        for rows, table in zip(finished, tables, strict=True):
            _finish(rows, table, order, beams, steps)
        return
    b, m = order.shape
    block, blocks = _blocks(tables, 2 * m)
    launch(
        _finish_rows_kernel, (b, blocks, len(tables)), order, order.stride(), beams, beams.stride(),
        steps, m, tuple(finished), tuple(rows.stride() for rows in finished), *_columns(tables),
        COUNTED=isinstance(steps, Tensor), TABLES=len(tables), BEAMS=power_of_two(m), BLOCK=block,
    )  # fmt: skip


def _check(table: Table, steps: int | Tensor) -> None:
    rows, newest = table.rows, table.newest
    if rows.dim() != 3 or newest.dim() != 3 or newest.shape[0] != rows.shape[0]:
        raise ValueError(
            f"rows {tuple(rows.shape)} must be (B, M, N) and newest {tuple(newest.shape)} "
            "(B, M or K, C)"
        )
    if (
        not isinstance(steps, Tensor)
        and not 0 <= steps * newest.shape[2] <= rows.shape[2] - table.prefix - newest.shape[2]
    ):
        raise ValueError(
            f"{steps} steps of {tuple(newest.shape)} behind {table.prefix} of rows "
            f"{tuple(rows.shape)}"
        )


def _able(tables: Sequence[Table]) -> bool:
    return all(table.rows.shape[1] <= 64 and table.rows.stride(2) == 1 for table in tables)


def _able_in_c(tables: Sequence[Table], steps: int | Tensor, *others: Tensor) -> bool:
    """Whether C covers the tables: rows are contiguous, newest needs a copy or int64 to int32."""
    if isinstance(steps, Tensor) or not in_memory(*others, dtype=torch.int64):
        return False
    for rows, newest, _ in tables:
        copyable = newest.dtype == rows.dtype or (newest.dtype, rows.dtype) == (
            torch.int64,
            torch.int32,
        )
        if not (copyable and rows.stride(2) == 1 and in_memory(rows, newest)):
            return False
    return True


def _tensors(tables: Sequence[Table], steps: int | Tensor) -> list[Tensor | None]:
    return [
        *(part for table in tables for part in table[:2]),
        steps if isinstance(steps, Tensor) else None,
    ]


def _columns(tables: Sequence[Table]) -> tuple[tuple[object, ...], ...]:
    """Return rows, strides, newest, their strides, C and prefix of each table, for the kernels."""
    return (
        tuple(table.rows for table in tables),
        tuple(table.rows.stride() for table in tables),
        tuple(table.newest for table in tables),
        tuple(table.newest.stride() for table in tables),
        tuple(table.newest.shape[2] for table in tables),
        tuple(table.prefix for table in tables),
    )


def _blocks(tables: Sequence[Table], rows: int) -> tuple[int, int]:
    """Choose the columns per program, and the number of programs for the widest table.

    Args:
        rows: the number of rows that a program holds.
    """
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
    """Extend tables on a CPU; copies whole rows, in a third of the time of single entries."""
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
    parents_ptr, parents_strides, steps, beams, rows, strides, newest, newest_strides, counts,
    prefixes, COUNTED: constexpr, TABLES: constexpr, BEAMS: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Update a block of columns of one sentence in one of the tables.

    It reads every row before it writes one.
    """
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
            new_offset = (beam * newest_strides[i][1])[:, None] + (
                (column - filled) * newest_strides[i][2]
            )[None, :]
            added = tl.load(newest[i] + sentence * newest_strides[i][0] + new_offset, mask=new)
            moved = tl.load(table + (parents * strides[i][1])[:, None] + column[None, :], mask=old)
            tl.debug_barrier()  # several threads may hold the rows of one column
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
    order_ptr, order_strides, candidates_ptr, candidates_strides, steps, beams, finished,
    finished_strides, rows, strides, newest, newest_strides, counts, prefixes, COUNTED: constexpr,
    TABLES: constexpr, BEAMS: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Update a block of columns of the finished rows of one sentence in one of the tables.

    It reads every row before it writes one.
    """
    sentence, beam = tl.program_id(0).to(tl.int64), tl.arange(0, BEAMS)
    if COUNTED:
        steps = tl.load(steps)
    is_beam = beam < beams
    order = tl.load(
        order_ptr + sentence * order_strides[0] + beam * order_strides[1], mask=is_beam, other=0
    )
    candidate = order - beams  # negative: a row that finished in an earlier step
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
            tl.debug_barrier()  # several threads may hold the rows of one column
            values = tl.where(stays, kept, tl.where((column == filled)[None, :], added, ended))
            tl.store(
                table + (beam * finished_strides[i][1])[:, None] + column[None, :],
                values,
                mask=inside,
            )
