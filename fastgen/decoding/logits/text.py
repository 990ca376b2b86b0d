"""Token ids of the running rows, which logits transforms read."""

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Text:
    """Token ids of the running rows; row b * M + m is beam m of sentence b.

    Attributes:
        ids: (R, L) int64, prompt included.
        prompt_length: Length of the prompt in tokens.
        length: Length of the text in tokens; less than L if `ids` is a buffer with unused capacity.
        filled: (1,) int64, `length` on the device, for captured steps; else None.
    """

    ids: Tensor
    prompt_length: int
    length: int = -1
    filled: Tensor | None = None

    def __post_init__(self) -> None:
        if self.length < 0:
            self.length = self.ids.shape[1]
