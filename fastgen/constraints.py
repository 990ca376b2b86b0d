"""Constraints of constrained beam search: phrases that the generated text must contain.

Pass them to `generate` as ``constraints=[...]``; ``force_words_ids`` builds them from plain lists.
The classes have the names that they had in transformers 4. User-defined constraint classes are not
supported.

Sources: Anderson et al. 2017 (constrained beam search); Post and Vilar 2018 (banks of dynamic beam
allocation).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

__all__ = ["Constraint", "DisjunctiveConstraint", "PhrasalConstraint"]


@dataclass(frozen=True)
class Constraint:
    """A constraint that the text contains one of several phrases, token by token.

    Attributes:
        phrases: Token ids of each phrase; no phrase is a prefix of another.
    """

    phrases: tuple[tuple[int, ...], ...]

    @property
    def longest(self) -> int:
        return max(map(len, self.phrases))

    def following(self, begun: tuple[int, ...]) -> list[int]:
        """Return the tokens that continue the partial phrase `begun`, without duplicates."""
        count = len(begun)
        tokens = (p[count] for p in self.phrases if len(p) > count and p[:count] == begun)
        return list(dict.fromkeys(tokens))


class PhrasalConstraint(Constraint):
    """A constraint that the text contains one phrase.

    Args:
        token_ids: The token ids of the phrase.

    Raises:
        ValueError: `token_ids` is not a non-empty list of token ids; the message contains it.
    """

    def __init__(self, token_ids: list[int]) -> None:
        if not _is_phrase(token_ids):
            raise ValueError(f"token_ids must be a list of token ids, not {token_ids!r}")
        super().__init__((tuple(token_ids),))


class DisjunctiveConstraint(Constraint):
    """A constraint that the text contains at least one of several phrases.

    Args:
        nested_token_ids: The token ids of each phrase.

    Raises:
        ValueError: `nested_token_ids` is not a non-empty list of phrases, or one phrase is a prefix
            of another; the message contains the value.
    """

    def __init__(self, nested_token_ids: list[list[int]]) -> None:
        if not isinstance(cast(Any, nested_token_ids), list) or not nested_token_ids:
            raise ValueError(
                f"nested_token_ids must be a list of lists of token ids, not {nested_token_ids!r}"
            )
        if not all(map(_is_phrase, nested_token_ids)):
            raise ValueError(
                f"nested_token_ids must be a list of lists of token ids, not {nested_token_ids!r}"
            )
        phrases = tuple(map(tuple, nested_token_ids))
        for i, phrase in enumerate(phrases):
            if any(other[: len(phrase)] == phrase for j, other in enumerate(phrases) if j != i):
                raise ValueError(
                    f"nested_token_ids: {list(phrase)} is the beginning of another of "
                    f"{nested_token_ids}"
                )
        super().__init__(phrases)


def constraints_of(constraints: Any, force_words_ids: Any) -> tuple[Constraint, ...]:
    """Return the constraints of a call, from constraint objects and from plain lists.

    Args:
        constraints: Constraint objects, or None.
        force_words_ids: Phrases, or lists of alternative phrases, as token ids; or None.

    Raises:
        TypeError: An object is not a constraint of this module; the message contains it.
        ValueError: An entry of `force_words_ids` is neither a phrase nor a list of alternative
            phrases, or there are no constraints at all.
    """
    merged = list[Constraint](constraints or ())
    for constraint in merged:
        if not isinstance(cast(Any, constraint), Constraint):
            raise TypeError(
                "constraints must be PhrasalConstraint or DisjunctiveConstraint of "
                f"fastgen.constraints, not {constraint!r}"
            )
    if force_words_ids is not None:
        merged += _of_words(force_words_ids)
    if not merged:
        raise ValueError(f"constraints={constraints!r}: constrained beam search needs one at least")
    return tuple(merged)


def _of_words(words: Any) -> list[Constraint]:
    message = (
        "force_words_ids must be a list of lists of token ids, or of lists of such lists, not "
        f"{words!r}"
    )
    if not isinstance(words, list) or not words:
        raise ValueError(message)
    constraints: list[Constraint] = []
    for word in cast("list[Any]", words):
        if _is_phrase(word):
            constraints.append(PhrasalConstraint(word))
        elif isinstance(word, list) and word and all(map(_is_phrase, cast("list[Any]", word))):
            constraints.append(DisjunctiveConstraint(cast("list[list[int]]", word)))
        else:
            raise ValueError(message)
    return constraints


def _is_phrase(tokens: Any) -> bool:
    if not isinstance(tokens, list) or not tokens:
        return False
    return all(isinstance(token, int) and token >= 0 for token in cast("list[Any]", tokens))


@dataclass(frozen=True)
class Progress:
    """The progress of a text towards fulfilling a list of constraints.

    Attributes:
        pending: Constraints of which the text contains nothing yet.
        current: The constraint that the end of the text partially fulfils, and the tokens of that
            part; None if there is none.
        met: Number of fulfilled constraints.
        longest: Length in tokens of the longest phrase of all constraints.
    """

    pending: tuple[Constraint, ...]
    current: tuple[Constraint, tuple[int, ...]] | None
    met: int
    longest: int

    @classmethod
    def start(cls, constraints: Sequence[Constraint]) -> Progress:
        return cls(
            tuple(constraints), None, 0, max(constraint.longest for constraint in constraints)
        )

    @property
    def complete(self) -> bool:
        return not self.pending and self.current is None

    @property
    def bank(self) -> int:
        """Progress as a number, by which beams are grouped into banks.

        Each fulfilled constraint counts `longest`. A partially fulfilled one counts `longest` minus
        the tokens that it still lacks.
        """
        if self.current is None:
            return self.met * self.longest
        constraint, begun = self.current
        return self.met * self.longest + self.longest - (constraint.longest - len(begun))

    @property
    def wanted(self) -> list[int]:
        """The tokens that make progress."""
        if self.current is not None:
            constraint, begun = self.current
            return constraint.following(begun)
        return [token for constraint in self.pending for token in constraint.following(())]

    def behind(self, token: int) -> Progress:
        """Return the progress after one more token.

        A token that breaks off a partially fulfilled constraint starts no other one, as in
        transformers 4.
        """
        if self.current is not None:
            constraint, begun = self.current
            if token in constraint.following(begun):
                return self._with(constraint, (*begun, token), self.pending)
            return Progress((*self.pending, constraint), None, self.met, self.longest)
        for i, constraint in enumerate(self.pending):
            if token in constraint.following(()):
                return self._with(constraint, (token,), self.pending[:i] + self.pending[i + 1 :])
        return self

    def _with(
        self, constraint: Constraint, begun: tuple[int, ...], pending: tuple[Constraint, ...]
    ) -> Progress:
        if begun in constraint.phrases:
            return Progress(pending, None, self.met + 1, self.longest)
        return Progress(pending, (constraint, begun), self.met, self.longest)
