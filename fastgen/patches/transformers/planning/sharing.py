"""Whether the beams of a call share keys and values, and the reason if they do not."""

from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from fastgen.models.build.introspection import reads_rows
from fastgen.models.build.peft_layers import inserts_tokens
from fastgen.models.routing.routes import touched_of
from fastgen.models.specs.registry import spec_of
from fastgen.models.state import CachedState, cached_state_of
from fastgen.ops import native
from fastgen.patches.engine import engine
from fastgen.patches.transformers import compat
from fastgen.patches.transformers.cache import user_cache
from fastgen.patches.transformers.cache.shared_cache import held, parts_of
from fastgen.patches.transformers.compat import CACHE
from fastgen.patches.transformers.generate import captured_module_step, fused_decoder
from fastgen.patches.transformers.generate.legacy_search import Method
from fastgen.patches.transformers.planning import images
from fastgen.patches.transformers.unlisted.families import (
    Key,
    configs_of,
    key_of,
    verdict,
)

OUTGROWN = "the text may outgrow the sliding window"
MOST_KEPT = 2
"""Maximum size of a cache of the whole text, as a multiple of transformers' own."""

MODULES_CANNOT = "the model's own modules compute attention by themselves"


class SharedCacheRefusal(CachedState):
    """Kept of a model whose first decode step did not take its keys from the shared cache."""


def has_own_attention(model: Any) -> bool:
    """Return whether a model's modules cannot resolve the placeholders of a shared cache."""
    return any(
        spec is not None and not spec.attention_interface
        for spec in map(spec_of, configs_of(model))
    )


def computes_alone(model: Any) -> str:
    """Return the reason why a model with a `SharedCacheRefusal` has a cache of its own."""
    return f"{type(model).__name__} computes with the cache in a way of its own"


def not_shared(reason: str) -> str:
    """Return the plan's message for a call that does not use the shared cache."""
    return f"keys and values are not shared: {reason}"


def reason_not_to_share(
    model: Any, input_ids: Tensor, config: Any, kwargs: dict[str, Any], beams: int
) -> str | None:
    """Return why the rows of a call do not share keys and values, or None if they do."""
    if not config.use_cache:
        return "use_cache=False"
    if kwargs.get("encoder_outputs") is not None and not model.config.is_encoder_decoder:
        return "encoder outputs are given to a decoder"
    cache = compat.cache_of(kwargs)
    reason = other_kind_of(cache) or _reason_not_to_fill(model, input_ids, config, kwargs)
    if reason is not None:
        return reason
    spec, mask = spec_of(model.config), kwargs.get("attention_mask")
    sources = model.config.is_encoder_decoder and (spec is None or spec.masks_source)
    if sources and isinstance(mask, Tensor) and not bool(mask.any(-1).all()):
        return "a source of padding alone"
    if compat.is_user_provided(cache):
        if has_own_attention(model):
            return user_cache.IS_USER_PROVIDED
        if (
            reason := user_cache.reason_not_to_share(model, cache, len(input_ids), beams)
        ) is not None:
            return reason
        if (
            beams == 1
            and (
                reason := user_cache.reason_not_to_copy(
                    cache, config.max_length - input_ids.shape[1]
                )
            )
            is not None
        ):
            return reason
    if (reason := _reason_of_code(model)) is not None:
        return reason
    longest = longest_text(model, input_ids, config, kwargs)
    for part in configs_of(model):
        rope: dict[str, Any] = getattr(part, "rope_parameters", None) or {}
        short = rope.get(
            "original_max_position_embeddings",
            getattr(part, "original_max_position_embeddings", None),
        )
        if rope.get("rope_type") == "longrope" and short is not None and longest > short:
            return "a text that outgrows its short positions is computed anew"
    attentions = config.return_dict_in_generate and config.output_attentions
    if beams == 1:
        if attentions and any(layer.is_sliding for layer in parts_of(cache)[0].layers):
            return "output_attentions=True with a sliding window"
        if outgrows_window(cache, longest) and not _may_keep_all(model, cache, longest):
            return OUTGROWN
        return None
    if attentions:
        return "output_attentions=True"
    return reason_not_to_resolve(model, kwargs) or images.reason_not_to_share(
        model, input_ids, kwargs, beams
    )


