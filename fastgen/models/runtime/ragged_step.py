"""Tokens of texts that differ in length, several of some and none of others, in one pass through a decoder.

What reads the weights runs over all tokens, one row each. For attention the tokens of a text are folded as the beams of
a sentence are: they are several queries over the same keys, each of which sees those before it.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from fastgen.models.layers.positions import Bias, Rotary, turned_once
from fastgen.models.runtime.decode_step import KeysAndValues
from fastgen.ops.beam_attention import beam_attention


class Span(NamedTuple):
    """Neighbouring tokens of one text.

    Attributes:
        row: which text.
        start: the place of the first of them behind the prompt: 0 follows it, -1 is the prompt's last token.
        tokens: at least one.
    """

    row: int
    start: int
    tokens: Sequence[int]


class Written(KeysAndValues, Protocol):
    """A layer of the cache that has room for tokens to come, with one beam per sentence."""

    prefix: int

    @property
    def room(self) -> tuple[Tensor, Tensor]: ...
    def reach(self, steps: int) -> None:
        """Make room for `steps` tokens of a text behind the prompt, and count them as written."""
        ...


@dataclass
class Ragged:
    """`StepInputs` of spans of R texts: their tokens, one behind the other, are the N rows of the pass.

    Attributes:
        texts: R.
        spans: at most one of each text, in the order of the texts. What a text has before its span is in the cache.
        first: the position of the first token behind the prompt; (R,) int64 where texts differ.
        text, source: keys and values of each layer.
        prefix_mask, source_mask: additive, (R, 1, 1, S), of the prompt and of the source; None where all is seen.
    """

    texts: int
    spans: Sequence[Span]
    first: int | Tensor
    text: Sequence[Written]
    source: Sequence[KeysAndValues]
    prefix_mask: Tensor | None = None
    source_mask: Tensor | None = None
    biased: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    rotations: dict[int, tuple[Tensor, Tensor]] = field(
        default_factory=dict[int, tuple[Tensor, Tensor]]
    )

    def __post_init__(self) -> None:
        prefix, self.device = self.text[0].prefix, self.text[0].room[0].device
        counts = [len(span.tokens) for span in self.spans]
        starts = [prefix + span.start for span in self.spans]
        self.queries = max(counts)
        self.end = max(start + count for start, count in zip(starts, counts, strict=True))
        for layer in self.text:
            layer.reach(self.end - prefix)
        # All texts are attended to where most have tokens: those of some only are copied, and not read in place.
        chosen = [span.row for span in self.spans]
        whole = 2 * len(chosen) > self.texts
        self.attended = (
            None if whole else torch.tensor(chosen, device=self.device, dtype=torch.int64)
        )
        self.present = self.texts if whole else len(chosen)
        places = chosen if whole else range(len(chosen))
        self.even = len(chosen) == self.present and len(set(counts)) == 1
        level = self.even and len(set(starts)) == 1
        self.level = level and len(chosen) == self.texts
        self.folded = None if self.even else self._folded(places)
        at_once = level and self.queries == 1
        self.position: int | Tensor = self._position(prefix, starts[0] if at_once else None)
        self.mask = None if at_once and self.prefix_mask is None else self._mask()

    @functools.cached_property
    def rows(self) -> Tensor:
        """The text of each token (N,) int64."""
        return torch.tensor(
            [span.row for span in self.spans for _ in span.tokens],
            device=self.device,
            dtype=torch.int64,
        )

    @functools.cached_property
    def slots(self) -> Tensor:
        """The slot of each token (N,) int64."""
        starts = (self.text[0].prefix + span.start for span in self.spans)
        slots = [
            start + i
            for start, span in zip(starts, self.spans, strict=True)
            for i in range(len(span.tokens))
        ]
        return torch.tensor(slots, device=self.device, dtype=torch.int64)

    def _folded(self, places: Iterable[int]) -> Tensor:
        """The query of each token (N,) int64, among those of all texts."""
        each = zip(places, self.spans, strict=True)
        return torch.tensor(
            [place * self.queries + i for place, span in each for i in range(len(span.tokens))],
            device=self.device,
            dtype=torch.int64,
        )

    def _position(self, prefix: int, slot: int | None) -> int | Tensor:
        if isinstance(self.first, Tensor):
            return self.first[self.rows] + self.slots - prefix
        return self.slots + (self.first - prefix) if slot is None else slot + self.first - prefix

    def _mask(self) -> Tensor:
        """What each query sees of its text, additive (R', 1, K, N)."""
        unseen = (
            torch.arange(self.end, device=self.device, dtype=torch.int64)
            > self._last_seen()[:, None, :, None]
        )
        mask = torch.zeros(unseen.shape, dtype=self.text[0].keys.dtype, device=unseen.device)
        mask.masked_fill_(unseen, -torch.inf)
        if self.prefix_mask is None:
            return mask
        hidden = self.prefix_mask if self.attended is None else self.prefix_mask[self.attended]
        return mask + F.pad(hidden, (0, self.end - hidden.shape[3]))

    def _last_seen(self) -> Tensor:
        """The slot of each query (R', K) int64; the last one where there is no token."""
        if self.folded is None:
            return self.slots.view(self.present, self.queries)
        last = torch.full(
            (self.present * self.queries,), self.end - 1, device=self.device, dtype=torch.int64
        )
        return last.index_copy_(0, self.folded, self.slots).view(self.present, self.queries)

    def rotation(self, rotary: Rotary, x: Tensor) -> tuple[Tensor, Tensor]:
        return turned_once(self.rotations, rotary, self.position, x)

    def self_attention(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, bias: Bias | None, scale: float,
        softcap: float | None,
    ) -> Tensor:  # fmt: skip
        keys, values = self.text[layer].room
        self._write(keys, key)
        self._write(values, value)
        mask = self.mask if bias is None else self._biased(bias)
        return self._attend(
            query, keys[:, :, : self.end], values[:, :, : self.end], mask, scale, softcap
        )

    def _write(self, buffer: Tensor, new: Tensor) -> None:
        """Write keys or values (N, Hkv, D) to their slots of a buffer (R, Hkv, L, D)."""
        first = self.end - self.queries
        if len(self.spans) == 1:
            buffer.select(0, self.spans[0].row).narrow(1, first, self.queries).copy_(
                new.transpose(0, 1)
            )
        elif self.level:
            own = buffer[: self.texts].narrow(2, first, self.queries)
            own.copy_(new.view(self.texts, self.queries, *new.shape[1:]).transpose(1, 2))
        else:
            buffer.transpose(1, 2)[self.rows, self.slots] = new

    def cross_attention(self, layer: int, query: Tensor, scale: float) -> Tensor:
        kept, mask = self.source[layer], self.source_mask
        mask = mask if mask is None or self.attended is None else mask[self.attended]
        return self._attend(query, kept.keys, kept.values, mask, scale, None)

    def _biased(self, bias: Bias) -> Tensor:
        """The mask plus a bias by distance, (R', H, K, N), made once for all layers that have it."""
        if id(bias) not in self.biased:
            last = self._last_seen()[..., None]
            first = (
                self.first
                if self.attended is None or isinstance(self.first, int)
                else self.first[self.attended]
            )
            before = first[:, None, None] if isinstance(first, Tensor) else first
            distance = last - torch.arange(self.end, device=last.device, dtype=torch.int64)
            found = bias.at(distance, last + (before - self.text[0].prefix))
            self.biased[id(bias)] = found if self.mask is None else found + self.mask
        return self.biased[id(bias)]

    def _attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        """What query (N, H, D) finds in keys and values (R, Hkv, L, D) of all texts, (N, H * D)."""
        if self.attended is not None:
            keys, values = keys[self.attended], values[self.attended]
        if self.folded is None:
            folded = query.view(self.present, self.queries, *query.shape[1:])
            return beam_attention(folded, keys, values, mask, scale, softcap).reshape(
                len(query), -1
            )
        padded = query.new_zeros(self.present * self.queries, *query.shape[1:])
        padded[self.folded] = query
        padded = padded.view(self.present, self.queries, *query.shape[1:])
        return (
            beam_attention(padded, keys, values, mask, scale, softcap)
            .flatten(2)
            .flatten(0, 1)[self.folded]
        )
