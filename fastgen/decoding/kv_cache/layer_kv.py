"""The keys and values of a decode step, stored once per sentence.

One buffer per layer holds, for every sentence, the prefix all its beams share (the prompt of a decoder, or its start
tokens) and behind it the slots of the generated tokens: the step t writes slots S + t*M + m, one per beam m.
Nothing is moved when beams are reordered: `ancestry.Ancestry` says which slots a beam sees, and one attention call
serves all the beams of a sentence (`ops.beam_attention`).

Source: FastSeq (shared prefix).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fastgen.decoding.kv_cache import room
from fastgen.decoding.kv_cache.ancestry import Ancestry
from fastgen.models.memory.scratch import Memory
from fastgen.ops.cache import move_sentences_, write_slots_
from fastgen.ops.rotation import Rotation, turn_into_slots_


class LayerKV:
    """Keys and values of one attention layer over the text so far: a shared prefix, then slots of M per step.

    Args:
        longest: steps at most, known from the start.
        memory: where the buffers come from.
        expected: M of the steps to come, for which there is room from the start; 0 where only the prefix is kept.
    """

    def __init__(self, longest: int, memory: Memory, expected: int = 0) -> None:
        self.longest, self.memory, self.expected = longest, memory, expected
        self.prefix = 0
        self.steps = self.filled = 0  # tokens of a beam; slots of all
        self.beams = 1
        self._blank = False  # whether there are zeros behind what is filled
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens that one beam sees."""
        return self.prefix + self.steps

    @property
    def slots(self) -> int:
        return self.prefix + self.filled

    @property
    def keys(self) -> Tensor:
        """(B, Hkv, S + T*M, D), a view."""
        assert self._keys is not None
        return self._keys.narrow(2, 0, self.slots)

    @property
    def values(self) -> Tensor:
        assert self._values is not None
        return self._values.narrow(2, 0, self.slots)

    @property
    def nbytes(self) -> int:
        """Bytes of the slots in use, without the room to grow."""
        if self._keys is None or self._values is None:
            return 0
        elements = sum(
            math.prod((*buffer.shape[:2], buffer.shape[3])) for buffer in (self._keys, self._values)
        )
        return elements * self.slots * self._keys.element_size()

    def extend(self, keys: Tensor, values: Tensor) -> None:
        """Append tokens that every beam shares: keys, values (B, Hkv, L, D)."""
        added = keys.shape[2]
        prefix = self.prefix + added
        steps = room.room_for(0, self.longest, keys, self._elements(keys) * self.expected)
        self._reserve(
            keys, values, prefix + steps * self.expected, prefix + self.longest * self.expected
        )
        assert self._keys is not None
        assert self._values is not None
        self._keys[:, :, self.prefix : self.prefix + added] = keys
        self._values[:, :, self.prefix : self.prefix + added] = values
        self.prefix += added

    @property
    def begun(self) -> bool:
        """Whether there is anything in it, so that it has a shape."""
        return self._keys is not None

    @property
    def room(self) -> tuple[Tensor, Tensor]:
        """Keys and values with what lies behind them, (B, Hkv, N, D), up to where they will have to move."""
        assert self._keys is not None
        assert self._values is not None
        return self._keys, self._values

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Write one token of every beam into its slot: keys, values (B*M, Hkv, 1, D)."""
        self._open(keys, values)
        write_slots_(*self.room, keys, values, self.slots)
        self.note_step()

    def reserve(self, keys: Tensor, values: Tensor) -> None:
        """Have the slots of one token of every beam, which somebody else writes; arguments as `append`'s."""
        self._open(keys, values)
        self.note_step()

    def _open(self, keys: Tensor, values: Tensor) -> None:
        if self._keys is None:
            self._grow(keys, values)
        self.make_room()

    def append_turned(
        self, query: Tensor, key: Tensor, value: Tensor, rotation: Rotation
    ) -> Tensor:
        """The same of keys that are turned first, key, value (B*M, Hkv, D); return the turned queries (B*M, H, D)."""
        self._open(key[:, :, None], value[:, :, None])
        turned = turn_into_slots_(query, key, value, rotation, *self.room, self.slots)
        self.note_step()
        return turned

    def append_asking(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write one token of every beam into its slot, and behind it what stays until the next token comes.

        Args:
            keys, values: (B * 2 * M, Hkv, 1, D), of each sentence first the tokens.
        Returns:
            Keys and values with both, (B, Hkv, S + (T + 1) * M, D), views.
        """
        self.make_room(2)
        write_slots_(*self.room, keys, values, self.slots)
        self.note_step()
        seen = self.slots + self.beams
        return self.room[0][:, :, :seen], self.room[1][:, :, :seen]

    def make_room(self, tokens: int = 1) -> None:
        """Make room for one more token of every beam, or more; where there is none, keys and values move."""
        assert self._keys is not None
        assert self._values is not None
        if self._keys.shape[2] < self.slots + tokens * self.beams:
            keys, values = (
                buffer.new_empty(*buffer.shape[:2], 0, buffer.shape[3]) for buffer in self.room
            )
            self._grow(keys, values, tokens)

    def move(self, keys: Tensor, values: Tensor) -> None:
        """Lie there from now on, (B, Hkv, N, D) each with room for more; what lies there already is not moved."""
        for old, new in zip(self.room, (keys, values), strict=True):
            if old.data_ptr() != new.data_ptr():
                new[:, :, : self.slots] = old[:, :, : self.slots]
                self.memory.forget(old)
        self._keys, self._values = keys, values

    def note_step(self, steps: int = 1) -> None:
        """One token of every beam has been written, or more."""
        self.steps, self.filled = self.steps + steps, self.filled + steps * self.beams

    def reach(self, steps: int) -> None:
        """Make room for `steps` tokens of texts with one beam, zeros until they are written, and count so many."""
        keys, values = self.room
        full = keys.shape[2] < self.prefix + steps
        if full:
            least = steps + room.room_for(steps, self.longest, keys, self._elements(keys))
            self._reserve(keys, values, self.prefix + least, self.prefix + max(least, self.longest))
        if full or not self._blank:
            for buffer in self.room:
                buffer[:, :, self.slots :] = 0.0
            self._blank = True
        self.steps = self.filled = max(steps, self.steps)

    def _grow(self, keys: Tensor, values: Tensor, tokens: int = 1) -> None:
        """Make room for some more steps, of the shape of keys and values; for `tokens` of them at least."""
        elements = self._elements(keys) * self.beams
        more = room.room_for(self.steps, self.longest, keys, elements), self.longest - self.steps
        least, most = (self.slots + max(tokens, steps) * self.beams for steps in more)
        self._reserve(keys, values, least, most)

    def compact(self, slots: Tensor) -> None:
        """Give up all slots of generated tokens but these, (B, L) int64, from `Ancestry.compact`."""
        first, count = self.prefix, slots.shape[1]
        for buffer in (self._keys, self._values):
            assert buffer is not None
            index = slots[:, None, :, None].expand(-1, buffer.shape[1], -1, buffer.shape[3])
            buffer[:, :, first : first + count] = buffer[:, :, first : first + self.filled].gather(
                2, index
            )
        self.filled = count

    def undo_steps(self) -> None:
        """Forget all generated tokens."""
        self.steps = self.filled = 0

    def keep(self, sentences: Tensor, moves: tuple[Tensor, Tensor] | None) -> None:
        """Keep these sentences, int64 indices.

        moves: the places, and the sentences that come to them from behind all that are kept; the others stay. None
            where sentences move in another way.
        """
        assert self._keys is not None
        assert self._values is not None
        kept: list[Tensor] = []
        for buffer in (self._keys, self._values):
            if (
                moves is None or self.beams == 1
            ):  # with one, others are handed the memory itself, and may hold on to it
                kept.append(buffer.index_select(0, sentences))
            else:
                move_sentences_(buffer[:, :, : self.slots], *moves)
                kept.append(buffer[: sentences.shape[0]])
        self._keys, self._values = kept

    def of_beams(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values as a plain cache holds them, (B*M, Hkv, S + T, D).

        slots: (B, M, T) int64, those of each beam's tokens.
        """
        b, m, _ = slots.shape
        prefix = torch.arange(self.prefix, device=slots.device, dtype=torch.int64).expand(b, m, -1)
        index = torch.cat([prefix, slots + self.prefix], 2)
        sentence = torch.arange(b, device=slots.device, dtype=torch.int64)[:, None, None]
        keys, values = (
            kv.transpose(1, 2)[sentence, index].flatten(0, 1).transpose(1, 2)
            for kv in (self.keys, self.values)
        )
        return keys, values

    def _reserve(self, keys: Tensor, values: Tensor, least: int, most: int) -> None:
        """Make room for `least` slots in all, of the shape that new keys and values have; up to `most` if it is free.

        What is outgrown is given up: what comes after it is larger, too.
        """
        rows = keys.shape[0] if self._keys is None else self._keys.shape[0]
        slots = self.memory.room(keys, self._elements(keys), least, most) if least < most else least
        slots = room.aligned(slots, most, keys)
        self._keys = self._moved(self._keys, keys, rows, slots)
        self._values = self._moved(self._values, values, rows, slots)

    def _elements(self, keys: Tensor) -> int:
        """Of a slot of all sentences, whose keys have the shape of new ones, or of those that are there."""
        rows = keys.shape[0] if self._keys is None else self._keys.shape[0]
        return rows * keys.shape[1] * keys.shape[3]

    def _moved(self, old: Tensor | None, new: Tensor, rows: int, slots: int) -> Tensor:
        """Return a buffer of so many slots that holds what an old one holds, of the shape of new keys or values."""
        buffer = self.memory.take(new, rows, new.shape[1], slots, new.shape[3])
        if old is not None:
            buffer[:, :, : self.slots] = old[:, :, : self.slots]
            self.memory.forget(old)
        return buffer


def room_for_steps(text: Sequence["LayerKV"], ancestry: Ancestry | None, most: int) -> int:
    """Have room for at most so many tokens of every beam, the first one's slots open; return for how many.

    text: keys and values of each layer, swept if that was due.
    """
    for layer in text:
        layer.make_room()
        most = min(most, (layer.room[0].shape[2] - layer.slots) // layer.beams)
    if ancestry is not None:
        ancestry.have_open()
        most = min(
            most, room.COMPACT_EVERY - ancestry.steps % room.COMPACT_EVERY, ancestry.steps_left
        )
    return most


def note_steps(
    text: Sequence["LayerKV"], ancestry: Ancestry | None, steps: int, is_open: bool
) -> None:
    """So many of them have been made, and reordered; is_open: whether the slots of one more are open."""
    for layer in text:
        layer.note_step(steps)
    if ancestry is not None:
        ancestry.note_steps(steps, is_open)
