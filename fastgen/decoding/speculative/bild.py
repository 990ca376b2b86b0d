"""A small and a large model decode together: the small one drafts, the large one looks over what it drafted.

Of every text the small model writes the next tokens, until it is not sure of one (*fallback*), has written `max_draft`,
or is at the end. In one pass the large model then reads the drafts of all texts. The first token that it does not let
stand is replaced by its own, and those behind it are forgotten (*rollback*); behind a draft that stands it writes one
more. What was forgotten leaves no trace: its keys and values are overwritten.

Texts advance by different counts and know nothing of each other: each is what it would be alone.

Source: Kim et al. 2023 (BiLD), algorithm 1, but that only the newest draft is looked over, so that no token that the
large model has put there is replaced again.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from fastgen.decoding.batching.batch_compaction import closed_up, who_leaves
from fastgen.decoding.logits.transforms import (
    LogitsTransform,
    NGramBlock,
    Penalty,
    Text,
    apply_transforms,
)
from fastgen.decoding.search.stopping import Stop
from fastgen.decoding.speculative.adaptive_drafting import Pace
from fastgen.decoding.speculative.policies import Place, Policy
from fastgen.models.runtime.ragged_step import Span


class Model(Protocol):
    """A model that holds keys and values of R texts, and goes on from any place of each."""

    def prefill(self) -> Tensor | None:
        """Run the prompts; return the logits (R, V) fp32 of what follows them.

        None where the last token of each has yet to be run: a text's first span is to begin with it, at -1.
        """
        ...

    def extend(self, spans: Sequence[Span]) -> Tensor:
        """Run spans of texts; return the logits (N, V) fp32 of what follows each of their tokens.

        What was held of a text from the start of its span on is overwritten.
        """
        ...

    def keep(self, rows: Tensor) -> None:
        """Keep these of the present texts, int64 indices."""
        ...


@dataclass
class Counts:
    """What was done for one text.

    Attributes:
        tokens: that it has behind the prompt. drafted: that the small model wrote, whatever became of them.
        large_calls, small_calls: passes of the models in which it took part, beside those of the prompt.
        fallbacks: drafts that ended as the small model was not sure. rollbacks: drafts that did not stand as a whole.
    """

    tokens: int = 0
    drafted: int = 0
    large_calls: int = 0
    small_calls: int = 0
    fallbacks: int = 0
    rollbacks: int = 0


@dataclass(eq=False)
class _Text:
    """A text that is being written.

    Attributes:
        row: its place among the present ones.
        drafted: how many of its last tokens have not been looked over.
        held: of its tokens, those of which the small and the large model hold keys and values.
        ended: whether its last token ends it.
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
    """One run over R texts.

    Args:
        prompt: (R, P) int64.
        pad: token that fills a text behind its end.
        fallback: the least probability of the small model's likeliest token for which it goes on.
        max_draft: tokens that it writes in a row at most.
        vocabulary: V of the large model; None where the small one's is the same.
        shared: whether the small model's keys and values are among those of the large one.
        paper_compat: write the first token by the large model, and do not look over a draft that has come to an end, as
            the authors' program.
        pace: says before each round whether the small model drafts at all; None where it always does.
        on_tokens: called with a text's index and its new tokens, once they stand.
        events: where what happens is noted, a list for each text; None for nowhere.
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
    pace: Pace | None = None
    on_tokens: Callable[[int, list[int]], None] | None = None
    events: list[list[tuple[str, int, int]]] | None = None

    def __post_init__(self) -> None:
        self._all = [_Text(index, index) for index in range(self.prompt.shape[0])]
        self._present = list(self._all)
        eos: list[int] = [] if self.stop.eos is None else cast(Any, self.stop.eos).tolist()
        self._ends = frozenset(eos)
        self._start = 0.0  # seconds of the small model's prompts
        self._first: dict[
            int, Tensor | None
        ] = {}  # what the models say of the tokens that follow the prompts
        self._last: list[int] = cast(Any, self.prompt[:, -1]).tolist()

    def run(self) -> Tensor:
        """Decode to the end; return all texts (R, P + T), filled up with `pad`."""
        began = 0.0 if self.pace is None else self.pace.clock()
        self._begin(_LARGE, self.large)
        if self.paper_compat:
            self._check(self._present)
        while running := [text for text in self._present if not text.finished]:
            self._round(running)
            self._let_go()
        if self.pace is not None and _SMALL in self._first:
            tokens = sum(len(text.tokens) for text in self._all)
            self.pace.note_start(self._start, tokens)
            self.pace.note_call(True, tokens, self.pace.clock() - began)
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
        """Of each text."""
        return [text.counts for text in self._all]

    def _round(self, texts: Sequence[_Text]) -> None:
        """Let texts gain a token each at least."""
        pace, before = self.pace, sum(len(text.tokens) for text in texts)
        drafts = pace is None or pace.drafts(len(texts))
        if drafts and _SMALL not in self._first:
            self._begin_small()
        began = 0.0 if pace is None else pace.clock()
        if drafts:
            self._draft(texts)
        self._check([text for text in texts if not text.finished])
        if pace is not None:
            pace.note(
                drafts,
                len(texts),
                sum(len(text.tokens) for text in texts) - before,
                pace.clock() - began,
            )

    def _begin(self, size: int, model: Model) -> None:
        self._first[size] = first = model.prefill()
        if first is None:
            for text in self._all:
                text.held[size] = text.held[size] or -1

    def _begin_small(self) -> None:
        began = 0.0 if self.pace is None else self.pace.clock()
        self._begin(_SMALL, self.small)
        if len(self._present) < len(self._all):
            self.small.keep(
                torch.tensor(
                    [text.index for text in self._present],
                    device=self.prompt.device,
                    dtype=torch.int64,
                )
            )
        if self.pace is not None:
            self._start = self.pace.clock() - began

    def _draft(self, texts: Sequence[_Text]) -> None:
        """Let the small model write on."""
        drafting = [text for text in texts if not text.ended]
        while drafting:
            newest = [range(len(text.tokens), len(text.tokens) + 1) for text in drafting]
            scores, places = self._scores(_SMALL, drafting, newest)
            tokens, confidence = self.policy.draft(scores, places)
            sure: list[_Text] = []
            for text, token, probability in zip(drafting, tokens, confidence, strict=True):
                text.counts.small_calls += 1
                if probability < self.fallback:
                    text.counts.fallbacks += 1
                    self._note(text, "fallback", len(text.tokens), token)
                    continue
                text.counts.drafted += 1
                text.drafted += 1
                self._write(text, "draft", token)
                sure.append(text)
            self._find_ends(sure)
            drafting = [text for text in sure if not text.ended and text.drafted < self.max_draft]
        if self.paper_compat:
            for text in texts:
                if text.ended and text.drafted:
                    self._tell(text, len(text.tokens) - text.drafted)

    def _check(self, texts: Sequence[_Text]) -> None:
        """Let the large model look over what was drafted, and write a token of its own behind what has not ended."""
        if not texts:
            return
        looked_at = [range(len(t.tokens) - t.drafted, len(t.tokens) + (not t.ended)) for t in texts]
        scores, places = self._scores(_LARGE, texts, looked_at)
        each = [
            (text, place)
            for text, lengths in zip(texts, looked_at, strict=True)
            for place in lengths
        ]
        drafted = [text.tokens[place] if place < len(text.tokens) else -1 for text, place in each]
        checked = self.policy.check(scores, places, drafted)
        own, stands = iter(checked.own), iter(checked.stands)
        for text, lengths in zip(texts, looked_at, strict=True):
            self._replace(
                text, lengths, [next(own) for _ in lengths], [next(stands) for _ in lengths]
            )
        self._find_ends(texts)

    def _replace(self, text: _Text, lengths: range, own: list[int], stands: list[bool]) -> None:
        """Put the large model's own token in the place of the first that does not stand, or behind them all."""
        standing = next((i for i in range(text.drafted) if not stands[i]), text.drafted)
        for place in lengths[:standing]:
            self._note(text, "stand", place, text.tokens[place])
        rolled_back = standing < text.drafted
        if standing < len(lengths):
            del text.tokens[lengths[standing] :]
            self._write(text, "rollback" if rolled_back else "write", own[standing])
        text.counts.large_calls += 1
        text.counts.rollbacks += rolled_back
        text.held = [min(held, len(text.tokens) - 1) for held in text.held]
        if self.shared:
            text.held[_SMALL] = text.held[_LARGE]
        self._tell(text, lengths.start)

    def _tell(self, text: _Text, start: int) -> None:
        """All tokens stand, those from `start` on since now."""
        text.drafted, text.counts.tokens = 0, len(text.tokens)
        if self.on_tokens is not None:
            self.on_tokens(text.index, text.tokens[start:])

    def _let_go(self) -> None:
        """Let finished texts leave, when enough of them have gathered."""
        finished = [text.row for text in self._present if text.finished]
        if len(finished) == len(self._present) or not who_leaves(finished, len(self._present)):
            return
        staying = closed_up(len(self._present), finished)
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
        """The edited scores (N, V) of what follows so many tokens of each text, and the places of the N.

        size: which model's. lengths: all from the tokens on that it holds, or one behind, to a text's end at most.
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
        whole = all(
            text.held[size] + 1 == wanted[0] for text, wanted in zip(texts, lengths, strict=True)
        )
        pieces, end = list[Tensor](), 0
        for text, wanted in zip(texts, lengths, strict=True):
            behind = wanted[0] - 1
            if behind < 0 and first is not None:
                pieces.append(first[text.row : text.row + 1])
                behind = 0
            end += wanted[-1] - text.held[size]
            pieces.append(logits[end - (wanted[-1] - behind) : end])
            text.held[size] = wanted[-1]
        places = [
            (text.index, place)
            for text, wanted in zip(texts, lengths, strict=True)
            for place in wanted
        ]
        scores = logits if whole else torch.cat(pieces)
        if self.vocabulary not in (
            None,
            scores.shape[1],
        ):  # one tokenizer, but other rows that stand for nothing
            missing = self.vocabulary - scores.shape[1]
            scores = F.pad(scores[:, : self.vocabulary], (0, max(0, missing)), value=-torch.inf)
        return self._edited(scores, places), places

    def _tokens(self, text: _Text, start: int, end: int) -> list[int]:
        """Of a text, -1 being its prompt's last."""
        return (
            text.tokens[start:end] if start >= 0 else [self._last[text.index], *text.tokens[:end]]
        )

    def _edited(self, scores: Tensor, places: Sequence[Place]) -> Tensor:
        """Apply the edits to scores (N, V), those of texts of one length at a time."""
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
                [_of_texts(edit, texts) for edit in self.transforms],
            )
        return scores

    def _write(self, text: _Text, kind: str, token: int) -> None:
        self._note(text, kind, len(text.tokens), token)
        text.tokens.append(token)

    def _find_ends(self, texts: Sequence[_Text]) -> None:
        """See which texts end with their last token."""
        lengths = {len(text.tokens) for text in texts}
        full = {length for length in lengths if self.stop.ends_all(self.prompt.shape[1] + length)}
        for text in texts:
            text.ended = text.tokens[-1] in self._ends or len(text.tokens) in full

    def _note(self, text: _Text, kind: str, place: int, token: int) -> None:
        if self.events is not None:
            self.events[text.index].append((kind, place, token))


def _of_texts(edit: LogitsTransform, texts: list[int]) -> LogitsTransform:
    """An edit that has something of every text, with that of these."""
    if isinstance(edit, NGramBlock) and edit.source is not None and len(edit.source) > 1:
        return replace(edit, source=edit.source[texts])
    if isinstance(edit, Penalty) and isinstance(edit.start, Tensor):
        edit = copy(edit)
        edit.keep(torch.tensor(texts, dtype=torch.int64, device="cpu"))
    return edit
