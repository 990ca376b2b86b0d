"""A decode step that asks with masks: beside the newest token of each beam it runs a mask, and predicts from that.

Rows are, of each sentence, its M tokens and then its M masks. Keys and values of the masks lie behind those of the
tokens, where the next tokens' will be written, so that one attention call serves both.

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
from fastgen.models.layers.positions import Bias, Rotary, turned_once
from fastgen.models.runtime.decode_step import Context, DecoderStep, StepInputs
from fastgen.ops.beam_attention import beam_attention


@dataclass(frozen=True)
class MaskedStep(DecoderStep):
    """A `DecoderStep` whose logits are those of a mask behind each newest token.

    mask: its token id.
    """

    tokens = 2
    mask: int = -1

    def hidden(self, ids: Tensor, context: StepInputs) -> Tensor:
        around = Asking(cast(Context, context))
        tokens = ids.view(around.context.sentences, -1)
        both = torch.stack([tokens, torch.full_like(tokens, self.mask)], 1)
        return super().hidden(both.flatten(), around).view(*both.shape, -1)[:, 1].flatten(0, 1)


@dataclass(frozen=True)
class Prediction:
    """BERT's head: a layer with an activation function and a norm before the product with the vocabulary."""

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
class Asking:
    """`StepInputs` of tokens and masks, from those of the tokens."""

    context: Context

    @property
    def position(self) -> Tensor:
        """(B * 2 * M,): a mask's is the one behind its token's."""
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
        """Additive, (1 or B, 1, 2 * M, N): a mask sees what its token sees, and itself."""
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
        # Keys and values with all their room: where in it the masks lie, the device knows.
        both = F.pad(both, (0, slots - both.shape[-1]), value=-torch.inf)
        at = torch.arange(m, device=own.device, dtype=torch.int64) + self.context.seen
        return both.index_copy(-1, at, own).flatten(2, 3)

    @property
    def distances(self) -> Tensor:
        """(1 or B, 2 * M, N) int64, from tokens and masks to each slot; less than 0 to those that none of them sees."""
        beams, found = self.context.text[0].beams, self.context.distances()
        if self.context.seen is None:  # else keys and values have all their room already
            found = F.pad(found, (0, beams), value=-1)
        return torch.stack([found, found + 1], 1).repeat_interleave(beams, 1)

    def rotation(self, rotary: Rotary, x: Tensor) -> tuple[Tensor, Tensor]:
        return turned_once(self.context.rotations, rotary, self.position, x)

    def self_attention(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, bias: Bias | None, scale: float,
        softcap: float | None,
    ) -> Tensor:  # fmt: skip
        assert bias is None  # of no model that asks with masks
        keys, values = self.append(layer, key, value)
        return self.attend(query, keys, values, self.mask, scale, softcap)

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep key and value (R, H, D) of tokens and masks; return those of the text with them, (B, H, N, D)."""
        kept: Any = self.context.text[layer]
        return kept.append_asking(key[:, :, None], value[:, :, None])

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        """Return what query (R, H, D) finds there, (R, H * D); mask: additive, (1 or B, 1 or H, 2 * M, N)."""
        rows = query.shape[0]
        query = query.view(self.context.sentences, -1, *query.shape[1:])
        seen = None if self.context.seen is None else self.context.seen + self.context.text[0].beams
        return beam_attention(query, keys, values, mask, scale, softcap, seen).reshape(rows, -1)

    def cross_attention(self, layer: int, query: Tensor, scale: float) -> Tensor:
        return self.context.cross_attention(layer, query, scale)
