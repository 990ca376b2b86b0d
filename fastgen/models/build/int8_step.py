"""Decode steps and encoders on weights in int8, made from those on a model's own weights.

They share embeddings, norms, biases, and the KV cache with the original. Their output is another:
weights are rounded, and so are the inputs of all products.
"""

from dataclasses import replace
from typing import Any

from fastgen import config
from fastgen.models.build.introspection import NotFused
from fastgen.models.layers.linear import Int8Linear, Linear
from fastgen.models.runtime.decode_step import (
    CrossAttention,
    DecoderStep,
    FeedForward,
    SelfAttention,
    Sublayer,
)
from fastgen.models.runtime.encoder import Encoder, EncoderSelfAttention
from fastgen.models.runtime.native_multistep_job import is_written, why_not_in_c
from fastgen.models.runtime.native_step import InC, encoded_together, together
from fastgen.ops import int8, native


def why_not_int8(step: DecoderStep) -> str:
    """Return why a decode step cannot run on weights in int8; empty if it can."""
    if step.embedding.tokens.device.type != "cpu":
        return "int8 products run on CPUs alone"
    if (reason := why_not_in_c(step)) or not is_written(step):
        return reason or "its steps are not written in C"
    return _too_wide(_products_of(step))


def int8_step(step: DecoderStep) -> DecoderStep:
    """Return a decode step on weights in int8, the head included.

    Copies of the weights are made at its first use, and kept between calls.

    Args:
        step: The decode step on the model's own weights.

    Raises:
        NotFused: C cannot run the step; the message is the reason.
    """
    if reason := why_not_int8(step):
        raise NotFused(reason)
    sublayers, head = [_rounded(sublayer) for sublayer in step.sublayers], step.head
    assert isinstance(head, Linear)  # as the step is written in C
    return replace(
        step,
        sublayers=sublayers,
        head=Int8Linear(head),
        together=together(sublayers, step.first is not None),
    )


def step_to_run(step: DecoderStep) -> DecoderStep:
    """Return the decode step to run where the given one is proven: itself, unless int8 is set."""
    if config.settings().precision == "model" or why_not_int8(step):
        return step
    return int8_step(step)


def int8_bytes(step: DecoderStep) -> int:
    """Return the bytes of the copies that `int8_step` needs; 0 if it cannot run.

    Layers that share a weight share the copy.
    """
    if why_not_int8(step):
        return 0
    layers = {id(each.module.weight): each for each in _products_of(step)}.values()
    return sum(int8.bytes_to_pack(each.outputs, each.inputs) for each in layers)


def int8_encoder(encoder: Encoder) -> Encoder:
    """Return an encoder on weights in int8.

    Args:
        encoder: The encoder on the model's own weights.

    Raises:
        NotFused: C cannot run its layers; the message is the reason.
    """
    if encoder.together is None or native.library() is None:
        raise NotFused(native.why_off() or "its layers are not written in C")
    products: list[Any] = encoder.together.records.products  # type: ignore[attr-defined]
    if reason := _too_wide(products):
        raise NotFused(reason)
    sublayers = [_rounded(sublayer) for sublayer in encoder.sublayers]
    written = encoded_together(sublayers, encoder.first is not None)
    return replace(encoder, sublayers=sublayers, together=written)


def _products_of(step: DecoderStep) -> list[Any]:
    inner = step.together
    return [*(inner.records.products if isinstance(inner, InC) else ()), step.head]


def _too_wide(products: list[Any]) -> str:
    wide = [each.inputs for each in products if not int8.able(each.outputs, each.inputs)]
    return f"a layer of {max(wide)} inputs has no product in int8" if wide else ""


def _rounded(sublayer: Sublayer) -> Sublayer:
    return replace(sublayer, mixer=_rounded_mixer(sublayer.mixer), out=_int8(sublayer.out))


def _rounded_mixer(mixer: Any) -> Any:
    if isinstance(mixer, FeedForward):
        multiplier = None if mixer.multiplier is None else _int8(mixer.multiplier)
        return replace(mixer, activated=_int8(mixer.activated), multiplier=multiplier)
    if isinstance(mixer, CrossAttention):
        return replace(mixer, query=_int8(mixer.query))
    assert isinstance(mixer, SelfAttention | EncoderSelfAttention), mixer
    return replace(mixer, projections=tuple(map(_int8, mixer.projections)))


def _int8(product: Any) -> Int8Linear:
    return Int8Linear(product)
