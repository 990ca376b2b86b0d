"""What makes a decode step of a live model's parts, by the record of their names (`models.layouts`).

What a record does not name must not be there, be it an adapter in a layer's place, a hook, a part that a later version
has added, or training mode: then the model makes its steps through its own forward.
"""

import functools
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastgen.models import activation
from fastgen.models import norm as norms
from fastgen.models.instance import Routed, runs_its_class
from fastgen.models.layouts import Attention, Layout
from fastgen.models.linear import Product, product, products
from fastgen.models.proof import OTHERWISE, outcome
from fastgen.models.step import (
    DecoderStep,
    Embedding,
    FeedForward,
    Norm,
    NormLike,
    OwnNorm,
    RelativeBias,
    Rotary,
    SourceAttention,
    Sublayer,
    TextAttention,
    unnormed,
)
from fastgen.models.streams import STREAMS, StreamAttention, StreamEmbedding


class NotFused(Exception):
    """A model's decode step cannot be made from its weights; the message is the reason, as status() shows it."""


def step_of(model: nn.Module, layout: Layout, longest: int) -> DecoderStep:
    """Build the step of a model in evaluation mode.

    Args:
        longest: tokens of a text at most.

    Raises:
        NotFused: where anything is not as the layout says.
    """
    try:
        return _Reader(model, layout, longest).step()
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:  # a part is not what its name says
        raise NotFused(f"its decoder cannot be read: {error}") from error


class _Part(NamedTuple):
    """What a sublayer mixes with, the projection of its output, that output's own norm, and the sublayer's norm."""

    layer: int
    mix: TextAttention | SourceAttention | FeedForward
    out: Product
    own: NormLike | None
    norm: NormLike


