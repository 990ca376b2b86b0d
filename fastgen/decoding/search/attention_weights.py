"""Cross-attention weights of a search, for the alignment of its hypotheses with the source."""

import torch
from torch import Tensor

from fastgen.decoding.kv_cache.room import steps_to_reserve


class AttentionWeights:
    """Cross-attention weights of all steps, written once per step and never moved.

    Attributes:
        origins: (B, M, T) int64, the beam that a running text was in when it got each token.
        rows: (T, B, M, S) fp32, with room to grow.
    """

    def __init__(
        self, sentences: int, beams: int, longest: int, width: int, device: torch.device
    ) -> None:
        self.origins = torch.zeros(sentences, beams, longest, dtype=torch.int64, device=device)
        self.rows = torch.empty(0, sentences, beams, width, dtype=torch.float32, device=device)

    def ensure_capacity(self, step: int, steps: int = 1) -> None:
        """Grow `rows` so that `steps` steps can be written from `step` on."""
        longest = self.origins.shape[2]
        least = min(step + steps, max(step + 1, longest))
        if least > self.rows.shape[0]:
            elements = self.rows.shape[1:].numel()
            grown = self.rows.new_empty(
                max(least, step + steps_to_reserve(step, longest, self.rows, elements)),
                *self.rows.shape[1:],
            )
            grown[: self.rows.shape[0]] = self.rows
            self.rows = grown

    def write(self, attention: Tensor, step: int | Tensor) -> None:
        """Store a step's cross-attention weights.

        Args:
            attention: (B * M, S) or (B, S).
            step: index of the step; a (1,) int64 tensor if only the device knows it.
        """
        attention = attention.view(self.rows.shape[1], -1, attention.shape[1])
        if isinstance(step, Tensor):
            self.rows.index_copy_(
                0, step, attention.to(self.rows.dtype).expand(self.rows.shape[1:])[None]
            )
        else:
            self.rows[step] = attention

    def keep(self, sentences: Tensor) -> None:
        """Keep only the given sentences, int64 indices into the current batch."""
        self.origins, self.rows = self.origins[sentences], self.rows[:, sentences]

    def of(self, sentences: Tensor, origins: Tensor) -> Tensor:
        """Return the weights (N, S, T) fp32 of N texts.

        Args:
            sentences: (N,) int64, sentence of each text.
            origins: (N, T) int64, the beam that a text was in at each step.
        """
        step = torch.arange(origins.shape[1], device=sentences.device, dtype=torch.int64)
        return self.rows[step, sentences[:, None], origins].transpose(1, 2)
