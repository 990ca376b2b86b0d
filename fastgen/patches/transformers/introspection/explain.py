"""`fastgen.explain`: what a call of `generate` would run, and the size of its KV cache.

The model does not run: transformers' own `generate` prepares the call (`prepared`), and `decide`
plans it.
"""

from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from transformers import DynamicCache, StaticCache

from fastgen import config
from fastgen.decoding.loop import backend_type_of
from fastgen.decoding.plan import Plan, Unsupported
from fastgen.models.build.int8_step import int8_bytes
from fastgen.models.layers import linear
from fastgen.models.memory import budget
from fastgen.models.routing import routes
from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.models.runtime.early_exit import early_exit
from fastgen.models.runtime.head_bounds import bytes_of_copies, why_no_bounds
from fastgen.models.specs.registry import spec_of
from fastgen.ops import linear as linear_ops
from fastgen.patches.engine import engine
from fastgen.patches.engine.status import readable
from fastgen.patches.transformers import compat
from fastgen.patches.transformers.bild import bild, bild_call
from fastgen.patches.transformers.cache.shared_cache import held, parts_of
from fastgen.patches.transformers.drafting import drafting, prompt_lookup
from fastgen.patches.transformers.generate import legacy_search
from fastgen.patches.transformers.generate.loop_call import Call
from fastgen.patches.transformers.generate.module_stepper import ModuleStepper
from fastgen.patches.transformers.generate.searches import decoding_of
from fastgen.patches.transformers.introspection.prepared import (
    Prepared,
    generates_segments,
    prepare,
    without_wrappers,
)
from fastgen.patches.transformers.planning import small_call
from fastgen.patches.transformers.planning.decide import decide
from fastgen.patches.transformers.planning.sharing import held_before


@dataclass(frozen=True)
class Linears:
    """How linear layers would run.

    Attributes:
        routed: Number of layers whose product runs in C where that is faster for its number of
            rows.
        packed: Whether some are, so that their weights are copied into the layout of that product.
        packed_bytes: Maximum size of these copies in bytes. They are kept between calls.
        reason: Why no layer is routed; None if some are.
        by: Which product runs, by number of rows.
        shortage: Why there is not enough memory for the missing copies; None if there is.
    """

    routed: int = 0
    packed: bool = False
    packed_bytes: int = 0
    reason: str | None = None
    by: str = ""
    shortage: str | None = None

    def __str__(self) -> str:
        if self.reason is not None:
            return f"torch's own: {self.reason}"
        shortage = f"; not all are packed: {self.shortage}" if self.shortage else ""
        copies = f"packed copies of at most {readable(self.packed_bytes)}"
        return f"{self.routed} {self.by}, {copies}{shortage}"


