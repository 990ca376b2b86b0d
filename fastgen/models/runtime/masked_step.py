"""A decode step that predicts from mask tokens.

It runs a mask after the newest token of each beam, and the mask's output predicts the next token.
The rows of each sentence are its M tokens, then its M masks. Keys and values of the masks take the
slots after those of the tokens, which the next tokens overwrite. One attention call thus serves
both.

Source: Dong et al. 2019 (UniLM); Bao et al. 2021 (s2s-ft), decoding.
"""

import functools
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from fastgen.models.layers.linear import Product
from fastgen.models.layers.norm import NormLike
from fastgen.models.layers.positions import Rotary, rotation_once
from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.models.runtime.step_inputs import CallStepInputs, Scoring, StepInputs, attended


@dataclass(frozen=True)
class MaskedStep(DecoderStep):
    """A `DecoderStep` whose logits are those of a mask after each newest token.

    Attributes:
        mask: Token id of the mask.
    """

    tokens = 2
    mask: int = -1

    def hidden(self, ids: Tensor, context: StepInputs) -> Tensor:
        inputs = MaskedStepInputs(cast(CallStepInputs, context))
        tokens = ids.view(inputs.context.sentences, -1)
        both = torch.stack([tokens, torch.full_like(tokens, self.mask)], 1)
        return super().hidden(both.flatten(), inputs).view(*both.shape, -1)[:, 1].flatten(0, 1)


@dataclass(frozen=True)
class MaskedLMHead:
    """BERT's output head: a dense layer, an activation, a norm and the vocabulary projection.

    Attributes:
        dense: Product of the dense layer.
        activation: Kind of activation, as in `ops.activation`.
        norm: The norm.
        out: Product of the vocabulary projection.
    """

    dense: Product
    activation: str
    norm: NormLike
    out: Product
    fuses = False

    @property
    def outputs(self) -> int:
        return self.out.outputs

    def apply(
        self, x: Tensor, activation: str | None = None, residual: Tensor | None = None
    ) -> Tensor:
        return self.out.apply(
            self.norm(self.dense.apply(x, self.activation))[0], activation, residual
        )


@dataclass(frozen=True)
class MaskedStepInputs:
    """`StepInputs` of tokens and masks, derived from the context of the tokens."""

    context: CallStepInputs

    @property
    def position(self) -> Tensor:
        """(B * 2 * M,) int64; a mask has the position after its token's."""
        context, device = self.context, self.context.text[0].keys.device
        beams = context.text[0].beams
        at = (
            torch.as_tensor(context.position, dtype=torch.int64, device=device)
            .expand(context.sentences * beams)
            .view(-1, beams)
        )
        return torch.stack([at, at + 1], 1).flatten()

    @functools.cached_property
    def mask(self) -> Tensor:
        """Additive attention mask (1 or B, 1, 2 * M, N).

        A mask token sees what its token sees, and itself.
        """
        text, seen = self.context.text[0], self.context.text_mask
        m, slots = text.beams, text.keys.shape[2]
        if seen is None:
            seen = text.keys.new_zeros(1, 1, 1, slots)
        both = seen[:, :, None].expand(-1, -1, 2, m, -1)
        own = seen.new_full((2, m, m), -torch.inf)
        own[1].fill_diagonal_(0.0)
        own = own.expand(*both.shape[:2], 2, m, m)
        if self.context.seen is None:
            return torch.cat([both, own], -1).flatten(2, 3)
        # In a captured step keys and values include their unused capacity, and the device holds the
        # index of the masks in it.
        both = F.pad(both, (0, slots - both.shape[-1]), value=-torch.inf)
        at = torch.arange(m, device=own.device, dtype=torch.int64) + self.context.seen
        return both.index_copy(-1, at, own).flatten(2, 3)

    @property
    def distances(self) -> Tensor:
        """Distances from tokens and masks to each slot, (1 or B, 2 * M, N) int64.

        They are negative for slots after those of the token or mask.
        """
        beams, distances = self.context.text[0].beams, self.context.distances()
        if self.context.seen is None:  # Otherwise they include their unused capacity already.
            distances = F.pad(distances, (0, beams), value=-1)
        return torch.stack([distances, distances + 1], 1).repeat_interleave(beams, 1)

    def rotation(self, rotary: Rotary, x: Tensor) -> tuple[Tensor, Tensor]:
        return rotation_once(self.context.rotations, rotary, self.position, x)

    def self_attention(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scoring: Scoring,
    ) -> Tensor:
        assert scoring.bias is None  # No model with mask tokens has one.
        keys, values = self.append(layer, key, value)
        return self.attend(query, keys, values, self.mask, scoring)

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append tokens and masks to the KV cache.

        Args:
            layer: Index of the decoder layer.
            key: (R, H, D).
            value: (R, H, D).

        Returns:
            Keys and values of the text, including tokens and masks, (B, H, N, D) each.
        """
        kept: Any = self.context.text[layer]
        return kept.append_asking(key[:, :, None], value[:, :, None])

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor,
        scoring: Scoring,
    ) -> Tensor:
        """Let tokens and masks attend to the text.

        Args:
            query: (R, H, D).
            keys: (B, H, N, D).
            values: (B, H, N, D).
            mask: Additive mask (1 or B, 1 or H, 2 * M, N).
            scoring: How scores are computed, apart from the mask.

        Returns:
            The attention output (R, H * D).
        """
        rows = query.shape[0]
        query = query.view(self.context.sentences, -1, *query.shape[1:])
        seen = None if self.context.seen is None else self.context.seen + self.context.text[0].beams
        return attended(query, keys, values, mask, scoring, seen).reshape(rows, -1)

    def cross_attention(self, layer: int, query: Tensor, scale: float) -> Tensor:
        return self.context.cross_attention(layer, query, scale)
