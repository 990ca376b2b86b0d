"""Which tokens a small model drafts, and which of them a large one lets stand."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from fastgen.ops.selection.kbest import argmax

Place = tuple[int, int]
"""A text, and how many tokens behind its prompt."""


class Drafted(NamedTuple):
    """A token for each of N places, and the probability of the likeliest one there."""

    tokens: list[int]
    confidence: list[float]


class Checked(NamedTuple):
    """What the large model says of each of N places: its own token, and whether the drafted one stands."""

    own: list[int]
    stands: list[bool]


class Policy(Protocol):
    def draft(self, scores: Tensor, places: Sequence[Place]) -> Drafted:
        """Choose by scores (N, V) fp32 of the small model."""
        ...

    def check(self, scores: Tensor, places: Sequence[Place], drafted: Sequence[int]) -> Checked:
        """Choose by scores (N, V) fp32 of the large model; drafted: tokens (N,), -1 where there is none."""
        ...


@dataclass
class Likeliest:
    """The likeliest tokens; a drafted one stands where it is the large model's own, or cheap enough.

    rollback: the most that a token may cost, -log p under the large model, natural logarithm. With 0 none stands but
        the large model's own, so that the text is its greedy output.

    Source: Kim et al. 2023 (BiLD), section 3.
    """

    rollback: float

    def draft(self, scores: Tensor, places: Sequence[Place]) -> Drafted:
        tokens, confidence = _read(argmax(scores), torch.softmax(scores, 1).amax(1))
        return Drafted([int(t) for t in tokens], confidence)

    def check(self, scores: Tensor, places: Sequence[Place], drafted: Sequence[int]) -> Checked:
        own = argmax(scores)
        if self.rollback == 0.0:
            chosen: list[int] = cast(Any, own).tolist()
            return Checked(
                chosen, [token == other for token, other in zip(drafted, chosen, strict=True)]
            )
        likeliest, costs = _read(own, _costs(scores, drafted))
        return Checked(
            [int(t) for t in likeliest], _standing(drafted, likeliest, costs, self.rollback)
        )


@dataclass
class Noting:
    """Another policy, and what the large model says of the tokens that stand in the end."""

    policy: Policy
    _seen: list[tuple[Sequence[Place], Sequence[int], list[int], Tensor]] = field(
        default_factory=list[tuple[Sequence[Place], Sequence[int], list[int], Tensor]], init=False
    )

    def draft(self, scores: Tensor, places: Sequence[Place]) -> Drafted:
        return self.policy.draft(scores, places)

    def check(self, scores: Tensor, places: Sequence[Place], drafted: Sequence[int]) -> Checked:
        checked = self.policy.check(scores, places, drafted)
        tokens = (
            torch.tensor([drafted, checked.own], device=scores.device, dtype=torch.int64)
            .clamp_(min=0)
            .T
        )
        self._seen.append((places, drafted, checked.own, scores.gather(1, tokens)))
        return checked

    def scores_of(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Of each token of all texts, its score as the large model saw it; one look at the device."""
        values: list[list[float]] = cast(
            Any, torch.cat([scores for *_, scores in self._seen])
        ).tolist()
        each = (
            seen
            for places, drafted, own, _ in self._seen
            for seen in zip(places, drafted, own, strict=True)
        )
        found: dict[Place, dict[int, float]] = {}
        for (place, token, other), (of_token, of_other) in zip(each, values, strict=True):
            found[place] = {
                token: of_token,
                other: of_other,
            }  # what was forgotten is overwritten by what came there
        return [
            [found[text, i][token] for i, token in enumerate(tokens)]
            for text, tokens in enumerate(texts)
        ]


@dataclass
class Drawn:
    """Tokens drawn from the models' distributions; a drafted one stands as in `Likeliest`."""

    rollback: float

    def draft(self, scores: Tensor, places: Sequence[Place]) -> Drafted:
        probabilities = torch.softmax(scores, 1)
        return Drafted(_draw(probabilities), _read(probabilities.amax(1))[0])

    def check(self, scores: Tensor, places: Sequence[Place], drafted: Sequence[int]) -> Checked:
        likeliest, costs = _read(argmax(scores), _costs(scores, drafted))
        return Checked(
            _draw(torch.softmax(scores, 1)), _standing(drafted, likeliest, costs, self.rollback)
        )


@dataclass
class Rejection:
    """Tokens that are distributed as the large model's own samples, whatever is drafted.

    Source: Leviathan et al. 2023, algorithm 1: a token x drawn from p stands with probability min(1, q(x) / p(x)); in
    place of one that does not, one is drawn from max(0, q - p), normalised.
    """

    _drawn_from: dict[Place, Tensor] = field(default_factory=dict[Place, Tensor], init=False)

    def draft(self, scores: Tensor, places: Sequence[Place]) -> Drafted:
        probabilities = torch.softmax(scores, 1)
        self._drawn_from.update(zip(places, probabilities, strict=True))
        return Drafted(_draw(probabilities), _read(probabilities.amax(1))[0])

    def check(self, scores: Tensor, places: Sequence[Place], drafted: Sequence[int]) -> Checked:
        large = torch.softmax(scores, 1)
        nothing = large.new_zeros(large.shape[1])
        each = zip(places, drafted, strict=True)
        small = torch.stack(
            [nothing if token < 0 else self._drawn_from[place] for place, token in each]
        )
        self._drawn_from.clear()
        tokens = torch.tensor(drafted, device=scores.device, dtype=torch.int64).clamp_(min=0)[
            :, None
        ]
        at_large, at_small = large.gather(1, tokens)[:, 0], small.gather(1, tokens)[:, 0]
        stands: list[bool] = cast(Any, torch.rand_like(at_small) * at_small < at_large).tolist()
        rest = (large - small).clamp_(min=0.0)
        alike = (
            rest.sum(1, keepdim=True) == 0.0
        )  # then every draft stands, and nothing is drawn from the rest
        return Checked(_draw(torch.where(alike, large, rest)), stands)


def _draw(weights: Tensor) -> list[int]:
    return cast(Any, torch.multinomial(weights, 1)[:, 0]).tolist()


def _read(*columns: Tensor) -> list[list[float]]:
    """Numbers (N,) of several kinds, in one look at the device."""
    if not columns[0].is_cuda:
        return [cast(Any, column).tolist() for column in columns]
    return cast(Any, torch.stack([column.double() for column in columns])).tolist()


def _costs(scores: Tensor, drafted: Sequence[int]) -> Tensor:
    """-log p of the drafted tokens (N,); of any token where there is none."""
    tokens = torch.tensor(drafted, device=scores.device, dtype=torch.int64).clamp_(min=0)
    return F.cross_entropy(scores, tokens, reduction="none")


def _standing(
    drafted: Sequence[int], likeliest: Sequence[float], costs: Sequence[float], rollback: float
) -> list[bool]:
    each = zip(drafted, likeliest, costs, strict=True)
    return [token == best or cost <= rollback for token, best, cost in each]
