"""Attention of a toolkit's own module over the shared cache.

A module asks its cache for keys and values and hands them, with the mask it made, to an attention function. During a
decode step the cache hands out a `ticket` instead: a tensor of the shape the module expects, that names the layer whose
keys are meant. It takes no memory and is filled with NaN, so that a module which computes with it cannot go unnoticed.
`BeamAttention.attend` redeems it.
"""

from typing import Protocol

import torch
from torch import Tensor

from fastgen.ops.beam_attention import beam_attention

_NAME = "_fastgen_layer"


class Layer(Protocol):
    """What is needed of a layer of the cache: keys and values (B, Hkv, N, D), N = prefix + steps * M."""

    prefix: int
    steps: int

    @property
    def keys(self) -> Tensor: ...
    @property
    def values(self) -> Tensor: ...


def ticket(layer: Layer, rows: int, length: int) -> Tensor:
    """Return a stand-in for the keys or values of `layer`: (rows, Hkv, length, D), NaN, one element of memory."""
    keys = layer.keys
    shape = (rows, keys.shape[1], length, keys.shape[3])
    stand_in = torch.full((1, 1, 1, 1), torch.nan, dtype=keys.dtype, device=keys.device).expand(
        shape
    )
    setattr(stand_in, _NAME, layer)
    return stand_in


def layer_of(keys: object) -> Layer | None:
    """The layer that a ticket names; None for any other tensor."""
    return getattr(keys, _NAME, None)


class BeamAttention:
    """The attention of one decode step; it turns the masks of the text into masks of the slots, once per step.

    Args:
        sentences, beams: B and M.
        visible: (B, M, F) additive, which slots of generated tokens each beam sees; None for one beam.
        times: (B, F) int64, the step that each slot is of; None where there are M of each, in order.
        seen: (1,) int64, how many keys of the text there are, where only the device knows.
    """

    def __init__(
        self,
        sentences: int,
        beams: int,
        visible: Tensor | None,
        times: Tensor | None = None,
        seen: Tensor | None = None,
    ) -> None:
        self.sentences, self.beams, self.visible, self.times = sentences, beams, visible, times
        self.seen = seen
        self.attended = 0  # layers so far
        self.source_mask: Tensor | None = (
            None  # what the module has made of the mask of the encoder's output
        )
        self._masks: dict[tuple[int, int, bool, int], tuple[object, object, Tensor | None]] = {}

    def attend(
        self,
        query: Tensor,
        layer: Layer,
        mask: Tensor | None,
        position_bias: Tensor | None,
        scale: float,
        softcap: float | None = None,
    ) -> Tensor:
        """Return (B*M, 1, H, D) for query (B*M, H, 1, D).

        mask (bool, True where visible, or additive) and position_bias (additive) are those of the text:
        (1 or B*M, 1 or H, 1, S + T) where the layer holds text, (.., S) where it holds the encoder's output.
        """
        rows, heads, _, dim = query.shape
        folded = query.view(self.sentences, self.beams, heads, dim)
        slots = self.begin_layer(layer, mask, position_bias, query.dtype)
        seen = self.seen if layer.steps else None
        mixed = beam_attention(folded, layer.keys, layer.values, slots, scale, softcap, seen)
        return mixed.reshape(rows, 1, heads, mixed.shape[3])

    def begin_layer(
        self, layer: Layer, mask: Tensor | None, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor | None:
        """Note that a layer attends; return the additive mask over its slots, kept for the other layers of this step.

        mask, bias: as those of `attend`. What comes is broadcastable to (B, H, M, N), None where all is seen.
        """
        self.attended += 1
        if layer.steps == 0:
            self.source_mask = mask
        key = (id(mask), id(bias), layer.steps > 0, layer.prefix)
        if key not in self._masks:
            text = [self._additive(part, dtype) for part in (mask, bias) if part is not None]
            total = text[0] + text[1] if len(text) == 2 else text[0] if text else None
            # The arguments are kept too: an id stays theirs only as long as they live.
            self._masks[key] = (mask, bias, self._over_slots(layer, total, dtype))
        return self._masks[key][2]

    def _additive(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        """(1 or B*M, h, 1, L) bool or additive -> (1 or B, h, 1 or M, L) additive."""
        if part.dtype == torch.bool:
            part = torch.zeros(part.shape, dtype=dtype, device=part.device).masked_fill_(
                ~part, -torch.inf
            )
        if part.shape[0] == self.sentences * self.beams and part.shape[0] > 1:
            return part.view(self.sentences, self.beams, *part.shape[1:]).transpose(1, 2).squeeze(3)
        return part

    def _over_slots(self, layer: Layer, text: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        # Every beam of a sentence sees the same of the encoder's output; and one beam alone all that is its own.
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
        """text (1 or B, h, 1 or M, T), of generated tokens, as (.., F), of their slots."""
        if self.times is None:
            return text.repeat_interleave(self.beams, -1)
        index = self.times[:, None, None].expand(-1, *text.shape[1:3], -1)
        return text.expand(self.sentences, -1, -1, -1).gather(3, index)