@dataclass(frozen=True)
class Explanation:
    """What a call of `generate` would run. ``print(explanation)`` shows everything.

    Attributes:
        call: Class name of the model whose `generate` is called.
        plan: What fastgen would run; None if transformers' own loop would run.
        reason: Why transformers' own loop would run; None with a plan.
        selection: How the tokens of decode steps would be selected; empty without a plan
            and for big-little decoding.
        kv_bytes: Size in bytes of keys and values at the maximum length. None without a plan, and
            for caches that are neither dynamic nor static.
        stock_kv_bytes: The same with transformers' own cache.
        linears: How linear layers would run, with or without a plan.
        notes: Features that the plan disables, with reasons, and other remarks.
    """

    call: str
    plan: Plan | None
    reason: str | None
    kv_bytes: int | None
    stock_kv_bytes: int | None
    linears: Linears
    notes: tuple[str, ...] = ()
    selection: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as plain dicts and tuples, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        plan, lines = self.plan, list[tuple[str, str]]()
        if plan is None:
            lines.append(("loop", f"transformers' own: {self.reason}"))
        else:
            rows = f"{plan.sentences} sentences x {plan.beams} rows"
            lines.append(("loop", f"fastgen's {plan.method}, {rows}"))
            shared = "fastgen's, one per sentence" + (
                ", shared by its rows" if plan.beams > 1 else ""
            )
            lines.append(("cache", shared if plan.shared else "transformers' own, if any"))
            if plan.cached:
                lines.append(("prompt", f"the first {plan.cached} tokens are in the prefix cache"))
            if plan.common > plan.cached:
                once = "run and are kept once" if plan.apart else "run once"
                lines.append(("prompt", f"the first {plan.common} tokens, alike in all, {once}"))
            steps = "from the weights" if plan.fused else "through the model's own modules"
            lines.append(("decode steps", steps + (", as CUDA graphs" if plan.graphs else "")))
            if plan.int8:
                lines.append(("", "on weights rounded to int8: outputs differ"))
            if plan.not_in_c:
                lines.append(("", f"as torch operations, not in C: {plan.not_in_c}"))
            if self.selection:
                lines.append(("token selection", self.selection))
            if plan.sentences > 1:
                lines.append(
                    ("finished sentences", "leave the batch" if plan.drop else "stay in the batch")
                )
        if self.kv_bytes is not None and self.stock_kv_bytes is not None:
            ours, stock = readable(self.kv_bytes), readable(self.stock_kv_bytes)
            lines.append(
                ("keys and values", f"at most {ours}, with transformers' own cache {stock}")
            )
        lines.append(("linear layers", str(self.linears)))
        lines += [("note", note) for note in self.notes]
        return "\n".join(
            [f"{self.call}.generate", *(f"  {name:<19} {text}" for name, text in lines)]
        )


def explain(model: Any, **generate_kwargs: Any) -> Explanation:
    """Return what ``model.generate(**generate_kwargs)`` would run, without running it.

    Args:
        model: A transformers model, possibly wrapped by PEFT or torch.compile.
        generate_kwargs: Arguments of `generate`.

    Raises:
        TypeError: The model cannot generate.
        Exception: Whatever `generate` raises for these arguments before its decode loop.
    """
    if not callable(getattr(model, "generate", None)):
        raise TypeError(f"{type(model).__name__} has no generate")
    bare = without_wrappers(model)
    linears = _linears(bare)
    two_models = _asked(bare, generate_kwargs)
    try:
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise Unsupported("PEFT's prompt learning prepares the call in a way of its own")
        if two_models is not None:
            _check_patch("transformers.sample")
            return _of_two_models(bare, two_models, linears, generate_kwargs)
        prepared = prepare(bare, model, generate_kwargs)
        if small_call.is_too_small(bare, (), generate_kwargs):
            raise Unsupported(small_call.REASON)
        with torch.no_grad(), _as_in_generate(bare):
            plan, step = decide(
                bare,
                prepared.loop,
                prepared.input_ids,
                prepared.logits_processor,
                prepared.stopping_criteria,
                prepared.config,
                prepared.kwargs,
            )
            call = _call(bare, prepared)
            drafts = _own_drafts(call, prepared.loop, step)
            bounds = _bounds(call, prepared.loop, plan, step)
            selection = _selection(call, prepared.loop, plan, bool(drafts))
        if legacy_search.method_of(prepared.config) is not None:
            _check_patch("transformers.generation_mode")
        note = _check_patch(
            {"beam": "transformers.beam_search", "sample": "transformers.sample"}[prepared.loop]
        )
    except Unsupported as unsupported:
        return Explanation(type(bare).__name__, None, unsupported.reason, None, None, linears)
    ours, stock = _kv_bytes(bare, prepared, plan)
    notes = (*plan.left_off, *(each for each in (drafts, bounds, note) if each))
    if generates_segments(bare):
        notes = (
            "this is the first segment's first attempt: each of them comes to a loop by itself",
            *notes,
        )
    return Explanation(type(bare).__name__, plan, None, ours, stock, linears, notes, selection)


def _as_in_generate(*models: Any) -> ExitStack:
    """Route the layers of models, as `generate` does for a call."""
    stack = ExitStack()
    for model in models if engine.is_applied("transformers.generate") else ():
        if model is not None:
            stack.enter_context(routes.routed(model, spec_of(model.config)))
    return stack


