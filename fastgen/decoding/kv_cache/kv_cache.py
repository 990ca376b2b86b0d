"""The keys and values of a decode step, stored once per sentence.

One buffer per layer holds, for every sentence, the prefix all its beams share (the prompt of a decoder, or its start
tokens) and behind it the slots of the generated tokens: the step t writes slots S + t*M + m, one per beam m.
Nothing is moved when beams are reordered. `Ancestry` says which slots a beam sees, and one attention call serves all
the beams of a sentence (`ops.beam_attention`).

Sources: FastSeq (shared prefix), FasterTransformer (indirection instead of reorder).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fastgen.models.cuda_graphs import graph
from fastgen.models.memory.scratch import Memory
from fastgen.ops.cache import move_sentences_, reorder_rows_, write_slots_
from fastgen.ops.rotation import Rotation, turn_into_slots_
from fastgen.ops.tables import Table, extend_rows_

SWEEP = 16
"""Decode steps from one sweep to the next, in which slots that no beam sees any more are given up."""

_GROWTH = 64
"""Decode steps for which a buffer gets room at least, when it grows and the text may become that long."""


_ALIGNED = 16
"""Slots of which a buffer has a multiple where kernels read it: they load several at once then."""


def room_for(steps: int, longest: int, like: Tensor, elements: int) -> int:
    """Steps to make room for beyond the `steps` that are filled: half as many again, and never beyond `longest`.

    Where what reads the buffer is captured, all up to `longest`, unless that takes too much memory, or is a limit that
    few texts come near to.

    Args:
        like: a tensor of the buffer's dtype and device.
        elements: of a step.
    """
    left = longest - steps
    if longest <= 8 * _GROWTH and graph.may_be_roomy(like, longest * elements):
        return max(1, left)
    return max(1, min(max(_GROWTH, steps // 2), left))


def _aligned(slots: int, most: int, like: Tensor) -> int:
    """Slots of a buffer that never grows again; others grow together with what goes with them."""
    return -(-slots // _ALIGNED) * _ALIGNED if slots == most and graph.wanted(like) else slots


class Ancestry:
    """Which slots of the generated tokens each beam sees, shared by all layers.

    `visible` is additive, (B, M, T*M) in float32: 0 at the slots of a beam's own ancestors, -inf elsewhere. Beams soon
    have all but their last tokens in common, so that most slots are no beam's any more: where they have been swept
    there are fewer. `own`: the same (M, M) of the slots of one token.
    """

    def __init__(self, sentences: int, beams: int, longest: int, device: torch.device) -> None:
        self.beams, self.longest = beams, longest
        self.steps = self.filled = 0  # tokens of a beam; slots of all
        self.times: Tensor | None = None  # (B, F) int64, behind a sweep: the step that each slot is of
        self._open = False  # whether the slots of the next token are open already
        self.own = torch.full((beams, beams), -torch.inf, dtype=torch.float32, device=device).fill_diagonal_(0.0)
        self._visible = torch.empty(sentences, beams, 0, dtype=torch.float32, device=device)
        self._whole: Tensor | None = None  # what `_visible` is the end of

    @property
    def visible(self) -> Tensor:
        return self._visible[:, :, : self.filled]

    @property
    def room(self) -> Tensor:
        """`visible` with what lies behind it, (B, M, F), up to where it will have to move."""
        return self._visible

    @property
    def steps_left(self) -> int:
        """For how many steps there is room."""
        return (self._visible.shape[2] - self.filled) // self.beams

    def make_room(self) -> None:
        """Make room for one more token of every beam."""
        filled = self.filled
        if self._visible.shape[2] < filled + self.beams:
            elements = self._visible.shape[0] * self.beams**2
            slots = filled + room_for(self.steps, self.longest, self._visible, elements) * self.beams
            grown = self._visible.new_empty(*self._visible.shape[:2], slots)
            grown[:, :, :filled] = self.visible
            self._visible, self._whole = grown, None

    def begin_step(self) -> None:
        """Open the slots of one more token: each beam sees its own."""
        self.have_open()
        self._open = False
        self._note_times(1)
        self.note_step()

    def have_open(self) -> None:
        """See to it that the slots of one more token are open, though not counted."""
        rows, own, _ = self.next_slots()
        if not self._open:
            rows[:, :, self.filled : self.filled + self.beams] = own
        self._open = True

    def behind(self, prefix: int, mask: Tensor | None) -> Tensor:
        """`room` behind what beams see of the tokens before it, (B, M, prefix + F); `room` is a view of it from now on.

        mask: (B, .., prefix) additive, alike in each call; None where all are seen.
        """
        if self._whole is None:
            sentences, beams, slots = self._visible.shape
            slots = _aligned(prefix + slots, prefix + self.longest * beams, self._visible)
            self.move(self._visible.new_zeros(sentences, beams, slots), prefix, mask)
        assert self._whole is not None
        return self._whole

    @property
    def whole(self) -> Tensor | None:
        """What `behind` returns, once it was asked for, until it moves."""
        return self._whole

    def move(self, whole: Tensor, prefix: int, mask: Tensor | None) -> None:
        """Lie there from now on, (B, M, N) fp32, behind what beams see of the prefix, as `behind` has it."""
        whole[:, :, :prefix] = 0.0 if mask is None else mask.view(len(whole), 1, prefix)
        count = min(self.filled + self.beams, self._visible.shape[2])  # those that are open too, if there are any
        whole[:, :, prefix : prefix + count] = self._visible[:, :, :count]
        self._whole, self._visible = whole, whole[:, :, prefix:]

    def note_steps(self, steps: int, is_open: bool) -> None:
        """So many steps have been made, with all that `reorder` does behind them; is_open: as `have_open` leaves it."""
        self._note_times(steps)
        self.steps, self.filled = self.steps + steps, self.filled + steps * self.beams
        self._open = is_open

    def _note_times(self, steps: int) -> None:
        if self.times is not None:
            now = torch.arange(
                self.steps, self.steps + steps, device=self.times.device, dtype=torch.int64
            ).repeat_interleave(self.beams)
            self.times = torch.cat([self.times, now.expand(self.times.shape[0], -1)], 1)

    def note_step(self) -> None:
        """The slots of one more token are open."""
        self.steps, self.filled = self.steps + 1, self.filled + self.beams

    def next_slots(self) -> Table:
        """`room` as a table that gets the slots of one more token, with room for them."""
        self.make_room()
        return Table(self._visible, self.own.expand(self._visible.shape[0], -1, -1))

    def reorder(self, parents: Tensor) -> None:
        """Let beam m continue beam parents[b, m]; parents: (B, M) int64."""
        if self.times is None and self.steps < self.longest:
            extend_rows_([self.next_slots()], parents, self.steps)
            self.note_extended()
        else:
            reorder_rows_(self.visible, parents)

    def note_extended(self) -> None:
        """`next_slots` has been reordered and extended."""
        self._open = True

    def sweep(self) -> Tensor | None:
        """Give up slots that no beam sees, if it is time to look for them and they are half of all at least.

        Returns those that stay, (B, L) int64, in the order of time, and behind them slots of no beam where another
        sentence has more: to be told to every `LayerKV` of the text. None where all stay. On a CPU only: elsewhere
        the look at the device may cost more than it saves.
        """
        if self.beams == 1 or self.own.device.type != "cpu" or self.steps == 0 or self.steps % SWEEP:
            return None
        seen = self.visible.eq(0).any(1)
        longest = int(seen.sum(1).max()) if seen.numel() else 0
        if 2 * longest > self.filled:
            return None
        slots = _first_true(seen, longest)
        if self.times is None:
            self.times = torch.arange(self.filled, device=slots.device, dtype=torch.int64).div(
                self.beams, rounding_mode="floor"
            )
            self.times = self.times.expand(slots.shape[0], -1)
        self.times = self.times.gather(1, slots)
        self._visible[:, :, :longest] = self.visible.gather(2, slots[:, None].expand(-1, self.beams, -1))
        self.filled, self._open = longest, False
        return slots

    @property
    def slots(self) -> Tensor:
        """(B, M, T) int64: the slots of each beam's tokens, in their order."""
        return _first_true(self.visible.eq(0), self.steps)

    def keep(self, sentences: Tensor) -> None:
        """Keep these sentences (int64 indices) and forget the others."""
        self._visible, self._whole = self._visible.index_select(0, sentences), None
        self.times = None if self.times is None else self.times.index_select(0, sentences)


