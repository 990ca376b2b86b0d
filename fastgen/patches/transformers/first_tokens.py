"""`forced_bos_token_id` as a list: a first token of its own for each sentence of a batch, such as its language.

transformers takes one token for all sentences. Its processor is patched, in `disabled()` too, so that whichever loop
runs forces the same tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastgen.decoding.text import Force, Text


def of_sentences(forced: Any) -> Tensor | None:
    """The first tokens (B,) int64 of the sentences; None where there is one for all of them, or none.

    Raises:
        TypeError: it is not made of integers; with the value.
    """
    if forced is None or isinstance(forced, int):
        return None
    tokens = torch.as_tensor(forced)
    if tokens.is_floating_point() or tokens.dim() > 1:
        raise TypeError(f"forced_bos_token_id={forced!r} is no token, nor a list of one for each sentence")
    return tokens.long() if tokens.numel() > 1 else None


def check(forced: Any, sentences: int, vocabulary: int) -> None:
    """Raise ValueError where a list has not a token of the vocabulary for each sentence."""
    tokens = of_sentences(forced)
    if tokens is None:
        return
    if len(tokens) != sentences:
        raise ValueError(f"forced_bos_token_id has {len(tokens)} tokens, and the batch {sentences} sentences")
    for extreme in (int(tokens.min()), int(tokens.max())):
        if not 0 <= extreme < vocabulary:
            raise ValueError(f"forced_bos_token_id has {extreme}, and the vocabulary {vocabulary} tokens")


def force(original: Callable[..., Tensor], self: Any, input_ids: Tensor, scores: Tensor) -> Tensor:
    """`ForcedBOSTokenLogitsProcessor.__call__`; input_ids (R, L), scores (R, V), rows of a sentence side by side.

    Raises:
        ValueError: the rows are not those of as many sentences.
    """
    tokens = of_sentences(self.bos_token_id)
    if tokens is None or input_ids.shape[-1] != 1:
        return original(self, input_ids, scores)
    if len(scores) % len(tokens):
        raise ValueError(f"forced_bos_token_id has {len(tokens)} tokens, which do not divide {len(scores)} rows")
    return Force(tokens, lambda _: True, by_sentence=True)(scores, Text(input_ids, prompt_length=1))
