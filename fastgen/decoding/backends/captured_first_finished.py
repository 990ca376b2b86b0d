"""`FirstFinished` without host synchronisation: token selection runs as a CUDA graph.

As in `captured_beam_search`, everything that depends on the length of the text is read from device
memory, and the host reads results one step late. Finished hypotheses stay on the device until the
search is over. Each sentence has M slots, filled in the order of finishing. Full slots are never
overwritten, so a step that the host launches before it sees the end has no effect.
"""

import contextlib
import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fastgen.decoding.backends.captured_selection import CapturedSelection, not_captured
from fastgen.decoding.logits.text import Text
from fastgen.decoding.search.finishing_rules import length_powers, per_power
from fastgen.decoding.search.first_finished import (
    Candidates,
    FirstFinished,
    Hypothesis,
    PredictionStepper,
    StepOutput,
    differences,
)
from fastgen.models.cuda_graphs import graph
from fastgen.ops.dispatch import use_triton
from fastgen.ops.selection.choice import FirstChosen, Slots, choose_first_, first_covered
from fastgen.ops.tables import Table, extend_rows_, finish_rows_


class Finished(NamedTuple):
    """Finished hypotheses of the sentences in the batch, on the device, in M slots per sentence.

    Attributes:
        rows: tables (B, M, N) as `FirstFinished._rows`.
        lengths: (B, M) int64, number of tokens, end token included; 0 for an empty slot.
        counts: (B,) int64, number of used slots. Slots of hypotheses that the host has stored
            count as used but hold no data.
    """

    rows: list[Tensor]
    lengths: Tensor
    counts: Tensor

    def of(self, sentences: Tensor) -> "Finished":
        """Return the slots of the given sentences."""
        return Finished(
            [table[sentences] for table in self.rows],
            self.lengths[sentences],
            self.counts[sentences],
        )


class Left(NamedTuple):
    """Hypotheses of sentences that have left the batch.

    Attributes:
        sentences: index of each in the original batch.
        finished: their slots.
        attention: (B * M, S, T), cross-attention weights of all slots, or None.
    """

    sentences: list[int]
    finished: Finished
    attention: Tensor | None


@dataclass
class CapturedFirstFinished(FirstFinished):
    """`FirstFinished` with captured token selection.

    Takes the arguments of `FirstFinished`. Its `search` must be `plain` and keep no state of the
    beams.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.choices = CapturedSelection()
        self._had_prefix = False
        self._finished: Finished | None = None  # slots on the device, once there are any
        self._left: list[Left] = []
        self._prefilled = 0  # tokens after the first without KV slots of their own
        # Numbers that the graph reads: the step, the previous step, the number of tokens, and the
        # number of KV slots of each beam.
        self._numbers = torch.empty(4, dtype=torch.int64, device=self.device)
        self._offsets = self._numbers.clone()

    @property
    def left_off(self) -> tuple[str, ...]:
        """Disabled features, each with its reason."""
        prefix = not_captured("while there is a prefix") if self._had_prefix else None
        return tuple(reason for reason in (prefix, self.choices.refused) if reason is not None)

    def outcome(self) -> Any:
        """Return the finished hypotheses of each sentence, best first, once the search is over."""
        self._collect()
        return super().outcome()

    def advance(self, model: PredictionStepper, made: StepOutput) -> bool:
        """Select the next token of every beam; return False when the search is over.

        With a capture the end is seen one call late. Without one, `FirstFinished.advance` runs.
        """
        (_, logits), attention = made
        phase = self.search.phase(self.step)
        self._had_prefix |= phase is None
        if phase is not None and logits is not None and self.choices.able(logits):
            with contextlib.suppress(graph.NotCaptured):
                return self._advance(model, logits, attention, phase)
        self._collect()
        return not all(self.over) and super().advance(model, made)

    def _advance(
        self, model: PredictionStepper, logits: Tensor, attention: Tensor | None, phase: Hashable
    ) -> bool:
        last = self.step == self.longest
        slots = model.ancestry.next_slots()
        attention_rows = (
            None
            if attention is None
            else self._attended(attention, max(1, model.ancestry.steps_left)).rows
        )
        finished = self._finished or self._begin(self.step - model.ancestry.steps)
        torch.add(self._offsets, self.step, out=self._numbers)
        choose = functools.partial(self._choose, logits, attention, slots, finished, last)
        over = self.choices(
            choose,
            logits,
            attention,
            attention_rows,
            slots.rows,
            self.tokens,
            finished.counts,
            last,
            phase,
        )
        model.ancestry.note_extended()
        self.step += 1
        before = over if last else self.choices.look(over)
        if before is None:
            return True
        self.over = cast(Any, before).tolist()
        if all(self.over) or (last and self.stop_at_longest):
            return False
        assert not last, f"{self.step - 1} < {self.longest}"
        self.let_leave(model)
        return True

    def _begin(self, prefilled: int) -> Finished:
        """Create the slots on the device and the offsets of `_numbers`.

        Args:
            prefilled: tokens after the first without KV slots of their own.
        """
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
        """Select the next tokens and write them and the new hypotheses. This function is captured.

        Args:
            logits: (R, V), or (B, V) in the first step.
            attention: cross-attention weights, or None.
            slots: ancestry table with the next KV slots.
            finished: slots for hypotheses.
            last: whether the texts have reached `longest`.

        Returns:
            (B,) bool, which sentences are over.
        """
        step, before, length, filled = (self._numbers[i : i + 1] for i in range(4))
        rows = logits.view(self.present, -1, logits.shape[1])
        text = Text(self.tokens[:: len(self.tokens) // len(logits)], 1, self.step + 1, length)
        scores = self.running_scores(rows.shape[1])
        if self.step:
            scores = self._rows[1].index_select(2, before)[:, :, 0]
        candidates = self.search.of_logits(rows, text, scores, self.beams)
        if self.attention is not None and attention is not None:
            self.attention.write(attention, step)
        chosen = self._chosen(candidates, finished, length, last)
        finish_rows_(finished.rows, self._tables(candidates), chosen.order, candidates.beams, step)
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
        """Select the beams that continue and fill free slots with candidates that end.

        Args:
            found: candidates of the step.
            finished: slots for hypotheses; `counts` and `lengths` are updated in place.
            length: (1,) int64, number of tokens of a hypothesis that ends in this step.
            last: whether the texts have reached `longest`.
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
        """Do the same as `_chosen`, in torch."""
        m, device = self.beams, self.device
        ends = self._ends(found)
        ending = ends[:, :m].clone()
        place = ending.cumsum(1) + finished.counts[:, None]  # 1 is the first slot, 0 is none
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

    def _keep(self, model: PredictionStepper, staying: list[int]) -> Tensor:
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
        """Return the hypotheses of sentences at these batch indices, with their attention."""
        index, attention = torch.tensor(places, device=self.device, dtype=torch.int64), None
        finished = finished.of(index)
        if self.attention is not None:
            origins = finished.rows[2][:, :, : self.step].flatten(0, 1)
            attention = self.attention.of(index.repeat_interleave(self.beams), origins)
        return Left([self.running[place] for place in places], finished, attention)

    def _collect(self) -> None:
        """Move all finished hypotheses from the device to the host; blocks until they are there."""
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
            weights = None if attention is None else attention[i, :, :size]
            self._note(
                number,
                Hypothesis(tokens[i, 1 : size + 1], scores[i], token_scores[i, :size], weights),
            )
