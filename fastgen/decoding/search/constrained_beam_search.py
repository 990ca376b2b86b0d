"""Constrained beam search: some beams of each sentence are those that come further with what its text has to hold.

Beside the best candidates stand those that bring a constraint forward. All are sorted into banks by how far they are,
and beams are taken from the banks in turn, the furthest first.

Sources: Anderson et al. 2017 (constrained beam search); Post and Vilar 2018, section 3.2 (dynamic beam allocation).
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from fastgen.constraints import Constraint, Progress
from fastgen.decoding.logits.transforms import apply_transforms
from fastgen.decoding.search.beam_search import Stepper
from fastgen.decoding.search.pooled_beam_search import Next, PooledBeams, next_of
from fastgen.ops.selection.kbest import best_of_log_probs


@dataclass
class _Beams:
    """What is known of a sentence's beams: how far each has come, and a number that stands for its text."""

    progress: list[Progress]
    texts: list[int]


@dataclass(kw_only=True)
class ConstrainedBeamSearch(PooledBeams):
    """One constrained beam search.

    Args:
        constraints: what each text has to hold; what its prompt holds counts.
        returned: hypotheses of a sentence that are wanted: where fewer hold all, others are returned too.
    """

    constraints: Sequence[Constraint]
    returned: int = 1
    known: list[_Beams] = field(
        default_factory=list[_Beams], init=False
    )  # of the present sentences

    def __post_init__(self) -> None:
        super().__post_init__()
        prompts: list[list[int]] = cast(Any, self.prompt).tolist()
        for prompt in prompts:
            progress = Progress.start(self.constraints)
            for token in prompt:
                progress = progress.behind(token)
            self.known.append(_Beams([progress] * self.beams, [0] * self.beams))

    def advance(self, model: Stepper, logits: Tensor) -> bool:
        """Choose the next token of every beam; False when the search is over."""
        b, m = self.scores.shape
        logits = logits.float()
        if self.trace.logits is not None:
            self.trace.logits.append(logits.clone())
        log_probs = apply_transforms(
            torch.log_softmax(logits, -1), self.text, self.transforms
        ).view(b, m, -1)
        if self.trace.scores is not None:
            self.trace.scores.append(log_probs.flatten(0, 1).clone())
        found = next_of(
            *best_of_log_probs(log_probs, self.scores, self.candidates), log_probs.shape[2]
        )
        steps = self._steps(log_probs)
        beams: list[list[Next]] = []
        for place, (candidates, forward) in enumerate(zip(found, steps, strict=True)):
            pool = self.pools[self.sentences[place]][0]
            if pool.done:
                beams.append(self.idle(0))
                continue
            beams.append(self._allocated(place, self.chosen(place, 0, candidates), forward))
            pool.settle(candidates[0].score, self.new_tokens + 1)
        return self.move(model, beams)

    def may_end(self, place: int, beam: int) -> bool:
        return self.known[place].progress[beam].complete

    def drop(self, staying: list[int]) -> None:
        super().drop(staying)
        self.known = [self.known[place] for place in staying]

    def close(self, place: int, totals: list[float]) -> None:
        """Put what still runs of a sentence into its pool: what holds all, and where that is too little, the rest."""
        pool = self.pools[self.sentences[place]][0]
        if pool.done:
            return
        whole = [beam for beam in range(self.beams) if self.may_end(place, beam)]
        others = (
            [beam for beam in range(self.beams) if beam not in whole]
            if len(whole) < self.returned
            else []
        )
        for beam in (*whole, *others):
            pool.add(totals[beam], self.new_tokens, *self.of_beam(place, beam))

    def _steps(self, log_probs: Tensor) -> list[list[Next]]:
        """Each way to bring a beam of a sentence forward, for all sentences, from one read of log_probs (B, M, V)."""
        wanted = [
            (place, beam, token)
            for place, known in enumerate(self.known)
            for beam, progress in enumerate(known.progress)
            for token in dict.fromkeys(progress.wanted)
        ]
        steps: list[list[Next]] = [[] for _ in self.known]
        if wanted:
            at = torch.tensor(wanted, device=log_probs.device, dtype=torch.int64).unbind(1)
            totals: list[float] = cast(Any, log_probs[at] + self.scores[at[:2]]).tolist()
            for (place, beam, token), total in zip(wanted, totals, strict=True):
                steps[place].append(Next(total, beam, token))
        return steps

    def _allocated(self, place: int, chosen: list[Next], steps: list[Next]) -> list[Next]:
        """The beams of a sentence: of the best candidates and the ways forward, those that the banks give."""
        known = self.known[place]
        texts: dict[tuple[int, int], int] = {}
        for one in chosen:
            texts.setdefault((known.texts[one.parent], one.token), len(texts))
        given = list(chosen)
        for one in steps:  # two beams have one text where all begin
            text = known.texts[one.parent], one.token
            if text not in texts:
                texts[text] = len(texts)
                given.append(one)
        progress = [known.progress[one.parent].behind(one.token) for one in given]
        order = (
            range(len(chosen))
            if len(given) == len(chosen)
            else _in_turn(progress, given)[: self.beams]
        )
        self.known[place] = _Beams(
            [progress[i] for i in order],
            [texts[known.texts[given[i].parent], given[i].token] for i in order],
        )
        return [given[i] for i in order]


def _in_turn(progress: Sequence[Progress], given: Sequence[Next]) -> list[int]:
    """The candidates in the order of their banks: the best of each bank, the furthest first, then the second best."""
    banks = [one.bank for one in progress]
    # Sorted by one number, of which fp32 keeps little behind a high bank: then the candidate that came first is first.
    ranks = [_fp32(bank * 100 + one.score) for bank, one in zip(banks, given, strict=True)]
    order = sorted(range(len(given)), key=lambda i: -ranks[i])
    turns: list[int] = []
    for place, i in enumerate(order):
        turns.append(turns[-1] + 1 if place and banks[i] == banks[order[place - 1]] else 0)
    return [order[place] for place in sorted(range(len(order)), key=lambda place: turns[place])]


def _fp32(value: float) -> float:
    """The nearest number of single precision."""
    return struct.unpack("f", struct.pack("f", value))[0]
