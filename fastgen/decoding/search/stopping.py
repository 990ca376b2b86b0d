"""Stopping criteria of a search."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Stop:
    """Stopping criteria of the rows of a search.

    Args:
        eos: (E,) int64, token ids that end a row, or None.
        at_length: functions of the length that end all rows at once, such as a maximum length or a
            time limit.
        others: functions of (ids (N, L), scores so far) that return (N,) bool, or a single value
            for all rows. A user's stopping criteria are such functions.
        longest: length at which all rows end, if `at_length` depends on nothing else; None if it
            does.
    """

    eos: Tensor | None = None
    at_length: Sequence[Callable[[int], bool]] = ()
    others: Sequence[Callable[[Tensor, object], Tensor]] = field(default_factory=tuple)
    longest: int | None = None

    def __call__(
        self, tokens: Tensor, length: int, ids: Callable[[], Tensor], scores: object
    ) -> Tensor:
        """Return whether each new token ends its row.

        Args:
            tokens: int64, any shape with N elements.
            length: length of the rows, new token included.
            ids: builds the rows (N, length); called only if there are `others`.
            scores: passed on to `others`.

        Returns:
            bool, shape of `tokens`.
        """
        hits = self.hits(tokens, self.ends_all(length))
        if self.others:
            rows = ids()
            for function in self.others:
                hits = (hits.flatten() | function(rows, scores)).view_as(hits)
        return hits

    def ends_all(self, length: int) -> bool:
        """Return whether all rows end at this length."""
        # A list, so that every limit is called: a limit may warn.
        return any([ends(length) for ends in self.at_length])  # noqa: C419

    def hits(self, tokens: Tensor, all_end: bool) -> Tensor:
        """Return whether each new token, of any shape, ends its row by `eos` or by its length."""
        if all_end:
            return torch.ones_like(tokens, dtype=torch.bool)
        ends = self.end_tokens(tokens.device)
        if ends is None:
            return torch.zeros_like(tokens, dtype=torch.bool)
        if len(ends) == 1:
            return tokens == ends
        # Not `torch.isin`, which may synchronise with the device for many elements.
        return (tokens[..., None] == ends).any(-1)

    def end_tokens(self, device: torch.device) -> Tensor | None:
        """Return `eos` on a device."""
        if self.eos is not None:
            self.eos = self.eos.to(device)
        return self.eos
