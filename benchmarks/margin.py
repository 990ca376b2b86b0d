"""How close a decision was where two runs of a search parted, in the toolkit's own scores.

Floating point lets two correct programs choose differently where two candidates score the same to within rounding.
That must not pass for an error, nor an error for that: so the toolkit's own search is replayed from the scores it
returns, and the gap between the last candidate it kept and the first it dropped is read off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import fastgen
from fastgen.cli.measure import Verdict

NEAR_TIE = 1e-4


class Agreement:
    """Compares the token ids of the toolkit with another run's: equal, or apart only by near ties.

    Args:
        model, inputs, options: what `generate` is called with; only called again when ids differ.
        tolerance: the largest margin that counts as a near tie.
    """

    def __init__(
        self, model: Any, inputs: dict[str, Tensor], options: dict[str, Any], tolerance: float = NEAR_TIE
    ) -> None:
        self.model, self.inputs, self.options, self.tolerance = model, inputs, options, tolerance
        self._known: dict[tuple, Verdict] = {}

    def __call__(self, stock: Tensor, other: Tensor) -> Verdict:
        if stock.shape == other.shape and torch.equal(stock, other):
            return Verdict(True)
        if len(stock) != len(other):
            return Verdict(False, note=f"{len(stock)} sequences became {len(other)}")
        known = (tuple(map(tuple, stock.tolist())), tuple(map(tuple, other.tolist())))
        if known not in self._known:  # the same difference comes back every round, and a replay is slow
            self._known[known] = self._judge(stock, other)
        return self._known[known]

    def _judge(self, stock: Tensor, other: Tensor) -> Verdict:
        found = margins(self.model, self.inputs, self.options, stock, other)
        worst = max(found, key=found.__getitem__)
        note = f"{len(found)} of {len(stock)} sequences differ, largest margin {found[worst]:.1e} (sequence {worst})"
        if found[worst] > self.tolerance:
            return Verdict(False, sum(m <= self.tolerance for m in found.values()), note)
        return Verdict(True, len(found), note)


def margins(
    model: Any, inputs: dict[str, Tensor], options: dict[str, Any], stock: Tensor, other: Tensor
) -> dict[int, float]:
    """Return, for each sequence that differs, the margin at which the toolkit's search left the way to `other`.

    Runs the toolkit once more, with its scores. A margin is infinite where the search could not have led there.

    Args:
        stock, other: (B, length) token ids as `generate` returns them, one sequence per sentence.
    """
    with fastgen.disabled():
        run = model.generate(**inputs, **options, return_dict_in_generate=True, output_scores=True)
    start = 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    settings = model.generation_config
    eos = options.get("eos_token_id", settings.eos_token_id)
    ends = set() if eos is None else {eos} if isinstance(eos, int) else set(eos)
    search = BeamReplay(
        beams=options.get("num_beams") or settings.num_beams or 1,
        ends=ends,
        steps=options["max_new_tokens"],
        length_penalty=_first(options.get("length_penalty"), settings.length_penalty, 1.0),
    )
    found = {}
    for row in range(len(stock)):
        wanted, kept = (_generated(ids[row, start:].tolist(), ends, search.steps) for ids in (other, stock))
        if wanted != kept:
            rows = slice(row * search.beams, (row + 1) * search.beams)
            found[row] = search.margin([scores[rows].double() for scores in run.scores], wanted)
    return found


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)


def _generated(ids: Sequence[int], ends: set[int], steps: int) -> list[int]:
    """Cut the padding that follows an end token."""
    for i, token in enumerate(ids):
        if token in ends:
            return list(ids[: i + 1])
    return list(ids[:steps])


class BeamReplay:
    """transformers' beam search over given scores, following one sequence; with one beam, its greedy search."""

    def __init__(self, beams: int, ends: set[int], steps: int, length_penalty: float = 1.0) -> None:
        self.beams, self.ends, self.steps, self.length_penalty = beams, ends, steps, length_penalty

    def margin(self, scores: Sequence[Tensor], wanted: Sequence[int]) -> float:
        """Return the smallest gap of any decision by which the search may first have parted from `wanted`.

        The run that gave `wanted` had other beams than this one at the step where this one drops `wanted`, or earlier.
        So up to that step the gap between the last kept and the first dropped candidate counts; where `wanted` is
        never dropped, also its final score's distance from the best.

        Args:
            scores: of each step, (M, V) log-probabilities after the logits processors (raw scores with one beam).
            wanted: generated token ids, up to and with the end token.
        """
        if self.beams == 1:
            return self._greedy_margin(scores, wanted)
        running = scores[0].new_full((self.beams,), -1e9)
        running[0] = 0
        smallest = math.inf
        mine: int | None = 0  # the beam that holds the beginning of `wanted`; None once `wanted` is finished
        finished: list[float] = []
        ours = -math.inf
        for t, step in enumerate(scores):
            vocabulary = step.shape[1]
            total = (running[:, None] + step).flatten()
            count = min(max(2, 1 + len(self.ends)) * self.beams + 1, len(total))
            values, indices = (x.tolist() for x in total.topk(count))
            over = [t + 1 == self.steps or index % vocabulary in self.ends for index in indices]
            done = [i for i in range(min(self.beams, count)) if over[i]]
            going_on = [i for i in range(count) if not over[i]]
            kept = going_on[: self.beams]
            if mine is not None:
                smallest = min(smallest, self._boundary(values, over, going_on))
            finished += [values[i] / (t + 1) ** self.length_penalty for i in done]
            if mine is not None:
                wanted_index = mine * vocabulary + wanted[t] if t < len(wanted) else None
                place = indices.index(wanted_index) if wanted_index in indices else None
                if place in done:
                    ours, mine = values[place] / (t + 1) ** self.length_penalty, None
                elif place in kept:
                    mine = kept.index(place)
                else:
                    return smallest
            running = step.new_tensor([values[i] for i in kept])  # step t + 1 is scored in this order
        return min(smallest, max(finished, default=math.inf) - ours)

    def _boundary(self, values: list[float], over: list[bool], going_on: list[int]) -> float:
        """Return the gap between the last kept and the first dropped, among those that end and those that go on."""
        last, gap = self.beams - 1, math.inf
        if len(values) > self.beams and (over[last] or over[self.beams]):  # an ending counts only in the first M places
            gap = _gap(values[last], values[self.beams])
        if len(going_on) > self.beams:
            gap = min(gap, _gap(values[going_on[last]], values[going_on[self.beams]]))
        return gap

    def _greedy_margin(self, scores: Sequence[Tensor], wanted: Sequence[int]) -> float:
        for step, token in zip(scores, wanted, strict=False):
            best = step[0].max()
            if int(step[0].argmax()) != token:
                return float(best - step[0, token])
        return math.inf


def _gap(kept: float, dropped: float) -> float:
    """Return the distance of two candidates; banned ones (-inf) are no choice."""
    return kept - dropped if math.isfinite(kept) and math.isfinite(dropped) else math.inf
