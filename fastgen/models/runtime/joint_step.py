"""Several calls in one decode step: what reads the weights runs over the rows of all, attention over those of each.

Source: Yu et al. 2022 (Orca), section 3.2: selective batching.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastgen.models.layers.positions import Bias, Rotary, turned_once
from fastgen.models.runtime.decode_step import Context, DecoderStep


@dataclass
class Joint:
    """`StepInputs` of several calls, whose rows lie one behind the other.

    Attributes:
        parts: the context of each. rows: how many rows each has.
    """

    parts: Sequence[Context]
    rows: list[int]
    rotations: dict[int, tuple[Tensor, Tensor]] = field(
        default_factory=dict[int, tuple[Tensor, Tensor]]
    )

    def __post_init__(self) -> None:
        self.position: int | Tensor = self._position()

    def _position(self) -> int | Tensor:
        found, device = [part.position for part in self.parts], self.parts[0].text[0].keys.device
        if not any(isinstance(position, Tensor) for position in found) and len(set(found)) == 1:
            return found[0]
        of_rows = (
            torch.as_tensor(at, dtype=torch.int64, device=device).expand(n)
            for at, n in zip(found, self.rows, strict=True)
        )
        return torch.cat(list(of_rows))

    def rotation(self, rotary: Rotary, x: Tensor) -> tuple[Tensor, Tensor]:
        return turned_once(self.rotations, rotary, self.position, x)

    def self_attention(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, bias: Bias | None, scale: float,
        softcap: float | None,
    ) -> Tensor:  # fmt: skip
        pieces = zip(
            self.parts, *(torch.split(x, self.rows) for x in (query, key, value)), strict=True
        )
        return torch.cat(
            [part.self_attention(layer, q, k, v, bias, scale, softcap) for part, q, k, v in pieces]
        )

    def cross_attention(self, layer: int, query: Tensor, scale: float) -> Tensor:
        pieces = zip(self.parts, torch.split(query, self.rows), strict=True)
        return torch.cat([part.cross_attention(layer, q, scale) for part, q in pieces])


def joint_step(
    decoder: DecoderStep, tokens: Sequence[Tensor], parts: Sequence[Context]
) -> list[tuple[Tensor, Tensor | None]]:
    """Make a step of several contexts, for the newest tokens (R,) of each.

    Returns:
        For each its logits (R, V), and the attention over the source (R, S) fp32 that its context asks for, or None.
    """
    if len(parts) == 1:
        made = [decoder(tokens[0], parts[0])]
    else:
        rows = [len(of_part) for of_part in tokens]
        made = decoder(torch.cat(list(tokens)), Joint(parts, rows)).split(rows)
    return [(logits, part.weights) for logits, part in zip(made, parts, strict=True)]
