"""`FirstFinished` on a device that is never waited for: choices are captured as a graph, and looked at a step later.

As in `beam_replay`, all that depends on the length of the text is read from the device. What has finished stays there
until the search is over: a sentence has M slots, filled in the order of finishing. Once they are full nothing writes
to them, so that a step that the host has begun before it knew leaves no trace.
"""

import contextlib
import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fastgen.decoding.backends.captured_selection import CapturedSelection, not_captured
from fastgen.decoding.logits.transforms import Text
from fastgen.decoding.search.finishing_rules import length_powers, per_power
from fastgen.decoding.search.first_finished import (
    Candidates,
    FirstFinished,
    Hypothesis,
    StepOutput,
    Stepper,
    differences,
)
from fastgen.models.cuda_graphs import graph
from fastgen.ops.dispatch import use_triton
from fastgen.ops.selection.choice import FirstChosen, Slots, choose_first_, first_covered
from fastgen.ops.tables import Table, extend_rows_, finish_rows_


class Finished(NamedTuple):
    """What the present sentences have finished, in M slots each.

    rows: tables (B, M, N) as `FirstFinished._rows`. lengths: (B, M) int64, tokens with the end, 0 where there are none.
    counts: (B,) int64, slots that are filled; those of hypotheses that the host has noted are empty, and count.
    """

    rows: list[Tensor]
    lengths: Tensor
    counts: Tensor

    def of(self, sentences: Tensor) -> "Finished":
        return Finished(
            [table[sentences] for table in self.rows],
            self.lengths[sentences],
            self.counts[sentences],
        )


class Left(NamedTuple):
    """What sentences have finished, by their numbers in the whole batch; attention (B * M, S, T) of all slots."""

    sentences: list[int]
    finished: Finished
    attention: Tensor | None


