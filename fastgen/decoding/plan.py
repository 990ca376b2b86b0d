"""The execution plan of a generation call, fixed before the call has any effect."""

from dataclasses import dataclass, field


class Unsupported(Exception):
    """A call cannot be accelerated, so the toolkit's own code runs and the reason is counted.

    It is raised before the call has had any effect.

    Attributes:
        reason: The fallback reason.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Plan:
    """The optimizations that a generation call uses.

    Attributes:
        method: "beam search", "beam sampling", "greedy search" or "sampling"; or one of the methods
            that transformers 5 removed: "diverse beam search", "constrained beam search" or
            "contrastive search".
        sentences: Batch size B.
        beams: Rows per sentence M: beams, sequences to sample, or candidates.
        shared: Whether fastgen's KV cache is used, in which the rows of a sentence share the keys
            and values of the prompt and of the encoder output. Otherwise every row has its own in
            the toolkit's cache, if there is one.
        drop: Whether finished sentences leave the batch.
        fused: Whether decode steps run as a fused pipeline over the model's weights instead of
            through its modules.
        graphs: Whether decode steps are captured as CUDA graphs and replayed.
        left_off: Features that are disabled for this call, each with its reason.
        not_in_c: Why fused decode steps on a CPU run as torch operations instead of in C; empty
            if they run in C.
        int8: Whether decode steps run on weights rounded to int8, which changes the output.
        common: First tokens that the prompts of all sentences have in common, which run once; 0 if
            every prompt runs whole.
        cached: First tokens of all prompts whose keys and values come from the prefix cache.
        keeps_prefix: Whether the prefix cache keeps the call's first tokens, or its whole text.
        apart: Whether decode steps read one copy of the keys and values of these tokens, which
            otherwise every sentence has.
        family: What the verdict on a family without a spec depends on; None for other families, and
            where keys and values are not shared.
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
    int8: bool = False
    common: int = 0
    cached: int = 0
    keeps_prefix: bool = False
    apart: bool = False
    family: tuple[object, ...] | None = field(default=None, repr=False, compare=False)

    @property
    def rows(self) -> int:
        return self.sentences * self.beams

    @property
    def missing(self) -> list[str]:
        """The disabled features that cost most of the speedup, with their reasons.

        Features that are disabled because they do not pay are left out.
        """
        costly = [
            note
            for note in self.left_off
            if note.startswith(_COSTLY) and "too few to gain" not in note
        ]
        return [
            *costly,
            *([f"decode steps run in torch, not in C: {self.not_in_c}"] if self.not_in_c else []),
        ]


_COSTLY = ("keys and values are not shared", "decode steps run through the model's own modules")
