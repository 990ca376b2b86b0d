"""Quality of texts against references: BLEU and chrF from sacrebleu, ROUGE from rouge-score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastgen.corpus.models import need

Score = Callable[[Sequence[str], Sequence[str]], float]


@dataclass(frozen=True)
class Metric:
    """A metric.

    Attributes:
        score: function of texts and references, in points from 0 to 100.
        signature: how the score is computed.
    """

    score: Score
    signature: str


def _bleu() -> Metric:
    need("sacrebleu")
    from sacrebleu.metrics.bleu import BLEU

    return _of_sacrebleu(BLEU)


def _chrf() -> Metric:
    need("sacrebleu")
    from sacrebleu.metrics.chrf import CHRF

    return _of_sacrebleu(CHRF)


def _of_sacrebleu(kind: Callable[[], Any]) -> Metric:
    metric = kind()
    metric.corpus_score(["a"], [["a"]])  # the signature includes the number of references
    return Metric(
        lambda texts, references: float(kind().corpus_score(texts, [references]).score),
        str(metric.get_signature()),
    )


def _rouge(name: str) -> Metric:
    need("rouge_score")
    from rouge_score.rouge_scorer import RougeScorer  # pyright: ignore[reportMissingImports]

    scorer = RougeScorer([name], use_stemmer=True)

    def score(texts: Sequence[str], references: Sequence[str]) -> float:
        each = [scorer.score(r, t)[name].fmeasure for t, r in zip(texts, references, strict=True)]
        return 100 * sum(each) / len(each)

    return Metric(score, f"{name}|mean of F1|stemmer:yes")


METRICS: dict[str, Callable[[], Metric]] = {
    "bleu": _bleu,
    "chrf": _chrf,
    **{name: partial(_rouge, name) for name in ("rouge1", "rouge2", "rougeL")},
}
"""Factories of metrics by name; a metric's library is imported when the factory is called."""
