"""Canary for transformers versions newer than tested: tiny models, with and without fastgen."""

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from fastgen.patches.engine.engine import disabled
from fastgen.patches.transformers import CACHES, part_of
from fastgen.patches.transformers.cache.shared_cache import parts_of
from fastgen.patches.transformers.compat import CACHE, cache_of

_METHODS: dict[str, dict[str, Any]] = {
    "greedy search": {},
    "sampling": {"do_sample": True, "top_k": 0, "num_return_sequences": 2},
    "beam search": {"num_beams": 3, "no_repeat_ngram_size": 1},
    # With many end tokens, the order of the drawn candidates decides which hypotheses finish.
    "beam sampling": {
        "num_beams": 3,
        "do_sample": True,
        "top_k": 0,
        "eos_token_id": list(range(2, 20)),
    },
}
_SEED = 2


def parts() -> dict[str, Callable[[], str | None]]:
    """Return the parts of the canary by name.

    Each runs tiny models with and without fastgen, and returns what differs or None.
    """
    by_name: dict[str, Callable[[], str | None]] = {
        part_of(method, encoder_decoder): functools.partial(_tokens_differ, encoder_decoder, method)
        for encoder_decoder in (False, True)
        for method in _METHODS
    }
    return by_name | {CACHES: _caches_differ}


def agree() -> tuple[bool, str]:
    """Run all parts; return whether all agree, and what was compared or what differs."""
    all_parts = parts()
    differing = list(filter(None, (part() for part in all_parts.values())))
    return not differing, "; ".join(differing) or f"BART and GPT-2: {len(all_parts)} parts agree"


def _tokens_differ(encoder_decoder: bool, method: str) -> str | None:
    model, inputs = _model(encoder_decoder), _inputs()
    ours, stock = _both(lambda: model.generate(**inputs, **_METHODS[method]))
    if torch.equal(ours, stock):
        return None
    return f"{method} of {type(model).__name__} gave other tokens"


def _caches_differ() -> str | None:
    """Compare the contents of a user-provided cache after a call, and the output's fields."""
    from transformers import DynamicCache, EncoderDecoderCache

    for encoder_decoder in (False, True):
        for beams in (1, 3):
            model = _model(encoder_decoder)

            def call(model: Any = model, beams: int = beams) -> Any:
                text = DynamicCache()
                cache = (
                    EncoderDecoderCache(text, DynamicCache())
                    if model.config.is_encoder_decoder
                    else text
                )
                output = model.generate(
                    **_inputs(),
                    **{CACHE: cache},
                    num_beams=beams,
                    return_dict_in_generate=True,
                    output_scores=True,
                )
                return output, [
                    state
                    for layer in parts_of(cache)[0].layers
                    for state in (layer.keys, layer.values)
                ]

            (ours, kept), (stock, kept_by_stock) = _both(call)
            name = f"{type(model).__name__} with {beams} beams"
            if list(ours) != list(stock) or (cache_of(ours) is None) != (cache_of(stock) is None):
                return (
                    f"the output of {name} has the fields {', '.join(ours)}, "
                    f"and {', '.join(stock)} without fastgen"
                )
            if not torch.equal(ours.sequences, stock.sequences):
                return f"{name}, which is given a cache, gave other tokens"
            if len(kept) != len(kept_by_stock) or not all(map(_close, kept, kept_by_stock)):
                return f"{name} left other keys and values in the cache that it was given"
    return None


def _close(ours: Tensor, stock: Tensor) -> bool:
    return ours.shape == stock.shape and torch.allclose(ours, stock, rtol=1e-9, atol=1e-9)


def _both(call: Callable[[], Any]) -> tuple[Any, Any]:
    """Return the results of a call with and without fastgen, from the same random seed."""
    untyped = cast(Any, torch)  # torch's random functions lack type annotations
    with untyped.random.fork_rng(), torch.no_grad():
        untyped.manual_seed(_SEED)
        ours = call()
        with disabled():
            untyped.manual_seed(_SEED)
            return ours, call()


@functools.cache
def _model(encoder_decoder: bool) -> Any:
    from transformers import BartConfig, BartForConditionalGeneration, GPT2Config, GPT2LMHeadModel

    untyped = cast(Any, torch)
    with untyped.random.fork_rng():
        untyped.manual_seed(0)
        if encoder_decoder:
            model: Any = BartForConditionalGeneration(
                BartConfig(
                    vocab_size=64,
                    d_model=16,
                    encoder_layers=1,
                    decoder_layers=2,
                    encoder_attention_heads=2,
                    decoder_attention_heads=2,
                    encoder_ffn_dim=16,
                    decoder_ffn_dim=16,
                    max_position_embeddings=64,
                    init_std=1.0,
                    forced_eos_token_id=None,
                )
            )
        else:
            model = GPT2LMHeadModel(
                GPT2Config(
                    vocab_size=64,
                    n_embd=16,
                    n_layer=2,
                    n_head=2,
                    n_positions=64,
                    initializer_range=1.0,
                    bos_token_id=1,
                    eos_token_id=2,
                )
            )
    return model.double().eval()


def _inputs() -> dict[str, Any]:
    """Return two sentences, one of them padded."""
    ids = torch.randint(
        4,
        64,
        (2, 7),
        generator=torch.Generator().manual_seed(_SEED),
        dtype=torch.int64,
        device="cpu",
    )
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 8, "pad_token_id": 1}
