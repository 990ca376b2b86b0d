"""Bias of tokens and token sequences."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastgen.decoding.logits.text import Text
from fastgen.decoding.logits.transform import LogitsTransform, Offsets
from fastgen.ops.selection.kbest import SparseUpdate


@dataclass
class SequenceBias(LogitsTransform):
    """An additive bias of tokens that would complete one of several token sequences.

    A sequence of one token biases that token everywhere.

    Attributes:
        biases: Bias of each sequence of token ids within the vocabulary. The biases of matching
            sequences with the same last token add up.
        beyond: Minimum number of tokens in a text, in addition to the sequence's tokens before
            the last.
    """

    biases: Mapping[tuple[int, ...], float]
    beyond: int = 0
    # (N,) int64, the distinct last tokens.
    _tokens: Tensor | None = field(default=None, init=False)
    # (N,) fp32, biases of sequences of one token.
    _alone: Tensor | None = field(default=None, init=False)
    # Longer sequences, by length: tokens before the last (G, L), column in `_tokens` (G,),
    # and bias (G,).
    _longer: list[tuple[Tensor, Tensor, Tensor]] = field(
        default_factory=list[tuple[Tensor, Tensor, Tensor]], init=False
    )

    form = "sparse update"

    @property
    def raises_scores(self) -> bool:
        """Whether a bias is positive."""
        return any(bias > 0 for bias in self.biases.values())

    @property
    def update(self) -> Offsets | None:
        """The same as C reads it, if all sequences are single tokens."""
        tokens, values = self._on(torch.device("cpu"))
        if self._longer or not bool(values.isfinite().all()):
            return None
        return Offsets(tokens, values)

    def phase(self, length: int) -> int:
        """Return how many of the last tokens of a text of this length are compared."""
        lengths = (len(sequence) - 1 for sequence in self.biases)
        return max((before for before in lengths if before + self.beyond <= length), default=0)

    def sparse_update(self, text: Text, vocabulary: int) -> SparseUpdate:
        """Return the transform as a sparse update of log-probabilities."""
        tokens, alone = self._on(text.ids.device)
        ids, offsets = text.ids, alone.expand(text.ids.shape[0], -1).clone()
        for before, column, offset in self._longer:
            count = before.shape[1]
            if text.length < count + self.beyond:
                continue
            if text.filled is None:
                last = ids[:, text.length - count : text.length]
            else:
                last = ids.index_select(
                    1,
                    torch.arange(count, device=ids.device, dtype=torch.int64)
                    + (text.filled - count),
                )
            is_match = (last[:, None] == before).all(-1)
            offsets.index_add_(1, column, torch.where(is_match, offset, 0.0))
        return SparseUpdate(tokens.expand(len(ids), -1), torch.ones_like(offsets), offsets)

    def __call__(self, scores: Tensor, text: Text) -> Tensor:
        tokens, _, offsets = self.sparse_update(text, scores.shape[1])
        return scores.index_add_(1, tokens[0], offsets.to(scores.dtype))

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the last tokens and their own biases on a device; build all tensors there."""
        if self._tokens is None or self._alone is None or self._tokens.device != device:
            tokens = list(dict.fromkeys(sequence[-1] for sequence in self.biases))
            alone = [self.biases.get((token,), 0.0) for token in tokens]
            self._tokens = torch.tensor(tokens, dtype=torch.int64, device=device)
            self._alone = torch.tensor(alone, dtype=torch.float32, device=device)
            by_length: dict[int, list[tuple[int, ...]]] = {}
            for sequence in self.biases:
                if len(sequence) > 1:
                    by_length.setdefault(len(sequence), []).append(sequence)
            column = {token: index for index, token in enumerate(tokens)}
            self._longer = [
                (
                    torch.tensor([one[:-1] for one in group], dtype=torch.int64, device=device),
                    torch.tensor(
                        [column[one[-1]] for one in group], dtype=torch.int64, device=device
                    ),
                    torch.tensor(
                        [self.biases[one] for one in group], dtype=torch.float32, device=device
                    ),
                )
                for group in by_length.values()
            ]
        return self._tokens, self._alone
