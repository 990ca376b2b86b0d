"""What makes an encoder's layers of a live model's parts, by the record of their names (`decoder_layouts`)."""

from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from fastgen.models.build.equivalence_check import OTHERWISE, outcome
from fastgen.models.build.introspection import NotFused, reading
from fastgen.models.build.step_builder import Reader
from fastgen.models.layers import linear, packed_weights
from fastgen.models.layers.linear import Linear, Own, Product
from fastgen.models.memory.scratch import memory_of
from fastgen.models.runtime.encoder import Encoder, PositionBias, SentenceAttention
from fastgen.models.runtime.native_step import encoded_together
from fastgen.models.specs.decoder_layouts import Attention, Layout
from fastgen.ops import native

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
"""Not float16, in which the layers of some families clamp what overflows."""


_not_written: "WeakSet[nn.Module]" = WeakSet()
"""Encoders with parts that are not written in C."""


def may_run_in_c(module: nn.Module) -> bool:
    """Whether C runs an encoder's layers, as far as can be said before they are read; it is always the faster way."""
    return (
        native.library() is not None
        and linear.reason_off(module) is None
        and module not in _not_written
    )


def encoder_of(
    module: nn.Module, layout: Layout, longest: int, of: nn.Module | None = None
) -> Encoder:
    """Build the layers of an encoder in evaluation mode.

    Args:
        longest: positions of a sentence at most.
        of: the encoder that `module` stands for; None for itself.

    Raises:
        NotFused: where anything is not as the layout says.
    """
    with reading("encoder"):
        return _EncoderReader(module, layout, longest).encoder(of or module)


class _EncoderReader(Reader):
    """Reads an encoder's parts. Its linear layers need carry no route to be run by `ops.linear`."""

    def __init__(self, module: nn.Module, layout: Layout, longest: int) -> None:
        super().__init__(module, layout, longest)
        if self.dtype not in DTYPES:
            raise NotFused(f"weights in {self.dtype}")
        self.routes = linear.reason_off(module) is None
        self.memory = memory_of(module)
        self.table: PositionBias | None = None

    def encoder(self, of: nn.Module) -> Encoder:
        sublayers, first = self.stack()
        embedding = self.embedding() if self.layout.tokens else None
        self.check_rest()
        at_once = encoded_together(sublayers, first is not None)
        if at_once is None:
            _not_written.add(of)
        encoder = Encoder(of, sublayers, first, embedding, tuple(self.facts), at_once)
        if outcome(encoder) is False:
            raise NotFused(OTHERWISE)
        return encoder

    def self_attention(self, module: Any, names: Attention) -> SentenceAttention:
        found = super().self_attention(module, names)
        if found.query_norm is not None or found.softcap is not None or found.rotary is not None:
            raise NotFused("attention in a form of its own")
        return SentenceAttention(found.parts, found.heads, found.dims, found.scale, self.table)

    def biased(self, module: Any, seen: str | None) -> None:
        """Keep the bias of a module: the next ones, which have none, take the same."""
        if getattr(module, "has_relative_attention_bias", False):
            self.read.add(module.relative_attention_bias)
            self.table = PositionBias(partial(module.compute_bias, self.longest, self.longest))

    def product(self, module: Any) -> Product:
        found = super().product(module)
        if type(found) is Own and self.routes and linear.is_plain(module):
            packed_weights.check(module)
            return Linear(module, transposed=False, memory=self.memory)
        return found

    def products(self, modules: Sequence[Any]) -> tuple[Product, ...]:
        return tuple(map(self.product, modules))
