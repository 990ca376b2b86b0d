"""The tokens of the running rows, and the edits that look at them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import torch
from torch import Tensor

from fastgen.ops.selection.kbest import LogitsUpdates, SparseUpdate
from fastgen.ops.selection.ngram_block import ngram_block_, ngram_mask_
from fastgen.ops.selection.sample import nucleus
from fastgen.ops.selection.token_mask import add_tokens_, empty_mask, packed, unpacked


@dataclass
class Text:
    """Token ids of the running rows: ids (R, L) int64, prompt included; row b * M + m is beam m of sentence b.

    With room behind the text, `length` says where it ends; `filled` (1,) int64 says it on the device.
    """

    ids: Tensor
    prompt_length: int
    length: int = -1
    filled: Tensor | None = None

    def __post_init__(self) -> None:
        if self.length < 0:
            self.length = self.ids.shape[1]


class LogitsTransform(Protocol):
    """A change of the scores (R, V) fp32 before selection; may work in place, returns the result."""

    def idle(self, text: Text) -> bool:
        """Whether the scores themselves are handed on, and not a copy, to a function of the user's behind this."""
        ...

    def __call__(self, scores: Tensor, text: Text) -> Tensor: ...


@dataclass
class NGramBlock:
    """Ban tokens that would repeat an n-gram of their row, prompt and padding included, or of a source.

    source: (B, S), as `ops.selection.ngram_block` has it; one row serves all sentences.
    shortest: length of a text that is looked at.
    """

    n: int
    source: Tensor | None = None
    shortest: int = 0

    def idle(self, text: Text) -> bool:
        return self.source is None and text.length < self.n

    def __call__(self, scores: Tensor, text: Text) -> Tensor:
        if text.filled is not None:  # the text has room behind it, which is no part of it
            mask = empty_mask(scores.shape[0], scores.shape[1], scores.device)
            self.add_to(mask, text, scores.shape[1])
            return scores.masked_fill_(unpacked(mask, scores.shape[1]), -torch.inf)
        if text.length < self.shortest:
            return scores
        return ngram_block_(scores, text.ids, self.n, self._source_on(scores.device))

    def add_to(self, mask: Tensor, text: Text, vocabulary: int) -> None:
        """Add what this bans to a token mask (R, ceil(V / 32))."""
        if self.active(text.length):
            ngram_mask_(
                mask, text.ids, self.n, vocabulary, self._source_on(mask.device), text.filled
            )

    @property
    def least(self) -> int:
        """Length from which on a text can have anything banned."""
        return max(self.shortest, self.n - (self.source is not None))

    def active(self, length: int) -> bool:
        """Whether texts of a length can have anything banned."""
        return length >= self.least

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
    _within: Tensor | None = field(
        default=None, init=False
    )  # the vocabulary, found at the first use

    def __post_init__(self) -> None:
        self.tokens = self.tokens.to(torch.int64)  # an empty list makes a tensor of floats

    def idle(self, text: Text) -> bool:
        return self.passes and not self.active(text.length)

    def __call__(self, scores: Tensor, text: Text) -> Tensor:
        if self.active(text.length):
            if self._within is None:
                within = (self.tokens >= 0) & (self.tokens < scores.shape[1])
                self._within = self.tokens[within].to(scores.device)
            scores.index_fill_(1, self._within, -torch.inf)
        return scores

    def add_to(self, mask: Tensor, text: Text, vocabulary: int) -> None:
        """Add what this bans to a token mask (R, ceil(V / 32))."""
        if self.active(text.length):
            self.tokens = self.tokens.to(mask.device)
            add_tokens_(mask, self.tokens[None], vocabulary)


@dataclass
class Only:
    """Leave only one token, with the score that it has, at the lengths for which `active` holds."""

    token: int
    active: Callable[[int], bool]

    def idle(self, text: Text) -> bool:
        return not self.active(text.length)

    def __call__(self, scores: Tensor, text: Text) -> Tensor:
        if self.active(text.length):
            scores[:, : self.token] = -torch.inf
            scores[:, self.token + 1 :] = -torch.inf
        return scores

    def add_to(self, mask: Tensor, text: Text, vocabulary: int) -> None:
        """Add what this bans to a token mask (R, ceil(V / 32))."""
        if self.active(text.length):
            mask |= packed(
                torch.arange(vocabulary, device=mask.device, dtype=torch.int64)[None] != self.token
            )


