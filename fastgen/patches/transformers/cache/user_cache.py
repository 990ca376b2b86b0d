"""A cache that the caller gave to `generate`: whether the rows of a sentence can share what it holds.

Such as prefix tuning gives one, a latent variable's keys and values, or the turns of a chat so far.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import EncoderDecoderCache

from fastgen.patches.transformers.cache.shared_cache import parts_of

IS_GIVEN = "a KV cache is given"
WORTH = 128
"""Tokens of a given cache for each new one at most: more cost more to copy, there and back, than steps save.

GPT-2 of 8 layers of 512 and a cache of 1,896 tokens, one thread: 4 new tokens take 1.1 times as long over our cache as
over transformers' own, 16 take 0.88 times as long.
"""

_ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-14}  # of equal rows, beside the largest number


def reason_not_to_share(model: Any, cache: Any, rows: int, beams: int) -> str | None:
    """Why the rows of a sentence cannot share what a given cache of dynamic layers holds, if they cannot.

    rows: B * M of the call, which the cache must have.
    """
    if isinstance(cache, EncoderDecoderCache) != bool(model.config.is_encoder_decoder):
        return f"{IS_GIVEN}, a {type(cache).__name__}"
    text, *source = parts_of(cache)
    if any(layer.is_sliding for part in (text, *source) for layer in part.layers):
        return f"{IS_GIVEN}, with a sliding window"
    if any(layer.get_seq_length() for part in source for layer in part.layers):
        return f"{IS_GIVEN}, with keys of a source"
    lengths = {layer.get_seq_length() for layer in text.layers}
    if not any(lengths):
        return None
    if len(lengths) > 1:
        return f"{IS_GIVEN}, with layers of different lengths"
    states = [state for layer in text.layers for state in (layer.keys, layer.values)]
    if any(
        (len(state), state.dtype, state.device) != (rows, model.dtype, model.device)
        for state in states
    ):
        return f"{IS_GIVEN}, of other rows, another type or device"
    if beams > 1 and bool(torch.stack([_differs(state, beams) for state in states]).any()):
        return f"{IS_GIVEN}, and differs between rows of a sentence"
    return None


def reason_not_to_copy(cache: Any, new_tokens: int) -> str | None:
    """Why a given cache of one row per sentence is not copied into ours, if it would cost more than it gains."""
    held = int(cache.get_seq_length())
    if held <= WORTH * new_tokens:
        return None
    return f"{IS_GIVEN}, of {held} tokens for {new_tokens} new ones at most"


def _differs(state: Tensor, beams: int) -> Tensor:
    """Whether one of the rows of state (B * M, ...) is not its sentence's first, but for how its type rounds.

    A model that has run equal rows may have rounded them differently. In half precision that is too much to tell.
    """
    rows = state.reshape(-1, beams, *state.shape[1:])
    within = _ROUNDING.get(state.dtype, 0.0) * rows.abs().amax()
    return ~((rows[:, 1:] - rows[:, :1]).abs() <= within).all()  # NaN differs
