"""What a decoder reads of its tokens: their embeddings, scaled, and that of their position.

Source: Wang et al. 2021 (LightSeq), section 2.1: one operation for all that stands between two matrix products.
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
    """Return (R, C): rows of `tokens` times `scale`, plus that of a position.

    Args:
        ids: (R,) int64, below V. tokens: (V, C).
        position: (C,), of all rows, or (R, C); None for none.
        padding: a token that has another one wherever it stands, (C,) or (R, C).
    """
    x = F.embedding(ids, tokens)
    if scale != 1.0:
        x.mul_(scale)
    return x if position is None else x.add_(rows_of_positions(ids, position, padding))


def rows_of_positions(ids: Tensor, position: Tensor, padding: tuple[int, Tensor] | None) -> Tensor:
    """The row of each id's position, (C,) or (R, C); arguments as `embedding_reference`."""
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
    """Return what `embedding_reference` does, for the same arguments.

    Raises:
        IndexError: an id that is no row of `tokens`, from torch.
    """
    token, other = (-1, None) if padding is None else padding
    by = chosen("embedding", never, lambda: _covered_in_c(ids, tokens, position, other), ids)
    if in_c(by):
        made = native.embedding(by, ids, tokens, scale, position, token, other)
        if made is not None:
            return made
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
