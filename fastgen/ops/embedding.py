"""The input of a decoder: scaled token embeddings plus position embeddings, and their norm.

Source: Wang et al. 2021 (LightSeq), section 2.1: one operation for all that stands between two
matrix products.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastgen.ops import native
from fastgen.ops.dispatch import (
    constexpr,
    in_c,
    in_memory,
    jit,
    launch,
    plain,
    power_of_two,
    select_backend,
    tl,
    unsupported,
    use_triton,
)
from fastgen.ops.norm import WIDEST, NormParameters, norm, store_normalised


class Positions(NamedTuple):
    """The position embeddings of the newest tokens.

    Attributes:
        table: (P, C).
        first: row of the table for position 0.
        at: position of the newest token; (1,) or (R,) int64 if only the device knows it.
        padding: id of the padding token, if its row differs; None if it does not.
        padding_row: row for padding; None for the row before that of its position.
    """

    table: Tensor
    first: int
    at: int | Tensor
    padding: int | None = None
    padding_row: int | None = None

    def rows(self) -> tuple[Tensor, tuple[int, Tensor] | None]:
        """Return `position` and `padding` as `embedding` takes them."""
        row = self.table[self.first + self.at]
        if self.padding is None:
            return row, None
        other = self.first + self.at - 1 if self.padding_row is None else self.padding_row
        return row, (self.padding, self.table[other])


def embedding_reference(
    ids: Tensor,
    tokens: Tensor,
    scale: float,
    position: Tensor | None = None,
    padding: tuple[int, Tensor] | None = None,
) -> Tensor:
    """Return rows of `tokens` times `scale`, plus a position's row.

    Args:
        ids: (R,) int64, below V.
        tokens: (V, C).
        scale: the factor of the token embeddings.
        position: (C,), the same for all rows, or (R, C); None to add nothing.
        padding: (id, row): the row (C,) or (R, C) that replaces `position` for this token id.

    Returns:
        (R, C).
    """
    x = F.embedding(ids, tokens)
    if scale != 1.0:
        x.mul_(scale)
    return x if position is None else x.add_(rows_of_positions(ids, position, padding))


def rows_of_positions(ids: Tensor, position: Tensor, padding: tuple[int, Tensor] | None) -> Tensor:
    """Return the position's row of each id, (C,) or (R, C).

    Arguments as `embedding_reference`.
    """
    return (
        position
        if padding is None
        else torch.where((ids == padding[0])[:, None], padding[1], position)
    )


def embedding(
    ids: Tensor,
    tokens: Tensor,
    scale: float,
    position: Tensor | None = None,
    padding: tuple[int, Tensor] | None = None,
) -> Tensor:
    """Return the result of `embedding_reference`, for the same arguments.

    Raises:
        IndexError: an id is not a row of `tokens`; raised by torch.
    """
    token, other = (-1, None) if padding is None else padding
    backend = select_backend(
        "embedding", unsupported, lambda: _covered_in_c(ids, tokens, position, other), ids
    )
    if in_c(backend):
        out = native.embedding(backend, ids, tokens, scale, position, token, other)
        if out is not None:
            return out
    return embedding_reference(ids, tokens, scale, position, padding)


def normed_embedding(
    ids: Tensor, tokens: Tensor, scale: float, positions: Positions | None, of: NormParameters
) -> tuple[Tensor, Tensor]:
    """Return the norm of the embeddings and the embeddings, as `norm` of `embedding` does.

    Args:
        ids: (R,) int64. The kernel embeds an id outside the vocabulary as NaN.
        tokens: (V, C).
        scale: the factor of the token embeddings.
        positions: the position embeddings; None for none.
        of: the norm.

    Returns:
        normalised, total: (R, C) in the dtype of `tokens`.
    Numerics: the scaled embeddings and their sum are rounded to the dtype of `tokens`, as torch
    does; the norm is that of `norm`.
    """
    table, first, at, padding, padding_row = positions or (None, 0, 0, None, None)
    counted = at if isinstance(at, Tensor) else None
    others = tokens, table, counted, of.weight, of.bias
    if not use_triton("embedding", lambda: _covered(ids, tokens, table, others[2:]), ids, *others):
        row, other = (None, None) if positions is None else positions.rows()
        x = embedding(ids, tokens, scale, row, other)
        return norm(x, *of[:3], rms=of.rms, offset=of.offset)
    d = tokens.shape[1]
    total = tokens.new_empty(len(ids), d)
    normalised = torch.empty_like(total)
    places, weight, bias = (tokens if t is None else t for t in (table, of.weight, of.bias))
    padding, padding_row = (-1 if number is None else number for number in (padding, padding_row))
    block = power_of_two(d)
    launch(
        _embedding_kernel, (len(ids),), ids, tokens, places, at, weight, bias, normalised, total, d,
        len(tokens), tokens.stride(0), places.stride(0), first, padding, padding_row, scale, of.eps,
        of.offset, BLOCK=block, SCALED=scale != 1.0, POSITIONS=table is not None,
        COUNTED=counted is not None, EACH=counted is not None and len(counted) > 1,
        WEIGHT=of.weight is not None, BIAS=of.bias is not None, RMS=of.rms, OFFSET=of.offset != 0,
        num_warps=min(16, max(1, block // 256)),
    )  # fmt: skip
    return normalised, total


@jit("at", "vocabulary", "first", "padding", "padding_row")
def _embedding_kernel(
    ids_ptr, tokens_ptr, positions_ptr, at, weight_ptr, bias_ptr, normalised_ptr, total_ptr, dims,
    vocabulary, token_stride, position_stride, first, padding, padding_row, scale, eps, offset,
    BLOCK: constexpr, SCALED: constexpr, POSITIONS: constexpr, COUNTED: constexpr, EACH: constexpr,
    WEIGHT: constexpr, BIAS: constexpr, RMS: constexpr, OFFSET: constexpr,
):  # fmt: skip
    """Embed one token and normalise the result; EACH means that positions differ by token."""
    out = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, BLOCK)
    inside = dim < dims
    token = tl.load(ids_ptr + out)
    known = inside & (token >= 0) & (token < vocabulary)
    total = tl.load(tokens_ptr + token * token_stride + dim, mask=known, other=float("nan"))
    total = tl.where(inside, total, 0.0)
    dtype = total.dtype
    total = total.to(tl.float32)
    if SCALED:
        total = (total * scale).to(dtype).to(tl.float32)
    if POSITIONS:
        if EACH:
            at += out
        if COUNTED:
            at = tl.load(at)
        row = tl.zeros([], tl.int64) + first + at
        row = tl.where(token == padding, tl.where(padding_row < 0, row - 1, padding_row), row)
        position = tl.load(positions_ptr + row * position_stride + dim, mask=inside, other=0.0)
        total = (total + position.to(tl.float32)).to(dtype).to(tl.float32)
    tl.store(total_ptr + out * dims + dim, total.to(dtype), mask=inside)
    store_normalised(
        normalised_ptr + out * dims, total, weight_ptr, bias_ptr, dim, inside, dims, eps, offset,
        WEIGHT, BIAS, RMS, OFFSET,
    )  # fmt: skip


def _covered(
    ids: Tensor, tokens: Tensor, table: Tensor | None, others: Sequence[Tensor | None]
) -> bool:
    """Whether the kernel covers these shapes and dtypes; `others` are positions and parameters."""
    at = others[0]
    return (
        ids.dtype == torch.int64
        and ids.dim() == 1
        and ids.is_contiguous()
        and (at is None or at.shape in ((1,), ids.shape))
        and tokens.dtype != torch.float64
        and tokens.shape[1] <= WIDEST
        and tokens.stride(1) == 1
        and (table is None or (table.dtype == tokens.dtype and table.stride(1) == 1))
        and all(each is None or each.is_contiguous() for each in others)
    )


def _covered_in_c(
    ids: Tensor, tokens: Tensor, position: Tensor | None, other: Tensor | None
) -> bool:
    rows = [row for row in (position, other) if row is not None]
    return (
        ids.dim() == 1
        and in_memory(ids, dtype=torch.int64)
        and tokens.dim() == 2
        and plain(tokens.data, *rows)
        and tokens.stride(1) == 1
        and all(
            row.shape in (tokens.shape[1:], (len(ids), tokens.shape[1])) and row.stride(-1) == 1
            for row in rows
        )
    )
