"""transformers' cache classes over the keys and values of `decoding.kv_cache`."""

import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from transformers import Cache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer

from fastgen.decoding.kv_cache.ancestry import Ancestry
from fastgen.decoding.kv_cache.layer_kv import LayerKV, note_steps, room_for_steps
from fastgen.models.layers.attention import ticket
from fastgen.models.memory.scratch import Memory
from fastgen.ops.cache import write_slots_


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


@dataclass(eq=False)
class _Whole:
    """All the room of a layer of the text, as if it were filled."""

    keys: Tensor
    values: Tensor
    prefix: int
    steps: int


class Room:
    """A cache as it is from one step to the next, up to where it moves: what changes is read on the device.

    Its layers look filled to the end, and hand out tickets, whatever the beams. Their length is a tensor, as that of
    transformers' static cache is, so that no module can compute with a number that was true in one step only.

    Attributes:
        start: (1,) int64, the first slot of the newest tokens. length: () int64, tokens of a beam before them.
        tokens: of a beam, that there is room for. visible: (B, M, F) additive; None for one beam.
    """

    def __init__(self, cache: "SharedCache") -> None:
        tables = [] if cache.ancestry is None else [cache.ancestry.room]
        slots = [layer.room[0].shape[2] - layer.prefix for layer in cache.text] + [
            table.shape[2] for table in tables
        ]
        steps, self._beams, self._prefix = (
            min(slots) // cache.beams,
            cache.beams,
            cache.text[0].prefix,
        )
        self._held = [*(layer.room[0] for layer in cache.text), *tables]
        self._layers: dict[LayerKV, Any] = {layer: layer for layer in cache.source}
        for layer in cache.text:
            end = layer.prefix + steps * cache.beams
            keys, values = (buffer[:, :, :end] for buffer in layer.room)
            self._layers[layer] = _Whole(keys, values, layer.prefix, steps)
        self._tickets = {
            layer: ticket(whole, cache.rows, whole.prefix + whole.steps)
            for layer, whole in self._layers.items()
        }
        self.tokens = self._prefix + steps
        self.visible = tables[0][:, :, : steps * cache.beams] if tables else None
        self.start = torch.empty(1, dtype=torch.int64, device=cache.device)
        self.length = self.start[0]

    def holds(self, cache: "SharedCache") -> bool:
        """Whether the cache lies where it did."""
        tables = [] if cache.ancestry is None else [cache.ancestry.room]
        now = [*(layer.room[0] for layer in cache.text), *tables]
        return len(now) == len(self._held) and all(
            new is old for new, old in zip(now, self._held, strict=True)
        )

    def count(self) -> None:
        """Make `length` of `start`, on the device."""
        generated = torch.div(self.start - self._prefix, self._beams, rounding_mode="floor")
        self.length = (generated + self._prefix)[0]

    def ticket(self, layer: LayerKV) -> Tensor:
        return self._tickets[layer]

    def length_of(self, layer: LayerKV) -> Any:
        """Tokens of a layer before the newest, as a module asks for them."""
        return self.length if isinstance(self._layers[layer], _Whole) else layer.length


