"""The spec of an architecture: where a live model holds the parts of a decode step.

A spec is data. It holds paths of modules, names of attributes, and small functions of modules for
what differs by config. `models.build` builds decode steps and encoders from it.

Attributes with a default name optional parts: a live model may lack a norm, a position embedding or
a rotary embedding that its spec names.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding of queries and keys.

    Attributes:
        module: Name of the stack's module that returns cosines and sines.
        interleaved: Whether it rotates adjacent pairs of channels (GPT-J), not halves (GPT-NeoX).
        halves: Whether `module` returns angles for halves, although channels are interleaved.
        kind: Attribute of the attention module that selects one of several embeddings of `module`.
        table: Attribute with a table of sines and cosines by position, used instead of a call of
            `module`. It belongs to `module` where the stack has one, else to the attention module.
        once: Whether `module` returns the angle of each pair once, not for both of its channels.
        complex: Whether `module` returns complex numbers, for channels that are interleaved.
        fp32: Whether queries and keys are rounded to fp32 first, which tells in fp64.
        applies: Returns whether an attention module rotates at all.
    """

    module: str = "rotary_emb"
    interleaved: bool = False
    halves: bool = False
    kind: str | None = None
    table: str | None = None
    once: bool = False
    complex: bool = False
    fp32: bool = False
    applies: Callable[[Any], bool] = lambda _: True


@dataclass(frozen=True)
class Latent:
    """Latent attention, whose cache holds what keys and values are computed from.

    Projections and norms are paths from the attention module, the others are its attributes.

    Attributes:
        query: The projection of the queries; where there is none, the two below have their place.
        query_down: The projection of queries to fewer channels.
        query_norm: The norm of those channels.
        query_up: The projection of those channels to queries.
        compress: The projection to latent vectors and the rotated part of the keys.
        norm: The norm of latent vectors.
        expand: The projection of latent vectors to keys, without the rotated part, and values.
        rope_dim: Dimensions of that part.
        nope_dim: The other dimensions of keys.
        values: Dimensions of values.
        pairs_apart: Returns whether adjacent channels are rotated, and apart afterwards.
    """

    query: str = "q_proj"
    query_down: str = "q_a_proj"
    query_norm: str = "q_a_layernorm"
    query_up: str = "q_b_proj"
    compress: str = "kv_a_proj_with_mqa"
    norm: str = "kv_a_layernorm"
    expand: str = "kv_b_proj"
    rope_dim: str = "qk_rope_head_dim"
    nope_dim: str = "qk_nope_head_dim"
    values: str = "v_head_dim"
    pairs_apart: Callable[[Any], bool] = lambda module: module.config.rope_interleave


@dataclass(frozen=True)
class Attention:
    """An attention sublayer.

    `module`, `norm` and `post_norm` are paths from the layer, `inner` and the projections are paths
    from `module`. Attributes and functions of heads and scores read the module at `inner`.

    Attributes:
        module: The attention module.
        norm: The sublayer's norm, before or after it as `Stack.pre_norm` says; "" for none.
        qkv: The query, key and value projections, or the one projection fused from all three.
        out: The output projection.
        post_norm: The norm of the sublayer's output, before the residual sum; None for none.
        inner: Path of the submodule that holds the head size and the scale; "" for `module` itself.
        head_dim: Attribute that holds the head size D.
        scale: Returns the scale of the attention scores.
        softcap: Attribute that holds the soft cap of the attention scores; None for none.
        sinks: The parameter with one more score per head, whose weight belongs to no key.
        qk_norm: The norms of queries and keys.
        norms_all_heads: Whether these norms span all heads together.
        norms_rotated: Whether these norms come after the rotation.
        rotary: Rotary position embedding.
        qkv_groups: Returns the number of groups of a fused projection, each of which has the
            queries, keys and values of the same number of heads.
        values_first: Whether values precede keys in a fused projection.
        repeats_kv: Attribute that tells whether key heads are stored once per query head; None
            where they never are.
        causal_mask: Attribute with a (1, 1, P, P) bool table of visible positions; None for plain
            causal attention.
        latent: Latent attention, in place of `qkv`; None for none.
        relative_positions: The projection that computes a bias by distance from the query's input
            (`models.runtime.prophetnet`); None for none.
    """

    module: str
    norm: str
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    out: str = "out_proj"
    post_norm: str | None = None
    inner: str = ""
    head_dim: str = "head_dim"
    scale: Callable[[Any], float] = lambda module: getattr(module, "scaling", 1.0)
    softcap: str | None = None
    sinks: str = "sinks"
    qk_norm: tuple[str, str] = ("q_norm", "k_norm")
    norms_all_heads: bool = False
    norms_rotated: bool = False
    rotary: Rotary = Rotary()
    qkv_groups: Callable[[Any], int] = lambda _: 1
    values_first: bool = False
    repeats_kv: str | None = None
    causal_mask: str | None = None
    latent: Latent | None = None
    relative_positions: str | None = None


