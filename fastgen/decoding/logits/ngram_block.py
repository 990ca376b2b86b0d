"""N-gram blocking."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fastgen.decoding.logits.text import Text
from fastgen.decoding.logits.transform import LogitsTransform, NGrams
from fastgen.ops.selection.ngram_block import ngram_block_, ngram_mask, ngram_mask_


@dataclass
class NGramBlock(LogitsTransform):
    """A ban on tokens that would repeat an n-gram of their row, or of a source text.

    The row includes its prompt and padding.

    Attributes:
        n: Size of the n-grams.
        source: (B, S) int64 source texts, as in `ops.selection.ngram_block`; a single row serves
            all sentences. None to compare with the row itself.
        shortest: Minimum length of a text for bans, in tokens.
    """

    n: int
    source: Tensor | None = None
    shortest: int = 0

    form = "token mask"

    @property
    def ngrams(self) -> NGrams:
        """The same as C reads it."""
        return NGrams(self.n, self._least, self.source)

    @property
    def depends_on_rows(self) -> bool:
        """Whether each sentence has a source text of its own."""
        return self.source is not None and len(self.source) > 1

    def active(self, length: int) -> bool:
        """Return whether a token can be banned in texts of this length."""
        return length >= self._least

    def idle(self, text: Text) -> bool:
        """Return whether the text is shorter than an n-gram."""
        return self.source is None and text.length < self.n

    def keep_sentences(self, sentences: Tensor, beams: int) -> None:
        """Keep the source texts of only the given sentences."""
        if self.source is not None and len(self.source) > 1:
            self.source = self.source[sentences.to(self.source.device)]

    def add_to_mask(self, mask: Tensor, text: Text, vocabulary: int) -> None:
        """Add the banned tokens to a token mask (R, ceil(V / 32)) int32."""
        if self.active(text.length):
            ngram_mask_(
                mask, text.ids, self.n, vocabulary, self._source_on(mask.device), text.filled
            )

    def token_mask(self, text: Text, vocabulary: int) -> Tensor:
        """Return the banned tokens as a new token mask (R, ceil(V / 32)) int32."""
        if not self.active(text.length):
            return super().token_mask(text, vocabulary)
        source = self._source_on(text.ids.device)
        return ngram_mask(text.ids, self.n, vocabulary, source, text.filled)

    def __call__(self, scores: Tensor, text: Text) -> Tensor:
        if text.filled is not None:  # `ids` has unused capacity, which must not be matched.
            return super().__call__(scores, text)
        if text.length < self.shortest:
            return scores
        return ngram_block_(scores, text.ids, self.n, self._source_on(scores.device))

    @property
    def _least(self) -> int:
        """Minimum length of a text in which a token can be banned."""
        return max(self.shortest, self.n - (self.source is not None))

    def _source_on(self, device: torch.device) -> Tensor | None:
        if self.source is not None:
            self.source = self.source.to(device)
        return self.source