@dataclass
class TokenBias:
    """Add to the scores of some tokens of the vocabulary: tokens (N,) int64, offsets (N,) fp32."""

    tokens: Tensor
    offsets: Tensor

    def idle(self, text: Text) -> bool:
        return False

    def __call__(self, scores: Tensor, text: Text) -> Tensor:
        self.tokens, self.offsets = self.tokens.to(scores.device), self.offsets.to(scores.device)
        return scores.index_add_(
            1, self.tokens, self.offsets.to(scores.dtype).expand(scores.shape[0], -1)
        )

    def changes(self, text: Text, vocabulary: int) -> SparseUpdate:
        """What this does to log-probabilities."""
        rows, device = text.ids.shape[0], text.ids.device
        self.tokens, self.offsets = self.tokens.to(device), self.offsets.to(device)
        offsets = self.offsets.expand(rows, -1)
        return SparseUpdate(self.tokens.expand(rows, -1), torch.ones_like(offsets), offsets)


@dataclass
class SequenceShift:
    """Add to the scores of tokens that would complete sequences.

    offsets: of each sequence of tokens of the vocabulary; those with the same last token add up.
    beyond: how many tokens a text must have at least, beside a sequence's tokens before the last.
    """

    offsets: Mapping[tuple[int, ...], float]
    beyond: int
    _tokens: Tensor | None = field(default=None, init=False)  # (N,) int64, the different last ones
    _alone: Tensor | None = field(
        default=None, init=False
    )  # (N,) fp32, offsets of sequences of one token
    _behind: list[tuple[Tensor, Tensor, Tensor]] = (
        field(  # by length: tokens before (G, L), column (G,), offset (G,)
            default_factory=list[tuple[Tensor, Tensor, Tensor]], init=False
        )
    )

    def idle(self, text: Text) -> bool:
        return False

    def reach(self, length: int) -> int:
        """How many tokens of a text of this length are looked at."""
        lengths = (len(sequence) - 1 for sequence in self.offsets)
        return max((before for before in lengths if before + self.beyond <= length), default=0)

    def __call__(self, scores: Tensor, text: Text) -> Tensor:
        tokens, _, offsets = self.changes(text, scores.shape[1])
        return scores.index_add_(1, tokens[0], offsets.to(scores.dtype))

    def changes(self, text: Text, vocabulary: int) -> SparseUpdate:
        """What this does to log-probabilities."""
        tokens, alone = self._made(text.ids.device)
        ids, offsets = text.ids, alone.expand(text.ids.shape[0], -1).clone()
        for before, column, offset in self._behind:
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
            found = (last[:, None] == before).all(-1)
            offsets.index_add_(1, column, torch.where(found, offset, 0.0))
        return SparseUpdate(tokens.expand(len(ids), -1), torch.ones_like(offsets), offsets)

    def _made(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._tokens is None or self._alone is None or self._tokens.device != device:
            tokens = list(dict.fromkeys(sequence[-1] for sequence in self.offsets))
            alone = [self.offsets.get((token,), 0.0) for token in tokens]
            self._tokens = torch.tensor(tokens, dtype=torch.int64, device=device)
            self._alone = torch.tensor(alone, dtype=torch.float32, device=device)
            by_length: dict[int, list[tuple[int, ...]]] = {}
            for sequence in self.offsets:
                if len(sequence) > 1:
                    by_length.setdefault(len(sequence), []).append(sequence)
            self._behind = [
                (
                    torch.tensor(
                        [sequence[:-1] for sequence in alike], device=device, dtype=torch.int64
                    ),
                    torch.tensor(
                        [tokens.index(sequence[-1]) for sequence in alike],
                        device=device,
                        dtype=torch.int64,
                    ),
                    torch.tensor(
                        [self.offsets[sequence] for sequence in alike],
                        dtype=torch.float32,
                        device=device,
                    ),
                )
                for alike in by_length.values()
            ]
        return self._tokens, self._alone


@dataclass
class Penalty:
    """Make the tokens of a row's own text less likely: a negative score times `factor`.

    start: where the text begins, for all rows or (R,) for each.
    dense: the toolkit's function of (ids, scores) that does it to all scores.
    Source: Keskar et al. 2019 (CTRL), section 4.1.
    """

    factor: float
    start: int | Tensor
    dense: Callable[[Tensor, Tensor], Tensor]
    _whole: bool = field(default=True, init=False)  # whether the rows are those that `dense` knows

    def idle(self, text: Text) -> bool:
        return False

    def keep(self, rows: Tensor) -> None:
        """Only these rows go on, int64 indices into the present ones."""
        if isinstance(self.start, Tensor):
            self.start, self._whole = self.start.to(rows.device)[rows], False

    def __call__(self, scores: Tensor, text: Text) -> Tensor:
        if text.filled is None and self._whole:
            return self.dense(text.ids, scores)
        rows, vocabulary = scores.shape
        seen = torch.zeros(rows, vocabulary + 1, dtype=torch.bool, device=scores.device)
        seen = seen.scatter_(1, self._tokens(text, vocabulary), True)[:, :vocabulary]
        return torch.where(
            seen, torch.where(scores < 0, scores * self.factor, scores / self.factor), scores
        )

    def _tokens(self, text: Text, outside: int) -> Tensor:
        """Token ids (R, L), `outside` where they are not of the text that counts."""
        if isinstance(self.start, Tensor):
            self.start = self.start.to(text.ids.device)
        start = self.start[:, None] if isinstance(self.start, Tensor) else self.start
        column = torch.arange(text.ids.shape[1], device=text.ids.device, dtype=torch.int64)
        others = column < start
        if text.filled is not None:
            others = others | (column >= text.filled)
        return text.ids.masked_fill(others, outside)

    def changes(self, text: Text, vocabulary: int) -> SparseUpdate:
        """What this does to log-probabilities, which are never positive."""
        tokens = self._tokens(text, vocabulary).sort(1).values
        again = torch.nn.functional.pad(tokens[:, 1:] == tokens[:, :-1], (1, 0))
        factors = torch.full(tokens.shape, self.factor, dtype=torch.float32, device=tokens.device)
        return SparseUpdate(
            tokens.masked_fill(again, vocabulary), factors, torch.zeros_like(factors)
        )


def keep_sentences(
    transforms: Iterable[LogitsTransform], sentences: Tensor, beams: int = 1
) -> None:
    """Only these sentences go on under edits, int64 indices into the present ones, of so many rows each."""
    rows = (
        sentences[:, None] * beams + torch.arange(beams, device=sentences.device, dtype=torch.int64)
    ).flatten()
    for edit in transforms:
        if isinstance(edit, Penalty):
            edit.keep(rows)


@dataclass
class Force:
    """Leave only one token, with score 0, at the lengths for which `active` holds; at others the scores pass.

    tokens: of all rows; those that are left, where they are several.
    by_sentence: tokens (B,) has one of each sentence instead, all of which are there at these lengths.
    """

    tokens: Tensor
    active: Callable[[int], bool]
    by_sentence: bool = False

    @property
    def single(self) -> bool:
        """Whether each row has one token left."""
        return self.by_sentence or self.tokens.numel() == 1

    def of_rows(self, rows: int) -> Tensor:
        """The one token (R,) of each row."""
        if not self.by_sentence:
            return self.tokens.expand(rows)
        return self.tokens.repeat_interleave(rows // len(self.tokens), output_size=rows)

    def idle(self, text: Text) -> bool:
        return not self.active(text.length)

    def __call__(self, scores: Tensor, text: Text) -> Tensor:
        if self.active(text.length):
            self.tokens = self.tokens.to(scores.device)
            scores = torch.full_like(scores, -torch.inf)
            if self.by_sentence:
                scores.scatter_(1, self.of_rows(len(scores))[:, None], 0.0)
            else:
                scores[:, self.tokens] = 0
        return scores


@dataclass
class TopP:
    """Leave the most probable tokens that have a mass of `top_p` together, at least `least` of them.

    dense: the toolkit's function of (ids, scores), for rows in which many tokens are left or rounding decides.
    Source: Holtzman et al. 2020, section 3.1.
    """

    top_p: float
    least: int
    dense: Callable[[Tensor, Tensor], Tensor]
    _count: int = field(default=64, init=False)  # how many of a row are looked at
    _pause: int = field(
        default=0, init=False
    )  # steps for which the toolkit's function runs at once
    _failed: int = field(default=0, init=False)  # how often in succession few were not enough

    def idle(self, text: Text) -> bool:
        return False

    def __call__(self, scores: Tensor, text: Text) -> Tensor:
        if scores.device.type == "cpu" and text.filled is None and not self._pause:
            left, sure = nucleus(scores, self.top_p, self.least, self._count)
            rows = (~sure).nonzero()[:, 0]
            if 4 * len(rows) <= len(scores):
                if len(rows):
                    left[rows] = self.dense(text.ids[rows], scores[rows])
                self._failed = 0
                return left
            self._failed += 1
            self._count = 512  # of a vocabulary of 50,000 as quick to find as 64
            self._pause = min(2**self._failed, 64)
        self._pause = max(0, self._pause - 1)
        return self.dense(text.ids, scores)


@dataclass
class Call:
    """Any function of (ids, scores), such as a toolkit's or a user's logits processor.

    static: whether it is a function of the scores alone, for which no device is waited for.
    """

    function: Callable[[Tensor, Tensor], Tensor]
    static: bool = False

    def idle(self, text: Text) -> bool:
        return False

    def __call__(self, scores: Tensor, text: Text) -> Tensor:
        return self.function(text.ids.contiguous(), scores)


def only_ban(transforms: Sequence[LogitsTransform], text: Text) -> bool:
    """Whether the edits do nothing in this step but to ban tokens."""
    return all(isinstance(edit, NGramBlock | Ban | Only) or edit.idle(text) for edit in transforms)


def sparse(
    transforms: Sequence[LogitsTransform], text: Text, vocabulary: int
) -> LogitsUpdates | None:
    """Return what the edits do in this step to few tokens, or None when they do anything else."""
    active = [edit for edit in transforms if not edit.idle(text)]
    bans = [edit for edit in active if isinstance(edit, NGramBlock | Ban | Only)]
    changing = [edit for edit in active if isinstance(edit, TokenBias | SequenceShift | Penalty)]
    forcing = [edit for edit in active if isinstance(edit, Force) and edit.single]
    if (
        len(bans) + len(changing) + len(forcing) < len(active)
        or len(changing) > 1
        or len(forcing) > 1
    ):
        return None
    if (
        forcing and active[-1] is not forcing[0]
    ):  # what comes later may ban or change the forced token
        return None
    rows, device = text.ids.shape[0], text.ids.device
    for force in forcing:
        force.tokens = force.tokens.to(device)
    mask = empty_mask(rows, vocabulary, device) if bans else None
    for ban in bans:
        ban.add_to(cast(Tensor, mask), text, vocabulary)
    return LogitsUpdates(
        changing[0].changes(text, vocabulary) if changing else None,
        mask,
        forcing[0].of_rows(rows) if forcing else None,
    )


def capturable(transforms: Sequence[LogitsTransform]) -> bool:
    """Whether the edits do the same wherever `phases` is the same, reading on the device what changes."""
    return all(not isinstance(edit, Call) or edit.static for edit in transforms)


def phases(transforms: Sequence[LogitsTransform], length: int) -> tuple[int, ...]:
    """What the edits make of a length; where it is the same, they do the same."""
    return tuple(
        edit.reach(length) if isinstance(edit, SequenceShift) else edit.active(length)
        for edit in transforms
        if isinstance(edit, NGramBlock | Ban | Only | Force | SequenceShift)
    )


def apply_transforms(
    scores: Tensor, text: Text, transforms: Sequence[LogitsTransform], kept: bool = False
) -> Tensor:
    """Apply the edits in order; `scores` may be changed in place.

    kept: the caller keeps scores too, and edits of ours leave it alone; a user's function sees and may change it.
    """
    original = scores
    for edit in transforms:
        if edit.idle(text):
            continue
        own = scores is original and kept and not isinstance(edit, Call)
        scores = edit(scores.clone() if own else scores, text)
    return scores
