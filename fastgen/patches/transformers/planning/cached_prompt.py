"""Prompts that begin as earlier ones did: keys and values from the prefix cache.

Only decoder-only models whose decode step was read from the weights use the cache. Their keys and
values depend on the weights, on options of the modules and on the tokens before alone.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgen import config as variables
from fastgen.context import changed
from fastgen.decoding.kv_cache import common_prefix, prefix_cache
from fastgen.decoding.kv_cache.common_prefix import padding_of
from fastgen.decoding.kv_cache.prefix_cache import (
    CachedText,
    KeysValues,
    PrefixCache,
    prefix_cache_of,
)
from fastgen.models.memory.scratch import is_out_of_memory
from fastgen.models.model_fingerprint import ModelFingerprint, model_fingerprint
from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.patches.generation_call import current
from fastgen.patches.transformers import compat
from fastgen.patches.transformers.compat import CACHE
from fastgen.patches.transformers.planning import common_prompt


@dataclass
class PrefixCacheUse:
    """What the prefix cache has saved within a context.

    Attributes:
        bytes: Maximum number of bytes of the texts that this context adds.
        hits: How many times the cache had the first tokens of prompts, or a source.
        tokens: Number of tokens, of one prompt or source each, that did not run again.
        is_open: Whether the context has not ended. A copy of it may live longer.
    """

    bytes: int
    hits: int = 0
    tokens: int = 0
    is_open: bool = True


@contextmanager
def prefix_caching(size: Any) -> Generator[PrefixCacheUse]:
    """See `fastgen.prefix_cache`."""
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"bytes={size!r} is a {type(size).__name__}, and must be an int")
    if size < 0:
        raise ValueError(f"bytes={size} must not be negative")
    use = PrefixCacheUse(size)
    try:
        with changed(current, prefix_cache=use):
            yield use
    finally:
        use.is_open = False
        prefix_cache.trim(use, 0)


def owner() -> PrefixCacheUse | None:
    """Return the open context of this call; None for the whole process."""
    use = current.get().prefix_cache
    return use if use is not None and use.is_open else None


def limit() -> int:
    """Return the maximum number of bytes of the owner's texts; 0 if the cache is off."""
    use = owner()
    return variables.settings().prefix_cache if use is None else use.bytes


def may_use(model: Any, input_ids: Tensor, config: Any, kwargs: dict[str, Any], beams: int) -> bool:
    """Return whether a call has enough tokens for the cache, which is on.

    Args:
        input_ids: (B * M, P) int64.
        config: The generation config.
        kwargs: Arguments of the model's forward, at B * M rows.
        beams: M.
    """
    if limit() <= 0 or model.config.is_encoder_decoder:
        return False
    if len(input_ids) == beams:
        return config.max_length > common_prefix.LEAST
    return common_prompt.alike_tokens(model, input_ids, config, kwargs, beams) > 0


class CacheUse(NamedTuple):
    """How a call uses the prefix cache.

    Attributes:
        cached: First tokens of all prompts whose keys and values it has.
        keeps: Whether it keeps the tokens that all prompts begin with, or the whole text of the
            only sentence.
    """

    cached: int
    keeps: bool


def use_of(
    model: Any,
    step: DecoderStep | None,
    input_ids: Tensor,
    config: Any,
    kwargs: dict[str, Any],
    beams: int,
) -> CacheUse:
    """Return how a call uses the prefix cache.

    Args:
        step: The fused decode step; None if the call cannot use the cache.
        input_ids: (B * M, P) int64.
        config: The generation config.
        kwargs: Arguments of the model's forward, at B * M rows.
        beams: M.
    """
    if not _is_open(model, step, input_ids, config, kwargs):
        return CacheUse(0, False)
    # The slots of a padded text are not in the order of its tokens.
    keeps = len(input_ids) > beams or padding_of(kwargs.get(common_prompt.BY_TOKEN[0])) is None
    most = common_prompt.alike_tokens(model, input_ids, config, kwargs, beams)
    if not most:
        return CacheUse(0, keeps)
    count = prefix_cache_of(model).find(_first_tokens(input_ids, kwargs, most))[1]
    width = getattr(model.config.get_text_config(decoder=True), "hidden_size", 0)
    pays = count * common_prefix.SHARE >= input_ids.shape[1] and count * width >= SAVED
    return CacheUse(count if pays else 0, keeps)


