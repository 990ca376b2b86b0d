"""Build an encoder's layers from a live encoder's modules and its spec (`models.specs`)."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from fastgen.models.build.equivalence_check import (
    OUTPUTS_DIFFER,
    Verdicts,
    recorded_verdict,
    verdicts_of,
)
from fastgen.models.build.introspection import NotFused, reading
from fastgen.models.build.stack_reader import StackReader
from fastgen.models.layers import linear, packed_weights
from fastgen.models.layers.linear import Linear, Product, TorchLinear
from fastgen.models.memory.scratch import scratch_pool_of
from fastgen.models.runtime.encoder import Encoder, EncoderSelfAttention, PositionBias
from fastgen.models.runtime.native.encoder import native_encoder
from fastgen.models.specs.model_spec import Attention, Stack
from fastgen.models.state import state_of
from fastgen.ops import native

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
"""Supported dtypes. Some families clamp overflowing activations in float16, so it is excluded."""


def may_run_in_c(module: nn.Module) -> bool:
    """Return whether C is expected to run an encoder's layers, judged before they are read.

    C is then always the faster way.
    """
    return (
        native.library() is not None
        and linear.reason_off(module, math.inf) is None
        and not verdicts_of(module).lacks_c
    )


def encoder_of(
    module: nn.Module, spec: Stack, longest: int, of: nn.Module | None = None
) -> Encoder:
    """Build the layers of an encoder in evaluation mode.

    Args:
        module: The encoder, or the module that holds its layers.
        spec: The names of its parts.
        longest: Maximum number of positions per sentence.
        of: The encoder that `module` stands in for; None for `module` itself.

    Raises:
        NotFused: The encoder differs from its spec.
    """
    with reading("encoder"):
        return _EncoderReader(module, spec, longest).encoder(of or module)


class _EncoderReader(StackReader):
    """Reads an encoder's parts; its linear layers use `ops.linear` without being routed."""

    def __init__(self, module: nn.Module, spec: Stack, longest: int) -> None:
        super().__init__(module, spec, longest)
        if self.dtype not in DTYPES:
            raise NotFused(f"weights in {self.dtype}")
        self.routes = linear.reason_off(module) is None
        self.memory = scratch_pool_of(module)
        self.table: PositionBias | None = None

    def encoder(self, of: nn.Module) -> Encoder:
        sublayers, first = self.sublayers()
        embedding = None if self.spec.embedding is None else self.embedding(self.spec.embedding)
        self.check_rest()
        at_once = native_encoder(sublayers, first is not None)
        if at_once is None:
            state_of(of).of(Verdicts).lacks_c = True
        encoder = Encoder(of, sublayers, first, embedding, tuple(self.fingerprint), at_once)
        if recorded_verdict(encoder) is False:
            raise NotFused(OUTPUTS_DIFFER)
        return encoder

    def self_attention(self, module: Any, names: Attention) -> EncoderSelfAttention:
        attention = super().self_attention(module, names)
        if (
            attention.query_norm is not None
            or attention.softcap is not None
            or attention.rotary is not None
        ):
            raise NotFused("attention in a form of its own")
        return EncoderSelfAttention(
            attention.projections, attention.heads, attention.dims, attention.scale, self.table
        )

    def score_bias(self, module: Any, names: Attention) -> None:
        """Record a module's position bias, which later layers without one share."""
        if getattr(module, "has_relative_attention_bias", False):
            self.read.add(module.relative_attention_bias)
            self.table = PositionBias(partial(module.compute_bias, self.longest, self.longest))

    def product(self, module: Any) -> Product:
        own = super().product(module)
        if type(own) is TorchLinear and self.routes and linear.is_plain(own.module):
            packed_weights.check(own.module)
            return Linear(own.module, transposed=False, memory=self.memory)
        return own

    def products(self, modules: Sequence[Any]) -> tuple[Product, ...]:
        return tuple(map(self.product, modules))
