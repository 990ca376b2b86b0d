"""Stepper of a beam search whose steps a small model drafts.

See `decoding.speculative.drafted_beams`.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from fastgen.decoding.plan import Plan
from fastgen.decoding.speculative.drafted_beams import DraftedBeams, Passes
from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.models.runtime.tree_step import Tree
from fastgen.patches.transformers import compat
from fastgen.patches.transformers.generate.fused_decoder import FusedDecoder
from fastgen.patches.transformers.generate.loop_call import Call
from fastgen.patches.transformers.generate.shared_stepper import SharedStepper


class DraftedStepper(SharedStepper):
    """Stepper of the large model of a beam search.

    Args:
        call: The call of the large model.
        plan: Its plan.
        step: Its fused decode step.
        small: Stepper of the small model, with one row per sentence.
        width: Drafted tokens per step.
        depth: Number of steps that are drafted at a time.
    """

    def __init__(
        self,
        call: Call,
        plan: Plan,
        step: DecoderStep,
        small: SharedStepper,
        width: int,
        depth: int,
    ) -> None:
        plan = replace(plan, drop=False)
        super().__init__(
            call.model, plan, call.input_ids, call.config, dict(call.model_kwargs), step
        )
        eos = compat.eos_tokens(call.config)
        self.ends: list[int] = [] if eos is None else [int(token) for token in eos]
        self.small, self.width, self.depth = small, width, depth
        self.drafts: DraftedBeams | None = None

    @property
    def passes(self) -> Passes:
        return Passes() if self.drafts is None else self.drafts.passes

    @property
    def ancestry(self) -> None:
        """None, because the trees hold the ancestry of the beams."""
        return None

    @property
    def supports_multistep(self) -> bool:
        """False, because the trees manage the KV cache."""
        return False

    @property
    def returned_cache(self) -> Any:
        """None, because the KV cache mixes drafted tokens with those of the beams."""
        return None

    def prefill(self) -> Tensor:
        logits, m = super().prefill(), self.plan.beams
        small = self.small.prefill()
        self.check_equivalence(logits)
        self.small.check_equivalence(small)
        trees = (
            self._tree(self.fused, m + self.width * self.depth),
            self._tree(self.small.fused, m + self.width),
        )
        first, longest = (logits[::m], small), self.config.max_length
        self.drafts = DraftedBeams(*trees, first, m, self.width, self.depth, self.ends, longest)
        return logits

    def _tree(self, fused: FusedDecoder | None, nodes: int) -> Tree:
        """Return the tree of a model that runs at most `nodes` nodes per step."""
        assert fused is not None
        cache = fused.cache
        for layer in cache.text:
            layer.longest = cache.longest * nodes
        return Tree(
            fused.step,
            cache.sentences,
            fused.first,
            cache.text,
            cache.source,
            fused.prefix_mask,
            fused.source_mask,
        )

    def step(self, ids: Tensor) -> Tensor:
        assert self.drafts is not None
        self._note_step(ids)
        return self.drafts.step(ids)

    def reorder(self, parents: Tensor) -> None:
        assert self.drafts is not None
        self.drafts.reorder(parents)
