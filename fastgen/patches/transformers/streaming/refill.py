"""Continuous batching: when sentences finish, the next ones start alongside those still running.

A batch starts as a call of `generate`, which suspends its loop after the first tokens (`suspend`).
From then on its decode steps run together with those of the other running batches
(`decoding.batching.continuous_batching`).

Source: Hoang et al. 2018 (Amun), section 2.1.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastgen.decoding.batching.continuous_batching import (
    InFlightBatch,
    Occupancy,
    advance,
    reason_not_to_refill,
)
from fastgen.models.cuda_graphs.replay import JointReplay
from fastgen.models.memory.scratch import is_out_of_memory
from fastgen.models.routing.routes import routed
from fastgen.models.specs.registry import spec_of
from fastgen.patches.engine import engine
from fastgen.patches.engine.out_of_memory import NO_MEMORY, free_unused_memory
from fastgen.patches.generation_call import requesting
from fastgen.patches.transformers import compat
from fastgen.patches.transformers.generate.shared_stepper import SharedStepper
from fastgen.patches.transformers.introspection import parity
from fastgen.patches.transformers.streaming.suspend import Request, SuspendedDecode

_logger = logging.getLogger("fastgen")


@dataclass(eq=False)
class Batch:
    """Sentences that are generated together.

    Attributes:
        places: Index of each sentence in the window.
        sentences: Token ids (L,) int64 of each sentence, the longest first.
        first: First token of each output; empty if the sentences have none of their own.
    """

    places: list[int]
    sentences: list[Tensor]
    first: list[int] = field(default_factory=list[int])

    @property
    def width(self) -> int:
        """Tokens per sentence, including padding."""
        return len(self.sentences[0])

    @property
    def cost(self) -> int:
        """Tokens that a sentence counts as in the limit of all running batches."""
        return self.width

    def inputs(self, model: Any, fill: int) -> dict[str, Tensor]:
        """Return `input_ids` and `attention_mask` (L, width) of the batch, on the model's device.

        Args:
            model: The model. Sources are padded on the right, prompts on the left.
            fill: Token to pad with.
        """
        ids = torch.full((len(self.sentences), self.width), fill, dtype=torch.int64, device="cpu")
        mask = torch.zeros_like(ids)
        for row, sentence in enumerate(self.sentences):
            begin = 0 if model.config.is_encoder_decoder else self.width - len(sentence)
            at = slice(begin, begin + len(sentence))
            ids[row, at], mask[row, at] = sentence, 1
        return {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}


@dataclass(eq=False)
class _Running(InFlightBatch):
    batch: Batch = field(kw_only=True)
    begun: SuspendedDecode = field(kw_only=True)


class Refill:
    """Generates batches of at most `tokens` tokens, with continuous batching where possible.

    Attributes:
        draws_apart: See `Request`.

    Args:
        model: The model.
        tokens: Maximum number of tokens, including padding, in all running batches together.
        generate: Calls the model's `generate` with a batch.
        config: Generation config of these calls.
        kwargs: Other arguments of these calls.
    """

    draws_apart = False

    def __init__(
        self,
        model: Any,
        tokens: int,
        generate: Callable[[Batch], Any],
        config: Any,
        kwargs: dict[str, Any],
    ) -> None:
        self.model, self.tokens, self.generate, self.config, self.kwargs = (
            model,
            tokens,
            generate,
            config,
            kwargs,
        )
        # Why batches run one after the other; None while nothing is known to prevent refilling.
        self.refused: str | None = None
        self.occupancy = Occupancy()

    def run(
        self, take: Callable[[int], Batch | None], done: Callable[[Batch, Any], object]
    ) -> None:
        """Generate all batches.

        Args:
            take: Returns the next batch that fits into the given number of tokens, or None.
            done: Gets each batch that is finished, with the result of `generate`.
        """
        begun: list[Batch] = []
        disabled = engine.is_disabled()
        if not disabled and self.refused != NO_MEMORY:  # that reason is permanent
            self.refused = _reason_not_to_refill(self.model, self.config, self.kwargs)
        if not disabled and self.refused is None:
            try:
                spec = spec_of(self.model.config)
                with engine.running("generate_stream"), routed(self.model, spec), torch.no_grad():
                    self._side_by_side(take, begun, done)
            except engine.DisabledMeanwhile:
                pass
            except (torch.OutOfMemoryError, RuntimeError) as error:
                if not begun or not is_out_of_memory(error):
                    raise
                self.refused = NO_MEMORY
        # Outside the handler, so that the exception keeps no tensors of the batches alive.
        if begun:
            count = sum(len(batch.places) for batch in begun)
            _logger.warning(
                "not enough memory for batches side by side: %d sentences begin anew", count
            )
            free_unused_memory()
        while (batch := begun.pop(0) if begun else take(self.tokens)) is not None:
            done(batch, self._call(batch, self.refused or "batches run one after the other"))

    def _side_by_side(
        self,
        take: Callable[[int], Batch | None],
        begun: list[Batch],
        done: Callable[[Batch, Any], object],
    ) -> None:
        """Generate batches until there are no more, or until `refused` is set.

        Args:
            take: As in `run`.
            begun: Updated to the batches that are suspended and not done, and one that starts
                alongside them.
            done: As in `run`.
        """
        running: list[_Running] = []
        replay = JointReplay()
        while True:
            # Keep no reference to a finished batch, so that the next one can use its memory.
            while (room := self._room(running)) and (batch := take(room)) is not None:
                if running:
                    begun.append(batch)
                self._start(batch, running, done)
                begun[:] = [cohort.batch for cohort in running]
            if not running:
                return
            self._advance(running, replay, done)
            begun[:] = [cohort.batch for cohort in running]

    def _start(
        self, batch: Batch, running: list[_Running], done: Callable[[Batch, Any], object]
    ) -> None:
        """Start a batch. If its loop is not suspended, it is done."""
        result = self._call(batch, self.refused)
        if isinstance(result, SuspendedDecode):
            assert isinstance(result.model, SharedStepper)
            sizes = len(batch.places), batch.cost
            running.append(_Running(result.backend, *sizes, batch=batch, begun=result))
        else:
            done(batch, result)

    def _advance(
        self,
        running: list[_Running],
        replay: JointReplay,
        done: Callable[[Batch, Any], object],
    ) -> None:
        """Run one decode step of all running batches."""
        for cohort in advance(running, replay):
            self.occupancy.note(cohort)
            done(cohort.batch, cohort.begun.finish())
        self.refused = self.refused or replay.refused

    def _room(self, running: Sequence[InFlightBatch]) -> int:
        """Return the maximum tokens of a batch that may start now; 0 if none may."""
        return 0 if self.refused is not None else self.occupancy.room(running, self.tokens)

    def _call(self, batch: Batch, refused: str | None) -> Any:
        request = Request(refused, draws_apart=self.draws_apart)
        with requesting(self.model, suspension=request):
            result = self.generate(batch)
        if refused is None:
            self.refused = request.refused
        return result


def _reason_not_to_refill(model: Any, config: Any, kwargs: dict[str, Any]) -> str | None:
    """Return why the loop cannot be suspended, as far as known before `generate` runs, or None."""
    return reason_not_to_refill([model.device.type]) or what_wraps_generate(model, config, kwargs)


def what_wraps_generate(model: Any, config: Any, kwargs: dict[str, Any]) -> str | None:
    """Return what is between the caller of `generate` and our loops, or None.

    It would receive objects that are not outputs of `generate`, such as a suspended loop.
    """
    for name, patch in _METHODS.items():
        if name in vars(model) or compat.has_own(model, name):
            return f"{type(model).__name__} has its own {name}"
        if not engine.is_on_top(patch):
            return f"{patch} is not in place"
    if parity.wanted():
        return "FASTGEN_PARITY=1"
    if config.token_healing or kwargs.get("custom_generate") is not None:
        return "generate is given a loop of its own"
    return None


_METHODS = {
    "generate": "transformers.generate",
    compat.BEAM_LOOP: "transformers.beam_search",
    compat.SAMPLE_LOOP: "transformers.sample",
}
"""Methods that a call goes through, each with its patch. Wrappers by others would get a suspended
loop instead of an output."""
