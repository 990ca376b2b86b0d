"""One decoder pass over any number of consecutive tokens of each of several texts.

Matrix products run over all tokens, one row per token. Attention treats the tokens of a text like
the beams of a sentence: as several queries over the same keys, with a causal mask.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from fastgen.models.layers.positions import AttentionBias, Rotary, rotation_once
from fastgen.models.runtime.step_inputs import KeysAndValues, Scoring, attended


class Span(NamedTuple):
    """Consecutive tokens of one text.

    Attributes:
        row: Index of the text.
        start: Index of the first token, relative to the end of the prompt; -1 is the prompt's last
            token.
        tokens: One or more token ids.
    """

    row: int
    start: int
    tokens: Sequence[int]


class WrittenLayer(KeysAndValues, Protocol):
    """A cache layer with one beam per sentence, which can reserve room for later tokens."""

    prefix: int

    @property
    def capacity_buffers(self) -> tuple[Tensor, Tensor]:
        """Key and value buffers including their unused capacity, (R, Hkv, capacity, D) each."""
        ...

    def reach(self, steps: int) -> None:
        """Make room for `steps` tokens after the prompt, and count them as written."""
        ...


@dataclass
class RaggedStepInputs:
    """`StepInputs` of spans of R texts, whose concatenated tokens are the N rows of the pass.

    Attributes:
        texts: Number of texts R.
        spans: At most one span per text, in the order of the texts. Tokens before a span must be
            in the KV cache.
        first: Position of the first token after the prompt; (R,) int64 if texts differ.
        text: Keys and values of each self-attention layer.
        source: Keys and values of each cross-attention layer.
        prefix_mask: Additive mask of the prompt (R, 1, 1, S); None if everything is visible.
        source_mask: Additive mask of the source (R, 1, 1, S); None if everything is visible.
        biased: Masks with a bias, by the id of the `AttentionBias`, for all layers of the pass.
        rotations: Cosines and sines, by the id of the `Rotary`; they serve all layers of the pass.
        queries: Maximum number of tokens of a span, K.
        end: End of the longest text in slots.
        attended: int64 indices of the R' texts that attention runs over; None for all.
        present: Number of those texts, R'.
        even: Whether each of those texts has a span, and all spans are equally long.
        level: Whether every text has a span, and all spans have the same start and length.
        folded: (N,) int64, index of each token among the R' * K queries; None if `even`.
        position: Position of each row; an int if all rows agree.
        mask: Additive mask (R', 1, K, keys); None if everything is visible.
    """

    texts: int
    spans: Sequence[Span]
    first: int | Tensor
    text: Sequence[WrittenLayer]
    source: Sequence[KeysAndValues]
    prefix_mask: Tensor | None = None
    source_mask: Tensor | None = None
    biased: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    rotations: dict[int, tuple[Tensor, Tensor]] = field(
        default_factory=dict[int, tuple[Tensor, Tensor]]
    )

    def __post_init__(self) -> None:
        prefix, self.device = self.text[0].prefix, self.text[0].capacity_buffers[0].device
        counts = [len(span.tokens) for span in self.spans]
        starts = [prefix + span.start for span in self.spans]
        self.queries = max(counts)
        self.end = max(start + count for start, count in zip(starts, counts, strict=True))
        for layer in self.text:
            layer.reach(self.end - prefix)
        # If most texts have a span, attention runs over all texts and reads the cache in place.
        # Otherwise the keys and values of the texts with a span are copied.
        rows = [span.row for span in self.spans]
        all_texts = 2 * len(rows) > self.texts
        self.attended = (
            None if all_texts else torch.tensor(rows, device=self.device, dtype=torch.int64)
        )
        self.present = self.texts if all_texts else len(rows)
        places = rows if all_texts else range(len(rows))
        self.even = len(rows) == self.present and len(set(counts)) == 1
        level = self.even and len(set(starts)) == 1
        self.level = level and len(rows) == self.texts
        self.folded = None if self.even else self._folded(places)
        at_once = level and self.queries == 1
        self.position: int | Tensor = self._position(prefix, starts[0] if at_once else None)
        self.mask = None if at_once and self.prefix_mask is None else self._mask()

    @property
    def sentences(self) -> int:
        """Number of texts, named as in `Context`."""
        return self.texts

    @property
    def text_mask(self) -> Tensor | None:
        """The mask, named as in `Context`."""
        return self.mask

    @functools.cached_property
    def rows(self) -> Tensor:
        """Index of the text of each token, (N,) int64."""
        return torch.tensor(
            [span.row for span in self.spans for _ in span.tokens],
            device=self.device,
            dtype=torch.int64,
        )

    @functools.cached_property
    def slots(self) -> Tensor:
        """Slot of each token, (N,) int64."""
        starts = (self.text[0].prefix + span.start for span in self.spans)
        slots = [
            start + i
            for start, span in zip(starts, self.spans, strict=True)
            for i in range(len(span.tokens))
        ]
        return torch.tensor(slots, device=self.device, dtype=torch.int64)

    def _folded(self, places: Iterable[int]) -> Tensor:
        """Return the index of each token among the queries of all texts, (N,) int64."""
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
        """Return the causal mask plus the prompt's, additive (R', 1, K, keys)."""
        is_hidden = (
            torch.arange(self.end, device=self.device, dtype=torch.int64)
            > self._last_seen()[:, None, :, None]
        )
        mask = torch.zeros(is_hidden.shape, dtype=self.text[0].keys.dtype, device=is_hidden.device)
        mask.masked_fill_(is_hidden, -torch.inf)
        if self.prefix_mask is None:
            return mask
        prefix_mask = self.prefix_mask if self.attended is None else self.prefix_mask[self.attended]
        return mask + F.pad(prefix_mask, (0, self.end - prefix_mask.shape[3]))

    def _last_seen(self) -> Tensor:
        """Return the slot of each query, (R', K) int64; the last slot for padding queries."""
        if self.folded is None:
            return self.slots.view(self.present, self.queries)
        last = torch.full(
            (self.present * self.queries,), self.end - 1, device=self.device, dtype=torch.int64
        )
        return last.index_copy_(0, self.folded, self.slots).view(self.present, self.queries)

    def text_mask_with(self, bias: AttentionBias | None) -> Tensor | None:
        """Return the mask plus a bias, which may be broadcastable to (R', H, K, keys)."""
        return self.mask if bias is None else self._biased(bias)

    def rotation(self, rotary: Rotary, x: Tensor) -> tuple[Tensor, Tensor]:
        return rotation_once(self.rotations, rotary, self.position, x)

    def self_attention(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scoring: Scoring,
    ) -> Tensor:
        keys, values = self.text[layer].capacity_buffers
        self._write(keys, key)
        self._write(values, value)
        mask = self.text_mask_with(scoring.bias)
        return self._attend(query, keys[:, :, : self.end], values[:, :, : self.end], mask, scoring)

    def _write(self, buffer: Tensor, new: Tensor) -> None:
        """Write keys or values (N, Hkv, D) to their slots in a buffer (R, Hkv, L, D)."""
        first = self.end - self.queries
        if len(self.spans) == 1:
            buffer.select(0, self.spans[0].row).narrow(1, first, self.queries).copy_(
                new.transpose(0, 1)
            )
        elif self.level:
            target = buffer[: self.texts].narrow(2, first, self.queries)
            target.copy_(new.view(self.texts, self.queries, *new.shape[1:]).transpose(1, 2))
        else:
            buffer.transpose(1, 2)[self.rows, self.slots] = new

    def cross_attention(self, layer: int, query: Tensor, scale: float) -> Tensor:
        cache, mask = self.source[layer], self.source_mask
        mask = mask if mask is None or self.attended is None else mask[self.attended]
        return self._attend(query, cache.keys, cache.values, mask, Scoring(scale))

    def _biased(self, bias: AttentionBias) -> Tensor:
        """Return the mask plus a bias, (R', H, K, keys), computed once for all layers."""
        if id(bias) not in self.biased:
            last = self._last_seen()[..., None]
            first = (
                self.first
                if self.attended is None or isinstance(self.first, int)
                else self.first[self.attended]
            )
            before = first[:, None, None] if isinstance(first, Tensor) else first
            distance = last - torch.arange(self.end, device=last.device, dtype=torch.int64)
            table = bias.at(distance, last + (before - self.text[0].prefix))
            self.biased[id(bias)] = table if self.mask is None else table + self.mask
        return self.biased[id(bias)]

    def _attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        scoring: Scoring,
    ) -> Tensor:
        """Attend with query (N, H, D) to keys and values (R, Hkv, L, D) of all texts.

        Returns:
            The attention output (N, H * D).
        """
        if self.attended is not None:
            keys, values = keys[self.attended], values[self.attended]
        if self.folded is None:
            folded = query.view(self.present, self.queries, *query.shape[1:])
            return attended(folded, keys, values, mask, scoring).reshape(len(query), -1)
        padded = query.new_zeros(self.present * self.queries, *query.shape[1:])
        padded[self.folded] = query
        padded = padded.view(self.present, self.queries, *query.shape[1:])
        return attended(padded, keys, values, mask, scoring).flatten(2).flatten(0, 1)[self.folded]
