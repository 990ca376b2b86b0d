"""The beginning of a text that a beam search will not change any more, told while the search runs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fastgen.decoding.beam import BeamSearch
from fastgen.models import graph


def certain(search: BeamSearch, begin: int) -> Tensor:
    """Return the tokens (N,) int64 from place `begin` on of the one text searched for, -1 from where it is open.

    All that is still to come descends from a running beam, and of what has finished nothing but the best is returned:
    what these begin with alike, the result begins with.

    Args:
        search: of one sentence, of which one hypothesis will be returned, behind a step that was not its last.
        begin: at least the prompt's length, and a place up to which all is certain.
    """
    finished, generated = search.finished, begin - search.prompt.shape[1]
    running = search.ids[0, :, begin : search.length]
    within = finished.beams[0, :, generated : generated + running.shape[1]] >= 0
    ended = finished.ids[0, :, begin : search.length].where(within, -1)
    # Of equal scores either may come to stand first.
    best = finished.done[0] & (finished.scores[0] == finished.scores[0, 0])
    rows = torch.cat([running, ended.where(best[:, None], running[:1])])
    alike = (rows == rows[0]).all(0).cumprod(0).bool()
    return running[0].where(alike, -1)


class _Asked(NamedTuple):
    """What was certain behind a step, on its way from the device: tokens from a place of the text on."""

    begin: int
    found: graph.Late


@dataclass
class Certain:
    """Tells the tokens of a text as soon as they are certain: `BeamSearch.on_step`, for one sentence.

    No device is waited for: what is not there yet behind its step is told behind the next, for which the search waits.

    Args:
        tell: called with tokens (N,) int64 on the CPU, N > 0; each token once, in the order of the text.
        told: how many tokens are known: the prompt's.
    """

    tell: Callable[[Tensor], object]
    told: int
    _asked: _Asked | None = field(default=None, init=False)

    def __call__(self, search: BeamSearch) -> None:
        found = certain(search, self.told)
        asked = _Asked(self.told, graph.Late(found))
        asked.found.send(found)
        if self._asked is not None:
            self._read(self._asked)
        self._asked = asked
        if asked.found.ready:
            self._read(asked)
            self._asked = None

    def end(self, text: Tensor) -> None:
        """The search is over: all of its text (L,) is certain."""
        self._tell(text[self.told :].cpu())

    def _read(self, asked: _Asked) -> None:
        tokens = asked.found.read()
        self._tell(tokens[self.told - asked.begin : int((tokens >= 0).sum())])

    def _tell(self, tokens: Tensor) -> None:
        if len(tokens):
            self.told += len(tokens)
            self.tell(tokens)