def outgrows_window(cache: Any, longest: int) -> bool:
    """Return whether a text of `longest` tokens is longer than a sliding window of a cache.

    Static layers have room for the whole text, or nothing is shared.
    """
    layers: list[Any] = parts_of(cache)[0].layers
    windows = (getattr(layer, "sliding_window", longest) for layer in layers if layer.is_sliding)
    return any(window < longest for window in windows)


def _may_keep_all(model: Any, cache: Any, longest: int) -> bool:
    """Return whether single rows may use the shared cache, which keeps the whole text.

    That pays if sentences have several rows, or if C runs the steps: it reads the window only.
    """
    if spec_of(model.config) is None or model.device.type != "cpu":
        return False
    layers = parts_of(cache)[0].layers
    own = sum(held(layer, longest) for layer in layers)
    small = longest * len(layers) <= MOST_KEPT * own
    return small and model.dtype in native.DTYPES and native.library() is not None


def _reason_of_code(model: Any) -> str | None:
    """Return why code of others makes the rows of a model's forwards differ; None if none does."""
    if inserts_tokens(model):
        return "PEFT inserts embeddings before the tokens of a forward"
    user_code = _reads_rows(model)
    return None if user_code is None else f"{user_code} may look at rows, or at the cache"


def reason_of_family(
    model: Any, method: Method | None, input_ids: Tensor, config: Any, kwargs: dict[str, Any],
    beams: int,
) -> tuple[str | None, Key | None]:  # fmt: skip
    """Return why a call of a family without a spec does not share, or None and its key if it does.

    Its first call runs both ways, which needs calls that depend on nothing but their arguments.
    """
    reason = _reason_not_to_compare(model, method, input_ids, config, kwargs)
    if reason is not None:
        return reason, None
    key = key_of(model, beams, kwargs)
    return verdict(model, key) or None, key


def _reason_not_to_compare(
    model: Any, method: Method | None, input_ids: Tensor, config: Any, kwargs: dict[str, Any]
) -> str | None:
    if method is not None:
        return f"model type {model.config.model_type!r} has no spec"
    if compat.is_user_provided(cache := compat.cache_of(kwargs)):
        return user_cache.IS_USER_PROVIDED
    if outgrows_window(cache, longest_text(model, input_ids, config, kwargs)):
        return OUTGROWN
    if config.return_dict_in_generate and (config.output_hidden_states or config.output_attentions):
        return "hidden states or attentions are returned"
    return draws(model)


def other_kind_of(cache: Any) -> str | None:
    """Return why a cache is neither a dynamic nor a static one, or None if it is."""
    for part in parts_of(cache) or [cache]:
        if type(part) not in (DynamicCache, StaticCache):
            return f"the cache is a {type(part).__name__}"
        if part.offloading:
            return "the cache is offloaded"
        layers: list[Any] = part.layers
        for layer in layers:
            if type(layer) not in _LAYERS:
                return f"the cache has a {type(layer).__name__}"
    return None


_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)


