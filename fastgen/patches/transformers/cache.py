"""transformers' cache classes over the keys and values of `decoding.cache`."""

import copy
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from transformers import Cache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer

from fastgen.decoding import cache
from fastgen.decoding.cache import LayerKV
from fastgen.models.attention import ticket
from fastgen.models.memory import Memory


def parts_of(cache: Any) -> list[Any]:
    """The caches that hold the layers: of the text and, in an encoder-decoder, of the source; none for no cache."""
    if isinstance(cache, EncoderDecoderCache):
        return [cache.self_attention_cache, cache.cross_attention_cache]
    return [] if cache is None else [cache]


def nbytes(cache: Any) -> int:
    """Bytes of keys and values in a cache of transformers, without those that are quantized."""
    layers: list[Any] = [layer for part in parts_of(cache) for layer in getattr(part, "layers", ())]
    states = (getattr(layer, name, None) for layer in layers for name in ("keys", "values"))
    return sum(state.nbytes for state in states if isinstance(state, Tensor))


def held(layer: Any, length: int) -> int:
    """How many of `length` tokens a layer of transformers' dynamic cache holds: all, or those in its window."""
    return min(length, getattr(layer, "sliding_window", length + 1) - 1)


class SharedCache:
    """The cache of one call: B sentences with M rows each, of at most `longest` new tokens.

    While the prompt runs, at B rows, its layers behave as transformers' own. `begin_decoding` makes them hold M slots
    per step; with M > 1 they then hand out tickets, which only `models.attention` can redeem, and with M = 1 plain
    views.

    Args:
        stock: the empty cache that `generate` made, in whose place this one stands.
        memory: where keys and values lie.
    """

    def __init__(
        self, sentences: int, beams: int, longest: int, device: torch.device, stock: Cache, memory: Memory
    ) -> None:
        self.sentences, self.beams, self.longest = sentences, beams, longest
        self.device, self.stock = device, stock
        self._stock_rows, self._peak = sentences * beams, 0
        self.decoding = False
        self.ancestry = cache.Ancestry(sentences, beams, longest, device) if beams > 1 else None
        self.text: list[LayerKV] = []
        self.source: list[LayerKV] = []
        layer = partial(LayerKV, longest, memory=memory)
        owner = weakref.proxy(self)  # no cycle, so that the memory is free as soon as the call has ended
        own = Cache(
            layer_class_to_replicate=cast(Any, partial(_Layer, owner, self.text, partial(layer, expected=beams)))
        )
        self.past_key_values: Cache = own
        if isinstance(stock, EncoderDecoderCache):
            self.past_key_values = EncoderDecoderCache(
                own, Cache(layer_class_to_replicate=cast(Any, partial(_Layer, owner, self.source, layer)))
            )

    @property
    def rows(self) -> int:
        return self.sentences * self.beams

    @property
    def layers(self) -> int:
        """How many attention layers there are, those over the source included."""
        return len(self.text) + len(self.source)

    @property
    def hands_out_tickets(self) -> bool:
        return self.decoding and self.beams > 1

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values in use."""
        return sum(layer.nbytes for layer in (*self.text, *self.source))

    @property
    def peak_nbytes(self) -> int:
        """The most bytes of keys and values that have been in use."""
        return max(self._peak, self.nbytes)

    @property
    def stock_nbytes(self) -> int:
        """Bytes that transformers' own cache would use by now: every row of the call holds all that it may see."""
        return sum(
            kv.nbytes // (self.sentences * kv.slots) * held(layer, kv.length) * self._stock_rows
            for layers, part in self._beside(self.stock)
            for kv, layer in zip(layers, part.layers, strict=False)
        )

    def begin_decoding(self) -> None:
        self.decoding = True
        for layer in (*self.text, *self.source):
            layer.beams = self.beams

    def begin_step(self) -> None:
        if self.ancestry is None:
            return
        slots = self.ancestry.sweep()
        if slots is not None:
            self._peak = self.peak_nbytes
            for layer in self.text:
                layer.sweep(slots)
        self.ancestry.begin_step()

    def reorder(self, parents: Tensor) -> None:
        """Let row b * M + m continue beam parents[b, m]; nothing but the ancestry moves."""
        if self.ancestry is not None:
            self.ancestry.reorder(parents.to(self.device))

    def keep(self, sentences: Tensor) -> None:
        """Keep these sentences only: each stays at its place or comes from behind all that are kept."""
        self._peak = self.peak_nbytes
        places: list[int] = cast(Any, sentences).tolist()
        moved = [place for place, sentence in enumerate(places) if place != sentence]
        to = torch.tensor(moved, dtype=torch.int64, device=self.device)
        moves = to, torch.tensor([places[place] for place in moved], dtype=torch.int64, device=self.device)
        sentences = sentences.to(self.device)
        self.sentences = sentences.shape[0]
        if self.ancestry is not None:
            self.ancestry.keep(sentences)
        for layer in (*self.text, *self.source):
            layer.keep(sentences, moves)

    def undo_steps(self) -> None:
        """Forget all generated tokens; only `as_stock` may follow."""
        for layer in self.text:
            layer.undo_steps()

    def as_stock(self, copied: bool = False) -> Cache:
        """Return what transformers' own loop would hold by now: the stock cache, filled with what each row sees.

        copied: fill a copy of it, so that this can be asked again.
        """
        parts: list[Cache] = []
        for layers, part in self._beside(copy.deepcopy(self.stock) if copied else self.stock):
            for index, kv in enumerate(layers):
                part.update(*kv.of_beams(self._slots(kv.steps)), index)
            parts.append(part)
        return parts[0] if len(parts) == 1 else EncoderDecoderCache(*parts)

    def _beside(self, stock: Cache) -> list[tuple[list[LayerKV], Any]]:
        return list(zip((self.text, self.source), parts_of(stock), strict=False))

    def _slots(self, steps: int) -> Tensor:
        """(B, M, T): the slots of each beam's tokens."""
        if self.ancestry is None or steps == 0:
            device = (self.text[0].keys if self.text else torch.empty(0)).device
            return torch.arange(steps, device=device).expand(self.sentences, self.beams, -1)
        return self.ancestry.slots


class _Layer(DynamicLayer):
    """One layer of the cache, as transformers' modules see it."""

    def __init__(self, owner: SharedCache, layers: list[LayerKV], make: Callable[[], LayerKV]) -> None:
        self._owner, self._kv = owner, make()
        layers.append(self._kv)
        self.is_initialized = True
        self._ticket: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self._owner.decoding:
            fresh = self._kv.length == 0
            self._kv.extend(key_states, value_states)
            return (key_states, value_states) if fresh else (self._kv.keys, self._kv.values)
        self._kv.append(key_states, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self._kv.length

    @property
    def keys(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride] computed, never assigned
        return self._handed_out if self._owner.hands_out_tickets else self._kv.keys

    @property
    def values(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride] computed, never assigned
        return self._handed_out if self._owner.hands_out_tickets else self._kv.values

    @property
    def _handed_out(self) -> Tensor:
        """The ticket for this layer, which serves as keys and as values."""
        rows, length = self._owner.rows, self._kv.length
        if self._ticket is None or self._ticket.shape[0] != rows or self._ticket.shape[2] != length:
            self._ticket = ticket(self._kv, rows, length)
        return self._ticket
