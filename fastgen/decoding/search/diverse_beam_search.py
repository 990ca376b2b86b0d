"""Diverse beam search: each group of beams is penalised for tokens of earlier groups in that step.

Source: Vijayakumar et al. 2018 (diverse beam search), with the Hamming penalty.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastgen.decoding.logits.pipeline import apply_transforms
from fastgen.decoding.search.beam_search import RowStepper
from fastgen.decoding.search.pooled_beam_search import PooledBeams, ScoredToken, next_of
from fastgen.ops.selection.kbest import best_of_log_probs


@dataclass(kw_only=True)
class DiverseBeamSearch(PooledBeams):
    """State of one diverse beam search.

    Args:
        penalty: subtracted from a token's log-probability for each beam of an earlier group that
            selected the token in the same step.
        transforms_before: number of leading transforms that are applied before the penalty.
    """

    penalty: float
    transforms_before: int = 0

    def advance(self, model: RowStepper, logits: Tensor) -> bool:
        """Select the next tokens group by group; return False when the search is over."""
        b, m = self.scores.shape
        logits = logits.float()
        if self.trace.logits is not None:
            self.trace.logits.append(logits.clone())
        log_probs = torch.log_softmax(logits, -1)
        before, after = (
            self.transforms[: self.transforms_before],
            self.transforms[self.transforms_before :],
        )
        # Bans commute with the penalty: -inf stays -inf.
        if all(transform.form == "token mask" for transform in after):
            before, after = self.transforms, ()
        log_probs = apply_transforms(log_probs, self.text, before).view(b, m, -1)
        vocabulary = log_probs.shape[2]
        beams: list[list[ScoredToken]] = [[] for _ in range(b)]
        processed: list[Tensor] = []
        for group in range(self.groups):
            at = slice(group * self.size, (group + 1) * self.size)
            group_log_probs = self._shunned(log_probs, at, beams)
            if after:
                penalised = log_probs.clone()
                penalised[:, at] = group_log_probs
                group_log_probs = apply_transforms(penalised.flatten(0, 1), self.text, after).view(
                    b, m, -1
                )[:, at]
            if self.trace.scores is not None:
                processed.append(group_log_probs)
            ranked = next_of(
                *best_of_log_probs(group_log_probs, self.scores[:, at], self.candidates),
                vocabulary,
                at.start,
            )
            for place, candidates in enumerate(ranked):
                beams[place] += self._of_group(place, group, candidates)
        if self.trace.scores is not None:
            self.trace.scores.append(torch.cat(processed, 1).flatten(0, 1))
        return self.move(model, beams)

    def _of_group(
        self, place: int, group: int, candidates: Sequence[ScoredToken]
    ) -> list[ScoredToken]:
        pool = self.pools[self.sentences[place]][group]
        if pool.done:
            return self.idle(group)
        chosen = self.chosen(place, group, candidates)
        pool.settle(candidates[0].score, self.new_tokens + 1)
        return chosen

    def _shunned(self, log_probs: Tensor, at: slice, beams: list[list[ScoredToken]]) -> Tensor:
        """Return a group's log-probabilities (B, M / G, V) after the penalty.

        Args:
            log_probs: (B, M, V).
            at: beams of the group.
            beams: beams that earlier groups have selected in this step, for each sentence.
        """
        group_log_probs = log_probs[:, at]
        if at.start == 0:
            return group_log_probs
        tokens = torch.tensor(
            [[one.token for one in of] for of in beams], device=log_probs.device, dtype=torch.int64
        )
        times = (tokens[:, :, None] == tokens[:, None, :]).sum(2).to(log_probs.dtype)
        index = tokens[:, None].expand(-1, group_log_probs.shape[1], -1)
        return group_log_probs.scatter(
            2, index, group_log_probs.gather(2, index) - (self.penalty * times)[:, None]
        )
