"""Positional information in attention: rotary embeddings, and biases of the attention scores."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Rotary = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Maps a tensor x and positions (1 or R, 1) to cosine and sine, (1 or R, 1, E) each.

Both have the dtype and device of x.
"""


def rotation_once(
    known: dict[int, tuple[Tensor, Tensor]], rotary: Rotary, at: int | Tensor, x: Tensor
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine for the positions of a step, computed once for all of its layers.

    Args:
        known: Results of this step, by the id of `rotary`.
        rotary: The rotary embedding.
        at: The positions, as `Context.position`.
        x: Tensor of the required dtype and device.
    """
    if id(rotary) not in known:
        known[id(rotary)] = rotary(
            x,
            at[:, None]
            if isinstance(at, Tensor)
            else torch.full((1, 1), at, device=x.device, dtype=torch.int64),
        )
    return known[id(rotary)]


@dataclass(frozen=True)
class RotationTable:
    """A `Rotary` that looks up a table.

    Attributes:
        table: (P, E), sines and then cosines, one of each per pair of adjacent channels.
    """

    table: Tensor

    def __call__(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        sine, cosine = self.table[positions].to(x.dtype).repeat_interleave(2, -1).chunk(2, -1)
        return cosine, sine


@dataclass(frozen=True)
class InterleavedRotary:
    """A `Rotary` for pairs of adjacent channels, from one whose pairs are half the channels apart.

    Attributes:
        halves: Returns the angles of all pairs, twice.
    """

    halves: Rotary

    def __call__(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cosine, sine = (
            angles.chunk(2, -1)[0].repeat_interleave(2, -1) for angles in self.halves(x, positions)
        )
        return cosine, sine


@dataclass(frozen=True)
class PairedRotary:
    """A `Rotary` for halves of the channels, from one that returns the angle of each pair once.

    Attributes:
        pairs: Returns the angles.
    """

    pairs: Rotary

    def __call__(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cosine, sine = (torch.cat([angles] * 2, -1) for angles in self.pairs(x, positions))
        return cosine, sine


@dataclass(frozen=True)
class ComplexRotary:
    """A `Rotary` for pairs of adjacent channels, from one that returns complex numbers.

    Attributes:
        numbers: Returns cosine plus i times sine of the angle of each pair.
    """

    numbers: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cosine, sine = torch.view_as_real(self.numbers(x, positions)).unbind(-1)
        return cosine.repeat_interleave(2, -1), sine.repeat_interleave(2, -1)


@dataclass(frozen=True)
class AttentionBias:
    """A bias of attention scores that depends on the position of the key.

    Attributes:
        make: Returns (H or 1, L), by the key's distance from the query, from 0 (Raffel et al.
            2020).
        by_position: Whether it is indexed by the key's own position instead, as ALiBi in BLOOM and
            Falcon (Press et al. 2022). Both agree up to rounding: a softmax is invariant to what
            all keys have in common.
    """

    make: Callable[[], Tensor]
    by_position: bool = False

    @functools.cached_property
    def table(self) -> Tensor:
        return self.make()

    def at(self, distance: Tensor, position: int | Tensor) -> Tensor:
        """Return the bias (B, H, Q, N) of keys.

        Out-of-range indices, such as those of slots that are not filled yet, are clamped; masks
        hide them.

        Args:
            distance: (B, Q, N) int64, of the keys from the queries.
            position: Position of the queries, an int or (B, Q, 1) int64.
        """
        index = (position - distance if self.by_position else distance).clamp(
            0, self.table.shape[1] - 1
        )
        bias = self.table.index_select(1, index.flatten())
        return bias.view(-1, *index.shape).transpose(0, 1)
