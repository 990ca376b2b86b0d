"""Build a decode step from a live model's modules, named in `models.specs.decoder_layouts`.

A model may contain only what its layout names. With anything else, such as an adapter, a hook, a
part added by a later release, or training mode, decode steps run through the model's own forward.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastgen.models.build.equivalence_check import OTHERWISE, outcome
from fastgen.models.build.introspection import (
    NotFused,
    at,
    check_unread,
    is_there,
    name_of,
    part_or_none,
    reading,
)
from fastgen.models.layers import activation
from fastgen.models.layers.linear import Product, is_linear, product, products
from fastgen.models.layers.norm import Norm, NormLike, OwnNorm, Times, rms_norm, unnormed
from fastgen.models.layers.positions import Bias, Rotary, RotationTable
from fastgen.models.routing.instance import is_toolkits
from fastgen.models.runtime.decode_step import (
    DecoderStep,
    Embedding,
    FeedForward,
    SourceAttention,
    Sublayer,
    TextAttention,
)
from fastgen.models.runtime.masked_step import MaskedStep, Prediction
from fastgen.models.runtime.native_step import together
from fastgen.models.runtime.prophetnet import StreamAttention, StreamEmbedding
from fastgen.models.specs.decoder_layouts import Attention, Layout


def step_of(model: nn.Module, layout: Layout, longest: int) -> DecoderStep:
    """Build the decode step of a model in evaluation mode.

    Args:
        model: The model.
        layout: The names of its parts.
        longest: Maximum number of tokens of a text.

    Raises:
        NotFused: The model differs from its layout.
    """
    with reading("decoder"):
        return Reader(model, layout, longest).step()


class _Part(NamedTuple):
    """The parts of a sublayer.

    Attributes:
        layer: Index of the layer.
        mix: Attention or feed-forward, without the output projection.
        out: The output projection.
        own: The norm of the output, before the residual sum; None for none.
        norm: The sublayer's norm.
    """

    layer: int
    mix: Callable[[Tensor, int, Any], Tensor]
    out: Product
    own: NormLike | None
    norm: NormLike


class Reader:
    """Reads the parts that a layout names, and checks that nothing else is left."""

    def __init__(self, model: Any, layout: Layout, longest: int) -> None:
        self.model, self.layout, self.longest = model, layout, longest
        self.decoder = at(model, layout.decoder)
        self.layers: list[Any] = list(at(self.decoder, layout.layers).children())
        like = (
            at(self.decoder, layout.tokens).weight
            if layout.tokens
            else next(self.decoder.parameters())
        )
        self.dtype: torch.dtype = like.dtype
        self.device: str = like.device.type
        self.read: set[nn.Module] = set()
        config = repr(vars(model.config)) if hasattr(model, "config") else ""
        self.facts: list[object] = [config, self.dtype, self.device]
        self.bias: Bias | None = None if layout.alibi is None else self.alibi(layout.alibi)
        self.windows: list[Bias] = []
        self.tables: list[RotationTable] = []
        self.rotations: dict[str | None, Rotary] = {}
        self.near: tuple[tuple[int, int], Tensor] | None = None

    def step(self) -> DecoderStep:
        layout = self.layout
        sublayers, first = self.stack()
        self.check_layers()
        make = (
            DecoderStep
            if layout.mask is None
            else functools.partial(MaskedStep, mask=layout.mask(self.model))
        )
        step = make(
            module=self.decoder,
            embedding=self.embedding(),
            sublayers=sublayers,
            first=first,
            head=self.head(),
            bias=_bias(self.model, layout.bias),
            scale=layout.scale(self.model),
            softcap=layout.softcap(self.model),
            facts=tuple(self.facts),
            together=together(sublayers, first is not None) if layout.mask is None else None,
        )
        self.check_rest()
        if outcome(step) is False:
            raise NotFused(OTHERWISE)
        return step

    def check_rest(self) -> None:
        """Raise `NotFused` where the model has a part that was not read."""
        paths = (self.layout.decoder, self.layout.head, self.layout.transform)
        check_unread(
            self.model, [path for path in paths if path is not None], self.read, self.layout.called
        )

    def stack(self) -> tuple[list[Sublayer], NormLike | None]:
        """Return all sublayers; for pre-norm layers, also the norm before the first one."""
        layout, decoder = self.layout, self.decoder
        if not self.layers:
            raise NotFused("its decoder has no layers")
        norm_first, parallel = self.says(layout.norm_first), self.says(layout.parallel)
        parts = [
            part for index, layer in enumerate(self.layers) for part in self.sublayers(index, layer)
        ]
        norms_of, last = (
            [part.norm for part in parts],
            self.norm(decoder._modules.get(layout.last_norm)),
        )
        if not norm_first and last is not None:
            raise NotFused("its decoder has a last norm beside those of its layers")
        behind = [*norms_of[1:], last or unnormed] if norm_first else norms_of
        if torch.is_autocast_enabled(self.device):
            raise NotFused("autocast chooses the types")
        if torch.is_grad_enabled():
            raise NotFused("gradients are wanted")
        self.facts += (norm_first, parallel)
        sublayers = [
            Sublayer(
                part.layer,
                part.mix,
                part.out,
                norm,
                part.own,
                parallel and type(part.mix) is TextAttention,
            )
            for part, norm in zip(parts, behind, strict=True)
        ]
        return sublayers, norms_of[0] if norm_first else None

    def head(self) -> Product:
        layout, out = self.layout, self.product(at(self.model, self.layout.head))
        if layout.transform is None:
            return out
        # This module also registers the head's bias.
        self.read.add(at(self.model, layout.head.rpartition(".")[0]))
        return Prediction(
            self.product(at(self.model, layout.transform)),
            self.activation(at(self.model, layout.transform_activation)),
            self.norm(at(self.model, layout.transform_norm)),
            out,
        )

    def says(self, fact: bool | str) -> bool:
        """Return a layout's flag, which it states itself or as the name of a layer attribute."""
        if not isinstance(fact, str):
            return fact
        values = [bool(getattr(layer, fact)) for layer in self.layers]
        if len(set(values)) > 1:
            raise NotFused(f"{fact} of its layers is {values}")
        return values[0]

    def check_layers(self) -> None:
        """Raise `NotFused` where a layer has an option that no decode step implements."""
        for layer in self.layers:
            for path in self.layout.never:
                where, _, name = path.rpartition(".")
                value = getattr(at(layer, where) if where else layer, name)
                if value:
                    raise NotFused(f"{name} of its layers is {value}")
        if self.layout.positions_of is not None:
            self.check_positions(getattr(self.model.config, self.layout.positions_of))

    def check_positions(self, count: int) -> None:
        if self.longest > count:
            raise NotFused(f"a text of up to {self.longest} tokens, positions for {count}")

    def sublayers(self, index: int, layer: Any) -> list[_Part]:
        layout, parts = self.layout, list[_Part]()
        for names, self_attention in ((layout.text, True), (layout.source, False)):
            if names is None or ("." not in names.module and getattr(layer, names.module) is None):
                continue  # fairseq's language models set absent parts to None
            module = at(layer, names.module)
            core = at(module, names.core)
            if getattr(core, "layer_idx", getattr(core, "layer_id", index)) not in (index, None):
                raise NotFused("its layers number their keys and values in another order")
            attend: Any = (
                self.self_attention(module, names)
                if self_attention
                else self.cross_attention(module, names)
            )
            out, own = self.product(at(module, names.out)), self.own_norm(layer, names.own_norm)
            parts.append(_Part(index, attend, out, own, self.norm_before(layer, names.norm)))
        wide, gate = layout.wide, layout.gated
        if layout.wide_gated is not None:
            wide, gate = (wide, None) if is_there(layer, wide) else (layout.wide_gated, gate)
        feed = FeedForward(
            self.product(at(layer, wide)),
            self.activation(at(layer, layout.activation)),
            None if gate in (None, wide) else self.product(at(layer, gate)),
            halves=gate == wide,
        )
        out, own = (
            self.product(at(layer, layout.narrow)),
            self.own_norm(layer, layout.feed_own_norm),
        )
        parts.append(_Part(index, feed, out, own, self.norm_before(layer, layout.feed_norm)))
        return parts

    def norm_before(self, layer: Any, path: str) -> NormLike:
        return self.norm(at(layer, path)) if path else unnormed

    def own_norm(self, layer: Any, path: str | None) -> NormLike | None:
        if self.layout.multiplier is not None:
            factor = float(getattr(layer, self.layout.multiplier))
            self.facts.append(factor)
            return Times(factor)
        return None if path is None else self.norm(at(layer, path))

    def self_attention(self, module: Any, names: Attention) -> Any:
        core = at(module, names.core)
        dims = getattr(core, self.layout.dims)
        parts = [at(module, name) for name in names.parts]
        # The input of the output projection has H * D channels, however the others are fused.
        out = at(module, names.out)
        heads = (out.nx if hasattr(out, "nx") else out.in_features) // dims
        if getattr(module, "reorder_and_upcast_attn", False) or getattr(
            module, "is_cross_attention", False
        ):
            raise NotFused("attention in a precision or form of its own")
        functions = vars(sys.modules[type(module).__module__])
        for name in _FUNCTIONS:
            if name in functions and not is_toolkits(functions[name]):
                raise NotFused(f"a function {name} of its own")
            self.facts.append(functions.get(name))
        query_norm, key_norm = (
            self.norm(module._modules.get(name)) for name in ("q_norm", "k_norm")
        )
        scale = float(names.scale(core))
        softcap = None if names.softcap is None else getattr(module, names.softcap)
        blocks, spread = (
            names.blocks(module),
            names.spread is not None and bool(getattr(module, names.spread)),
        )
        self.facts += (dims, scale, softcap, blocks, spread)
        if names.nearness is not None:
            nearness, buckets = self.product(at(module, names.nearness)), self.buckets(module)
            read = tuple(self.product(part) for part in parts)
            return StreamAttention(read, heads, dims, scale, nearness=nearness, buckets=buckets)
        return TextAttention(
            self.products(parts), heads, dims, scale, query_norm, key_norm,
            self.biased(module, names.seen), self.rotary(module, names), softcap, blocks,
            names.values_first, spread, names.neighbours,
            names.whole_norms,
        )  # fmt: skip

    def products(self, modules: Sequence[Any]) -> tuple[Product, ...]:
        """Return the products of linear layers that read the same input."""
        for module in modules:
            self.product(module)
        return products(modules)

    def cross_attention(self, module: Any, names: Attention) -> SourceAttention:
        dims, query = getattr(module, self.layout.dims), at(module, names.parts[0])
        makers = [at(module, name) for name in names.parts[1:]]
        self.read.update(makers)
        plain = all(is_linear(maker) and maker.weight.dtype == self.dtype for maker in makers)
        scale = float(names.scale(module))
        self.facts += (dims, scale)
        return SourceAttention(
            self.product(query), query.out_features // dims, dims, scale,
            (product(makers[0]), product(makers[1])) if plain and len(makers) == 2 else None,
        )  # fmt: skip

    def buckets(self, module: Any) -> Tensor:
        """Return the bucket of each distance, (L,) int64, by the toolkit's own function."""
        limits = module.num_buckets, module.relative_max_distance
        self.facts += limits
        if self.near is None:
            find = vars(sys.modules[type(module).__module__])["compute_relative_buckets"]
            device = module.out_proj.weight.device
            self.near = (
                limits,
                find(
                    *limits, -torch.arange(self.longest + 1, device=device, dtype=torch.int64)
                ).long(),
            )
        if self.near[0] != limits:
            raise NotFused(f"buckets of distances of its layers is {[self.near[0], limits]}")
        return self.near[1]

    def biased(self, module: Any, seen: str | None) -> Bias | None:
        """Return a module's own position bias, else that of an earlier layer or of the decoder."""
        if seen is not None:
            return self.window(getattr(module, seen))
        if getattr(module, "has_relative_attention_bias", False):
            if self.dtype == torch.float16:
                raise NotFused("float16, in which its sums are clamped")
            self.read.add(module.relative_attention_bias)
            self.bias = Bias(functools.partial(_by_distance, module, self.longest))
        return self.bias

    def alibi(self, make: Callable[[Any, int], Tensor]) -> Bias:
        return Bias(functools.partial(make, self.decoder, self.longest), self.layout.by_position)

    def window(self, seen: Tensor) -> Bias | None:
        """Return the bias that limits attention to the window of the longest text's last token.

        Args:
            seen: (1, 1, P, P) bool, True where visible.

        Returns:
            An additive bias by distance, shared by layers with the same window; None for no window.
        """
        # Beyond the table there are no positions for tokens either.
        last = min(self.longest, seen.shape[2]) - 1
        seen = seen[0, 0, last : last + 1, : last + 1].flip(1)
        if bool(seen.all()):
            return None
        table = torch.zeros(seen.shape, dtype=self.dtype, device=seen.device).masked_fill_(
            ~seen, -torch.inf
        )
        known = next((bias for bias in self.windows if torch.equal(bias.table, table)), None)
        if known is None:
            known = Bias(lambda: table)
            self.windows.append(known)
        return known

    def product(self, module: Any) -> Product:
        if not is_linear(module):
            raise NotFused(f"a {name_of(module)} in place of a linear layer")
        if type(module.weight) is not nn.Parameter:
            raise NotFused(f"a weight that is a {type(module.weight).__name__}")
        if module.weight.is_meta:
            raise NotFused("weights that are offloaded")
        if module.weight.dtype != self.dtype:
            raise NotFused(f"weights in {module.weight.dtype} beside others in {self.dtype}")
        self.read.add(module)
        return product(module)

    def norm(self, module: Any) -> Any:
        if module is None:
            return None
        self.read.add(module)
        if any(parameter.is_meta for parameter in module.parameters()):
            raise NotFused("weights that are offloaded")
        if type(module) is nn.LayerNorm:
            self.facts.append(module.eps)
            return Norm(module.weight, module.bias, module.eps)
        if type(module).__name__ in _OWN_NORMS:
            self.facts.append(module.variance_epsilon)
            return OwnNorm(module)
        rms = rms_norm(module)
        if rms is None:
            raise NotFused(f"a {name_of(module)} in place of a norm")
        self.facts += (rms.eps, rms.offset)
        if self.dtype == torch.float64:  # toolkit norms compute float64 in float32
            return OwnNorm(module)
        return Norm(module.weight, None, rms.eps, rms=True, offset=rms.offset)

    def activation(self, function: Any) -> str:
        if isinstance(function, nn.Module):
            self.read.update(function.modules())
        kind = activation.kind(function)
        if kind is None:
            raise NotFused(
                f"an activation function {getattr(function, '__name__', None) or name_of(function)}"
            )
        self.facts.append(kind)
        return kind

    def embedding(self) -> Embedding:
        layout, decoder = self.layout, self.decoder
        tokens, positions = at(decoder, layout.tokens), part_or_none(decoder, layout.positions)
        if not isinstance(tokens, nn.Embedding) or tokens.max_norm is not None:
            raise NotFused(f"a {name_of(tokens)} in place of an embedding")
        self.read.add(tokens)
        name = layout.embed_scale
        scale = 1.0 if layout.norm_tokens else getattr(tokens, name, getattr(decoder, name, 1.0))
        scale = float(scale.to(tokens.weight.dtype) if isinstance(scale, Tensor) else scale)
        normed = self.norm(part_or_none(decoder, layout.embedding_norm))
        self.facts.append(scale)
        if positions is None:
            return Embedding(tokens.weight, scale, norm=normed, norm_tokens=layout.norm_tokens)
        self.read.add(positions)
        if layout.past and not set(layout.past) & set(
            inspect.signature(type(positions).forward).parameters
        ):
            raise NotFused("positions that do not count the tokens before")
        table: Tensor = positions.weights if hasattr(positions, "weights") else positions.weight
        first = layout.first(positions)
        self.check_positions(table.shape[0] - first)
        if table.dtype != tokens.weight.dtype or table.device != tokens.weight.device:
            raise NotFused(f"positions in {table.dtype} on {table.device}")
        padding = positions.padding_idx if layout.pads else None
        row = None if layout.pads == "before" else padding or 0
        self.facts += (first, padding, row)
        if layout.types is not None:
            types = at(decoder, layout.types)
            self.read.add(types)
            table = table + types.weight[layout.target_type(self.model)]
        if layout.streams is not None:
            streams = at(decoder, layout.streams)
            self.read.add(streams)
            if positions.padding_idx != 0:
                raise NotFused(f"streams whose positions begin at {first}")
            # The first predicting stream takes the embedding before the first row: the last row.
            return StreamEmbedding(
                tokens.weight, scale, table, first, norm=normed, stream=streams.weight[-1]
            )
        return Embedding(
            tokens.weight, scale, table, first, padding, row, normed, layout.norm_tokens
        )

    def rotary(self, attention: Any, names: Attention) -> Rotary | None:
        """Return the rotation of an attention module.

        It is the module's own table, the decoder's rotary module, or the one selected by
        `Attention.rotation`.
        """
        if names.rotation_table is not None:
            # Since transformers 5.24 one rotary module serves all layers.
            holder = self.decoder._modules.get(self.layout.rotary)
            if holder is not None:
                self.read.add(holder)
            table: Tensor = getattr(attention if holder is None else holder, names.rotation_table)
            self.check_positions(table.shape[0])
            return self.rotation_table(table[: self.longest])
        kind = names.rotation
        module: Any = self.decoder._modules.get(self.layout.rotary)
        if module is None:
            return None
        self.read.add(module)
        if self.layout.alibi is not None:  # Falcon has both and uses ALiBi
            return None
        rope = getattr(module, "rope_type", None)
        kinds: list[str | None] = list(rope.values()) if isinstance(rope, dict) else [rope]
        if any(name in ("dynamic", "longrope") for name in kinds):
            raise NotFused(
                f"rotary positions of type {rope!r}, which change with the length of the text"
            )
        which = None if kind is None else getattr(attention, kind)
        self.facts += (type(module), which)
        if which not in self.rotations:
            self.rotations[which] = (
                module if which is None else functools.partial(module, layer_type=which)
            )
        return self.rotations[which]

    def rotation_table(self, table: Tensor) -> Rotary:
        """Return one object for all layers with equal tables, so that a step looks it up once."""
        known = next((r for r in self.tables if torch.equal(r.table, table)), None)
        if known is None:
            known = RotationTable(table)
            self.tables.append(known)
        return known


_FUNCTIONS = (
    "apply_rotary_pos_emb",
    "eager_attention_forward",
    "build_alibi_tensor",
    "build_mpt_alibi_tensor",
)
"""Functions of a model's file that a step reimplements, or calls while it is built."""


_OWN_NORMS = ("CohereLayerNorm",)
"""Transformers norms that are neither LayerNorm nor RMSNorm; their own forward runs."""


def _by_distance(attention: Any, longest: int) -> Tensor:
    """Return the bias (H, L) of T5's attention for keys at distances 0 to L - 1."""
    return attention.compute_bias(1, longest, past_seen_tokens=longest - 1)[0, :, 0].flip(1)


def _bias(model: nn.Module, name: str | None) -> Tensor | None:
    bias = None if name is None else model._buffers.get(name)
    return None if bias is None or not bool(bias.any()) else bias.flatten()
