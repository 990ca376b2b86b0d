"""Check whether half-precision rounding explains that two programs return different tokens.

In bfloat16 and float16, two correct programs diverge wherever two candidates are close, so equal
tokens are no criterion. The criterion is the distance of the logits from those of the same weights
in float32: a program that computes the same in another order is as far from them as the toolkit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fastgen.decoding.search.near_ties import end_tokens, prompt_length
from fastgen.patches.engine import engine

HALVES = (torch.bfloat16, torch.float16)
LIMIT = 1.25
"""Largest allowed ratio of a program's error to the toolkit's.

Over the many log-probabilities of a call, the two differ by a few hundredths. One more rounding
step, or a mask that is wrong in one place, exceeds this limit.
"""

SENTENCES = 32
"""The most sentences to examine: 140 tokens of each, with 4 beams, take 4 GB of logits."""


@dataclass(frozen=True)
class Noise:
    """Errors of the log-probabilities of a call in half precision, over the same texts.

    An error is the root mean square difference from the log-probabilities that the toolkit computes
    with the same weights in float32; of a mixture of experts, the median of the errors of the
    tokens. Where two experts nearly tie, rounding decides which one runs, and the error of that
    token is many times that of the others.

    Attributes:
        error: error of fastgen, or of another program, in the very call that generated the texts.
        own: error of the toolkit when it is forced to generate the same texts.
    """

    error: float
    own: float

    @property
    def explains(self) -> bool:
        """Whether the error is at most `LIMIT` times the toolkit's."""
        return self.error <= LIMIT * self.own

    def __str__(self) -> str:
        return f"error of the logits {self.error:.2g}, of the toolkit's {self.own:.2g}"


def noise(
    model: Any,
    inputs: Mapping[str, Tensor],
    options: Mapping[str, Any],
    generate: Callable[..., Any] | None = None,
) -> Noise:
    """Measure the noise of a call of `generate`.

    Generates once. Then the toolkit is forced to generate the same texts, in float32 and in the
    model's own precision.

    Args:
        model: model in half precision. A temporary float32 copy of it is made.
        inputs: tensors of B rows each; at most `SENTENCES` rows are used.
        options: the other arguments of `generate`. With several beams, only the returned sequences
            count.
        generate: the program to examine, with the arguments of `model.generate`; None for fastgen.
    """
    inputs = {name: value[:SENTENCES] for name, value in inputs.items()}
    scored = dict(options) | {"return_dict_in_generate": True, "output_logits": True}
    run = (generate or model.generate)(**inputs, **scored)
    texts, prompt = run.sequences, prompt_length(run)
    returned = len(texts) // len(next(iter(inputs.values())))
    rows = {name: value.repeat_interleave(returned, 0) for name, value in inputs.items()}
    ends = end_tokens(options.get("eos_token_id", model.generation_config.eos_token_id))
    generated = _is_generated(texts[:, prompt:], ends)
    while not hasattr(cast(Any, type(model)), "generate"):
        model = model.generate.__self__  # of a wrapper that delegates, as `torch.compile` makes
    wide = {name: x.float() if x.is_floating_point() else x for name, x in rows.items()}
    exact = _forced(copy.deepcopy(model).float(), wide, texts, prompt)
    summary = _median if has_experts(model) else root_mean_square
    found, own = (
        summary([_errors(logits, exact)[generated]])
        for logits in (_of_returned(run), _forced(model, rows, texts, prompt))
    )
    return Noise(found, own)


def has_experts(model: Any) -> bool:
    """Return whether a model is a mixture of experts."""
    return any(type(module).__name__.endswith("Experts") for module in model.modules())


def _of_returned(run: Any) -> list[Tensor]:
    """Return the logits (B, V) of every step, of the beam that each returned text was in."""
    if run.get("beam_indices") is None:
        return list(run.logits)
    return [
        logits[run.beam_indices[:, step].clamp(min=0)]
        for step, logits in enumerate(run.logits[: run.beam_indices.shape[1]])
    ]


def _forced(model: Any, inputs: Mapping[str, Tensor], texts: Tensor, prompt: int) -> list[Tensor]:
    """Return the toolkit's logits (B, V) of every step when it is forced to generate `texts`."""
    wanted: list[list[int]] = cast(Any, texts).tolist()
    seen = {token for row in wanted for token in row}
    unused = next(token for token in range(len(seen) + 1) if token not in seen)
    forced: Callable[[int, Tensor], list[int]] = lambda row, ids: [wanted[row][len(ids)]]  # noqa: E731
    with engine.disabled():
        # Not `model.generate`: a function on the instance would generate by the model that this one
        # is a copy of.
        kind = cast(Any, type(model))
        run = kind.generate(
            model, **inputs, num_beams=1, num_return_sequences=1, do_sample=False,
            max_new_tokens=texts.shape[1] - prompt,
            eos_token_id=unused,  # so that no text ends early
            prefix_allowed_tokens_fn=forced,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
    return list(run.logits)


def _is_generated(texts: Tensor, ends: set[int]) -> Tensor:
    """Return a mask (B, T) of the tokens that the search chose, first end token included."""
    is_end = torch.isin(texts, torch.tensor(sorted(ends), device=texts.device, dtype=texts.dtype))
    return is_end.cumsum(1) - is_end.long() == 0


def _errors(logits: list[Tensor], exact: list[Tensor]) -> Tensor:
    """Return the RMS difference (B, T) of two runs' log-probabilities of each token."""
    squares = (
        (one.float().log_softmax(-1) - other.float().log_softmax(-1)).double().square().mean(-1)
        for one, other in zip(logits, exact, strict=True)
    )
    return torch.stack([*squares], 1).sqrt()


def _median(errors: Iterable[Tensor]) -> float:
    """Return the median over all elements of several tensors; 0 if there are none."""
    every = torch.cat([*errors])
    return every.median().item() if every.numel() else 0.0


def root_mean_square(differences: Iterable[Tensor]) -> float:
    """Return the root mean square over all elements of several tensors; 0 if there are none."""
    squares, count = 0.0, 0
    for difference in differences:
        squares += float(difference.double().square().sum())
        count += difference.numel()
    return math.sqrt(squares / count) if count else 0.0
