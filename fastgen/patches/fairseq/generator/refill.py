"""Continuous batching: when sentences have left, the next batch starts beside those still running.

A batch starts as in `SequenceGenerator._generate`, and suspends after its first steps. From then on
its steps run jointly with those of the other running batches (`continuous_batching`). When the
batch has finished and its turn has come, the task's `inference_step` is called as usual, and
receives the hypotheses that were found.

Source: Hoang et al. 2018 (Amun), section 2.1.
"""

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from fairseq import utils
from fairseq.logging.meters import StopwatchMeter
from fairseq.search import BeamSearch
from fairseq.sequence_generator import SequenceGenerator, SequenceGeneratorWithAlignment
from fairseq.tasks import FairseqTask

from fastgen.decoding.batching.continuous_batching import (
    InFlightBatch,
    Occupancy,
    advance,
    not_refilled,
    reason_not_to_refill,
)
from fastgen.decoding.plan import Unsupported
from fastgen.models.cuda_graphs.replay import JointReplay
from fastgen.models.memory.scratch import is_out_of_memory
from fastgen.patches.engine import engine
from fastgen.patches.engine.out_of_memory import NO_MEMORY, free_unused_memory
from fastgen.patches.fairseq.bild.bild import requested
from fastgen.patches.fairseq.generator.decide import decide
from fastgen.patches.fairseq.generator.generate import (
    SuspendedDecode,
    begin,
    models_of,
    returning,
    routes,
)
from fastgen.patches.fairseq.generator.lengths import source_lengths
from fastgen.patches.fairseq.generator.split import Found

_logger = logging.getLogger("fastgen")


class Translated(NamedTuple):
    """A translated batch.

    Attributes:
        sample: The batch.
        found: Its hypotheses; None if it has no sentences.
        tokens: Total length of the best hypotheses.
    """

    sample: Any
    found: Found | None
    tokens: int


@dataclass(eq=False)
class _Batch:
    """A batch; it waits unless it is running, is empty, or has hypotheses.

    Attributes:
        runs: Whether it is running.
        found: Its hypotheses, once it has finished.
        error: Exception that reading or starting the batch raised; it is raised when the batch's
            turn comes.
    """

    sample: Any
    runs: bool = False
    found: Found | None = None
    error: Exception | None = None

    @property
    def empty(self) -> bool:
        return self.error is None and "net_input" not in self.sample

    @property
    def waits(self) -> bool:
        return not self.runs and self.found is None and not self.empty


@dataclass(eq=False)
class _Running(InFlightBatch):
    batch: _Batch = field(kw_only=True)
    begun: SuspendedDecode = field(kw_only=True)


