"""The input of a decoder: scaled token embeddings plus position embeddings.

Source: Wang et al. 2021 (LightSeq), section 2.1: one operation for all that stands between two
matrix products.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from fastgen.ops import native
from fastgen.ops.dispatch import chosen, in_c, in_memory, never, plain


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
    backend = chosen("embedding", never, lambda: _covered_in_c(ids, tokens, position, other), ids)
    if in_c(backend):
        out = native.embedding(backend, ids, tokens, scale, position, token, other)
        if out is not None:
            return out
    return embedding_reference(ids, tokens, scale, position, padding)


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
        and all(row.shape == tokens.shape[1:] and row.stride(0) == 1 for row in rows)
    )
