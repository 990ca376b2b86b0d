"""Sentences that started together: a loop that decodes them alone, or one step at a time beside others.

Cohorts that run side by side share the products of their steps and nothing else. Each keeps its own search, keys,
values, masks and positions, so that nothing moves when one joins, and no source is padded to that of another.

Sources: Hoang et al. 2018 (Amun), section 2.1 (rows that are freed are taken by waiting sentences); Yu et al. 2022
(Orca), section 3.2 (selective batching).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fastgen.decoding.beam import Stepper
from fastgen.decoding.text import Text
from fastgen.models.joint import Joint
from fastgen.models.step import Context, DecoderStep


class Search(Protocol):
    """A beam search or sampling that has begun."""

    @property
    def text(self) -> Text: ...
    @property
    def present(self) -> int: ...
    def advance(self, model: Stepper, logits: Tensor) -> bool:
        """Choose the next tokens; False when the search is over."""
        ...


class JoinableStepper(Stepper, Protocol):
    """A stepper whose steps can be made together with those of others."""

    @property
    def decoder(self) -> DecoderStep: ...
    @property
    def longest(self) -> int:
        """Tokens of a text at most, for which `decoder` was made."""
        ...

    def begin_step(self, ids: Tensor) -> Context:
        """Open a step of the newest token of ids (R, L), which is made together with those of others."""
        ...


def _never() -> bool:
    return False


def run(search: Search, model: Stepper, pause: Callable[[], bool] = _never) -> bool:
    """Decode to the end, or until `pause` says so behind a step; return whether it is the end."""
    logits = model.prefill()
    while search.advance(model, logits):
        if pause():
            return False
        logits = model.step(search.text.ids)
    return True


@dataclass(eq=False)
class Cohort:
    """A search that has begun, and the model that makes its steps."""

    search: Search
    model: JoinableStepper


def step(cohorts: Sequence[Cohort]) -> list[Tensor]:
    """Make one step of all; return the logits (R, V) fp32 of each."""
    texts = [cohort.search.text.ids for cohort in cohorts]
    if len(cohorts) == 1:
        return [cohorts[0].model.step(texts[0])]
    rows = [len(ids) for ids in texts]
    contexts = [cohort.model.begin_step(ids) for cohort, ids in zip(cohorts, texts, strict=True)]
    decoder = max((cohort.model for cohort in cohorts), key=lambda model: model.longest).decoder
    logits = decoder(torch.cat([ids[:, -1] for ids in texts]), Joint(contexts, rows)).float()
    return list(torch.split(logits, rows))
