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


class Finished(NamedTuple):
    """The finished rows of a table.

    Attributes:
        rows: (B, M, N), as the table's rows, with the same prefix.
        newest: (B, K, 1), the next column of each candidate. Any strides; cast to the rows' dtype.
    """

    rows: Tensor
    newest: Tensor


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
    _check_extended(tables, parents, steps)
    able_in_c = lambda: _supported_in_c(tables, steps, parents)  # noqa: E731
    backend = select_backend(
        "tables", lambda: _supported(tables), able_in_c, parents, *_tensors(tables, steps)
    )
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
    _launch(tables, parents, (), parents, parents, steps)


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
    _check_finished(finished, tables, order, beams, steps)
    supported = lambda: _supported(tables) and all(rows.stride(2) == 1 for rows in finished)  # noqa: E731
    able_in_c = lambda: (  # noqa: E731
        _supported_in_c(tables, steps, order, beams) and in_memory(*finished) and supported()
    )
    backend = select_backend(
        "tables", supported, able_in_c, order, beams, *finished, *_tensors(tables, steps)
    )
    if in_c(backend) and native.move_rows(
        backend, tables, finished, beams, order, cast(int, steps)
    ):
        return
    if backend is not TRITON:
        for rows, table in zip(finished, tables, strict=True):
            _finish(rows, table, order, beams, steps)
        return
    ended = [Finished(rows, table.newest) for rows, table in zip(finished, tables, strict=True)]
    _launch(tables, None, ended, order, beams, steps)


def finish_and_extend_(
    tables: Sequence[Table],
    parents: Tensor,
    finished: Sequence[Finished],
    order: Tensor,
    beams: Tensor,
    steps: int | Tensor,
) -> None:
    """Select the finished rows of several tables, then extend the tables, in one launch.

    Args:
        tables: as in `extend_rows_`, like `parents`.
        finished: the finished rows of the first tables.
        order: as in `finish_rows_reference`, like `beams`.
        steps: as in `extend_rows_reference`.

    Raises:
        ValueError: the shapes do not fit; the message holds them.
    """
    ending = [
        table._replace(newest=of.newest)
        for table, of in zip(tables[: len(finished)], finished, strict=True)
    ]
    rows = [of.rows for of in finished]
    supported = lambda: _supported(tables) and all(each.stride(2) == 1 for each in rows)  # noqa: E731
    others = parents, beams, *rows, *_tensors(ending, steps), *_tensors(tables, steps)
    if not use_triton("tables", supported, order, *others):
        finish_rows_(rows, ending, order, beams, steps)
        extend_rows_(tables, parents, steps)
        return
    _check_finished(rows, ending, order, beams, steps)
    _check_extended(tables, parents, steps)
    _launch(tables, parents, finished, order, beams, steps)


def _check_extended(tables: Sequence[Table], parents: Tensor, steps: int | Tensor) -> None:
    for table in tables:
        _check(table, steps)
        if parents.shape != table.rows.shape[:2] or table.newest.shape[:2] != parents.shape:
            raise ValueError(
                f"parents {tuple(parents.shape)} (B, M) and newest {tuple(table.newest.shape)} "
                f"(B, M, C) do not fit rows {tuple(table.rows.shape)} (B, M, N)"
            )


def _check_finished(
    finished: Sequence[Tensor],
    tables: Sequence[Table],
    order: Tensor,
    beams: Tensor,
    steps: int | Tensor,
) -> None:
    for rows, table in zip(finished, tables, strict=True):
        _check(table, steps)
        shapes = rows.shape == table.rows.shape and order.shape == rows.shape[:2]
        if not shapes or rows.dtype != table.rows.dtype or table.newest.shape != (*beams.shape, 1):
            raise ValueError(
                f"finished {tuple(rows.shape)} {rows.dtype}, order {tuple(order.shape)} (B, M), "
                f"beams {tuple(beams.shape)} (B, K), newest {tuple(table.newest.shape)} (B, K, 1) "
                f"do not fit rows {tuple(table.rows.shape)} {table.rows.dtype} (B, M, N)"
            )


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


def _supported(tables: Sequence[Table]) -> bool:
    return all(table.rows.shape[1] <= 64 and table.rows.stride(2) == 1 for table in tables)


def _supported_in_c(tables: Sequence[Table], steps: int | Tensor, *others: Tensor) -> bool:
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


def _launch(
    tables: Sequence[Table],
    parents: Tensor | None,
    finished: Sequence[Finished],
    order: Tensor,
    beams: Tensor,
    steps: int | Tensor,
) -> None:
    """Run the kernel; it extends the tables unless `parents` is None."""
    b, m = order.shape
    extended = parents is not None
    block, blocks = _blocks(tables, (2 * m if extended else 0) + (2 * m if finished else 0))
    indices = order if parents is None else parents, order, beams
    # The kernel has no use for these, but its tuples may not be empty.
    ended = finished or [Finished(tables[0].rows, tables[0].newest)]
    launch(
        _move_rows_kernel, (b, blocks, len(tables)), *indices,
        tuple(each.stride() for each in indices), steps, m, *_columns(tables), *_columns(ended),
        tuple(table.newest.shape[2] for table in tables), tuple(table.prefix for table in tables),
        COUNTED=isinstance(steps, Tensor), TABLES=len(tables), EXTENDED=extended,
        FINISHED=len(finished), BEAMS=power_of_two(m), BLOCK=block,
    )  # fmt: skip


