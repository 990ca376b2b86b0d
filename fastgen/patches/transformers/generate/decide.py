"""The plan of a call: whether and how fastgen runs one of transformers' decoding loops.

The decision is made once, before the call has any effect.
"""

import functools
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from fastgen.decoding.plan import Plan, Unsupported
from fastgen.models.build.equivalence_check import by_modules
from fastgen.models.build.introspection import NotFused, is_toolkits, name_of, reads_rows
from fastgen.models.build.patched_torch import replaced
from fastgen.models.cuda_graphs import graph, replay
from fastgen.models.routing.routes import touched_of, why_compiled
from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.models.runtime.native_multistep_job import why_not_in_c
from fastgen.models.specs.registry import spec_of
from fastgen.models.state import Kept, kept_of
from fastgen.patches.engine import engine
from fastgen.patches.transformers import CACHES, TOOLKIT, compat, part_of
from fastgen.patches.transformers.cache import user_cache
from fastgen.patches.transformers.cache.shared_cache import parts_of
from fastgen.patches.transformers.compat import CACHE
from fastgen.patches.transformers.generate import captured_module_step, first_tokens, fused_decoder
from fastgen.patches.transformers.generate.legacy_search import Method, method_of
from fastgen.patches.transformers.generate.logits_processors import batchwise_processor
from fastgen.patches.transformers.generate.stopping_criteria import unknown_criterion
from fastgen.patches.transformers.unlisted.families import (
    configs_of,
    is_listed,
    key_of,
    reason_not_supported,
    verdict,
)


