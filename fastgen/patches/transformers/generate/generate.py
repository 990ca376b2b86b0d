"""Replacements of transformers' `generate` and its two decoding loops, built on `decoding`."""

import functools
import inspect
import time
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from fastgen.context import assigned
from fastgen.decoding.loop import backend_of, decode
from fastgen.decoding.plan import Unsupported
from fastgen.decoding.speculative.bild_options import Options
from fastgen.models.build.introspection import NotFused
from fastgen.models.routing.routes import routed, withdraw
from fastgen.models.specs.registry import spec_of
from fastgen.patches.engine import engine
from fastgen.patches.generation_call import (
    GenerationCall,
    call_of,
    requesting,
)
from fastgen.patches.transformers import compat
from fastgen.patches.transformers.bild import bild, bild_call, bild_resting
from fastgen.patches.transformers.drafting import prompt_lookup
from fastgen.patches.transformers.drafting.drafting import drafting_of
from fastgen.patches.transformers.encoders import unpadded_encoder
from fastgen.patches.transformers.generate import legacy_loops, legacy_search
from fastgen.patches.transformers.generate.loop_call import Call
from fastgen.patches.transformers.generate.resolve_setting import setting_of
from fastgen.patches.transformers.generate.searches import decoding_of
from fastgen.patches.transformers.generate.shared_stepper import SharedStepper
from fastgen.patches.transformers.generate.stopping_criteria import (
    normalized_config,
)
from fastgen.patches.transformers.introspection import parity
from fastgen.patches.transformers.planning import first_call, small_call
from fastgen.patches.transformers.planning.decide import decide, method_named
from fastgen.patches.transformers.streaming import beam_streamer, split, suspend
from fastgen.patches.transformers.streaming.suspend import SuspendedDecode

_Original = Callable[..., Any]


