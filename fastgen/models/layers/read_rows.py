"""Forwards in which only some positions of each text are read: linear layers compute no others.

Padding is computed with all other tokens although nothing reads it. Linear layers, which take most
of a forward, compute the rows that are read and leave zeros in the others.
"""

from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar

import torch
from torch import Tensor

from fastgen.context import PREFIX, assigned

LEAST_WORK, LEAST_SHARE = 2**21, 64
"""What skipping rows has to save: unread rows times the squared width, and their share of all rows
times the width. Less does not pay for gathering and placing the others."""


class ReadRows:
    """The rows of inputs of linear layers whose outputs are read.

    Args:
        read: (B, T) bool, the positions of the texts.
        source: The encoder's output (B, S, C) that the texts' layers read; None if there is none.
        visible: (B, S) bool, the positions of `source` that are read.
    """

    def __init__(
        self, read: Tensor, source: Tensor | None = None, visible: Tensor | None = None
    ) -> None:
        self.shape, self.source = read.shape, source
        self.texts, self.sources = _Rows(read), None if visible is None else _Rows(visible)

    def of(self, x: Tensor) -> "_Rows | None":
        """Return the rows of an input (..., K) that are read; None if all are."""
        if x is self.source:
            return self.sources
        return self.texts if x.shape[:-1] == self.shape else None


class _Rows:
    def __init__(self, read: Tensor) -> None:
        flat = read.flatten()
        self.read, self.unread = flat.nonzero()[:, 0], (~flat).nonzero()[:, 0]
        self._latest: tuple[Tensor, Tensor] | None = None

    def chosen(self, x: Tensor) -> Tensor:
        """Return the rows (N, K) of an input (B, T, K) that are read."""
        if self._latest is None or self._latest[0] is not x:
            # Several layers read the same input.
            self._latest = x, x.flatten(0, -2).index_select(0, self.read)
        return self._latest[1]

    def placed(self, y: Tensor, shape: torch.Size) -> Tensor:
        """Return outputs (N, K) at their places in (B, T, K), which is zero elsewhere."""
        out = torch.empty(shape.numel(), y.shape[-1], dtype=y.dtype, device=y.device)
        out.index_copy_(0, self.read, y.as_subclass(Tensor)).index_fill_(0, self.unread, 0)
        return out.view(*shape, -1)


read_rows: ContextVar[ReadRows | None] = ContextVar(f"{PREFIX}read_rows", default=None)
"""The rows that are read of the forward that runs in this context; None for all."""


def reading(
    read: Tensor, width: int, source: Tensor | None = None, visible: Tensor | None = None
) -> AbstractContextManager[object]:
    """Return a context manager of a forward of which only some positions are read, if that pays.

    Args:
        read: (B, T) bool, positions that are read by the caller or by other positions.
        width: Width of the model.
        source: As in `ReadRows`.
        visible: As in `ReadRows`.
    """
    unread = int(read.numel() - read.count_nonzero())
    pays = (
        unread * width**2 >= LEAST_WORK
        and unread * width >= LEAST_SHARE * read.numel()
        and unread < read.numel()
    )
    # The shape has to tell texts (B, T) from sources that were copied, and from texts (T, B).
    clear = read.shape != read.shape[::-1] and (visible is None or read.shape != visible.shape)
    return assigned(read_rows, ReadRows(read, source, visible)) if pays and clear else nullcontext()