def decide(
    model: Any,
    loop: Literal["beam", "sample"],
    input_ids: Tensor,
    processors: Any,
    criteria: Any,
    config: Any,
    kwargs: dict[str, Any],
    drafts: bool = False,
) -> tuple[Plan, DecoderStep | None]:
    """Plan a call from the arguments that `generate` passes to its decoding loop.

    Args:
        loop: Which of transformers' loops was called.
        input_ids: (B * M, P), the prompt.
        processors: Logits processors.
        criteria: Stopping criteria.
        kwargs: Arguments of the model's forward and of the loop.
        drafts: Whether a draft model is used, so that decode steps follow prefill even if there is
            only one new token.

    Returns:
        The plan, and the fused decode step; None if the model's own modules run the steps.

    Raises:
        Unsupported: fastgen cannot run the call; the reason is worded as `fastgen.status()` shows
            it.
        ValueError: A list of first tokens does not fit the batch.
    """
    method = method_of(config)
    beams = rows_of(loop, config)
    vocabulary = lambda: model.config.get_text_config(decoder=True).vocab_size  # noqa: E731
    first_tokens.check(config.forced_bos_token_id, input_ids.shape[0] // beams, vocabulary)
    check_call(model, loop, method, config, kwargs)
    _check_source(model, input_ids, kwargs)
    _check_canary(model, loop, config, kwargs)
    left_off: list[str] = []
    reason = _reason_not_to_know(model, method) or _reason_not_to_share(
        model, input_ids, config, kwargs, beams
    )
    if reason is None and not is_listed(model):
        reason = _reason_of_family(model, method, input_ids, config, kwargs, beams)
    if reason is None and beams == 1 and method is None and not drafts:
        reason = _reason_too_few(model, input_ids, config.max_length - input_ids.shape[1])
    if reason is not None:
        left_off.append(not_shared(reason))
    shared = not left_off
    step, new_tokens = None, config.max_length - input_ids.shape[1]
    if shared and (new_tokens > 1 or drafts or method is not None or has_own_attention(model)):
        try:
            step = fused_decoder.step(
                model, config, kwargs, _longest(model, input_ids, config, kwargs)
            )
        except NotFused as reason_not:
            shared = beams == 1 or not has_own_attention(model)
            left_off += [] if shared else [not_shared(MODULES_CANNOT)]
            left_off.append(by_modules(reason_not))
    samples = beams if loop == "sample" and method is None else 1
    reason = _reason_not_to_drop(input_ids, processors, criteria, config, kwargs, samples)
    if reason is None and not is_listed(model):
        reason = f"model type {model.config.model_type!r} has no spec"
    may_drop = reason is None and new_tokens > 1
    if step is None and ((shared and beams > 1) or may_drop):
        dropout = draws(model)
        if shared and beams > 1 and dropout is not None:
            shared = False
            left_off.append(not_shared(dropout))
        if may_drop:
            reason = dropout or _looks_at_rows(model)
    sentences = input_ids.shape[0] // beams
    if reason is not None and sentences > 1:
        left_off.append(f"finished sentences stay in the batch: {reason}")
    graphs = (
        shared
        and graph.wanted(input_ids)
        and new_tokens > (captured_module_step.WORTH if step is None else replay.WORTH)
    )
    if (
        graphs
        and (reason_not := reason_not_to_capture(model, method, config, kwargs, step)) is not None
    ):
        graphs = False
        left_off.append(replay.not_captured(reason_not))
    plan = Plan(
        method=method_named(loop, config),
        sentences=sentences,
        beams=beams,
        shared=shared,
        drop=reason is None,
        fused=step is not None,
        graphs=graphs,
        left_off=tuple(left_off),
        not_in_c="" if step is None else why_not_in_c(step),
    )
    return plan, step


def method_named(loop: Literal["beam", "sample"], config: Any) -> str:
    """Return the name of the decoding method that a loop runs for a generation config."""
    return method_of(config) or _OF_LOOP[loop, bool(config.do_sample)]


_OF_LOOP = {
    ("sample", False): "greedy search", ("sample", True): "sampling",
    ("beam", False): "beam search", ("beam", True): "beam sampling",
}  # fmt: skip


def _check_canary(
    model: Any, loop: Literal["beam", "sample"], config: Any, kwargs: dict[str, Any]
) -> None:
    """Raise Unsupported if the canary found that a part that the call needs behaves differently."""
    needed = [
        part_of(_OF_LOOP[loop, bool(config.do_sample)], bool(model.config.is_encoder_decoder))
    ]
    if config.return_dict_in_generate or compat.is_user_provided(compat.cache_of(kwargs)):
        needed.append(CACHES)
    for part in needed:
        if (reason := engine.declined(TOOLKIT.name, part)) is not None:
            raise Unsupported(reason)


def reason_not_to_capture(
    model: Any, method: Method | None, config: Any, kwargs: dict[str, Any], step: DecoderStep | None
) -> str | None:
    """Return why decode steps over the shared cache cannot be captured, or None if they can.

    Args:
        step: The fused decode step; None if the model's own modules run the steps.
    """
    if method == "contrastive search":
        return "contrastive search looks at what the model's head reads"
    if step is not None:
        return None
    if has_own_attention(model):
        return MODULES_CANNOT
    if (reason := _reason_not_to_redeem(model, kwargs)) is not None:
        return reason
    try:
        captured_module_step.check(model, config, kwargs)
    except NotFused as reason_not:
        return str(reason_not)
    return None


def rows_of(loop: Literal["beam", "sample"], config: Any) -> int:
    """Return the rows per sentence: beams, samples, or candidates of contrastive search."""
    if loop == "beam":
        return config.num_beams
    return config.top_k if method_of(config) is not None else config.num_return_sequences


def _reason_not_to_know(model: Any, method: Method | None) -> str | None:
    """Return why a model is not supported, or None if it is.

    transformers cannot run the legacy methods, so fastgen runs them for unsupported models too.

    Raises:
        Unsupported: The model is not supported and transformers has the method, or the model
            reorders its cache or keeps other state.
    """
    try:
        check_model(model)
    except Unsupported as unsupported:
        if method is None or compat.reorders_its_cache(model) or compat.has_states(model):
            raise
        return unsupported.reason
    return None


MODULES_CANNOT = "the model's own modules compute attention by themselves"


def has_own_attention(model: Any) -> bool:
    """Return whether a model's modules cannot resolve the placeholders of a shared cache."""
    return any(
        spec is not None and not spec.attention_interface
        for spec in map(spec_of, configs_of(model))
    )


class SharedCacheRefusal(Kept):
    """Kept of a model whose first decode step did not take its keys from the shared cache."""


def computes_alone(model: Any) -> str:
    """Return the reason why a model with a `SharedCacheRefusal` has a cache of its own."""
    return f"{type(model).__name__} computes with the cache in a way of its own"


def not_shared(reason: str) -> str:
    """Return the plan's message for a call that does not use the shared cache."""
    return f"keys and values are not shared: {reason}"


def check_call(
    model: Any,
    loop: Literal["beam", "sample"],
    method: Method | None,
    config: Any,
    kwargs: dict[str, Any],
) -> None:
    """Raise Unsupported if the arguments of a call show that transformers' loop must run it."""
    for name in compat.CALLED_BY_LOOP[loop]:
        if name in vars(model) or compat.has_own(model, name):
            raise Unsupported(f"{type(model).__name__} has its own {name}")
    if (default := torch.get_default_device()).type not in ("cpu", model.device.type):
        raise Unsupported(f"the default device is {default}, and the model is on {model.device}")
    if kwargs.get("synced_gpus"):
        raise Unsupported("synced_gpus=True")
    if config.is_assistant:
        raise Unsupported("the model is the assistant of another")
    cache = compat.cache_of(kwargs)
    if loop == "beam":
        if config.low_memory and method is None:
            raise Unsupported("low_memory=True")
        if CACHE in kwargs and not hasattr(cache, "reorder_cache"):
            raise Unsupported(f"a {type(cache).__name__} cannot be reordered")
    elif (
        getattr(cache, "is_compileable", False)
        and not config.disable_compile
        and (model.device.type != "cpu" or compat.compiles_everywhere(config))
    ):
        raise Unsupported("transformers compiles the forward")


def _check_source(model: Any, input_ids: Tensor, kwargs: dict[str, Any]) -> None:
    """Raise Unsupported if encoder outputs do not have the rows of the text or the mask's shape."""
    outputs, mask = kwargs.get("encoder_outputs"), kwargs.get("attention_mask")
    states = outputs[0] if outputs and model.config.is_encoder_decoder else None
    if not isinstance(states, Tensor) or states.dim() < 2:
        return
    spec, (rows, length) = spec_of(model.config), states.shape[:2]
    fits = rows == len(input_ids)
    if isinstance(mask, Tensor) and mask.dim() == 2 and spec is not None and spec.masks_source:
        fits = fits and mask.shape == (rows, length)
    if not fits:
        raise Unsupported("encoder outputs of other rows or lengths than the text or the mask")


def check_model(model: Any) -> None:
    """Raise Unsupported if fastgen runs no call of this model, whatever its arguments."""
    if (reason := replaced()) is not None:
        raise Unsupported(reason)
    if not is_listed(model) and (reason := reason_not_supported(model)) is not None:
        raise Unsupported(reason)
    if model.device.type == "meta":
        raise Unsupported("the model's first weights are offloaded")
    if compat.reorders_its_cache(model):
        raise Unsupported(f"{type(model).__name__} reorders its cache itself")
    if (reason := why_compiled(model)) is not None:
        raise Unsupported(reason)
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        raise Unsupported("the model lies on several devices")


FEW, SHORT = 2, 64
"""Maximum numbers of new tokens and of prompt tokens of a call that is too short to gain.

They hold on a CPU for decoder-only models with one row per sentence: setup then takes longer than
the decode steps save. Longer prompts gain because transformers' cache copies its whole content in
every step. Encoder-decoder models gain from their first token on.
"""


def _reason_too_few(model: Any, input_ids: Tensor, new_tokens: int) -> str | None:
    short = not model.config.is_encoder_decoder and input_ids.numel() <= SHORT
    if new_tokens > 1 and not (new_tokens <= FEW and short and input_ids.device.type == "cpu"):
        return None
    return f"at most {new_tokens} new tokens, too few to gain"


def _reason_not_to_share(
    model: Any, input_ids: Tensor, config: Any, kwargs: dict[str, Any], beams: int
) -> str | None:
    if not config.use_cache:
        return "use_cache=False"
    if kwargs.get("encoder_outputs") is not None and not model.config.is_encoder_decoder:
        return "encoder outputs are given to a decoder"
    cache = compat.cache_of(kwargs)
    if (reason := _of_another_kind(cache)) is not None:
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
    if (user_code := _reads_rows(model)) is not None:
        return f"{user_code} may look at rows, or at the cache"
    longest = _longest(model, input_ids, config, kwargs)
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
        windows = [layer.sliding_window for layer in parts_of(cache)[0].layers if layer.is_sliding]
        if windows and attentions:
            return "output_attentions=True with a sliding window"
        # The shared cache keeps the whole text, which pays only if a sentence has several rows.
        if windows and longest > min(windows):
            return "the text may outgrow the sliding window"
        return None
    if attentions:
        return "output_attentions=True"
    return _reason_not_to_redeem(model, kwargs)


def _reason_of_family(
    model: Any, method: Method | None, input_ids: Tensor, config: Any, kwargs: dict[str, Any],
    beams: int,
) -> str | None:  # fmt: skip
    """Return why a call of a family without a spec does not share, or None if it does.

    Its first call runs both ways, which needs calls that depend on nothing but their arguments.
    """
    if method is not None:
        return f"model type {model.config.model_type!r} has no spec"
    if compat.is_user_provided(cache := compat.cache_of(kwargs)):
        return user_cache.IS_USER_PROVIDED
    windows = [layer.sliding_window for layer in parts_of(cache)[0].layers if layer.is_sliding]
    if windows and _longest(model, input_ids, config, kwargs) > min(windows):
        return "the text may outgrow the sliding window"
    if config.return_dict_in_generate and (config.output_hidden_states or config.output_attentions):
        return "hidden states or attentions are returned"
    return draws(model) or verdict(model, key_of(model, beams, kwargs)) or None


def _of_another_kind(cache: Any) -> str | None:
    """Return why a cache is not of the kind that `generate` makes by default, or None if it is."""
    for part in parts_of(cache) or [cache]:
        if type(part) is not DynamicCache:
            return f"the cache is a {type(part).__name__}"
        if part.offloading:
            return "the cache is offloaded"
        layers: list[Any] = part.layers
        for layer in layers:
            if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
                return f"the cache has a {type(layer).__name__}"
    return None


def _longest(model: Any, input_ids: Tensor, config: Any, kwargs: dict[str, Any]) -> int:
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


def _reason_not_to_redeem(model: Any, kwargs: dict[str, Any]) -> str | None:
    """Return why the model's modules cannot resolve placeholders, or None if they can."""
    if kept_of(model, SharedCacheRefusal) is not None:
        return computes_alone(model)
    if has_own_attention(model):
        return None  # its modules never get placeholders
    if not engine.is_applied("transformers.attention"):
        return "transformers.attention is not in place"
    for part in configs_of(model):
        if (reason := fused_decoder.not_known(model, part)) is not None:
            return reason
    if kwargs.get("mm_encoder_outputs"):
        return "images or videos are given"
    position_ids = kwargs.get("position_ids")
    if position_ids is not None and position_ids.dim() > 2:
        return "multimodal position ids"
    return None


def _reason_not_to_drop(
    input_ids: Tensor,
    processors: Any,
    criteria: Any,
    config: Any,
    kwargs: dict[str, Any],
    samples: int,
) -> str | None:
    if config.do_sample:
        return "sampling draws for the whole batch"
    if samples > 1:
        return "several sequences per sentence"
    if config.return_dict_in_generate:
        return "return_dict_in_generate=True"
    if kwargs.get("streamer") is not None:
        return "a streamer is set"
    cache = compat.cache_of(kwargs)
    if compat.is_user_provided(cache):
        return user_cache.IS_USER_PROVIDED
    if cache is not None and (reason := _of_another_kind(cache)) is not None:
        return reason
    if (name := _not_by_rows(kwargs, input_ids.shape[0])) is not None:
        return f"{name} has no entry for each row"
    name = batchwise_processor(processors) or unknown_criterion(criteria)
    return None if name is None else f"{name} may look at the whole batch"


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


def _looks_at_rows(model: Any) -> str | None:
    """Return why unknown code in a model's modules may depend on the rows of the batch, or None."""
    for module in captured_module_step.of_steps(model):
        kind, part = type(module), module is not model  # the model's class may be a user's own
        if part and not _is_by_rows(kind):
            return f"{name_of(module)} may look at the whole batch"
        if (user_code := reads_rows(module)) is not None:
            return f"{user_code} may look at the whole batch"
        if part and not (is_toolkits(kind.forward) or kind.__module__.startswith("peft.")):
            return f"a replaced forward of a {kind.__name__} may look at the whole batch"
    return None


@functools.cache
def _is_by_rows(kind: type[nn.Module]) -> bool:
    """Return whether modules of a class process each row independently of the others."""
    return kind.__module__.startswith(("torch.nn.", "transformers.", "peft.", "fastgen."))


def _not_by_rows(kwargs: dict[str, Any], rows: int) -> str | None:
    """Return the name of a model argument from which rows cannot be removed, or None."""
    for name, value in kwargs.items():
        if isinstance(value, Tensor) and (
            value.shape[:1] != (rows,) or (name == "position_ids" and value.dim() > 2)
        ):
            return name
    # Without a cache the model reads the images again in every step.
    images = not kwargs["use_cache"] and kwargs.get("mm_encoder_outputs")
    return "mm_encoder_outputs" if images else None
