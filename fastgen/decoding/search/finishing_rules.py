"""Finishing rules of beam search: which beams continue or finish, and when the search is over."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fastgen.ops import native
from fastgen.ops.dispatch import in_c, in_memory, plain, select_backend, unsupported, use_triton
from fastgen.ops.native import selection as native_selection
from fastgen.ops.selection import choice

WORST = 100.0
"""Upper bound on a hypothesis' mean loss per token, in nats. Likely tokens lose less than 12."""


class Merged(NamedTuple):
    """Finished hypotheses after a step.

    Attributes:
        scores: (B, M) fp32, best first.
        done: (B, M) bool, whether the slot holds a hypothesis.
        order: (B, M) int64, indexes the M previous hypotheses first, then the K candidates.
    """

    scores: Tensor
    done: Tensor
    order: Tensor


def length_powers(lengths: Iterable[int], exponent: float, scores: Tensor) -> Tensor:
    """Return lengths to the power of an exponent, in the form that `per_power` expects.

    Args:
        lengths: N lengths.
        exponent: the length penalty.
        scores: their dtype and device are those of the result.

    Returns:
        (N,), powers on a CPU and reciprocals of powers on CUDA.
    """
    powers = torch.tensor(
        [length**exponent for length in lengths], dtype=scores.dtype, device=scores.device
    )
    return powers.reciprocal() if scores.device.type == "cuda" else powers


def per_power(scores: Tensor, powers: Tensor) -> Tensor:
    """Divide scores by powers from `length_powers`, rounded as a division by a Python number.

    CUDA divides by a Python number by multiplying with its reciprocal.
    """
    return scores * powers if scores.device.type == "cuda" else scores / powers


