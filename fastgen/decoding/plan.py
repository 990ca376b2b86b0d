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
        method: "beam search", "beam sampling", "greedy search" or "sampling"; or one that transformers 5 has taken out,
            "diverse beam search", "constrained beam search" or "contrastive search".
        sentences, beams: B and M, where M counts the rows of a sentence: beams, sequences to sample, or candidates.
        shared: whether keys and values are in fastgen's cache, where the rows of a sentence share those of the prompt
            and of the encoder's output; else every row has its own in the toolkit's cache, if there is one at all.
        fused: whether decode steps are made from the model's weights; else its own modules make them.
        graphs: whether they are captured as CUDA graphs, and replayed.
        drop: whether finished sentences leave the batch.
        left_off: what does not run, each with its reason.
        not_in_c: why fused decode steps on a CPU run as torch operations and not in C; empty where they do.
    """

    method: str
    sentences: int
    beams: int
    shared: bool
    drop: bool
    fused: bool = False
    graphs: bool = False
    left_off: tuple[str, ...] = ()
    not_in_c: str = ""

    @property
    def rows(self) -> int:
        return self.sentences * self.beams

    @property
    def missing(self) -> list[str]:
        """Return what costs most of the gain, with the reasons; what would not pay is not missing."""
        found = [
            note
            for note in self.left_off
            if note.startswith(_COSTLY) and "does not pay" not in note
        ]
        return [
            *found,
            *([f"decode steps run in torch, not in C: {self.not_in_c}"] if self.not_in_c else []),
        ]


_COSTLY = ("keys and values are not shared", "decode steps run through the model's own modules")