class _Reader:
    """Reads the parts that a layout names, and finds what is left."""

    def __init__(self, model: Any, layout: Layout, longest: int) -> None:
        self.model, self.layout, self.longest = model, layout, longest
        self.decoder = _at(model, layout.decoder)
        self.layers: list[Any] = list(_at(self.decoder, layout.layers).children())
        self.dtype: torch.dtype = _at(self.decoder, layout.tokens).weight.dtype
        self.read: set[nn.Module] = set()
        device: str = _at(self.decoder, layout.tokens).weight.device.type
        self.facts: list[object] = [repr(vars(model.config)) if hasattr(model, "config") else "", self.dtype, device]
        self.bias: RelativeBias | None = None
        self.rotations: dict[str | None, Rotary] = {}
        self.near: tuple[tuple[int, int], Tensor] | None = None

    def step(self) -> DecoderStep:
        layout, decoder = self.layout, self.decoder
        if not self.layers:
            raise NotFused("its decoder has no layers")
        norm_first, parallel = self.says(layout.norm_first), self.says(layout.parallel)
        parts = [part for index, layer in enumerate(self.layers) for part in self.sublayers(index, layer)]
        norms_of, last = [part.norm for part in parts], self.norm(decoder._modules.get(layout.last_norm))
        if not norm_first and last is not None:
            raise NotFused("its decoder has a last norm beside those of its layers")
        behind = [*norms_of[1:], last or unnormed] if norm_first else norms_of
        if torch.is_autocast_enabled(_at(decoder, layout.tokens).weight.device.type):
            raise NotFused("autocast chooses the types")
        if torch.is_grad_enabled():
            raise NotFused("gradients are wanted")
        step = DecoderStep(
            module=decoder,
            embedding=self.embedding(),
            sublayers=[
                Sublayer(part.layer, part.mix, part.out, norm, part.own, parallel and type(part.mix) is TextAttention)
                for part, norm in zip(parts, behind, strict=True)
            ],
            first=norms_of[0] if norm_first else None,
            head=self.product(_at(self.model, layout.head)),
            bias=_bias(self.model, layout.bias),
            scale=layout.scale(self.model),
            softcap=layout.softcap(self.model),
            streams=1 if layout.streams is None else STREAMS,
            facts=(norm_first, parallel, *self.facts),
        )
        self.check_rest()
        if outcome(step) is False:
            raise NotFused(OTHERWISE)
        return step

    def says(self, fact: bool | str) -> bool:
        """What a record says of all layers, or the layers in an attribute of that name."""
        if not isinstance(fact, str):
            return fact
        said = [bool(getattr(layer, fact)) for layer in self.layers]
        if len(set(said)) > 1:
            raise NotFused(f"{fact} of its layers is {said}")
        return said[0]

    def sublayers(self, index: int, layer: Any) -> list[_Part]:
        layout, found = self.layout, list[_Part]()
        for names, over_text in ((layout.text, True), (layout.source, False)):
            if names is None or ("." not in names.module and getattr(layer, names.module) is None):
                continue  # fairseq's language models name what they have not
            module = _at(layer, names.module)
            attend = self.over_text(module, names) if over_text else self.over_source(module, names)
            out, own = self.product(_at(module, names.out)), self.own_norm(layer, names.own_norm)
            found.append(_Part(index, attend, out, own, self.norm(_at(layer, names.norm))))
        wide, gate = layout.wide, layout.gated
        if layout.wide_gated is not None:
            wide, gate = (wide, None) if _is_there(layer, wide) else (layout.wide_gated, gate)
        feed = FeedForward(
            self.product(_at(layer, wide)),
            self.activation(_at(layer, layout.activation)),
            None if gate in (None, wide) else self.product(_at(layer, gate)),
            halves=gate == wide,
        )
        out, own = self.product(_at(layer, layout.narrow)), self.own_norm(layer, layout.feed_own_norm)
        found.append(_Part(index, feed, out, own, self.norm(_at(layer, layout.feed_norm))))
        return found

    def own_norm(self, layer: Any, path: str | None) -> NormLike | None:
        return None if path is None else self.norm(_at(layer, path))

    def over_text(self, module: Any, names: Attention) -> TextAttention:
        dims = getattr(module, self.layout.dims)
        parts = [_at(module, name) for name in names.parts]
        out = _at(module, names.out)  # reads as many as there are heads, whatever the projections are
        heads = (out.nx if hasattr(out, "nx") else out.in_features) // dims
        if getattr(module, "reorder_and_upcast_attn", False) or getattr(module, "is_cross_attention", False):
            raise NotFused("attention in a precision or form of its own")
        functions = vars(sys.modules[type(module).__module__])
        self.facts += (functions.get(name) for name in ("apply_rotary_pos_emb", "eager_attention_forward"))
        query_norm, key_norm = (self.norm(module._modules.get(name)) for name in ("q_norm", "k_norm"))
        for part in parts:
            self.product(part)
        scale = _scale(module, names, dims)
        softcap = None if names.softcap is None else getattr(module, names.softcap)
        self.facts += (dims, scale, softcap)
        if names.nearness is not None:
            return StreamAttention(
                tuple(product(part) for part in parts), heads, dims, scale,
                nearness=self.product(_at(module, names.nearness)), buckets=self.buckets(module),
            )  # fmt: skip
        return TextAttention(
            products(parts), heads, dims, scale, query_norm, key_norm, self.relative(module),
            self.rotary(module, names.rotation), softcap, names.by_head,
        )  # fmt: skip

    def over_source(self, module: Any, names: Attention) -> SourceAttention:
        dims, query = getattr(module, self.layout.dims), _at(module, names.parts[0])
        self.read.update(_at(module, name) for name in names.parts[1:])  # they have made the keys and values
        scale = _scale(module, names, dims)
        self.facts += (dims, scale)
        return SourceAttention(self.product(query), query.out_features // dims, dims, scale)

    def buckets(self, module: Any) -> Tensor:
        """The bucket of each distance, (L,) int64, by the toolkit's own function."""
        limits = module.num_buckets, module.relative_max_distance
        self.facts += limits
        if self.near is None:
            find = vars(sys.modules[type(module).__module__])["compute_relative_buckets"]
            device = module.out_proj.weight.device
            self.near = limits, find(*limits, -torch.arange(self.longest + 1, device=device)).long()
        if self.near[0] != limits:
            raise NotFused(f"buckets of distances of its layers is {[self.near[0], limits]}")
        return self.near[1]

    def relative(self, module: Any) -> RelativeBias | None:
        """The bias by distance: a module's own, else that of the first layer."""
        if getattr(module, "has_relative_attention_bias", False):
            if self.dtype == torch.float16:
                raise NotFused("float16, in which its sums are clamped")
            self.read.add(module.relative_attention_bias)
            self.bias = RelativeBias(functools.partial(_by_distance, module, self.longest))
        return self.bias

    def product(self, module: Any) -> Product:
        if not (type(module) is nn.Linear or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))):
            raise NotFused(f"a {_name(module)} in place of a linear layer")
        if type(module.weight) is not nn.Parameter:
            raise NotFused(f"a weight that is a {type(module.weight).__name__}")
        if module.weight.dtype != self.dtype:
            raise NotFused(f"weights in {module.weight.dtype} beside others in {self.dtype}")
        self.read.add(module)
        return product(module)

    def norm(self, module: Any) -> Any:
        if module is None:
            return None
        self.read.add(module)
        if type(module) is nn.LayerNorm:
            self.facts.append(module.eps)
            return Norm(module.weight, module.bias, module.eps)
        found = norms.rms_norm(module)
        if found is None:
            raise NotFused(f"a {_name(module)} in place of a norm")
        self.facts += (found.eps, found.offset)
        if self.dtype == torch.float64:  # which the toolkit's norms compute in float32
            return OwnNorm(module)
        return Norm(module.weight, None, found.eps, rms=True, offset=found.offset)

    def activation(self, function: Any) -> str:
        if isinstance(function, nn.Module):
            self.read.update(function.modules())
        kind = activation.kind(function)
        if kind is None:
            raise NotFused(f"an activation function {getattr(function, '__name__', None) or _name(function)}")
        self.facts.append(kind)
        return kind

    def embedding(self) -> Embedding:
        layout, decoder = self.layout, self.decoder
        tokens, positions = _at(decoder, layout.tokens), decoder._modules.get(layout.positions)
        if not isinstance(tokens, nn.Embedding) or tokens.max_norm is not None:
            raise NotFused(f"a {_name(tokens)} in place of an embedding")
        self.read.add(tokens)
        plain = layout.norm_tokens or not layout.scaled
        scale = 1.0 if plain else getattr(tokens, "embed_scale", getattr(decoder, "embed_scale", 1.0))
        scale = float(scale.to(tokens.weight.dtype) if isinstance(scale, Tensor) else scale)
        normed = self.norm(decoder._modules.get(layout.embedding_norm))
        self.facts.append(scale)
        if positions is None:
            return Embedding(tokens.weight, scale, norm=normed, norm_tokens=layout.norm_tokens)
        self.read.add(positions)
        table: Tensor = positions.weights if hasattr(positions, "weights") else positions.weight
        first = layout.first(positions)
        if first + self.longest > table.shape[0]:
            raise NotFused(f"a text of up to {self.longest} tokens, positions for {table.shape[0] - first}")
        if table.dtype != tokens.weight.dtype or table.device != tokens.weight.device:
            raise NotFused(f"positions in {table.dtype} on {table.device}")
        padding = positions.padding_idx if layout.pads else None
        self.facts += (first, padding)
        if layout.streams is not None:
            streams = _at(decoder, layout.streams)
            self.read.add(streams)
            if positions.padding_idx != 0:
                raise NotFused(f"streams whose positions begin at {first}")
            return StreamEmbedding(
                tokens.weight, scale, table, first, norm=normed, stream=streams.weight[-1]
            )  # its first stream takes the embedding before the first one, which is the last
        return Embedding(tokens.weight, scale, table, first, padding, padding or 0, normed, layout.norm_tokens)

    def rotary(self, attention: Any, kind: str | None) -> Rotary | None:
        """The rotation of an attention module: the decoder's one, or of several the one that the attribute names."""
        module: Any = self.decoder._modules.get(self.layout.rotary)
        if module is None:
            return None
        self.read.add(module)
        rope = getattr(module, "rope_type", None)
        kinds: list[str | None] = list(rope.values()) if isinstance(rope, dict) else [rope]
        if any(name in ("dynamic", "longrope") for name in kinds):
            raise NotFused(f"rotary positions of type {rope!r}, which change with the length of the text")
        which = None if kind is None else getattr(attention, kind)
        self.facts += (type(module), which)
        if which not in self.rotations:
            self.rotations[which] = module if which is None else functools.partial(module, layer_type=which)
        return self.rotations[which]

    def check_rest(self) -> None:
        """Raise NotFused where the decoder has a part that was not read, and is more than a dropout."""
        if any(getattr(nn.modules.module, name) for name in _GLOBAL_HOOKS):
            raise NotFused("a hook on all modules")
        named = self.decoder.named_modules()
        for name, module in [*_along(self.model, self.layout.decoder), *_along(self.model, self.layout.head), *named]:
            kind, outer = type(module).__name__, module is self.model
            hooks = module._forward_hooks or module._forward_pre_hooks  # seldom there are any
            if hooks and any(map(_foreign, (*module._forward_hooks.values(), *module._forward_pre_hooks.values()))):
                raise NotFused(f"a hook on a {kind}")
            if module.training:
                raise NotFused(f"a {kind} is in training mode")
            known = runs_its_class(module) or isinstance(module.__dict__["forward"], Routed)
            if not known or not is_toolkits(type(module).forward):
                raise NotFused(f"a forward of its own of a {kind}")
            if outer or module in self.read or "Dropout" in kind:
                continue
            if type(module).__module__.partition(".")[0] not in _TOOLKITS:
                raise NotFused(f"{_name(module)} is a class of its own")
            holds = next((n for n, p in module._parameters.items() if p is not None), None)
            if holds is not None or not module._modules:
                where = name if holds is None else f"{name}.{holds}"
                raise NotFused(f"a part of its own, {where}")