class SharedCache:
    """The cache of one call: B sentences with M rows each, of at most `longest` new tokens.

    While the prompt runs, at B rows, its layers behave as transformers' own. `begin_decoding` makes them hold M slots
    per step; with M > 1 they then hand out tickets, which only `attention` can redeem, and with M = 1 plain
    views.

    Args:
        stock: the cache that `generate` made or was given, in whose place this one stands; what rows of a sentence hold
            in it is the same, and copied once.
        memory: where keys and values lie.
    """

    def __init__(
        self,
        sentences: int,
        beams: int,
        longest: int,
        device: torch.device,
        stock: Cache,
        memory: Memory,
    ) -> None:
        self.sentences, self.beams, self.longest = sentences, beams, longest
        self.device, self.stock = device, stock
        self._stock_rows, self._peak = sentences * beams, 0
        self.decoding = self.looked_at = False
        self.room: Room | None = None  # in whose place this cache stands
        self.ancestry = Ancestry(sentences, beams, longest, device) if beams > 1 else None
        self.text: list[LayerKV] = []
        self.source: list[LayerKV] = []
        layer = partial(LayerKV, longest, memory=memory)
        owner = weakref.proxy(
            self
        )  # no cycle, so that the memory is free as soon as the call has ended
        own = Cache(
            layer_class_to_replicate=cast(
                Any, partial(_Layer, owner, self.text, partial(layer, expected=beams))
            )
        )
        self.as_seen: Cache = own  # what the model gets
        if isinstance(stock, EncoderDecoderCache):
            self.as_seen = EncoderDecoderCache(
                own,
                Cache(
                    layer_class_to_replicate=cast(Any, partial(_Layer, owner, self.source, layer))
                ),
            )
        for index, held_layer in enumerate(parts_of(stock)[0].layers):
            if held_layer.get_seq_length():
                cast(Any, own).update(held_layer.keys[::beams], held_layer.values[::beams], index)

    @property
    def rows(self) -> int:
        return self.sentences * self.beams

    @property
    def layers(self) -> int:
        """How many attention layers there are, those over the source included."""
        return len(self.text) + len(self.source)

    @property
    def has_gaps(self) -> bool:
        """Whether a layer has not been written behind the prompt: its module was taken out, and left its number."""
        return not all(layer.length for layer in (*self.text, *self.source))

    @property
    def hands_out_tickets(self) -> bool:
        return self.decoding and (self.room is not None or (self.beams > 1 and not self.looked_at))

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
            for layers, part in self._beside_stock
            for kv, layer in zip(layers, part.layers, strict=False)
        )

    def keep_text(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Keep what a layer makes of the prompt, (B, Hkv, L, D), as its module would."""
        parts_of(self.as_seen)[0].update(keys, values, layer)

    def keep_source(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Keep a layer's keys and values (B, Hkv, S, D) of the source, as its module would."""
        cached = cast(Any, self.as_seen)
        cached.cross_attention_cache.update(keys, values, layer)
        cached.is_updated[layer] = True

    def begin_decoding(self) -> None:
        self.decoding = True
        for layer in (*self.text, *self.source):
            layer.beams = self.beams

    def begin_step(self) -> None:
        if self.ancestry is not None:
            self._compact(self.ancestry)
            self.ancestry.begin_step()

    def _compact(self, ancestry: Ancestry) -> None:
        slots = ancestry.compact()
        if slots is not None:
            self._peak = self.peak_nbytes
            for layer in self.text:
                layer.compact(slots)

    def begin_steps(self, most: int) -> int:
        """Have room for at most so many tokens of every beam, the first one's slots open; return for how many."""
        if self.ancestry is not None:
            self._compact(self.ancestry)
        return room_for_steps(self.text, self.ancestry, most)

    def end_steps(self, steps: int, is_open: bool) -> None:
        """So many of them have been made, and reordered; is_open: whether the slots of one more are open."""
        note_steps(self.text, self.ancestry, steps, is_open)

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
        moves = (
            to,
            torch.tensor([places[place] for place in moved], dtype=torch.int64, device=self.device),
        )
        sentences = sentences.to(self.device)
        self.sentences = sentences.shape[0]
        if self.ancestry is not None:
            self.ancestry.keep(sentences)
        for layer in (*self.text, *self.source):
            layer.keep(sentences, moves)

    @contextmanager
    def as_of_prompt(self) -> Generator[None]:
        """Within it a model sees a cache of one row per sentence, the prompt's, and nothing that it adds is kept."""
        self.looked_at = True
        try:
            yield
        finally:
            self.looked_at = False

    @contextmanager
    def as_room(self, room: Room) -> Generator[None]:
        """Within it a model sees all the room that this cache has, and writes where the device says."""
        room.count()
        self.room = room
        try:
            yield
        finally:
            self.room = None

    def undo_steps(self) -> None:
        """Forget all generated tokens; only `as_stock` may follow."""
        for layer in self.text:
            layer.undo_steps()

    def as_stock(self) -> Cache:
        """Return what transformers' own loop would hold by now: the stock cache, filled with what each row sees."""
        for layers, part in self._beside_stock:
            for index, kv in enumerate(layers):
                if not kv.length:  # in a gap
                    continue
                keys, values = kv.of_beams(self._slots(kv.steps))
                if index < len(part.layers) and part.layers[index].get_seq_length():
                    part.layers[index].keys, part.layers[index].values = keys, values
                else:
                    part.update(keys, values, index)
        if isinstance(self.stock, EncoderDecoderCache):
            self.stock.is_updated = {
                index: layer.length > 0 for index, layer in enumerate(self.source)
            }
        return self.stock

    @property
    def _beside_stock(self) -> list[tuple[list[LayerKV], Any]]:
        return list(zip((self.text, self.source), parts_of(self.stock), strict=False))

    def _slots(self, steps: int) -> Tensor:
        """(B, M, T): the slots of each beam's tokens."""
        if self.ancestry is None or steps == 0:
            return torch.arange(steps, device=self.device, dtype=torch.int64).expand(
                self.sentences, self.beams, -1
            )
        return self.ancestry.slots


class _Layer(DynamicLayer):
    """One layer of the cache, as transformers' modules see it."""

    def __init__(
        self, owner: SharedCache, layers: list[LayerKV], make: Callable[[], LayerKV]
    ) -> None:
        self._owner, self._kv = owner, make()
        layers.append(self._kv)
        self.is_initialized = True
        self._ticket: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self._owner.decoding:
            fresh = self._kv.length == 0
            self._kv.extend(key_states, value_states)
            return (key_states, value_states) if fresh else (self._kv.keys, self._kv.values)
        if self._owner.looked_at:
            return torch.cat([self._kv.keys, key_states], 2), torch.cat(
                [self._kv.values, value_states], 2
            )
        if (room := self._owner.room) is None:
            self._kv.append(key_states, value_states)
        else:
            write_slots_(*self._kv.room, key_states, value_states, room.start)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        room = self._owner.room
        return self._kv.length if room is None else room.length_of(self._kv)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        room = self._owner.room
        return super().get_mask_sizes(query_length) if room is None else (room.tokens, 0)

    @property
    def is_compileable(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride] so that masks have its size
        return self._owner.room is not None

    @property
    def keys(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride] computed, never assigned
        return self._handed_out if self._owner.hands_out_tickets else self._kv.keys

    @property
    def values(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride] computed, never assigned
        return self._handed_out if self._owner.hands_out_tickets else self._kv.values

    @property
    def _handed_out(self) -> Tensor:
        """The ticket for this layer, which serves as keys and as values."""
        if (room := self._owner.room) is not None:
            return room.ticket(self._kv)
        rows, length = self._owner.rows, self._kv.length
        if self._ticket is None or self._ticket.shape[0] != rows or self._ticket.shape[2] != length:
            self._ticket = ticket(self._kv, rows, length)
        return self._ticket
