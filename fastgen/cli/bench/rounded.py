"""Outputs of weights in int8 beside those of a model's own: how many are equal, and how good."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fastgen.cli.bench.agreement import Agreements
from fastgen.cli.bench.measure import Verdict
from fastgen.cli.generate.quality import METRICS
from fastgen.decoding.search.near_ties import end_tokens, up_to_end


class Rounded(Agreements):
    """Comparison that counts the equal texts of several batches and accepts the others.

    Args:
        model: the model that generated the outputs.
        batches: tensor arguments of `generate`, one dict per batch.
    """

    def __init__(self, model: Any, batches: Sequence[dict[str, Tensor]]) -> None:
        super().__init__(model, batches, {})
        self._ends = end_tokens(model.generation_config.eos_token_id)

    def __call__(self, stock: Sequence[Tensor], other: Sequence[Tensor]) -> Verdict:
        self.stock, self.other = stock, other
        pairs = [
            pair
            for ours, theirs in zip(stock, other, strict=True)
            for pair in zip(ours.tolist(), theirs.tolist(), strict=True)
        ]
        same = sum(self._text(a) == self._text(b) for a, b in pairs)
        note = f"int8: {same} of {len(pairs)} texts are the same"
        return Verdict(False, note=note, within_noise=True)

    def _text(self, row: list[int]) -> list[int]:
        return [row[0], *up_to_end(row[1:], self._ends)]


class Quality:
    """Scores of outputs, in the model's precision and in int8.

    Without references, the texts in the model's precision are the references.

    Args:
        tokenizer: the model's tokenizer.
        references: a reference for each source, or none.
    """

    def __init__(self, tokenizer: Any, references: Sequence[str]) -> None:
        self._tokenizer, self._references = tokenizer, references
        self._metrics = {"BLEU": METRICS["bleu"](), "chrF": METRICS["chrf"]()}

    def __call__(
        self, compared: Agreements, places: Sequence[int]
    ) -> dict[str, tuple[float, float]]:
        """Return the scores of both, by metric.

        Args:
            compared: the token ids in the model's precision, and in int8.
            places: the source of each row of the batches.
        """
        exact, rounded = (
            self._texts(outputs, compared.prompts) for outputs in (compared.stock, compared.other)
        )
        wanted = [self._references[place] for place in places] if self._references else exact
        return {
            name: (metric.score(exact, wanted), metric.score(rounded, wanted))
            for name, metric in self._metrics.items()
        }

    def _texts(self, batches: Sequence[Tensor], prompts: Sequence[int]) -> list[str]:
        parts = zip(batches, prompts, strict=True)
        rows = [row[prompt:] for batch, prompt in parts for row in batch.tolist()]
        return [self._tokenizer.decode(row, skip_special_tokens=True) for row in rows]
