"""Drafts of a model on rounded weights: the best small model is the model itself.

A decode step of few rows reads weights and does little else, so one on weights in int8 takes a
quarter of the time of fp32. It uses the keys and values of the texts, and writes those of its
drafts after them, where the pass that verifies the drafts writes its own.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fastgen.decoding.backends.decode_backend import DecodeBackend, Eager
from fastgen.decoding.backends.native_multistep import MultistepModel
from fastgen.decoding.backends.native_sampling import NativeSampling
from fastgen.decoding.logits.processor_call import ProcessorCall
from fastgen.decoding.logits.transform import LogitsTransform
from fastgen.decoding.search.multinomial import default_generator
from fastgen.decoding.search.sampling import Sampling
from fastgen.decoding.search.stopping import Stop
from fastgen.models.runtime.decode_step import DecoderStep


class RoundedModel(MultistepModel, Protocol):
    """Stepper of decode steps on rounded weights."""

    def keep(self, sentences: Tensor) -> None:
        """Never called: the texts of a draft stay in the batch."""
        ...

    def undo(self) -> None:
        """Drop the keys and values of all steps since the start of the draft."""
        ...


class Roundable(Protocol):
    """Stepper whose decode steps can run on rounded weights too."""

    def rounded(self, step: DecoderStep) -> RoundedModel:
        """Return the stepper of a draft.

        Args:
            step: The decode step on rounded weights.
        """
        ...


@dataclass
class SelfDraft:
    """Self-drafting: a search with the model's int8 weights proposes the tokens.

    Sampling draws them with the random numbers that it then draws the model's own tokens with. As
    the probabilities hardly differ, the tokens seldom do. Logits processors without a translation
    may be stateful, so drafting skips them.

    Args:
        step: The decode step on rounded weights.
    """

    step: DecoderStep

    def propose(self, search: Sampling, model: Roundable, most: int) -> Tensor:
        length = search.ids.shape[1]
        end = length + most
        if search.user is not None and not search.user.is_alone():
            return search.ids[:, length:]
        drafted = Sampling(
            ids=search.ids,
            stop=Stop(search.stop.eos, [lambda reached: reached >= end], longest=end),
            transforms=_translated(search),
            pad=search.pad,
            longest=end,
            sample=search.sample,
            may_drop=False,
        )
        drafted.running = search.running.clone()
        rounded = model.rounded(self.step)
        kind = NativeSampling if NativeSampling.supports(drafted, rounded) else Eager
        backend: DecodeBackend[Any] = kind(drafted, rounded)
        with _same_numbers(search.sample):
            while backend.advance():
                pass
        rounded.undo()
        return drafted.ids[:, length:]


def _translated(search: Sampling) -> Sequence[LogitsTransform]:
    return [
        each
        for each in search.transforms
        if not isinstance(each, ProcessorCall) or each.warper is not None
    ]


@contextmanager
def _same_numbers(draws: bool) -> Generator[None]:
    """Set torch's default generator back at the end, if the search draws."""
    if not draws:
        yield
        return
    with default_generator().lock:
        state = torch.get_rng_state()
        try:
            yield
        finally:
            torch.set_rng_state(state)
