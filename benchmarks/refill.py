"""Sentences that end far apart, as a stream: batches that refill beside batches one after the other."""

from __future__ import annotations

import os
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor

import fastgen
from benchmarks.runners import Hits, Session
from fastgen import config
from fastgen.cli import measure
from fastgen.cli.agreement import Agreement, all_agree

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.cases import Case

STREAM = 8
"""Batches in a stream."""

ENDS = 24
"""One token in so many ends a sentence, as models with random weights come to no end by themselves."""


def run_refill(case: Case, session: Session) -> dict[str, Any]:
    """A stream with FASTGEN_REFILL=on, as the candidate, beside it with FASTGEN_REFILL=off; both are fastgen's."""
    assert case.shape is not None
    model: Any = case.shape.build(session.dtype, session.device)
    sentences, options = _sentences(case, model), _options(case, model)

    def streamed(refill: str) -> list[Tensor]:
        with _refilling(refill):
            return list(
                fastgen.generate_stream(model, sentences, max_tokens=case.batch * case.source, window=10**6, **options)
            )

    agreements = [Agreement(model, {"input_ids": ids[None].to(session.device)}, options) for ids in sentences]
    lengths: list[int] = []

    def same(apart: list[Tensor], refilled: list[Tensor]) -> measure.Verdict:
        lengths[:] = sorted(len(ids) - 1 for (ids,) in refilled)
        return all_agree(agreements, apart, refilled)

    hits, arms = Hits(), (partial(streamed, "off"), partial(streamed, "on"))
    outcome = measure.compare(*arms, session.rounds or case.rounds, same, synchronize=session.synchronize)
    return outcome.to_dict() | hits.since() | {"sentences": len(sentences), "lengths": lengths}


def _sentences(case: Case, model: Any) -> list[Tensor]:
    """Sources of half to all of the case's tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(case.source // 2, case.source + 1, (case.batch * STREAM,), generator=generator)
    vocabulary = model.config.vocab_size
    return [torch.randint(4, vocabulary - 1, (int(n),), generator=generator) for n in lengths]


def _options(case: Case, model: Any) -> dict[str, Any]:
    ends = list(range(5, model.config.vocab_size - 1, ENDS))
    return {"num_beams": case.beams, "max_new_tokens": case.new_tokens, "eos_token_id": ends, **case.options}


@contextmanager
def _refilling(value: str) -> Iterator[None]:
    try:
        with patch.dict(os.environ, FASTGEN_REFILL=value):
            config.reload()
            yield
    finally:
        config.reload()
