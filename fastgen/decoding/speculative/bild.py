"""Big-little decoding (BiLD): a small model drafts tokens and a large model verifies them.

The small model drafts the next tokens of every text until its confidence is too low (*fallback*),
it has drafted `max_draft` tokens, or the text ends. The large model then verifies the drafts of all
texts in one pass. It replaces the first rejected token by its own and discards the tokens after it
(*rollback*). After a fully accepted draft it appends one token. KV cache entries of discarded
tokens are overwritten.

Texts advance by different numbers of tokens and do not depend on each other: each equals the result
of a run with that text alone.

Source: Kim et al. 2023 (BiLD), algorithm 1. In contrast to it, only the newest draft is verified,
so a token of the large model is never replaced again.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from fastgen.decoding.batching.batch_compaction import compacted, leaving_now
from fastgen.decoding.logits.pipeline import apply_transforms
from fastgen.decoding.logits.text import Text
from fastgen.decoding.logits.transform import LogitsTransform
from fastgen.decoding.search.stopping import Stop
from fastgen.decoding.speculative.adaptive_drafting import DraftTiming
from fastgen.decoding.speculative.policies import Place, Policy
from fastgen.models.runtime.ragged_step import Span


class Model(Protocol):
    """Model with a KV cache of R texts that can continue each text from any position."""

    def prefill(self) -> Tensor | None:
        """Run the prompts.

        Returns:
            Logits (R, V) fp32 of the first new token. None if the last prompt token has not run:
            the first span of each text must then start with it, at -1.
        """
        ...

    def extend(self, spans: Sequence[Span]) -> Tensor:
        """Run spans of texts, overwriting the KV cache from the start of each span.

        Returns:
            Logits (N, V) fp32 of the token that follows each of the N tokens.
        """
        ...

    def keep(self, rows: Tensor) -> None:
        """Keep only these texts; rows: int64 indices into the current batch."""
        ...


@dataclass
class Counts:
    """Statistics of one text.

    Attributes:
        tokens: generated tokens.
        drafted: tokens that the small model drafted, accepted or not.
        large_calls: passes of the large model over the text, without prefill.
        small_calls: passes of the small model over the text, without prefill.
        fallbacks: drafts that ended because the small model's confidence was too low.
        rollbacks: drafts that were not accepted completely.
    """

    tokens: int = 0
    drafted: int = 0
    large_calls: int = 0
    small_calls: int = 0
    fallbacks: int = 0
    rollbacks: int = 0


@dataclass(eq=False)
class _Text:
    """Text in progress.

    Attributes:
        index: its index in the original batch.
        row: its index in the current batch.
        tokens: its generated tokens.
        drafted: number of its last tokens that are not verified.
        held: number of generated tokens in the KV caches of the small and the large model; -1 if
            the last prompt token has not run.
        ended: whether its last token ends it.
        counts: its statistics.
    """

    index: int
    row: int
    tokens: list[int] = field(default_factory=list[int])
    drafted: int = 0
    held: list[int] = field(default_factory=lambda: [0, 0])
    ended: bool = False
    counts: Counts = field(default_factory=Counts)

    @property
    def finished(self) -> bool:
        return self.ended and not self.drafted


_SMALL, _LARGE = 0, 1


@dataclass
class Bild:
    """Run of big-little decoding over R texts.

    Args:
        large: the large model.
        small: the small model.
        prompt: (R, P) int64.
        stop: decides which texts end.
        transforms: applied to the logits of both models in this order.
        policy: how tokens are drafted and verified.
        pad: token that fills a text after its end.
        fallback: minimum probability of the small model's most probable token to continue a draft.
        max_draft: maximum number of tokens per draft.
        vocabulary: V of the large model; None if the small one has the same.
        shared: whether the small model's KV cache is part of the large one's.
        paper_compat: follow the program of the paper's authors: the large model writes the first
            token, and a draft that ends its text is not verified.
        timing: decides before each round whether the small model drafts; None to draft always.
        on_tokens: called with a text's index and its new tokens, once they are accepted.
        events: one list per text to which (kind, place, token) is appended; None to record nothing.
    """

    large: Model
    small: Model
    prompt: Tensor
    stop: Stop
    transforms: Sequence[LogitsTransform]
    policy: Policy
    pad: int
    fallback: float
    max_draft: int
    vocabulary: int | None = None
    shared: bool = False
    paper_compat: bool = False
    timing: DraftTiming | None = None
    on_tokens: Callable[[int, list[int]], None] | None = None
    events: list[list[tuple[str, int, int]]] | None = None

    def __post_init__(self) -> None:
        self._all = [_Text(index, index) for index in range(self.prompt.shape[0])]
        self._present = list(self._all)
        eos: list[int] = [] if self.stop.eos is None else cast(Any, self.stop.eos).tolist()
        self._ends = frozenset(eos)
        self._start = 0.0  # seconds of the small model's prefill
        # Result of prefill by model: logits of the first new tokens.
        self._first: dict[int, Tensor | None] = {}
        self._last: list[int] = cast(Any, self.prompt[:, -1]).tolist()

    def run(self) -> Tensor:
        """Decode all texts to their end; return them as (R, P + T) int64, padded with `pad`."""
        began = 0.0 if self.timing is None else self.timing.clock()
        self._begin(_LARGE, self.large)
        if self.paper_compat:
            self._check(self._present)
        while running := [text for text in self._present if not text.finished]:
            self._round(running)
            self._let_go()
        if self.timing is not None and _SMALL in self._first:
            tokens = sum(len(text.tokens) for text in self._all)
            self.timing.note_start(self._start, tokens)
            self.timing.note_call(True, tokens, self.timing.clock() - began)
        longest = max(len(text.tokens) for text in self._all)
        rows = [text.tokens + [self.pad] * (longest - len(text.tokens)) for text in self._all]
        return torch.cat(
            [
                self.prompt,
                torch.tensor(rows, device=self.prompt.device, dtype=torch.int64).view(
                    len(rows), -1
                ),
            ],
            1,
        )

    @property
    def counts(self) -> list[Counts]:
        """Statistics of each text."""
        return [text.counts for text in self._all]

    def _round(self, texts: Sequence[_Text]) -> None:
        """Run one round of draft and verify; each text gains at least one token."""
        timing, before = self.timing, sum(len(text.tokens) for text in texts)
        drafts = timing is None or timing.drafts(len(texts))
        if drafts and _SMALL not in self._first:
            self._begin_small()
        began = 0.0 if timing is None else timing.clock()
        if drafts:
            self._draft(texts)
        self._check([text for text in texts if not text.finished])
        if timing is not None:
            timing.note(
                drafts,
                len(texts),
                sum(len(text.tokens) for text in texts) - before,
                timing.clock() - began,
            )

    def _begin(self, size: int, model: Model) -> None:
        self._first[size] = first = model.prefill()
        if first is None:
            for text in self._all:
                text.held[size] = text.held[size] or -1

    def _begin_small(self) -> None:
        began = 0.0 if self.timing is None else self.timing.clock()
        self._begin(_SMALL, self.small)
        if len(self._present) < len(self._all):
            self.small.keep(
                torch.tensor(
                    [text.index for text in self._present],
                    device=self.prompt.device,
                    dtype=torch.int64,
                )
            )
        if self.timing is not None:
            self._start = self.timing.clock() - began

    def _draft(self, texts: Sequence[_Text]) -> None:
        """Draft tokens with the small model."""
        drafting = [text for text in texts if not text.ended]
        while drafting:
            newest = [range(len(text.tokens), len(text.tokens) + 1) for text in drafting]
            scores, places = self._scores(_SMALL, drafting, newest)
            tokens, confidence = self.policy.draft(scores, places)
            kept: list[_Text] = []
            for text, token, probability in zip(drafting, tokens, confidence, strict=True):
                text.counts.small_calls += 1
                if probability < self.fallback:
                    text.counts.fallbacks += 1
                    self._note(text, "fallback", len(text.tokens), token)
                    continue
                text.counts.drafted += 1
                text.drafted += 1
                self._write(text, "draft", token)
                kept.append(text)
            self._find_ends(kept)
            drafting = [text for text in kept if not text.ended and text.drafted < self.max_draft]
        if self.paper_compat:
            for text in texts:
                if text.ended and text.drafted:
                    self._tell(text, len(text.tokens) - text.drafted)

    def _check(self, texts: Sequence[_Text]) -> None:
        """Verify the drafts with the large model, which adds one token to texts that go on."""
        if not texts:
            return
        ranges = [range(len(t.tokens) - t.drafted, len(t.tokens) + (not t.ended)) for t in texts]
        scores, places = self._scores(_LARGE, texts, ranges)
        positions = [
            (text, place) for text, lengths in zip(texts, ranges, strict=True) for place in lengths
        ]
        drafted = [
            text.tokens[place] if place < len(text.tokens) else -1 for text, place in positions
        ]
        checked = self.policy.check(scores, places, drafted)
        own, stands = iter(checked.own), iter(checked.stands)
        for text, lengths in zip(texts, ranges, strict=True):
            self._replace(
                text, lengths, [next(own) for _ in lengths], [next(stands) for _ in lengths]
            )
        self._find_ends(texts)

    def _replace(self, text: _Text, lengths: range, own: list[int], stands: list[bool]) -> None:
        """Accept the draft up to the first rejected token, then write the large model's token.

        Args:
            text: the text.
            lengths: verified places of the text.
            own: the large model's token at each place.
            stands: whether the drafted token at each place is accepted.
        """
        accepted = next((i for i in range(text.drafted) if not stands[i]), text.drafted)
        for place in lengths[:accepted]:
            self._note(text, "stand", place, text.tokens[place])
        rolled_back = accepted < text.drafted
        if accepted < len(lengths):
            del text.tokens[lengths[accepted] :]
            self._write(text, "rollback" if rolled_back else "write", own[accepted])
        text.counts.large_calls += 1
        text.counts.rollbacks += rolled_back
        text.held = [min(held, len(text.tokens) - 1) for held in text.held]
        if self.shared:
            text.held[_SMALL] = text.held[_LARGE]
        self._tell(text, lengths.start)

    def _tell(self, text: _Text, start: int) -> None:
        """Mark all tokens as accepted and report those from `start` on."""
        text.drafted, text.counts.tokens = 0, len(text.tokens)
        if self.on_tokens is not None:
            self.on_tokens(text.index, text.tokens[start:])

    def _let_go(self) -> None:
        """Compact the batch if enough texts have finished."""
        finished = [text.row for text in self._present if text.finished]
        if len(finished) == len(self._present) or not leaving_now(finished, len(self._present)):
            return
        staying = compacted(len(self._present), finished)
        self._present = [self._present[row] for row in staying]
        for row, text in enumerate(self._present):
            text.row = row
        rows = torch.tensor(staying, device=self.prompt.device, dtype=torch.int64)
        self.large.keep(rows)
        if _SMALL in self._first:
            self.small.keep(rows)

    def _scores(
        self, size: int, texts: Sequence[_Text], lengths: Sequence[range]
    ) -> tuple[Tensor, list[Place]]:
        """Run a model and return its transformed scores at the requested places.

        Args:
            size: `_SMALL` or `_LARGE`.
            texts: the texts to run.
            lengths: for each text a range of lengths. The scores at length n are those of the token
                after the first n generated tokens. A range starts at `held` + 1 or later, or at 0
                if prefill returned logits. It ends at the end of the text at most.

        Returns:
            Scores (N, V) and their N places.
        """
        spans = [
            Span(text.row, text.held[size], self._tokens(text, text.held[size], wanted[-1]))
            for text, wanted in zip(texts, lengths, strict=True)
            if text.held[size] < wanted[-1]
        ]
        first = self._first[size]
        if spans:
            logits = (self.large if size == _LARGE else self.small).extend(spans)
        else:
            assert first is not None
            logits = first[:0]
        # Whether the new logits are exactly those requested.
        exact = all(
            text.held[size] + 1 == wanted[0] for text, wanted in zip(texts, lengths, strict=True)
        )
        pieces, end = list[Tensor](), 0
        for text, wanted in zip(texts, lengths, strict=True):
            start = wanted[0] - 1
            if start < 0 and first is not None:
                pieces.append(first[text.row : text.row + 1])
                start = 0
            end += wanted[-1] - text.held[size]
            pieces.append(logits[end - (wanted[-1] - start) : end])
            text.held[size] = wanted[-1]
        places = [
            (text.index, place)
            for text, wanted in zip(texts, lengths, strict=True)
            for place in wanted
        ]
        scores = logits if exact else torch.cat(pieces)
        # Models with the same tokenizer may pad their vocabularies to different sizes.
        if self.vocabulary not in (None, scores.shape[1]):
            missing = self.vocabulary - scores.shape[1]
            scores = F.pad(scores[:, : self.vocabulary], (0, max(0, missing)), value=-torch.inf)
        return self._transformed(scores, places), places

    def _tokens(self, text: _Text, start: int, end: int) -> list[int]:
        """Return tokens `start` to `end` of a text; -1 is the last token of its prompt."""
        return (
            text.tokens[start:end] if start >= 0 else [self._last[text.index], *text.tokens[:end]]
        )

    def _transformed(self, scores: Tensor, places: Sequence[Place]) -> Tensor:
        """Apply the transforms to scores (N, V), one text length at a time."""
        if not self.transforms:
            return scores
        by_length: dict[int, list[int]] = {}
        for row, (_, length) in enumerate(places):
            by_length.setdefault(length, []).append(row)
        device, prompt_length = scores.device, self.prompt.shape[1]
        for length, rows in by_length.items():
            texts = [places[row][0] for row in rows]
            written = torch.tensor(
                [self._all[text].tokens[:length] for text in texts],
                device=device,
                dtype=torch.int64,
            )
            ids = torch.cat(
                [self.prompt[texts], written.view(len(rows), length).to(self.prompt.dtype)], 1
            )
            at = torch.tensor(rows, device=device, dtype=torch.int64)
            scores[at] = apply_transforms(
                scores[at],
                Text(ids, prompt_length),
                [_of_texts(transform, texts) for transform in self.transforms],
            )
        return scores

    def _write(self, text: _Text, kind: str, token: int) -> None:
        self._note(text, kind, len(text.tokens), token)
        text.tokens.append(token)

    def _find_ends(self, texts: Sequence[_Text]) -> None:
        """Update `ended` of each text from its last token and its length."""
        lengths = {len(text.tokens) for text in texts}
        full = {length for length in lengths if self.stop.ends_all(self.prompt.shape[1] + length)}
        for text in texts:
            text.ended = text.tokens[-1] in self._ends or len(text.tokens) in full

    def _note(self, text: _Text, kind: str, place: int, token: int) -> None:
        if self.events is not None:
            self.events[text.index].append((kind, place, token))


def _of_texts(transform: LogitsTransform, texts: list[int]) -> LogitsTransform:
    """Return a transform restricted to these texts, if it holds state of every text."""
    if not transform.depends_on_rows:
        return transform
    transform = copy(transform)
    transform.keep_sentences(torch.tensor(texts, dtype=torch.int64, device="cpu"), 1)
    return transform
