"""The loops of the methods that transformers 5 has taken out of its library, as `generate` calls them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers.generation import utils as gu

from fastgen.constraints import Constraint, constraints_of
from fastgen.decoding.choices import not_captured
from fastgen.decoding.constrained_beams import ConstrainedBeamSearch
from fastgen.decoding.diverse_beams import DiverseBeamSearch
from fastgen.decoding.pooled_beams import PooledBeams
from fastgen.decoding.pools import Hypothesis, Ranking
from fastgen.patches.transformers.call import Call
from fastgen.patches.transformers.edits import edits_of, stop_of
from fastgen.patches.transformers.outputs import Decoding, fields, vocabulary
from fastgen.patches.transformers.restored import Method
from fastgen.patches.transformers.scored import Scored
from fastgen.patches.transformers.stepper import Stepper


def decoding_of(method: Method, call: Call, model: Stepper) -> Decoding:
    if model.plan.graphs:
        reason = not_captured("finished hypotheses are kept on the host")
        model.plan = replace(model.plan, left_off=(*model.plan.left_off, reason))
    search = _diverse(call, model) if method == "diverse beam search" else _constrained(call, model)
    return Decoding(search, lambda: _of_pools(call, model, search))


def _diverse(call: Call, model: Stepper) -> DiverseBeamSearch:
    config = call.config
    # Where transformers 4 had the penalty in the row of its processors.
    before = (config.guidance_scale not in (None, 1)) + (config.sequence_bias is not None)
    first = edits_of(call.logits_processor[:before], lambda: vocabulary(call.model))
    then = edits_of(call.logits_processor[before:], lambda: vocabulary(call.model))
    return DiverseBeamSearch(
        **_common(call, model),
        edits=[*first, *then],
        groups=config.num_beam_groups,
        penalty=config.diversity_penalty,
        edits_before=len(first),
    )


def _constrained(call: Call, model: Stepper) -> ConstrainedBeamSearch:
    constraints = constraints_of(call.config.constraints, call.config.force_words_ids)
    return ConstrainedBeamSearch(
        **_common(call, model),
        edits=edits_of(call.logits_processor, lambda: vocabulary(call.model)),
        constraints=constraints,
        returned=call.config.num_return_sequences,
    )


def check_tokens(constraints: Sequence[Constraint], size: int) -> None:
    """Raise ValueError where a constraint has a token beyond a vocabulary of some size."""
    for constraint in constraints:
        highest = max(max(phrase) for phrase in constraint.phrases)
        if highest >= size:
            raise ValueError(f"{constraint} has the token {highest}, and the vocabulary has {size}")


def _common(call: Call, model: Stepper) -> dict[str, Any]:
    config, prompt = call.config, call.input_ids[:: call.config.num_beams]
    eos, pad = config._eos_token_tensor, config._pad_token_tensor
    return {
        "prompt": prompt,
        "beams": config.num_beams,
        "ends": frozenset[int]() if eos is None else frozenset(cast("list[int]", eos.tolist())),
        "pad": 0 if pad is None else int(pad),
        "max_length": config.max_length,
        "ranking": Ranking(config.length_penalty, config.early_stopping, config.max_length - prompt.shape[1]),
        "stop": stop_of(call.stopping_criteria),
        "may_drop": model.plan.drop,
        "captured": model.plan.graphs,
        "trace": call.trace,
    }


def _of_pools(call: Call, model: Stepper, search: PooledBeams) -> Any:
    config = call.config
    found = search.best(config.num_return_sequences)
    sequences = _sequences(found, config).to(call.input_ids.device)
    scores = torch.tensor([one.score for one in found], dtype=torch.float32, device=sequences.device)
    if call.scored:
        return Scored(sequences, scores)
    if not config.return_dict_in_generate:
        return sequences
    kind = (
        gu.GenerateBeamEncoderDecoderOutput
        if call.model.config.is_encoder_decoder
        else gu.GenerateBeamDecoderOnlyOutput
    )
    wanted = config.output_scores
    return kind(
        **fields(call, model, search.trace),
        sequences=cast(Any, sequences),
        sequences_scores=cast(Any, scores if wanted else None),
        beam_indices=cast(Any, torch.nn.utils.rnn.pad_sequence([one.beams for one in found], True, -1.0)),
    )


def _sequences(found: Sequence[Hypothesis], config: Any) -> Tensor:
    """The hypotheses as one tensor: behind each, where there is room, the token that ends it, and padding."""
    eos, pad = config._eos_token_tensor, config._pad_token_tensor
    longest = max(len(one.ids) for one in found)
    width = longest if eos is None else min(longest + 1, config.max_length)
    sequences = torch.full((len(found), width), -1 if pad is None else int(pad))
    for row, one in zip(sequences, found, strict=True):
        row[: len(one.ids)] = one.ids
        if len(one.ids) < width and eos is not None:
            row[len(one.ids)] = eos[0]
    return sequences