SAVED = 16384
"""Least number of cached tokens times the model's width that are worth looking up."""


def _is_open(
    model: Any, step: DecoderStep | None, input_ids: Tensor, config: Any, kwargs: dict[str, Any]
) -> bool:
    """Return whether a call uses the cache, after dropping what comes from another model's state.

    It does if the cache is on, and nothing but its tokens determines the keys and values of a text.

    Args:
        step: The fused decode step; None if the model's own modules run the steps.
        input_ids: (B * M, P) int64.
        config: The generation config.
        kwargs: Arguments of the model's forward.
    """
    cache = kwargs.get(CACHE)
    if (
        step is None
        or limit() <= 0
        or not common_prompt.supports(step, kwargs)
        or getattr(config, "prefill_chunk_size", None) is not None
        or cache is None
        or compat.is_user_provided(cache)
        or common_prompt.has_other_inputs(kwargs)
        or not _has_plain_positions(kwargs, input_ids.shape[1])
        or (fingerprint := model_fingerprint(model)) is None
    ):
        return False
    prefix_cache_of(model).validate(fingerprint.with_options(step.fingerprint))
    return True


def _has_plain_positions(kwargs: dict[str, Any], length: int) -> bool:
    """Return whether the first prompt's P tokens have the positions 0, 1, 2, ..."""
    mask, positions = (kwargs.get(name) for name in common_prompt.BY_TOKEN)
    if any(each is not None and each.shape[1:] != (length,) for each in (mask, positions)):
        return False
    if mask is not None and not common_prompt.is_binary(mask):
        return False
    if positions is None:
        return True
    padding = 0 if mask is None else int(length - mask[0].count_nonzero())
    own = positions[0, padding:]
    return torch.equal(own, torch.arange(len(own), device=own.device, dtype=own.dtype))


def _first_tokens(ids: Tensor, kwargs: dict[str, Any], count: int) -> Tensor:
    """Return the first tokens of the first prompt, (count,) int64 on the CPU."""
    padding = padding_of(kwargs.get(common_prompt.BY_TOKEN[0]))
    first = 0 if padding is None else int(padding[0])
    return ids[0, first : first + count].cpu()


def fingerprint_of(model: Any) -> ModelFingerprint | None:
    """Return the fingerprint of a model when a call last used the cache."""
    return prefix_cache_of(model).model


def load(model: Any, tokens: Tensor) -> tuple[Sequence[KeysValues], int]:
    """Return keys and values (1, Hkv, N, D) of each layer for a text's first N tokens, and N.

    Args:
        tokens: (C,) int64.
    """
    cache = prefix_cache_of(model)
    text, count = cache.find(tokens.cpu())
    if text is None:
        return (), 0
    text.touch()
    note_hit(count)
    known = [tensor[:, :, :count] for tensor in text.tensors]
    return list(zip(known[::2], known[1::2], strict=True)), count


def note_hit(tokens: int) -> None:
    """Count a use of the cache for a context, if one has opened it."""
    if (use := owner()) is not None:
        use.hits, use.tokens = use.hits + 1, use.tokens + tokens


def keep(
    model: Any,
    fingerprint: ModelFingerprint | None,
    tokens: Tensor,
    layers: Sequence[KeysValues],
) -> None:
    """Store the keys and values of a text, if there is memory for them.

    Args:
        fingerprint: The model's at the start of the call.
        tokens: (N,) int64.
        layers: Keys and values (1, Hkv, N or more, D) of each layer. They are copied.
    """
    count = len(tokens)
    views = [kv[:, :, :count] for layer in layers for kv in layer]
    if views and count >= common_prefix.LEAST:
        add(prefix_cache_of(model), fingerprint, tokens, views)


def add(
    cache: PrefixCache,
    fingerprint: ModelFingerprint | None,
    tokens: Tensor,
    views: Sequence[Tensor],
) -> None:
    """Store copies of a text's tensors, if there is memory for them."""
    if sum(view.nbytes for view in views) > limit():
        return
    try:
        text = CachedText(tokens.cpu(), [view.clone() for view in views], owner())
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return
    cache.add(text, fingerprint, limit())
