"""Whether the rounding of half precision explains that two programs return other tokens.

In bfloat16 and float16 two correct programs part wherever two candidates are close, and one wrong program may never do
so. What tells them apart is how far their logits are from those of the same weights in float32: a program that computes
the same in another order is as far from them as the toolkit is.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fastgen
from fastgen.decoding.search.near_ties import end_tokens, prompt_length

HALVES = (torch.bfloat16, torch.float16)
LIMIT = 1.25
"""How many times the toolkit's error fastgen's may be. Over the many log-probabilities of a call the two are within a
few hundredths of each other; a rounding more, or a mask that is wrong in one place, is more than this."""


SENTENCES = 32
"""Looked at, at most: the logits of 140 tokens of each, with 4 beams, are 4 GB."""


@dataclass(frozen=True)
class Noise:
    """Errors of the logits of a call in half precision, over all tokens of the same texts.

    The error is the root mean square of the difference from the log-probabilities that the toolkit computes with the
    same weights in float32.

    Attributes:
        error: of fastgen's logits, in the very call that generated the texts.
        own: of the toolkit's, which is made to generate them.
    """

    error: float
    own: float

    @property
    def explains(self) -> bool:
        """Whether fastgen rounds no worse than the toolkit, so that rounding explains other tokens."""
        return self.error <= LIMIT * self.own

    def __str__(self) -> str:
        return f"error of the logits {self.error:.2g}, of the toolkit's {self.own:.2g}"


def noise(model: Any, inputs: Mapping[str, Tensor], options: Mapping[str, Any]) -> Noise:
    """Measure the noise of a call of `generate`: it runs once with fastgen, then twice without, in both precisions.

    Args:
        model: in half precision; a copy of it in float32 is made meanwhile.
        inputs: tensors of B rows each, of which some are enough.
        options: further arguments of `generate`; of several beams and sequences, those that are returned are looked at.
    """
    inputs = {name: value[:SENTENCES] for name, value in inputs.items()}
    run = model.generate(**inputs, **options, return_dict_in_generate=True, output_logits=True)
    texts, prompt = run.sequences, prompt_length(run)
    returned = len(texts) // len(next(iter(inputs.values())))
    rows = {name: value.repeat_interleave(returned, 0) for name, value in inputs.items()}
    ends = end_tokens(options.get("eos_token_id", model.generation_config.eos_token_id))
    generated = _is_generated(texts[:, prompt:], ends)
    exact = _forced(copy.deepcopy(model).float(), rows, texts, prompt)
    return Noise(
        _distance(_of_returned(run), exact, generated),
        _distance(_forced(model, rows, texts, prompt), exact, generated),
    )


def _of_returned(run: Any) -> list[Tensor]:
    """Logits (B, V) of every step, of the row in which each returned text then was."""
    if run.get("beam_indices") is None:
        return list(run.logits)
    return [
        logits[run.beam_indices[:, step].clamp(min=0)]
        for step, logits in enumerate(run.logits[: run.beam_indices.shape[1]])
    ]


def _forced(model: Any, inputs: Mapping[str, Tensor], texts: Tensor, prompt: int) -> list[Tensor]:
    """The toolkit's logits (B, V) of every step in which it is made to generate given texts."""
    wanted: list[list[int]] = texts.tolist()
    seen = set(texts.flatten().tolist())
    unused = next(token for token in range(len(seen) + 1) if token not in seen)
    with fastgen.disabled():
        run = model.generate(
            **inputs, num_beams=1, num_return_sequences=1, do_sample=False, max_new_tokens=texts.shape[1] - prompt,
            eos_token_id=unused,  # so that texts go on behind their end
            prefix_allowed_tokens_fn=lambda row, ids: [wanted[row][len(ids)]],
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
    return list(run.logits)


def _is_generated(texts: Tensor, ends: set[int]) -> Tensor:
    """Which tokens (B, T) a search chose: those up to the first end token, and that one."""
    is_end = torch.isin(texts, torch.tensor(sorted(ends), device=texts.device, dtype=texts.dtype))
    return is_end.cumsum(1) - is_end.long() == 0


def _distance(logits: list[Tensor], exact: list[Tensor], generated: Tensor) -> float:
    """Root mean square of the differences of two runs' log-probabilities at the tokens that were generated."""
    squares, count = 0.0, 0
    for step, (one, other) in enumerate(zip(logits, exact, strict=True)):
        rows = generated[:, step]
        apart = one[rows].float().log_softmax(-1) - other[rows].float().log_softmax(-1)
        squares, count = squares + float(apart.double().square().sum()), count + apart.numel()
    return math.sqrt(squares / count) if count else 0.0
