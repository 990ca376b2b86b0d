"""Where tokens stand, as attention sees it: rotations of queries and keys, and biases of their scores."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Rotary = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Gives cosine and sine (1 or R, 1, E), of the dtype and device of a tensor, for positions (1 or R, 1)."""


def turned_once(
    known: dict[int, tuple[Tensor, Tensor]], rotary: Rotary, at: int | Tensor, x: Tensor
) -> tuple[Tensor, Tensor]:
    """Cosine and sine for positions `at`, as `Context` has them, kept in `known` for the other layers of a step."""
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
    """A `Rotary` that looks up what it gives: sines, then cosines, of each pair of neighbours, (P, E)."""

    table: Tensor

    def __call__(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        sine, cosine = self.table[positions].to(x.dtype).repeat_interleave(2, -1).chunk(2, -1)
        return cosine, sine


@dataclass(frozen=True)
class Bias:
    """What is added to attention scores by where a key stands.

    Attributes:
        make: gives (H or 1, L), by a key's distance from the query, from 0 on (Raffel et al. 2020).
        by_position: whether it is by the key's own position instead, as BLOOM and Falcon have ALiBi (Press et al.
            2022): the same but for rounding, as a softmax takes no notice of what all keys have in common.
    """

    make: Callable[[], Tensor]
    by_position: bool = False

    @functools.cached_property
    def table(self) -> Tensor:
        return self.make()

    def at(self, distance: Tensor, position: int | Tensor) -> Tensor:
        """Return (B, H, Q, N) for keys at a distance (B, Q, N) int64 from queries at a position, (B, Q, 1) int64.

        What is out of reach, as are slots that are not filled yet, gets what is nearest; no mask lets it be seen.
        """
        index = (position - distance if self.by_position else distance).clamp(
            0, self.table.shape[1] - 1
        )
        found = self.table.index_select(1, index.flatten())
        return found.view(-1, *index.shape).transpose(0, 1)
