"""Prompts that begin alike: whether their common tokens run once, and how they run.

The model's own modules run the common tokens at one row. Then they run what follows in each prompt,
over a cache that holds the keys and values of the common tokens.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache

from fastgen.decoding.kv_cache import common_prefix
from fastgen.decoding.kv_cache.common_prefix import have_common_prefix, is_on_the_left, padding_of
from fastgen.decoding.kv_cache.prefix_cache import KeysValues
from fastgen.decoding.plan import Plan
from fastgen.models.build.equivalence_check import recorded_verdict
from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.models.runtime.native.multistep_job import why_not_in_c
from fastgen.ops import native
from fastgen.patches.generation_call import call_of
from fastgen.patches.transformers import compat
from fastgen.patches.transformers.cache.shared_cache import SharedCache
from fastgen.patches.transformers.compat import CACHE
from fastgen.patches.transformers.generate.resolve_setting import setting_of
from fastgen.patches.transformers.planning import images

_MASK, _POSITIONS = BY_TOKEN = ("attention_mask", "position_ids")
"""Arguments of the forward that have a column for each token."""


def common_tokens(
    model: Any, input_ids: Tensor, config: Any, kwargs: dict[str, Any], beams: int
) -> int:
    """Return how many first tokens of all prompts are to run once; 0 for none.

    Args:
        input_ids: (B * M, P) int64.
        kwargs: Arguments of the model's forward, at B * M rows.
        beams: M.
    """
    rows, length = input_ids.shape
    if rows == beams:
        return 0
    common = alike_tokens(model, input_ids, config, kwargs, beams)
    width = getattr(model.config.get_text_config(decoder=True), "hidden_size", 0)
    return common if common_prefix.pays(rows // beams, length, common, width) else 0


def alike_tokens(
    model: Any, input_ids: Tensor, config: Any, kwargs: dict[str, Any], beams: int
) -> int:
    """Return how many first tokens all prompts have in common, where they can run first.

    The arguments are as in `common_tokens`.

    Returns:
        At most P - 1, as the last token's logits are needed; 0 if they cannot run first, or are
        fewer than `common_prefix.LEAST`.
    """
    mask, positions = (kwargs.get(name) for name in BY_TOKEN)
    cache = kwargs.get(CACHE)
    if (
        input_ids.shape[1] <= common_prefix.LEAST
        or model.config.is_encoder_decoder
        or has_other_inputs(kwargs)
        or getattr(config, "prefill_chunk_size", None) is not None
        or cache is None
        or compat.is_user_provided(cache)
        or (mask is not None and mask.shape != input_ids.shape)
        or (positions is not None and positions.shape[1:] != input_ids.shape[1:])
    ):
        return 0
    ids = input_ids[::beams]
    mask, positions = (None if each is None else each[::beams] for each in (mask, positions))
    padding = padding_of(mask)
    if not have_common_prefix(ids, padding) or (mask is not None and not is_binary(mask)):
        return 0
    if (
        padding is not None
        and mask is not None
        and (
            not is_on_the_left(mask, padding)
            or positions is None
            or len(positions) != len(ids)
            or config.return_dict_in_generate  # the caller sees where keys and values are
        )
    ):
        return 0
    return common_prefix.common_tokens(ids, padding, positions)


def has_other_inputs(kwargs: dict[str, Any]) -> bool:
    """Return whether a prompt depends on more than its tokens, such as images or embeddings."""
    return bool(kwargs.get(images.ENCODED)) or any(
        isinstance(value, Tensor) and name not in (*BY_TOKEN, "labels")
        for name, value in kwargs.items()
    )


def groups_of(model: Any, arguments: dict[str, Any]) -> list[list[int]]:
    """Return groups of prompts that are best generated apart; see `common_prefix.groups`.

    Args:
        arguments: Arguments of `generate`, by name.
    """
    ids = arguments.get("input_ids", arguments.get("inputs"))
    mask = arguments.get(_MASK)
    if (
        not isinstance(ids, Tensor)
        or ids.dim() != 2
        or len(ids) <= 2
        or ids.shape[1] <= common_prefix.LEAST
        or ids.device.type != "cpu"
        or model.config.is_encoder_decoder
        or setting_of(model, arguments, "do_sample")
        or call_of(model).suspension is not None
        or (isinstance(mask, Tensor) and (mask.shape != ids.shape or not is_binary(mask)))
    ):
        return []
    width = getattr(model.config.get_text_config(decoder=True), "hidden_size", 0)
    if ids.numel() * width < common_prefix.SAVED:
        return []
    padding = padding_of(mask)
    is_plain = padding is None or mask is None or is_on_the_left(mask, padding)
    if not is_plain or (padding is not None and bool((padding == ids.shape[1]).any())):
        return []
    steps = setting_of(model, arguments, "max_new_tokens")
    if steps is None:
        steps = max(1, (setting_of(model, arguments, "max_length") or 20) - ids.shape[1])
    begins = [0] * len(ids) if padding is None else cast("list[int]", cast(Any, padding).tolist())
    rows: list[list[int]] = cast(Any, ids).tolist()
    texts = [row[begin:] for row, begin in zip(rows, begins, strict=True)]
    return common_prefix.groups(texts, steps, width)


def supports(step: DecoderStep | None, kwargs: dict[str, Any]) -> bool:
    """Return whether the modules of a model can run common tokens once.

    Its decode step shows that they are the toolkit's own. A bias by distance counts slots, so
    padding cannot follow the common tokens. The output of a token must depend on no later one.
    """
    return (
        step is not None
        and not (step.has_bias and padding_of(kwargs.get(_MASK)) is not None)
        and all(map(_runs_by_token, step.module.modules()))
    )


def _runs_by_token(module: Any) -> bool:
    """Return whether a module computes each token by itself and those before.

    Attention may see later tokens, and dynamic quantisation scales all tokens of a forward
    together.
    """
    config = getattr(module, "config", None)
    return (
        getattr(module, "is_causal", True)
        and not type(module).__module__.startswith("torch.ao.")
        and getattr(config, "is_causal", True) is not False
        and not getattr(config, "use_bidirectional_attention", None)
    )


def is_binary(mask: Tensor) -> bool:
    """Return whether all values of a mask are 0 or 1."""
    return mask.dtype == torch.bool or bool(((mask == 0) | (mask == 1)).all())


def is_kept_apart(step: DecoderStep, rows: int, config: Any) -> bool:
    """Return whether decode steps read one copy of the keys and values of common tokens.

    Steps in C do. All other readers need a copy for every sentence, also the torch operations that
    an equivalence check in half precision runs.

    Args:
        step: The decode step of a plan.
        rows: B * M of the call.
    """
    return (
        step.embedding.tokens.device.type == "cpu"
        and (bool(recorded_verdict(step)) or step.dtype == torch.float32)
        and not step.has_bias
        and not why_not_in_c(step)
        and rows <= native.most_rows(step.dtype)
        and not config.return_dict_in_generate
    )


def common_first(
    input_ids: Tensor, kwargs: dict[str, Any], common: int, beams: int
) -> tuple[Tensor, dict[str, Any]]:
    """Return token ids and arguments with the common tokens before the padding.

    Args:
        input_ids: (B * M, P) int64.
        kwargs: Arguments of the model's forward, at B * M rows.
        common: Tokens that all prompts begin with.
        beams: M.

    Returns:
        Token ids (B, P), and the arguments at B * M rows.
    """
    padding = padding_of(kwargs.get(_MASK))
    if padding is None:
        return input_ids[::beams], kwargs
    order = common_prefix.common_first(padding, common, input_ids.shape[1])
    moved = {name: kwargs[name].gather(1, order) for name in BY_TOKEN}
    return input_ids.gather(1, order)[::beams], kwargs | moved


def prefill(
    model: Any,
    ids: Tensor,
    kwargs: dict[str, Any],
    plan: Plan,
    cache: SharedCache,
    known: Sequence[KeysValues] = (),
) -> tuple[Any, Cache]:
    """Run the common tokens of all prompts once, then the rest of each prompt.

    Args:
        ids: (B, P) int64, with the common tokens first.
        kwargs: Arguments of the model's forward, at B rows.
        plan: The plan of the call.
        cache: Gets the keys and values.
        known: Keys and values (1, Hkv, N, D) of each layer for the first N common tokens, which do
            not run.

    Returns:
        The outputs of the last forward, whose logits end with those of each prompt's last token;
        and a cache of transformers with the keys and values of the common tokens, at one row.
    """
    once, common = DynamicCache(), plan.common
    for index, (keys, values) in enumerate(known):
        cast(Any, once).update(keys, values, index)
    missing = common - once.get_seq_length()
    if missing:
        first = {name: value for name, value in kwargs.items() if name not in BY_TOKEN}
        first[CACHE] = once
        if (positions := kwargs.get(_POSITIONS)) is not None:
            first[_POSITIONS] = positions[:1, :common]
        inputs = model.prepare_inputs_for_generation(
            ids[:1, :common], next_sequence_length=missing, **first
        )
        model(**inputs, return_dict=True)
    cache.keep_common(once, plan.apart)
    rest = ids.shape[1] - common
    inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=rest, **kwargs)
    return model(**inputs, return_dict=True), once
