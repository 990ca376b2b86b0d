"""Attention of a toolkit's own modules over the shared KV cache.

A module takes keys and values from its cache and passes them, with its mask, to an attention
function. During a decode step the cache returns a `placeholder` instead: a tensor of the
expected shape that names the cache layer. It takes no memory and holds NaN, so that a module that
computes with it is noticed. `BeamAttention.attend` works on the layer that the placeholder names.
"""

from typing import Protocol

import torch
from torch import Tensor

from fastgen.ops.beam_attention import beam_attention

_NAME = "_fastgen_layer"


class Layer(Protocol):
    """A layer of the KV cache.

    Attributes:
        prefix: Tokens shared by all beams.
        steps: Generated tokens per beam.
        own: Buffers (B, Hkv, .., D) of keys and values, without those that all sentences share.
    """

    prefix: int
    steps: int

    @property
    def own(self) -> tuple[Tensor, Tensor]: ...

    def joined(self) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, Hkv, N, D), N = prefix + steps * M."""
        ...


def placeholder(layer: Layer, rows: int, length: int) -> Tensor:
    """Return a placeholder for the keys or values of a cache layer.

    Args:
        layer: The layer that the placeholder names.
        rows: B * M.
        length: Number of tokens that the module expects.

    Returns:
        (rows, Hkv, length, D), all NaN, expanded from one element.
    """
    keys = layer.own[0]
    shape = (rows, keys.shape[1], length, keys.shape[3])
    stand_in = torch.full((1, 1, 1, 1), torch.nan, dtype=keys.dtype, device=keys.device).expand(
        shape
    )
    setattr(stand_in, _NAME, layer)
    return stand_in


def layer_of(keys: object) -> Layer | None:
    """Return the cache layer that a placeholder names; None for any other tensor."""
    return getattr(keys, _NAME, None)


class BeamAttention:
    """Attention of one decode step; maps masks over tokens to masks over KV slots, once per step.

    Args:
        sentences: B.
        beams: M.
        visible: (B, M, F) additive, the slots of generated tokens that each beam sees; None for one
            beam.
        times: (B, F) int64, the step of each slot; None where every step has M slots, in order.
        seen: (1,) int64 on the device, the number of valid self-attention keys; None where the
            tensors hold no others.
    """

    def __init__(
        self,
        sentences: int,
        beams: int,
        visible: Tensor | None,
        slot_steps: Tensor | None = None,
        seen: Tensor | None = None,
    ) -> None:
        self.sentences, self.beams, self.visible = sentences, beams, visible
        self.slot_steps = slot_steps
        self.seen = seen
        self.attended = 0  # layers that have attended in this step
        # The cross-attention mask, as the module prepared it.
        self.source_mask: Tensor | None = None
        self._masks: dict[tuple[int, int, bool, int], tuple[object, object, Tensor | None]] = {}

    def attend(
        self,
        query: Tensor,
        layer: Layer,
        mask: Tensor | None,
        position_bias: Tensor | None,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return the attention output (B*M, 1, H, D).

        P is the length of the prefix, T the number of generated tokens.

        Args:
            query: (B*M, H, 1, D).
            layer: The KV cache of the layer.
            mask: Bool (True where visible) or additive; (1 or B*M, 1 or H, 1, P + T) for
                self-attention, (.., S) for cross-attention; None where everything is visible.
            position_bias: Additive, shaped as `mask`.
            scale: Factor of the scores.
            softcap: Soft cap of the scores; None for none.
            sinks: (H,), one more score per head, whose weight belongs to no key; None for none.
        """
        rows, heads, _, dim = query.shape
        folded = query.view(self.sentences, self.beams, heads, dim)
        slots = self.begin_layer(layer, mask, position_bias, query.dtype)
        seen = self.seen if layer.steps else None
        sinks = None if sinks is None else sinks.data
        keys, values = layer.joined()
        mixed = beam_attention(folded, keys, values, slots, scale, softcap, seen, sinks=sinks)
        return mixed.reshape(rows, 1, heads, mixed.shape[3])

    def begin_layer(
        self, layer: Layer, mask: Tensor | None, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor | None:
        """Count an attending layer and return its additive mask, cached for the rest of the step.

        Args:
            layer: The KV cache of the layer.
            mask: As in `attend`.
            bias: `position_bias` of `attend`.
            dtype: Dtype of the mask.

        Returns:
            Broadcastable to (B, H, M, N); None where everything is visible.
        """
        self.attended += 1
        if layer.steps == 0:
            self.source_mask = mask
        key = (id(mask), id(bias), layer.steps > 0, layer.prefix)
        if key not in self._masks:
            text = [self._additive(part, dtype) for part in (mask, bias) if part is not None]
            total = text[0] + text[1] if len(text) == 2 else text[0] if text else None
            # Keep the arguments alive as well, so that their ids stay unique.
            self._masks[key] = (mask, bias, self._over_slots(layer, total, dtype))
        return self._masks[key][2]

    def _additive(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        """Convert (1 or B*M, h, 1, L), bool or additive, to (1 or B, h, 1 or M, L), additive."""
        if part.dtype == torch.bool:
            part = torch.zeros(part.shape, dtype=dtype, device=part.device).masked_fill_(
                ~part, -torch.inf
            )
        if part.shape[0] == self.sentences * self.beams and part.shape[0] > 1:
            return part.view(self.sentences, self.beams, *part.shape[1:]).transpose(1, 2).squeeze(3)
        return part

    def _over_slots(self, layer: Layer, text: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        # All beams of a sentence see the whole source; a single beam sees all of its tokens.
        if layer.steps == 0 or self.visible is None:
            return text
        visible = self.visible.to(dtype)[:, None]
        b, m, prefix = self.sentences, self.beams, layer.prefix
        if text is None:
            shared = visible.new_zeros(b, 1, m, prefix)
        else:
            shared = text[..., :prefix].expand(b, -1, m, -1)
            visible = visible + self._by_slot(text[..., prefix:])
        return torch.cat([shared, visible], -1)

    def _by_slot(self, text: Tensor) -> Tensor:
        """Convert a mask over generated tokens (1 or B, h, 1 or M, T) to one over slots (.., F)."""
        if self.slot_steps is None:
            return text.repeat_interleave(self.beams, -1)
        index = self.slot_steps[:, None, None].expand(-1, *text.shape[1:3], -1)
        return text.expand(self.sentences, -1, -1, -1).gather(3, index)
