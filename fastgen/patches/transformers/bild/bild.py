"""Big-little decoding: a small model drafts, and the large model verifies.

    model.generate(..., assistant_model=small, fallback_threshold=0.6, rollback_threshold=2.0)

`bild_call.options_of` removes the options from a call's arguments. The call then proceeds as usual
to the decode loop. There, `decode` calls `generate` of the small model with the same inputs,
captures the call at its own decode loop, and runs both models together.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import logits_process as lp
from transformers.generation import utils as gu

from fastgen.decoding.plan import Plan, Unsupported
from fastgen.decoding.speculative.adaptive_drafting import DraftTiming, timing_of
from fastgen.decoding.speculative.bild import Bild, Counts
from fastgen.decoding.speculative.bild_options import Options
from fastgen.decoding.speculative.policies import Drawn, Likeliest, Policy, Rejection
from fastgen.models.build.introspection import NotFused
from fastgen.models.routing.instance import toolkit_class
from fastgen.models.routing.routes import routed
from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.models.runtime.early_exit import early_exit
from fastgen.models.runtime.ragged_step import Span
from fastgen.models.specs.registry import spec_of
from fastgen.patches.engine import engine
from fastgen.patches.generation_call import requesting
from fastgen.patches.transformers import compat
from fastgen.patches.transformers.bild.drafted_beams import DraftedStepper
from fastgen.patches.transformers.cache.user_cache import IS_USER_PROVIDED
from fastgen.patches.transformers.generate.fused_decoder import FusedDecoder
from fastgen.patches.transformers.generate.logits_processors import (
    batchwise_processor,
    transforms_of,
)
from fastgen.patches.transformers.generate.loop_call import Call
from fastgen.patches.transformers.generate.report import note_served
from fastgen.patches.transformers.generate.shared_stepper import SharedStepper
from fastgen.patches.transformers.generate.stopping_criteria import stop_of, unknown_criterion
from fastgen.patches.transformers.planning import images
from fastgen.patches.transformers.planning.decide import decide
from fastgen.patches.transformers.planning.row_removal import looks_at_rows
from fastgen.patches.transformers.planning.supported import check_model

WIDTH = 2
"""Drafted tokens per step of a beam search, as a multiple of the number of beams."""

_OF_A_TEXT = (lp.RepetitionPenaltyLogitsProcessor, lp.EncoderNoRepeatNGramLogitsProcessor)
"""Processors that depend on one text and its inputs, but prevent rows from leaving the batch."""

_OF_ONE_TEXT = (lp.EncoderRepetitionPenaltyLogitsProcessor, lp.PrefixConstrainedLogitsProcessor)
"""Stateless processors that depend on the inputs of the whole batch; allowed for a single text."""


@dataclass
class DraftingRequest:
    """A call of `generate` that requests big-little decoding.

    Attributes:
        model: The large model.
        options: Options of the call.
        inputs: Arguments of `generate` other than settings, by name; None before the call.
        decoded: Whether the call has reached the decode loop.
    """

    model: Any
    options: Options
    inputs: dict[str, Any] | None = None
    decoded: bool = False

    def noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper around `generate` that records its inputs."""
        signature = inspect.signature(original)

        def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
            call = signature.bind(model, *args, **kwargs).arguments
            self.note_inputs(
                {"inputs": call.get("inputs")} | call.get("kwargs", {}),
                call.get("generation_config"),
            )
            return original(model, *args, **kwargs)

        return generate

    def note_inputs(self, given: Mapping[str, Any], config: Any) -> None:
        """Record the arguments of a call, except for settings of its generation config."""
        settings = config or GenerationConfig()
        self.inputs = {name: value for name, value in given.items() if not hasattr(settings, name)}


