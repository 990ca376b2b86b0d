"""Drafts of the next tokens of texts, which the model then verifies in one pass."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from fastgen.decoding.search.sampling import Sampling


class Draft(Protocol):
    """A source of drafts."""

    def propose(self, search: Sampling, model: Any, most: int) -> Tensor:
        """Return the likely next tokens of the R texts of a greedy search.

        Args:
            search: The search; not modified.
            model: The stepper of its decode steps.
            most: Maximum number of tokens per text.

        Returns:
            (R, K) int64 with K <= `most`; K is 0 if there is no draft.
        """
        ...


@dataclass
class PromptLookup:
    """Drafts copied from the source and the text: what followed the newest tokens last time.

    A long n-gram is a better sign than a short one, so a shorter match drafts fewer tokens.

    Args:
        largest: Number of newest tokens that are looked for first; then one fewer, down to 1.
        source: (B, S) int64, the source of each text in the same vocabulary; None for none.

    Source: Saxena 2023 (prompt lookup decoding); Yang et al. 2023 (LLMA).
    """

    largest: int = 3
    source: Tensor | None = None
    _histories: dict[int, "_History"] = field(default_factory=dict[int, "_History"], init=False)

    def propose(self, search: Sampling, model: Any, most: int) -> Tensor:
        drafts, ids = list[list[int]](), search.ids
        for row, text in enumerate(search.numbers()):
            history = self._histories.get(text)
            if history is None:
                history = self._histories[text] = _History(self._source_of(text), self.largest)
            history.add(cast("list[int]", cast(Any, ids[row, history.length :]).tolist()))
            drafts.append(history.following(most))
        shortest = min(map(len, drafts), default=0)
        tokens = [draft[:shortest] for draft in drafts]
        return torch.tensor(tokens, dtype=torch.int64, device=ids.device).view(len(ids), shortest)

    def _source_of(self, text: int) -> list[int]:
        return [] if self.source is None else cast(Any, self.source[text]).tolist()


class _History:
    """The source and the tokens of a text, with the place of each n-gram.

    Args:
        source: Tokens of the source.
        largest: Largest n.

    Attributes:
        length: Number of tokens of the text, without the source.
    """

    def __init__(self, source: Sequence[int], largest: int) -> None:
        self.largest, self.length = largest, 0
        self.tokens = [*source, -1] if source else []
        # What follows each n-gram begins here; the newest n-gram, which nothing follows, is left
        # out. A later place replaces an earlier one.
        self.places: dict[tuple[int, ...], int] = {}
        for end in range(1, len(self.tokens)):
            self._note(end)

    def add(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self._note(len(self.tokens))
            self.tokens.append(token)
        self.length += len(tokens)

    def _note(self, end: int) -> None:
        for n in range(1, min(self.largest, end) + 1):
            self.places[tuple(self.tokens[end - n : end])] = end

    def following(self, most: int) -> list[int]:
        """Return up to `most` tokens that followed the newest n-gram at its last other place."""
        for n in range(min(self.largest, len(self.tokens)), 0, -1):
            place = self.places.get(tuple(self.tokens[-n:]))
            if place is not None:
                found = self.tokens[place : place + max(1, most >> (self.largest - n))]
                return found[: found.index(-1)] if -1 in found else found
        return []


@dataclass
class Longest:
    """Tries several sources of drafts, and takes the longest draft.

    Stops at the first draft of the maximum length.

    Args:
        drafts: Sources of drafts, cheapest first.
    """

    drafts: Sequence[Draft]

    def propose(self, search: Sampling, model: Any, most: int) -> Tensor:
        longest = search.ids[:, :0]
        for draft in self.drafts:
            tokens = draft.propose(search, model, most)
            if tokens.shape[1] > longest.shape[1]:
                longest = tokens
            if longest.shape[1] == most:
                break
        return longest
