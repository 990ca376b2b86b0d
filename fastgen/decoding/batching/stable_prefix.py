"""The beginning of a text that a beam search will not change any more, told while the search runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fastgen.decoding.search.beam_search import BeamSearch
from fastgen.models.cuda_graphs import graph

OnTokens = Callable[[int, int, Sequence[int]], object]
"""Called with tokens of a sentence of a batch that are certain: its number, how many stand before, and the tokens."""


def certain(search: BeamSearch, begin: int) -> Tensor:
    """Return the tokens (B, N) int64 of the best texts from place `begin` on, -1 from where they are open.

    All that is still to come descends from a running beam, and of what has finished nothing but the best is returned:
    what these begin with alike, the result begins with. Of a sentence that is settled the best text is the result.

    Args:
        search: of which one hypothesis of each sentence will be returned, behind a step that was not its last.
        begin: at least the prompt's length, and a place up to which all is certain.
    """
    finished, generated = search.finished, begin - search.prompt.shape[1]
    running = search.ids[:, :, begin : search.length]
    within = finished.beams[:, :, generated : generated + running.shape[2]] >= 0
    ended = finished.ids[:, :, begin : search.length].where(within, -1)
    # Of equal scores either may come to stand first.
    best = finished.done & (finished.scores == finished.scores[:, :1])
    rows = torch.cat([running, ended.where(best[:, :, None], running[:, :1])], 1)
    closed = (
        torch.ones_like(search.improvable)
        if search.rule.early_stopping is True
        else ~search.improvable
    )
    settled = finished.done.all(1) & closed
    rows = ended[:, :1].where(settled[:, None, None], rows)
    alike = (rows == rows[:, :1]).all(1).cumprod(1).bool()
    return rows[:, 0].where(alike, -1)


class _Asked(NamedTuple):
    """What was certain behind a step, on its way from the device.

    found: (B, 1 + N) int64: the number of a sentence, and its tokens from place `begin` on.
    """

    begin: int
    found: graph.DelayedRead


@dataclass
class Certain:
    """Tells the tokens of texts as soon as they are certain: `BeamSearch.on_step`.

    No device is waited for: what is not there yet behind its step is told behind the next, for which the search waits.

    Args:
        tell: called with a sentence's number, the place in its text, and tokens (N,) int64 on the CPU, N > 0; each
            token once, in the order of the text.
        sentences: how many there are. prompt: tokens that are known of each.
    """

    tell: Callable[[int, int, Tensor], object]
    sentences: int
    prompt: int
    _asked: _Asked | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._told = [self.prompt] * self.sentences
        self._present = list(range(self.sentences))  # as far as it is known

    def __call__(self, search: BeamSearch) -> None:
        begin = min(self._told[number] for number in self._present)
        found = torch.cat([search.sentences[:, None], certain(search, begin)], 1)
        asked = _Asked(begin, graph.DelayedRead(found))
        asked.found.send(found)
        if self._asked is not None:
            self._read(self._asked)
        self._asked = asked
        if asked.found.ready:
            self._read(asked)
            self._asked = None

    def end(self, number: int, text: Tensor) -> None:
        """The search is over: all of a sentence's text (L,) is certain."""
        self._tell(number, text[self._told[number] :].cpu())

    def _read(self, asked: _Asked) -> None:
        table = asked.found.read()
        tokens = table[:, 1:]
        self._present = cast("list[int]", cast(Any, table[:, 0]).tolist())
        known: list[int] = cast(Any, (tokens >= 0).sum(1)).tolist()
        for row, number in enumerate(self._present):
            self._tell(number, tokens[row, self._told[number] - asked.begin : known[row]])

    def _tell(self, number: int, tokens: Tensor) -> None:
        if len(tokens):
            place = self._told[number]
            self._told[number] += len(tokens)
            self.tell(number, place, tokens)
