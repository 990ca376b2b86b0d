"""Sentences that started together: a loop that decodes them alone, or one step at a time beside others.

Cohorts that run side by side share the products of their steps and nothing else. Each keeps its own search, keys,
values, masks and positions, so that nothing moves when one joins, and no source is padded to that of another.

Sources: Hoang et al. 2018 (Amun), section 2.1 (rows that are freed are taken by waiting sentences); Yu et al. 2022
(Orca), section 3.2 (selective batching).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from fastgen import config
from fastgen.decoding.loop import Search, Stepper, backend_of
from fastgen.models.cuda_graphs.replay import JointReplay, Opened, Result
from fastgen.models.runtime.decode_step import Context, DecoderStep
from fastgen.models.runtime.joint_step import joint_step

COHORTS = 3
"""Cohorts that run side by side at most."""

FREED = 0.75
"""The share of all tokens that must have been freed before others start."""

OCCUPIED = 0.5
"""The share of places taken, over the steps of cohorts that are done, below which others start."""

_Made = TypeVar(
    "_Made"
)  # what a step says of the next tokens: logits, or what a search makes of them
_Made_co = TypeVar("_Made_co", covariant=True)


class JoinableStepper(Stepper[_Made_co], Protocol[_Made_co]):
    """A stepper whose steps can be made together with those of others: of one model or several."""

    @property
    def decoders(self) -> Sequence[DecoderStep]: ...
    @property
    def longest(self) -> int:
        """Tokens of a text at most, for which `decoders` were made."""
        ...

    def is_replayed(self, rows: int) -> bool:
        """Whether the next step, of so many rows, may be captured, or has been."""
        ...

    def begin_step(self, ids: Tensor) -> Sequence[Context]:
        """Open a step of the newest token of ids (R, L), which is made together with those of others."""
        ...

    def open_step(self, ids: Tensor) -> Sequence[Opened]:
        """The same, for a step that is captured."""
        ...

    def end_step(self, results: Sequence[Result]) -> _Made_co:
        """Return what `step` does of what each of the decoders has made."""
        ...


@dataclass(eq=False)
class Cohort(Generic[_Made]):
    """A search that has begun, and the model that makes its steps.

    Attributes:
        sentences: that it began with.
        width: tokens that each takes in a batch, padding counted.
        steps: that were made beside others, or could have been. decoded: sentences in them, all steps together.
    """

    search: Search[_Made]
    model: JoinableStepper[_Made]
    sentences: int
    width: int
    steps: int = 0
    decoded: int = 0

    def __post_init__(self) -> None:
        self._backend = backend_of(self.search, self.model)

    def go_on_alone(self) -> bool:
        """Make a step, or as many in a row as nobody has to look at; return whether the search goes on."""
        present, length = self.search.present, self.search.text.length
        going = self._backend.advance()
        self.note_steps(max(1, self.search.text.length - length), present)
        return going

    def note_steps(self, steps: int, present: int) -> None:
        """So many have been made, of so many sentences."""
        self.steps, self.decoded = self.steps + steps, self.decoded + steps * present

    @property
    def tokens(self) -> int:
        """Of the sentences that are still there."""
        return self.search.present * self.width


_Cohort = TypeVar("_Cohort", bound=Cohort[Any])


def step(cohorts: Sequence[Cohort[_Made]], replay: JointReplay) -> list[_Made]:
    """Make one step of several; return what it says of the next tokens of each."""
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
        made = [
            joint_step(decoder, newest, parts)
            for decoder, parts in zip(decoders, contexts, strict=True)
        ]
        results = zip(*made, strict=True)
    return [model.end_step(of_model) for model, of_model in zip(models, results, strict=True)]


def advance(running: list[_Cohort], replay: JointReplay) -> list[_Cohort]:
    """Make a step of all that run, or go on with the only one; take out those whose search is over, and return them."""
    if len(running) == 1:
        return [] if running[0].go_on_alone() else [running.pop()]
    over: list[_Cohort] = []
    for cohort, made in zip(list(running), step(running, replay), strict=True):
        cohort.note_steps(1, cohort.search.present)
        if not cohort.search.advance(cohort.model, made):
            running.remove(cohort)
            over.append(cohort)
    if over:
        replay.forget()
    return over


def left_empty(reason: object) -> str:
    """How a plan says that no others start beside a cohort."""
    return f"rows that are freed stay empty: {reason}"


def reason_not_to_refill(devices: Iterable[str]) -> str | None:
    """Why no cohort of models on devices of these types starts beside others."""
    wanted, others = config.settings().refill, sorted(set(devices) - {"cpu"})
    if wanted == "off":
        return "FASTGEN_REFILL=off"
    return f"on {others[0]} it has not been measured" if others and wanted == "auto" else None


@dataclass
class Occupancy:
    """How many of their places the sentences of cohorts that are done have taken: whether it pays to start others.

    Attributes:
        decoded: sentences in the steps of those cohorts. places: for sentences in them.
    """

    decoded: int = 0
    places: int = 0

    def note(self, cohort: Cohort[Any]) -> None:
        """A cohort is done."""
        self.decoded += cohort.decoded
        self.places += cohort.steps * cohort.sentences

    def room(self, running: Sequence[Cohort[Any]], tokens: int) -> int:
        """Tokens of a cohort that may start beside those that run, of `tokens` in all; 0 for none."""
        if not running:
            return tokens
        if len(running) == COHORTS or self.decoded >= OCCUPIED * self.places:
            return 0
        free = tokens - sum(cohort.tokens for cohort in running)
        return free if free >= FREED * tokens else 0
