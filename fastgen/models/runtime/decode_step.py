"""The fused decode step: a decoder's step that runs on its weights and bypasses its modules.

A decoder is a sequence of sublayers: self-attention, cross-attention and feed-forward. In every
model family a sublayer ends in the same two operations: an output projection with the residual sum,
and a norm. In post-norm models that is the sublayer's own norm, in pre-norm models the next one's.

Source: Wang et al. 2021 (LightSeq), section 2.1 (one operation between two matrix products).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastgen.models.layers.linear import Product
from fastgen.models.layers.norm import Norm, NormLike
from fastgen.models.layers.positions import AttentionBias
from fastgen.models.runtime.step_inputs import StepInputs
from fastgen.models.runtime.sublayers import CrossAttention, SelfAttention, Sublayer
from fastgen.ops.dispatch import runs_kernels
from fastgen.ops.embedding import Positions, embedding, normed_embedding, rows_of_positions


@dataclass(frozen=True)
class Embedding:
    """Scaled token embeddings plus position embeddings, with an optional norm.

    Attributes:
        tokens: Token embeddings (V, C).
        scale: Factor of the token embeddings.
        positions: Position embeddings (P, C); None for none.
        first: Row of `positions` for position 0.
        padding: Id of the padding token, if its position embedding differs; None if it does not.
        padding_row: Row of `positions` for padding; None for the row before that of its position.
        norm: Norm of the embeddings; None for none.
        norm_tokens: Whether the norm applies to the token embeddings only.
        called: A module that returns the token embeddings, not yet scaled; None for `tokens`.
    """

    tokens: Tensor
    scale: float = 1.0
    positions: Tensor | None = None
    first: int = 0
    padding: int | None = None
    padding_row: int | None = 0
    norm: NormLike | None = None
    norm_tokens: bool = False
    called: nn.Module | None = None

    def __call__(self, ids: Tensor, position: int | Tensor) -> Tensor:
        positions = self._positions(position)
        row, other = (None, None) if positions is None else positions.rows()
        if self.norm is None:
            return self._looked_up(ids, row, other)
        if not self.norm_tokens:
            return self.norm(self._looked_up(ids, row, other))[0]
        x = self.norm(self._looked_up(ids, None, None))[0]
        return x if row is None else x.add_(rows_of_positions(ids, row, other))

    def _looked_up(
        self, ids: Tensor, row: Tensor | None, other: tuple[int, Tensor] | None
    ) -> Tensor:
        """Return scaled token embeddings plus position embeddings, as `embedding`."""
        if self.called is None:
            return embedding(ids, self.tokens, self.scale, row, other)
        x = self.called(ids[:, None])[:, 0]
        x = x if self.scale == 1.0 else x * self.scale
        return x if row is None else x + rows_of_positions(ids, row, other)

    def with_norm(
        self, ids: Tensor, position: int | Tensor, then: NormLike | None
    ) -> tuple[Tensor, Tensor]:
        """Return the embeddings after another norm, and before it.

        Args:
            ids: (R,) int64.
            position: Position of the newest tokens, as `StepInputs.position`.
            then: The other norm; None for none.

        Returns:
            (R, C) each.
        """
        first = then if self.norm is None else self.norm
        plain = self.called is None and not self.norm_tokens
        if isinstance(first, Norm) and plain and runs_kernels(ids):
            positions, of = self._positions(position), first.parameters
            x, total = normed_embedding(ids, self.tokens, self.scale, positions, of)
            if first is then:
                return x, total
        else:
            x = self(ids, position)
        return x if then is None else then(x)[0], x

    def _positions(self, position: int | Tensor) -> Positions | None:
        if self.positions is None:
            return None
        return Positions(self.positions, self.first, position, self.padding, self.padding_row)


@dataclass(frozen=True)
class DecoderStep:
    """The fused decode step of a decoder.

    Attributes:
        tokens: Tokens that a step runs per row, of which only the first stays in the KV cache.
        module: The decoder.
        embedding: Embedding of the newest tokens.
        sublayers: Sublayers in the order in which they run.
        first: Norm before the first sublayer in pre-norm models; None in post-norm models.
        head: Product of the output head.
        bias: (V,) bias of the logits; None for none.
        scale: Factor of the hidden states before the head.
        softcap: Soft cap of the logits; None for none.
        fingerprint: Everything besides the weights that the step was built from, such as the
            model's config. An equal fingerprint means that the step is still valid.
        run_layers: Runs all sublayers at once, given the input of the first one and the residual
            stream. None if there is no such function. It returns None for a step that it does not
            support.
        called: Names of the classes of layers that run as modules.
    """

    tokens: ClassVar[int] = 1
    module: nn.Module
    embedding: Embedding
    sublayers: Sequence[Sublayer]
    first: NormLike | None
    head: Product
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    fingerprint: tuple[object, ...] = ()
    run_layers: Callable[[Tensor, Tensor, Any], Tensor | None] | None = None
    called: tuple[str, ...] = ()

    @property
    def layers(self) -> tuple[int, int]:
        """Numbers of self-attention and cross-attention layers."""
        mixers = [sublayer.mixer for sublayer in self.sublayers]
        return sum(isinstance(m, SelfAttention) for m in mixers), sum(
            isinstance(m, CrossAttention) for m in mixers
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.tokens.dtype

    @property
    def counts_padding(self) -> bool:
        """Whether attention needs the number of padding tokens, which position ids do not tell."""
        return any(bias.by_position for bias in self._biases)

    @property
    def has_bias(self) -> bool:
        """Whether self-attention adds a bias by distance or position to its scores."""
        return bool(self._biases)

    @property
    def _biases(self) -> list[AttentionBias]:
        mixers = (sub.mixer for sub in self.sublayers if isinstance(sub.mixer, SelfAttention))
        return [mixer.bias for mixer in mixers if mixer.bias is not None]

    def __call__(self, ids: Tensor, context: StepInputs) -> Tensor:
        """Run the decode step.

        Args:
            ids: (R,) int64, the newest token of each row.
            context: Other inputs of the step.

        Returns:
            The logits (R, V) of the next token.
        """
        return self.logits(self.hidden(ids, context))

    def hidden(self, ids: Tensor, context: StepInputs) -> Tensor:
        """Return the hidden states (R, C) that the head reads; arguments as in `__call__`."""
        x, stream = self.embedding.with_norm(ids, context.position, self.first)
        if (
            self.run_layers is not None
            and (hidden := self.run_layers(x, stream, context)) is not None
        ):
            return hidden
        for sublayer in self.sublayers:
            x, total = sublayer(x, stream, context)
            stream = x if self.first is None else total
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Apply the head to hidden states (R, C); return the logits (R, V)."""
        logits = self.head.apply(x if self.scale == 1.0 else x * self.scale)
        if self.bias is not None:
            logits.add_(self.bias)
        return (
            logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)
        )