@dataclass
class BildDecoderOnlyOutput(gu.GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput` with counts for each text.

    Attributes:
        bild: Counts (B,) int64 by name: tokens, drafted, large_calls, small_calls, fallbacks,
            rollbacks (`fastgen.decoding.speculative.bild.Counts`).
    """

    bild: dict[str, Tensor] | None = None


@dataclass
class BildEncoderDecoderOutput(gu.GenerateEncoderDecoderOutput):
    """`GenerateEncoderDecoderOutput` with counts for each text.

    Attributes:
        bild: As in `BildDecoderOnlyOutput`.
    """

    bild: dict[str, Tensor] | None = None


def decode(call: Call, request: DraftingRequest) -> Any:
    """Run the decode loop of a call and return the value of `generate`.

    Raises:
        ValueError: The call has an unsupported setting; the message names it.
    """
    options, config = request.options, call.config
    request.decoded = True
    check(call, request)
    large = _FusedModel(call)
    small = (
        _FirstLayers(large, options.layers)
        if options.layers is not None
        else _Later(lambda: _small(call, request))
    )
    policy: Policy = Likeliest(0.0 if options.lossless else options.rollback)
    if config.do_sample:
        policy = Rejection() if options.lossless else Drawn(options.rollback)
    streamer, pad = call.streamer, compat.pad_token(config)
    bild = Bild(
        large=large,
        small=small,
        prompt=call.input_ids,
        stop=stop_of(call.stopping_criteria),
        transforms=transforms_of(
            call.logits_processor,
            lambda: call.model.config.get_text_config(decoder=True).vocab_size,
        ),
        policy=policy,
        pad=0 if pad is None else int(pad),
        fallback=options.fallback,
        vocabulary=None
        if options.small is None
        else call.model.get_output_embeddings().weight.shape[0],
        max_draft=options.max_draft,
        shared=options.small is None,
        paper_compat=options.paper_compat,
        timing=timing_for(call, options),
        on_tokens=None
        if streamer is None
        else lambda _, tokens: streamer.put(torch.tensor(tokens, dtype=torch.int64, device="cpu")),
    )
    plan = replace(large.stepper.plan, method="big-little decoding")
    large.stepper.plan = plan
    assistant = request.options.small
    with engine.running(plan):
        if assistant is None:
            sequences = bild.run()
        else:
            with routed(assistant, spec_of(assistant.config)):
                sequences = bild.run()
    if streamer is not None:
        streamer.end()
    note_served("transformers.sample", call.model, large.stepper.report())
    return returned(call, config.return_dict_in_generate, sequences, by_name(bild.counts))


def timing_for(call: Call, options: Options) -> DraftTiming | None:
    """Return the costs by which a call decides whether to draft; None if it always drafts."""
    by_default = options.lossless and not call.config.do_sample
    adaptive = by_default if options.adaptive is None else options.adaptive
    return (
        timing_of(call.model, options.small, options.layers, len(call.input_ids))
        if adaptive
        else None
    )


def returned(call: Call, as_dict: bool, sequences: Tensor, counts: dict[str, Tensor]) -> Any:
    """Return the value of `generate`, and add the counts to those of `status()`."""
    sums = torch.stack(list(counts.values())).sum(1)
    engine.note_drafting(
        dict(zip(counts, cast("list[int]", cast(Any, sums).tolist()), strict=True))
    )
    if not as_dict:
        return sequences
    kind = (
        BildEncoderDecoderOutput if call.model.config.is_encoder_decoder else BildDecoderOnlyOutput
    )
    return kind(sequences=cast(Any, sequences), bild=counts)


def check(call: Call, request: DraftingRequest) -> None:
    """Check a call and its small model for unsupported settings, as far as they are visible.

    Raises:
        ValueError: There is one; the message names it.
    """
    if not request.options.beams:
        _check_call(call)
    if request.options.small is not None:
        inputs_of_small(request)
        _check_small(request.options.small)


def drafted(call: Call, request: DraftingRequest) -> DraftedStepper:
    """Return the stepper of a beam search whose steps the small model drafts.

    Raises:
        ValueError: Decode steps of one of the models cannot run from its weights.
    """
    request.decoded = True
    plan, step = planned(call, "beam")
    small = _small(call, request).stepper
    return DraftedStepper(call, plan, step, small, WIDTH * plan.beams, request.options.beams)


def not_proven(model: DraftedStepper, reason: NotFused) -> ValueError:
    """Return the error to raise after one of the two models failed its equivalence check."""
    return _not_fused(model.model if model.fused is None else model.small.model, reason)


def by_name(counts: Sequence[Counts]) -> dict[str, Tensor]:
    """Return the counts of B texts as tensors (B,) int64, by name."""
    names = Counts.__dataclass_fields__
    return dict(
        zip(
            names,
            torch.tensor(
                [[getattr(each, name) for each in counts] for name in names],
                dtype=torch.int64,
                device="cpu",
            ),
            strict=True,
        )
    )


def _check_call(call: Call) -> None:
    config = call.config
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if config.return_dict_in_generate and getattr(config, name):
            raise ValueError(
                f"big-little decoding returns tokens and counts: {name}=True is not possible"
            )
    if (name := unknown_criterion(call.stopping_criteria)) is not None:
        raise ValueError(
            f"big-little decoding cannot tell for single tokens where a {name} ends a text"
        )
    several = call.input_ids.shape[0] > 1
    allowed = _OF_A_TEXT if several else (*_OF_A_TEXT, *_OF_ONE_TEXT)
    others = [
        processor for processor in call.logits_processor if toolkit_class(processor) not in allowed
    ]
    if (name := batchwise_processor(others)) is not None:
        why = "may look at the whole batch" if several else "may remember what it was asked before"
        raise ValueError(
            "big-little decoding asks logits processors of some texts at a time, "
            f"and of tokens that do not come to stay, but {name} {why}"
        )
    if several and call.streamer is not None:
        raise ValueError(
            f"a streamer follows one text, and the batch has {call.input_ids.shape[0]}"
        )


def planned(call: Call, loop: Literal["beam", "sample"] = "sample") -> tuple[Plan, DecoderStep]:
    """Return the plan and the fused decode step of a model.

    Args:
        call: The call of the model.
        loop: The decode loop.

    Raises:
        ValueError: The decode steps cannot run from the weights.
    """
    kwargs = call.model_kwargs | {"synced_gpus": call.synced_gpus}
    if compat.is_user_provided(compat.cache_of(kwargs)):
        raise ValueError(f"big-little decoding of {type(call.model).__name__}: {IS_USER_PROVIDED}")
    spec = spec_of(call.model.config)
    if spec is not None and any(
        kwargs.get(name) is not None and kwargs[name] != {} for name in spec.prompts_only
    ):
        raise ValueError(f"big-little decoding of {type(call.model).__name__}: {images.GIVEN}")
    try:
        plan, step = decide(
            call.model,
            loop,
            call.input_ids,
            call.logits_processor,
            call.stopping_criteria,
            call.config,
            kwargs,
            drafts=True,
        )
    except Unsupported as unsupported:
        raise ValueError(
            f"big-little decoding of {type(call.model).__name__}: {unsupported.reason}"
        ) from None
    if step is None:
        raise _not_fused(call.model, "; ".join(plan.left_off))
    if step.tokens > 1:
        raise _not_fused(call.model, f"each step runs {step.tokens} tokens of a text")
    if step.called and (reason := looks_at_rows(call.model)) is not None:
        raise _not_fused(call.model, reason)
    # Passes over drafts have varying lengths, so no CUDA graphs are captured.
    return replace(plan, graphs=False), step


def _not_fused(model: Any, reason: object) -> ValueError:
    return ValueError(
        "big-little decoding needs decode steps from the weights, "
        f"which run any tokens of any text; of {type(model).__name__}, {reason}"
    )


class _FusedModel:
    """A `decoding.speculative.bild.Model` that runs all its layers from the weights."""

    def __init__(self, call: Call) -> None:
        plan, step = planned(call)
        self.stepper = cast(SharedStepper, call.stepper(plan, step))

    def prefill(self) -> Tensor | None:
        if self.stepper.begin():
            return None
        logits = self.stepper.prefill()
        try:
            self.stepper.check_equivalence(logits)
        except NotFused as reason:
            raise _not_fused(self.stepper.model, reason) from None
        return logits

    @property
    def fused(self) -> FusedDecoder:
        assert self.stepper.fused is not None
        return self.stepper.fused

    def extend(self, spans: Sequence[Span]) -> Tensor:
        return self.fused.extend(spans)

    def keep(self, rows: Tensor) -> None:
        self.stepper.keep_cache(rows, rows)


class _FirstLayers:
    """A `decoding.speculative.bild.Model` of the large model's first layers, with its KV cache."""

    def __init__(self, whole: _FusedModel, layers: int) -> None:
        self.whole = whole
        step = whole.stepper.of_weights
        assert step is not None
        self.step = early_exit(step, layers)

    def prefill(self) -> None:
        """Do nothing: the first span of each text reruns its last prompt token up to the exit."""

    def extend(self, spans: Sequence[Span]) -> Tensor:
        return self.whole.fused.extend(spans, self.step)

    def keep(self, rows: Tensor) -> None:
        """Do nothing: the large model compacts the shared KV cache."""


class _Later:
    """A `decoding.speculative.bild.Model` that is created at its prefill."""

    def __init__(self, make: Callable[[], _FusedModel]) -> None:
        self._make = make
        self._made: _FusedModel | None = None

    def prefill(self) -> Tensor | None:
        self._made = self._make()
        return self._made.prefill()

    def extend(self, spans: Sequence[Span]) -> Tensor:
        assert self._made is not None
        return self._made.extend(spans)

    def keep(self, rows: Tensor) -> None:
        assert self._made is not None
        self._made.keep(rows)


def _small(call: Call, request: DraftingRequest) -> _FusedModel:
    """Return the small model of a call, set up with the call's inputs.

    Raises:
        ValueError: Its call does not reach the decode loop, or does not match the large model's.
    """
    model, config, inputs = request.options.small, call.config, inputs_of_small(request)
    with requesting(model, captures_call_only=True):
        small_call = model.generate(generation_config=settings_of_small(config), **inputs)
    if not isinstance(small_call, Call):
        raise ValueError(
            f"{type(model).__name__} has a generate of its own, "
            "which does not come to the decoding loop"
        )
    if small_call.config.max_length != config.max_length:
        raise ValueError(
            f"the generation config of the small {type(model).__name__} has a length of its own, "
            f"max_new_tokens={small_call.config.max_new_tokens}: set it to None there"
        )
    texts = call.input_ids[:: config.num_beams]
    if not torch.equal(small_call.input_ids.to(texts.device), texts):
        raise ValueError(
            f"the small {type(model).__name__} begins its texts "
            "with other tokens than the large model"
        )
    return _FusedModel(small_call)


def settings_of_small(config: Any) -> GenerationConfig:
    """Return the small model's generation config, so that it starts like the large model's call."""
    return GenerationConfig(
        max_length=config.max_length,
        num_beams=1,
        num_return_sequences=1,
        do_sample=False,
        use_cache=True,
        return_dict_in_generate=False,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        bos_token_id=config.bos_token_id,
        decoder_start_token_id=config.decoder_start_token_id,
    )


def inputs_of_small(request: DraftingRequest) -> Mapping[str, Any]:
    """Return the inputs of the small model's `generate`, which are those of the call.

    Raises:
        ValueError: The call has only inputs that are specific to the large model.
    """
    assert request.inputs is not None
    inputs = {k: v for k, v in request.inputs.items() if v is not None and k != "encoder_outputs"}
    if "inputs_embeds" in inputs or not inputs.keys() & {
        "inputs",
        "input_ids",
        "input_features",
        "pixel_values",
    }:
        raise ValueError(
            "the small model needs inputs that are not the large one's alone, "
            f"and got {', '.join(inputs) or 'none'}"
        )
    return inputs


def _check_small(model: Any) -> None:
    spec = spec_of(model.config)
    if spec is not None and spec.generates_segments:
        raise ValueError(
            f"{type(model).__name__} has a generate of its own, "
            "which does not come to the decoding loop"
        )
    try:
        check_model(model)
    except Unsupported as unsupported:
        raise ValueError(
            f"big-little decoding of {type(model).__name__}: {unsupported.reason}"
        ) from None
