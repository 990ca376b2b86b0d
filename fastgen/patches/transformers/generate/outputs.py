"""Output of fastgen's decoding loops, in the form that `generate` returns."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fastgen.decoding.loop import Search
from fastgen.decoding.search.beam_search import Trace
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

    search: Search[Tensor]
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
