"""User-provided KV caches: whether the rows of a sentence can share what such a cache holds.

Prefix tuning passes such a cache to `generate`, as do calls that condition on a latent variable's
keys and values or that continue a chat.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import EncoderDecoderCache

from fastgen.patches.transformers.cache.shared_cache import parts_of, states_of

IS_USER_PROVIDED = "a KV cache is given"
WORTH = 128
"""Maximum number of tokens in a user-provided cache per new token.

Above it, copying the cache to fastgen's and back costs more than the decode steps save. GPT-2 with
8 layers of width 512 and a cache of 1,896 tokens, one thread: 4 new tokens take 1.1 times as long
with fastgen's cache as with transformers' own, 16 take 0.88 times as long.
"""

# Tolerance between equal rows, relative to the largest absolute value.
_ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-14}


def reason_not_to_share(model: Any, cache: Any, rows: int, beams: int) -> str | None:
    """Return why the rows of a sentence cannot share a user-provided cache, or None if they can.

    Args:
        cache: The cache; all its layers are dynamic or static.
        rows: B * M of the call, which the cache must have.
        beams: M.
    """
    if isinstance(cache, EncoderDecoderCache) != bool(model.config.is_encoder_decoder):
        return f"{IS_USER_PROVIDED}, a {type(cache).__name__}"
    text, *source = parts_of(cache)
    if any(layer.is_sliding for part in (text, *source) for layer in part.layers):
        return f"{IS_USER_PROVIDED}, with a sliding window"
    if any(layer.get_seq_length() for part in source for layer in part.layers):
        return f"{IS_USER_PROVIDED}, with keys of a source"
    lengths = {int(layer.get_seq_length()) for layer in text.layers}
    states = [state for layer in text.layers for state in states_of(layer)]
    if not states:
        return None
    if len(lengths) > 1:
        return f"{IS_USER_PROVIDED}, with layers of different lengths"
    if any(
        (len(state), state.dtype, state.device) != (rows, model.dtype, model.device)
        for state in states
    ):
        return f"{IS_USER_PROVIDED}, of other rows, another type or device"
    if beams > 1 and bool(torch.stack([_differs(state, beams) for state in states]).any()):
        return f"{IS_USER_PROVIDED}, and differs between rows of a sentence"
    return None


def reason_not_to_copy(cache: Any, new_tokens: int) -> str | None:
    """Return why copying a user-provided cache costs more than it saves, or None if it does not.

    Args:
        cache: The cache, with one row per sentence.
        new_tokens: Maximum number of new tokens of the call.
    """
    cached = int(cache.get_seq_length())
    if cached <= WORTH * new_tokens:
        return None
    return f"{IS_USER_PROVIDED}, of {cached} tokens for {new_tokens} new ones at most"


def _differs(state: Tensor, beams: int) -> Tensor:
    """Return whether a row of state (B * M, ...) differs from the first row of its sentence.

    A model may round equal rows differently, so float32 and float64 have a tolerance. In half
    precision rounding is too coarse to tell, so rows must be equal.

    Returns:
        () bool.
    """
    rows = state.reshape(-1, beams, *state.shape[1:])
    tolerance = _ROUNDING.get(state.dtype, 0.0) * rows.abs().amax()
    return ~((rows[:, 1:] - rows[:, :1]).abs() <= tolerance).all()  # true for NaN