@dataclass(frozen=True)
class Mlp:
    """A feed-forward sublayer; all are paths from the layer.

    Attributes:
        up: The up projection.
        down: The down projection.
        activation: The activation function, of `gate` where there is one, else of `up`.
        norm: The sublayer's norm, as `Attention.norm`.
        post_norm: The norm of its output, as `Attention.post_norm`.
        gate: The gate projection; equal to `up` where one projection holds gate and up, in this
            order; None for none.
        ungated: The up projection of models without a gate, for architectures with both forms.
    """

    up: str
    down: str
    activation: str
    norm: str
    post_norm: str | None = None
    gate: str | None = None
    ungated: str | None = None


@dataclass(frozen=True)
class Experts:
    """A mixture of experts, in place of the feed-forward sublayer `Stack.mlp` of a layer.

    Its norms are those of `Stack.mlp`. A layer without `router` has the feed-forward sublayer.

    Attributes:
        module: The mixture, a path from the layer. It runs as a module, except in C.
        router: Path of the router from the layer.
        logits: Path from the router of the layer with the weights of the logits; "" for itself.
        experts: Path of the module of all experts from the layer.
        normalised: Returns whether the weights of the chosen experts, which are their scores, are
            divided by their sum, or None for a router that computes anything else than the fields
            below say; None where all routers or mixtures do.
        rounded: Whether those weights are rounded to the model's dtype.
        precise: Whether logits are computed in fp32.
        sigmoid: Whether scores are the sigmoid of each logit, not the softmax of all.
        correction: What is added to scores for the choice only, a path from the layer; None for
            nothing.
        groups: Returns the number of groups of experts of a router, and how many are kept, those
            with the highest sums of their `group_scores` best scores.
        group_scores: 1 or 2.
        factor: Attribute of the router with the factor of the weights; None for 1.
        shared: Gate, up and down projection of an expert that all rows share; paths from the layer.
        shared_gate: The linear layer whose sigmoid multiplies that expert's output; None for none.
        norm: The norm of the mixture's output, within `module`; a path from the layer.
        margin: Returns, for a router, how far below the highest logit others may be that share
            the weight (`models.layers.experts.Routing`); None for none.
    """

    module: str = "mlp"
    router: str = "mlp.gate"
    logits: str = ""
    experts: str = "mlp.experts"
    normalised: Callable[[Any], bool | None] | None = None
    rounded: bool = True
    precise: bool = False
    sigmoid: bool = False
    correction: str | None = None
    groups: Callable[[Any], tuple[int, int]] = lambda _: (1, 1)
    group_scores: int = 2
    factor: str | None = None
    shared: tuple[str, ...] = ()
    shared_gate: str | None = None
    norm: str | None = None
    margin: Callable[[Any], float] | None = None


@dataclass(frozen=True)
class Embedding:
    """The embedding of tokens; all are paths from the stack.

    Attributes:
        tokens: Token embedding.
        scale: Attribute of the token embedding or the stack that scales token embeddings; "" for
            none.
        norm: Norm of the embeddings.
        norms_tokens: Whether unscaled token embeddings are normed before positions are added.
        token_types: A table whose row `token_type` is added to all embeddings; None for none.
        token_type: Returns that row for a model.
        streams: Embeddings of predicting streams (`models.runtime.prophetnet`), of which the last
            row belongs to the stream that steps run; None for none.
    """

    tokens: str = "embed_tokens"
    scale: str = "embed_scale"
    norm: str = "layernorm_embedding"
    norms_tokens: bool = False
    token_types: str | None = None
    token_type: Callable[[Any], int] = lambda _: 0
    streams: str | None = None


@dataclass(frozen=True)
class Positions:
    """Absolute positions and ALiBi; `Rotary` has rotary positions.

    Attributes:
        table: Position embedding, a path from the stack.
        first_row: Returns the row of position 0 in that table.
        padding: Row of padding tokens: "own" for one of their own, "previous" for the row before
            that of their position, None for that of their position.
        length_arguments: Names, across releases, of the forward parameter that passes the number of
            cached tokens to the position embedding; empty where it needs none.
        count: Config attribute with the number of positions, where no table limits it.
        begin: Position of the first token, where `generate` counts from 0.
        skips_padding: Whether positions count only the tokens that the decoder prompt's mask shows.
        alibi: Returns a stack's (H, L) bias of attention scores for L positions; None for none.
        alibi_by_key: Whether `alibi` is indexed by the position of a key, not by its distance.
    """

    table: str = "embed_positions"
    first_row: Callable[[Any], int] = lambda _: 0
    padding: Literal["own", "previous"] | None = None
    length_arguments: tuple[str, ...] = ()
    count: str | None = None
    begin: int = 0
    skips_padding: bool = False
    alibi: Callable[[Any, int], Tensor] | None = None
    alibi_by_key: bool = False


