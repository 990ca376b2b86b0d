"""The tokens of the running rows, and the edits and stops that look at them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fastgen.ops.ngram_block import ngram_block_, ngram_mask_
from fastgen.ops.token_mask import add_tokens_, empty_mask


@dataclass
class Text:
    """Token ids of the running rows: ids (R, L) int64, prompt included; row b * M + m is beam m of sentence b."""

    ids: Tensor
    prompt_length: int

    @property
    def length(self) -> int:
        return self.ids.shape[1]


class Edit(Protocol):
    """A change of the scores (R, V) fp32 before selection; may work in place, returns the result."""

    def idle(self, text: Text) -> bool:
        """Whether the scores themselves are handed on, and not a copy, to a function of the user's behind this."""
        ...

    def __call__(self, scores: Tensor, text: Text) -> Tensor: ...


def closed_up(count: int, leaving: Sequence[int]) -> list[int]:
    """Say who stays of `count` rows: the last ones take the places of those that leave, so that few move."""
    gone, left = set(leaving), count - len(leaving)
    last = iter(row for row in range(left, count) if row not in gone)
    return [next(last) if place in gone else place for place in range(left)]


@dataclass
class NGramBlock:
    """Ban tokens that would repeat an n-gram of their row, prompt and padding included, or of a source.

    source: (B, S), as `ops.ngram_block` has it.
    """

    n: int
    source: Tensor | None = None

    def idle(self, text: Text) -> bool:
        return self.source is None and text.length < self.n

    def __call__(self, scores: Tensor, text: Text) -> Tensor:
        return ngram_block_(scores, text.ids, self.n, self._source_on(scores.device))

    def add_to(self, mask: Tensor, text: Text, vocabulary: int) -> None:
        """Add what this bans to a token mask (R, ceil(V / 32))."""
        ngram_mask_(mask, text.ids, self.n, vocabulary, self._source_on(mask.device))

    def _source_on(self, device: torch.device) -> Tensor | None:
        if self.source is not None:
            self.source = self.source.to(device)
        return self.source


@dataclass
class Ban:
    """Ban tokens at the lengths for which `active` holds; ids beyond the vocabulary are ignored.

    passes: at other lengths the scores are handed on themselves; else a copy, where somebody keeps them.
    """

    tokens: Tensor
    active: Callable[[int], bool]
    passes: bool = False
    _within: Tensor | None = field(default=None, init=False)  # the vocabulary, found at the first use

    def idle(self, text: Text) -> bool:
        return self.passes and not self.active(text.length)

    def __call__(self, scores: Tensor, text: Text) -> Tensor:
        if self.active(text.length):
            if self._within is None:
                within = (self.tokens >= 0) & (self.tokens < scores.shape[1])
                self._within = self.tokens[within].to(scores.device)
            scores[:, self._within] = -torch.inf
        return scores

    def add_to(self, mask: Tensor, text: Text, vocabulary: int) -> None:
        """Add what this bans to a token mask (R, ceil(V / 32))."""
        if self.active(text.length):
            add_tokens_(mask, self.tokens.to(mask.device)[None], vocabulary)


@dataclass
class Force:
    """Leave only one token, with score 0, at the lengths for which `active` holds; at others the scores pass."""

    tokens: Tensor
    active: Callable[[int], bool]

    def idle(self, text: Text) -> bool:
        return not self.active(text.length)

    def __call__(self, scores: Tensor, text: Text) -> Tensor:
        if self.active(text.length):
            scores = torch.full_like(scores, -torch.inf)
            scores[:, self.tokens.to(scores.device)] = 0
        return scores


@dataclass
class Call:
    """Any function of (ids, scores), such as a toolkit's or a user's logits processor."""

    function: Callable[[Tensor, Tensor], Tensor]

    def idle(self, text: Text) -> bool:
        return False

    def __call__(self, scores: Tensor, text: Text) -> Tensor:
        return self.function(text.ids, scores)


class Bans(NamedTuple):
    """What a step's edits ban: a token mask (R, ceil(V / 32)), or None for nothing."""

    mask: Tensor | None


def banned(edits: Sequence[Edit], text: Text, vocabulary: int) -> Bans | None:
    """Return what the edits ban in this step, or None when one of them does anything else."""
    mask: Tensor | None = None
    for edit in edits:
        if edit.idle(text):
            continue
        if not isinstance(edit, NGramBlock | Ban):
            return None
        if mask is None:
            mask = empty_mask(text.ids.shape[0], vocabulary, text.ids.device)
        edit.add_to(mask, text, vocabulary)
    return Bans(mask)


def edited(scores: Tensor, text: Text, edits: Sequence[Edit], kept: bool = False) -> Tensor:
    """Apply the edits in order; `scores` may be changed in place.

    kept: the caller keeps scores too, and edits of ours leave it alone; a user's function sees and may change it.
    """
    original = scores
    for edit in edits:
        if edit.idle(text):
            continue
        own = scores is original and kept and not isinstance(edit, Call)
        scores = edit(scores.clone() if own else scores, text)
    return scores


@dataclass
class Stop:
    """When a row is at its end.

    Args:
        eos: token ids (E,) that end a row, or None.
        at_length: functions of the length that end all rows at once (a maximal length, a time limit).
        others: functions of (ids (N, L), scores so far) -> bool (N,), such as a user's stopping criteria.
    """

    eos: Tensor | None = None
    at_length: Sequence[Callable[[int], bool]] = ()
    others: Sequence[Callable[[Tensor, object], Tensor]] = field(default_factory=tuple)

    def __call__(self, tokens: Tensor, length: int, ids: Callable[[], Tensor], scores: object) -> Tensor:
        """Return for each new token, any shape, whether its row ends; `length` counts the new token.

        `ids` builds the rows (N, length) when a function asks for them; `scores` is handed through.
        """
        over = [ends(length) for ends in self.at_length]  # every function is asked: a limit may warn
        if any(over):
            hits = torch.ones_like(tokens, dtype=torch.bool)
        elif self.eos is not None:
            hits = torch.isin(tokens, self.eos)
        else:
            hits = torch.zeros_like(tokens, dtype=torch.bool)
        if self.others:
            rows = ids()
            for function in self.others:
                hits = hits | function(rows, scores).view_as(hits)
        return hits
