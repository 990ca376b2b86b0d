"""Whether two outputs of `generate` agree: equal, or apart only by near ties.

Floating point lets two correct programs choose differently where two candidates score the same to within rounding.
That must not pass for an error, nor an error for that: so the toolkit's own search is replayed from its scores. In half
precision, where texts part within a few tokens, the errors of the logits are compared instead.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import fastgen
from fastgen.cli.bench.measure import Verdict
from fastgen.cli.bench.noise import HALVES, Noise, noise
from fastgen.decoding.search.near_ties import (
    NEAR_TIE,
    closest_decision,
    end_tokens,
    prompt_length,
    up_to_end,
)


class Agreement:
    """Compares the token ids of the toolkit with another run's.

    Args:
        model, inputs, options: what `generate` is called with; only called again when ids differ.
    """

    def __init__(self, model: Any, inputs: dict[str, Tensor], options: dict[str, Any]) -> None:
        self.model, self.inputs, self.options = model, inputs, options
        self._known: dict[tuple, Verdict] = {}
        self._noise: Noise | None = None

    def __call__(self, stock: Tensor, other: Tensor) -> Verdict:
        if stock.shape == other.shape and torch.equal(stock, other):
            return Verdict(True)
        if len(stock) != len(other):
            return Verdict(False, note=f"{len(stock)} sequences became {len(other)}")
        known = (tuple(map(tuple, stock.tolist())), tuple(map(tuple, other.tolist())))
        if (
            known not in self._known
        ):  # the same difference comes back every round, and a replay is slow
            self._known[known] = self._judge(stock, other)
        return self._known[known]

    def _judge(self, stock: Tensor, other: Tensor) -> Verdict:
        if self.model.dtype in HALVES:
            return self._judge_by_noise(stock, other)
        found = margins(self.model, self.inputs, self.options, stock, other)
        if not found:
            return Verdict(False, note="what follows the end tokens differs")
        return judged(
            found, self.model.dtype, f"{len(found)} of {len(stock)} sequences", "sequence"
        )

    def _judge_by_noise(self, stock: Tensor, other: Tensor) -> Verdict:
        if self._noise is None:
            self._noise = noise(self.model, self.inputs, self.options)
        padded = torch.nn.utils.rnn.pad_sequence(
            [*stock, *other], batch_first=True, padding_value=-1
        )
        apart = int((padded[: len(stock)] != padded[len(stock) :]).any(1).sum())
        note = f"{apart} of {len(stock)} sequences differ, {self._noise}"
        return Verdict(False, note=note, within_noise=self._noise.explains)


def margins(
    model: Any, inputs: dict[str, Tensor], options: dict[str, Any], stock: Tensor, other: Tensor
) -> dict[int, float]:
    """Return, for each sequence that differs, the margin at which the toolkit's search left the way to `other`.

    Runs the toolkit once more, with its scores. A margin is infinite where the search could not have led there.

    Args:
        stock, other: (B, length) token ids as `generate` returns them, one sequence per sentence.
    """
    beams = options.get("num_beams") or model.generation_config.num_beams or 1
    tells = {"num_return_sequences": beams, "return_dict_in_generate": True, "output_scores": True}
    with fastgen.disabled():
        run = model.generate(**inputs, **options | tells)
    ends = end_tokens(options.get("eos_token_id", model.generation_config.eos_token_id))
    found, prompt = {}, prompt_length(run)
    for row, (kept, wanted) in enumerate(zip(stock.tolist(), other.tolist(), strict=True)):
        if up_to_end(kept[prompt:], ends) != up_to_end(wanted[prompt:], ends):
            found[row] = closest_decision(run, row * beams, beams, wanted, ends)
    return found


def judged(found: Mapping[int, float], dtype: torch.dtype, differing: str, one: str) -> Verdict:
    """Return the verdict on texts that differ, by the margin at which the toolkit's search left the way to each.

    Args:
        found: margins by the texts' numbers. differing, one: what differs and what a number stands for, in words.
    """
    limit = NEAR_TIE.get(dtype, 0.0)
    worst, ties = (
        max(found, key=found.__getitem__),
        sum(margin < limit for margin in found.values()),
    )
    return Verdict(
        ties == len(found),
        ties,
        f"{differing} differ, largest margin {found[worst]:.1e} ({one} {worst})",
    )


class Agreements:
    """Compares the token ids of several batches.

    Args:
        model, batches, options: what `generate` is called with, batch by batch.

    Attributes:
        stock, other: the outputs that were compared last.
    """

    def __init__(
        self, model: Any, batches: Sequence[dict[str, Tensor]], options: dict[str, Any]
    ) -> None:
        self._model, self._batches = model, batches
        self._each = [Agreement(model, inputs, options) for inputs in batches]
        self.stock: Sequence[Tensor] = []
        self.other: Sequence[Tensor] = []

    def __call__(self, stock: Sequence[Tensor], other: Sequence[Tensor]) -> Verdict:
        self.stock, self.other = stock, other
        verdicts = [judge(a, b) for judge, a, b in zip(self._each, stock, other, strict=True)]
        notes = "; ".join(f"batch {i}: {v.note}" for i, v in enumerate(verdicts) if v.note)
        equal, agree = (all(getattr(v, name) for v in verdicts) for name in ("equal", "agrees"))
        return Verdict(
            equal, sum(v.near_ties for v in verdicts), notes, within_noise=agree and not equal
        )

    @property
    def tokens(self) -> int:
        """Of `other`, those behind the prompts, up to the ends."""
        ends = end_tokens(self._model.generation_config.eos_token_id)
        is_text_to_text = self._model.config.is_encoder_decoder
        prompts = [
            1 if is_text_to_text else inputs["input_ids"].shape[1] for inputs in self._batches
        ]
        return sum(
            len(up_to_end(row[prompt:], ends))
            for prompt, output in zip(prompts, self.other, strict=False)
            for row in output.tolist()
        )
