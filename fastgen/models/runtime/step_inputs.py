"""What the sublayers of a decode step read: keys and values, positions, masks, and rotations."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from fastgen.models.layers.positions import AttentionBias, Rotary, rotation_once
from fastgen.ops.beam_attention import Newest, beam_attention, beam_attention_with_weights
from fastgen.ops.dispatch import runs_kernels
from fastgen.ops.latent_attention import latent_attention
from fastgen.ops.rotation import Rotation


@dataclass(frozen=True)
class Scoring:
    """How self-attention computes scores and turns them into weights, apart from masks.

    Attributes:
        scale: Factor of query times key.
        softcap: Soft cap of the scores; None for none.
        bias: Bias of the scores by position; None for none.
        sinks: (H,), one more score per head, whose weight belongs to no key; None for none.
        latent: Whether keys are latent vectors, which are the values too, and `values` the rotated
            part of the keys (`ops.latent_attention`).
    """

    scale: float
    softcap: float | None = None
    bias: AttentionBias | None = None
    sinks: Tensor | None = None
    latent: bool = False


def attended(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scoring: Scoring,
    seen: Tensor | None = None,
    newest: Newest | None = None,
) -> Tensor:
    """Return the attention output, as `beam_attention`; `mask` includes the bias of `scoring`."""
    if scoring.latent:
        return latent_attention(query, keys, values, mask, scoring.scale, seen)
    sinks = None if scoring.sinks is None else scoring.sinks.data
    return beam_attention(
        query, keys, values, mask, scoring.scale, scoring.softcap, seen, newest, sinks
    )


class KeysAndValues(Protocol):
    """The part of a KV cache layer that a decode step uses.

    Keys and values are (B, Hkv, N, D), with M beams per sentence.
    """

    beams: int

    @property
    def keys(self) -> Tensor: ...
    @property
    def values(self) -> Tensor: ...

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Write the newest token of every beam; keys and values are (B * M, Hkv, 1, D)."""

    def append_rotated(
        self, query: Tensor, key: Tensor, value: Tensor, rotation: Rotation
    ) -> Tensor:
        """Rotate queries and keys, and write the rotated keys and the values.

        Args:
            query: (B * M, H, D).
            key: (B * M, Hkv, D).
            value: (B * M, Hkv, D).
            rotation: Rotary position embedding of the newest token.

        Returns:
            The rotated queries (B * M, H, D).
        """
        ...

    def reserve(self, keys: Tensor, values: Tensor) -> None:
        """Reserve the slots of the newest token of every beam, which attention then writes.

        Arguments are as in `append`.
        """


