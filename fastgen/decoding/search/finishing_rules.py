"""The finishing rules of beam search, one object per toolkit: what lives on, what finishes, when it is over."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fastgen.ops import native
from fastgen.ops.dispatch import chosen, in_c, in_memory, never, plain, use_triton
from fastgen.ops.selection import choice

WORST = 100.0
"""What no hypothesis loses per token on average, in natural log: log-probabilities of likely tokens are above -12."""


class Merged(NamedTuple):
    """The finished hypotheses after a step: scores, done (B, M); order (B, M) into M old ones, then K candidates."""

    scores: Tensor
    done: Tensor
    order: Tensor


def length_powers(lengths: Iterable[int], exponent: float, scores: Tensor) -> Tensor:
    """Lengths to the power of an exponent, (N,), as `per_power` takes them for such scores."""
    powers = torch.tensor(
        [length**exponent for length in lengths], dtype=scores.dtype, device=scores.device
    )
    return powers.reciprocal() if scores.device.type == "cuda" else powers


def per_power(scores: Tensor, powers: Tensor) -> Tensor:
    """Scores divided by powers of lengths, rounded as by a number: CUDA multiplies by the reciprocal of a number."""
    return scores * powers if scores.device.type == "cuda" else scores / powers


@dataclass
class TransformersRule:
    """The rules of transformers 5 (`GenerationMixin._beam_search` and its helpers).

    Args:
        beams: M. max_length: of prompt and new tokens. prompt_length: tokens of the prompt.
        ends: how many token ids end a hypothesis. length_penalty: the exponent of a hypothesis' length.
        early_stopping: True, False or "never", as in GenerationConfig.
    """

    beams: int
    max_length: int
    prompt_length: int
    ends: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    never: float = -1.0e9
    _powers: Tensor | None = field(default=None, init=False)  # of lengths

    @property
    def candidates(self) -> int:
        """K: enough that M candidates live on when every beam ends in every way it can."""
        return max(2, 1 + self.ends) * self.beams

    def running(self, values: Tensor, hits: Tensor) -> tuple[Tensor, Tensor]:
        """The scores and the indices, (B, M) each, of the candidates that live on."""
        scores, order = torch.topk(values + hits.to(torch.float32) * self.never, self.beams)
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
        """Rank what finished among the M best candidates with what had finished before.

        new_tokens: how many a candidate has; (1,) int64 where only the device knows.
        """
        finishing = hits.clone()
        finishing[:, self.beams :] = False
        ranked = self._per_length(values, new_tokens)
        # Added one after the other, as the sums round that way.
        if self.early_stopping is True:
            ranked = ranked + done.all(1, keepdim=True).to(torch.float32) * self.never
        ranked = torch.where(improvable[:, None], ranked, ranked + self.never)
        ranked = torch.where(finishing, ranked, ranked + self.never)
        all_scores = torch.cat([scores, ranked], 1)
        best, order = torch.topk(all_scores, self.beams)
        return Merged(best, torch.cat([done, finishing], 1).gather(1, order), order)

    def all_at_once(
        self, values: Tensor, beam: Tensor, token: Tensor, hits: Tensor, finished: tuple[Tensor, Tensor],
        improvable: Tensor, new_tokens: int,
    ) -> "native.Chosen | None":  # fmt: skip
        """All that follows for candidates (B, K), in descending order; None where C does not run, or cannot decide.

        finished: scores and done (B, M), of the hypotheses.
        """
        (b, k), m, (scores, done) = values.shape, self.beams, finished
        able = lambda: (
            self.ranks_apart
            and k + m <= native.RANKED
            and plain(values, scores)
            and in_memory(beam, token, dtype=torch.int64)
            and in_memory(hits, done, improvable, dtype=torch.bool)
            and beam.shape == token.shape == hits.shape == values.shape
            and scores.shape == done.shape == (b, m)
            and improvable.shape == (b,)
        )
        by = chosen("choice", never, able, values)
        if not in_c(by):
            return None
        power, far = (
            new_tokens**self.length_penalty,
            (self.far or new_tokens) ** self.length_penalty,
        )
        return native.choose(
            by,
            values,
            beam,
            token,
            hits,
            *finished,
            improvable,
            self.never,
            power,
            far,
            self.early_stopping is True,
        )

    def in_place(
        self, candidates: choice.Candidates, state: choice.State, new_tokens: Tensor
    ) -> choice.Chosen | None:
        """All that follows for candidates, the new state written where it was; None where kernels do not run."""
        able = lambda: choice.covered(candidates.values, self.beams)
        if not use_triton("choice", able, candidates.values, *candidates[1:], *state, new_tokens):
            return None
        powers = self._powers_of_lengths(candidates.values)
        rules = choice.Rules(self.never, self.early_stopping is True, powers, self.far or 0)
        return choice.choose_(candidates, state, rules, new_tokens)

    @functools.cached_property
    def ranks_apart(self) -> bool:
        """Whether all that has finished ranks above every slot that is empty, whose score is `never`.

        Then the order of empty slots, among which stock has candidates that have not finished, is of no matter. Where
        a negative penalty multiplies scores to less than `never`, or a power of a length is no number, torch ranks, in
        stock's order.
        """
        longest = float(max(1, self.max_length - self.prompt_length))
        try:
            lowest = WORST * longest ** (1.0 - self.length_penalty)
            return longest**self.length_penalty >= 1.0 or lowest <= -self.never / 2
        except OverflowError:
            return False

    @property
    def far(self) -> int | None:
        """The length by which running beams are judged, if it is not their own."""
        from_afar = self.early_stopping == "never" and self.length_penalty > 0.0
        return self.max_length - self.prompt_length if from_afar else None

    def _per_length(self, scores: Tensor, length: int | Tensor) -> Tensor:
        """Scores divided by a length to the power of the penalty."""
        if isinstance(length, int):
            return scores / (length**self.length_penalty)
        return per_power(scores, self._powers_of_lengths(scores).index_select(0, length))

    def _powers_of_lengths(self, scores: Tensor) -> Tensor:
        """`length_powers` of all lengths, 0 as 1."""
        if self._powers is None or self._powers.device != scores.device:
            lengths = range(self.max_length - self.prompt_length + 1)
            self._powers = length_powers((max(n, 1) for n in lengths), self.length_penalty, scores)
        return self._powers

    def improvable(self, best: Tensor, merged: Merged, new_tokens: int | Tensor) -> Tensor:
        """Whether the best running beam (B,) could still beat the worst finished hypothesis."""
        possible = self._per_length(best[:, None], self.far or new_tokens)
        worst = torch.where(merged.done, merged.scores.min(1, keepdim=True)[0], self.never)
        return (possible > worst).any(1)

    def settled(self, improvable: bool, done: bool) -> bool:
        """Whether nothing that a sentence still does can change its hypotheses."""
        return done and (not improvable or self.early_stopping is True)

    def over(self, improvable: Tensor, done: Tensor, all_hit: Tensor) -> Tensor:
        """Whether the search is over, from what holds for each sentence (B,)."""
        over = ~improvable.any() | all_hit.all()
        return over | done.all() if self.early_stopping is True else over