class Translations:
    """Iterator over the translated batches of a run, in order; batches may run side by side.

    Args:
        task: fairseq's task.
        models: The models of the generator.
        generator: fairseq's generator.
        batches: Iterable of batches, such as fairseq's iterator.
        timer: Runs during translation, and counts the tokens.
        prefix_size: Number of target tokens that each hypothesis starts with.
        cuda: Whether to move batches to a GPU.

    Attributes:
        refused: Fallback reason for translating batches one at a time; None otherwise.
        left_off: Disabled features, each with its fallback reason, as keys.
    """

    def __init__(
        self, task: Any, models: list[Any], generator: Any, batches: Any, timer: StopwatchMeter,
        prefix_size: int, cuda: bool,
    ) -> None:  # fmt: skip
        self.task, self.models, self.generator, self.timer = task, models, generator, timer
        self.prefix_size, self.cuda = prefix_size, cuda
        self.refused = _reason_not_to_refill(task, generator, prefix_size)
        self.left_off = dict.fromkeys([] if self.refused is None else [not_refilled(self.refused)])
        self._batches = iter(batches)
        self._queue: deque[_Batch] = deque()  # batches that were read and not yet yielded
        self._running: list[_Running] = []
        self._occupancy, self._replay = Occupancy(), JointReplay()

    def __iter__(self) -> Iterator[Translated]:
        while self._queue or self._read() is not None:
            batch = self._queue[0]
            if batch.error is not None:
                raise batch.error
            translated = (
                Translated(batch.sample, None, 0) if batch.empty else self._translate(batch)
            )
            self._queue.popleft()
            yield translated

    def _read(self) -> _Batch | None:
        """Append the next batch to the queue; return None if there is none.

        An exception of the iterator is queued too if other batches are to be yielded before it.
        """
        try:
            sample: Any = next(self._batches, None)
        except Exception as error:
            if not self._queue:
                raise
            batch = _Batch(None, error=error)
        else:
            if sample is None:
                return None
            batch = _Batch(utils.move_to_cuda(sample) if self.cuda else sample)
        self._queue.append(batch)
        return batch

    def _translate(self, batch: _Batch) -> Translated:
        """Let the task translate the batch whose turn it is, reusing hypotheses found already."""
        self.timer.start()
        self._decode(batch)
        sample, found = batch.sample, batch.found
        prefix = sample["target"][:, : self.prefix_size] if self.prefix_size > 0 else None
        with nullcontext() if found is None else returning(self.generator, sample, found):
            hypotheses = self.task.inference_step(
                self.generator,
                self.models,
                sample,
                prefix_tokens=prefix,
                constraints=sample.get("constraints"),
            )
        tokens = sum(len(nbest[0]["tokens"]) for nbest in hypotheses)
        self.timer.stop(tokens)
        return Translated(sample, hypotheses, tokens)

    def _decode(self, batch: _Batch) -> None:
        """Decode until a batch has finished, with others beside it.

        A batch that cannot start stays waiting, so that the task translates it.
        """
        if self.refused is not None and not batch.runs:
            return
        with engine.running("fairseq-generate"), routes(self.generator), torch.no_grad():
            if batch.waits:
                self._start(batch)
            while batch.runs:
                while self._has_room():
                    self.timer.stop(0)
                    another = self._read()
                    self.timer.start()
                    if another is None:
                        break
                    if another.waits and another.error is None:
                        self._start(another)
                self._step()

    def _has_room(self) -> bool:
        """Return whether another batch may start beside the running ones."""
        if self.refused is not None or self._queue[-1].waits:
            return False
        tokens = max(cohort.sentences * cohort.width for cohort in self._running)
        return self._occupancy.room(self._running, tokens) > 0

    def _start(self, batch: _Batch) -> None:
        """Start a batch if possible; otherwise it waits for its turn."""
        sample, generator = batch.sample, self.generator
        try:
            plan = decide(generator, sample, sample.get("constraints"))
            with engine.running(plan):
                lengths = source_lengths(
                    SequenceGenerator._generate, generator, sample["net_input"]
                )
                begun, over = begin(generator, plan, sample, lengths, pauses=True)
        except Unsupported:
            self._leave_off("calls run on fairseq's own code")
        except Exception as error:
            if is_out_of_memory(error):
                self._refuse(NO_MEMORY)
            elif not self._running:
                raise
            else:
                batch.error = error
        else:
            if over:
                batch.found = begun.finish()
                if begun.model.left_off:
                    self._leave_off("decode steps are not made from the weights")
            else:
                batch.runs = True
                width = sample["net_input"]["src_tokens"].shape[1]
                self._running.append(
                    _Running(begun.backend, plan.sentences, width, batch=batch, begun=begun)
                )

    def _step(self) -> None:
        """Run one joint step of all running batches."""
        over = None
        try:
            over = advance(self._running, self._replay)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        # Outside of the handler: there, the traceback would keep the batches' tensors alive.
        if over is None:
            self._begin_anew()
            return
        if self._replay.refused is not None and self.refused is None:
            self._refuse(self._replay.refused)
        for cohort in over:
            self._occupancy.note(cohort)
            cohort.batch.runs, cohort.batch.found = False, cohort.begun.finish()

    def _begin_anew(self) -> None:
        """Restart all running batches one at a time after memory ran out.

        On its own, a batch can be split in halves.
        """
        again = [batch for batch in self._queue if batch.runs]
        for batch in again:
            batch.runs = False
        self._running.clear()
        self._replay.forget()
        self._refuse(NO_MEMORY)
        _logger.warning("not enough memory for batches that refill: %d begin anew", len(again))
        free_unused_memory()

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        self._leave_off(reason)

    def _leave_off(self, reason: str) -> None:
        self.left_off[not_refilled(reason)] = None


def _reason_not_to_refill(task: Any, generator: Any, prefix_size: int) -> str | None:
    """Return why batches have to be translated one at a time, as far as known in advance."""
    name, kind = type(generator).__name__, type(generator)
    if type(task).inference_step is not FairseqTask.inference_step or "inference_step" in vars(
        task
    ):
        return f"{type(task).__name__} has its own inference_step"
    if not isinstance(generator, SequenceGenerator):
        return f"{name} is no SequenceGenerator"
    own: Any = (SequenceGenerator.generate, SequenceGeneratorWithAlignment.generate)
    if kind.generate not in own or "generate" in vars(generator):
        return f"{name} has its own generate"
    if type(generator.search) is not BeamSearch:
        return f"{type(generator.search).__name__} may look at all sentences of a batch"
    if requested() is not None:
        return "a small model drafts"
    if prefix_size > 0:
        return "hypotheses begin with a prefix"
    if not engine.is_on_top("fairseq.generate"):
        return "fairseq.generate is not in place"
    return reason_not_to_refill(
        p.device.type for model in models_of(generator) for p in model.parameters()
    )
