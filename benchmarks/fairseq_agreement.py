"""Check that two outputs of fairseq's generator are equal or differ only by near ties.

Counterpart of `fastgen/cli/bench/agreement.py` for fairseq. Where tokens differ, fairseq's own
search is replayed from the scores that it selects from. Both toolkits follow the same rule: the
best M candidates that do not end continue, and a candidate that ends counts only if it is among the
best M.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import fastgen
from fastgen.cli.bench.agreement import judged
from fastgen.cli.bench.measure import Verdict
from fastgen.decoding.search.near_ties import replayed

Found = list[list[dict[str, Any]]]
"""Hypotheses of each sentence, best first, as `SequenceGenerator.generate` returns them."""


class FairseqAgreement:
    """Comparison of fairseq's hypotheses with those of another run.

    The model runs again only when tokens differ.

    Args:
        model: the fairseq model.
        generator: its `SequenceGenerator`.
        sample: batch that both runs generated from.
    """

    def __init__(self, model: Any, generator: Any, sample: dict[str, Any]) -> None:
        self.model, self.generator, self.sample = model, generator, sample
        self._scores: list[list[Tensor]] | None = None

    def __call__(self, stock: Found, other: Found) -> Verdict:
        differing = [
            i for i, (a, b) in enumerate(zip(stock, other, strict=True)) if _tokens(a) != _tokens(b)
        ]
        if not differing:
            return Verdict(True)
        margins = {i: self._margin(i, stock[i], other[i]) for i in differing}
        dtype = next(self.model.parameters()).dtype
        return judged(margins, dtype, f"{len(differing)} of {len(stock)} sentences", "sentence")

    def margin(self, sentence: int, wanted: Sequence[int]) -> float:
        """Return how narrowly fairseq's search decided against a sequence.

        Args:
            sentence: index of the sentence in the batch.
            wanted: token ids of the sequence, end token included.
        """
        return replayed(self._steps()[sentence], wanted, {self.generator.eos})

    def _margin(
        self, sentence: int, stock: list[dict[str, Any]], other: list[dict[str, Any]]
    ) -> float:
        """Return the largest margin by which fairseq's search decided against a hypothesis."""
        kept = {tuple(h["tokens"].tolist()): float(h["score"]) for h in stock}
        margins: list[float] = []
        for mine, theirs in zip(stock, other, strict=True):
            wanted = tuple(theirs["tokens"].tolist())
            if wanted == tuple(mine["tokens"].tolist()):
                continue
            margin = self.margin(sentence, wanted)
            if wanted in kept:  # fairseq's search kept it at another rank
                margin = min(margin, abs(kept[wanted] - float(mine["score"])))
            margins.append(margin)
        return max(margins, default=math.inf)

    def _steps(self) -> list[list[Tensor]]:
        """Return fairseq's (M, V) log-probabilities of every step, by sentence.

        They are captured from one run of the unpatched search, as `search.step` receives them.
        """
        if self._scores is None:
            search, count = self.generator.search, len(self.sample["net_input"]["src_tokens"])
            numbers: list[int] = (
                self.sample["id"].tolist() if "id" in self.sample else list(range(count))
            )
            seen: dict[int, list[Tensor]] = {number: [] for number in numbers}
            step = search.step

            def watched(number: int, lprobs: Tensor, *rest: Any) -> Any:
                # rest: scores, tokens, indices of the sentences.
                for scores, sentence in zip(lprobs.float(), rest[2], strict=True):
                    seen[int(sentence)].append(scores.clone())
                return step(number, lprobs, *rest)

            search.step = watched
            try:
                with fastgen.disabled(), torch.no_grad():
                    self.generator.generate([self.model], self.sample)
            finally:
                del search.step
            self._scores = [seen[number] for number in numbers]
        return self._scores


def _tokens(hypotheses: list[dict[str, Any]]) -> list[list[int]]:
    return [hypothesis["tokens"].tolist() for hypothesis in hypotheses]
