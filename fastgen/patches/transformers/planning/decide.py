"""The plan of a call: whether and how fastgen runs one of transformers' decoding loops.

The decision is made once, before the call has any effect.
"""

from typing import Any, Literal

from torch import Tensor

from fastgen.decoding.plan import Plan, Unsupported
from fastgen.models.build import int8_step
from fastgen.models.build.equivalence_check import by_modules
from fastgen.models.build.introspection import NotFused
from fastgen.models.cuda_graphs import graph, replay
from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.models.runtime.native.multistep_job import why_not_in_c
from fastgen.models.specs.registry import spec_of
from fastgen.patches.engine import engine
from fastgen.patches.generation_call import call_of
from fastgen.patches.transformers import CACHES, TOOLKIT, compat, part_of
from fastgen.patches.transformers.generate import captured_module_step, first_tokens, fused_decoder
from fastgen.patches.transformers.generate.legacy_search import Method, method_of
from fastgen.patches.transformers.planning import cached_prompt, common_prompt, first_call, images
from fastgen.patches.transformers.planning.row_removal import looks_at_rows, reason_not_to_drop
from fastgen.patches.transformers.planning.sharing import (
    MODULES_CANNOT,
    OUTGROWN,
    draws,
    has_own_attention,
    longest_text,
    not_shared,
    outgrows_window,
    reason_not_to_resolve,
    reason_not_to_share,
    reason_of_family,
    without_static,
)
from fastgen.patches.transformers.planning.supported import check_call, check_model, check_source
from fastgen.patches.transformers.unlisted.families import (
    is_listed,
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
    check_source(model, input_ids, kwargs)
    _check_canary(model, loop, config, kwargs)
    kwargs = without_static(model, config, kwargs)
    left_off: list[str] = []
    reason = _reason_not_to_know(model, method) or reason_not_to_share(
        model, input_ids, config, kwargs, beams
    )
    family = None
    if reason is None and not is_listed(model):
        reason, family = reason_of_family(model, method, input_ids, config, kwargs, beams)
    shares_prompt = reason is None and method != "contrastive search"
    common = (
        common_prompt.common_tokens(model, input_ids, config, kwargs, beams) if shares_prompt else 0
    )
    few, reuses = (
        None,
        shares_prompt and cached_prompt.may_use(model, input_ids, config, kwargs, beams),
    )
    if reason is None and beams == 1 and method is None and not drafts:
        few = _reason_too_few(model, input_ids, config.max_length - input_ids.shape[1])
        reason = None if common or reuses else few
    if reason is not None:
        left_off.append(not_shared(reason))
    shared = not left_off
    step, new_tokens = None, config.max_length - input_ids.shape[1]
    steps = new_tokens > 1 or drafts or method is not None or has_own_attention(model)
    if shared:
        packs = not (common or drafts or method is not None or has_own_attention(model))
        step, notes = (
            _step_of(model, input_ids, config, kwargs, packs)
            if steps or common or reuses
            else (None, [])
        )
        left_off += notes if steps else []
        if (
            reason_not := _reason_of_step(model, step, input_ids, config, kwargs, beams)
        ) is not None:
            step, shared, left_off = None, False, [not_shared(reason_not), *left_off]
    common = common if common_prompt.supports(step, kwargs) else 0
    readable = step if shared and reuses else None
    cached, keeps_prefix = cached_prompt.use_of(model, readable, input_ids, config, kwargs, beams)
    common, sentences = max(common, cached), input_ids.shape[0] // beams
    if few is not None and shared and not (common or keeps_prefix):
        shared, step, left_off = False, None, [not_shared(few)]
    samples = beams if loop == "sample" and method is None else 1
    request = call_of(model).suspension
    spec = spec_of(model.config)
    reason = reason_not_to_drop(
        input_ids, processors, criteria, config, kwargs, samples,
        frozenset() if spec is None else spec.prompts_only,
        request is not None and request.draws_apart,
    )  # fmt: skip
    if reason is None and not is_listed(model):
        reason = f"model type {model.config.model_type!r} has no spec"
    may_drop = reason is None and new_tokens > 1
    if step is None and ((shared and beams > 1) or may_drop):
        dropout = draws(model)
        if shared and beams > 1 and dropout is not None:
            shared = False
            left_off.append(not_shared(dropout))
        if may_drop:
            reason = dropout or looks_at_rows(model)
    elif step is not None and step.called and may_drop:
        reason = looks_at_rows(model)
    if reason is not None and sentences > 1:
        left_off.append(f"finished sentences stay in the batch: {reason}")
    graphs = (
        shared
        and graph.enabled(input_ids)
        and new_tokens > (captured_module_step.WORTH if step is None else replay.WORTH)
    )
    if (
        graphs
        and (reason_not := reason_not_to_capture(model, method, config, kwargs, step)) is not None
    ):
        graphs = False
        left_off.append(replay.not_captured(reason_not))
    if refused := int8_step.refusal(step):
        left_off.append(refused)
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
        int8=int8_step.is_requested() and not refused,
        common=common,
        cached=cached,
        keeps_prefix=keeps_prefix,
        apart=step is not None
        and common > 0
        and sentences > 1
        and common_prompt.is_kept_apart(step, len(input_ids), config),
        family=family,
    )
    return plan, step


def _step_of(
    model: Any, input_ids: Tensor, config: Any, kwargs: dict[str, Any], packs: bool
) -> tuple[DecoderStep | None, list[str]]:
    """Return the fused decode step of a call, and notes why there is none.

    Args:
        packs: Whether it may be left to the model's modules until its weights are packed.
    """
    longest = longest_text(model, input_ids, config, kwargs)
    try:
        step = fused_decoder.step(model, config, kwargs, longest)
        new_tokens = config.max_length - input_ids.shape[1]
        return first_call.packed(model, step, input_ids, new_tokens) if packs else step, []
    except NotFused as reason:
        return None, [by_modules(reason)]


def _reason_of_step(
    model: Any, step: DecoderStep | None, input_ids: Tensor, config: Any, kwargs: dict[str, Any],
    beams: int,
) -> str | None:  # fmt: skip
    """Return why a call does not share keys and values with these steps, or None if it does."""
    if beams > 1:
        return MODULES_CANNOT if step is None and has_own_attention(model) else None
    cache = compat.cache_of(kwargs)
    if compat.is_user_provided(cache) or (step is not None and not why_not_in_c(step)):
        return None
    longest = longest_text(model, input_ids, config, kwargs)
    return OUTGROWN if outgrows_window(cache, longest) else None


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
    reason = reason_not_to_resolve(model, kwargs) or images.reason_not_to_capture(kwargs)
    if reason is not None:
        return reason
    try:
        captured_module_step.check(model, config, kwargs)
    except NotFused as reason_not:
        return str(reason_not)
    return None
