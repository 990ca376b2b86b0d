"""Output of fastgen's decoding loops, in the form that `generate` returns.

Streams need one score for each sequence and no per-step scores. The scores of a beam search are
transformers' `sequences_scores`. Greedy search and sampling have none there. Their score is the sum
of the log-probabilities of a text's tokens up to its end, under the processed scores.
`compute_transition_scores(..., normalize_logits=True)` gives the terms of that sum; only the order
of fp32 additions differs.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgen.decoding.backends.decode_backend import Search
from fastgen.decoding.search.beam_search import Trace
from fastgen.decoding.search.sampling import chosen_of
from fastgen.patches.transformers.compat import CACHE
from fastgen.patches.transformers.generate.loop_call import Call
from fastgen.patches.transformers.generate.module_stepper import ModuleStepper


@dataclass
class Decoding:
    """A decoding loop.

    Attributes:
        search: The search.
        output: Builds the output of `generate` once the search is over.
        around: Returns the context manager that the loop runs in.
    """

    search: Search
    output: Callable[[], Any]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


def fields(call: Call, model: ModuleStepper, trace: Trace) -> dict[str, Any]:
    """Return the fields that all output classes of `generate` share."""
    config, encoder_decoder = call.config, call.model.config.is_encoder_decoder

    def of_steps(name: str, wanted: bool) -> tuple[Any, ...] | None:
        return tuple(outputs[name] for outputs in model.outputs or ()) if wanted else None

    output: dict[str, Any] = {
        "scores": None if trace.scores is None else tuple(trace.scores),
        "logits": None if trace.logits is None else tuple(trace.logits),
        CACHE: model.returned_cache,
    }
    if not encoder_decoder:
        return output | {
            "attentions": of_steps("attentions", config.output_attentions),
            "hidden_states": of_steps("hidden_states", config.output_hidden_states),
        }
    encoder = call.model_kwargs["encoder_outputs"]
    return output | {
        "encoder_attentions": encoder.get("attentions") if config.output_attentions else None,
        "encoder_hidden_states": encoder.get("hidden_states")
        if config.output_hidden_states
        else None,
        "decoder_attentions": of_steps("decoder_attentions", config.output_attentions),
        "cross_attentions": of_steps("cross_attentions", config.output_attentions),
        "decoder_hidden_states": of_steps("decoder_hidden_states", config.output_hidden_states),
    }


def vocabulary(model: Any) -> int:
    """Return the vocabulary size of a model's text config."""
    return int(model.config.get_text_config(decoder=True).vocab_size)


class Scored(NamedTuple):
    """Sequences and their scores.

    Attributes:
        sequences: (N, L) int64.
        scores: (N,), natural logarithms.
    """

    sequences: Tensor
    scores: Tensor


def sequence_scores(chosen: list[Tensor]) -> Tensor:
    """Return scores (R,) fp64 of texts from the log-probabilities (R,) of each step's tokens."""
    return torch.stack(chosen, 1).double().sum(1)


def scored_by_transformers(
    model: Any, inputs: dict[str, Tensor], kwargs: dict[str, Any], ends: Tensor
) -> Scored:
    """Compute scored sequences from the per-step scores that `generate` returns.

    Args:
        inputs: Model inputs.
        kwargs: Other arguments of `generate`.
        ends: (E,) int64, the tokens that end a text.
    """
    output = model.generate(**inputs, **kwargs, return_dict_in_generate=True, output_scores=True)
    if getattr(output, "sequences_scores", None) is not None:
        return Scored(output.sequences, output.sequences_scores)
    generated = output.sequences[:, -len(output.scores) :]
    ended = torch.isin(generated, ends.to(generated.device)).long()
    after_end = (ended.cumsum(1) - ended) > 0
    chosen = map(chosen_of, output.scores, generated.unbind(1))
    return Scored(
        output.sequences,
        sequence_scores([c.masked_fill(b, 0.0) for c, b in zip(chosen, after_end.T, strict=True)]),
    )
