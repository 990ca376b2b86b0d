"""One decode step for several calls.

Matrix products run over the rows of all calls, attention runs over the rows of each call.

Source: Yu et al. 2022 (Orca), section 3.2 (selective batching).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastgen.models.layers.positions import Rotary, rotation_once
from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.models.runtime.step_inputs import CallStepInputs, Scoring


@dataclass
class JointStepInputs:
    """`StepInputs` of several calls, whose rows are concatenated.

    Attributes:
        parts: Context of each call.
        rows: Number of rows of each call.
        rotations: Cosines and sines, by the id of the `Rotary`; they serve all layers of a step.
        position: Position of the newest token, counted from 0; (R,) int64 if rows differ.
    """

    parts: Sequence[CallStepInputs]
    rows: list[int]
    rotations: dict[int, tuple[Tensor, Tensor]] = field(
        default_factory=dict[int, tuple[Tensor, Tensor]]
    )

    def __post_init__(self) -> None:
        self.position: int | Tensor = self._position()

    def _position(self) -> int | Tensor:
        positions, device = (
            [part.position for part in self.parts],
            self.parts[0].text[0].keys.device,
        )
        if (
            not any(isinstance(position, Tensor) for position in positions)
            and len(set(positions)) == 1
        ):
            return positions[0]
        row_positions = (
            torch.as_tensor(at, dtype=torch.int64, device=device).expand(n)
            for at, n in zip(positions, self.rows, strict=True)
        )
        return torch.cat(list(row_positions))

    def rotation(self, rotary: Rotary, x: Tensor) -> tuple[Tensor, Tensor]:
        return rotation_once(self.rotations, rotary, self.position, x)

    def self_attention(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scoring: Scoring,
    ) -> Tensor:
        pieces = zip(
            self.parts, *(torch.split(x, self.rows) for x in (query, key, value)), strict=True
        )
        return torch.cat([part.self_attention(layer, q, k, v, scoring) for part, q, k, v in pieces])

    def cross_attention(self, layer: int, query: Tensor, scale: float) -> Tensor:
        pieces = zip(self.parts, torch.split(query, self.rows), strict=True)
        return torch.cat([part.cross_attention(layer, q, scale) for part, q in pieces])


def joint_step(
    decoder: DecoderStep, tokens: Sequence[Tensor], parts: Sequence[CallStepInputs]
) -> list[tuple[Tensor, Tensor | None]]:
    """Run one decode step of several calls.

    Args:
        decoder: Fused decode step of the decoder.
        tokens: (R,) int64 per call, the newest token of each row.
        parts: Context of each call.

    Returns:
        For each call its logits (R, V), and the cross-attention weights (R, S) fp32 that its
        context requests, or None.
    """
    if len(parts) == 1:
        made = [decoder(tokens[0], parts[0])]
    else:
        rows = [len(part_tokens) for part_tokens in tokens]
        made = decoder(torch.cat(list(tokens)), JointStepInputs(parts, rows)).split(rows)
    return [(logits, part.weights) for logits, part in zip(made, parts, strict=True)]
