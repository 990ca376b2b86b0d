"""Decoding loops of the methods that transformers 5 removed, as `generate` calls them."""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer
from transformers.generation import utils as gu

from fastgen.constraints import Constraint, constraints_of
from fastgen.decoding.plan import Plan
from fastgen.decoding.search.constrained_beam_search import ConstrainedBeamSearch
from fastgen.decoding.search.contrastive_search import ContrastiveSearch
from fastgen.decoding.search.diverse_beam_search import DiverseBeamSearch
from fastgen.decoding.search.hypothesis_pools import Hypothesis, Ranking
from fastgen.decoding.search.pooled_beam_search import PooledBeams
from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.models.specs.registry import spec_of
from fastgen.patches.transformers import compat
from fastgen.patches.transformers.cache.shared_cache import parts_of
from fastgen.patches.transformers.cache.user_cache import IS_USER_PROVIDED
from fastgen.patches.transformers.compat import CACHE
from fastgen.patches.transformers.generate.legacy_search import Method
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
from fastgen.patches.transformers.generate.stopping_criteria import stop_of


def widened(call: Call) -> Call:
    """Return a call of contrastive search with one row per candidate.

    Raises:
        ValueError: The call has an unsupported option; the message names it.
    """
    config, cache = call.config, compat.cache_of(call.model_kwargs)
    kind, spec = type(call.model).__name__, spec_of(call.model.config)
    if spec is not None and spec.prefix_lm:
        raise ValueError(f"contrastive search looks at hidden states, and a {kind} returns none")
    if cache is None or CACHE not in inspect.signature(call.model.forward).parameters:
        raise ValueError(
            f"contrastive search runs one token at a time, and a {kind} "
            "has no cache of keys and values"
        )
    if config.cache_implementation not in (None, "dynamic"):
        raise ValueError(
            "contrastive search runs one token more than "
            f"cache_implementation={config.cache_implementation!r} holds"
        )
    if compat.is_user_provided(cache):
        raise ValueError(f"contrastive search looks at all of the prompt, and {IS_USER_PROVIDED}")
    if config.prefill_chunk_size is not None:
        raise ValueError(
            "contrastive search looks at all of the prompt, and prefill_chunk_size is "
            f"{config.prefill_chunk_size}"
        )
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        raise ValueError(
            "contrastive search returns no attentions and no hidden states of its steps"
        )
    return call.widened(config.top_k)


def stepper(call: Call, plan: Plan, step: DecoderStep | None) -> ModuleStepper:
    """Return the stepper of a call; for contrastive search it records hidden states."""
    if plan.method != "contrastive search":
        return call.stepper(plan, step)
    with_hidden = replace(call, model_kwargs=call.model_kwargs | {"output_hidden_states": True})
    return with_hidden.stepper(plan, step)


def decoding_of(method: Method, call: Call, model: ModuleStepper) -> Decoding:
    """Return the decoding loop of a call for a legacy method."""
    if method == "contrastive search":
        contrastive = _contrastive(call, model)
        return Decoding(contrastive, lambda: _of_contrastive(call, model, contrastive))
    search = _diverse(call, model) if method == "diverse beam search" else _constrained(call, model)
    return Decoding(search, lambda: _of_pools(call, model, search))


def _diverse(call: Call, model: ModuleStepper) -> DiverseBeamSearch:
    config = call.config
    # The position of the diversity penalty among the logits processors of transformers 4.
    before = (config.guidance_scale not in (None, 1)) + (config.sequence_bias is not None)
    first = transforms_of(call.logits_processor[:before], lambda: vocabulary(call.model))
    then = transforms_of(call.logits_processor[before:], lambda: vocabulary(call.model))
    return DiverseBeamSearch(
        **_common(call, model),
        transforms=[*first, *then],
        groups=config.num_beam_groups,
        penalty=config.diversity_penalty,
        transforms_before=len(first),
    )


def _constrained(call: Call, model: ModuleStepper) -> ConstrainedBeamSearch:
    constraints = constraints_of(call.config.constraints, call.config.force_words_ids)
    check_tokens(constraints, vocabulary(call.model))
    return ConstrainedBeamSearch(
        **_common(call, model),
        transforms=transforms_of(call.logits_processor, lambda: vocabulary(call.model)),
        constraints=constraints,
        returned=call.config.num_return_sequences,
    )


