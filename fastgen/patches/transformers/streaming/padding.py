"""Padding of sentences that are generated together, which logits processors must not notice."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastgen.patches.transformers.compat import INSTALLED


def eos_tokens_of(config: Any) -> Tensor:
    """Return the end tokens (N,) int64 of a generation config."""
    ends = config.eos_token_id
    return torch.tensor([] if ends is None else ends, dtype=torch.int64, device="cpu").flatten()


@dataclass(frozen=True)
class Padding:
    """How sentences of different lengths may be padded.

    Attributes:
        fill: The token to pad with.
        same_length: Whether only sentences of equal length may share a batch, without padding.
        context: Number of a prompt's last tokens for which that holds if one of them is `fill`.
    """

    fill: int
    same_length: bool
    context: int

    @classmethod
    def of(cls, config: Any, encoder_decoder: bool, processors: bool = False) -> "Padding":
        """Return the padding for a generation config.

        Args:
            config: The generation config, as `generate` prepares it.
            encoder_decoder: Whether sources are padded, on the right, instead of prompts.
            processors: Whether the call has logits processors of its own.
        """
        ends, fill = eos_tokens_of(config), config.pad_token_id
        # A negative end token never ends a text, and is no token to pad with.
        fill = max(0, int(ends[0] if fill is None and len(ends) else fill or 0))
        same_length = bool(config.encoder_no_repeat_ngram_size)
        same_length |= config.encoder_repetition_penalty not in (None, 1.0)
        if encoder_decoder:
            return cls(fill, same_length, 0)
        ngram = config.no_repeat_ngram_size or 0
        penalty = config.repetition_penalty not in (None, 1.0)
        same_length |= (
            processors
            or ngram == 1
            # An end token ends a text, so that no n-gram of generated tokens goes on after it.
            or (ngram > 1 and fill not in ends)
            or config.forced_bos_token_id is not None
            or (penalty and not INSTALLED.penalty_skips_padding)
            or any(len(tokens) > 1 and fill in tokens for tokens in _matched(config))
        )
        return cls(fill, same_length, max(0, ngram - 1))

    def length_of(self, ids: Tensor) -> int:
        """Return the length that the other sentences of a batch must have; 0 for any.

        Args:
            ids: (L,) int64, a sentence of the batch.
        """
        context = ids[len(ids) - min(self.context, len(ids)) :]
        return len(ids) if self.same_length or bool((context == self.fill).any()) else 0


def _matched(config: Any) -> Iterator[Sequence[int]]:
    """Yield the token sequences that logits processors look for at the end of a text."""
    yield from config.bad_words_ids or ()
    biases = config.sequence_bias or ()
    yield from biases if isinstance(biases, Mapping) else (tokens for tokens, _ in biases)