def _columns(tables: Sequence[Table] | Sequence[Finished]) -> tuple[tuple[object, ...], ...]:
    """Return rows, their strides, newest and their strides, as the kernel takes them."""
    return (
        tuple(table.rows for table in tables),
        tuple(table.rows.stride() for table in tables),
        tuple(table.newest for table in tables),
        tuple(table.newest.stride() for table in tables),
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


@jit(
    "steps",
    "beams",
    "index_strides",
    "strides",
    "newest_strides",
    "finished_strides",
    "ending_strides",
    "prefixes",
)
def _move_rows_kernel(
    parents_ptr, order_ptr, candidates_ptr, index_strides, steps, beams, rows, strides, newest,
    newest_strides, finished, finished_strides, ending, ending_strides, counts, prefixes,
    COUNTED: constexpr, TABLES: constexpr, EXTENDED: constexpr, FINISHED: constexpr,
    BEAMS: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Update a block of columns of one sentence in one of the tables, and in its finished rows.

    It reads every row before it writes one.
    """
    sentence, beam = tl.program_id(0).to(tl.int64), tl.arange(0, BEAMS)
    if COUNTED:
        steps = tl.load(steps)
    is_beam = beam < beams
    parents_ptr += sentence * index_strides[0][0]
    parents = tl.load(parents_ptr + beam * index_strides[0][1], mask=is_beam, other=0)
    order_ptr += sentence * index_strides[1][0]
    order = tl.load(order_ptr + beam * index_strides[1][1], mask=is_beam, other=0)
    candidate = order - beams  # negative: a row that finished in an earlier step
    candidates_ptr += sentence * index_strides[2][0] + candidate * index_strides[2][1]
    origins = tl.load(candidates_ptr, mask=is_beam & (candidate >= 0), other=0)
    for i in tl.static_range(TABLES):
        if tl.program_id(2) == i:
            filled = prefixes[i] + steps * counts[i]
            column = prefixes[i] + tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            table = rows[i] + sentence * strides[i][0] + column[None, :]
            row, finished_row = beam * strides[i][1], table
            extended, extends, ended, ends = beam, is_beam, beam, is_beam
            if EXTENDED:
                extended, extends = _extended(
                    table + (parents * strides[i][1])[:, None],
                    newest[i] + sentence * newest_strides[i][0]
                    + (beam * newest_strides[i][1])[:, None]
                    + ((column - filled) * newest_strides[i][2])[None, :],
                    is_beam, column - filled, counts[i],
                )  # fmt: skip
            if i < FINISHED:
                finished_row = finished[i] + sentence * finished_strides[i][0] + column[None, :]
                ended, ends = _ended(
                    finished_row + (order * finished_strides[i][1])[:, None],
                    table + (origins * strides[i][1])[:, None],
                    ending[i] + sentence * ending_strides[i][0] + candidate * ending_strides[i][1],
                    is_beam, candidate, column - filled,
                )  # fmt: skip
            tl.debug_barrier()  # several threads may hold the rows of one column
            if EXTENDED:
                tl.store(table + row[:, None], extended, mask=extends)
            if i < FINISHED:
                tl.store(finished_row + (beam * finished_strides[i][1])[:, None], ended, mask=ends)


@jit()
def _extended(moved_ptr, newest_ptr, is_beam, beyond, count):
    """Return the extended rows of a table, and which of their columns there are.

    Args:
        moved_ptr: the old rows of the parents.
        newest_ptr: the newest columns, at the columns where they belong.
        is_beam: which rows there are.
        beyond: the number of each column, 0 for the first of the newest.
        count: the number of newest columns.
    """
    old = is_beam[:, None] & (beyond < 0)[None, :]
    new = is_beam[:, None] & (beyond >= 0)[None, :] & (beyond < count)[None, :]
    moved = tl.load(moved_ptr, mask=old)
    added = tl.load(newest_ptr, mask=new)
    return tl.where(new, added.to(moved.dtype), moved), old | new


@jit()
def _ended(kept_ptr, running_ptr, newest_ptr, is_beam, candidate, beyond):
    """Return the finished rows of a table, and which of their columns there are.

    Args:
        kept_ptr: the old finished rows.
        running_ptr: the rows that the candidates extend.
        newest_ptr: the newest column of each candidate.
        is_beam: which rows there are.
        candidate: the candidate in each row; negative for an old finished row.
        beyond: the number of each column, 0 for the newest.
    """
    inside = is_beam[:, None] & (beyond <= 0)[None, :]
    stays = inside & (candidate < 0)[:, None]
    ends = is_beam & (candidate >= 0)
    kept = tl.load(kept_ptr, mask=stays)
    running = tl.load(running_ptr, mask=ends[:, None] & (beyond < 0)[None, :])
    newest = tl.load(newest_ptr, mask=ends).to(running.dtype)[:, None]
    return tl.where(stays, kept, tl.where((beyond == 0)[None, :], newest, running)), inside
