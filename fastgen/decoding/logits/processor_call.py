"""Logits processors that are called as they are."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from fastgen.decoding.logits.text import Text
from fastgen.decoding.logits.transform import LogitsTransform, Warper


@dataclass
class ProcessorCall(LogitsTransform):
    """A call of a toolkit's or user's logits processor.

    Attributes:
        function: Function of token ids (R, L) and scores (R, V). It gets the scores that the
            caller keeps, and may change them, as in the toolkit.
        static: Whether it depends on the scores alone and does not synchronize with the device.
        warper: Description of the processor for C, if it is a warper.
    """

    function: Callable[[Tensor, Tensor], Tensor]
    static: bool = False
    warper: Warper | None = None

    in_place = False

    @property
    def capturable(self) -> bool:
        """Whether the processor can be captured as part of a CUDA graph."""
        return self.static

    def __call__(self, scores: Tensor, text: Text) -> Tensor:
        return self.function(text.ids.contiguous(), scores)