def generate(original: _Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace `GenerationMixin.generate`.

    For the call, the model's linear layers run on their fastest route. In parity mode the call runs
    both ways and the outputs are compared. Within a loop over batches, the output may have been
    computed with those of other batches.
    """
    upcoming = call_of(self).upcoming
    if upcoming is not None and (output := upcoming.output_of(args, kwargs)) is not None:
        return output
    suspend.note_call(self)
    if kwargs.get("custom_generate") is not None:
        of = type(self).__name__, "custom_generate"
        engine.fallback("transformers.generate", "custom_generate runs a loop of its own", of)
    if len(args) > 1:  # pass them by name, so that options are found
        names = list(inspect.signature(original).parameters)[2:]
        args, kwargs = args[:1], kwargs | dict(zip(names, args[1:], strict=False))
    options = bild_call.options_of(self, kwargs)
    run = functools.partial(_as_asked, options)
    if parity.wanted():
        if options is None or (options.lossless and not setting_of(self, kwargs, "do_sample")):
            return parity.both_ways(run, original, self, *args, **kwargs)
        engine.compared(
            "run once: big-little decoding changes the output, "
            "without lossless=True or with sampling"
        )
    return run(original, self, *args, **kwargs)


def _as_asked(
    options: Options | None, original: _Original, self: Any, *args: Any, **kwargs: Any
) -> Any:
    if options is None:
        # This may be a call within another one of the same model.
        with requesting(self, drafting=None):
            return _accelerated(original, self, *args, **kwargs)
    request = bild.DraftingRequest(self, options)
    with requesting(self, drafting=request):
        output = _accelerated(request.noting(original), self, *args, **kwargs)
    if not request.decoded:
        raise ValueError(
            "big-little decoding was asked for, and generate ran another way to decode, "
            "which its other arguments or "
            f"the generation config of {type(self).__name__} ask for"
        )
    return output


def _accelerated(original: _Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    spec, drafting = spec_of(self.config), call_of(self).drafting
    if small_call.is_too_small(self, args, kwargs):
        engine.note_skipped("transformers.generate", small_call.REASON)
        with engine.disabled():
            return original(self, *args, **kwargs)
    resolves = kwargs.get("custom_generate") is None  # it interprets the options itself
    skips = unpadded_encoder.skips_padding(
        self, kwargs, tokens_alone=drafting is not None and not drafting.options.beams
    )
    source = prompt_lookup.source_of(kwargs, args)
    with (
        engine.running("generate"),
        requesting(self, resolves_legacy_modes=resolves, skips_padding=skips, source=source),
        routed(self, spec) as layers,
    ):
        if layers:
            engine.hit("transformers.generate")
        return split.generate(original, self, *args, **beam_streamer.wrapped(self, kwargs))


def compiled_call(original: _Original, self: Any, compile_config: Any) -> Any:
    """Replace `PreTrainedModel.get_compiled_call`.

    The routes are removed first, so that Dynamo traces the model as it is outside of a call.
    """
    withdraw(self)
    engine.hit("transformers.compiled_call")
    return original(self, compile_config)


def beam_search(
    original: _Original,
    self: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    **model_kwargs: Any,
) -> Any:
    """Replace `GenerationMixin._beam_search`; unsupported calls run the original."""
    streamer = beam_streamer.followed_by(model_kwargs)
    if streamer is not None:
        del model_kwargs["streamer"]
    config, request = normalized_config("beam", generation_config, stopping_criteria), call_of(self)
    call = Call(
        self, input_ids, logits_processor, stopping_criteria, config, synced_gpus, model_kwargs,
        streamer, request.scored, request.wanted, request.on_tokens,
    )  # fmt: skip
    stock = lambda: original(  # noqa: E731
        self,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        synced_gpus,
        **model_kwargs,
    )
    with _nothing_else(self):
        return _run("beam", call, stock)


def _nothing_else(model: Any) -> assigned[GenerationCall]:
    """Return a context manager in which the requests of the running call do not apply.

    A logits processor or stopping criterion may call `generate` within the loop.
    """
    return requesting(model, scored=False, wanted=None, on_tokens=None)


def sample(
    original: _Original,
    self: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Replace `GenerationMixin._sample`; unsupported calls run the original."""
    config = normalized_config("sample", generation_config, stopping_criteria)
    request = call_of(self)
    call = Call(
        self, input_ids, logits_processor, stopping_criteria, config, synced_gpus, model_kwargs,
        streamer, request.scored, request.wanted, request.on_tokens,
    )  # fmt: skip
    stock = lambda: original(  # noqa: E731
        self,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        synced_gpus,
        streamer,
        **model_kwargs,
    )
    with _nothing_else(self):
        return _run("sample", call, stock)


def _run(loop: Literal["beam", "sample"], call: Call, stock: Callable[[], Any]) -> Any:
    """Plan a call, then run it, or run the toolkit's loop and count the fallback reason.

    Args:
        stock: Runs the toolkit's loop.

    Returns:
        The output of `generate`; the `SuspendedDecode` if the call suspends; the `Call` if the
        caller requested only that.
    """
    method = legacy_search.method_of(call.config)
    request = call_of(call.model)
    if request.captures_call_only:
        return call
    if call.config.is_assistant:  # the call that it assists is counted
        return stock()
    drafting = request.drafting
    if drafting is not None and method is not None:
        raise ValueError(f"{method} does not go with big-little decoding")
    if drafting is not None and loop == "beam":
        return _drafted_beams(call, drafting)
    rests, returned = (
        drafting is not None and bild_resting.rests(call, drafting),
        call.config.return_dict_in_generate,
    )
    if drafting is not None and not rests:
        return bild.decode(call, drafting)
    start = time.perf_counter()
    if rests:
        call = bild_resting.resting(call)
    name = {"beam": "transformers.beam_search", "sample": "transformers.sample"}[loop]
    widened = legacy_loops.widened(call) if method == "contrastive search" else call
    try:
        plan, step = decide(
            call.model,
            loop,
            widened.input_ids,
            call.logits_processor,
            call.stopping_criteria,
            call.config,
            widened.model_kwargs | {"synced_gpus": call.synced_gpus, "streamer": call.streamer},
        )
    except Unsupported as unsupported:
        if drafting is not None:
            return bild.decode(call, drafting)  # it raises with what it needs
        if method is not None:  # transformers would run another method
            raise ValueError(
                f"{method} of {type(call.model).__name__}: {unsupported.reason}"
            ) from None
        label = type(call.model).__name__, method_named(loop, call.config)
        engine.fallback(name, unsupported.reason, label)
        return stock()
    if drafting is not None and step is None:
        return bild.decode(call, drafting)
    pauses, reason = (
        (False, None) if rests else suspend.decide(call.model, plan, step, call.stopping_criteria)
    )
    with engine.running(plan):
        model = legacy_loops.stepper(widened, plan, step)
        if isinstance(model, SharedStepper) and loop == "sample" and method is None and not rests:
            model.drafting = drafting_of(call, step, request.source)
        if loop == "sample" and method is None:
            compat.warn_of_compilation(call.model, call.config, call.model_kwargs)
        decoding = decoding_of(loop, call, model)
        backend = backend_of(decoding.search, model)
        with decoding.around():
            finished = decode(backend, model.prefill(), lambda: pauses and model.joinable)
    first_call.note_call(call.model)
    suspended = SuspendedDecode(name, backend, decoding.output, () if reason is None else (reason,))
    if drafting is not None:
        sequences, seconds = suspended.finish(), time.perf_counter() - start
        return bild_resting.of_large_alone(
            call, drafting, returned, sequences, model.report(), seconds
        )
    return suspended.finish() if finished else suspended


def _drafted_beams(call: Call, request: bild.DraftingRequest) -> Any:
    """Run a beam search whose decode steps a small model drafts."""
    model = bild.drafted(call, request)
    assistant = request.options.small
    with engine.running(model.plan), routed(assistant, spec_of(assistant.config)):
        decoding = decoding_of("beam", call, model)
        try:
            logits = model.prefill()
        except NotFused as reason:
            raise bild.not_proven(model, reason) from None
        backend = backend_of(decoding.search, model)
        decode(backend, logits)
    passes = model.passes
    engine.note_drafting(
        {
            "beam_steps": passes.steps,
            "large_calls": passes.large_calls,
            "small_calls": passes.small_calls,
        }
    )
    return SuspendedDecode("transformers.beam_search", backend, decoding.output).finish()
