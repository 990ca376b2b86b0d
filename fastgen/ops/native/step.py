"""ctypes structures and the call for a decode step in C, as declared in `step.h`.

Weights, keys and values have the dtype of the step. All buffers are fp32, with values rounded to
that dtype. Strides are in elements. Addresses are those of tensors; the code that fills these
structures keeps the tensors alive.
"""

import ctypes
from typing import Any, ClassVar

from fastgen.ops.native import Library

SELF_ATTENTION, CROSS_ATTENTION, FEED_FORWARD, EXPERTS, LATENT_ATTENTION = range(5)
UNNORMED, LAYER_NORM, RMS_NORM, CONSTANT_SCALE = range(4)

POINTER, INTEGER, DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_Fields = list[tuple[str, Any]]


def fields(kind: Any, names: str) -> _Fields:
    """Return struct fields of one C type."""
    return [(name, kind) for name in names.split()]


class Weight(ctypes.Structure):
    """A packed weight and its bias.

    Attributes:
        panels: the packed weight, as returned by `ops.native.products.packed`, or in bytes.
        bias: (outputs,), or NULL.
        scales: the scales of a weight in bytes (`ops.native.Int8Weight`), or NULL.
        sums: its sums, or NULL.
        kind: a code of `ops.native.KINDS`.
        adapters: array of `Adapter`; or NULL.
        adapter_count: its length.
    """

    __slots__ = ()  # setting an unknown field raises
    _fields_: ClassVar = [
        *fields(POINTER, "panels bias scales sums"),
        *fields(INTEGER, "outputs inputs kind"),
        *fields(POINTER, "adapters"),
        *fields(INTEGER, "adapter_count"),
    ]


class Adapter(ctypes.Structure):
    """A low-rank adapter of a weight.

    Attributes:
        down: (rank, inputs), not packed.
        panels: the packed weight (outputs, rank) of the second product.
        bias: (outputs,), that of the second product; or NULL.
        rank: the outputs of the first product.
        scaling: the factor of the second product's output.
    """

    __slots__ = ()  # setting an unknown field raises
    _fields_: ClassVar = [
        *fields(POINTER, "down panels bias"), ("rank", INTEGER), ("scaling", DOUBLE),
    ]  # fmt: skip


class Norm(ctypes.Structure):
    """A normalisation of rows, or none.

    Attributes:
        weight: (C,), or NULL for 1.
        bias: (C,), or NULL for 0.
        eps: added to the variance or the mean square.
        offset: the scale is weight + offset; that of CONSTANT_SCALE is offset alone.
        kind: UNNORMED, LAYER_NORM, RMS_NORM or CONSTANT_SCALE.
    """

    __slots__ = ()  # setting an unknown field raises
    _fields_: ClassVar = [
        *fields(POINTER, "weight bias"),
        *fields(DOUBLE, "eps offset"),
        ("kind", INTEGER),
    ]


class Mixture(ctypes.Structure):
    """A mixture of E experts, of which each row chooses K.

    Attributes:
        router: (E, C), not packed.
        router_bias: (E,); or NULL.
        correction: (E,) fp32, added to the scores of the experts for the choice only; or NULL.
        up: packed weights of all experts, (E, 2 F, C), of which F gate the others.
        down: packed output projections of all experts, (E, C, F).
        up_bias: (E, 2 F); or NULL.
        down_bias: (E, C); or NULL.
        shared_gate: (C,), whose sigmoid multiplies the shared expert's output; or NULL.
        count: E.
        chosen: K.
        inner: F.
        normalised: whether the weights of the chosen experts are divided by their sum.
        rounded: whether those weights are rounded to the step's dtype.
        wide: whether the router is fp32 in a step of another dtype.
        precise: whether logits are not rounded to the step's dtype.
        sigmoid: whether scores are the sigmoid of each logit, not the softmax of all.
        groups: groups of experts of equal size; 1 for none.
        kept: the groups that are kept, with the highest sums of scores.
        group_scores: the best scores of a group that are added, 1 or 2.
        factor: factor of the weights.
        thinned: whether a weight is the softmax of some logits (`thinned_weight` in experts.c).
        margin: how far below the highest logit these may be, relative to their size.
        clamped: whether outputs of `up` are pairs of a gate and what it gates, which
            `clamped_gate` in experts.c multiplies.
        alpha: parameter of that function.
        limit: parameter of that function.
    """

    __slots__ = ()  # setting an unknown field raises
    _fields_: ClassVar = [
        *fields(POINTER, "router router_bias correction up down up_bias down_bias shared_gate"),
        *fields(INTEGER, "count chosen inner normalised rounded wide precise sigmoid"),
        *fields(INTEGER, "groups kept group_scores"),
        ("factor", DOUBLE),
        ("thinned", INTEGER),
        ("margin", DOUBLE),
        ("clamped", INTEGER),
        *fields(DOUBLE, "alpha limit"),
    ]