@dataclass
class CapturedFirstFinished(FirstFinished):
    """One search; arguments as `FirstFinished`. Its `search` is plain and keeps nothing of the beams."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.choices = CapturedSelection()
        self._had_prefix = False
        self._finished: Finished | None = None  # where the device notes what finishes
        self._left: list[Left] = []
        self._prefilled = 0  # tokens behind the first that have no slots of their own
        # The step, and the one before; tokens so far; slots of each beam.
        self._numbers = torch.empty(4, dtype=torch.int64, device=self.device)
        self._offsets = self._numbers.clone()

    @property
    def left_off(self) -> tuple[str, ...]:
        prefix = not_captured("while there is a prefix") if self._had_prefix else None
        return tuple(reason for reason in (prefix, self.choices.refused) if reason is not None)

    def outcome(self) -> Any:
        self._collect()
        return super().outcome()

    def advance(self, model: Stepper, made: StepOutput) -> bool:
        (_, logits), attention = made
        phase = self.search.phase(self.step)
        self._had_prefix |= phase is None
        if phase is not None and logits is not None and self.choices.able(logits):
            with contextlib.suppress(graph.NotCaptured):
                return self._advance(model, logits, attention, phase)
        self._collect()
        return not all(self.over) and super().advance(model, made)

    def _advance(
        self, model: Stepper, logits: Tensor, attention: Tensor | None, phase: Hashable
    ) -> bool:
        last = self.step == self.longest
        slots = model.ancestry.next_slots()
        seen = (
            None
            if attention is None
            else self._attended(attention, max(1, model.ancestry.steps_left)).rows
        )
        finished = self._finished or self._begin(self.step - model.ancestry.steps)
        torch.add(self._offsets, self.step, out=self._numbers)
        choose = functools.partial(self._choose, logits, attention, slots, finished, last)
        over = self.choices(
            choose, logits, attention, seen, slots.rows, self.tokens, finished.counts, last, phase
        )
        model.ancestry.note_extended()
        self.step += 1
        before = over if last else self.choices.look(over)
        if before is None:
            return True
        self.over = cast(Any, before).tolist()
        if all(self.over) or (last and self.stop_at_longest):
            return False
        assert not last, f"{self.longest} < {self.longest}"
        self.let_leave(model)
        return True

    def _begin(self, prefilled: int) -> Finished:
        """Have the device note what finishes."""
        self._prefilled = prefilled
        self._offsets.copy_(torch.tensor([0, -1, 1, -prefilled], dtype=torch.int64, device="cpu"))
        lengths = torch.zeros(self.present, self.beams, dtype=torch.int64, device=self.device)
        counts = torch.tensor(
            [len(self.finished[number]) for number in self.running],
            device=self.device,
            dtype=torch.int64,
        )
        self._finished = Finished([table.clone() for table in self._rows], lengths, counts)
        return self._finished

    def _choose(
        self, logits: Tensor, attention: Tensor | None, slots: Table, finished: Finished, last: bool
    ) -> Tensor:
        """Write the next token of every beam to the tables, and what finishes; return which sentences are over, (B,).

        slots: what each beam sees. last: whether the texts are as long as they may become.
        """
        step, before, length, filled = (self._numbers[i : i + 1] for i in range(4))
        rows = logits.view(self.present, -1, logits.shape[1])
        text = Text(self.tokens[:: len(self.tokens) // len(logits)], 1, self.step + 1, length)
        scores = self.running_scores(rows.shape[1])
        if self.step:
            scores = self._rows[1].index_select(2, before)[:, :, 0]
        found = self.search.of_logits(rows, text, scores, self.beams)
        if self.attention is not None and attention is not None:
            self.attention.write(attention, step)
        chosen = self._chosen(found, finished, length, last)
        finish_rows_(finished.rows, self._tables(found), chosen.order, found.beams, step)
        tables = self._tables(Candidates(chosen.scores, chosen.tokens, chosen.beams))
        if self._prefilled:
            extend_rows_([slots], chosen.beams, filled)
        else:
            tables.append(slots)
        extend_rows_(tables, chosen.beams, step)
        return chosen.over

    def _chosen(
        self, found: Candidates, finished: Finished, length: Tensor, last: bool
    ) -> FirstChosen:
        """What runs on and what finishes: slots are filled with candidates that end, as long as there are any.

        length: of what ends in this step.
        """
        slots = Slots(self.ignored, finished.counts, finished.lengths)
        if use_triton(
            "choice",
            lambda: first_covered(found.scores, self.beams),
            found.scores,
            found.tokens,
            *slots,
        ):
            return choose_first_(
                found.scores, found.tokens, found.beams, slots, self.end, length, last
            )
        return self.by_rules(found, finished, length, last)

    def by_rules(
        self, found: Candidates, finished: Finished, length: Tensor, last: bool
    ) -> FirstChosen:
        """The same, in torch."""
        m, device = self.beams, self.device
        ends = self._ends(found)
        ending = ends[:, :m].clone()
        place = ending.cumsum(1) + finished.counts[:, None]  # 1 is the first slot, and 0 none
        place = place * (ending & (place <= m))
        order = torch.arange(-1, m, device=device, dtype=torch.int64).expand(len(place), -1)
        order = order.scatter(
            1,
            place,
            torch.arange(m, 2 * m, device=device, dtype=torch.int64).expand(len(place), -1),
        )[:, 1:]
        torch.where(order >= m, length, finished.lengths, out=finished.lengths)
        torch.maximum(finished.counts, place.amax(1), out=finished.counts)
        over = finished.counts >= m
        if last:
            over = over | ending.any(1)
        _, running = self._running(found, ends)
        return FirstChosen(*running, order, over)

    def _keep(self, model: Stepper, staying: list[int]) -> Tensor:
        if self._finished is not None:
            self._left.append(
                self._leave(sorted({*range(self.present)} - {*staying}), self._finished)
            )
        kept = super()._keep(model, staying)
        if self._finished is not None:
            self._finished = self._finished.of(kept)
            self.choices.forget()
        return kept

    def _leave(self, places: Sequence[int], finished: Finished) -> Left:
        """What some of the present sentences have finished."""
        index, attention = torch.tensor(places, device=self.device, dtype=torch.int64), None
        finished = finished.of(index)
        if self.attention is not None:
            origins = finished.rows[2][:, :, : self.step].flatten(0, 1)
            attention = self.attention.of(index.repeat_interleave(self.beams), origins)
        return Left([self.running[place] for place in places], finished, attention)

    def _collect(self) -> None:
        """Note on the host what has finished on the device, once the device has come so far."""
        if self._finished is not None:
            self._left.append(self._leave(range(self.present), self._finished))
            self.over = cast(Any, self._finished.counts >= self.beams).tolist()
        self._finished = None
        self.choices.forget()
        for left in self._left:
            self._note_slots(left)
        self._left.clear()

    def _note_slots(self, left: Left) -> None:
        counts: list[int] = cast(Any, left.finished.counts).tolist()
        lengths: list[list[int]] = cast(Any, left.finished.lengths).tolist()
        filled = [
            (place, slot)
            for place, sentence in enumerate(left.sentences)
            for slot in range(len(self.finished[sentence]), counts[place])
        ]
        if not filled:
            return
        place, slot = (
            torch.tensor(column, device=self.device, dtype=torch.int64)
            for column in zip(*filled, strict=True)
        )
        tokens, reached = (table[place, slot] for table in left.finished.rows[:2])
        attention = None if left.attention is None else left.attention[place * self.beams + slot]
        count = left.finished.lengths[place, slot]
        scores = reached.gather(1, count[:, None] - 1)[:, 0]
        numbers = [left.sentences[place] for place, _ in filled]
        sizes = [lengths[place][slot] for place, slot in filled]
        if self.normalize:
            scores = per_power(scores, length_powers(sizes, self.length_penalty, scores))
        scores, token_scores = self._limited(scores, numbers, count), differences(reached)
        for i, (number, size) in enumerate(zip(numbers, sizes, strict=True)):
            seen = None if attention is None else attention[i, :, :size]
            self._note(
                number, Hypothesis(tokens[i, 1 : size + 1], scores[i], token_scores[i, :size], seen)
            )
