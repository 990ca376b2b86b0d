"""transformers' cache classes over the keys and values of `decoding.kv_cache`."""

import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer, StaticLayer, StaticSlidingWindowLayer

from fastgen.decoding.kv_cache.ancestry import Ancestry
from fastgen.decoding.kv_cache.layer_kv import LayerKV, note_steps, room_for_steps
from fastgen.models.layers.attention import placeholder
from fastgen.models.memory.scratch import ScratchPool
from fastgen.ops.cache import write_slots_
from fastgen.patches.transformers import compat


def parts_of(cache: Any) -> list[Any]:
    """Return the caches that hold the layers; an empty list if `cache` is None.

    The first is the self-attention cache; an encoder-decoder cache adds the cross-attention cache.
    """
    if isinstance(cache, EncoderDecoderCache):
        return [cache.self_attention_cache, cache.cross_attention_cache]
    return [] if cache is None else [cache]


def nbytes(cache: Any) -> int:
    """Return the bytes of keys and values in a cache of transformers, without quantized ones."""
    layers: list[Any] = [layer for part in parts_of(cache) for layer in getattr(part, "layers", ())]
    states = (getattr(layer, name, None) for layer in layers for name in ("keys", "values"))
    return sum(state.nbytes for state in states if isinstance(state, Tensor))


def held(layer: Any, length: int) -> int:
    """Return for how many of `length` tokens a layer of transformers' cache has memory.

    A layer with a sliding window holds only those in the window. A static one has a fixed size.
    """
    if isinstance(layer, StaticLayer):
        return layer.max_cache_len
    return min(length, getattr(layer, "sliding_window", length + 1) - 1)


def states_of(layer: Any) -> list[Tensor]:
    """Return keys and values (R, Hkv, N, D) of a layer's tokens; an empty list before the first."""
    if not layer.is_initialized:
        return []
    states: list[Any] = [layer.keys, layer.values]
    return [state[:, :, : int(layer.get_seq_length())] for state in states]


def select_rows(cache: Any, rows: Tensor) -> None:
    """Keep only the given rows (N,) int64 of a cache of transformers."""
    layers: list[Any] = [layer for part in parts_of(cache) for layer in part.layers]
    for layer in layers:
        if not isinstance(layer, StaticLayer):
            layer.batch_select_indices(rows)
        elif layer.is_initialized:
            states: Any = layer
            states.keys, states.values = states.keys[rows], states.values[rows]


def windows_of(model: Any, cache: Any) -> list[int | None]:
    """Return the sliding window of each self-attention layer of a call, in tokens; None for none.

    Args:
        model: The model.
        cache: The cache that `generate` made, which shows the windows, or was given.
    """
    text = parts_of(cache)[0]
    if compat.is_user_provided(cache) or type(text) is not DynamicCache:
        text = DynamicCache(config=model.config)
    layers: list[Any] = text.layers
    return [layer.sliding_window if layer.is_sliding else None for layer in layers]


@dataclass(eq=False)
class _FullLayer:
    """The full capacity of a self-attention layer, presented as if it were filled."""

    keys: Tensor
    values: Tensor
    prefix: int
    steps: int

    @property
    def own(self) -> tuple[Tensor, Tensor]:
        return self.joined()

    def joined(self) -> tuple[Tensor, Tensor]:
        return self.keys, self.values


