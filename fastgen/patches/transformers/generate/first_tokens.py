"""`forced_bos_token_id` as a list: one first token per sentence of a batch, such as its language.

transformers accepts one token for all sentences. The patch of its logits processor also applies in
`disabled()`, so that every decoding loop forces the same tokens.
"""

import operator
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor

from fastgen.decoding.logits.forced_tokens import ForcedTokens
from fastgen.decoding.logits.text import Text


def of_sentences(forced: Any) -> Tensor | None:
    """Return the first tokens (B,) int64 of the sentences; None if there is at most one token.

    Args:
        forced: The value of `forced_bos_token_id`.

    Raises:
        TypeError: The value is neither an integer nor a flat list of integers.
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
    """Raise ValueError if a list does not hold one token of the vocabulary per sentence."""
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
    """Replace `ForcedBOSTokenLogitsProcessor.__call__`.

    Args:
        input_ids: (R, L) int64. The rows of a sentence are adjacent.
        scores: (R, V).

    Raises:
        ValueError: The number of rows is not a multiple of the number of tokens.
    """
    tokens = of_sentences(self.bos_token_id)
    if tokens is None or input_ids.shape[-1] != 1:
        return original(self, input_ids, scores)
    if len(scores) % len(tokens):
        raise ValueError(
            f"forced_bos_token_id has {len(tokens)} tokens, which do not divide {len(scores)} rows"
        )
    return ForcedTokens(tokens, lambda _: True, by_sentence=True)(
        scores, Text(input_ids, prompt_length=1)
    )


class Beside:
    """Reader of the first tokens of a stream of sentences.

    Args:
        tokens: One token per sentence.
        vocabulary: Size of the vocabulary.
    """

    def __init__(self, tokens: Iterable[Any], vocabulary: int) -> None:
        self._tokens, self._vocabulary, self._taken = iter(tokens), vocabulary, 0

    def take(self) -> int:
        """Return the token of the next sentence.

        Raises:
            TypeError: The token is not an integer.
            ValueError: The token is not in the vocabulary, or there are no more tokens.
        """
        for token in self._tokens:
            self._taken += 1
            return self._checked(token)
        raise ValueError(
            f"forced_bos_token_id has {self._taken} tokens, and there are more sentences"
        )

    def end(self) -> None:
        """Raise ValueError if tokens remain after the last sentence."""
        for _ in self._tokens:
            raise ValueError(
                f"forced_bos_token_id has more tokens than the {self._taken} sentences"
            )

    def _checked(self, token: Any) -> int:
        try:
            token_id = operator.index(token)
        except TypeError:
            raise TypeError(f"forced_bos_token_id has {token!r}, which is no token") from None
        if not 0 <= token_id < self._vocabulary:
            raise ValueError(
                f"forced_bos_token_id has {token_id}, and the vocabulary {self._vocabulary} tokens"
            )
        return token_id


def beside(forced: Any, vocabulary: int) -> Beside | None:
    """Return the first tokens of a stream's sentences; None if all share one token or have none.

    Raises:
        TypeError: `forced` is neither a token nor an iterable of tokens.
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
