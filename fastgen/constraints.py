"""What a text has to hold: constraints of constrained beam search.

They are given to `generate` as ``constraints=[...]``; ``force_words_ids`` makes them of plain lists. transformers 4 had
classes of these names; those of its users' own are not taken here.

Source: Anderson et al. 2017 (constrained beam search), Post and Vilar 2018 (banks of dynamic beam allocation).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

__all__ = ["Constraint", "DisjunctiveConstraint", "PhrasalConstraint"]


@dataclass(frozen=True)
class Constraint:
    """One of some phrases has to be in the text, token by token.

    Attributes:
        phrases: token ids; no phrase begins with another.
    """

    phrases: tuple[tuple[int, ...], ...]

    @property
    def longest(self) -> int:
        return max(map(len, self.phrases))

    def following(self, begun: tuple[int, ...]) -> list[int]:
        """The tokens that go on with what has begun, each once."""
        count = len(begun)
        found = (p[count] for p in self.phrases if len(p) > count and p[:count] == begun)
        return list(dict.fromkeys(found))


class PhrasalConstraint(Constraint):
    """A phrase has to be in the text.

    Raises:
        ValueError: token_ids is not a list of token ids with one at least; with the value.
    """

    def __init__(self, token_ids: list[int]) -> None:
        if not _is_phrase(token_ids):
            raise ValueError(f"token_ids must be a list of token ids, not {token_ids!r}")
        super().__init__((tuple(token_ids),))


class DisjunctiveConstraint(Constraint):
    """One of some phrases has to be in the text.

    Raises:
        ValueError: nested_token_ids is not a list of such phrases, or one begins with another; with the value.
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
                    f"nested_token_ids: {list(phrase)} is the beginning of another of {nested_token_ids}"
                )
        super().__init__(phrases)


def constraints_of(constraints: Any, force_words_ids: Any) -> tuple[Constraint, ...]:
    """The constraints of a call, from what it says by objects and by plain lists.

    Raises:
        TypeError: an object is no constraint of this module; with the value.
        ValueError: a list is not one of phrases, or of lists of alternative phrases; or there is none at all.
    """
    found = list[Constraint](constraints or ())
    for constraint in found:
        if not isinstance(cast(Any, constraint), Constraint):
            raise TypeError(
                f"constraints must be PhrasalConstraint or DisjunctiveConstraint of fastgen.constraints, not "
                f"{constraint!r}"
            )
    if force_words_ids is not None:
        found += _of_words(force_words_ids)
    if not found:
        raise ValueError(f"constraints={constraints!r}: constrained beam search needs one at least")
    return tuple(found)


def _of_words(words: Any) -> list[Constraint]:
    said = f"force_words_ids must be a list of lists of token ids, or of lists of such lists, not {words!r}"
    if not isinstance(words, list) or not words:
        raise ValueError(said)
    found: list[Constraint] = []
    for word in cast("list[Any]", words):
        if _is_phrase(word):
            found.append(PhrasalConstraint(word))
        elif isinstance(word, list) and word and all(map(_is_phrase, cast("list[Any]", word))):
            found.append(DisjunctiveConstraint(cast("list[list[int]]", word)))
        else:
            raise ValueError(said)
    return found


def _is_phrase(tokens: Any) -> bool:
    if not isinstance(tokens, list) or not tokens:
        return False
    return all(isinstance(token, int) and token >= 0 for token in cast("list[Any]", tokens))


@dataclass(frozen=True)
class Progress:
    """How far a text has come with a list of constraints.

    Attributes:
        pending: those of which nothing stands.
        current: the one of which a part stands at the text's end, if any, and that part.
        met: how many stand.
        longest: tokens of the longest phrase of all.
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
        """How far, as a number; what is left of a shorter constraint is less."""
        if self.current is None:
            return self.met * self.longest
        constraint, begun = self.current
        return self.met * self.longest + self.longest - (constraint.longest - len(begun))

    @property
    def wanted(self) -> list[int]:
        """The tokens that bring the text further."""
        if self.current is not None:
            constraint, begun = self.current
            return constraint.following(begun)
        return [token for constraint in self.pending for token in constraint.following(())]

    def behind(self, token: int) -> Progress:
        """How far the text has come with one more token.

        A token that breaks off a constraint begins no other, as in transformers 4.
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