def _asked(bare: Any, kwargs: dict[str, Any]) -> bild.DraftingRequest | None:
    """Remove big-little decoding from a call's arguments; return its request, or None."""
    if (options := bild_call.options_of(bare, kwargs)) is None:
        return None
    request = bild.DraftingRequest(bare, options)
    request.note_inputs(kwargs, kwargs.get("generation_config"))
    return request


def _of_two_models(
    bare: Any, request: bild.DraftingRequest, linears: Linears, kwargs: dict[str, Any]
) -> Explanation:
    """Return what a call with big-little decoding would run; raises what the call would raise."""
    try:
        prepared, small = prepare(bare, bare, kwargs), request.options.small
    except Unsupported as unsupported:
        raise ValueError(
            f"big-little decoding of {type(bare).__name__}: {unsupported.reason}"
        ) from None
    call = _call(bare, prepared)
    bild.check(call, request)
    with torch.no_grad(), _as_in_generate(bare, small):
        plan, step = bild.planned(call, prepared.loop)
        if request.options.layers is not None:
            early_exit(step, request.options.layers)  # raises if there is no such layer
        models = [(bare, prepared, plan)]
        if small is not None:
            small_kwargs = {
                "generation_config": bild.settings_of_small(prepared.config),
                **bild.inputs_of_small(request),
            }
            prepared_small = prepare(small, small, small_kwargs)
            models.append((small, prepared_small, bild.planned(_call(small, prepared_small))[0]))
    sizes = [_kv_bytes(*each) for each in models]
    ours, stock = (None if None in each else sum(each) for each in zip(*sizes, strict=True))
    drafts = (
        f"{type(small).__name__} drafts"
        if small is not None
        else f"the first {request.options.layers} layers draft"
    )
    if prepared.loop == "beam":
        plan = replace(plan, drop=False)  # sentences stay in the batch until the end
    else:
        plan = replace(plan, method="big-little decoding")
    return Explanation(
        type(bare).__name__, plan, None, ours, stock, linears, (drafts, *plan.left_off)
    )


def _call(model: Any, prepared: Prepared) -> Call:
    kwargs = dict(prepared.kwargs)
    synced, streamer = kwargs.pop("synced_gpus"), kwargs.pop("streamer")
    criteria = prepared.stopping_criteria
    return Call(
        model,
        prepared.input_ids,
        prepared.logits_processor,
        criteria,
        prepared.config,
        synced,
        kwargs,
        streamer,
    )


class _InC(ModuleStepper):
    """Stand-in for the stepper of a plan whose decode steps run in C."""

    begin_steps = None


def _own_drafts(call: Call, loop: Literal["beam", "sample"], step: DecoderStep | None) -> str:
    """Return the note on drafts of the model itself; empty if there are none."""
    greedy = loop == "sample" and legacy_search.method_of(call.config) is None
    if step is None or not greedy or drafting.why_not_self(call, step):
        return ""
    where = "" if config.settings().self_draft == "on" else " where it is measured to be faster"
    size = readable(int8_bytes(step))
    return f"the model drafts by itself on weights in int8, copies of {size}{where}"


def _bounds(
    call: Call, loop: Literal["beam", "sample"], plan: Plan, step: DecoderStep | None
) -> str:
    """Return the note on bounds of the logits; empty if they never decide."""
    greedy = loop == "sample" and legacy_search.method_of(call.config) is None
    greedy = greedy and not call.config.do_sample and not plan.not_in_c
    if step is None or not greedy or why_no_bounds(step, plan.rows):
        return ""
    size = readable(bytes_of_copies(step))
    return f"the head in int8 rules most tokens out, copies of {size} after enough steps"


def _selection(call: Call, loop: Literal["beam", "sample"], plan: Plan, drafts_itself: bool) -> str:
    """Return how the decode backend of a plan would select tokens."""
    kind = _InC if plan.fused and not plan.not_in_c else ModuleStepper
    stepper: Any = kind(call.model, plan, call.input_ids, call.config, dict(call.model_kwargs))
    if kind is _InC and loop == "sample":
        drafts = prompt_lookup.drafting_of(call, None)
        stepper.drafting = drafts or drafts_itself or None
    return backend_type_of(decoding_of(loop, call, stepper).search, stepper).description