class StepInputs(Protocol):
    """The inputs of a decode step besides the weights, for the rows of one or more calls."""

    @property
    def position(self) -> int | Tensor:
        """Position of the newest token, counted from 0; (R,) int64 if rows differ."""
        ...

    def rotation(self, rotary: Rotary, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of the newest token's position, with the dtype and device of x."""
        ...

    def self_attention(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scoring: Scoring,
    ) -> Tensor:
        """Append the newest token to the KV cache and attend to the text, including that token.

        Args:
            layer: Index of the decoder layer.
            query: (R, H, D).
            key: (R, Hkv, D).
            value: (R, Hkv, D).
            scoring: How scores are computed, apart from masks.

        Returns:
            The attention output (R, H * D).
        """
        ...

    def cross_attention(self, layer: int, query: Tensor, scale: float) -> Tensor:
        """Attend to the source with query (R, H, D); return the output (R, H * D)."""
        ...


@dataclass
class CallStepInputs:
    """`StepInputs` of the sentences of one call.

    In captured steps the device holds `length`, `prefix` and `seen`, and `position` if rows agree.

    Attributes:
        sentences: Batch size B; there are R = B * M rows.
        length: Length of the text in tokens, the newest included; (1,) int64 in captured steps.
        prefix: Tokens that all beams share; (1,) int64 in captured steps.
        position: Position of the newest token, counted from 0; (1,) int64 in captured steps, (R,)
            int64 if rows differ.
        text: Keys and values of each self-attention layer.
        source: Keys and values of each cross-attention layer.
        text_mask: Additive mask of the text, broadcastable to (B, H, M, N); None if everything is
            visible.
        source_mask: The same for the source.
        times: (B, F) int64, the decode step that filled each slot after the prefix; None if the
            steps have M slots each, in order.
        seen: (1,) int64, number of keys of the text in captured steps; else None.
        alignment_layer: Layer whose cross-attention weights are requested; None for none.
        weights: The requested weights, (R, S) fp32. For multistep runs in C this is the output
            buffer, (steps, B, M, S) fp32.
        biased: Masks with a bias, by the id of the `AttentionBias`, for all layers of a step.
        rotations: Cosines and sines, by the id of the `Rotary`; they serve all layers of a step.
    """

    sentences: int
    length: int | Tensor
    prefix: int | Tensor
    position: int | Tensor
    text: Sequence[KeysAndValues]
    source: Sequence[KeysAndValues]
    text_mask: Tensor | None = None
    source_mask: Tensor | None = None
    slot_steps: Tensor | None = None
    seen: Tensor | None = None
    alignment_layer: int | None = None
    weights: Tensor | None = None
    biased: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    rotations: dict[int, tuple[Tensor, Tensor]] = field(
        default_factory=dict[int, tuple[Tensor, Tensor]]
    )

    def text_mask_with(self, bias: AttentionBias | None) -> Tensor | None:
        """Return the text mask plus a bias, computed once for all layers that share the bias."""
        if bias is None:
            return self.text_mask
        if id(bias) not in self.biased:
            table = bias.at(self.distances()[:, None], self._position_of_sentences())
            self.biased[id(bias)] = table if self.text_mask is None else table + self.text_mask
        return self.biased[id(bias)]

    def biases(self, bias: AttentionBias, steps: int) -> Tensor:
        """Return a bias for the next decode steps, before any of their slots is reserved.

        Args:
            bias: Bias of the scores by position.
            steps: Number of decode steps.

        Returns:
            (1 or B, H, steps, N), where N counts the slots that exist after these steps.
        """
        later = torch.arange(steps, dtype=torch.int64, device=self.text[0].keys.device)[:, None]
        return bias.at(
            self.distances(steps)[:, None] + later, self._position_of_sentences() + later
        )

    def _position_of_sentences(self) -> int | Tensor:
        """Return `position`, as (1 or B, 1, 1) if it is a tensor: the beams of a sentence agree."""
        if not isinstance(self.position, Tensor):
            return self.position
        return self.position.view(1 if len(self.position) == 1 else self.sentences, -1)[:, :1, None]

    def distances(self, more: int = 0) -> Tensor:
        """Return the distance in tokens from the newest token to each slot.

        Args:
            more: Number of steps, the newest token's included, whose slots are not reserved yet
                but are to be counted.

        Returns:
            (1 or B, N) int64, negative for slots that are not filled yet.
        """
        keys, beams = self.text[0].keys, self.text[0].beams
        steps = self.slot_steps
        if isinstance(self.prefix, Tensor):
            slots = torch.arange(keys.shape[2], device=keys.device, dtype=torch.int64)
            generated = (slots - self.prefix).div(beams, rounding_mode="floor")
            return (
                self.length - 1 - torch.where(generated < 0, slots, generated + self.prefix)[None]
            )
        if steps is None:
            slots = torch.arange(
                keys.shape[2] - self.prefix + more * beams, device=keys.device, dtype=torch.int64
            )
            steps = slots.div(beams, rounding_mode="floor")[None]
        elif more:
            upcoming = torch.arange(more, device=keys.device, dtype=torch.int64).repeat_interleave(
                beams
            ) + (self.length - 1 - self.prefix)
            steps = torch.cat([steps, upcoming.expand(steps.shape[0], -1)], 1)
        prefix = torch.arange(self.prefix, device=keys.device, dtype=torch.int64).expand(
            steps.shape[0], -1
        )
        return self.length - 1 - torch.cat([prefix, steps + self.prefix], 1)

    def rotation(self, rotary: Rotary, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of the newest token's position, computed once for all layers.

        Args:
            rotary: Rotary position embedding.
            x: Tensor with the dtype and device of the result.
        """
        return rotation_once(self.rotations, rotary, self.position, x)

    def self_attention(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scoring: Scoring,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """Append the newest token to the KV cache and attend to the text.

        Arguments are as in `StepInputs`. `rotation` is applied to queries and keys first; None if
        there is none, or they are rotated already.
        """
        cache, newest = self.text[layer], None
        if rotation is not None:
            query = cache.append_rotated(query, key, value, rotation)
        elif runs_kernels(query) and not scoring.latent and key.stride(2) == value.stride(2) == 1:
            newest = Newest(key, value)
            cache.reserve(key[:, :, None], value[:, :, None])
        else:
            cache.append(key[:, :, None], value[:, :, None])
        rows, mask = query.shape[0], self.text_mask_with(scoring.bias)
        query = query.reshape(self.sentences, -1, *query.shape[1:])
        mixed = attended(query, cache.keys, cache.values, mask, scoring, self.seen, newest)
        return mixed.reshape(rows, -1)

    def cross_attention(self, layer: int, query: Tensor, scale: float) -> Tensor:
        cache, rows = self.source[layer], query.shape[0]
        inputs = (
            query.view(self.sentences, -1, *query.shape[1:]),
            cache.keys,
            cache.values,
            self.source_mask,
            scale,
        )
        if self.alignment_layer != layer:
            return beam_attention(*inputs).reshape(rows, -1)
        mixed, weights = beam_attention_with_weights(*inputs)
        self.weights = weights.flatten(0, 1)
        return mixed.reshape(rows, -1)
