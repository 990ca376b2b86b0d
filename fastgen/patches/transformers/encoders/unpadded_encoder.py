"""Encoder of an encoder-decoder model inside `generate`, run without padding.

Cross-attention masks the padding positions, so their outputs are not needed.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from fastgen.models.build.encoder_builder import encoder_of, may_run_in_c
from fastgen.models.build.equivalence_check import recorded_verdict
from fastgen.models.build.int8_step import encoder_to_run
from fastgen.models.build.introspection import NotFused, is_toolkits, part_or_none
from fastgen.models.runtime.encoder import Encoder, UnpaddedBatch, pays, weights_of
from fastgen.models.specs.model_spec import Stack
from fastgen.models.specs.registry import ENCODERS
from fastgen.patches.engine import engine
from fastgen.patches.generation_call import call_of
from fastgen.patches.transformers.encoders import cached_source
from fastgen.patches.transformers.encoders.encoder import (
    LITTLE,
    Slower,
    check,
    lengths_of,
    prove,
    sentences_of,
)
from fastgen.patches.transformers.generate.resolve_setting import setting_of

NAME = "transformers.source"

_WITHOUT_EFFECT = ("return_dict", "labels")
"""Arguments that an encoder receives and ignores."""


def skips_padding(model: Any, arguments: Mapping[str, Any], tokens_alone: bool = False) -> bool:
    """Return whether a call of `generate` returns nothing computed from padding, such as its cache.

    Args:
        model: The model.
        arguments: Arguments of `generate`.
        tokens_alone: Whether even an output dict holds only tokens and counts.
    """
    is_returned = not tokens_alone and setting_of(model, arguments, "return_dict_in_generate")
    # Chunked prefill runs the prompt without the mask.
    return not (is_returned or setting_of(model, arguments, "prefill_chunk_size"))


def get_encoder(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace `PreTrainedModel.get_encoder`, which `generate` calls to get the encoder it runs."""
    encoder = original(self, *args, **kwargs)
    return unpadded(self, encoder) if call_of(self).skips_padding else encoder


def unpadded(model: Any, encoder: Any) -> Any:
    """Return a stand-in for a model's encoder that skips padding; the encoder if it cannot."""
    if not isinstance(encoder, nn.Module) or hasattr(model, "hf_device_map"):
        return encoder
    if not is_toolkits(cast(Any, type(model)).forward):  # it may read padding
        return encoder
    if model.device.type != "cpu":  # reading the mask would synchronise with the device
        return encoder
    # FSMT's encoder has no config.
    spec = ENCODERS.get(getattr(getattr(encoder, "config", None), "model_type", None) or "")
    if spec is None or spec.embedding is None:
        return encoder
    modules = [part_or_none(encoder, path) for path in (spec.layers, spec.embedding.tokens)]
    return encoder if None in modules else _Source(encoder, spec)


class _Source:
    """Stand-in for an encoder that runs its layers without padding, or the encoder itself."""

    def __init__(self, encoder: Any, spec: Stack) -> None:
        self.encoder, self.spec = encoder, spec

    def __getattr__(self, name: str) -> Any:
        return getattr(self.encoder, name)

    def __call__(self, **kwargs: Any) -> Any:
        ids, mask = kwargs.pop("input_ids", None), kwargs.pop("attention_mask", None)
        arguments = kwargs | {"input_ids": ids, "attention_mask": mask}
        visible = None if mask is None else mask.bool()
        if ids is None or (visible is not None and visible.shape != ids.shape):
            return self.encoder(**arguments)
        padded = visible is not None and not bool(visible.all())
        if not (padded or may_run_in_c(self.encoder)):
            return self.encoder(**arguments)
        try:
            check(
                self.encoder,
                ids,
                (),
                {name: value for name, value in kwargs.items() if name not in _WITHOUT_EFFECT},
            )
            hidden = _encode(self.encoder, self.spec, ids, visible if padded else None)
        except (NotFused, Slower) as reason:
            if padded:
                engine.note_skipped(NAME, f"padding is encoded: {reason}")
            return self.encoder(**arguments)
        engine.hit(NAME)
        return BaseModelOutput(last_hidden_state=hidden)  # pyright: ignore[reportArgumentType]


def _encode(module: Any, spec: Stack, ids: Tensor, visible: Tensor | None) -> Tensor:
    """Run an encoder over token ids without padding.

    Args:
        module: The encoder.
        spec: Its spec, which has an embedding.
        ids: Token ids (B, S).
        visible: (B, S) bool, True for tokens; None if there is no padding.

    Returns:
        (B, S, C), zero at padding.

    Raises:
        NotFused: The layers cannot run from the weights.
        Slower: The encoder's own forward is faster.
    """
    length = ids.shape[1]
    lengths = [length] * len(ids) if visible is None else lengths_of(visible)
    if not all(lengths):
        raise NotFused("a sentence of padding alone")
    layers = getattr(module, spec.layers)
    # Halved, because the encoder's own forward already uses the fast matrix products.
    weights = weights_of(module.get_input_embeddings().weight.shape[1]) // 2
    saves = pays(lengths, length, "none", weights, len(layers), routed=False)
    if not (saves or may_run_in_c(module)):
        raise Slower(LITTLE)
    encoder = encoder_of(module, spec, length)
    if not saves and encoder.run_layers is None:
        raise Slower(LITTLE)
    if visible is not None and encoder.biased and _is_parted(visible):
        raise NotFused("padding between tokens")
    if recorded_verdict(encoder) is None:
        one, seen = ids[:1], None if visible is None else visible[:1]
        own = module(input_ids=one, attention_mask=seen).last_hidden_state
        sentences = sentences_of(seen, (1, length), "none")
        prove(encoder, _rows(encoder, one, sentences), sentences.chosen(own))

    def run(ids: Tensor, visible: Tensor | None) -> Tensor:
        sentences = sentences_of(visible, (len(ids), ids.shape[1]), "none")
        return sentences.restored(_rows(encoder_to_run(encoder), ids, sentences))

    return cached_source.encode(module, encoder, ids, visible, run)


def _is_parted(visible: Tensor) -> bool:
    """Return whether any sentence has padding between its tokens."""
    return int((visible[:, 1:] & ~visible[:, :-1]).sum() + visible[:, 0].sum()) != len(visible)


def _rows(encoder: Encoder, ids: Tensor, sentences: UnpaddedBatch) -> Tensor:
    """Embed and encode the tokens among ids (B, S); return one row per token, (R, C)."""
    embedding = encoder.embedding
    assert embedding is not None
    counted = (
        torch.ones_like(ids) if embedding.padding is None else (ids != embedding.padding).long()
    )
    positions = (counted.cumsum(1) - 1).clamp_(min=0)
    return encoder(embedding(sentences.chosen(ids), sentences.chosen(positions)), sentences)
