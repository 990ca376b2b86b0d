"""Logits transforms, and the token ids of the running rows that they read."""

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
    """Token ids of the running rows; row b * M + m is beam m of sentence b.

    Attributes:
        ids: (R, L) int64, prompt included.
        prompt_length: Length of the prompt in tokens.
        length: Length of the text in tokens; less than L if `ids` is a buffer with unused capacity.
        filled: (1,) int64, `length` on the device, for captured steps; else None.
    """

    ids: Tensor
    prompt_length: int
    length: int = -1
    filled: Tensor | None = None

    def __post_init__(self) -> None:
        if self.length < 0:
            self.length = self.ids.shape[1]


class LogitsTransform(Protocol):
    """A transform of the scores (R, V) fp32 before token selection.

    It may work in place and returns the result.
    """

    def idle(self, text: Text) -> bool:
        """Return whether to skip the transform in this step.

        The next transform, such as a user's function, then gets the same tensor and not a copy.
        """
        ...

    def __call__(self, scores: Tensor, text: Text) -> Tensor: ...


@dataclass
class NGramBlock:
    """A ban on tokens that would repeat an n-gram of their row, or of a source text.

    The row includes its prompt and padding.

    Attributes:
        n: Size of the n-grams.
        source: (B, S) int64 source texts, as in `ops.selection.ngram_block`; a single row serves
            all sentences. None to compare with the row itself.
        shortest: Minimum length of a text for bans, in tokens.
    """

    n: int
    source: Tensor | None = None
    shortest: int = 0

    def idle(self, text: Text) -> bool:
        return self.source is None and text.length < self.n

    def __call__(self, scores: Tensor, text: Text) -> Tensor:
        if text.filled is not None:  # `ids` has unused capacity, which must not be matched.
            mask = empty_mask(scores.shape[0], scores.shape[1], scores.device)
            self.add_to(mask, text, scores.shape[1])
            return scores.masked_fill_(unpacked(mask, scores.shape[1]), -torch.inf)
        if text.length < self.shortest:
            return scores
        return ngram_block_(scores, text.ids, self.n, self._source_on(scores.device))

    def add_to(self, mask: Tensor, text: Text, vocabulary: int) -> None:
        """Add the banned tokens to a token mask (R, ceil(V / 32)) int32."""
        if self.active(text.length):
            ngram_mask_(
                mask, text.ids, self.n, vocabulary, self._source_on(mask.device), text.filled
            )

    @property
    def least(self) -> int:
        """Minimum length of a text in which a token can be banned."""
        return max(self.shortest, self.n - (self.source is not None))

    def active(self, length: int) -> bool:
        """Return whether a token can be banned in texts of this length."""
        return length >= self.least

    def _source_on(self, device: torch.device) -> Tensor | None:
        if self.source is not None:
            self.source = self.source.to(device)
        return self.source


@dataclass
class Ban:
    """A ban on tokens at the lengths for which `active` holds.

    Attributes:
        tokens: (N,) int64 token ids; ids outside the vocabulary are ignored.
        active: Function of the text's length.
        passes: Whether the transform is idle at other lengths, so that the next transform gets
            the same tensor. Otherwise it gets a copy if the caller keeps the scores.
    """

    tokens: Tensor
    active: Callable[[int], bool]
    passes: bool = False
    # The tokens that are in the vocabulary, computed at the first use.
    _within: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.tokens = self.tokens.to(torch.int64)  # An empty list gives a float tensor.

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
        """Add the banned tokens to a token mask (R, ceil(V / 32)) int32."""
        if self.active(text.length):
            self.tokens = self.tokens.to(mask.device)
            add_tokens_(mask, self.tokens[None], vocabulary)


@dataclass
class Only:
    """A ban on all tokens but one, which keeps its score, where `active` holds for the length."""

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
        """Add the banned tokens to a token mask (R, ceil(V / 32)) int32."""
        if self.active(text.length):
            mask |= packed(
                torch.arange(vocabulary, device=mask.device, dtype=torch.int64)[None] != self.token
            )


@dataclass
class TokenBias:
    """An additive bias of single tokens.

    Attributes:
        tokens: (N,) int64 token ids within the vocabulary.
        offsets: (N,) fp32, added to the scores of the tokens.
    """

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
        """Return the transform as a sparse update of log-probabilities."""
        rows, device = text.ids.shape[0], text.ids.device
        self.tokens, self.offsets = self.tokens.to(device), self.offsets.to(device)
        offsets = self.offsets.expand(rows, -1)
        return SparseUpdate(self.tokens.expand(rows, -1), torch.ones_like(offsets), offsets)


