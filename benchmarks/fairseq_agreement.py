"""Whether two outputs of fairseq's generator agree: equal, or apart only by near ties.

As `cli/bench/agreement.py` does for transformers: where tokens differ, fairseq's own search is replayed from the
scores that it is seen to choose from. Its rule is transformers': the best M candidates that do not end go on, and what
ends counts among the best M alone.
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
"""For each sentence its hypotheses, best first, as `SequenceGenerator.generate` returns them."""


class FairseqAgreement:
    """Compares the hypotheses of fairseq with another run's.

    Args:
        model, generator, sample: what is generated with; only called again when tokens differ.
    """

    def __init__(self, model: Any, generator: Any, sample: dict[str, Any]) -> None:
        self.model, self.generator, self.sample = model, generator, sample
        self._scores: list[list[Tensor]] | None = None

    def __call__(self, stock: Found, other: Found) -> Verdict:
        apart = [
            i for i, (a, b) in enumerate(zip(stock, other, strict=True)) if _tokens(a) != _tokens(b)
        ]
        if not apart:
            return Verdict(True)
        margins = {i: self._margin(i, stock[i], other[i]) for i in apart}
        dtype = next(self.model.parameters()).dtype
        return judged(margins, dtype, f"{len(apart)} of {len(stock)} sentences", "sentence")

    def margin(self, sentence: int, wanted: Sequence[int]) -> float:
        """The margin at which fairseq's search left the way to a text of a sentence of the batch, with its end."""
        return replayed(self._steps()[sentence], wanted, {self.generator.eos})

    def _margin(
        self, sentence: int, stock: list[dict[str, Any]], other: list[dict[str, Any]]
    ) -> float:
        """The largest margin at which fairseq's search left the way to one of the other run's hypotheses."""
        kept = {tuple(h["tokens"].tolist()): float(h["score"]) for h in stock}
        margins: list[float] = []
        for mine, theirs in zip(stock, other, strict=True):
            wanted = tuple(theirs["tokens"].tolist())
            if wanted == tuple(mine["tokens"].tolist()):
                continue
            margin = self.margin(sentence, wanted)
            if wanted in kept:  # fairseq's search kept it, at another rank
                margin = min(margin, abs(kept[wanted] - float(mine["score"])))
            margins.append(margin)
        return max(margins, default=math.inf)

    def _steps(self) -> list[list[Tensor]]:
        """For each sentence the (M, V) log-probabilities of every step, as fairseq chooses from them."""
        if self._scores is None:
            search, count = self.generator.search, len(self.sample["net_input"]["src_tokens"])
            numbers: list[int] = (
                self.sample["id"].tolist() if "id" in self.sample else list(range(count))
            )
            seen: dict[int, list[Tensor]] = {number: [] for number in numbers}
            step = search.step

            def watched(
                number: int, lprobs: Tensor, *rest: Any
            ) -> Any:  # scores, tokens, numbers of the sentences
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
