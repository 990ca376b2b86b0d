"""A call of `generate` as it comes to a decoding loop."""

import copy
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor

from fastgen.decoding.batching.batch_compaction import Wanted
from fastgen.decoding.batching.stable_prefix import Certain, OnTokens
from fastgen.decoding.plan import Plan
from fastgen.decoding.search.beam_search import Trace
from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.patches.transformers import compat
from fastgen.patches.transformers.generate.module_stepper import Stepper
from fastgen.patches.transformers.generate.shared_stepper import SharedStepper


@dataclass
class Call:
    """What `generate` hands to one of its loops.

    Attributes:
        scored: whether the caller takes `Scored` sequences.
        wanted: whether somebody waits for a sentence, by its number; None where nobody leaves.
        on_tokens: hears the tokens of each sentence; None where nobody does.
    """

    model: Any
    input_ids: Tensor
    logits_processor: Any
    stopping_criteria: Any
    config: Any
    synced_gpus: bool
    model_kwargs: dict[str, Any]
    streamer: Any = None
    scored: bool = False
    wanted: Wanted | None = None
    on_tokens: OnTokens | None = None

    @property
    def trace(self) -> Trace:
        wanted = self.config.return_dict_in_generate
        return Trace(
            scores=[] if wanted and self.config.output_scores else None,
            logits=[] if wanted and self.config.output_logits else None,
            chosen=[] if self.scored else None,
        )

    def certain(self, beams: int) -> Certain | None:
        """What tells the tokens of a beam search, if somebody hears them."""
        (rows, prompt), streamer, on_tokens = self.input_ids.shape, self.streamer, self.on_tokens
        if streamer is not None:
            return Certain(lambda number, place, tokens: streamer.put(tokens), 1, prompt)
        if on_tokens is None:
            return None
        return Certain(
            lambda number, place, tokens: on_tokens(
                number, place - prompt, cast(Any, tokens).tolist()
            ),
            rows // beams,
            prompt,
        )

    def widened(self, rows: int) -> "Call":
        """The same call with so many rows in the place of each."""
        given = dict(self.model_kwargs)
        if given.get("encoder_outputs") is not None:
            given["encoder_outputs"] = copy.copy(
                given["encoder_outputs"]
            )  # which is changed in place
        ids, given = compat.expand(self.model, rows, self.input_ids, given)
        return replace(self, input_ids=ids, model_kwargs=given)

    def stepper(self, plan: Plan, step: DecoderStep | None) -> Stepper:
        given = self.model, plan, self.input_ids, self.config, dict(self.model_kwargs)
        stepper = SharedStepper(*given, step) if plan.shared else Stepper(*given)
        if self.config.return_dict_in_generate and (
            self.config.output_hidden_states or self.config.output_attentions
        ):
            stepper.outputs = []
        return stepper
