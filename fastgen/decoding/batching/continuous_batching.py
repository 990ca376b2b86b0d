"""Continuous batching of cohorts, which are groups of sentences that started together.

Cohorts that run at the same time share the matrix products of their decode steps and nothing else.
Each keeps its own search, KV cache, masks and positions. A cohort therefore joins without moving
any data, and sources are not padded to a common length.

Sources: Hoang et al. 2018 (Amun), section 2.1 (waiting sentences take freed rows); Yu et al. 2022
(Orca), section 3.2 (selective batching).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor

from fastgen import config
from fastgen.decoding.backends.decode_backend import DecodeBackend, Search, Stepper
from fastgen.models.cuda_graphs.replay import JointReplay, Opened, Result
from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.models.runtime.joint_step import joint_step
from fastgen.models.runtime.step_inputs import CallStepInputs

MAX_IN_FLIGHT = 3
"""Maximum number of cohorts that run at the same time."""

FREED = 0.75
"""Share of all tokens that must be free before another cohort starts."""

OCCUPIED = 0.5
"""Occupancy of finished cohorts, averaged over their steps, below which other cohorts start."""


class JoinableStepper(Stepper, Protocol):
    """A stepper of one or more models whose decode steps can be batched with those of others."""

    @property
    def decoders(self) -> Sequence[DecoderStep]:
        """The fused decode step of each model."""
        ...

    @property
    def longest(self) -> int:
        """Maximum length of a text for which `decoders` were built, in tokens."""
        ...

    def is_replayed(self, rows: int) -> bool:
        """Return whether the next step, of this number of rows, runs as a captured step."""
        ...

    def begin_step(self, ids: Tensor) -> Sequence[CallStepInputs]:
        """Prepare a batched step on the newest token of each row of ids, (R, L) int64.

        Returns:
            The inputs of the step, one per decoder.
        """
        ...

    def open_step(self, ids: Tensor) -> Sequence[Opened]:
        """Prepare a batched step that is captured; as `begin_step`."""
        ...

    def end_step(self, results: Sequence[Result]) -> Any:
        """Return the output of `step`, given the result of each decoder."""
        ...


@dataclass(eq=False)
class InFlightBatch:
    """A running search.

    Attributes:
        backend: Runs its decode steps.
        sentences: Number of sentences at the start.
        width: Tokens that each sentence takes in a batch, padding included.
        steps: Decode steps so far.
        decoded: Sum over those steps of the sentences in the batch.
    """

    backend: DecodeBackend[Any]
    sentences: int
    width: int
    steps: int = 0
    decoded: int = 0

    @property
    def search(self) -> Search:
        return self.backend.search

    @property
    def model(self) -> JoinableStepper:
        return self.backend.model

    def go_on_alone(self) -> bool:
        """Run one or more decode steps without other cohorts; return whether the search continues.

        Several steps run in a native backend until a callback has to observe one.
        """
        present, length = self.search.batch_size, self.search.text.length
        going = self.backend.advance()
        self.note_steps(max(1, self.search.text.length - length), present)
        return going

    def note_steps(self, steps: int, present: int) -> None:
        """Count decode steps of `batch_size` sentences."""
        self.steps, self.decoded = self.steps + steps, self.decoded + steps * present

    @property
    def tokens(self) -> int:
        """Tokens that the remaining sentences take in a batch."""
        return self.search.batch_size * self.width


_Cohort = TypeVar("_Cohort", bound=InFlightBatch)


def step(cohorts: Sequence[InFlightBatch], replay: JointReplay) -> list[Any]:
    """Run one decode step of all cohorts together.

    Args:
        cohorts: The running cohorts.
        replay: Runs the step as a captured one where that is possible.

    Returns:
        The output of the step for each cohort.
    """
    texts = [cohort.search.text.ids for cohort in cohorts]
    models = [cohort.model for cohort in cohorts]
    decoders, pairs = (
        max(models, key=lambda model: model.longest).decoders,
        list(zip(models, texts, strict=True)),
    )
    if replay.refused is None and all(model.is_replayed(len(ids)) for model, ids in pairs):
        results = replay(decoders, [model.open_step(ids) for model, ids in pairs])
    else:
        newest = [ids[:, -1] for ids in texts]
        contexts = zip(*(model.begin_step(ids) for model, ids in pairs), strict=True)
        outputs = [
            joint_step(decoder, newest, decoder_contexts)
            for decoder, decoder_contexts in zip(decoders, contexts, strict=True)
        ]
        results = zip(*outputs, strict=True)
    return [
        model.end_step(model_results) for model, model_results in zip(models, results, strict=True)
    ]


def advance(running: list[_Cohort], replay: JointReplay) -> list[_Cohort]:
    """Run one decode step of all cohorts, or one or more if there is only one.

    Args:
        running: The running cohorts. Those whose search ends are removed from it.
        replay: Runs the step as a captured one where that is possible.

    Returns:
        The cohorts whose search has ended.
    """
    if len(running) == 1:
        return [] if running[0].go_on_alone() else [running.pop()]
    over: list[_Cohort] = []
    for cohort, output in zip(list(running), step(running, replay), strict=True):
        cohort.note_steps(1, cohort.search.batch_size)
        if not cohort.backend.select(output):
            running.remove(cohort)
            over.append(cohort)
    if over:
        replay.forget()
    return over


def not_refilled(reason: object) -> str:
    """Return the note of a plan that no other sentences take freed rows."""
    return f"batches do not refill: {reason}"


def reason_not_to_refill(devices: Iterable[str]) -> str | None:
    """Return why cohorts on devices of these types do not run together; None if they do."""
    setting, others = config.settings().refill, sorted(set(devices) - {"cpu"})
    if setting == "off":
        return "FASTGEN_REFILL=off"
    return f"on {others[0]} it has not been measured" if others and setting == "auto" else None


@dataclass
class Occupancy:
    """Occupancy of finished cohorts, which tells whether starting others pays.

    Attributes:
        decoded: Sum over the steps of those cohorts of the sentences in the batch.
        places: The same sum if no sentence had left.
    """

    decoded: int = 0
    places: int = 0

    def note(self, cohort: InFlightBatch) -> None:
        """Add a finished cohort."""
        self.decoded += cohort.decoded
        self.places += cohort.steps * cohort.sentences

    def room(self, running: Sequence[InFlightBatch], tokens: int) -> int:
        """Return the tokens that another cohort may take now.

        Args:
            running: The running cohorts.
            tokens: Tokens that all cohorts together may take.

        Returns:
            The number of tokens; 0 if no cohort may start.
        """
        if not running:
            return tokens
        if len(running) == MAX_IN_FLIGHT or self.decoded >= OCCUPIED * self.places:
            return 0
        free = tokens - sum(cohort.tokens for cohort in running)
        return free if free >= FREED * tokens else 0
