"""Beam search without host synchronisation: token selection runs as a CUDA graph.

Everything that depends on the length of the text is read from device memory. The tables have room
for the longest text from the start, and a length counter on the device selects the column to write.
One capture therefore serves all steps in which the transforms do the same.

The device knows at once whether the search is over, and freezes the finished hypotheses. The host
reads the result one step late, when one more step is already running. That step has no effect: the
state of the random number generator from before it is restored.
"""

import contextlib
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from fastgen.decoding.backends.captured_selection import CapturedSelection
from fastgen.decoding.logits.pipeline import phases
from fastgen.decoding.logits.text import Text
from fastgen.decoding.search.beam_search import BeamSearch, RowStepper, read
from fastgen.models.cuda_graphs import graph
from fastgen.ops.selection.choice import Candidates, Chosen, State
from fastgen.ops.tables import Table, extend_rows_


@dataclass
class CapturedBeamSearch(BeamSearch):
    """Beam search or beam sampling with captured token selection.

    Takes the arguments of `BeamSearch`. All transforms must be `transforms.capturable`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.choices = CapturedSelection(
            graph.generator(self.prompt.device) if self.sample else None
        )
        # Numbers that the graph reads: the length of the text, the column of the next token after
        # the prompt, and the number of new tokens including it.
        prompt, device = self.prompt.shape[1], self.prompt.device
        self._offsets = torch.tensor([0, -prompt, 1 - prompt], device=device, dtype=torch.int64)
        self._numbers = torch.empty_like(self._offsets)
        self._over = torch.zeros(1, dtype=torch.bool, device=device)

    def advance(self, model: RowStepper, logits: Tensor) -> bool:
        """Select the next token of every beam; return False when the search is over.

        With a capture the end is seen one call late. Without one, `BeamSearch.advance` runs.
        """
        if self.rule.ranks_apart and self.choices.able(logits):
            with contextlib.suppress(graph.NotCaptured):
                return self._advance(model, logits)
        before = self.choices.last()
        return (before is None or not before[3, 0]) and super().advance(model, logits)

    def _advance(self, model: RowStepper, logits: Tensor) -> bool:
        text = Text(self.ids.flatten(0, 1), self.prompt.shape[1], self.length, self._numbers[:1])
        last = self.stop.ends_all(self.length + 1)
        torch.add(self._offsets, self.length, out=self._numbers)
        ancestry = model.ancestry
        slots = None if ancestry is None else ancestry.next_slots()
        choose = functools.partial(self._choose, logits, text, last, slots)
        ancestry_rows = None if slots is None else slots.rows
        parents, flags = self.choices(
            choose, logits, self.ids, ancestry_rows, last, phases(self.transforms, self.length)
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
            self.choices.last()  # raises if the distribution was invalid
        return not last

    def _choose(
        self, logits: Tensor, text: Text, last: bool, slots: Table | None
    ) -> tuple[Tensor, Tensor]:
        """Select the next tokens and write them to the tables. This function is captured.

        Args:
            logits: (R, V).
            text: tokens of the running beams; their length is also on the device.
            last: whether all beams end in this step.
            slots: ancestry table with the next KV slots, or None.

        Returns:
            Parents (B, M) and `CapturedSelection.seen` of `Choice.flags`.
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
        """Apply the finishing rules to candidates (B, K) and update the state in place."""
        finished, over = self.finished, self._over
        state = State(self.scores, finished.scores, finished.done, self.improvable, over)
        fused_choice = self.rule.in_place(candidates, state, new_tokens)
        if fused_choice is not None:
            return fused_choice
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