def _check_patch(name: str) -> str:
    """Return the note of `status` on an applied patch.

    Raises:
        Unsupported: The patch is not applied, or disabled in this context.
    """
    row = engine.status()[name]
    if row.state != "applied":
        raise Unsupported(f"{name} is {row.state}: {row.reason}")
    if engine.is_disabled():
        raise Unsupported("inside fastgen.disabled()")
    return row.reason


def _linears(model: Any) -> Linears:
    row = engine.status()["transformers.generate"]
    if row.state != "applied":
        return Linears(reason=f"transformers.generate is {row.state}: {row.reason}")
    if (reason := linear.reason_off(model)) is not None:
        return Linears(reason=reason)
    survey = routes.survey(model)
    if not survey.layers:
        return Linears(reason="none is a layer of torch or transformers with enough outputs")
    is_asked = config.settings().linear == "packed" and config.settings().memory is None
    shortage = (
        budget.shortage_now(survey.missing_bytes) if survey.missing_bytes and not is_asked else None
    )
    return Linears(
        survey.layers,
        True,
        survey.packed_bytes,
        by=linear_ops.described(model.dtype),
        shortage=shortage,
    )


def _kv_bytes(model: Any, prepared: Prepared, plan: Plan) -> tuple[int, int] | tuple[None, None]:
    """Return the KV cache sizes in bytes at the maximum length: the plan's and transformers' own.

    Both are None for caches that are neither dynamic nor static.
    """
    text = model.config.get_text_config(decoder=True)
    layers: int = getattr(text, "num_decoder_layers", None) or text.num_hidden_layers
    # Falcon's attribute names.
    one_head = getattr(text, "multi_query", False) and not getattr(
        text, "new_decoder_architecture", False
    )
    heads: int = (
        1 if one_head else getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    )
    dim: int = (
        getattr(text, "head_dim", None)
        or getattr(text, "d_kv", None)
        or text.hidden_size // text.num_attention_heads
    )
    entry = 2 * heads * dim * _dtype(model).itemsize
    prompt, source = prepared.input_ids, 0
    if model.config.is_encoder_decoder:
        source = prepared.kwargs["encoder_outputs"][0].shape[1]
        if (spec := spec_of(model.config)) is not None and spec.prefix_lm:
            source -= 1  # source and target are one text, whose start token does not run
    elif prepared.kwargs.get("inputs_embeds") is not None:
        prompt = prepared.kwargs["inputs_embeds"]
    cache = compat.cache_of(prepared.kwargs)
    # The last token is selected but never run through the model.
    prefix = prompt.shape[1] + held_before(
        model, prepared.input_ids, prepared.config, prepared.kwargs
    )
    steps = prepared.config.max_length - prepared.input_ids.shape[1] - 1
    parts = parts_of(cache)
    if not all(isinstance(part, (DynamicCache, StaticCache)) for part in parts):
        return None, None
    texts = zip(parts, (prefix + steps, source), strict=False)
    stock = plan.rows * sum(_held(part, layers, length) for part, length in texts) * entry
    if not plan.shared:
        return stock, stock
    slots = plan.sentences * (source + prefix + steps * plan.beams)
    if plan.apart:
        slots -= (plan.sentences - 1) * plan.common
    return layers * slots * entry, stock


def _held(cache: Any, layers: int, length: int) -> int:
    """Return the tokens that a dynamic or static cache holds of a text, summed over its layers."""
    present: list[Any] = cache.layers
    if isinstance(cache, StaticCache):
        return sum(layer.max_cache_len for layer in present)
    return (
        sum(held(layer, length) for layer in present) if len(present) == layers else layers * length
    )


def _dtype(model: Any) -> torch.dtype:
    kind = model.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else model.dtype
