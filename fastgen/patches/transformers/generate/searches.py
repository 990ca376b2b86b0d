"""The search that a call of `generate` asks for, and the outputs made of its result."""

from typing import Any, Literal, cast

import torch
from transformers.generation import utils as gu

from fastgen.decoding.batching.stable_prefix import StablePrefix
from fastgen.decoding.search.beam_search import BeamSearch
from fastgen.decoding.search.finishing_rules import TransformersRule
from fastgen.decoding.search.sampling import Sampling
from fastgen.patches.transformers import compat
from fastgen.patches.transformers.generate import legacy_loops, legacy_search
from fastgen.patches.transformers.generate.logits_processors import transforms_of
from fastgen.patches.transformers.generate.loop_call import Call
from fastgen.patches.transformers.generate.module_stepper import ModuleStepper
from fastgen.patches.transformers.generate.outputs import (
    Decoding,
    Scored,
    fields,
    sequence_scores,
    vocabulary,
)
from fastgen.patches.transformers.generate.stopping_criteria import fill_of, stop_of


def decoding_of(loop: Literal["beam", "sample"], call: Call, model: ModuleStepper) -> Decoding:
    """Return the search of a call, ready to run.

    Args:
        loop: The decode loop of transformers.
        call: The call.
        model: The stepper of its decode steps.
    """
    method = legacy_search.method_of(call.config)
    if method is not None:
        return legacy_loops.decoding_of(method, call, model)
    return (_beam_search if loop == "beam" else _sample)(call, model)


def _beam_search(call: Call, model: ModuleStepper) -> Decoding:
    config, m = call.config, model.plan.beams
    stable_prefix = call.stable_prefix(m)
    eos = compat.eos_tokens(config)
    rule = TransformersRule(
        beams=m,
        max_length=config.max_length,
        prompt_length=call.input_ids.shape[1],
        ends=0 if eos is None else eos.shape[0],
        length_penalty=config.length_penalty,
        early_stopping=config.early_stopping,
    )
    search = BeamSearch(
        prompt=call.input_ids[::m],
        rule=rule,
        stop=stop_of(call.stopping_criteria),
        transforms=transforms_of(call.logits_processor, lambda: vocabulary(call.model)),
        fill=fill_of("beam", config),
        sample=config.do_sample,
        rank_drawn=compat.INSTALLED.ranks_drawn_beams,
        may_drop=model.plan.drop,
        captured=model.plan.graphs,
        exact=call.model.dtype == torch.float64,
        trace=call.trace,
        wanted=call.wanted,
        on_step=stable_prefix,
    )
    return Decoding(search, lambda: _of_beams(call, model, search, stable_prefix))


def _of_beams(
    call: Call, model: ModuleStepper, search: BeamSearch, stable_prefix: StablePrefix | None
) -> Any:
    config, best = call.config, search.outcome
    returned = config.num_return_sequences
    sequences, beams = best.ids[:, :returned].flatten(0, 1), best.beams[:, :returned].flatten(0, 1)
    longest = int((beams >= 0).sum(1).max())
    sequences = sequences[:, : call.input_ids.shape[1] + longest]
    if stable_prefix is not None and call.streamer is not None:
        stable_prefix.end(0, sequences[0])
        call.streamer.end()
    if call.scored:
        return Scored(sequences, best.scores[:, :returned].flatten())
    if not config.return_dict_in_generate:
        return sequences
    output = fields(call, model, search.trace)
    output |= {
        "sequences": sequences,
        "sequences_scores": best.scores[:, :returned].flatten() if config.output_scores else None,
        "beam_indices": beams[:, :longest],
    }
    kind = (
        gu.GenerateBeamEncoderDecoderOutput
        if call.model.config.is_encoder_decoder
        else gu.GenerateBeamDecoderOnlyOutput
    )
    return kind(**output)


def _sample(call: Call, model: ModuleStepper) -> Decoding:
    config, streamer, wanted = call.config, call.streamer, call.wanted
    pads = any(hasattr(criterion, "eos_token_id") for criterion in call.stopping_criteria)
    pad = compat.pad_token(config)
    sampling = Sampling(
        ids=call.input_ids,
        stop=stop_of(call.stopping_criteria),
        transforms=transforms_of(call.logits_processor, lambda: vocabulary(call.model)),
        pad=pad.to(call.input_ids.device) if pads else None,
        longest=config.max_length,
        sample=config.do_sample,
        may_drop=model.plan.drop and pads,
        captured=model.plan.graphs,
        trace=call.trace,
        on_step=None if streamer is None else lambda tokens: streamer.put(tokens.cpu()),
        on_tokens=call.on_tokens,
        wanted=None if wanted is None else lambda row: wanted(row // model.plan.beams),
    )
    return Decoding(
        sampling,
        lambda: _of_samples(call, model, sampling),
        lambda: compat.decode_context(call.model),
    )


def _of_samples(call: Call, model: ModuleStepper, sampling: Sampling) -> Any:
    if call.streamer is not None:
        call.streamer.end()
    model.keep_text(sampling.outcome)
    if sampling.trace.chosen is not None:
        return Scored(sampling.outcome, sequence_scores(sampling.trace.chosen))
    if not call.config.return_dict_in_generate:
        return sampling.outcome
    output = fields(call, model, sampling.trace) | {"sequences": sampling.outcome}
    kind = (
        gu.GenerateEncoderDecoderOutput
        if call.model.config.is_encoder_decoder
        else gu.GenerateDecoderOnlyOutput
    )
    return cast(Any, kind)(**output)
