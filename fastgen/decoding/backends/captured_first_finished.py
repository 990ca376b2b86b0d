"""`captured_selection` backend of beam search with the finishing rules of fairseq.

Finished hypotheses stay on the device until the search is over. Each sentence has M slots, filled
in the order of finishing. Full slots are never overwritten, so a step that the host launches before
it sees the end has no effect.
"""

import contextlib
import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fastgen.decoding.backends.captured_selection import CapturedSelection
from fastgen.decoding.backends.decode_backend import not_captured
from fastgen.decoding.logits.text import Text
from fastgen.decoding.search.candidates import Candidates
from fastgen.decoding.search.first_finished import FirstFinished
from fastgen.decoding.search.prediction import PredictionStepper, StepOutput
from fastgen.models.cuda_graphs import graph
from fastgen.ops.dispatch import use_triton
from fastgen.ops.selection.choice import FirstChosen, Slots, choose_first_, first_covered
from fastgen.ops.tables import Finished, Table, extend_rows_, finish_and_extend_


@dataclass
class FinishedSlots:
    """Finished hypotheses of the sentences in the batch, on the device, in M slots per sentence.

    Attributes:
        rows: tables (B, M, N) as `FirstFinished.rows`.
        lengths: (B, M) int64, number of tokens, end token included; 0 for an empty slot.
        counts: (B,) int64, number of used slots. Slots of hypotheses that the host has stored
            count as used but hold no data.
    """

    rows: list[Tensor]
    lengths: Tensor
    counts: Tensor

    def of(self, sentences: Tensor) -> "FinishedSlots":
        """Return the slots of the given sentences."""
        return FinishedSlots(
            [table[sentences] for table in self.rows],
            self.lengths[sentences],
            self.counts[sentences],
        )


class DepartedSentences(NamedTuple):
    """Hypotheses of sentences that have left the batch.

    Attributes:
        sentences: index of each in the original batch.
        slots: their slots.
        attention: (B * M, S, T), cross-attention weights of all slots, or None.
    """

    sentences: list[int]
    slots: FinishedSlots
    attention: Tensor | None


