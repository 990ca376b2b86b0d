"""`forced_bos_token_id` as a list: a first token of its own for each sentence of a batch, such as its language.

transformers takes one token for all sentences. Its processor is patched, in `disabled()` too, so that whichever loop
runs forces the same tokens.
"""

import operator
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor

from fastgen.decoding.logits.transforms import Force, Text


def of_sentences(forced: Any) -> Tensor | None:
    """The first tokens (B,) int64 of the sentences; None where there is one for all of them, or none.

    Raises:
        TypeError: it is not made of integers; with the value.
    """
    if forced is None or isinstance(forced, int):
        return None
    tokens = torch.as_tensor(forced, device=forced.device if isinstance(forced, Tensor) else "cpu")
    if tokens.is_floating_point() or tokens.dim() > 1:
        raise TypeError(
            f"forced_bos_token_id={forced!r} is no token, nor a list of one for each sentence"
        )
    return tokens.long() if tokens.numel() > 1 else None


def check(forced: Any, sentences: int, vocabulary: Callable[[], int]) -> None:
    """Raise ValueError where a list has not a token of the vocabulary for each sentence."""
    tokens = of_sentences(forced)
    if tokens is None:
        return
    if len(tokens) != sentences:
        raise ValueError(
            f"forced_bos_token_id has {len(tokens)} tokens, and the batch {sentences} sentences"
        )
    size = vocabulary()
    for extreme in (int(tokens.min()), int(tokens.max())):
        if not 0 <= extreme < size:
            raise ValueError(f"forced_bos_token_id has {extreme}, and the vocabulary {size} tokens")


def force(original: Callable[..., Tensor], self: Any, input_ids: Tensor, scores: Tensor) -> Tensor:
    """`ForcedBOSTokenLogitsProcessor.__call__`; input_ids (R, L), scores (R, V), rows of a sentence side by side.

    Raises:
        ValueError: the rows are not those of as many sentences.
    """
    tokens = of_sentences(self.bos_token_id)
    if tokens is None or input_ids.shape[-1] != 1:
        return original(self, input_ids, scores)
    if len(scores) % len(tokens):
        raise ValueError(
            f"forced_bos_token_id has {len(tokens)} tokens, which do not divide {len(scores)} rows"
        )
    return Force(tokens, lambda _: True, by_sentence=True)(scores, Text(input_ids, prompt_length=1))


class Beside:
    """A first token for each sentence of a stream, read beside the sentences.

    Args:
        vocabulary: tokens that there are.
    """

    def __init__(self, tokens: Iterable[Any], vocabulary: int) -> None:
        self._tokens, self._vocabulary, self._taken = iter(tokens), vocabulary, 0

    def take(self) -> int:
        """The token of the next sentence.

        Raises:
            TypeError, ValueError: it is no token of the vocabulary, or there is none.
        """
        for token in self._tokens:
            self._taken += 1
            return self._checked(token)
        raise ValueError(
            f"forced_bos_token_id has {self._taken} tokens, and there are more sentences"
        )

    def end(self) -> None:
        """Raise ValueError where a token is left, behind the last sentence."""
        for _ in self._tokens:
            raise ValueError(
                f"forced_bos_token_id has more tokens than the {self._taken} sentences"
            )

    def _checked(self, token: Any) -> int:
        try:
            found = operator.index(token)
        except TypeError:
            raise TypeError(f"forced_bos_token_id has {token!r}, which is no token") from None
        if not 0 <= found < self._vocabulary:
            raise ValueError(
                f"forced_bos_token_id has {found}, and the vocabulary {self._vocabulary} tokens"
            )
        return found


def beside(forced: Any, vocabulary: int) -> Beside | None:
    """What a stream reads beside its sentences; None where there is one token for all of them, or none.

    Raises:
        TypeError: it is neither a token nor some of them.
    """
    if isinstance(forced, Tensor):
        forced = cast(Any, forced).tolist()
    if (
        forced is None
        or isinstance(forced, int)
        or (isinstance(forced, list | tuple) and len(cast(Any, forced)) == 1)
    ):
        return None
    if not isinstance(forced, Iterable) or isinstance(forced, str):
        raise TypeError(f"forced_bos_token_id={forced!r} is no token, nor one for each sentence")
    return Beside(cast("Iterable[Any]", forced), vocabulary)
