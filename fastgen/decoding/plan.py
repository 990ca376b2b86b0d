"""What a call will run: decided once, before anything has happened."""

from dataclasses import dataclass


class Unsupported(Exception):
    """A call cannot be accelerated; the reason is counted, and the toolkit's own code runs.

    Raised before the call has had any effect.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Plan:
    """What a call runs.

    Attributes:
        method: "beam search", "beam sampling", "greedy search" or "sampling".
        sentences, beams: B and M, where M counts the rows of a sentence: beams, or sequences to sample.
        shared: whether the rows of a sentence share one cache of the prompt and the encoder's output.
        drop: whether finished sentences leave the batch.
        left_off: what does not run, each with its reason.
    """

    method: str
    sentences: int
    beams: int
    shared: bool
    drop: bool
    left_off: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        return self.sentences * self.beams
