"""Beam search on a device that is never waited for: choices are captured as a graph, and looked at a step later.

All that depends on the length of the text is read from the device: the tables have room for the longest text from the
start, and a column is written where the device says. So one capture serves all steps in which the edits do the same.

Whether the search is over is known on the device at once, and nothing that has finished changes from then on. The host
learns of it a step later, when one more step is under way, of which no trace is left: what it drew is put back.
"""

import contextlib
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from fastgen.decoding.backends.captured_selection import CapturedSelection
from fastgen.decoding.logits.transforms import Text, phases
from fastgen.decoding.search.beam_search import BeamSearch, Stepper, read
from fastgen.models.cuda_graphs import graph
from fastgen.ops.selection.choice import Candidates, Chosen, State
from fastgen.ops.tables import Table, extend_rows_


@dataclass
class CapturedBeamSearch(BeamSearch):
    """One beam search or sampling; arguments as `BeamSearch`, whose edits are all `transforms.capturable`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.choices = CapturedSelection(
            graph.generator(self.prompt.device) if self.sample else None
        )
        # Of the text: its length, the newest tokens' column behind the prompt, and how many they are with the next.
        behind, device = self.prompt.shape[1], self.prompt.device
        self._offsets = torch.tensor([0, -behind, 1 - behind], device=device, dtype=torch.int64)
        self._numbers = torch.empty_like(self._offsets)
        self._over = torch.zeros(1, dtype=torch.bool, device=device)

    def advance(self, model: Stepper, logits: Tensor) -> bool:
        if self.rule.ranks_apart and self.choices.able(logits):
            with contextlib.suppress(graph.NotCaptured):
                return self._advance(model, logits)
        before = self.choices.last()
        return (before is None or not before[3, 0]) and super().advance(model, logits)

    def _advance(self, model: Stepper, logits: Tensor) -> bool:
        text = Text(self.ids.flatten(0, 1), self.prompt.shape[1], self.length, self._numbers[:1])
        last = self.stop.ends_all(self.length + 1)
        torch.add(self._offsets, self.length, out=self._numbers)
        ancestry = model.ancestry
        slots = None if ancestry is None else ancestry.next_slots()
        choose = functools.partial(self._choose, logits, text, last, slots)
        seen = None if slots is None else slots.rows
        parents, flags = self.choices(
            choose, logits, self.ids, seen, last, phases(self.transforms, self.length)
        )
        if ancestry is None:
            model.reorder(parents)
        else:
            ancestry.note_extended()
        self.length += 1
        before = self.choices.look(flags)
        if before is not None:
            _, improvable, done, over = read(before)
            leaving = self._leaving(improvable, done)
            if over[0] or len(leaving) == self.present:
                self.choices.take_back()
                return False
            if not last and self._drop(model, leaving):
                self.choices.forget()
        if last and self.sample:
            self.choices.last()  # raises where nothing could be drawn
        return not last

    def _choose(
        self, logits: Tensor, text: Text, last: bool, slots: Table | None
    ) -> tuple[Tensor, Tensor]:
        """Write the next token of every beam to the tables; return its parents (B, M) and what is seen, `Choice.flags`.

        slots: what each beam sees, where that is a table.
        """
        column, new_tokens = self._numbers[1:2], self._numbers[2:]
        values, beam, token = self._candidates(logits, text, self.choices.draw)
        candidates = Candidates(values, beam, token, self.stop.hits(token, last))
        chosen = self._kept(candidates, new_tokens)
        self._finish(chosen.order, beam, token, column)
        running = self._tables(chosen.parents, chosen.tokens)
        extend_rows_(running if slots is None else [*running, slots], chosen.parents, column)
        return chosen.parents, self.choices.seen(chosen.flags)

    def _kept(self, candidates: Candidates, new_tokens: Tensor) -> Chosen:
        """What becomes of the candidates (B, K); the new state is written where it was."""
        finished, over = self.finished, self._over
        state = State(self.scores, finished.scores, finished.done, self.improvable, over)
        found = self.rule.in_place(candidates, state, new_tokens)
        if found is not None:
            return found
        chosen = self.by_rules(candidates, new_tokens)
        merged, flags = chosen.merged, chosen.flags
        order = torch.where(
            over, torch.arange(self.rule.beams, device=over.device, dtype=torch.int64), merged.order
        )
        finished.scores.copy_(torch.where(over, finished.scores, merged.scores))
        finished.done.copy_(torch.where(over, finished.done, merged.done))
        self.scores.copy_(chosen.scores)
        self.improvable.copy_(chosen.improvable)
        over.logical_or_(flags[3, :1])
        flags[3].copy_(over.expand(self.present))
        return Chosen(chosen.parents, chosen.tokens, order, flags)
