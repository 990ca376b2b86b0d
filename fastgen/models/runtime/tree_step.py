"""Tree attention: one decoder pass over many tokens of a sentence that form a tree.

A node is a token that follows another node or the prompt. Matrix products run over all nodes of a
pass, one row per node. In attention the nodes are queries over one cache, and each sees its
ancestors.

Source: Miao et al. 2024 (SpecInfer), section 4 (attention over a tree of tokens).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from fastgen.models.layers.positions import AttentionBias, Rotary, rotation_once
from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.models.runtime.ragged_step import WrittenLayer
from fastgen.models.runtime.step_inputs import KeysAndValues, Scoring, attended
from fastgen.ops.beam_attention import beam_attention

ROOT = -1
"""Index of the node that stands for the prompt of a sentence."""


class Tree:
    """The token trees of B sentences, with the same number of nodes each.

    Nodes are numbered from 0 in the order in which they are added.

    Args:
        step: Fused decode step of the decoder.
        sentences: Batch size B.
        first: Position of the first token after the prompt; (B,) int64 if sentences differ.
        text: Keys and values of each self-attention layer.
        source: Keys and values of each cross-attention layer.
        prefix_mask: Additive mask of the prompt (B, 1, 1, S); None if everything is visible.
        source_mask: Additive mask of the source (B, 1, 1, S); None if everything is visible.
    """

    def __init__(
        self,
        step: DecoderStep,
        sentences: int,
        first: int | Tensor,
        text: Sequence[WrittenLayer],
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
        """Number of nodes of each sentence."""
        return self._depths.shape[1]

    def grow(self, parents: list[list[int]], tokens: list[list[int]]) -> Tensor:
        """Add Q nodes to each sentence and run them.

        Args:
            parents: (B, Q), parent of each new node: `ROOT`, an existing node, or an earlier one of
                the new nodes, which are numbered from `nodes` on.
            tokens: (B, Q), token id of each new node.

        Returns:
            The logits (B, Q, V) fp32 of the token after each new node.
        """
        device, old = self._depths.device, self.nodes
        parent_nodes = torch.tensor(parents, device=device, dtype=torch.int64)
        sentences, new = parent_nodes.shape
        depths = F.pad(self._depths, (0, new))
        visible = F.pad(self._visible, (0, new, 0, new))
        batch = torch.arange(sentences, device=device, dtype=torch.int64)
        for query in range(new):
            parent, node = parent_nodes[:, query], old + query
            has_parent = parent != ROOT
            visible[:, node] = visible[batch, parent] & has_parent[:, None]
            visible[:, node, node] = True
            depths[:, node] = torch.where(has_parent, depths[batch, parent] + 1, 0)
        self._depths, self._visible = depths, visible
        for layer in self.text:
            layer.reach(old + new)
        inputs = _Pass(self, new, self.first + depths[:, old:], self._mask(new))
        ids = torch.tensor(tokens, device=device, dtype=torch.int64).flatten()
        return self.step(ids, inputs).float().view(sentences, new, -1)

    def _mask(self, new: int) -> Tensor:
        """Return the additive mask of the newest nodes, (B, 1, Q, S + nodes)."""
        is_hidden = ~self._visible[:, None, -new:]
        mask = torch.zeros(is_hidden.shape, dtype=self.step.dtype, device=is_hidden.device)
        mask = F.pad(mask.masked_fill_(is_hidden, -torch.inf), (self.prefix, 0))
        return mask if self.prefix_mask is None else mask + F.pad(self.prefix_mask, (0, self.nodes))

    def distances(self, new: int) -> Tensor:
        """Return the distances from the newest nodes to all keys, (B, Q, S + nodes) int64.

        They are arbitrary where a node does not see a key.
        """
        places = torch.arange(self.prefix, device=self._depths.device, dtype=torch.int64).expand(
            len(self._depths), -1
        )
        places = torch.cat([places, self.prefix + self._depths], 1)
        return (places[:, -new:, None] - places[:, None]).clamp_(min=0)


@dataclass
class _Pass:
    """`StepInputs` of the newest nodes of a tree, B * Q rows."""

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
        return rotation_once(self.rotations, rotary, self.position, x)

    def self_attention(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scoring: Scoring,
    ) -> Tensor:
        keys, values = self.tree.text[layer].capacity_buffers
        end = self.tree.prefix + self.tree.nodes
        for buffer, newest in ((keys, key), (values, value)):
            buffer[:, :, end - self.new : end] = self._folded(newest).transpose(1, 2)
        mask = self.mask if scoring.bias is None else self._biased(scoring.bias)
        mixed = attended(self._folded(query), keys[:, :, :end], values[:, :, :end], mask, scoring)
        return mixed.flatten(2).flatten(0, 1)

    def cross_attention(self, layer: int, query: Tensor, scale: float) -> Tensor:
        cache = self.tree.source[layer]
        mixed = beam_attention(
            self._folded(query), cache.keys, cache.values, self.tree.source_mask, scale
        )
        return mixed.flatten(2).flatten(0, 1)

    def _folded(self, x: Tensor) -> Tensor:
        return x.view(-1, self.new, *x.shape[1:])

    def _biased(self, bias: AttentionBias) -> Tensor:
        if id(bias) not in self.biased:
            table = bias.at(self.tree.distances(self.new), self.positions[..., None])
            self.biased[id(bias)] = table + self.mask
        return self.biased[id(bias)]
