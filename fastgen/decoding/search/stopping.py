"""When rows of text end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Stop:
    """When a row is at its end.

    Args:
        eos: token ids (E,) that end a row, or None.
        at_length: functions of the length that end all rows at once (a maximal length, a time limit).
        longest: the length at which all rows end, where `at_length` says nothing else; None where it may.
        others: functions of (ids (N, L), scores so far) -> bool (N,), or one for all rows, such as a user's criteria.
    """

    eos: Tensor | None = None
    at_length: Sequence[Callable[[int], bool]] = ()
    others: Sequence[Callable[[Tensor, object], Tensor]] = field(default_factory=tuple)
    longest: int | None = None

    def __call__(
        self, tokens: Tensor, length: int, ids: Callable[[], Tensor], scores: object
    ) -> Tensor:
        """Return for each new token, any shape, whether its row ends; `length` counts the new token.

        `ids` builds the rows (N, length) when a function asks for them; `scores` is handed through.
        """
        hits = self.hits(tokens, self.ends_all(length))
        if self.others:
            rows = ids()
            for function in self.others:
                hits = (hits.flatten() | function(rows, scores)).view_as(hits)
        return hits

    def ends_all(self, length: int) -> bool:
        """Whether all rows end at a length."""
        return any([ends(length) for ends in self.at_length])

    def hits(self, tokens: Tensor, all_end: bool) -> Tensor:
        """For each new token, any shape, whether it ends its row."""
        if all_end:
            return torch.ones_like(tokens, dtype=torch.bool)
        if self.eos is None:
            return torch.zeros_like(tokens, dtype=torch.bool)
        self.eos = self.eos.to(tokens.device)
        if len(self.eos) == 1:
            return tokens == self.eos
        return (tokens[..., None] == self.eos).any(-1)  # `isin` of many may wait for the device