class CapturedFirstFinished(CapturedSelection[FirstFinished]):
    """Backend of `FirstFinished` whose token selection runs as a CUDA graph."""

    search_type = FirstFinished

    def __init__(self, search: FirstFinished, model: PredictionStepper) -> None:
        super().__init__(search, model)
        self._had_prefix = False
        self._slots: FinishedSlots | None = None  # once a step has been selected on the device
        self._departed: list[DepartedSentences] = []
        self._prefilled = 0  # tokens after the first without KV slots of their own
        # Numbers that the graph reads: the step, the previous step, the number of tokens, and the
        # number of KV slots of each beam.
        self._numbers = torch.empty(4, dtype=torch.int64, device=search.device)
        self._offsets = self._numbers.clone()

    @property
    def left_off(self) -> tuple[str, ...]:
        """Features that the backend runs without, each with its reason."""
        prefix = (not_captured("while there is a prefix"),) if self._had_prefix else ()
        return *prefix, *super().left_off

    def select(self, output: StepOutput) -> bool:
        """Select the next token of every beam; return False when the search is over.

        With a capture the end is seen one call late.
        """
        (_, logits), attention = output
        phase = self.search.selector.phase(self.search.step)
        self._had_prefix |= phase is None
        if phase is not None and logits is not None and self.can_capture(logits):
            with contextlib.suppress(graph.NotCaptured):
                going = self._select(logits, attention, phase)
                if not going:
                    self._collect()
                return going
        self._collect()
        return not all(self.search.over) and super().select(output)

    def reads(self) -> Sequence[tuple[Any, Sequence[str]]]:
        """Return what `_select_tokens` reads."""
        return (
            (self.search, ("attention", "beams", "end", "ignored", "scores", "tokens")),
            (self.search.selector, ("transforms",)),
            (self, ("_numbers", "_prefilled", "_slots")),
            (self.model.ancestry, ("own",)),
        )

    def _select(self, logits: Tensor, attention: Tensor | None, phase: Hashable) -> bool:
        search, ancestry = self.search, self.model.ancestry
        last = search.step == search.longest
        kv_slots = ancestry.next_slots()
        attention_rows = (
            None
            if attention is None
            else search.attention_with_room(attention, max(1, ancestry.steps_left)).rows
        )
        slots = self._slots or self._new_slots(search.step - ancestry.steps)
        torch.add(self._offsets, search.step, out=self._numbers)
        over: Tensor = self.run(
            functools.partial(self._select_tokens, logits, attention, kv_slots, slots, last),
            logits,
            attention,
            attention_rows,
            kv_slots.rows,
            search.tokens,
            slots.counts,
            last,
            phase,
        )
        ancestry.note_extended()
        search.step += 1
        previous = over if last else self.exchange(over)
        if previous is None:
            return True
        search.over = cast(Any, previous).tolist()
        if all(search.over) or (last and search.stop_at_longest):
            return False
        assert not last, f"{search.step - 1} < {search.longest}"
        if (staying := search.staying()) is not None:
            leaving = sorted({*range(search.batch_size)} - {*staying})
            self._departed.append(self._depart(leaving, slots))
            self._slots = slots.of(search.keep(self.model, staying))
            self.drop_pending()
        return True

    def _new_slots(self, prefilled: int) -> FinishedSlots:
        """Create the slots on the device and the offsets of `_numbers`.

        Args:
            prefilled: tokens after the first without KV slots of their own.
        """
        search, device = self.search, self.search.device
        self._prefilled = prefilled
        self._offsets.copy_(torch.tensor([0, -1, 1, -prefilled], dtype=torch.int64, device="cpu"))
        lengths = torch.zeros(search.batch_size, search.beams, dtype=torch.int64, device=device)
        counts = [len(search.finished[sentence]) for sentence in search.running]
        self._slots = FinishedSlots(
            [table.clone() for table in search.rows],
            lengths,
            torch.tensor(counts, dtype=torch.int64, device=device),
        )
        return self._slots

    def _select_tokens(
        self,
        logits: Tensor,
        attention: Tensor | None,
        kv_slots: Table,
        slots: FinishedSlots,
        last: bool,
    ) -> Tensor:
        """Select the next tokens and write them and the new hypotheses. This function is captured.

        Args:
            logits: (R, V), or (B, V) in the first step.
            attention: cross-attention weights, or None.
            kv_slots: ancestry table with the next KV slots.
            slots: slots for hypotheses.
            last: whether the texts have reached `longest`.

        Returns:
            (B,) bool, which sentences are over.
        """
        search = self.search
        step, before, length, filled = (self._numbers[i : i + 1] for i in range(4))
        rows = logits.view(search.batch_size, -1, logits.shape[1])
        ids = search.tokens[:: len(search.tokens) // len(logits)]
        scores = (
            search.rows[1].index_select(2, before)[:, :, 0]
            if search.step
            else search.running_scores(rows.shape[1])
        )
        candidates = search.selector.of_logits(
            rows, Text(ids, 1, search.step + 1, length), scores, search.beams
        )
        if search.attention is not None and attention is not None:
            search.attention.write(attention, step)
        chosen = _choose(search, candidates, slots, length, last)
        ended = [
            Finished(rows, table.newest)
            for rows, table in zip(slots.rows, search.tables(candidates), strict=True)
        ]
        tables = search.tables(Candidates(chosen.scores, chosen.tokens, chosen.beams))
        if self._prefilled:
            extend_rows_([kv_slots], chosen.beams, filled)
        else:
            tables.append(kv_slots)
        finish_and_extend_(tables, chosen.beams, ended, chosen.order, candidates.beams, step)
        return chosen.over

    def _depart(self, places: Sequence[int], slots: FinishedSlots) -> DepartedSentences:
        """Return the hypotheses of sentences at these batch indices, with their attention."""
        search = self.search
        index, attention = torch.tensor(places, device=search.device, dtype=torch.int64), None
        slots = slots.of(index)
        if search.attention is not None:
            origins = slots.rows[2][:, :, : search.step].flatten(0, 1)
            attention = search.attention.of(index.repeat_interleave(search.beams), origins)
        return DepartedSentences([search.running[place] for place in places], slots, attention)

    def _collect(self) -> None:
        """Move all finished hypotheses from the device to the host; blocks until they are there."""
        self.leave()
        search, slots = self.search, self._slots
        if slots is not None:
            self._departed.append(self._depart(range(search.batch_size), slots))
            search.over = cast(Any, slots.counts >= search.beams).tolist()
        self._slots = None
        self.drop_pending()
        for departed in self._departed:
            self._store(departed)
        self._departed.clear()

    def _store(self, departed: DepartedSentences) -> None:
        search, (sentences, slots, attention) = self.search, departed
        counts: list[int] = cast(Any, slots.counts).tolist()
        lengths: list[list[int]] = cast(Any, slots.lengths).tolist()
        filled = [
            (place, slot)
            for place, sentence in enumerate(sentences)
            for slot in range(len(search.finished[sentence]), counts[place])
        ]
        if not filled:
            return
        place, slot = (
            torch.tensor(column, device=search.device, dtype=torch.int64)
            for column in zip(*filled, strict=True)
        )
        tokens, scores = (table[place, slot] for table in slots.rows[:2])
        search.store(
            [sentences[place] for place, _ in filled],
            [lengths[place][slot] for place, slot in filled],
            tokens[:, 1:],
            scores,
            None if attention is None else attention[place * search.beams + slot],
        )


def _choose(
    search: FirstFinished, candidates: Candidates, slots: FinishedSlots, length: Tensor, last: bool
) -> FirstChosen:
    """Select the beams that continue and fill free slots with candidates that end.

    Args:
        search: the search; `ignored` is updated in place.
        candidates: candidates of the step.
        slots: slots for hypotheses; `counts` and `lengths` are updated in place.
        length: (1,) int64, number of tokens of a hypothesis that ends in this step.
        last: whether the texts have reached `longest`.
    """
    scores, tokens, beams = candidates
    state = Slots(search.ignored, slots.counts, slots.lengths)
    if use_triton("choice", lambda: first_covered(scores, search.beams), scores, tokens, *state):
        return choose_first_(scores, tokens, beams, state, search.end, length, last)
    return choose_by_rules(search, candidates, slots, length, last)


def choose_by_rules(
    search: FirstFinished, candidates: Candidates, slots: FinishedSlots, length: Tensor, last: bool
) -> FirstChosen:
    """Do the same as `_choose`, in torch."""
    m, device = search.beams, search.device
    ends = search.ends(candidates)
    ending = ends[:, :m].clone()
    place = ending.cumsum(1) + slots.counts[:, None]  # 1 is the first slot, 0 is none
    place = place * (ending & (place <= m))
    unchanged = torch.arange(-1, m, device=device, dtype=torch.int64).expand(len(place), -1)
    new = torch.arange(m, 2 * m, device=device, dtype=torch.int64).expand(len(place), -1)
    order = unchanged.scatter(1, place, new)[:, 1:]
    torch.where(order >= m, length, slots.lengths, out=slots.lengths)
    torch.maximum(slots.counts, place.amax(1), out=slots.counts)
    over = slots.counts >= m
    if last:
        over = over | ending.any(1)
    _, running = search.continuing(candidates, ends)
    return FirstChosen(*running, order, over)
