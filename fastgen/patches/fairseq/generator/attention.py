"""Attention of fairseq's modules in a decode step, over KV caches shared by a sentence's beams."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from fastgen.decoding.kv_cache.ancestry import Ancestry
from fastgen.decoding.kv_cache.layer_kv import LayerKV
from fastgen.models.memory.scratch import ScratchPool
from fastgen.ops.beam_attention import beam_attention, beam_attention_with_weights
from fastgen.patches.generation_call import current


class Attending(Protocol):
    """Interface: the attention layers of a running model."""

    def attend(
        self, module: Any, query: Tensor, key: Tensor | None, options: dict[str, Any]
    ) -> Any:
        """Return the result of `MultiheadAttention.forward`, or None to run the original."""
        ...


def forward(
    original: Callable[..., Any],
    self: Any,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """`MultiheadAttention.forward`, dispatched to the layers of the context, if there are any."""
    layers: Attending | None = current.get().step
    if layers is not None and not args:
        result = layers.attend(self, query, key, kwargs)
        if result is not None:
            return result
    return original(self, query, key, value, *args, **kwargs)


class Layers(Attending):
    """The attention layers of one decoder: self-attention and cross-attention.

    Args:
        modules: fairseq's attention modules.
        sentences: B.
        beams: M.
        longest: Maximum number of decode steps.
        memory: Scratch memory of the KV caches.

    Attributes:
        of: KV cache of each attention module.
        source_mask: (B, 1, 1, S) additive, or None.
        ancestry: The ancestry of beams in the current step; None for one row per sentence.
    """

    def __init__(
        self, modules: list[Any], sentences: int, beams: int, longest: int, memory: ScratchPool
    ) -> None:
        self.sentences, self.beams = sentences, beams
        self.of: dict[Any, LayerKV] = {
            module: LayerKV(longest, memory, 0 if module.encoder_decoder_attention else beams)
            for module in modules
        }
        self.source_mask: Tensor | None = None
        self.ancestry: Ancestry | None = None
        self._dtype = torch.float32
        self._text_mask: Tensor | None = None

    def attend(
        self, module: Any, query: Tensor, key: Tensor | None, options: dict[str, Any]
    ) -> Any:
        """Run one layer over the shared cache."""
        layer = self.of.get(module)
        if layer is None:
            return None
        if not module.encoder_decoder_attention:
            return self.self_attention(module, layer, query), None
        weights = options.get("need_head_weights", False)  # set for one layer only
        return self.cross_attention(
            module, layer, query, key, options.get("key_padding_mask"), weights
        )

    def begin_step(self, ancestry: Ancestry | None, dtype: torch.dtype) -> None:
        """Start a step.

        Args:
            ancestry: The ancestry of beams; None if all beams of a sentence share one row.
            dtype: dtype of the text mask.
        """
        self.ancestry = ancestry
        self._dtype, self._text_mask = dtype, None
        if ancestry is not None:
            for layer in self.of.values():
                layer.beams = self.beams

    @property
    def text_mask(self) -> Tensor | None:
        """The self-attention mask (B, 1, M, N), additive, built on first access in a step.

        None without an ancestry of beams.
        """
        if self._text_mask is None and self.ancestry is not None:
            prefix = next(
                (
                    kv.prefix
                    for module, kv in self.of.items()
                    if not module.encoder_decoder_attention
                ),
                0,
            )
            self._text_mask = F.pad(self.ancestry.visible.to(self._dtype), (prefix, 0))[:, None]
        return self._text_mask

    def self_attention(self, module: Any, layer: LayerKV, query: Tensor) -> Tensor:
        """Compute self-attention of the newest token of each row.

        Args:
            module: fairseq's attention module.
            layer: Its KV cache, which is extended.
            query: (1, R, C); (L, B, C) for a prompt.

        Returns:
            A tensor of the shape of `query`.
        """
        if query.shape[0] > 1:
            return self._over_prompt(module, layer, query)
        heads = query.shape[1], module.num_heads, 1, module.head_dim
        keys, values = module.k_proj(query).view(heads), module.v_proj(query).view(heads)
        if self.text_mask is None:
            layer.extend(keys, values)
        else:
            layer.append(keys, values)
        folded = module.q_proj(query).view(self.sentences, -1, heads[1], heads[3])
        attended = beam_attention(folded, layer.keys, layer.values, self.text_mask, module.scaling)
        return module.out_proj(attended.reshape(query.shape))

    def _over_prompt(self, module: Any, layer: LayerKV, query: Tensor) -> Tensor:
        """Compute causal self-attention of a prompt (L, B, C), which all beams share."""
        shape = *query.shape[:2], module.num_heads, module.head_dim
        queries, keys, values = (
            projection(query).view(shape).permute(1, 2, 0, 3)
            for projection in (module.q_proj, module.k_proj, module.v_proj)
        )
        layer.extend(keys, values)
        attended = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=module.scaling
        )
        return module.out_proj(attended.permute(2, 0, 1, 3).reshape(query.shape))

    def cross_attention(
        self,
        module: Any,
        layer: LayerKV,
        query: Tensor,
        source: Tensor | None,
        padding: Tensor | None,
        weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute cross-attention of the newest token of each row.

        Args:
            module: fairseq's attention module.
            layer: Its KV cache, which the first call fills.
            query: (1, R, C).
            source: (S, B, C), the encoder's output.
            padding: (B, S) bool, or None.
            weights: Whether to return attention weights.

        Returns:
            The output (1, R, C), and the attention weights (1, R, 1, S), averaged over heads, or
            None.
        """
        if layer.prefix == 0:
            assert source is not None
            self._read(module, layer, source, padding)
        folded = module.q_proj(query).view(self.sentences, -1, module.num_heads, module.head_dim)
        if not weights:
            attended, mean = (
                beam_attention(folded, layer.keys, layer.values, self.source_mask, module.scaling),
                None,
            )
        else:
            attended, mean = beam_attention_with_weights(
                folded, layer.keys, layer.values, self.source_mask, module.scaling
            )
            mean = mean.flatten(0, 1)[None, :, None]
        return module.out_proj(attended.reshape(query.shape)), mean

    def _read(self, module: Any, layer: LayerKV, source: Tensor, padding: Tensor | None) -> None:
        """Compute the cross-attention keys and values, once for all steps and beams."""
        length, b, _ = source.shape
        shape = length, b, module.num_heads, module.head_dim
        keys, values = (
            projection(source).view(shape).permute(1, 2, 0, 3)
            for projection in (module.k_proj, module.v_proj)
        )
        layer.extend(keys, values)
        if padding is not None and self.source_mask is None:
            mask = torch.zeros(padding.shape, dtype=source.dtype, device=source.device)
            self.source_mask = mask.masked_fill_(padding.to(torch.bool), -torch.inf)[:, None, None]

    def compact(self, slots: Tensor) -> None:
        """Free the KV slots of the text that no beam references; see `Ancestry.compact`."""
        for module, layer in self.of.items():
            if not module.encoder_decoder_attention:
                layer.compact(slots)

    def keep(self, sentences: Tensor, in_order: bool) -> None:
        """Keep only these sentences; see `first_finished.PredictionStepper.keep`."""
        indices: list[int] = sentences.tolist()
        moved = [index for index, sentence in enumerate(indices) if index != sentence]
        moves = None
        if not in_order:
            to, origin = [moved, [indices[index] for index in moved]]
            moves = (
                torch.tensor(to, device=sentences.device, dtype=torch.int64),
                torch.tensor(origin, device=sentences.device, dtype=torch.int64),
            )
        for layer in self.of.values():
            layer.keep(sentences, moves)
        if self.source_mask is not None:
            self.source_mask = self.source_mask[sentences]
        self.sentences = len(indices)
