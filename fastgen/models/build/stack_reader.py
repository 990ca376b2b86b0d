"""Read the parts of a stack of transformer layers that a spec names (`models.specs`).

A stack may contain only what its spec names. With anything else, such as a hook, a part added by a
later release, or training mode, it runs through its own forward. In a decoder, other layers in the
place of linear ones run as modules.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastgen.models.build.attention_reader import AttentionReader
from fastgen.models.build.introspection import (
    NotFused,
    at,
    check_unread,
    is_there,
    name_of,
    part_or_none,
)
from fastgen.models.build.peft_layers import embedding_in, is_of_peft
from fastgen.models.layers import activation
from fastgen.models.layers.experts import ExpertProducts, Experts, Routing, is_clamped, is_plain
from fastgen.models.layers.linear import Identity, Product
from fastgen.models.layers.norm import ConstantScale, NormLike, unnormed
from fastgen.models.runtime.decode_step import Embedding
from fastgen.models.runtime.prophetnet import StreamEmbedding
from fastgen.models.runtime.sublayers import FeedForward, SelfAttention, Sublayer
from fastgen.models.specs.model_spec import Embedding as EmbeddingSpec
from fastgen.models.specs.model_spec import Experts as ExpertsSpec
from fastgen.models.specs.model_spec import Mlp


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


class StackReader(AttentionReader):
    """Reads the parts of a stack that a spec names, and checks that nothing else is left."""

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
        of_logits = at(router, names.logits)
        held = [of_logits.weight, *map(experts._parameters.get, ("gate_up_proj", "down_proj"))]
        biases: list[Any] = [getattr(of_logits, "bias", None), None, None]
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
        groups, kept = map(int, names.groups(router))
        factor = 1.0 if names.factor is None else float(getattr(router, names.factor))
        gate = None if names.shared_gate is None else at(layer, names.shared_gate)
        margin = None if names.margin is None else float(names.margin(router))
        self.fingerprint += (chosen, kind, clamp, normalised, groups, kept, factor, margin)
        shared = [at(layer, name) for name in names.shared if is_there(layer, name)]
        return Routing(
            of_logits.weight, chosen, normalised, names.rounded, names.precise, names.sigmoid,
            correction, (groups, kept, names.group_scores), factor, kind,
            ExpertProducts(experts, "gate_up_proj", experts.is_transposed),
            ExpertProducts(experts, "down_proj", experts.is_transposed),
            router_bias=biases[0], up_bias=biases[1], down_bias=biases[2], clamp=clamp,
            shared=tuple(map(self.product, shared)),
            shared_gate=None if gate is None else gate.weight,
            norm=None if names.norm is None else self.norm(at(layer, names.norm)), margin=margin,
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


_SAME_EXPERTS = ("eager", "grouped_mm", "batched_mm")
"""Implementations of experts in transformers that compute the same."""


_OTHER_EXPERTS = ("has_post_expert_norm", "_is_expert_parallel")
"""Attributes of experts that compute something else."""
