"""Batches that refill: when sentences have left, the next ones start beside those that are still running.

A batch begins as a call of `generate`, which hands back its loop after the first tokens (`pausing`). From then on its
steps are made together with those of the other running batches (`decoding.batching.continuous_batching`).

Source: Hoang et al. 2018 (Amun), section 2.1.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastgen.decoding.batching.continuous_batching import (
    Cohort,
    Occupancy,
    advance,
    reason_not_to_refill,
)
from fastgen.models.cuda_graphs.replay import JointReplay
from fastgen.models.memory.scratch import is_out_of_memory
from fastgen.models.routing.routes import routed
from fastgen.models.specs.families import family_of
from fastgen.patches.engine import engine
from fastgen.patches.engine.out_of_memory import NO_MEMORY, make_room
from fastgen.patches.transformers import compat
from fastgen.patches.transformers.generate.generation_call import requesting
from fastgen.patches.transformers.generate.shared_stepper import SharedStepper
from fastgen.patches.transformers.introspection import parity
from fastgen.patches.transformers.streaming.suspend import Request, SuspendedDecode

_logger = logging.getLogger("fastgen")


@dataclass(eq=False)
class Batch:
    """Sentences, the longest first, their places in the window, and first tokens of their own, if they have any."""

    places: list[int]
    sentences: list[Tensor]
    first: list[int] = field(default_factory=list[int])

    @property
    def width(self) -> int:
        """Tokens that each takes, padding counted."""
        return len(self.sentences[0])


@dataclass(eq=False)
class _Running(Cohort[Tensor]):
    batch: Batch = field(kw_only=True)
    begun: SuspendedDecode = field(kw_only=True)


class Refill:
    """Generates batches of at most `tokens` tokens, beside each other where that is possible.

    Args:
        generate: calls the model's `generate` with a batch. config, kwargs: what it is given beside the batch.
    """

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
        self.refused: str | None = (
            None  # why batches run one after the other, as far as it is known
        )
        self.occupancy = Occupancy()

    def run(self, take: Callable[[int], Batch | None]) -> list[tuple[Batch, Any]]:
        """Generate all batches; return each with what `generate` returns for it.

        Args:
            take: the next batch, which fits into so many tokens; None when there is none.
        """
        done: list[tuple[Batch, Any]] = []
        begun: list[Batch] = []
        disabled = engine.is_disabled()
        if not disabled and self.refused != NO_MEMORY:  # the one that stays
            self.refused = _reason_not_to_refill(self.model, self.config, self.kwargs)
        if not disabled and self.refused is None:
            try:
                family = family_of(getattr(self.model.config, "model_type", ""))
                with engine.running("generate_stream"), routed(self.model, family), torch.no_grad():
                    self._side_by_side(take, begun, done)
            except engine.DisabledMeanwhile:
                pass
            except (torch.OutOfMemoryError, RuntimeError) as error:
                if not begun or not is_out_of_memory(error):
                    raise
                self.refused = NO_MEMORY
        if begun:  # out of the handler, so that nothing holds on to what the batches had made
            count = sum(len(batch.places) for batch in begun)
            _logger.warning(
                "not enough memory for batches side by side: %d sentences begin anew", count
            )
            make_room()
        while (batch := begun.pop(0) if begun else take(self.tokens)) is not None:
            done.append(
                (batch, self._call(batch, self.refused or "batches run one after the other"))
            )
        return done

    def _side_by_side(
        self, take: Callable[[int], Batch | None], begun: list[Batch], done: list[tuple[Batch, Any]]
    ) -> None:
        """Generate batches until there are no more, or `refused` says why no more may start.

        begun: those that have paused and are not done, and one that starts beside them.
        """
        running: list[_Running] = []
        replay = JointReplay()
        while True:
            # Nothing here holds on to a batch that is done, so that the next one has its memory.
            while (room := self._room(running)) and (batch := take(room)) is not None:
                if running:
                    begun.append(batch)
                self._start(batch, running, done)
                begun[:] = [cohort.batch for cohort in running]
            if not running:
                return
            self._advance(running, replay, done)
            begun[:] = [cohort.batch for cohort in running]

    def _start(self, batch: Batch, running: list[_Running], done: list[tuple[Batch, Any]]) -> None:
        """Begin a batch; where it does not pause, it is done."""
        found = self._call(batch, self.refused)
        if isinstance(found, SuspendedDecode):
            assert isinstance(found.model, SharedStepper)
            sizes = len(batch.places), batch.width
            running.append(_Running(found.search, found.model, *sizes, batch=batch, begun=found))
        else:
            done.append((batch, found))

    def _advance(
        self, running: list[_Running], replay: JointReplay, done: list[tuple[Batch, Any]]
    ) -> None:
        """Make a step of all that run."""
        for cohort in advance(running, replay):
            self.occupancy.note(cohort)
            done.append((cohort.batch, cohort.begun.finish()))
        self.refused = self.refused or replay.refused

    def _room(self, running: list[_Running]) -> int:
        """Tokens of a batch that may start now, 0 for none."""
        return 0 if self.refused is not None else self.occupancy.room(running, self.tokens)

    def _call(self, batch: Batch, refused: str | None) -> Any:
        request = Request(refused)
        with requesting(self.model, suspension=request):
            found = self.generate(batch)
        if refused is None:
            self.refused = request.refused
        return found


def _reason_not_to_refill(model: Any, config: Any, kwargs: dict[str, Any]) -> str | None:
    """Why a model's `generate` with these arguments must run to its end, as far as it can be told before it runs."""
    return reason_not_to_refill([model.device.type]) or who_stands_between(model, config, kwargs)


def who_stands_between(model: Any, config: Any, kwargs: dict[str, Any]) -> str | None:
    """What is between our loops and the caller of a model's `generate`, and would see what is no output of it."""
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
"""What a batch passes, each with its patch: nobody else may stand there, who would see a loop in place of an output."""
