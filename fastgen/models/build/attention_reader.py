"""Read the attention of a stack's layers: projections, rotary positions, biases and windows."""

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastgen.models.build.introspection import NotFused, at, name_of, part_or_none
from fastgen.models.build.layer_reader import LayerReader
from fastgen.models.layers.head_products import HeadProducts, HeadValues
from fastgen.models.layers.linear import Linear
from fastgen.models.layers.positions import (
    AttentionBias,
    ComplexRotary,
    InterleavedRotary,
    PairedRotary,
    Rotary,
    RotationTable,
)
from fastgen.models.routing.instance import is_toolkits
from fastgen.models.runtime.prophetnet import StreamAttention
from fastgen.models.runtime.sublayers import CrossAttention, LatentAttention, SelfAttention
from fastgen.models.specs.model_spec import Attention, Stack
from fastgen.models.specs.model_spec import Rotary as RotarySpec


class AttentionReader(LayerReader):
    """Reads the attention modules of a stack that a spec names.

    Args:
        model: The model, or the stack itself.
        spec: The names of the stack's parts.
        longest: Maximum number of tokens of a text.
        windows: The tokens that self-attention of each layer sees, None for all; empty where all
            layers see all tokens.
    """

    def __init__(
        self, model: Any, spec: Stack, longest: int, windows: Sequence[int | None] = ()
    ) -> None:
        self.model, self.spec, self.longest, self.windows = model, spec, longest, windows
        self.stack = at(model, spec.path)
        self.layers: list[Any] = list(at(self.stack, spec.layers).children())
        like = (
            next(self.stack.parameters())
            if spec.embedding is None
            else at(self.stack, spec.embedding.tokens).weight
        )
        super().__init__(like.dtype, like.device.type)
        self.location, self.width = like.device, int(like.shape[-1])
        if hasattr(model, "config"):
            self.fingerprint.append(repr(vars(model.config)))
        alibi = spec.positions.alibi
        self.bias: AttentionBias | None = None if alibi is None else self.alibi(alibi)
        self.window_biases: list[AttentionBias] = []
        self.tables: list[RotationTable] = []
        self.rotations: dict[str | None, Rotary] = {}
        self.buckets: tuple[tuple[int, int], Tensor] | None = None

    def self_attention(self, module: Any, names: Attention) -> Any:
        inner = at(module, names.inner)
        dims = getattr(inner, names.head_dim)
        qkv = [at(module, name) for name in names.qkv]
        # The input of the output projection has H * D channels, however the others are fused.
        heads = self.inputs(at(module, names.out)) // dims
        if getattr(module, "reorder_and_upcast_attn", False) or getattr(
            module, "is_cross_attention", False
        ):
            raise NotFused("attention in a precision or form of its own")
        self.check_functions(module)
        query_norm, key_norm = (self.norm(module._modules.get(name)) for name in names.qk_norm)
        scale = float(names.scale(inner))
        softcap = None if names.softcap is None else getattr(module, names.softcap)
        groups = names.qkv_groups(module)
        repeats_kv = names.repeats_kv is not None and bool(getattr(module, names.repeats_kv))
        sinks = module._parameters.get(names.sinks)
        if sinks is not None and len(module._parameters) == 1:
            self.read.add(module)
        self.fingerprint += (dims, scale, softcap, groups, repeats_kv)
        if names.relative_positions is not None:
            return StreamAttention(
                tuple(map(self.product, qkv)), heads, dims, scale,
                nearness=self.product(at(module, names.relative_positions)),
                buckets=self.distance_buckets(module),
            )  # fmt: skip
        return SelfAttention(
            self.products(qkv), heads, dims, scale, query_norm, key_norm,
            self.score_bias(module, names), self.rotary(module, names.rotary), softcap, groups,
            names.values_first, repeats_kv, names.rotary.interleaved, names.norms_all_heads,
            names.norms_rotated, names.rotary.fp32, sinks,
        )  # fmt: skip

    def check_functions(self, module: Any) -> None:
        """Raise `NotFused` where a function that a step reimplements was replaced."""
        functions = vars(sys.modules[type(module).__module__])
        for name in _FUNCTIONS:
            if name in functions and not is_toolkits(functions[name]):
                raise NotFused(f"a function {name} of its own")
            self.fingerprint.append(functions.get(name))

    def latent_attention(self, module: Any, names: Attention) -> LatentAttention:
        latent = names.latent
        assert latent is not None
        rope_dim, nope_dim, values = (
            int(getattr(module, name)) for name in (latent.rope_dim, latent.nope_dim, latent.values)
        )
        expand, heads = at(module, latent.expand), self.inputs(at(module, names.out)) // values
        if not self.is_plain(expand) or expand.bias is not None:
            raise NotFused(f"a {name_of(expand)} in place of a linear layer without a bias")
        self.read.update(expand.modules())
        self.check_functions(module)
        whole = part_or_none(module, latent.query)
        parts = (
            [whole]
            if whole is not None
            else [at(module, latent.query_down), at(module, latent.query_up)]
        )
        scale, pairs_apart = float(names.scale(module)), latent.pairs_apart(module)
        rotary = self.rotary(module, names.rotary)
        if rotary is None:
            raise NotFused("latent attention without a rotation")
        self.fingerprint += (rope_dim, nope_dim, values, scale, pairs_apart)
        of_heads = None
        if isinstance(self.product(expand), Linear):
            shape = expand, heads, nope_dim
            of_heads = HeadProducts(*shape), HeadValues(*shape)
        return LatentAttention(
            tuple(map(self.product, parts)), heads, nope_dim + rope_dim, scale,
            None if whole is not None else self.norm(at(module, latent.query_norm)),
            self.norm(at(module, latent.norm)), rotary=rotary,
            interleaved=names.rotary.interleaved, rotates_fp32=names.rotary.fp32,
            compress=self.product(at(module, latent.compress)),
            expand=expand.weight.view(heads, nope_dim + values, -1), rope_dim=rope_dim,
            pairs_apart=pairs_apart, of_heads=of_heads,
        )  # fmt: skip

    def cross_attention(self, module: Any, names: Attention) -> CrossAttention:
        inner, query = at(module, names.inner), at(module, names.qkv[0])
        makers = [at(module, name) for name in names.qkv[1:]]
        plain = [*map(self.is_product, map(self.opened, makers))] == [True, True]
        if not plain:  # They run within the model's own attention, before the first step.
            self.free.update(part for maker in makers for part in maker.modules())
        dims, scale, asks = (
            getattr(inner, names.head_dim), float(names.scale(inner)), self.product(query),
        )  # fmt: skip
        self.fingerprint += (dims, scale)
        return CrossAttention(
            asks, asks.outputs // dims, dims, scale,
            (self.product(makers[0]), self.product(makers[1])) if plain else None,
        )  # fmt: skip

    def check_positions(self, count: int) -> None:
        if self.longest > count:
            raise NotFused(f"a text of up to {self.longest} tokens, positions for {count}")

    def rotary(self, attention: Any, spec: RotarySpec) -> Rotary | None:
        """Return the rotary embedding of an attention module; None for none."""
        module: Any = self.stack._modules.get(spec.module)
        if module is not None:
            self.read.add(module)
        if spec.table is not None:
            # Since transformers 5.24 one rotary module serves all layers.
            table: Tensor = getattr(attention if module is None else module, spec.table)
            self.check_positions(table.shape[0])
            return self.rotation_table(table[: self.longest])
        if module is None or self.spec.positions.alibi is not None:  # Falcon has both, uses ALiBi
            return None
        rope = getattr(module, "rope_type", None)
        kinds: list[str | None] = list(rope.values()) if isinstance(rope, dict) else [rope]
        if any(name in ("dynamic", "longrope") for name in kinds):
            raise NotFused(
                f"rotary positions of type {rope!r}, which change with the length of the text"
            )
        applies, which = (
            spec.applies(attention),
            None if spec.kind is None else getattr(attention, spec.kind),
        )
        self.fingerprint += (type(module), which, applies)
        if not applies:
            return None
        if which not in self.rotations:
            rotary: Any = module if which is None else functools.partial(module, layer_type=which)
            rotary = InterleavedRotary(rotary) if spec.halves else rotary
            rotary = ComplexRotary(rotary) if spec.complex else rotary
            self.rotations[which] = PairedRotary(rotary) if spec.once else rotary
        return self.rotations[which]

    def rotation_table(self, table: Tensor) -> Rotary:
        """Return one object for all layers with equal tables, so that a step looks it up once."""
        known = next((r for r in self.tables if torch.equal(r.table, table)), None)
        if known is None:
            known = RotationTable(table)
            self.tables.append(known)
        return known

    def score_bias(self, module: Any, names: Attention) -> AttentionBias | None:
        """Return a module's own bias of scores, else that of an earlier layer or of the stack."""
        if names.causal_mask is not None:
            visible: Tensor = getattr(module, names.causal_mask)
            # Beyond the table there are no positions for tokens either.
            last = min(self.longest, visible.shape[2]) - 1
            return self.window(visible[0, 0, last : last + 1, : last + 1].flip(1))
        if getattr(module, "has_relative_attention_bias", False):
            if self.dtype == torch.float16:
                raise NotFused("float16, in which its sums are clamped")
            self.read.add(module.relative_attention_bias)
            self.bias = AttentionBias(functools.partial(_by_distance, module, self.longest))
        return self.bias

    def alibi(self, make: Callable[[Any, int], Tensor]) -> AttentionBias:
        by_key = self.spec.positions.alibi_by_key
        return AttentionBias(functools.partial(make, self.stack, self.longest), by_key)

    def within(self, attention: SelfAttention, tokens: int | None) -> SelfAttention:
        """Limit attention to the last `tokens` tokens, unless no text is longer."""
        if tokens is None or tokens >= self.longest:
            return attention
        if attention.bias is not None:
            raise NotFused("the text may outgrow the sliding window, and scores have a bias")
        distances = torch.arange(self.longest, dtype=torch.int64, device=self.location)
        return replace(attention, bias=self.window(distances[None] < tokens))

    def window(self, visible: Tensor) -> AttentionBias | None:
        """Return the bias that limits attention to a window.

        Args:
            visible: (1, L) bool by distance, True where visible.

        Returns:
            An additive bias by distance, shared by layers with the same window; None for no window.
        """
        if bool(visible.all()):
            return None
        table = torch.zeros(visible.shape, dtype=self.dtype, device=visible.device).masked_fill_(
            ~visible, -torch.inf
        )
        known = next((bias for bias in self.window_biases if torch.equal(bias.table, table)), None)
        if known is None:
            known = AttentionBias(lambda: table)
            self.window_biases.append(known)
        return known

    def distance_buckets(self, module: Any) -> Tensor:
        """Return the bucket of each distance, (L,) int64, by the toolkit's own function."""
        limits = module.num_buckets, module.relative_max_distance
        self.fingerprint += limits
        if self.buckets is None:
            find = vars(sys.modules[type(module).__module__])["compute_relative_buckets"]
            device = module.out_proj.weight.device
            self.buckets = (
                limits,
                find(
                    *limits, -torch.arange(self.longest + 1, device=device, dtype=torch.int64)
                ).long(),
            )
        if self.buckets[0] != limits:
            raise NotFused(f"buckets of distances of its layers is {[self.buckets[0], limits]}")
        return self.buckets[1]


_FUNCTIONS = (
    "apply_rotary_pos_emb",
    "apply_rotary_pos_emb_interleave",
    "apply_rotary_emb",
    "eager_attention_forward",
    "build_alibi_tensor",
    "build_mpt_alibi_tensor",
)
"""Functions of a model's file that a step reimplements, or calls while it is built."""


def _by_distance(attention: Any, longest: int) -> Tensor:
    """Return the bias (H, L) of T5's attention for keys at distances 0 to L - 1."""
    return attention.compute_bias(1, longest, past_seen_tokens=longest - 1)[0, :, 0].flip(1)