@dataclass
class SequenceShift:
    """An additive bias of tokens that would complete one of several token sequences.

    Attributes:
        offsets: Bias of each sequence of token ids within the vocabulary. The biases of matching
            sequences with the same last token add up.
        beyond: Minimum number of tokens in a text, in addition to the sequence's tokens before
            the last.
    """

    offsets: Mapping[tuple[int, ...], float]
    beyond: int
    # (N,) int64, the distinct last tokens.
    _tokens: Tensor | None = field(default=None, init=False)
    # (N,) fp32, biases of sequences of one token.
    _alone: Tensor | None = field(default=None, init=False)
    # Longer sequences, by length: tokens before the last (G, L), column in `_tokens` (G,),
    # and bias (G,).
    _behind: list[tuple[Tensor, Tensor, Tensor]] = field(
        default_factory=list[tuple[Tensor, Tensor, Tensor]], init=False
    )

    def idle(self, text: Text) -> bool:
        return False

    def reach(self, length: int) -> int:
        """Return how many of the last tokens of a text of this length are compared."""
        lengths = (len(sequence) - 1 for sequence in self.offsets)
        return max((before for before in lengths if before + self.beyond <= length), default=0)

    def __call__(self, scores: Tensor, text: Text) -> Tensor:
        tokens, _, offsets = self.changes(text, scores.shape[1])
        return scores.index_add_(1, tokens[0], offsets.to(scores.dtype))

    def changes(self, text: Text, vocabulary: int) -> SparseUpdate:
        """Return the transform as a sparse update of log-probabilities."""
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
            is_match = (last[:, None] == before).all(-1)
            offsets.index_add_(1, column, torch.where(is_match, offset, 0.0))
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
                        [sequence[:-1] for sequence in group], device=device, dtype=torch.int64
                    ),
                    torch.tensor(
                        [tokens.index(sequence[-1]) for sequence in group],
                        device=device,
                        dtype=torch.int64,
                    ),
                    torch.tensor(
                        [self.offsets[sequence] for sequence in group],
                        dtype=torch.float32,
                        device=device,
                    ),
                )
                for group in by_length.values()
            ]
        return self._tokens, self._alone


@dataclass
class Penalty:
    """A repetition penalty on the tokens of a row's own text.

    Negative scores are multiplied by `factor`, others are divided by it.

    Attributes:
        factor: The penalty.
        start: Index of the first token that counts, for all rows or (R,) per row.
        dense: The toolkit's function of (ids, scores) for all scores.

    Source: Keskar et al. 2019 (CTRL), section 4.1.
    """

    factor: float
    start: int | Tensor
    dense: Callable[[Tensor, Tensor], Tensor]
    # Whether no row has left, so that `dense`, which may depend on the rows, still applies.
    _whole: bool = field(default=True, init=False)

    def idle(self, text: Text) -> bool:
        return False

    def keep(self, rows: Tensor) -> None:
        """Keep only the given rows, int64 indices into the current ones."""
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
        """Return the token ids (R, L), replaced by `outside` where they do not count."""
        if isinstance(self.start, Tensor):
            self.start = self.start.to(text.ids.device)
        start = self.start[:, None] if isinstance(self.start, Tensor) else self.start
        column = torch.arange(text.ids.shape[1], device=text.ids.device, dtype=torch.int64)
        ignored = column < start
        if text.filled is not None:
            ignored = ignored | (column >= text.filled)
        return text.ids.masked_fill(ignored, outside)

    def changes(self, text: Text, vocabulary: int) -> SparseUpdate:
        """Return the transform as a sparse update of log-probabilities.

        Log-probabilities are never positive, so the update is a multiplication.
        """
        tokens = self._tokens(text, vocabulary).sort(1).values
        is_repeated = torch.nn.functional.pad(tokens[:, 1:] == tokens[:, :-1], (1, 0))
        factors = torch.full(tokens.shape, self.factor, dtype=torch.float32, device=tokens.device)
        return SparseUpdate(
            tokens.masked_fill(is_repeated, vocabulary), factors, torch.zeros_like(factors)
        )


def keep_sentences(
    transforms: Iterable[LogitsTransform], sentences: Tensor, beams: int = 1
) -> None:
    """Keep the state of only the given sentences in the transforms.

    Args:
        transforms: Transforms of the search.
        sentences: int64 indices into the current batch.
        beams: Rows per sentence.
    """
    rows = (
        sentences[:, None] * beams + torch.arange(beams, device=sentences.device, dtype=torch.int64)
    ).flatten()
    for transform in transforms:
        if isinstance(transform, Penalty):
            transform.keep(rows)