def room_for_steps(text: Sequence["LayerKV"], ancestry: Ancestry | None, most: int) -> int:
    """Have room for at most so many tokens of every beam, the first one's slots open; return for how many.

    text: keys and values of each layer, swept if that was due.
    """
    for layer in text:
        layer.make_room()
        most = min(most, (layer.room[0].shape[2] - layer.slots) // layer.beams)
    if ancestry is not None:
        ancestry.have_open()
        most = min(most, SWEEP - ancestry.steps % SWEEP, ancestry.steps_left)
    return most


def note_steps(text: Sequence["LayerKV"], ancestry: Ancestry | None, steps: int, is_open: bool) -> None:
    """So many of them have been made, and reordered; is_open: whether the slots of one more are open."""
    for layer in text:
        layer.note_step(steps)
    if ancestry is not None:
        ancestry.note_steps(steps, is_open)


def _first_true(chosen: Tensor, count: int) -> Tensor:
    """The indices (..., count) of what is true in chosen (..., N), ascending; behind them, if any, of what is not."""
    return chosen.to(torch.int8).sort(dim=-1, descending=True, stable=True).indices[..., :count]


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
        elements = sum(math.prod((*buffer.shape[:2], buffer.shape[3])) for buffer in (self._keys, self._values))
        return elements * self.slots * self._keys.element_size()

    def extend(self, keys: Tensor, values: Tensor) -> None:
        """Append tokens that every beam shares: keys, values (B, Hkv, L, D)."""
        added = keys.shape[2]
        prefix = self.prefix + added
        room = room_for(0, self.longest, keys, self._elements(keys) * self.expected)
        self._reserve(keys, values, prefix + room * self.expected, prefix + self.longest * self.expected)
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

    def append_turned(self, query: Tensor, key: Tensor, value: Tensor, rotation: Rotation) -> Tensor:
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
            keys, values = (buffer.new_empty(*buffer.shape[:2], 0, buffer.shape[3]) for buffer in self.room)
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
            least = steps + room_for(steps, self.longest, keys, self._elements(keys))
            self._reserve(keys, values, self.prefix + least, self.prefix + max(least, self.longest))
        if full or not self._blank:
            for buffer in self.room:
                buffer[:, :, self.slots :] = 0.0
            self._blank = True
        self.steps = self.filled = max(steps, self.steps)

    def _grow(self, keys: Tensor, values: Tensor, tokens: int = 1) -> None:
        """Make room for some more steps, of the shape of keys and values; for `tokens` of them at least."""
        elements = self._elements(keys) * self.beams
        more = room_for(self.steps, self.longest, keys, elements), self.longest - self.steps
        least, most = (self.slots + max(tokens, steps) * self.beams for steps in more)
        self._reserve(keys, values, least, most)

    def sweep(self, slots: Tensor) -> None:
        """Give up all slots of generated tokens but these, (B, L) int64, from `Ancestry.sweep`."""
        first, count = self.prefix, slots.shape[1]
        for buffer in (self._keys, self._values):
            assert buffer is not None
            index = slots[:, None, :, None].expand(-1, buffer.shape[1], -1, buffer.shape[3])
            buffer[:, :, first : first + count] = buffer[:, :, first : first + self.filled].gather(2, index)
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
            if moves is None or self.beams == 1:  # with one, others are handed the memory itself, and may hold on to it
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
            kv.transpose(1, 2)[sentence, index].flatten(0, 1).transpose(1, 2) for kv in (self.keys, self.values)
        )
        return keys, values

    def _reserve(self, keys: Tensor, values: Tensor, least: int, most: int) -> None:
        """Make room for `least` slots in all, of the shape that new keys and values have; up to `most` if it is free.

        What is outgrown is given up: what comes after it is larger, too.
        """
        rows = keys.shape[0] if self._keys is None else self._keys.shape[0]
        slots = self.memory.room(keys, self._elements(keys), least, most) if least < most else least
        slots = _aligned(slots, most, keys)
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