class Sublayer(ctypes.Structure):
    """An attention or feed-forward sublayer: x = norm(residual + own(out(mixed))).

    Attributes:
        kind: SELF_ATTENTION (self-attention), CROSS_ATTENTION (cross-attention), FEED_FORWARD, or
            EXPERTS, or LATENT_ATTENTION.
        parts: the number of products of x. Attention has 1 or 3, which compute queries, keys and
            values. Latent attention has that of the queries and that of latent vectors (C) with the
            rotated part of the keys (E), and maybe one of the queries from the output of the first,
            which `query_norm` normalises; `key_norm` normalises latent vectors. A feed-forward
            sublayer has the wide layer and an optional gate; so has the expert that all rows of a
            mixture share, and none if there is no such expert.
        part: the weights of these products.
        out: the weight of the output projection.
        norm: the norm after the sublayer.
        own: the norm of the output projection's result.
        query_norm: the norm of the queries.
        key_norm: the norm of the keys.
        parallel: whether `norm` applies to the incoming stream, without the sum.
        heads: query heads.
        key_heads: key heads.
        dims: the head dimension.
        norms_all_heads: whether `query_norm` and `key_norm` cover all heads together.
        norms_rotated: whether they come after the rotation.
        blocks: blocks of the outputs of a single product, each with the queries, keys and values of
            some heads; 0 for all queries, then all keys, then all values.
        values_first: whether values come before keys in a block.
        scale: the factor of query times key.
        softcap: the soft cap of the scores; 0 for none.
        sinks: (heads,), one more score per query head, of no key; or NULL.
        activation: the activation function of the wide layer, a code of `ops.native.ACTIVATIONS`.
        experts: the `Mixture`; or NULL.
        cosine: (R or 1, E), the rotary angles of the first E dimensions of each head; or NULL.
        sine: as `cosine`.
        turned: E.
        turn_row: stride of the rows of `cosine` and `sine`.
        interleaved: whether the two dimensions of a rotated pair are adjacent.
        turned_wide: whether the products of the rotation are not rounded to the step's dtype.
        latent: C of latent attention.
        value_dims: the outputs of a head of latent attention, D.
        pairs_apart: whether the dimensions of a pair that are adjacent are E / 2 apart afterwards.
        to_latent: packed weights (heads, C, dims - E) of latent attention.
        of_latent: packed weights (heads, D, C) of latent attention.
    """

    __slots__ = ()  # setting an unknown field raises
    _fields_: ClassVar = [
        *fields(INTEGER, "kind parts"), ("part", Weight * 3), ("out", Weight),
        *fields(Norm, "norm own query_norm key_norm"),
        *fields(INTEGER, "parallel heads key_heads dims norms_all_heads norms_rotated"),
        *fields(INTEGER, "blocks values_first"), *fields(DOUBLE, "scale softcap"),
        ("sinks", POINTER), ("activation", INTEGER), *fields(POINTER, "experts cosine sine"),
        *fields(INTEGER, "turned turn_row interleaved turned_wide latent value_dims pairs_apart"),
        *fields(POINTER, "to_latent of_latent"),
    ]  # fmt: skip


class KVRecord(ctypes.Structure):
    """The keys and values that a sublayer attends to, for the sentences of one call.

    Without keys, the sublayer attends to the call's own rows.

    Attributes:
        weights: (.., B, M, N), the attention weights of each of several steps; or NULL.
        mask: additive, with strides `mask_b`, `mask_h` and `mask_m`; or NULL.
        bias: (.., B, H, N), the attention bias of each of several steps; or NULL.
        count: the number of keys.
        slot: the first slot that the step writes.
        common_keys: (Hkv, C, D), the first keys of all sentences; NULL if there are none. They
            count as slots, and `keys` points to where the first of them would be.
        common_values: as `common_keys`.
        common: C.
        common_h: stride of the heads of `common_keys` and `common_values`.
    """

    __slots__ = ()  # setting an unknown field raises
    _fields_: ClassVar = [
        *fields(POINTER, "keys values common_keys common_values weights mask bias"),
        *fields(
            INTEGER,
            "count slot keys_b keys_h keys_n values_b values_h values_n mask_b mask_h mask_m",
        ),
        *fields(INTEGER, "bias_b bias_h bias_step common common_h"),
    ]


class Rows(ctypes.Structure):
    """The rows of one call: its beams or tokens, sentence by sentence.

    Attributes:
        successive: whether the rows of a sentence are successive tokens of its text, each of which
            sees the keys up to its own.
    """

    _fields_: ClassVar = fields(INTEGER, "first_row sentences beams successive")


class Step(ctypes.Structure):
    """All sublayers of a decode step, and its buffers.

    Attributes:
        seen: `KVRecord` records (attending sublayers, calls).
        x: (R, C), the input of the next sublayer.
        stream: (R, C), the residual sum; equal to x at first unless `norm_first`.
        spare: (R, C), scratch memory.
        wide: scratch memory for the products of x.
        mixed: scratch memory for attention outputs and gated products.
        routed: scratch memory of a mixture of experts.
        bytes: scratch memory for rows rounded to bytes; NULL if no weight is in bytes.
        low: scratch memory for both products of all adapters of a sublayer.
        dtype: the dtype of weights, keys and values, a code of `ops.native.DTYPES`.
    """

    __slots__ = ()  # setting an unknown field raises
    _fields_: ClassVar = [
        *fields(POINTER, "sublayers seen calls"),
        *fields(INTEGER, "sublayer_count call_count rows width norm_first dtype"),
        *fields(POINTER, "x stream spare wide mixed routed bytes low"),
    ]  # fmt: skip


SIZE = sum(map(ctypes.sizeof, (Step, Sublayer, KVRecord, Rows, Mixture, Adapter)))
"""The value that `step_size` of a library returns if its structures match these."""


def run(by: Library, threads: int, step: Step) -> bool:
    """Run all sublayers on up to `threads` threads; return whether there was enough memory."""
    return bool(by.step(by.run, threads, ctypes.byref(step)))