@dataclass(frozen=True)
class Stack:
    """A stack of transformer layers: a decoder or an encoder.

    Attributes:
        path: Path from the model; "" for the model itself.
        self_attention: The self-attention sublayer.
        mlp: The feed-forward sublayer.
        cross_attention: The cross-attention sublayer; None for none.
        experts: A mixture of experts in place of `mlp`; None for none.
        layers: The layers, a path from the stack.
        embedding: The embedding; None where tokens are embedded elsewhere.
        positions: The positions.
        final_norm: Name of the stack's final norm.
        pre_norm: Whether norms precede their sublayers, or the layer attribute that says so.
        parallel: Whether attention and feed-forward both read the layer's input, or the layer
            attribute that says so.
        residual_multiplier: Layer attribute that scales the output of each sublayer, in place of
            post norms; None for none.
        unsupported: Paths from a layer of attributes that must be falsy, as no decode step
            implements them.
        runs_hooks: Whether the toolkit runs the hooks of the stack and of the model around it;
            otherwise it calls their `forward`.
    """

    path: str
    self_attention: Attention
    mlp: Mlp
    cross_attention: Attention | None = None
    experts: Experts | None = None
    layers: str = "layers"
    embedding: Embedding | None = Embedding()
    positions: Positions = Positions()
    final_norm: str = "layer_norm"
    pre_norm: bool | str = True
    parallel: bool | str = False
    residual_multiplier: str | None = None
    unsupported: tuple[str, ...] = ()
    runs_hooks: bool = True


@dataclass(frozen=True)
class Transform:
    """A linear layer, an activation function and a norm before the head; paths from the model."""

    projection: str
    activation: str
    norm: str


@dataclass(frozen=True)
class Head:
    """The LM head.

    Attributes:
        projection: Path from the model.
        bias: Name of the model buffer that is added to the logits and used nowhere else; None for
            none.
        scale: Returns the factor of the head's input for a model.
        softcap: Returns the soft cap of the logits for a model; None for none.
        transform: Layers before the projection; None for none.
    """

    projection: str = "lm_head"
    bias: str | None = None
    scale: Callable[[Any], float] = lambda _: 1.0
    softcap: Callable[[Any], float | None] = lambda _: None
    transform: Transform | None = None


@dataclass(frozen=True)
class ModelSpec:
    """An architecture.

    Attributes:
        decoder: The decoder.
        encoder: The encoder, whose path is from the encoder module itself; None where there is none
            or it runs in its own modules.
        head: The head of the decoder.
        attention_interface: Whether its attention modules call transformers' `AttentionInterface`.
            Where they compute attention themselves, beams share keys and values only in fused
            decode steps.
        mask_token: Returns the id of the mask token to predict from (`models.runtime.masked_step`);
            None where each step predicts from its newest token.
        masks_prompt: Whether decode steps of an encoder-decoder apply the mask of the decoder
            prompt.
        masks_source: Whether the model's attention mask masks the source.
        source_mask: Returns the mask (B, S) of the encoder's output for a model, its attention mask
            and S; None where both masks are the same.
        prepares_inputs: Whether the model overrides the preparation of its inputs in a way that
            does not change decode steps.
        prompts_only: Names of the forward's arguments that matter for prompts alone, such as
            images.
        generates_segments: Whether its own `generate` calls transformers' once per audio segment.
        variant: Returns the spec for a config, where the config selects one of several forms; None
            where there is one form.
    """

    decoder: Stack
    encoder: Stack | None = None
    head: Head = Head()
    attention_interface: bool = True
    mask_token: Callable[[Any], int] | None = None
    masks_prompt: bool = True
    masks_source: bool = True
    source_mask: Callable[[Any, Tensor, int], Tensor] | None = None
    prepares_inputs: bool = False
    prompts_only: frozenset[str] = frozenset()
    generates_segments: bool = False
    variant: "Callable[[ModelSpec, Any], ModelSpec] | None" = None

    @property
    def prefix_lm(self) -> bool:
        """Whether the source is the beginning of the decoder's text, as in UniLM."""
        return self.mask_token is not None and self.decoder.cross_attention is None

    @property
    def encoder_decoder(self) -> bool:
        """Whether it decodes from an encoder's output, or from a source in its own text."""
        return self.prefix_lm or self.decoder.cross_attention is not None

    @property
    def activated(self) -> tuple[tuple[str, str], ...]:
        """Pairs of names within one module: a linear layer, and the activation function after it.

        The activation function is the only reader of the layer's output.
        """
        mlp, transform = self.decoder.mlp, self.head.transform
        pairs = [] if mlp.gate == mlp.up else [(mlp.gate or mlp.up, mlp.activation)]
        if mlp.ungated is not None:
            pairs.append((mlp.ungated, mlp.activation))
        if transform is not None:
            pairs.append((transform.projection, transform.activation))
        return tuple((_name(layer), _name(function)) for layer, function in pairs)


def encoder_like(decoder: Stack) -> Stack:
    """Return the encoder whose layers are those of a decoder without cross-attention."""
    embedding = decoder.embedding
    return replace(
        decoder,
        path="",
        cross_attention=None,
        embedding=None if embedding is None else replace(embedding, norms_tokens=False),
    )


def _name(path: str) -> str:
    return path.rpartition(".")[2]
