"""Streaming of beam search: report the prefix of each text that can no longer change."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fastgen.decoding.search.beam_search import BeamSearch
from fastgen.models.cuda_graphs import graph

OnTokens = Callable[[int, int, Sequence[int]], object]
"""Called with final tokens: index of the sentence, number of tokens before them, and the tokens."""


def stable_prefix(search: BeamSearch, begin: int) -> Tensor:
    """Return the final tokens of the best text of each sentence from index `begin` on.

    The result is either the best finished hypothesis or a descendant of a running beam, so their
    common prefix is final. If no running beam can improve on the finished hypotheses of a sentence,
    all of its best hypothesis is final.

    Args:
        search: A search that returns one hypothesis per sentence, after a step that was not its
            last.
        begin: Index of a token up to which the text is known to be final, at least the length of
            the prompt.

    Returns:
        (B, N) int64, -1 from the first token on that may still change.
    """
    finished, generated = search.finished, begin - search.prompt.shape[1]
    running = search.ids[:, :, begin : search.length]
    is_token = finished.beams[:, :, generated : generated + running.shape[2]] >= 0
    hypotheses = finished.ids[:, :, begin : search.length].where(is_token, -1)
    # Hypotheses with equal scores may end up in either order.
    best = finished.done & (finished.scores == finished.scores[:, :1])
    rows = torch.cat([running, hypotheses.where(best[:, :, None], running[:, :1])], 1)
    closed = (
        torch.ones_like(search.improvable)
        if search.rule.early_stopping is True
        else ~search.improvable
    )
    settled = finished.done.all(1) & closed
    rows = hypotheses[:, :1].where(settled[:, None, None], rows)
    agrees = (rows == rows[:, :1]).all(1).cumprod(1).bool()
    return rows[:, 0].where(agrees, -1)


class _Pending(NamedTuple):
    """Final tokens of a step, on their way from the device.

    Attributes:
        begin: Index of the first of the tokens.
        found: (B, 1 + N) int64, the index of each sentence, then its tokens.
    """

    begin: int
    found: graph.DelayedRead


@dataclass
class StablePrefix:
    """A `BeamSearch.on_step` callback that reports tokens as soon as they are final.

    It does not wait for the device. Tokens that have not arrived by the end of their step are
    reported after the next one, for which the search waits anyway.

    Args:
        tell: Called with the index of a sentence, an index into its text, and N > 0 tokens, (N,)
            int64 on the CPU. It gets each token once, in the order of the text.
        sentences: Number of sentences.
        prompt: Length of the prompt, whose tokens are not reported.
    """

    tell: Callable[[int, int, Tensor], object]
    sentences: int
    prompt: int
    _pending: _Pending | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._told = [self.prompt] * self.sentences
        self._present = list(range(self.sentences))  # As of the last read.

    def __call__(self, search: BeamSearch) -> None:
        begin = min(self._told[number] for number in self._present)
        table = torch.cat([search.sentences[:, None], stable_prefix(search, begin)], 1)
        pending = _Pending(begin, graph.DelayedRead(table))
        pending.found.send(table)
        if self._pending is not None:
            self._read(self._pending)
        self._pending = pending
        if pending.found.ready:
            self._read(pending)
            self._pending = None

    def end(self, number: int, text: Tensor) -> None:
        """Report the rest of a sentence's text (L,) once its search has ended."""
        self._tell(number, text[self._told[number] :].cpu())

    def _read(self, pending: _Pending) -> None:
        table = pending.found.read()
        tokens = table[:, 1:]
        self._present = cast("list[int]", cast(Any, table[:, 0]).tolist())
        known: list[int] = cast(Any, (tokens >= 0).sum(1)).tolist()
        for row, number in enumerate(self._present):
            self._tell(number, tokens[row, self._told[number] - pending.begin : known[row]])

    def _tell(self, number: int, tokens: Tensor) -> None:
        if len(tokens):
            place = self._told[number]
            self._told[number] += len(tokens)
            self.tell(number, place, tokens)
