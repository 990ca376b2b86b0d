"""Beam search on a device that is never waited for: choices are captured as a graph, and looked at a step later.

All that depends on the length of the text is read from the device: the tables have room for the longest text from the
start, and a column is written where the device says. So one capture serves all steps in which the edits do the same.

Whether the search is over is known on the device at once, and nothing that has finished changes from then on. The host
learns of it a step later, when one more step is under way, of which no trace is left.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from fastgen.decoding.beam import BeamSearch, Stepper, read
from fastgen.decoding.text import Text, phases, sparse
from fastgen.models import graph
from fastgen.ops.kbest import kbest
from fastgen.ops.tables import Table, extend_rows_

OTHERS = 8
"""Steps in succession whose logits lie elsewhere: nothing replays them. A capture brings two, a call's start four."""


@dataclass
class ReplayedBeamSearch(BeamSearch):
    """One beam search; arguments as `BeamSearch`, whose edits are all of few tokens (`text.sparse`).

    Attributes:
        refused: that choices are not captured and why, found when it was tried.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refused: str | None = None
        self._end = torch.empty(1, dtype=torch.int64, device=self.prompt.device)  # the text's length
        self._over = torch.zeros(1, dtype=torch.bool, device=self.prompt.device)
        self._repeated = graph.Repeated()
        self._logits: Tensor | None = None
        self._others = 0  # steps in succession whose logits did not lie where they did
        self._newest: graph.Late | None = None  # the flags of the step before
        self._spare: graph.Late | None = None

    def advance(self, model: Stepper, logits: Tensor) -> bool:
        self._others = 0 if logits is self._logits else self._others + 1
        self._logits = logits
        if self._others > OTHERS and self.refused is None:
            self.refused = "choices are not captured as CUDA graphs: decode steps are not"
        if self.refused is not None:
            before, self._newest = self._newest, None
            return (before is None or not read(before.read())[3][0]) and super().advance(model, logits)
        text = Text(self.ids.flatten(0, 1), self.prompt.shape[1], self.length, self._end)
        last = self.stop.ends_all(self.length + 1)
        self._end.fill_(self.length)
        ancestry = model.ancestry
        slots = None if ancestry is None else ancestry.next_slots()
        choose = functools.partial(self._choose, logits, text, last, slots)
        seen = None if slots is None else slots.rows
        try:
            parents, flags = self._repeated(
                choose, logits.device, logits, self.ids, seen, last, phases(self.edits, self.length)
            )
        except graph.NotCaptured as reason:
            self.refused = f"choices are not captured as CUDA graphs: {reason}"
            return self.advance(model, logits)
        if ancestry is None:
            model.reorder(parents)
        else:
            ancestry.note_extended()
        self.length += 1
        if last:
            return False
        newest = graph.Late(flags) if self._spare is None else self._spare
        newest.send(flags)
        before, self._newest, self._spare = self._newest, newest, self._newest
        if before is None:
            return True
        _, improvable, done, over = read(before.read())
        if over[0]:
            return False
        if self.may_drop and self._drop(model, improvable, done):
            self._newest = self._spare = None  # they are of sentences that have left, too
        return True

    def _choose(self, logits: Tensor, text: Text, last: bool, slots: Table | None) -> tuple[Tensor, Tensor]:
        """Write the next token of every beam to the tables; return its parents (B, M) and the flags of `Choice`.

        slots: what each beam sees, where that is a table.
        """
        b, m = self.scores.shape
        vocabulary = logits.shape[-1]
        edits = sparse(self.edits, text, vocabulary)
        if edits is None:
            raise graph.NotCaptured("logits processors that cannot be applied together")
        best = kbest(logits.view(b, m, -1), self.scores, self.rule.candidates, edits)
        beam, token = best.indices // vocabulary, best.indices % vocabulary
        column = self._end - self.prompt.shape[1]
        chosen = self._chosen(best.values, beam, token, self.stop.hits(token, last), column + 1)
        merged, finished, over = chosen.merged, self.finished, self._over
        order = torch.where(over, torch.arange(m, device=over.device), merged.order)
        self._finish(order, beam, token, column)
        finished.scores.copy_(torch.where(over, finished.scores, merged.scores))
        finished.done.copy_(torch.where(over, finished.done, merged.done))
        running = self._tables(chosen.parents, chosen.tokens)
        extend_rows_(running if slots is None else [*running, slots], chosen.parents, column)
        self.scores.copy_(chosen.scores)
        self.improvable.copy_(chosen.improvable)
        over.logical_or_(chosen.flags[3, :1])
        chosen.flags[3].copy_(over.expand(b))
        return chosen.parents, chosen.flags
