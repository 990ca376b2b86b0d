"""`captured_selection` backend of beam search with the finishing rules of transformers."""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastgen.decoding.backends.captured_selection import CapturedSelection
from fastgen.decoding.logits.pipeline import phases
from fastgen.decoding.logits.text import Text
from fastgen.decoding.search.beam_search import BeamSearch, RowStepper, read
from fastgen.models.cuda_graphs import graph
from fastgen.ops.selection.choice import (
    Candidates,
    Chosen,
    State,
    Step,
    choose_,
    kbest_and_choose_,
)
from fastgen.ops.tables import Finished, Table, finish_and_extend_

_READ = (
    "beams", "exact", "finished", "ids", "improvable", "rank_drawn", "rule", "sample", "scores",
    "sentences", "transforms", "_first_rows",
)  # fmt: skip
"""Attributes of a search that the selection of its tokens reads."""


class CapturedBeamSearch(CapturedSelection[BeamSearch]):
    """Backend of `BeamSearch` and beam sampling whose token selection runs as a CUDA graph."""

    search_type = BeamSearch

    def __init__(self, search: BeamSearch, model: RowStepper) -> None:
        prompt, device = search.prompt.shape[1], search.prompt.device
        super().__init__(search, model, graph.generator(device) if search.sample else None)
        # Numbers that the graph reads: the length of the text, the column of the next token after
        # the prompt, and the number of new tokens including it.
        self._offsets = torch.tensor([0, -prompt, 1 - prompt], device=device, dtype=torch.int64)
        self._numbers = torch.empty_like(self._offsets)
        self._over = torch.zeros(1, dtype=torch.bool, device=device)

    def select(self, output: Tensor) -> bool:
        """Select the next token of every beam; return False when the search is over.

        With a capture the end is seen one call late.
        """
        if self.search.rule.ranks_apart and self.can_capture(output):
            with contextlib.suppress(graph.NotCaptured):
                going_on = self._select(output)
                if not going_on:
                    self.leave()
                return going_on
        self.leave()
        flags = self.read_pending()
        return (flags is None or not flags[3, 0]) and super().select(output)

    def reads(self) -> Sequence[tuple[Any, Sequence[str]]]:
        """Return what `_select_tokens` reads."""
        search, ancestry = self.search, self.model.ancestry
        return (
            (search, _READ),
            (search.stop, ("eos",)),
            (self, ("_numbers", "_over")),
            *(() if ancestry is None else ((ancestry, ("own",)),)),
        )

    def _select(self, logits: Tensor) -> bool:
        search, model = self.search, self.model
        text = Text(
            search.ids.flatten(0, 1), search.prompt.shape[1], search.length, self._numbers[:1]
        )
        last = search.stop.ends_all(search.length + 1)
        torch.add(self._offsets, search.length, out=self._numbers)
        ancestry = model.ancestry
        slots = None if ancestry is None else ancestry.next_slots()
        parents, flags = self.run(
            functools.partial(self._select_tokens, logits, text, last, slots),
            logits,
            search.ids,
            None if slots is None else slots.rows,
            last,
            phases(search.transforms, search.length),
        )
        if ancestry is None:
            model.reorder(parents)
        else:
            ancestry.note_extended()
        search.length += 1
        previous = self.exchange(flags)
        if previous is not None:
            _, improvable, done, over = read(previous)
            leaving = search.leaving(improvable, done)
            if over[0] or len(leaving) == search.batch_size:
                self.undo_draws()
                return False
            if not last and search.compact(model, leaving):
                self.drop_pending()
        if last and search.sample:
            self.read_pending()  # raises if the distribution was invalid
        return not last

    def _select_tokens(
        self, logits: Tensor, text: Text, last: bool, slots: Table | None
    ) -> tuple[Tensor, Tensor]:
        """Select the next tokens and write them to the tables. This function is captured.

        Args:
            logits: (R, V).
            text: tokens of the running beams; their length is also on the device.
            last: whether all beams end in this step.
            slots: ancestry table with the next KV slots, or None.

        Returns:
            Parents (B, M) and `with_invalid` of `Choice.flags`.
        """
        search, column = self.search, self._numbers[1:2]
        chosen = self._chosen(logits, text, last)
        running = search.tables_of_rows(chosen.rows, chosen.tokens)
        ended = [
            Finished(table, newest[:, :, None])
            for table, newest in (
                (search.finished.ids, chosen.token),
                (search.finished.beams, chosen.row),
            )
        ]
        finish_and_extend_(
            running if slots is None else [*running, slots], chosen.parents, ended, chosen.order,
            chosen.beam, column,
        )  # fmt: skip
        return chosen.parents, self.with_invalid(chosen.flags)

    def _chosen(self, logits: Tensor, text: Text, last: bool) -> Chosen:
        """Choose beams and finished hypotheses and update the search in place.

        Arguments are as in `_select_tokens`.
        """
        search, over, new_tokens = self.search, self._over, self._numbers[2:]
        rule, finished, vocabulary = search.rule, search.finished, logits.shape[1]
        state = State(search.scores, finished.scores, finished.done, search.improvable, over)
        rules = rule.for_kernels(state, search.sentences, new_tokens, logits)
        if rules is None:
            values, indices = search.candidates(logits, text, self.draw)
            beam, token = indices // vocabulary, indices % vocabulary
            hits = search.stop.hits(token, last)
            return self._by_rules(Candidates(values, beam, token, hits), new_tokens)
        ends = search.stop.end_tokens(logits.device)
        step = Step(ends, last, search.sentences, state, rules, new_tokens)
        updates = search.fused_updates(logits, text)
        if updates is not None:
            rows = logits.view(*search.scores.shape, -1)
            return kbest_and_choose_(rows, rule.candidates, updates, step)
        found = search.candidates_of_log_probs(logits, text, self.draw)
        return choose_(*found, vocabulary, step)

    def _by_rules(self, candidates: Candidates, new_tokens: Tensor) -> Chosen:
        """Do the same in torch, for candidates (B, K)."""
        search, over = self.search, self._over
        rule, finished = search.rule, search.finished
        chosen = search.by_rules(candidates, new_tokens)
        merged, flags = chosen.merged, chosen.flags
        unchanged = torch.arange(rule.beams, device=over.device, dtype=torch.int64)
        order = torch.where(over, unchanged, merged.order)
        finished.scores.copy_(torch.where(over, finished.scores, merged.scores))
        finished.done.copy_(torch.where(over, finished.done, merged.done))
        search.scores.copy_(chosen.scores)
        search.improvable.copy_(chosen.improvable)
        over.logical_or_(flags[3, :1])
        flags[3].copy_(over.expand(search.batch_size))
        rows, row = search.rows_of(chosen.parents), search.rows_of(candidates.beam)
        return Chosen(
            chosen.parents, chosen.tokens, rows, order, candidates.beam, candidates.token, row,
            flags,
        )  # fmt: skip
