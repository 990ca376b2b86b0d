"""Texts that branch: any number of tokens of a sentence in one pass, each behind any other.

A node is a token behind another node, or behind the prompt. What reads the weights runs over all nodes of a pass, one
row each; for attention they are queries over one cache, each of which sees the nodes that it descends from.

Source: Miao et al. 2024 (SpecInfer), section 4: attention over a tree of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from fastgen.models.layers.positions import Bias, Rotary, turned_once
from fastgen.models.runtime.decode_step import DecoderStep, KeysAndValues
from fastgen.models.runtime.ragged_step import Written
from fastgen.ops.beam_attention import beam_attention

ROOT = -1
"""The node that stands for a sentence's prompt."""


class Tree:
    """The nodes of B sentences, as many of each, numbered from 0 in the order in which they came.

    Args:
        first: the position of the first token behind the prompt; (B,) int64 where sentences differ.
        text, source: keys and values of each layer.
        prefix_mask, source_mask: additive, (B, 1, 1, S), of the prompt and of the source; None where all is seen.
    """

    def __init__(
        self,
        step: DecoderStep,
        sentences: int,
        first: int | Tensor,
        text: Sequence[Written],
        source: Sequence[KeysAndValues],
        prefix_mask: Tensor | None = None,
        source_mask: Tensor | None = None,
    ) -> None:
        self.step, self.text, self.source = step, text, source
        self.prefix_mask, self.source_mask = prefix_mask, source_mask
        self.prefix, device = text[0].prefix, text[0].keys.device
        self.first = first if isinstance(first, int) else first[:, None]
        self._depths = torch.empty(sentences, 0, dtype=torch.int64, device=device)
        self._visible = torch.empty(sentences, 0, 0, dtype=torch.bool, device=device)

    @property
    def nodes(self) -> int:
        """How many each sentence has."""
        return self._depths.shape[1]

    def grow(self, parents: list[list[int]], tokens: list[list[int]]) -> Tensor:
        """Add nodes (B, Q), numbered from `nodes` on; return the logits (B, Q, V) fp32 of what follows each.

        parents: nodes that are there, or earlier ones of these.
        """
        device, old = self._depths.device, self.nodes
        behind = torch.tensor(parents, device=device, dtype=torch.int64)
        sentences, new = behind.shape
        depths = F.pad(self._depths, (0, new))
        visible = F.pad(self._visible, (0, new, 0, new))
        every = torch.arange(sentences, device=device, dtype=torch.int64)
        for query in range(new):
            parent, node = behind[:, query], old + query
            there = parent != ROOT
            visible[:, node] = visible[every, parent] & there[:, None]
            visible[:, node, node] = True
            depths[:, node] = torch.where(there, depths[every, parent] + 1, 0)
        self._depths, self._visible = depths, visible
        for layer in self.text:
            layer.reach(old + new)
        around = _Pass(self, new, self.first + depths[:, old:], self._mask(new))
        ids = torch.tensor(tokens, device=device, dtype=torch.int64).flatten()
        return self.step(ids, around).float().view(sentences, new, -1)

    def _mask(self, new: int) -> Tensor:
        """What the newest nodes see, additive (B, 1, Q, S + nodes)."""
        unseen = ~self._visible[:, None, -new:]
        mask = torch.zeros(unseen.shape, dtype=self.step.dtype, device=unseen.device)
        mask = F.pad(mask.masked_fill_(unseen, -torch.inf), (self.prefix, 0))
        return mask if self.prefix_mask is None else mask + F.pad(self.prefix_mask, (0, self.nodes))

    def distances(self, new: int) -> Tensor:
        """Of the newest nodes to all keys, (B, Q, S + nodes) int64; anything where one does not see the other."""
        places = torch.arange(self.prefix, device=self._depths.device, dtype=torch.int64).expand(
            len(self._depths), -1
        )
        places = torch.cat([places, self.prefix + self._depths], 1)
        return (places[:, -new:, None] - places[:, None]).clamp_(min=0)


@dataclass
class _Pass:
    """`StepInputs` of the newest nodes of a tree: rows are B * Q."""

    tree: Tree
    new: int
    positions: Tensor
    mask: Tensor
    biased: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    rotations: dict[int, tuple[Tensor, Tensor]] = field(
        default_factory=dict[int, tuple[Tensor, Tensor]]
    )

    @property
    def position(self) -> Tensor:
        return self.positions.flatten()

    def rotation(self, rotary: Rotary, x: Tensor) -> tuple[Tensor, Tensor]:
        return turned_once(self.rotations, rotary, self.position, x)

    def self_attention(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, bias: Bias | None, scale: float,
        softcap: float | None,
    ) -> Tensor:  # fmt: skip
        keys, values = self.tree.text[layer].room
        end = self.tree.prefix + self.tree.nodes
        for buffer, newest in ((keys, key), (values, value)):
            buffer[:, :, end - self.new : end] = self._folded(newest).transpose(1, 2)
        mask = self.mask if bias is None else self._biased(bias)
        mixed = beam_attention(
            self._folded(query), keys[:, :, :end], values[:, :, :end], mask, scale, softcap
        )
        return mixed.flatten(2).flatten(0, 1)

    def cross_attention(self, layer: int, query: Tensor, scale: float) -> Tensor:
        kept = self.tree.source[layer]
        mixed = beam_attention(
            self._folded(query), kept.keys, kept.values, self.tree.source_mask, scale
        )
        return mixed.flatten(2).flatten(0, 1)

    def _folded(self, x: Tensor) -> Tensor:
        return x.view(-1, self.new, *x.shape[1:])

    def _biased(self, bias: Bias) -> Tensor:
        if id(bias) not in self.biased:
            found = bias.at(self.tree.distances(self.new), self.positions[..., None])
            self.biased[id(bias)] = found + self.mask
        return self.biased[id(bias)]
