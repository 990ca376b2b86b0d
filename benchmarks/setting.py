"""Compare two values of a fastgen setting on a stream of sentences that end at different steps."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import fastgen
from benchmarks.cases import Case
from benchmarks.session import Hits, Session
from fastgen import config
from fastgen.cli.bench.agreement import Agreements
from fastgen.cli.bench.measure import compare

STREAM = 8
"""Number of batches in a stream."""

ENDS = 24
"""Spacing of the end tokens in the vocabulary.

Models with random weights rarely end a sentence with only one of them.
"""


def run_setting(case: Case, session: Session) -> dict[str, Any]:
    """Measure a stream with the second value of a case's setting against the first.

    Both run with fastgen.
    """
    assert case.shape is not None
    assert case.setting is not None
    name, *values = case.setting
    model: Any = case.shape.build(session.dtype, session.device)
    sentences, options = _sentences(case, model), _options(case, model)

    def streamed(value: str) -> list[Tensor]:
        with _set(name, value):
            return list(
                fastgen.generate_stream(
                    model, sentences, max_tokens=case.batch * case.source, window=10**6, **options
                )
            )

    same = Agreements(
        model, [{"input_ids": ids[None].to(session.device)} for ids in sentences], options
    )
    hits, (first, second) = Hits(), (partial(streamed, value) for value in values)
    outcome = compare(
        first, second, session.rounds or case.rounds, same, synchronize=session.synchronize
    )
    lengths = sorted(len(ids) - 1 for (ids,) in same.other)
    return outcome.to_dict() | hits.since() | {"sentences": len(sentences), "lengths": lengths}


def _sentences(case: Case, model: Any) -> list[Tensor]:
    """Return sources of half to all of the case's source tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(
        case.source // 2, case.source + 1, (case.batch * STREAM,), generator=generator
    )
    vocabulary = model.config.vocab_size
    return [torch.randint(4, vocabulary - 1, (int(n),), generator=generator) for n in lengths]


def _options(case: Case, model: Any) -> dict[str, Any]:
    ends = list(range(5, model.config.vocab_size - 1, ENDS))
    return {
        "num_beams": case.beams,
        "max_new_tokens": case.new_tokens,
        "eos_token_id": ends,
        **case.options,
    }


@contextmanager
def _set(name: str, value: str) -> Iterator[None]:
    try:
        with patch.dict(os.environ, {name: value}):
            config.reload()
            yield
    finally:
        config.reload()
