"""Decode steps and encoders on weights in int8, made from those on a model's own weights.

They share embeddings, norms, biases, and the KV cache with the original. Their output differs from
the model's, as the weights and the inputs of all products are rounded.
"""

import functools
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastgen import config
from fastgen.models.build.equivalence_check import recorded_verdict, recorded_verdict_in_c
from fastgen.models.build.introspection import NotFused
from fastgen.models.layers.experts import Experts
from fastgen.models.layers.linear import Int8Linear, Linear
from fastgen.models.layers.packed_weights import Int8Packed, has_copy, note_shortage
from fastgen.models.memory import budget
from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.models.runtime.encoder import Encoder, EncoderSelfAttention
from fastgen.models.runtime.native.encoder import native_encoder
from fastgen.models.runtime.native.layers import products_of
from fastgen.models.runtime.native.multistep_job import supports_steps, why_not_in_c
from fastgen.models.runtime.native.step import native_step
from fastgen.models.runtime.sublayers import (
    CrossAttention,
    FeedForward,
    LatentAttention,
    SelfAttention,
    Sublayer,
)
from fastgen.ops import int8, native

_logger = logging.getLogger("fastgen")

_NOT_IN_INT8 = {Experts: "a mixture of experts", LatentAttention: "latent attention"}


def why_not_int8(step: DecoderStep) -> str:
    """Return why a decode step cannot run on weights in int8; empty if it can."""
    if step.embedding.tokens.device.type != "cpu":
        return "int8 products run on CPUs alone"
    if (reason := why_not_in_c(step)) or not supports_steps(step):
        return reason or "its steps are not written in C"
    for kind, name in _NOT_IN_INT8.items():
        if any(isinstance(sublayer.mixer, kind) for sublayer in step.sublayers):
            return f"{name} has no products in int8"
    products = _products_of_step(step)
    if not all(isinstance(product, Linear) for product in products):
        return "an adapter has no products in int8"
    return _too_wide(products)


def int8_step(step: DecoderStep) -> DecoderStep | None:
    """Return a decode step on weights in int8, the head included; None if memory is short.

    Copies of the weights are made here, and kept between calls.

    Args:
        step: The decode step on the model's own weights, for which `why_not_int8` has no reason.
    """
    rounded = _int8_step(step)
    return rounded if _is_packed(_products_of_step(rounded)) else None


def _int8_step(step: DecoderStep) -> DecoderStep:
    sublayers, head = [_rounded(sublayer) for sublayer in step.sublayers], step.head
    assert isinstance(head, Linear)  # as the step is written in C
    return replace(
        step,
        sublayers=sublayers,
        head=Int8Linear(head),
        run_layers=native_step(sublayers, step.first is not None),
    )


def int8_bytes(step: DecoderStep) -> int:
    """Return the bytes of the copies that `int8_step` needs.

    Layers that share a weight share the copy.

    Args:
        step: The decode step, for which `why_not_int8` has no reason.
    """
    return _bytes_to_pack(_products_of_step(step))


def int8_shortage(step: DecoderStep) -> str:
    """Return why memory is short for the copies that `int8_step` has to make; empty if not."""
    return _shortage(_products_of_step(step))


def int8_encoder(encoder: Encoder) -> Encoder:
    """Return an encoder on weights in int8.

    Args:
        encoder: The encoder on the model's own weights.

    Raises:
        NotFused: Its layers have no product in int8; the message is the reason.
    """
    if reason := why_no_int8_encoder(encoder):
        raise NotFused(reason)
    return _int8_encoder(encoder)


def _int8_encoder(encoder: Encoder) -> Encoder:
    sublayers = [_rounded(sublayer) for sublayer in encoder.sublayers]
    written = None
    if encoder.run_layers is not None:
        written = native_encoder(sublayers, encoder.first is not None)
    return replace(encoder, sublayers=sublayers, run_layers=written)


def why_no_int8_encoder(encoder: Encoder) -> str:
    """Return why an encoder cannot run on weights in int8; empty if it can."""
    products: list[Any] = [each for sub in encoder.sublayers for each in products_of(sub)]
    if reason := native.why_off():
        return reason
    if not all(isinstance(product, Linear) for product in products):
        return "its products do not run in C"
    return _too_wide(products)


def step_to_run(step: DecoderStep) -> DecoderStep:
    """Return the step that `FASTGEN_PRECISION` selects in place of one that has been compared.

    Its copies are made here. If memory is short for one of them, the step runs as it is.
    """
    if not is_requested() or isinstance(step.head, Int8Linear) or why_not_int8(step):
        return step
    rounded = _int8_step(step)
    if not _is_packed(_products_of_step(rounded), _makers(rounded)):
        return step
    _warn()
    return rounded


