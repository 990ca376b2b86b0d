"""Diverse beam search: groups of beams, each of which shuns the tokens that those before it choose in the same step.

Source: Vijayakumar et al. 2018 (diverse beam search), with the Hamming penalty.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastgen.decoding.logits.transforms import Ban, NGramBlock, Only, apply_transforms
from fastgen.decoding.search.beam_search import Stepper
from fastgen.decoding.search.pooled_beam_search import Next, PooledBeams, next_of
from fastgen.ops.selection.kbest import best_of_log_probs


@dataclass(kw_only=True)
class DiverseBeamSearch(PooledBeams):
    """One diverse beam search.

    Args:
        penalty: what a token loses of its log-probability for each beam of an earlier group that has chosen it.
        edits_before: how many of the edits come before the penalty.
    """

    penalty: float
    edits_before: int = 0

    def advance(self, model: Stepper, logits: Tensor) -> bool:
        """Choose the next token of every beam, group by group; False when the search is over."""
        b, m = self.scores.shape
        logits = logits.float()
        if self.trace.logits is not None:
            self.trace.logits.append(logits.clone())
        log_probs = torch.log_softmax(logits, -1)
        before, behind = self.transforms[: self.edits_before], self.transforms[self.edits_before :]
        if all(
            isinstance(edit, NGramBlock | Ban | Only) for edit in behind
        ):  # what is banned stays banned
            before, behind = self.transforms, ()
        log_probs = apply_transforms(log_probs, self.text, before).view(b, m, -1)
        vocabulary = log_probs.shape[2]
        beams: list[list[Next]] = [[] for _ in range(b)]
        processed: list[Tensor] = []
        for group in range(self.groups):
            at = slice(group * self.size, (group + 1) * self.size)
            of_group = self._shunned(log_probs, at, beams)
            if behind:
                of_all = log_probs.clone()
                of_all[:, at] = of_group
                of_group = apply_transforms(of_all.flatten(0, 1), self.text, behind).view(b, m, -1)[
                    :, at
                ]
            if self.trace.scores is not None:
                processed.append(of_group)
            found = next_of(
                *best_of_log_probs(of_group, self.scores[:, at], self.candidates),
                vocabulary,
                at.start,
            )
            for place, candidates in enumerate(found):
                beams[place] += self._of_group(place, group, candidates)
        if self.trace.scores is not None:
            self.trace.scores.append(torch.cat(processed, 1).flatten(0, 1))
        return self.move(model, beams)

    def _of_group(self, place: int, group: int, candidates: Sequence[Next]) -> list[Next]:
        pool = self.pools[self.sentences[place]][group]
        if pool.done:
            return self.idle(group)
        chosen = self.chosen(place, group, candidates)
        pool.settle(candidates[0].score, self.new_tokens + 1)
        return chosen

    def _shunned(self, log_probs: Tensor, at: slice, beams: list[list[Next]]) -> Tensor:
        """The log-probabilities (B, M / G, V) of a group's beams, less the penalty of what is chosen already."""
        of_group = log_probs[:, at]
        if at.start == 0:
            return of_group
        tokens = torch.tensor(
            [[one.token for one in of] for of in beams], device=log_probs.device, dtype=torch.int64
        )
        times = (tokens[:, :, None] == tokens[:, None, :]).sum(2).to(log_probs.dtype)
        index = tokens[:, None].expand(-1, of_group.shape[1], -1)
        return of_group.scatter(
            2, index, of_group.gather(2, index) - (self.penalty * times)[:, None]
        )
