"""Bans of tokens that depend on the length of the text alone."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastgen.decoding.logits.text import Text
from fastgen.decoding.logits.transform import LogitsTransform
from fastgen.ops.selection.token_mask import add_tokens_, packed


@dataclass
class TokenBan(LogitsTransform):
    """A ban on tokens at some lengths.

    Attributes:
        tokens: (N,) int64 token ids; ids outside the vocabulary are ignored.
        at: Returns whether the ban applies to texts of a length.
        skipped: Whether the transform is idle at other lengths, so that the next transform gets
            the same tensor. Otherwise it gets a copy if the caller keeps the scores.
    """

    tokens: Tensor
    at: Callable[[int], bool] = lambda _: True
    skipped: bool = False
    # The tokens that are in the vocabulary, computed at the first use.
    _within: Tensor | None = field(default=None, init=False)

    form = "token mask"
    by_length = True
    unread = ("at",)
    reads_text = False

    def __post_init__(self) -> None:
        self.tokens = self.tokens.to(torch.int64)  # An empty list gives a float tensor.

    def active(self, length: int) -> bool:
        """Return whether the ban applies to texts of this length."""
        return self.at(length)

    def idle(self, text: Text) -> bool:
        """Return whether to skip the transform in this step."""
        return self.skipped and not self.at(text.length)

    def add_to_mask(self, mask: Tensor, text: Text, vocabulary: int) -> None:
        """Add the banned tokens to a token mask (R, ceil(V / 32)) int32."""
        if self.at(text.length):
            self.tokens = self.tokens.to(mask.device)
            add_tokens_(mask, self.tokens[None], vocabulary)

    def __call__(self, scores: Tensor, text: Text) -> Tensor:
        if self.at(text.length):
            if self._within is None:
                within = (self.tokens >= 0) & (self.tokens < scores.shape[1])
                self._within = self.tokens[within].to(scores.device)
            scores.index_fill_(1, self._within, -torch.inf)
        return scores


@dataclass
class OnlyToken(LogitsTransform):
    """A ban on all tokens but one, which keeps its score, at some lengths.

    Attributes:
        token: The token that remains.
        at: Returns whether the ban applies to texts of a length.
    """

    token: int
    at: Callable[[int], bool]

    form = "token mask"
    by_length = True
    unread = ("at",)
    reads_text = False

    def active(self, length: int) -> bool:
        """Return whether the ban applies to texts of this length."""
        return self.at(length)

    def add_to_mask(self, mask: Tensor, text: Text, vocabulary: int) -> None:
        """Add the banned tokens to a token mask (R, ceil(V / 32)) int32."""
        if self.at(text.length):
            tokens = torch.arange(vocabulary, device=mask.device, dtype=torch.int64)
            mask |= packed(tokens[None] != self.token)

    def __call__(self, scores: Tensor, text: Text) -> Tensor:
        if self.at(text.length):
            scores[:, : self.token] = -torch.inf
            scores[:, self.token + 1 :] = -torch.inf
        return scores