class FullCapacityView:
    """View of a cache's full capacity, for captured decode steps.

    It is valid until the cache's buffers move. What changes between steps is read on the device.
    Its layers look completely filled and hand out placeholders, for any number of beams. Their
    length is a tensor, as in transformers' static cache, so that no module can compute with a
    number that holds for one step only.

    Attributes:
        start: (1,) int64, first slot of the newest tokens.
        length: () int64, tokens of a beam before the newest one.
        tokens: Capacity in tokens per beam, prefix included.
        visible: (B, M, F) additive mask over the slots of generated tokens; None for one beam.
    """

    def __init__(self, cache: "SharedCache") -> None:
        tables = [] if cache.ancestry is None else [cache.ancestry.capacity_buffers]
        slots = [layer.capacity_buffers[0].shape[2] - layer.prefix for layer in cache.text] + [
            table.shape[2] for table in tables
        ]
        steps, self._beams, self._prefix = (
            min(slots) // cache.beams,
            cache.beams,
            cache.text[0].prefix,
        )
        self._held = [*(layer.capacity_buffers[0] for layer in cache.text), *tables]
        self._layers: dict[LayerKV, Any] = {layer: layer for layer in cache.source}
        for layer in cache.text:
            end = layer.prefix + steps * cache.beams
            keys, values = (buffer[:, :, :end] for buffer in layer.capacity_buffers)
            self._layers[layer] = _FullLayer(keys, values, layer.prefix, steps)
        self._placeholders = {
            layer: placeholder(whole, cache.rows, whole.prefix + whole.steps)
            for layer, whole in self._layers.items()
        }
        self.tokens = self._prefix + steps
        self.visible = tables[0][:, :, : steps * cache.beams] if tables else None
        self.start = torch.empty(1, dtype=torch.int64, device=cache.device)
        self.length = self.start[0]

    def holds(self, cache: "SharedCache") -> bool:
        """Return whether the cache's buffers are the ones that this view was made of."""
        tables = [] if cache.ancestry is None else [cache.ancestry.capacity_buffers]
        now = [*(layer.capacity_buffers[0] for layer in cache.text), *tables]
        return len(now) == len(self._held) and all(
            new is old for new, old in zip(now, self._held, strict=True)
        )

    def count(self) -> None:
        """Compute `length` from `start`, on the device."""
        generated = torch.div(self.start - self._prefix, self._beams, rounding_mode="floor")
        self.length = (generated + self._prefix)[0]

    def placeholder(self, layer: LayerKV) -> Tensor:
        """Return the placeholder of a layer."""
        return self._placeholders[layer]

    def length_of(self, layer: LayerKV) -> Any:
        """Return the number of tokens before the newest one, as modules ask for it.

        A tensor for self-attention layers, an int for cross-attention layers.
        """
        return self.length if isinstance(self._layers[layer], _FullLayer) else layer.length


