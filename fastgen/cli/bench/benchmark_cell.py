"""One cell of the table of `fastgen bench`: a model, a number of beams and a batch size."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from fastgen.cli.bench.agreement import Agreements
from fastgen.cli.bench.counts import Counts, counts
from fastgen.cli.bench.measure import Outcome, both, compare, synchronize
from fastgen.cli.bench.rounded import Quality, Rounded
from fastgen.cli.bild.sweep import batches_of
from fastgen.corpus.models import first_line

LOOPS = ("transformers.beam_search", "transformers.sample")


@dataclass(frozen=True)
class Cell:
    """Result of one cell.

    Attributes:
        beams: number of beams.
        batch: batch size.
        tokens: tokens generated in a round, without padding.
        outcome: result of the comparison; None if the cell was not measured.
        counted: what fastgen counted during the measurement.
        problem: why the cell was not measured; empty if time ran out.
        quality: of a cell in int8, scores of the texts in the model's precision and in int8.
    """

    beams: int
    batch: int
    tokens: int = 0
    outcome: Outcome | None = None
    counted: Counts = field(default_factory=Counts)
    problem: str = ""
    quality: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """Whether nothing went wrong. A cell that was skipped for lack of time is good."""
        return self.outcome.agrees if self.outcome is not None else not self.problem

    @property
    def ran(self) -> bool:
        """Whether fastgen's decode loops served the calls."""
        return any(name in self.counted.hits for name in LOOPS)

    def notes(self) -> list[str]:
        """Return what fastgen declined or ran without, with reasons."""
        left_off = [
            f"disabled in {count} calls: {what}"
            for what, count in sorted(self.counted.left_off.items())
        ]
        declined = [
            f"declined {count} calls: {what}"
            for what, count in sorted(self.counted.fallbacks.items())
        ]
        return [*left_off, *declined]

    def to_dict(self) -> dict[str, Any]:
        """Return the cell as JSON-ready data."""
        return {
            "beams": self.beams,
            "batch": self.batch,
            "tokens": self.tokens,
            "outcome": None if self.outcome is None else self.outcome.to_dict(),
            **asdict(self.counted),
            "problem": self.problem,
            "quality": self.quality,
        }


def measure(
    model: Any,
    sources: Sequence[list[int]],
    beams: int,
    batch: int,
    options: dict[str, Any],
    rounds: int,
    seconds: float,
    quality: Quality | None = None,
) -> Cell:
    """Generate from all sources with transformers' own code and with fastgen, in turn.

    Args:
        model: the model to measure.
        sources: token ids of each source. Sorted by length and split into batches of `batch`.
        beams: number of beams.
        batch: batch size.
        options: arguments of `generate` besides `num_beams`.
        rounds: the most rounds to run. There are fewer if time is short, but at least one, after a
            warm-up round that shows how long a round takes.
        seconds: time to spend.
        quality: compares and scores outputs in int8; None if outputs have to agree.
    """
    begin = time.perf_counter()
    parts = batches_of(sources, batch, model)
    batches, places = [one.inputs for one in parts], [p for one in parts for p in one.places]
    options = options | {"num_beams": beams}
    agreements = Agreements(model, batches, options) if quality is None else Rounded(model, batches)
    wait = partial(synchronize, str(model.device))

    def compared(rounds: int) -> Outcome:
        arms = both(lambda: [model.generate(**inputs, **options) for inputs in batches])
        return compare(*arms, rounds, agreements, warmup=0, synchronize=wait)

    before = counts()
    try:
        outcome = compared(1)  # warms up
        if outcome.agrees:
            left = seconds - (time.perf_counter() - begin)
            outcome = compared(max(1, min(rounds, int(left / sum(outcome.rounds[0])))))
    except Exception as error:  # a model that fails in one cell must not end the others
        problem = f"{type(error).__name__}: {first_line(error)}"
        return Cell(beams, batch, counted=counts().since(before), problem=problem)
    scores = {} if quality is None else quality(agreements, places)
    return Cell(beams, batch, agreements.tokens, outcome, counts().since(before), quality=scores)
