"""Forced tokens."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fastgen.decoding.logits.text import Text
from fastgen.decoding.logits.transform import LogitsTransform


@dataclass
class ForcedTokens(LogitsTransform):
    """Forced tokens: at some lengths all other tokens get -inf, and the forced ones get 0.

    Attributes:
        tokens: (N,) int64, the tokens that remain in all rows.
        at: Returns whether tokens are forced in texts of a length.
        by_sentence: Whether `tokens` is (B,) instead, one token per sentence.
    """

    tokens: Tensor
    at: Callable[[int], bool]
    by_sentence: bool = False

    by_length = True
    unread = ("at",)

    def __post_init__(self) -> None:
        if self.by_sentence or self.tokens.numel() == 1:
            self.form = "forced token"

    @property
    def capturable(self) -> bool:
        """Whether the transform can be captured as part of a CUDA graph."""
        return True

    @property
    def depends_on_rows(self) -> bool:
        """Whether each sentence has a token of its own."""
        return self.by_sentence

    def active(self, length: int) -> bool:
        """Return whether tokens are forced in texts of this length."""
        return self.at(length)

    def keep_sentences(self, sentences: Tensor, beams: int) -> None:
        """Keep the tokens of only the given sentences."""
        if self.by_sentence:
            self.tokens = self.tokens[sentences.to(self.tokens.device)]

    def forced_tokens(self, rows: int, device: torch.device) -> Tensor:
        """Return the forced token of each row, (R,) int64."""
        self.tokens = self.tokens.to(device)
        if not self.by_sentence:
            return self.tokens.expand(rows)
        return self.tokens.repeat_interleave(rows // len(self.tokens), output_size=rows)

    def __call__(self, scores: Tensor, text: Text) -> Tensor:
        if self.at(text.length):
            forced = torch.full_like(scores, -torch.inf)
            if self.by_sentence:
                tokens = self.forced_tokens(len(scores), scores.device)
                return forced.scatter_(1, tokens[:, None], 0.0)
            self.tokens = self.tokens.to(scores.device)
            forced[:, self.tokens] = 0
            return forced
        return scores