def encoder_to_run(encoder: Encoder) -> Encoder:
    """Return the encoder that `FASTGEN_PRECISION` selects in place of the given one.

    An encoder that has not been compared yet, or for whose copies memory is short, runs as it is.
    """
    if not is_requested() or not recorded_verdict(encoder) or why_no_int8_encoder(encoder):
        return encoder
    if encoder.run_layers is not None and recorded_verdict_in_c(encoder) is None:
        return encoder
    rounded = _int8_encoder(encoder)
    if not _is_packed([each for sub in rounded.sublayers for each in products_of(sub)]):
        return encoder
    _warn()
    return rounded


def is_requested() -> bool:
    """Return whether weights are to be rounded to int8."""
    return config.settings().precision == "int8"


def refusal(step: DecoderStep | None) -> str:
    """Return the note of a plan whose decode steps do not run in int8 as requested, or "".

    Args:
        step: The fused decode step, or None.
    """
    if not is_requested():
        return ""
    if step is None:
        reason = "decode steps do not run from the weights"
    else:
        reason = why_not_int8(step) or _shortage([*_products_of_step(step), *_makers(step)])
    return f"decode steps do not run in int8: {reason}" if reason else ""


@functools.cache
def _warn() -> None:
    _logger.warning(
        "FASTGEN_PRECISION=int8: weights are rounded to int8, so outputs differ from the toolkit's"
    )


def _products_of_step(step: DecoderStep) -> list[Any]:
    return [*(each for sub in step.sublayers for each in products_of(sub)), step.head]


def _makers(step: DecoderStep) -> list[Any]:
    """Return the products of a source's keys and values, which are packed once they are used."""
    makers = (getattr(sublayer.mixer, "kv_projections", None) or () for sublayer in step.sublayers)
    return [maker for of_layer in makers for maker in of_layer if isinstance(maker, Linear)]


def _is_packed(products: list[Any], later: Sequence[Any] = ()) -> bool:
    """Make the missing int8 copies of all products, and return whether all have one.

    No copy is made unless all fit into memory: a step that mixes precisions is slow, and its output
    matches neither.

    Args:
        products: The products, in int8.
        later: More products, whose copies have to fit too, but are not made yet.
    """
    if reason := _shortage([*products, *later]):
        for product in _missing(products):
            note_shortage(product.module, Int8Packed, reason)
        return False
    return all(product.in_panels() is not None for product in products)


def _missing(products: Sequence[Any]) -> list[Any]:
    """Return the products whose weights have no copy in int8."""
    return [each for each in products if not has_copy(each.module, Int8Packed)]


def _bytes_to_pack(products: Sequence[Any]) -> int:
    """Return the bytes of the copies in int8; products that share a weight share the copy."""
    by_weight = {id(each.module.weight): each for each in products}
    return sum(int8.bytes_to_pack(each.outputs, each.inputs) for each in by_weight.values())


def _shortage(products: Sequence[Any]) -> str:
    """Return why memory is short for the copies that are missing; empty if it is not."""
    needed = _bytes_to_pack(_missing(products))
    return (budget.shortage_now(needed) or "") if needed else ""


def _too_wide(products: list[Any]) -> str:
    widest = max(product.inputs for product in products)
    fits = widest <= int8.MOST_INPUTS
    return "" if fits else f"a layer of {widest} inputs has no product in int8"


def _rounded(sublayer: Sublayer) -> Sublayer:
    return replace(sublayer, mixer=_rounded_mixer(sublayer.mixer), out=_int8(sublayer.out))


def _rounded_mixer(mixer: Any) -> Any:
    if isinstance(mixer, FeedForward):
        multiplier = None if mixer.multiplier is None else _int8(mixer.multiplier)
        return replace(mixer, activated=_int8(mixer.activated), multiplier=multiplier)
    if isinstance(mixer, CrossAttention):
        makers = mixer.kv_projections
        if makers is not None and all(isinstance(maker, Linear) for maker in makers):
            makers = _int8(makers[0]), _int8(makers[1])
        return replace(mixer, query=_int8(mixer.query), kv_projections=makers)
    assert isinstance(mixer, SelfAttention | EncoderSelfAttention), mixer
    return replace(mixer, projections=tuple(map(_int8, mixer.projections)))


def _int8(product: Any) -> Int8Linear:
    return Int8Linear(product)
