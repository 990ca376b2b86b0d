"""Constrained beam search: some beams are reserved for candidates that advance a constraint.

Each step extends the best candidates by those that advance a constraint. Candidates are sorted into
banks by their progress. Beams are filled from the banks in turn, the most advanced bank first.

Sources: Anderson et al. 2017 (constrained beam search); Post and Vilar 2018, section 3.2 (dynamic
beam allocation).
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from fastgen.constraints import Constraint, Progress
from fastgen.decoding.logits.pipeline import apply_transforms
from fastgen.decoding.search.beam_search import RowStepper
from fastgen.decoding.search.pooled_beam_search import PooledBeams, ScoredToken, next_of
from fastgen.ops.selection.kbest import best_of_log_probs


@dataclass
class _Beams:
    """Constraint state of the beams of one sentence.

    Attributes:
        progress: progress of each beam.
        texts: number that identifies the text of each beam; equal texts have equal numbers.
    """

    progress: list[Progress]
    texts: list[int]


@dataclass(kw_only=True)
class ConstrainedBeamSearch(PooledBeams):
    """State of one constrained beam search.

    Args:
        constraints: constraints that each text must satisfy; its prompt counts too.
        returned: number of hypotheses to return per sentence. If fewer satisfy all constraints,
            others are returned as well.
    """

    constraints: Sequence[Constraint]
    returned: int = 1
    # One entry per sentence in the batch.
    known: list[_Beams] = field(default_factory=list[_Beams], init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        prompts: list[list[int]] = cast(Any, self.prompt).tolist()
        for prompt in prompts:
            progress = Progress.start(self.constraints)
            for token in prompt:
                progress = progress.behind(token)
            self.known.append(_Beams([progress] * self.beams, [0] * self.beams))

    def advance(self, model: RowStepper, logits: Tensor) -> bool:
        """Select the next token of every beam; return False when the search is over."""
        b, m = self.scores.shape
        logits = logits.float()
        if self.trace.logits is not None:
            self.trace.logits.append(logits.clone())
        log_probs = apply_transforms(
            torch.log_softmax(logits, -1), self.text, self.transforms
        ).view(b, m, -1)
        if self.trace.scores is not None:
            self.trace.scores.append(log_probs.flatten(0, 1).clone())
        ranked = next_of(
            *best_of_log_probs(log_probs, self.scores, self.candidates), log_probs.shape[2]
        )
        steps = self._steps(log_probs)
        beams: list[list[ScoredToken]] = []
        for place, (candidates, forward) in enumerate(zip(ranked, steps, strict=True)):
            pool = self.pools[self.sentences[place]][0]
            if pool.done:
                beams.append(self.idle(0))
                continue
            beams.append(self._allocated(place, self.chosen(place, 0, candidates), forward))
            pool.settle(candidates[0].score, self.new_tokens + 1)
        return self.move(model, beams)

    def may_end(self, place: int, beam: int) -> bool:
        """Return whether a beam satisfies all constraints, so that it may end."""
        return self.known[place].progress[beam].complete

    def drop(self, staying: list[int]) -> None:
        """Keep only the sentences at these batch indices."""
        super().drop(staying)
        self.known = [self.known[place] for place in staying]

    def close(self, place: int, totals: list[float]) -> None:
        """Add the running beams of a sentence to its pool.

        Beams that satisfy all constraints come first. The others follow only if there are fewer
        than `returned` such beams.
        """
        pool = self.pools[self.sentences[place]][0]
        if pool.done:
            return
        complete = [beam for beam in range(self.beams) if self.may_end(place, beam)]
        incomplete = (
            [beam for beam in range(self.beams) if beam not in complete]
            if len(complete) < self.returned
            else []
        )
        for beam in (*complete, *incomplete):
            pool.add(totals[beam], self.new_tokens, *self.of_beam(place, beam))

    def _steps(self, log_probs: Tensor) -> list[list[ScoredToken]]:
        """Return all candidates that advance a constraint, for each sentence.

        Args:
            log_probs: (B, M, V); read from the device once.
        """
        advancing = [
            (place, beam, token)
            for place, known in enumerate(self.known)
            for beam, progress in enumerate(known.progress)
            for token in dict.fromkeys(progress.wanted)
        ]
        steps: list[list[ScoredToken]] = [[] for _ in self.known]
        if advancing:
            at = torch.tensor(advancing, device=log_probs.device, dtype=torch.int64).unbind(1)
            totals: list[float] = cast(Any, log_probs[at] + self.scores[at[:2]]).tolist()
            for (place, beam, token), total in zip(advancing, totals, strict=True):
                steps[place].append(ScoredToken(total, beam, token))
        return steps

    def _allocated(
        self, place: int, chosen: list[ScoredToken], steps: list[ScoredToken]
    ) -> list[ScoredToken]:
        """Allocate the beams of a sentence to its candidates and update its constraint state.

        Args:
            place: batch index of the sentence.
            chosen: the best candidates, best first.
            steps: candidates that advance a constraint.
        """
        known = self.known[place]
        texts: dict[tuple[int, int], int] = {}
        for one in chosen:
            texts.setdefault((known.texts[one.parent], one.token), len(texts))
        candidates = list(chosen)
        for one in steps:  # several beams can hold the same text, as all do at the start
            text = known.texts[one.parent], one.token
            if text not in texts:
                texts[text] = len(texts)
                candidates.append(one)
        progress = [known.progress[one.parent].behind(one.token) for one in candidates]
        order = (
            range(len(chosen))
            if len(candidates) == len(chosen)
            else _in_turn(progress, candidates)[: self.beams]
        )
        self.known[place] = _Beams(
            [progress[i] for i in order],
            [texts[known.texts[candidates[i].parent], candidates[i].token] for i in order],
        )
        return [candidates[i] for i in order]


def _in_turn(progress: Sequence[Progress], given: Sequence[ScoredToken]) -> list[int]:
    """Return candidate indices, round-robin over the banks.

    The best candidate of each bank comes first, the most advanced bank leading; then the second
    best of each bank, and so on.
    """
    banks = [one.bank for one in progress]
    # transformers 4 sorts by this single fp32 number. At a high bank little of the score remains,
    # and among equal ranks the earlier candidate wins.
    ranks = [_fp32(bank * 100 + one.score) for bank, one in zip(banks, given, strict=True)]
    order = sorted(range(len(given)), key=lambda i: -ranks[i])
    turns: list[int] = []
    for place, i in enumerate(order):
        turns.append(turns[-1] + 1 if place and banks[i] == banks[order[place - 1]] else 0)
    return [order[place] for place in sorted(range(len(order)), key=lambda place: turns[place])]


def _fp32(value: float) -> float:
    """Round to single precision."""
    return struct.unpack("f", struct.pack("f", value))[0]