def without_static(model: Any, config: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call with a dynamic cache in place of a static one.

    Only if nobody sees the cache, and the modules of the model's family take either kind.
    """
    cache = compat.cache_of(kwargs)
    if _is_seen(config, cache) or _reason_of_static(model, cache) is None:
        return kwargs
    if not _takes_static_caches(model):
        return kwargs
    text = DynamicCache(config=model.config)
    source = DynamicCache(config=model.config)
    return kwargs | {CACHE: EncoderDecoderCache(text, source) if len(parts_of(cache)) > 1 else text}


def _reason_not_to_fill(
    model: Any, input_ids: Tensor, config: Any, kwargs: dict[str, Any]
) -> str | None:
    """Return why a static cache cannot be filled after the call, or None if it can.

    The model's modules attend to all its room. That shows in returned attentions, and in the keys
    of padding, which has nothing else to attend to.
    """
    cache = compat.cache_of(kwargs)
    text, *source = [_room_of(part) for part in parts_of(cache)]
    if (reason := _reason_of_static(model, cache)) is None:
        return None
    if not _takes_static_caches(model) or not _is_seen(config, cache):
        return reason
    if config.return_dict_in_generate and config.output_attentions:
        return f"{reason} whose whole room is in attentions"
    needed = longest_text(model, input_ids, config, kwargs) - 1
    if text is not None and text < needed:
        return f"{reason} of {text} tokens for a longer text"
    if source and source[0] not in (None, kwargs["encoder_outputs"][0].shape[1]):
        return f"{reason} with more room than the source needs"
    mask = kwargs.get("decoder_attention_mask" if source else "attention_mask")
    return None if mask is None or bool((mask == 1).all()) else f"{reason} that keeps padding"


def _takes_static_caches(model: Any) -> bool:
    """Return whether a model computes the same with a static cache as with a dynamic one."""
    specs = [spec for spec in map(spec_of, configs_of(model)) if spec is not None]
    return bool(specs) and all(spec.attention_interface and not spec.prefix_lm for spec in specs)


def _is_seen(config: Any, cache: Any) -> bool:
    """Return whether the caller sees the cache of a call afterwards."""
    return config.return_dict_in_generate or compat.is_user_provided(cache)


def _room_of(part: Any) -> int | None:
    """Return the tokens that each layer of a static cache has room for; None for another cache."""
    if type(part) is not StaticCache or part.offloading:
        return None
    layers: list[Any] = part.layers
    return min((layer.max_cache_len for layer in layers), default=0)


def _reason_of_static(model: Any, cache: Any) -> str | None:
    is_static = any(_room_of(part) is not None for part in parts_of(cache))
    return "the cache is a StaticCache" if is_static else None


def longest_text(model: Any, input_ids: Tensor, config: Any, kwargs: dict[str, Any]) -> int:
    """Return the maximum number of tokens of a text, cached ones and prompt included."""
    embeds = None if model.config.is_encoder_decoder else kwargs.get("inputs_embeds")
    prompt = input_ids if embeds is None else embeds
    cached = held_before(model, input_ids, config, kwargs)
    return cached + prompt.shape[1] + config.max_length - input_ids.shape[1]


def held_before(model: Any, input_ids: Tensor, config: Any, kwargs: dict[str, Any]) -> int:
    """Return the number of cached tokens that the prompt does not repeat, by `_prefill`'s rule."""
    cache = compat.cache_of(kwargs)
    if cache is None or kwargs.get("inputs_embeds") is not None:
        return 0
    mask = kwargs.get(
        "decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask"
    )
    length = compat.length_of_mask(config) if mask is None else mask.shape[1]
    return 0 if length == input_ids.shape[1] else int(cache.get_seq_length())


def reason_not_to_resolve(model: Any, kwargs: dict[str, Any]) -> str | None:
    """Return why the model's modules cannot resolve placeholders, or None if they can."""
    if cached_state_of(model, SharedCacheRefusal) is not None:
        return computes_alone(model)
    if has_own_attention(model):
        return None  # its modules never get placeholders
    if not engine.is_applied("transformers.attention"):
        return "transformers.attention is not in place"
    for part in configs_of(model):
        if (reason := fused_decoder.not_known(model, part)) is not None:
            return reason
    return None


def draws(model: Any) -> str | None:
    """Return why a row's random numbers depend on the batch (training-mode dropout), or None."""
    for module in captured_module_step.of_steps(model):
        if module.training and _has_dropout(module):
            return (
                f"dropout of a {type(module).__name__} in training mode draws for the whole batch"
            )
    return None


def _has_dropout(module: nn.Module) -> bool:
    numbers = [name for name, value in vars(module).items() if isinstance(value, float) and value]
    return any("drop" in name or name == "p" for name in numbers)


def _reads_rows(model: Any) -> str | None:
    """Return which user code runs in the modules of the decode steps, or None.

    Such a hook or forward may expect transformers' cache, and one row per beam in prefill.
    """
    user_code = {
        module: what for module in touched_of(model) if (what := reads_rows(module)) is not None
    }
    if not user_code:
        return None
    step_modules = set(captured_module_step.of_steps(model))
    return next((what for module, what in user_code.items() if module in step_modules), None)