@dataclass
class Force:
    """Forced tokens: at the lengths for which `active` holds, all others get -inf.

    The forced tokens get score 0.

    Attributes:
        tokens: (N,) int64, the tokens that remain in all rows.
        active: Function of the text's length.
        by_sentence: Whether `tokens` is (B,) instead, one token per sentence. No sentence may have
            left the batch at these lengths.
    """

    tokens: Tensor
    active: Callable[[int], bool]
    by_sentence: bool = False

    @property
    def single(self) -> bool:
        """Whether exactly one token remains in each row."""
        return self.by_sentence or self.tokens.numel() == 1

    def of_rows(self, rows: int) -> Tensor:
        """Return the forced token of each row, (R,) int64."""
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
    """Nucleus (top-p) filtering.

    Attributes:
        top_p: Probability mass of the tokens that are kept.
        least: Minimum number of tokens that are kept.
        dense: The toolkit's function of (ids, scores), for rows that keep many tokens or in which
            rounding decides.

    Source: Holtzman et al. 2020, section 3.1.
    """

    top_p: float
    least: int
    dense: Callable[[Tensor, Tensor], Tensor]
    # Number of highest scores per row that are examined.
    _count: int = field(default=64, init=False)
    # Number of steps for which the toolkit's function runs right away.
    _pause: int = field(default=0, init=False)
    # Number of consecutive attempts in which `_count` scores were too few.
    _failed: int = field(default=0, init=False)

    def idle(self, text: Text) -> bool:
        return False

    def __call__(self, scores: Tensor, text: Text) -> Tensor:
        if scores.device.type == "cpu" and text.filled is None and not self._pause:
            filtered, is_certain = nucleus(scores, self.top_p, self.least, self._count)
            uncertain = (~is_certain).nonzero()[:, 0]
            if 4 * len(uncertain) <= len(scores):
                if len(uncertain):
                    filtered[uncertain] = self.dense(text.ids[uncertain], scores[uncertain])
                self._failed = 0
                return filtered
            self._failed += 1
            self._count = 512  # With 50,000 tokens as fast as 64.
            self._pause = min(2**self._failed, 64)
        self._pause = max(0, self._pause - 1)
        return self.dense(text.ids, scores)


@dataclass
class Call:
    """A transform that calls a function of (ids, scores): a toolkit's or user's logits processor.

    Attributes:
        function: Function of token ids (R, L) and scores (R, V).
        static: Whether it depends on the scores alone and does not synchronize with the device.
    """

    function: Callable[[Tensor, Tensor], Tensor]
    static: bool = False

    def idle(self, text: Text) -> bool:
        return False

    def __call__(self, scores: Tensor, text: Text) -> Tensor:
        return self.function(text.ids.contiguous(), scores)


def only_ban(transforms: Sequence[LogitsTransform], text: Text) -> bool:
    """Return whether the transforms do nothing but ban tokens in this step."""
    return all(
        isinstance(transform, NGramBlock | Ban | Only) or transform.idle(text)
        for transform in transforms
    )


def sparse(
    transforms: Sequence[LogitsTransform], text: Text, vocabulary: int
) -> LogitsUpdates | None:
    """Return the transforms of this step as sparse updates.

    Args:
        transforms: Transforms in the order in which they apply.
        text: Token ids of the running rows.
        vocabulary: Vocabulary size V.

    Returns:
        The updates; None if the transforms cannot be expressed as such.
    """
    active = [transform for transform in transforms if not transform.idle(text)]
    bans = [transform for transform in active if isinstance(transform, NGramBlock | Ban | Only)]
    changing = [
        transform
        for transform in active
        if isinstance(transform, TokenBias | SequenceShift | Penalty)
    ]
    forcing = [
        transform for transform in active if isinstance(transform, Force) and transform.single
    ]
    if (
        len(bans) + len(changing) + len(forcing) < len(active)
        or len(changing) > 1
        or len(forcing) > 1
    ):
        return None
    # A later transform may ban or change the forced token.
    if forcing and active[-1] is not forcing[0]:
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
    """Return whether the transforms can be captured as part of a CUDA graph.

    Then they run the same kernels whenever `phases` is equal, and read what changes on the device.
    """
    return all(not isinstance(transform, Call) or transform.static for transform in transforms)


def phases(transforms: Sequence[LogitsTransform], length: int) -> tuple[int, ...]:
    """Return a key of the transforms' behavior at a length; equal keys mean equal behavior."""
    return tuple(
        transform.reach(length)
        if isinstance(transform, SequenceShift)
        else transform.active(length)
        for transform in transforms
        if isinstance(transform, NGramBlock | Ban | Only | Force | SequenceShift)
    )


def apply_transforms(
    scores: Tensor, text: Text, transforms: Sequence[LogitsTransform], kept: bool = False
) -> Tensor:
    """Apply the transforms in order.

    Args:
        scores: (R, V) fp32; may be changed in place.
        text: Token ids of the running rows.
        transforms: Transforms in the order in which they apply.
        kept: Whether the caller keeps `scores`. fastgen's own transforms then change a copy; a
            user's function gets `scores` itself and may change it.

    Returns:
        The transformed scores.
    """
    original = scores
    for transform in transforms:
        if transform.idle(text):
            continue
        needs_copy = scores is original and kept and not isinstance(transform, Call)
        scores = transform(scores.clone() if needs_copy else scores, text)
    return scores