def _contrastive(call: Call, model: ModuleStepper) -> ContrastiveSearch:
    config, streamer, pad = call.config, call.streamer, compat.pad_token(call.config)
    pads = any(hasattr(criterion, "eos_token_id") for criterion in call.stopping_criteria)
    masked = "decoder_attention_mask" if call.model.config.is_encoder_decoder else "attention_mask"
    return ContrastiveSearch(
        ids=call.input_ids,
        mask=call.model_kwargs.get(masked),
        candidates=config.top_k,
        penalty=config.penalty_alpha,
        stop=stop_of(call.stopping_criteria),
        transforms=transforms_of(call.logits_processor, lambda: vocabulary(call.model)),
        pad=pad.to(call.input_ids.device) if pads and pad is not None else None,
        may_drop=model.plan.drop and pads,
        trace=call.trace,
        on_step=None if streamer is None else lambda tokens: streamer.put(tokens.cpu()),
    )


def check_tokens(constraints: Sequence[Constraint], size: int) -> None:
    """Raise ValueError if a constraint has a token beyond a vocabulary of `size` tokens."""
    for constraint in constraints:
        highest = max(max(phrase) for phrase in constraint.phrases)
        if highest >= size:
            raise ValueError(f"{constraint} has the token {highest}, and the vocabulary has {size}")


def _common(call: Call, model: ModuleStepper) -> dict[str, Any]:
    config, prompt = call.config, call.input_ids[:: call.config.num_beams]
    eos, pad = compat.eos_tokens(config), compat.pad_token(config)
    return {
        "prompt": prompt,
        "beams": config.num_beams,
        "ends": frozenset[int]() if eos is None else frozenset(cast("list[int]", eos.tolist())),
        "pad": 0 if pad is None else int(pad),
        "max_length": config.max_length,
        "ranking": Ranking(
            config.length_penalty, config.early_stopping, config.max_length - prompt.shape[1]
        ),
        "stop": stop_of(call.stopping_criteria),
        "may_drop": model.plan.drop,
        "captured": model.plan.graphs,
        "trace": call.trace,
    }


def _of_pools(call: Call, model: ModuleStepper, search: PooledBeams) -> Any:
    config = call.config
    hypotheses = search.best(config.num_return_sequences)
    sequences = _sequences(hypotheses, config).to(call.input_ids.device)
    scores = torch.tensor(
        [h.score for h in hypotheses], dtype=torch.float32, device=sequences.device
    )
    if call.scored:
        return Scored(sequences, scores)
    if not config.return_dict_in_generate:
        return sequences
    kind = (
        gu.GenerateBeamEncoderDecoderOutput
        if call.model.config.is_encoder_decoder
        else gu.GenerateBeamDecoderOnlyOutput
    )
    with_scores = config.output_scores
    return kind(
        **fields(call, model, search.trace),
        sequences=cast(Any, sequences),
        sequences_scores=cast(Any, scores if with_scores else None),
        beam_indices=cast(
            Any, torch.nn.utils.rnn.pad_sequence([h.beams for h in hypotheses], True, -1.0)
        ),
    )


def _of_contrastive(call: Call, model: ModuleStepper, search: ContrastiveSearch) -> Any:
    if call.streamer is not None:
        call.streamer.end()
    if search.trace.chosen is not None:
        return Scored(search.outcome, sequence_scores(search.trace.chosen))
    if not call.config.return_dict_in_generate:
        return search.outcome
    output = fields(call, model, search.trace)
    cache = output[CACHE]
    rows = len(search.ids) * search.candidates
    layers = [layer for part in parts_of(cache) for layer in part.layers]
    # Layers of other types, such as those with a sliding window, cannot be cropped.
    if not layers or any(type(layer) is not DynamicLayer for layer in layers):
        output[CACHE] = None
    else:
        cache.batch_select_indices(
            torch.arange(0, rows, search.candidates, device=call.model.device, dtype=torch.int64)
        )
        cache.crop(-1)  # other methods never run the last token of a text
    kind = (
        gu.GenerateEncoderDecoderOutput
        if call.model.config.is_encoder_decoder
        else gu.GenerateDecoderOnlyOutput
    )
    return kind(**output, sequences=cast(Any, search.outcome))


def _sequences(found: Sequence[Hypothesis], config: Any) -> Tensor:
    """Return hypotheses as one tensor (N, L), each followed by eos, if it fits, and padding."""
    eos, pad = compat.eos_tokens(config), compat.pad_token(config)
    longest = max(len(hypothesis.ids) for hypothesis in found)
    width = longest if eos is None else min(longest + 1, config.max_length)
    sequences = torch.full(
        (len(found), width), -1 if pad is None else int(pad), dtype=torch.int64, device="cpu"
    )
    for row, hypothesis in zip(sequences, found, strict=True):
        row[: len(hypothesis.ids)] = hypothesis.ids
        if len(hypothesis.ids) < width and eos is not None:
            row[len(hypothesis.ids)] = eos[0]
    return sequences