_TOOLKITS = ("torch", "transformers", "fairseq")
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")


def _along(model: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    """The modules on the way from a model to a part, itself included."""
    names = path.split(".")
    found = [(".".join(names[:i]), _at(model, ".".join(names[:i]))) for i in range(1, len(names))]
    return [("", model), *found, (path, _at(model, path))]


def _foreign(hook: Any) -> bool:
    """Whether a hook is not transformers' own, which only notes outputs, where they are asked for."""
    return not getattr(hook, "__module__", "").startswith("transformers.utils.output_capturing")


@functools.cache
def is_toolkits(forward: Any) -> bool:
    """Whether a class's forward is defined in a toolkit, and was not put there by somebody else.

    Asked of the function itself: a wrapper may have taken over the names of what it wraps.
    """
    return getattr(forward, "__globals__", {}).get("__name__", "").partition(".")[0] in (*_TOOLKITS, "fastgen")


def _by_distance(attention: Any, longest: int) -> Tensor:
    """The bias (H, L) of T5's attention over keys at the distances 0 to L - 1."""
    return attention.compute_bias(1, longest, past_seen_tokens=longest - 1)[0, :, 0].flip(1)


def _name(thing: object) -> str:
    """A thing's class and the package it is of."""
    return f"{type(thing).__module__.partition('.')[0]}.{type(thing).__name__}"


def _scale(module: Any, names: Attention, dims: int) -> float:
    """The factor of an attention module's scores."""
    return dims**-0.5 if names.by_root else float(getattr(module, "scaling", 1.0))


def _is_there(module: nn.Module, path: str) -> bool:
    try:
        _at(module, path)
    except NotFused:
        return False
    return True


def _at(module: nn.Module, path: str) -> Any:
    """A part by its path: a module, or a function that a module has as an attribute.

    Raises:
        NotFused: there is none.
    """
    found: Any = module
    for name in path.split("."):
        found = found._modules.get(name) if name in found._modules else getattr(found, name, None)
        if found is None:
            raise NotFused(f"its decoder has no {path}")
    return found


def _bias(model: nn.Module, name: str | None) -> Tensor | None:
    bias = None if name is None else model._buffers.get(name)
    return None if bias is None or not bool(bias.any()) else bias.flatten()
