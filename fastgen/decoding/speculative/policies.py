"""Policies of speculative decoding: how the small model drafts and the large model verifies."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from fastgen.decoding.search.multinomial import multinomial
from fastgen.ops.selection.kbest import argmax

Place = tuple[int, int]
"""Position in a text: the text's index, and the number of generated tokens before the position."""


class Drafted(NamedTuple):
    """Draft for N places.

    Attributes:
        tokens: drafted token of each place.
        confidence: probability of the most probable token of each place.
    """

    tokens: list[int]
    confidence: list[float]


class Checked(NamedTuple):
    """Verification of N places by the large model.

    Attributes:
        own: the large model's token of each place.
        stands: whether the drafted token of each place is accepted.
    """

    own: list[int]
    stands: list[bool]


class Policy(Protocol):
    """Drafting and verification rules."""

    def draft(self, scores: Tensor, places: Sequence[Place]) -> Drafted:
        """Draft tokens from scores (N, V) fp32 of the small model."""
        ...

    def check(self, scores: Tensor, places: Sequence[Place], drafted: Sequence[int]) -> Checked:
        """Verify drafted tokens.

        Args:
            scores: (N, V) fp32, of the large model.
            places: N places.
            drafted: N tokens, -1 at places without a draft.
        """
        ...


@dataclass
class Likeliest:
    """Greedy policy: accept a drafted token if it is the large model's own or cheap enough.

    Args:
        rollback: maximum cost of an accepted token, -log p under the large model in nats. With 0
            only the large model's own tokens are accepted, so the text is its greedy output.

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
    """Wrapper of a policy that records the large model's scores of the final tokens."""

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
        """Return the large model's score of each token of all texts; reads the device once."""
        values: list[list[float]] = cast(
            Any, torch.cat([scores for *_, scores in self._seen])
        ).tolist()
        checks = (
            check
            for places, drafted, own, _ in self._seen
            for check in zip(places, drafted, own, strict=True)
        )
        by_place: dict[Place, dict[int, float]] = {}
        for (place, token, other), (token_score, other_score) in zip(checks, values, strict=True):
            # A later check of the same place replaces one that was rolled back.
            by_place[place] = {token: token_score, other: other_score}
        return [
            [by_place[text, i][token] for i, token in enumerate(tokens)]
            for text, tokens in enumerate(texts)
        ]


@dataclass
class Drawn:
    """Sampling policy; a drafted token is accepted as in `Likeliest`."""

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
    """Rejection sampling policy: the output is distributed as samples of the large model.

    A token x drawn from the small model's p is accepted with probability min(1, q(x) / p(x)), where
    q is the large model's distribution. A rejected token is replaced by a sample of max(0, q - p),
    normalised.

    Source: Leviathan et al. 2023, algorithm 1.
    """

    _drawn_from: dict[Place, Tensor] = field(default_factory=dict[Place, Tensor], init=False)

    def draft(self, scores: Tensor, places: Sequence[Place]) -> Drafted:
        probabilities = torch.softmax(scores, 1)
        self._drawn_from.update(zip(places, probabilities, strict=True))
        return Drafted(_draw(probabilities), _read(probabilities.amax(1))[0])

    def check(self, scores: Tensor, places: Sequence[Place], drafted: Sequence[int]) -> Checked:
        large = torch.softmax(scores, 1)
        nothing = large.new_zeros(large.shape[1])
        drafts = zip(places, drafted, strict=True)
        small = torch.stack(
            [nothing if token < 0 else self._drawn_from[place] for place, token in drafts]
        )
        self._drawn_from.clear()
        tokens = torch.tensor(drafted, device=scores.device, dtype=torch.int64).clamp_(min=0)[
            :, None
        ]
        at_large, at_small = large.gather(1, tokens)[:, 0], small.gather(1, tokens)[:, 0]
        stands: list[bool] = cast(Any, torch.rand_like(at_small) * at_small < at_large).tolist()
        rest = (large - small).clamp_(min=0.0)
        # Equal distributions leave no rest. Every draft is then accepted and the sample unused.
        equal = rest.sum(1, keepdim=True) == 0.0
        return Checked(_draw(torch.where(equal, large, rest)), stands)


def _draw(weights: Tensor) -> list[int]:
    return cast(Any, multinomial(weights, 1)[:, 0]).tolist()


def _read(*columns: Tensor) -> list[list[float]]:
    """Copy columns (N,) to the host in one device read."""
    if not columns[0].is_cuda:
        return [cast(Any, column).tolist() for column in columns]
    return cast(Any, torch.stack([column.double() for column in columns])).tolist()


def _costs(scores: Tensor, drafted: Sequence[int]) -> Tensor:
    """Return -log p of the drafted tokens, (N,); of token 0 at places without a draft."""
    tokens = torch.tensor(drafted, device=scores.device, dtype=torch.int64).clamp_(min=0)
    return F.cross_entropy(scores, tokens, reduction="none")


def _standing(
    drafted: Sequence[int], likeliest: Sequence[float], costs: Sequence[float], rollback: float
) -> list[bool]:
    each = zip(drafted, likeliest, costs, strict=True)
    return [token == best or cost <= rollback for token, best, cost in each]