@dataclass
class TransformersRule:
    """Finishing rules of transformers 5 (`GenerationMixin._beam_search` and its helpers).

    Args:
        beams: M.
        max_length: maximum number of tokens, prompt included.
        prompt_length: number of prompt tokens.
        ends: number of token ids that end a hypothesis.
        length_penalty: exponent of a hypothesis' length.
        early_stopping: True, False or "never", as in GenerationConfig.
        mask_value: added to scores that must not be selected; also the score of an empty slot.
    """

    beams: int
    max_length: int
    prompt_length: int
    ends: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    mask_value: float = -1.0e9
    _powers: Tensor | None = field(default=None, init=False)

    @property
    def candidates(self) -> int:
        """K, so large that M candidates continue even if every beam ends in every way it can."""
        return max(2, 1 + self.ends) * self.beams

    def running(self, values: Tensor, hits: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores and indices, (B, M) each, of the candidates that continue."""
        scores, order = torch.topk(values + hits.to(torch.float32) * self.mask_value, self.beams)
        return scores, order

    def merged(
        self,
        scores: Tensor,
        done: Tensor,
        values: Tensor,
        hits: Tensor,
        improvable: Tensor,
        new_tokens: int | Tensor,
    ) -> Merged:
        """Merge candidates that finish with the previous hypotheses and keep the M best.

        Only the M best candidates of a sentence can finish.

        Args:
            scores: (B, M) fp32, of the previous hypotheses.
            done: (B, M) bool, which of their slots are filled.
            values: (B, K) fp32, running scores of the candidates, descending.
            hits: (B, K) bool, which candidates end.
            improvable: (B,) bool, whether the sentence still accepts hypotheses.
            new_tokens: new tokens of a candidate; a (1,) int64 tensor if only the device knows.
        """
        finishing = hits.clone()
        finishing[:, self.beams :] = False
        ranked = self._per_length(values, new_tokens)
        # Added one at a time, because the rounding depends on it.
        if self.early_stopping is True:
            ranked = ranked + done.all(1, keepdim=True).to(torch.float32) * self.mask_value
        ranked = torch.where(improvable[:, None], ranked, ranked + self.mask_value)
        ranked = torch.where(finishing, ranked, ranked + self.mask_value)
        all_scores = torch.cat([scores, ranked], 1)
        best, order = torch.topk(all_scores, self.beams)
        return Merged(best, torch.cat([done, finishing], 1).gather(1, order), order)

    def all_at_once(
        self, values: Tensor, beam: Tensor, token: Tensor, hits: Tensor,
        finished: tuple[Tensor, Tensor], improvable: Tensor, new_tokens: int,
    ) -> "native_selection.Chosen | None":  # fmt: skip
        """Apply all rules of a step in one C call.

        Args:
            values: (B, K) fp32, running scores of the candidates, descending.
            beam: (B, K) int64, the beam that each candidate continues.
            token: (B, K) int64, its new token.
            hits: (B, K) bool, whether it ends.
            finished: scores and done, (B, M) each, of the finished hypotheses.
            improvable: (B,) bool, whether the sentence still accepts hypotheses.
            new_tokens: new tokens of a candidate.

        Returns:
            None if C does not run or cannot decide, for example between equal values.
        """
        (b, k), m, (scores, done) = values.shape, self.beams, finished
        supported = lambda: (  # noqa: E731
            self.ranks_apart
            and k + m <= native.RANKED
            and plain(values, scores)
            and in_memory(beam, token, dtype=torch.int64)
            and in_memory(hits, done, improvable, dtype=torch.bool)
            and beam.shape == token.shape == hits.shape == values.shape
            and scores.shape == done.shape == (b, m)
            and improvable.shape == (b,)
        )
        by = select_backend("choice", unsupported, supported, values)
        if not in_c(by):
            return None
        power, far = (
            new_tokens**self.length_penalty,
            (self.far or new_tokens) ** self.length_penalty,
        )
        return native_selection.choose(
            by,
            values,
            beam,
            token,
            hits,
            *finished,
            improvable,
            self.mask_value,
            power,
            far,
            self.early_stopping is True,
        )

    def for_kernels(self, state: choice.State, *others: Tensor) -> choice.Rules | None:
        """Return the rules as a Triton kernel applies them; None if it does not run.

        Args:
            state: scores and flags of the search.
            others: other inputs of the kernel.
        """
        scores = state.scores
        supported = lambda: choice.covered(scores, self.candidates)  # noqa: E731
        if not use_triton("choice", supported, *state, *others):
            return None
        powers = self._powers_of_lengths(scores)
        return choice.Rules(self.mask_value, self.early_stopping is True, powers, self.far or 0)

    @functools.cached_property
    def ranks_apart(self) -> bool:
        """Whether every finished hypothesis ranks above every empty slot (score: `mask_value`).

        If so, the order of empty slots does not matter; transformers fills them with unfinished
        candidates. If not, the rules run in torch, which keeps the order of transformers: a
        negative penalty may scale scores below `mask_value`, or a power of a length may overflow.
        """
        longest = float(max(1, self.max_length - self.prompt_length))
        try:
            lowest = WORST * longest ** (1.0 - self.length_penalty)
            return longest**self.length_penalty >= 1.0 or lowest <= -self.mask_value / 2
        except OverflowError:
            return False

    @property
    def far(self) -> int | None:
        """New tokens at which running beams are scored, or None if it is their own length."""
        at_max_length = self.early_stopping == "never" and self.length_penalty > 0.0
        return self.max_length - self.prompt_length if at_max_length else None

    def _per_length(self, scores: Tensor, length: int | Tensor) -> Tensor:
        """Divide scores by length to the power of the length penalty."""
        if isinstance(length, int):
            return scores / (length**self.length_penalty)
        return per_power(scores, self._powers_of_lengths(scores).index_select(0, length))

    def _powers_of_lengths(self, scores: Tensor) -> Tensor:
        """Return `length_powers` of all lengths from 0 on; length 0 counts as 1."""
        if self._powers is None or self._powers.device != scores.device:
            lengths = range(self.max_length - self.prompt_length + 1)
            self._powers = length_powers((max(n, 1) for n in lengths), self.length_penalty, scores)
        return self._powers

    def improvable(self, best: Tensor, merged: Merged, new_tokens: int | Tensor) -> Tensor:
        """Return whether the best running beam could still beat the worst hypothesis, (B,) bool.

        Args:
            best: (B,) fp32, running score of the best beam.
            merged: finished hypotheses after this step.
            new_tokens: new tokens of a running beam; a (1,) int64 tensor if only the device knows.
        """
        attainable = self._per_length(best[:, None], self.far or new_tokens)
        worst = torch.where(merged.done, merged.scores.min(1, keepdim=True)[0], self.mask_value)
        return (attainable > worst).any(1)

    def settled(self, improvable: bool, done: bool) -> bool:
        """Return whether the hypotheses of a sentence are final, from rows 1 and 2 of its flags."""
        return done and (not improvable or self.early_stopping is True)

    def over(self, improvable: Tensor, done: Tensor, all_hit: Tensor) -> Tensor:
        """Return whether the search is over, as a 0-dim bool tensor.

        Args:
            improvable: (B,) bool, see `improvable`.
            done: (B,) bool, whether all M hypotheses are finished.
            all_hit: (B,) bool, whether all candidates end.
        """
        over = ~improvable.any() | all_hit.all()
        return over | done.all() if self.early_stopping is True else over