class SharedCache:
    """KV cache of one call in which the rows of a sentence share the prompt's keys and values.

    During prefill, which runs at B rows, its layers behave like transformers' own. After
    `begin_decoding` each decode step takes M slots per sentence. With M > 1 the layers then return
    placeholders, which only `cache.attention` can resolve. With M = 1 they return plain views.

    Args:
        sentences: B.
        beams: M, the rows per sentence.
        longest: Maximum number of new tokens per row.
        device: Device of the ancestry and of indices.
        stock: Cache that `generate` made or was given, and that this one replaces. The rows of a
            sentence hold the same in it, so each sentence is copied once.
        memory: Allocator of the KV buffers.
        prompt: Tokens of the prompt, for which room is reserved.
    """

    def __init__(
        self,
        sentences: int,
        beams: int,
        longest: int,
        device: torch.device,
        stock: Cache,
        memory: ScratchPool,
        prompt: int,
    ) -> None:
        self.sentences, self.beams, self.longest = sentences, beams, longest
        self.device, self.stock = device, stock
        self._stock_rows, self._peak = sentences * beams, 0
        self.decoding = self.looked_at = False
        self.full_view: FullCapacityView | None = None  # set within `as_full_capacity`
        self.ancestry = Ancestry(sentences, beams, longest, device) if beams > 1 else None
        self.text: list[LayerKV] = []
        self.source: list[LayerKV] = []
        layer = partial(LayerKV, longest, memory=memory)
        # A proxy avoids a reference cycle, so that the memory is freed as soon as the call ends.
        owner = weakref.proxy(self)
        own = Cache(
            layer_class_to_replicate=cast(
                Any,
                partial(_Layer, owner, self.text, partial(layer, expected=beams, prompt=prompt)),
            )
        )
        self.model_cache: Cache = own  # the cache passed to the model
        if isinstance(stock, EncoderDecoderCache):
            self.model_cache = EncoderDecoderCache(
                own,
                Cache(
                    layer_class_to_replicate=cast(Any, partial(_Layer, owner, self.source, layer))
                ),
            )
        for index, held_layer in enumerate(parts_of(stock)[0].layers):
            if held_layer.get_seq_length():
                cast(Any, own).update(*(x[::beams] for x in states_of(held_layer)), index)

    @property
    def rows(self) -> int:
        return self.sentences * self.beams

    @property
    def layers(self) -> int:
        """Number of attention layers, self-attention and cross-attention."""
        return len(self.text) + len(self.source)

    @property
    def has_gaps(self) -> bool:
        """Whether prefill left a layer empty: its module was removed and its index is unused."""
        return not all(layer.length for layer in (*self.text, *self.source))

    @property
    def returns_placeholders(self) -> bool:
        """Whether layers return placeholders instead of keys and values."""
        return self.decoding and (
            self.full_view is not None or (self.beams > 1 and not self.looked_at)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values in use."""
        return sum(layer.nbytes for layer in (*self.text, *self.source))

    @property
    def peak_nbytes(self) -> int:
        """Peak bytes of keys and values in use."""
        return max(self._peak, self.nbytes)

    @property
    def stock_nbytes(self) -> int:
        """Bytes that transformers' own cache would use now.

        There every row of the call, finished ones included, holds all tokens that it may attend to.
        """
        return sum(
            kv.slot_nbytes * held(layer, kv.length) * self._stock_rows
            for layers, part in self._beside_stock
            for kv, layer in zip(layers, part.layers, strict=False)
        )

    def keep_text(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store a layer's self-attention keys and values (B, Hkv, L, D), as its module would."""
        parts_of(self.model_cache)[0].update(keys, values, layer)

    def keep_common(self, cache: Cache, apart: bool) -> None:
        """Store the keys and values of tokens that the prompts of all sentences begin with.

        Args:
            cache: A cache of transformers with one row.
            apart: Whether to store them once, for readers that know of them.
        """
        own: Any = parts_of(self.model_cache)[0]
        for index, layer in enumerate(parts_of(cache)[0].layers):
            if apart:
                own.layers.append(own.layer_class_to_replicate())
                self.text[index].share(layer.keys, layer.values)
                continue
            keys, values = (
                states.expand(self.sentences, -1, -1, -1) for states in (layer.keys, layer.values)
            )
            self.keep_text(index, keys, values)

    def keep_source(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store a layer's cross-attention keys and values (B, Hkv, S, D), as its module would."""
        cached = cast(Any, self.model_cache)
        cached.cross_attention_cache.update(keys, values, layer)
        cached.is_updated[layer] = True

    def expand(self) -> None:
        """Store the keys and values of common tokens for every sentence."""
        for layer in self.text:
            layer.expand()

    def begin_decoding(self) -> None:
        """End prefill: from now on each decode step takes M slots per sentence."""
        self.decoding = True
        for layer in (*self.text, *self.source):
            layer.beams = self.beams

    def begin_step(self) -> None:
        """Compact the KV slots if that is due, and open those of the next token."""
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
        """Reserve room for several steps and open the slots of the first one.

        Compacts the KV slots first if that is due.

        Args:
            most: Upper bound of the number of steps.

        Returns:
            The number of steps that there is room for, at most `most`.
        """
        if self.ancestry is not None:
            self._compact(self.ancestry)
        return room_for_steps(self.text, self.ancestry, most)

    def end_steps(self, steps: int, is_open: bool) -> None:
        """Record steps that have run, reordering included.

        Args:
            steps: Number of steps.
            is_open: Whether the slots of the next token are open.
        """
        note_steps(self.text, self.ancestry, steps, is_open)

    def reorder(self, parents: Tensor) -> None:
        """Make row b * M + m continue beam parents[b, m]; only the ancestry changes."""
        if self.ancestry is not None:
            self.ancestry.reorder(parents.to(self.device))

    def keep(self, sentences: Tensor) -> None:
        """Keep only the given sentences.

        Args:
            sentences: (N,) int64. Entry i is the sentence that comes to index i: either i itself or
                one at index N or higher.
        """
        self._peak = self.peak_nbytes
        kept: list[int] = cast(Any, sentences).tolist()
        moved = [place for place, sentence in enumerate(kept) if place != sentence]
        targets = torch.tensor(moved, dtype=torch.int64, device=self.device)
        moves = (
            targets,
            torch.tensor([kept[place] for place in moved], dtype=torch.int64, device=self.device),
        )
        sentences = sentences.to(self.device)
        self.sentences = sentences.shape[0]
        if self.ancestry is not None:
            self.ancestry.keep(sentences)
        for layer in (*self.text, *self.source):
            layer.keep(sentences, moves)

    @contextmanager
    def as_of_prompt(self) -> Generator[None]:
        """Present the prompt with one row per sentence; what the model adds is dropped."""
        self.looked_at = True
        try:
            yield
        finally:
            self.looked_at = False

    @contextmanager
    def as_full_capacity(self, room: FullCapacityView) -> Generator[None]:
        """Present the full capacity of the cache; writes go to the slots at `room.start`."""
        room.count()
        self.full_view = room
        try:
            yield
        finally:
            self.full_view = None

    def rewind(self, steps: int) -> None:
        """Drop all but the first `steps` generated tokens; with one beam per sentence."""
        for layer in self.text:
            layer.rewind(steps)

    def undo_steps(self) -> None:
        """Drop all generated tokens.

        The ancestry is not reset. With several beams, `begin_step` must not be called afterwards.
        """
        for layer in self.text:
            layer.undo_steps()

    def as_stock(self) -> Cache:
        """Return `stock`, filled as transformers' own loop would have filled it by now."""
        for layers, part in self._beside_stock:
            for index, kv in enumerate(layers):
                if not kv.length:  # see `has_gaps`
                    continue
                keys, values = kv.of_beams(self._slots(kv.steps))
                layer: Any = part.layers[index] if index < len(part.layers) else None
                if type(layer) in (StaticLayer, StaticSlidingWindowLayer):
                    known = int(layer.get_seq_length())
                    layer.update(keys[:, :, known:], values[:, :, known:])
                elif layer is not None and layer.get_seq_length():
                    layer.keys, layer.values = keys, values
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
        """Return the slots (B, M, T) int64 of each beam's generated tokens."""
        if self.ancestry is None or steps == 0:
            return torch.arange(steps, device=self.device, dtype=torch.int64).expand(
                self.sentences, self.beams, -1
            )
        return self.ancestry.slots


class _Layer(DynamicLayer):
    """One layer of the cache, with the interface that transformers' modules use."""

    def __init__(
        self, owner: SharedCache, layers: list[LayerKV], make: Callable[[], LayerKV]
    ) -> None:
        self._owner, self._kv = owner, make()
        self._kv.is_private = True
        layers.append(self._kv)
        self.is_initialized = True
        self._placeholder: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self._owner.decoding:
            fresh = self._kv.length == 0
            self._kv.extend(key_states, value_states)
            return (key_states, value_states) if fresh else self._viewed.joined()
        if self._owner.looked_at:
            keys, values = self._kv.joined()
            return torch.cat([keys, key_states], 2), torch.cat([values, value_states], 2)
        if (room := self._owner.full_view) is None:
            self._kv.append(key_states, value_states)
        else:
            write_slots_(*self._kv.capacity_buffers, key_states, value_states, room.start)
        if self._owner.returns_placeholders:
            return self._handed_out, self._handed_out
        return self._viewed.joined()

    def get_seq_length(self) -> int:
        room = self._owner.full_view
        return self._kv.length if room is None else room.length_of(self._kv)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        room = self._owner.full_view
        return super().get_mask_sizes(query_length) if room is None else (room.tokens, 0)

    # True makes transformers build masks over the full capacity.
    @property
    def is_compileable(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._owner.full_view is not None

    @property
    def keys(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._handed_out if self._owner.returns_placeholders else self._viewed.keys

    @property
    def values(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._handed_out if self._owner.returns_placeholders else self._viewed.values

    @property
    def _viewed(self) -> LayerKV:
        """Keys and values of which a caller gets views."""
        self._kv.is_private = False
        return self._kv

    @property
    def _handed_out(self) -> Tensor:
        """Placeholder for the keys and the values of this layer."""
        if (room := self._owner.full_view) is not None:
            return room.placeholder(self._kv)
        rows, length = self._owner.rows, self._kv.length
        if (
            self._placeholder is None
            or self._placeholder.shape[0] != rows
            or self._placeholder.shape[2] != length
        ):
            self._placeholder = placeholder(self._kv, rows, length)
        return self._placeholder
