"""Call of `generate` as its decoding loop gets it."""

import copy
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor

from fastgen.decoding.batching.batch_compaction import CancellationCallback
from fastgen.decoding.batching.stable_prefix import OnTokens, StablePrefix
from fastgen.decoding.plan import Plan
from fastgen.decoding.search.beam_search import Trace
from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.patches.transformers import compat
from fastgen.patches.transformers.generate.module_stepper import ModuleStepper
from fastgen.patches.transformers.generate.shared_stepper import SharedStepper
from fastgen.patches.transformers.unlisted.checked_stepper import CheckedStepper
from fastgen.patches.transformers.unlisted.families import verdict


@dataclass
class Call:
    """Arguments that `generate` passes to one of its loops, with the caller's requests.

    Attributes:
        input_ids: (R, P) int64, the prompt of each row.
        config: The generation config, as `bounded` returns it.
        scored: Whether the call returns `Scored` sequences.
        wanted: Returns whether a sentence, by number, is not cancelled; None if none ever is.
        on_tokens: Called with the new tokens of each sentence; or None.
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
    wanted: CancellationCallback | None = None
    on_tokens: OnTokens | None = None

    @property
    def trace(self) -> Trace:
        """An empty trace of the tensors that the call returns."""
        as_dict = self.config.return_dict_in_generate
        return Trace(
            scores=[] if as_dict and self.config.output_scores else None,
            logits=[] if as_dict and self.config.output_logits else None,
            chosen=[] if self.scored else None,
        )

    def stable_prefix(self, beams: int) -> StablePrefix | None:
        """Return what reports the final tokens of a beam search; None if nothing listens.

        Args:
            beams: M.
        """
        (rows, prompt), streamer, on_tokens = self.input_ids.shape, self.streamer, self.on_tokens
        if streamer is not None:
            return StablePrefix(lambda number, place, tokens: streamer.put(tokens), 1, prompt)
        if on_tokens is None:
            return None
        return StablePrefix(
            lambda number, place, tokens: on_tokens(
                number, place - prompt, cast(Any, tokens).tolist()
            ),
            rows // beams,
            prompt,
        )

    def widened(self, rows: int) -> "Call":
        """Return the call with every row repeated `rows` times."""
        kwargs = dict(self.model_kwargs)
        if kwargs.get("encoder_outputs") is not None:
            # `expand` changes it in place.
            kwargs["encoder_outputs"] = copy.copy(kwargs["encoder_outputs"])
        ids, kwargs = compat.expand(self.model, rows, self.input_ids, kwargs)
        return replace(self, input_ids=ids, model_kwargs=kwargs)

    def stepper(self, plan: Plan, step: DecoderStep | None) -> ModuleStepper:
        """Return what runs the decode steps of a plan.

        Args:
            step: The fused decode step; None if the model's own modules run the steps.
        """
        arguments = self.model, plan, self.input_ids, self.config, dict(self.model_kwargs)
        if not plan.shared:
            stepper = ModuleStepper(*arguments)
        # A call of another thread may have found a verdict since the plan was made.
        elif plan.family is not None and verdict(self.model, plan.family) != "":
            stepper = CheckedStepper(*arguments, plan.family)
        else:
            stepper = SharedStepper(*arguments, step)
        if self.config.return_dict_in_generate and (
            self.config.output_hidden_states or self.config.output_attentions
        ):
            stepper.outputs = []
        return stepper
