"""Check that two outputs of `generate` are equal or differ only by near ties.

Two correct programs may choose different tokens where two candidates score the same to within
rounding. To tell such near ties from errors, the toolkit's own search is replayed from its scores.
In half precision texts diverge within a few tokens, so the errors of the logits are compared
instead.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import fastgen
from fastgen.cli.bench.measure import Verdict
from fastgen.decoding.search.near_ties import (
    NEAR_TIE,
    closest_decision,
    end_tokens,
    prompt_length,
    up_to_end,
)
from fastgen.patches.transformers.introspection.noise import HALVES, Noise, noise


class Agreement:
    """Comparison of the toolkit's token ids with those of another run.

    `generate` is called again only when the ids differ.

    Args:
        model: the model that generated both outputs.
        inputs: tensor arguments of its `generate` call.
        options: the other arguments of that call.
        generate: the other program, with the arguments of `model.generate`; None for fastgen.
    """

    def __init__(
        self,
        model: Any,
        inputs: dict[str, Tensor],
        options: dict[str, Any],
        generate: Callable[..., Any] | None = None,
    ) -> None:
        self.model, self.inputs, self.options, self.generate = model, inputs, options, generate
        self._known: dict[tuple, Verdict] = {}
        self._noise: Noise | None = None

    def __call__(self, stock: Tensor, other: Tensor) -> Verdict:
        if stock.shape == other.shape and torch.equal(stock, other):
            return Verdict(True)
        if len(stock) != len(other):
            return Verdict(False, note=f"{len(stock)} sequences became {len(other)}")
        key = (tuple(map(tuple, stock.tolist())), tuple(map(tuple, other.tolist())))
        # A replay is slow, and the same difference recurs in every round.
        if key not in self._known:
            self._known[key] = self._judge(stock, other)
        return self._known[key]

    def _judge(self, stock: Tensor, other: Tensor) -> Verdict:
        if self.model.dtype in HALVES:
            return self._judge_by_noise(stock, other)
        margin_of = margins(self.model, self.inputs, self.options, stock, other)
        if not margin_of:
            return Verdict(False, note="the tokens after the end tokens differ")
        return judged(
            margin_of, self.model.dtype, f"{len(margin_of)} of {len(stock)} sequences", "sequence"
        )

    def _judge_by_noise(self, stock: Tensor, other: Tensor) -> Verdict:
        if self._noise is None:
            self._noise = noise(self.model, self.inputs, self.options, self.generate)
        padded = torch.nn.utils.rnn.pad_sequence(
            [*stock, *other], batch_first=True, padding_value=-1
        )
        differing = int((padded[: len(stock)] != padded[len(stock) :]).any(1).sum())
        note = f"{differing} of {len(stock)} sequences differ, {self._noise}"
        return Verdict(False, note=note, within_noise=self._noise.explains)


def margins(
    model: Any, inputs: dict[str, Tensor], options: dict[str, Any], stock: Tensor, other: Tensor
) -> dict[int, float]:
    """Return how narrowly the toolkit's search decided against `other`, by sequence.

    Runs the toolkit once more, with its scores.

    Args:
        model: the model that generated both outputs.
        inputs: tensor arguments of its `generate` call.
        options: the other arguments of that call.
        stock: (B, length) token ids of the toolkit, one sequence per sentence.
        other: (B, length) token ids to compare, one sequence per sentence.

    Returns:
        The smallest score gap by which the search may have turned away from `other`, for the number
        of each sequence that differs. Infinite if the search could not have produced it.
    """
    beams = options.get("num_beams") or model.generation_config.num_beams or 1
    scored = {"num_return_sequences": beams, "return_dict_in_generate": True, "output_scores": True}
    with fastgen.disabled():
        run = model.generate(**inputs, **options | scored)
    ends = end_tokens(options.get("eos_token_id", model.generation_config.eos_token_id))
    margin_of, prompt = {}, prompt_length(run)
    for row, (kept, wanted) in enumerate(zip(stock.tolist(), other.tolist(), strict=True)):
        if up_to_end(kept[prompt:], ends) != up_to_end(wanted[prompt:], ends):
            margin_of[row] = closest_decision(run, row * beams, beams, wanted, ends)
    return margin_of


def judged(found: Mapping[int, float], dtype: torch.dtype, differing: str, one: str) -> Verdict:
    """Return the verdict on texts that differ, from the margins that `margins` returned.

    Args:
        found: margin by number of the text; not empty.
        dtype: the model's dtype, which sets the limit of a near tie.
        differing: what differs, in words, for the note.
        one: what a number of `found` stands for, in words, for the note.
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
    """Comparison of the token ids of several batches.

    Args:
        model: the model that generated the outputs.
        batches: tensor arguments of `generate`, one dict per batch.
        options: the other arguments of `generate`, the same for all batches.

    Attributes:
        stock: the toolkit's outputs in the last comparison.
        other: the outputs that they were compared with.
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
    def prompts(self) -> list[int]:
        """Length of the prompts of each batch."""
        is_text_to_text = self._model.config.is_encoder_decoder
        return [1 if is_text_to_text else inputs["input_ids"].shape[1] for inputs in self._batches]

    @property
    def tokens(self) -> int:
        """Number of tokens generated in `other`: after the prompts, end tokens included."""
        ends = end_tokens(self._model.generation_config.eos_token_id)
        return sum(
            len(up_to_end(row[prompt:], ends))
            for prompt, output in zip(self.prompts, self.other, strict=False)
            for row in output.tolist()
        )
