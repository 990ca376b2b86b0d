"""Read the parts of a stack of transformer layers that a spec names (`models.specs`).

A stack may contain only what its spec names. With anything else, such as a hook, a part added by a
later release, or training mode, it runs through its own forward. In a decoder, other layers in the
place of linear ones run as modules.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastgen.models.build.introspection import (
    NotFused,
    at,
    check_unread,
    is_there,
    name_of,
    part_or_none,
)
from fastgen.models.build.layer_reader import LayerReader
from fastgen.models.build.peft_layers import (
    embedding_in,
    is_of_peft,
)
from fastgen.models.layers import activation
from fastgen.models.layers.experts import ExpertProducts, Experts, Routing, is_clamped, is_plain
from fastgen.models.layers.linear import Identity, Product
from fastgen.models.layers.norm import ConstantScale, NormLike, unnormed
from fastgen.models.layers.positions import (
    AttentionBias,
    ComplexRotary,
    InterleavedRotary,
    PairedRotary,
    Rotary,
    RotationTable,
)
from fastgen.models.routing.instance import is_toolkits
from fastgen.models.runtime.decode_step import Embedding
from fastgen.models.runtime.prophetnet import StreamAttention, StreamEmbedding
from fastgen.models.runtime.sublayers import (
    CrossAttention,
    FeedForward,
    LatentAttention,
    SelfAttention,
    Sublayer,
)
from fastgen.models.specs.model_spec import Attention, Mlp, Stack
from fastgen.models.specs.model_spec import Embedding as EmbeddingSpec
from fastgen.models.specs.model_spec import Experts as ExpertsSpec
from fastgen.models.specs.model_spec import Rotary as RotarySpec


class _Part(NamedTuple):
    """The parts of a sublayer.

    Attributes:
        layer: Index of the layer.
        mixer: Attention or feed-forward, without the output projection.
        out: The output projection.
        own: The norm of the output, before the residual sum; None for none.
        norm: The sublayer's norm.
    """

    layer: int
    mixer: Callable[[Tensor, int, Any], Tensor]
    out: Product
    own: NormLike | None
    norm: NormLike


class StackReader(LayerReader):
    """Reads the parts of a stack that a spec names, and checks that nothing else is left.

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

    def check_rest(self, *paths: str) -> None:
        """Raise `NotFused` where the stack, or a part at one of the paths, was not read."""
        where, called = [self.spec.path, *paths], self.spec.runs_hooks
        check_unread(self.model, where, self.read, self.free, called)

    def sublayers(self) -> tuple[list[Sublayer], NormLike | None]:
        """Return all sublayers; for pre-norm layers, also the norm before the first one."""
        spec = self.spec
        if not self.layers:
            raise NotFused("its decoder has no layers")
        pre_norm, parallel = self.flag(spec.pre_norm), self.flag(spec.parallel)
        parts = [
            part for index, layer in enumerate(self.layers) for part in self.parts_of(index, layer)
        ]
        norms_of, last = (
            [part.norm for part in parts],
            self.norm(self.stack._modules.get(spec.final_norm)),
        )
        if not pre_norm and last is not None:
            raise NotFused("its decoder has a last norm beside those of its layers")
        behind = [*norms_of[1:], last or unnormed] if pre_norm else norms_of
        if torch.is_autocast_enabled(self.device):
            raise NotFused("autocast chooses the types")
        if torch.is_grad_enabled():
            raise NotFused("gradients are enabled")
        self.fingerprint += (pre_norm, parallel)
        sublayers = [
            Sublayer(
                part.layer,
                part.mixer,
                part.out,
                norm,
                part.own,
                parallel and type(part.mixer) is SelfAttention,
            )
            for part, norm in zip(parts, behind, strict=True)
        ]
        return sublayers, norms_of[0] if pre_norm else None

    def flag(self, flag: bool | str) -> bool:
        """Return a flag, which the spec states itself or as the name of a layer attribute."""
        if not isinstance(flag, str):
            return flag
        values = [bool(getattr(layer, flag)) for layer in self.layers]
        if len(set(values)) > 1:
            raise NotFused(f"{flag} of its layers is {values}")
        return values[0]

    def check_layers(self) -> None:
        """Raise `NotFused` where a layer has an option that no decode step implements."""
        for layer in self.layers:
            for path in self.spec.unsupported:
                where, _, name = path.rpartition(".")
                value = getattr(at(layer, where) if where else layer, name)
                if value:
                    raise NotFused(f"{name} of its layers is {value}")
        if (count := self.spec.positions.count) is not None:
            self.check_positions(getattr(self.model.config, count))

    def check_positions(self, count: int) -> None:
        if self.longest > count:
            raise NotFused(f"a text of up to {self.longest} tokens, positions for {count}")

    def parts_of(self, index: int, layer: Any) -> list[_Part]:
        spec, parts = self.spec, list[_Part]()
        for names, read in (
            (spec.self_attention, self.self_attention),
            (spec.cross_attention, self.cross_attention),
        ):
            if names is None or ("." not in names.module and getattr(layer, names.module) is None):
                continue  # fairseq's language models set absent parts to None
            module = at(layer, names.module)
            inner = at(module, names.inner)
            if getattr(inner, "layer_idx", getattr(inner, "layer_id", index)) not in (index, None):
                raise NotFused("its layers number their keys and values in another order")
            attend: Any = (read if names.latent is None else self.latent_attention)(module, names)
            if names is spec.self_attention and index < len(self.windows):
                attend = self.within(attend, self.windows[index])
            out = self.product(at(module, names.out))
            post_norm = self.post_norm(layer, names.post_norm)
            parts.append(_Part(index, attend, out, post_norm, self.norm_at(layer, names.norm)))
        mlp, experts = spec.mlp, spec.experts
        if experts is not None and is_there(layer, experts.router):
            mix, out = self.experts(layer, experts)
        else:
            mix, out = self.feed_forward(layer, mlp)
        post_norm = self.post_norm(layer, mlp.post_norm)
        parts.append(_Part(index, mix, out, post_norm, self.norm_at(layer, mlp.norm)))
        return parts

    def experts(self, layer: Any, names: ExpertsSpec) -> tuple[Experts, Product]:
        """Return a mixture of experts, and its output projection."""
        module = at(layer, names.module)
        self.read.update(parts := list(module.modules()))
        self.free.update(part for part in parts if is_of_peft(part))
        if any(parameter.is_meta for parameter in module.parameters()):
            raise NotFused("weights that are offloaded")
        return Experts(module, self.routing(layer, names)), Identity(self.width)

    def routing(self, layer: Any, names: ExpertsSpec) -> Routing | None:
        """Return what C needs to run a mixture of experts; None where it cannot run it."""
        if names.normalised is None:
            return None
        router, experts = at(layer, names.router), at(layer, names.experts)
        if is_of_peft(router) or is_of_peft(experts):
            return None
        held = [router.weight, *map(experts._parameters.get, ("gate_up_proj", "down_proj"))]
        biases: list[Any] = [getattr(router, "bias", None), None, None]
        if experts.has_bias:
            biases[1:] = map(experts._parameters.get, ("gate_up_proj_bias", "down_proj_bias"))
        clamp, kind = None, None
        if experts._apply_gate.__name__ == "_default_apply_gate":
            kind = activation.kind(getattr(experts, "act_fn", None))
        elif not experts.is_concatenated and hasattr(experts, "limit"):
            of_gate = float(experts.alpha), float(experts.limit)
            clamp = of_gate if is_clamped(type(experts)._apply_gate, *of_gate) else None
        normalised = names.normalised(router)
        if (
            normalised is None
            or (kind, clamp) == (None, None)
            or not (
                all(weight is not None and is_plain(weight) for weight in held)
                and all(bias is None or is_plain(bias) for bias in biases)
                and not any(getattr(experts, name, False) for name in _OTHER_EXPERTS)
                and experts.config._experts_implementation in _SAME_EXPERTS
            )
        ):
            return None
        chosen, correction = int(router.top_k), None
        if names.correction is not None:
            correction = at(layer, names.correction).detach().float().flatten().contiguous()
        groups, kept = [int(getattr(router, name)) for name in names.groups] or (1, 1)
        factor = 1.0 if names.factor is None else float(getattr(router, names.factor))
        gate = None if names.shared_gate is None else at(layer, names.shared_gate)
        self.fingerprint += (chosen, kind, clamp, normalised, groups, kept, factor)
        shared = [at(layer, name) for name in names.shared if is_there(layer, name)]
        return Routing(
            router.weight, chosen, normalised, names.rounded, names.precise, names.sigmoid,
            correction, (groups, kept), factor, kind,
            ExpertProducts(experts, "gate_up_proj", experts.is_transposed),
            ExpertProducts(experts, "down_proj", experts.is_transposed),
            router_bias=biases[0], up_bias=biases[1], down_bias=biases[2], clamp=clamp,
            shared=tuple(map(self.product, shared)),
            shared_gate=None if gate is None else gate.weight,
        )  # fmt: skip

    def feed_forward(self, layer: Any, mlp: Mlp) -> tuple[FeedForward, Product]:
        """Return the first half of a feed-forward sublayer, and its output projection."""
        up, gate = mlp.up, mlp.gate
        if mlp.ungated is not None and is_there(layer, mlp.ungated):
            up, gate = mlp.ungated, None
        wide = FeedForward(
            self.product(at(layer, gate or up)),
            self.activation(at(layer, mlp.activation)),
            None if gate in (None, up) else self.product(at(layer, up)),
            halves=gate == up,
        )
        return wide, self.product(at(layer, mlp.down))

    def norm_at(self, layer: Any, path: str) -> NormLike:
        return self.norm(at(layer, path)) if path else unnormed

    def post_norm(self, layer: Any, path: str | None) -> NormLike | None:
        if self.spec.residual_multiplier is not None:
            factor = float(getattr(layer, self.spec.residual_multiplier))
            self.fingerprint.append(factor)
            return ConstantScale(factor)
        return None if path is None else self.norm(at(layer, path))

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
        turned, kept, values = (
            int(getattr(module, name)) for name in (latent.turned, latent.kept, latent.values)
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
        self.fingerprint += (turned, kept, values, scale, pairs_apart)
        return LatentAttention(
            tuple(map(self.product, parts)), heads, kept + turned, scale,
            None if whole is not None else self.norm(at(module, latent.query_norm)),
            self.norm(at(module, latent.norm)), rotary=rotary,
            interleaved=names.rotary.interleaved, rotates_fp32=names.rotary.fp32,
            compress=self.product(at(module, latent.compress)),
            expand=expand.weight.view(heads, kept + values, -1), turned=turned,
            pairs_apart=pairs_apart,
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

    def embedding(self, spec: EmbeddingSpec) -> Embedding:
        stack, name = self.stack, spec.scale
        tokens = called = self.opened(at(stack, spec.tokens))
        if (inner := embedding_in(called)) is None or self.device != "cpu" or not self.calls:
            called = None
        else:
            self.called.append(called)
            tokens = inner
        if not isinstance(tokens, nn.Embedding) or tokens.max_norm is not None:
            raise NotFused(f"a {name_of(tokens)} in place of an embedding")
        scale = 1.0 if spec.norms_tokens else getattr(tokens, name, getattr(stack, name, 1.0))
        if called is not None and hasattr(tokens, name):
            scale = 1.0  # The module applies it.
        scale = float(scale.to(tokens.weight.dtype) if isinstance(scale, Tensor) else scale)
        normed = self.norm(part_or_none(stack, spec.norm))
        self.fingerprint.append(scale)
        places = self.spec.positions
        positions = part_or_none(stack, places.table)
        if positions is None:
            return Embedding(
                tokens.weight, scale, norm=normed, norm_tokens=spec.norms_tokens, called=called
            )
        self.read.add(positions)
        arguments = inspect.signature(type(positions).forward).parameters
        if places.length_arguments and not set(places.length_arguments) & set(arguments):
            raise NotFused("positions that do not count the tokens before")
        table: Tensor = positions.weights if hasattr(positions, "weights") else positions.weight
        first = places.first_row(positions)
        self.check_positions(table.shape[0] - first)
        if table.dtype != tokens.weight.dtype or table.device != tokens.weight.device:
            raise NotFused(f"positions in {table.dtype} on {table.device}")
        padding = None if places.padding is None else positions.padding_idx
        row = None if places.padding == "previous" else padding or 0
        self.fingerprint += (first, padding, row)
        if spec.token_types is not None:
            types = at(stack, spec.token_types)
            self.read.add(types)
            table = table + types.weight[spec.token_type(self.model)]
        if spec.streams is not None:
            if called is not None:
                raise NotFused(f"a {name_of(called)} in place of an embedding")
            streams = at(stack, spec.streams)
            self.read.add(streams)
            if positions.padding_idx != 0:
                raise NotFused(f"streams whose positions begin at {first}")
            # The first predicting stream takes the embedding before the first row: the last row.
            return StreamEmbedding(
                tokens.weight, scale, table, first, norm=normed, stream=streams.weight[-1]
            )
        return Embedding(
            tokens.weight, scale, table, first, padding, row, normed, spec.norms_tokens, called
        )

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


_SAME_EXPERTS = ("eager", "grouped_mm", "batched_mm")
"""Implementations of experts in transformers that compute the same."""


_OTHER_EXPERTS = ("has_post_expert_norm", "_is_expert_parallel")
"""Attributes of experts that compute something else."""


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
