"""Check that two outputs of fairseq's generator are equal or differ only by near ties.

Counterpart of `fastgen/cli/bench/agreement.py` for fairseq. Where tokens differ, fairseq's own
search is replayed from the scores that it selects from. Both toolkits follow the same rule: the
best M candidates that do not end continue, and a candidate that ends counts only if it is among the
best M. In half precision the log-probabilities of the hypotheses' tokens are compared instead.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import fastgen
from fastgen.cli.bench.agreement import judged
from fastgen.cli.bench.measure import Verdict
from fastgen.decoding.search.near_ties import replayed
from fastgen.patches.transformers.introspection.noise import HALVES, Noise, root_mean_square

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
        self._noise: Noise | None = None

    def __call__(self, stock: Found, other: Found) -> Verdict:
        differing = [
            i for i, (a, b) in enumerate(zip(stock, other, strict=True)) if _tokens(a) != _tokens(b)
        ]
        if not differing:
            return Verdict(True)
        what = f"{len(differing)} of {len(stock)} sentences"
        dtype = next(self.model.parameters()).dtype
        if dtype in HALVES:
            if self._noise is None:  # the same for every round
                self._noise = self.noise(other)
            note = f"{what} differ, {self._noise}"
            return Verdict(False, note=note, within_noise=self._noise.explains)
        margins = {i: self._margin(i, stock[i], other[i]) for i in differing}
        return judged(margins, dtype, what, "sentence")

    def noise(self, found: Found) -> Noise:
        """Measure the noise of hypotheses in half precision, by the log-probabilities of tokens.

        fairseq reads the same texts in the model's own precision and in float32.

        Args:
            found: hypotheses of all sentences, with their `positional_scores`.
        """
        scores = [h["positional_scores"] for hypotheses in found for h in hypotheses]
        exact = list(self._read(copy.deepcopy(self.model).float(), found))
        own = list(self._read(self.model, found))
        error, of_toolkit = (
            root_mean_square(a.to(b.device) - b for a, b in zip(each, exact, strict=True))
            for each in (scores, own)
        )
        return Noise(error, of_toolkit)

    def _read(self, model: Any, found: Found) -> Iterator[Tensor]:
        """Yield the log-probabilities (T,) of each hypothesis's tokens, sentence by sentence."""
        net_input = self.sample["net_input"]
        for row, hypotheses in enumerate(found):
            texts = [h["tokens"] for h in hypotheses]
            rows = torch.nn.utils.rnn.pad_sequence(
                texts, batch_first=True, padding_value=self.generator.pad
            )
            source = {
                name: x[row : row + 1].expand(len(rows), *x.shape[1:])
                for name, x in net_input.items()
                if name != "prev_output_tokens"
            }
            before = torch.nn.functional.pad(rows[:, :-1], (1, 0), value=self.generator.eos)
            with fastgen.disabled(), torch.no_grad():
                outputs = model(**source, prev_output_tokens=before)
                log_probs = model.get_normalized_probs(outputs, log_probs=True).float()
            of_tokens = log_probs.gather(2, rows[:, :, None])[:, :, 0]
            yield from (each[: len(text)] for each, text in zip(of_tokens, texts, strict=True))

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
