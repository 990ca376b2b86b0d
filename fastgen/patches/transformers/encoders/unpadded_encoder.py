"""The encoder of an encoder-decoder model inside `generate`: without padding, which attention to the source masks."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from fastgen.models.build.encoder_builder import encoder_of, may_run_in_c
from fastgen.models.build.equivalence_check import outcome
from fastgen.models.build.introspection import NotFused, is_toolkits, part_or_none
from fastgen.models.runtime.encoder import Encoder, Sentences, pays, weights_of
from fastgen.models.specs.encoder_layouts import ENCODERS
from fastgen.patches.engine import engine
from fastgen.patches.transformers.encoders.encoder import (
    LITTLE,
    Slower,
    check,
    lengths_of,
    prove,
    sentences_of,
)
from fastgen.patches.transformers.generate.generation_call import call_of
from fastgen.patches.transformers.generate.resolve_setting import said

NAME = "transformers.source"

_WITHOUT_EFFECT = ("return_dict", "labels")
"""Arguments that an encoder is handed, and does not look at."""


def skips_padding(model: Any, arguments: Mapping[str, Any], tokens_alone: bool = False) -> bool:
    """Whether a call of `generate` returns nothing that its encoder makes of padding, as its cache would be.

    tokens_alone: whether not even a dict has more than tokens, and what was counted.
    """
    seen = not tokens_alone and said(model, arguments, "return_dict_in_generate")
    # With chunks the prompt is run without the mask.
    return not (seen or said(model, arguments, "prefill_chunk_size"))


def get_encoder(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """`PreTrainedModel.get_encoder`, by which `generate` asks for the encoder that it then runs."""
    encoder = original(self, *args, **kwargs)
    if (
        not call_of(self).skips_padding
        or not isinstance(encoder, nn.Module)
        or hasattr(self, "hf_device_map")
    ):
        return encoder
    if not is_toolkits(cast(Any, type(self)).forward):  # which may read more of it
        return encoder
    if self.device.type != "cpu":  # where a look at the mask would be waited for
        return encoder
    layout = ENCODERS.get(
        getattr(getattr(encoder, "config", None), "model_type", None) or ""
    )  # FSMT's has no config
    parts = (layout.layers, layout.tokens) if layout is not None else ()
    found = [part_or_none(encoder, path) for path in parts if path]
    return _Source(encoder) if len(found) == 2 and None not in found else encoder


class _Source:
    """Stands in for an encoder: runs its layers without padding, or the encoder itself."""

    def __init__(self, encoder: Any) -> None:
        self.encoder = encoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.encoder, name)

    def __call__(self, **kwargs: Any) -> Any:
        ids, mask = kwargs.pop("input_ids", None), kwargs.pop("attention_mask", None)
        given = kwargs | {"input_ids": ids, "attention_mask": mask}
        visible = None if mask is None else mask.bool()
        if ids is None or (visible is not None and visible.shape != ids.shape):
            return self.encoder(**given)
        padded = visible is not None and not bool(visible.all())
        if not (padded or may_run_in_c(self.encoder)):
            return self.encoder(**given)
        try:
            check(
                self.encoder,
                ids,
                (),
                {name: value for name, value in kwargs.items() if name not in _WITHOUT_EFFECT},
            )
            found = _encode(self.encoder, ids, visible if padded else None)
        except (NotFused, Slower) as reason:
            if padded:
                engine.left_alone(NAME, f"padding is encoded: {reason}")
            return self.encoder(**given)
        engine.hit(NAME)
        return BaseModelOutput(last_hidden_state=found)  # pyright: ignore[reportArgumentType]


def _encode(module: Any, ids: Tensor, visible: Tensor | None) -> Tensor:
    """Return (B, S, C) for token ids (B, S), with zeros where they are padding; visible: where not, None for nowhere.

    Raises:
        NotFused: the layers cannot be run so.
        Slower: it would not be faster.
    """
    layout, length = ENCODERS[module.config.model_type], ids.shape[1]
    lengths = [length] * len(ids) if visible is None else lengths_of(visible)
    if not all(lengths):
        raise NotFused("a sentence of padding alone")
    layers = getattr(module, layout.layers)
    weights = (
        weights_of(getattr(module, layout.tokens).weight.shape[1]) // 2
    )  # products are the fast ones already
    saves = pays(lengths, length, "none", weights, len(layers), routed=False)
    if not (saves or may_run_in_c(module)):
        raise Slower(LITTLE)
    encoder = encoder_of(module, layout, length)
    if not saves and encoder.together is None:
        raise Slower(LITTLE)
    if visible is not None and encoder.biased and _is_parted(visible):
        raise NotFused("padding between tokens")
    if outcome(encoder) is None:
        one, seen = ids[:1], None if visible is None else visible[:1]
        own = module(input_ids=one, attention_mask=seen).last_hidden_state
        sentences = sentences_of(seen, (1, length), "none")
        prove(encoder, _rows(encoder, one, sentences), sentences.chosen(own))
    sentences = sentences_of(visible, (len(ids), length), "none")
    return sentences.restored(_rows(encoder, ids, sentences))


def _is_parted(visible: Tensor) -> bool:
    """Whether a sentence has padding between its tokens."""
    return int((visible[:, 1:] & ~visible[:, :-1]).sum() + visible[:, 0].sum()) != len(visible)


def _rows(encoder: Encoder, ids: Tensor, sentences: Sentences) -> Tensor:
    """What the layers make of the tokens among ids (B, S), (R, C)."""
    embedding = encoder.embedding
    assert embedding is not None
    counted = (
        torch.ones_like(ids) if embedding.padding is None else (ids != embedding.padding).long()
    )
    positions = (counted.cumsum(1) - 1).clamp_(min=0)
    return encoder(embedding(sentences.chosen(ids), sentences.chosen(positions)), sentences)
