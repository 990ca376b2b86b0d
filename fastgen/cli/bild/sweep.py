"""Time and output of several ways to generate from the same batches.

The ways take turns at every batch, so each is timed within moments of the others. Drift of the
machine that remains shows as a spread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastgen.cli.bench.measure import frozen, interleave, paired_ratio

WARM_UP = 2
"""Number of batches that every way generates once, untimed."""


@dataclass(frozen=True)
class Batch:
    """A batch of sources.

    Attributes:
        places: position of each source in the file.
        inputs: tensor arguments of `generate`.
    """

    places: list[int]
    inputs: dict[str, Tensor]


Arm = Callable[[Batch], Any]
"""A way to generate; returns what `generate` returns."""


@dataclass(frozen=True)
class Point:
    """Thresholds of big-little decoding; `rollback` is None for lossless decoding."""

    fallback: float
    rollback: float | None
    max_draft: int

    def __str__(self) -> str:
        return (
            f"fallback {self.fallback}, "
            f"{'lossless' if self.rollback is None else f'rollback {self.rollback}'}"
        )

    @property
    def options(self) -> dict[str, Any]:
        """The thresholds as arguments of `generate`, or fields of a generation config."""
        kept = (
            {"lossless": True} if self.rollback is None else {"rollback_threshold": self.rollback}
        )
        return {"fallback_threshold": self.fallback, "max_draft": self.max_draft} | kept


@dataclass
class Measured:
    """Measurements of one way to generate.

    Attributes:
        seconds: time of each round through all batches.
        outputs: token ids (B, L) of each batch, from the first round.
        counts: counters of big-little decoding, summed over all texts of a round; else empty.
    """

    seconds: list[float]
    outputs: list[Tensor] = field(default_factory=list[Tensor])
    counts: dict[str, int] = field(default_factory=dict[str, int])

    def over(self, baseline: Measured) -> dict[str, Any]:
        """Return the speed-up over `baseline`: median over the rounds and its 95% interval."""
        ratio, low, high = paired_ratio(baseline.seconds, self.seconds)
        return {
            "seconds": self.seconds,
            "ratio": ratio,
            "low": low,
            "high": high,
            "counts": self.counts,
        }


def batches_of(sources: Sequence[list[int]], size: int, model: Any) -> list[Batch]:
    """Return batches of `size` sources of similar length.

    Sources are right-padded for an encoder-decoder and left-padded for a decoder-only model.
    """
    order = sorted(range(len(sources)), key=lambda place: len(sources[place]))
    pad = model.generation_config.pad_token_id or 0
    side = "right" if model.config.is_encoder_decoder else "left"
    found: list[Batch] = []
    for start in range(0, len(order), size):
        places = order[start : start + size]
        rows = [torch.tensor(sources[place], dtype=torch.int64, device="cpu") for place in places]
        inputs = {
            name: torch.nn.utils.rnn.pad_sequence(tensors, True, value, side).to(model.device)
            for name, tensors, value in (
                ("input_ids", rows, pad),
                ("attention_mask", [torch.ones_like(row) for row in rows], 0),
            )
        }
        found.append(Batch(places, inputs))
    return found


def measure(
    arms: Mapping[str, Arm],
    batches: Sequence[Batch],
    rounds: int,
    advance: Callable[[], object] = lambda: None,
) -> dict[str, Measured]:
    """Generate from all batches with each arm, `rounds` times; call `advance` after each batch."""
    measured = {name: Measured([0.0] * rounds) for name in arms}
    for batch in batches[:WARM_UP]:
        for arm in arms.values():
            arm(batch)
    with frozen():
        for number in range(rounds):
            for place, batch in enumerate(batches):
                names = list(arms) if (number + place) % 2 == 0 else list(arms)[::-1]
                outputs: list[Any] = []
                times, _ = interleave(
                    [functools.partial(arms[name], batch) for name in names],
                    1,
                    outputs.extend,
                    0,
                    _synchronize,
                )
                for name, seconds, output in zip(names, times[0], outputs, strict=True):
                    measured[name].seconds[number] += seconds
                    if number == 0:
                        _note(measured[name], output)
                advance()
    return measured


def texts_of(
    measured: Measured, batches: Sequence[Batch], tokenizer: Any, encoder_decoder: bool
) -> list[str]:
    """Return the texts of an arm in the order of the file."""
    texts: dict[int, str] = {}
    for batch, output in zip(batches, measured.outputs, strict=True):
        written = output if encoder_decoder else output[:, batch.inputs["input_ids"].shape[1] :]
        decoded = tokenizer.batch_decode(written, skip_special_tokens=True)
        texts.update(zip(batch.places, (text.strip() for text in decoded), strict=True))
    return [texts[place] for place in sorted(texts)]


def _note(measured: Measured, output: Any) -> None:
    measured.outputs.append((output if isinstance(output, Tensor) else output.sequences).cpu())
    for name, values in (getattr(output, "bild", None) or {}).items():
        measured.counts[name] = measured.counts.get(name, 0) + int(values.sum())


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
