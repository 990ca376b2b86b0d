"""A KV cache that stores keys and values once per sentence.

One buffer per layer holds, for every sentence, the prefix that all its beams share (the prompt of a
decoder, or its start tokens), followed by the slots of the generated tokens. Decode step t writes
slots S + t*M + m, one per beam m. Reordering beams moves nothing: `ancestry.Ancestry` records which
slots a beam sees, and one attention call serves all beams of a sentence (`ops.beam_attention`).

Source: FastSeq (shared prefix).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastgen.decoding.kv_cache import room
from fastgen.decoding.kv_cache.ancestry import Ancestry
from fastgen.models.memory.scratch import ScratchPool
from fastgen.ops.cache import move_sentences_, write_slots_
from fastgen.ops.rotation import Rotation, rotate_into_slots_


class LayerKV:
    """Keys and values of one attention layer: a shared prefix, then M slots per decode step.

    Args:
        longest: Maximum number of decode steps.
        memory: Allocator of the buffers.
        expected: Beams M of the decode steps to come, for which `extend` reserves room; 0 if only
            the prefix is stored.
        prompt: Tokens of the prefix, for which `extend` reserves room.

    Attributes:
        prefix: Length of the shared prefix S in tokens.
        steps: Generated tokens per beam.
        filled: Slots of generated tokens in use, of all beams of a sentence together.
        beams: Beams per sentence M.
        common: Keys and values (1, Hkv, C, D) of the first tokens of all sentences, stored once;
            None if every sentence has its own. `keys`, `values` and `capacity_buffers` end this
            state by `expand`; `own` and `joined` do not.
        is_private: Whether no caller has a view of the buffers, so that their rows may move.
    """

    def __init__(
        self, longest: int, memory: ScratchPool, expected: int = 0, prompt: int = 0
    ) -> None:
        self.longest, self.memory, self.expected = longest, memory, expected
        self.prompt = prompt
        self.prefix = 0
        self.steps = self.filled = 0
        self.beams = 1
        self.is_private = False
        self.common: tuple[Tensor, Tensor] | None = None
        self._blank = False  # Whether the unused capacity is filled with zeros.
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of tokens that one beam sees."""
        return self.prefix + self.steps

    @property
    def slots(self) -> int:
        """Number of slots in use, prefix included."""
        return self.prefix + self.filled

    @property
    def keys(self) -> Tensor:
        """Keys in use, a view (B, Hkv, S + T*M, D)."""
        return self.capacity_buffers[0].narrow(2, 0, self.slots)

    @property
    def values(self) -> Tensor:
        """Values in use, a view (B, Hkv, S + T*M, D)."""
        return self.capacity_buffers[1].narrow(2, 0, self.slots)

    @property
    def nbytes(self) -> int:
        """Bytes of the slots in use, without unused capacity."""
        if self._keys is None:
            return 0
        return self.slot_nbytes * (len(self._keys) * self.own_slots + self._apart)

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one slot of one sentence."""
        shapes = (buffer.shape for buffer in self.own)
        return sum(shape[1] * shape[3] for shape in shapes) * self.own[0].element_size()

    @property
    def own_slots(self) -> int:
        """Number of slots in use that every sentence has."""
        return self.slots - self._apart

    @property
    def _apart(self) -> int:
        """Number of slots that are stored once for all sentences, C."""
        return 0 if self.common is None else self.common[0].shape[2]

    def share(self, keys: Tensor, values: Tensor) -> None:
        """Begin the prefix with tokens of all sentences; keys and values are (1, Hkv, C, D)."""
        assert self.prefix == 0, f"{self.prefix} tokens"
        self.common, self.prefix = (keys.contiguous(), values.contiguous()), keys.shape[2]

    def joined(self) -> tuple[Tensor, Tensor]:
        """Return keys and values in use, (B, Hkv, N, D) each, copied if there are common ones."""
        if self.common is None:
            return self.keys, self.values
        keys, values = (
            self._with_common(common, buffer, self.slots)
            for common, buffer in zip(self.common, self.own, strict=True)
        )
        return keys, values

    def _with_common(self, common: Tensor, buffer: Tensor, slots: int) -> Tensor:
        """Return a copy (B, Hkv, slots, D) of common keys and a buffer's, with room for more."""
        first = common.shape[2]
        copy = self.memory.take(buffer, len(buffer), buffer.shape[1], slots, buffer.shape[3])
        copy[:, :, :first] = common
        copy[:, :, first : self.slots] = buffer[:, :, : self.own_slots]
        return copy

    def extend(self, keys: Tensor, values: Tensor) -> None:
        """Append L tokens that all beams share; keys and values are (B, Hkv, L, D)."""
        added = keys.shape[2]
        prefix = max(self.prefix + added, self.prompt)
        steps = room.steps_to_reserve(0, self.longest, keys, self._elements(keys) * self.expected)
        least = prefix - self._apart + steps * self.expected
        if self._keys is None or self._keys.shape[2] < least:
            self._reserve(keys, values, least, least + (self.longest - steps) * self.expected)
        first = self.prefix - self._apart
        for buffer, new in zip(self.own, (keys, values), strict=True):
            buffer[:, :, first : first + added] = new
        self.prefix += added

    @property
    def begun(self) -> bool:
        """Whether the buffers are allocated, so that their shape is known."""
        return self._keys is not None

    @property
    def capacity_buffers(self) -> tuple[Tensor, Tensor]:
        """Key and value buffers including their unused capacity, (B, Hkv, capacity, D) each."""
        self.expand()
        return self.own

    def expand(self) -> None:
        """Store the common tokens for every sentence, if they are stored once."""
        if self.common is None:
            return
        own, slots = self.own, self._apart + self.own[0].shape[2]
        self._keys, self._values = (
            self._with_common(common, buffer, slots)
            for common, buffer in zip(self.common, own, strict=True)
        )
        self.common = None
        for buffer in own:
            self.memory.forget(buffer)

    @property
    def own(self) -> tuple[Tensor, Tensor]:
        """Key and value buffers as in `capacity_buffers`, but without the common slots."""
        assert self._keys is not None
        assert self._values is not None
        return self._keys, self._values

    @property
    def free_slots(self) -> int:
        """Number of slots in the buffers that are not in use."""
        return self.own[0].shape[2] - self.own_slots

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Write one token of every beam into its slot; keys and values are (B*M, Hkv, 1, D)."""
        self._open(keys, values)
        write_slots_(*self.own, keys, values, self.own_slots)
        self.note_step()

    def reserve(self, keys: Tensor, values: Tensor) -> None:
        """Reserve the slots of one token of every beam, which the attention kernel writes.

        Args:
            keys: (B*M, Hkv, 1, D), as in `append`; only the shape, dtype and device are read.
            values: As `keys`.
        """
        self._open(keys, values)
        self.note_step()

    def _open(self, keys: Tensor, values: Tensor) -> None:
        if self._keys is None:
            self._grow(keys, values)
        self.ensure_capacity()

    def append_rotated(
        self, query: Tensor, key: Tensor, value: Tensor, rotation: Rotation
    ) -> Tensor:
        """Rotate queries and keys, and append the rotated keys and the values.

        Args:
            query: (B*M, H, D).
            key: (B*M, Hkv, D).
            value: (B*M, Hkv, D).
            rotation: Rotary position embedding of the token.

        Returns:
            The rotated queries (B*M, H, D).
        """
        self._open(key[:, :, None], value[:, :, None])
        turned = rotate_into_slots_(query, key, value, rotation, *self.capacity_buffers, self.slots)
        self.note_step()
        return turned

    def append_asking(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append one token and one mask token of every beam; the next token overwrites the mask.

        Args:
            keys: (B * 2 * M, Hkv, 1, D), for each sentence its M tokens, then its M masks.
            values: As `keys`.

        Returns:
            Keys and values including tokens and masks, views (B, Hkv, S + (T + 1) * M, D), where T
            counts the new token.
        """
        self.ensure_capacity(2)
        write_slots_(*self.capacity_buffers, keys, values, self.slots)
        self.note_step()
        seen = self.slots + self.beams
        return self.capacity_buffers[0][:, :, :seen], self.capacity_buffers[1][:, :, :seen]

    def ensure_capacity(self, tokens: int = 1) -> None:
        """Make room for `tokens` more tokens of every beam.

        Keys and values move to larger buffers if the current ones are too small.
        """
        if self.free_slots < tokens * self.beams:
            keys, values = (
                buffer.new_empty(*buffer.shape[:2], 0, buffer.shape[3]) for buffer in self.own
            )
            self._grow(keys, values, tokens)

    def move(self, keys: Tensor, values: Tensor) -> None:
        """Move keys and values into caller-provided buffers, (B, Hkv, N, D) each.

        A buffer that is in use already is not copied.
        """
        for old, new in zip(self.capacity_buffers, (keys, values), strict=True):
            if old.data_ptr() != new.data_ptr():
                new[:, :, : self.slots] = old[:, :, : self.slots]
                self.memory.forget(old)
        self._keys, self._values = keys, values

    def note_step(self, steps: int = 1) -> None:
        """Count `steps` tokens of every beam as written."""
        self.steps, self.filled = self.steps + steps, self.filled + steps * self.beams

    def reach(self, steps: int) -> None:
        """Make room for `steps` tokens of one-beam texts, and count them as written.

        Slots are zero until they are written.
        """
        keys, values = self.capacity_buffers
        full = keys.shape[2] < self.prefix + steps
        if full:
            least = steps + room.steps_to_reserve(steps, self.longest, keys, self._elements(keys))
            self._reserve(keys, values, self.prefix + least, self.prefix + max(least, self.longest))
        if full or not self._blank:
            for buffer in self.capacity_buffers:
                buffer[:, :, self.slots :] = 0.0
            self._blank = True
        self.steps = self.filled = max(steps, self.steps)

    def _grow(self, keys: Tensor, values: Tensor, tokens: int = 1) -> None:
        """Grow the buffers by at least `tokens` decode steps, with the shape of keys and values."""
        elements = self._elements(keys) * self.beams
        more = (
            room.steps_to_reserve(self.steps, self.longest, keys, elements),
            self.longest - self.steps,
        )
        least, most = (self.own_slots + max(tokens, steps) * self.beams for steps in more)
        self._reserve(keys, values, least, most)

    def compact(self, slots: Tensor) -> None:
        """Keep only these slots of generated tokens, (B, L) int64 from `Ancestry.compact`."""
        first, count = self.prefix - self._apart, slots.shape[1]
        for buffer in (self._keys, self._values):
            assert buffer is not None
            index = slots[:, None, :, None].expand(-1, buffer.shape[1], -1, buffer.shape[3])
            buffer[:, :, first : first + count] = buffer[:, :, first : first + self.filled].gather(
                2, index
            )
        self.filled = count

    def rewind(self, steps: int) -> None:
        """Drop all but the first `steps` generated tokens of one-beam texts."""
        assert self.beams == 1, f"{self.beams} beams"
        self.steps = self.filled = steps

    def undo_steps(self) -> None:
        """Drop all generated tokens; the prefix stays."""
        self.steps = self.filled = 0

    def keep(self, sentences: Tensor, moves: tuple[Tensor, Tensor] | None) -> None:
        """Keep only the given sentences.

        Args:
            sentences: int64 indices of the sentences to keep, in their new order.
            moves: Target places, and the sentences from the end of the batch that move there;
                all other kept sentences stay in place. None for any other order.
        """
        assert self._keys is not None
        assert self._values is not None
        kept: list[Tensor] = []
        for buffer in (self._keys, self._values):
            # With one beam, callers may have got views of the buffers, which are copied then.
            is_movable = self.beams > 1 or (self.is_private and buffer.device.type == "cpu")
            if moves is None or not is_movable:
                kept.append(buffer.index_select(0, sentences))
            else:
                move_sentences_(buffer[:, :, : self.own_slots], *moves)
                kept.append(buffer[: sentences.shape[0]])
        self._keys, self._values = kept

    def of_beams(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values with one row per beam, as a toolkit's cache stores them.

        Args:
            slots: (B, M, T) int64, the slots of each beam's tokens (`Ancestry.slots`).

        Returns:
            Keys and values, (B*M, Hkv, S + T, D) each.
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
        """Allocate buffers of at least `least` slots in total, and move keys and values there.

        They get up to `most` slots if the allocator has free memory of that size. The old buffers
        are released, because later buffers are larger still.
        """
        rows = keys.shape[0] if self._keys is None else self._keys.shape[0]
        slots = (
            self.memory.capacity(keys, self._elements(keys), least, most) if least < most else least
        )
        slots = room.aligned(slots, most, keys)
        self._keys = self._moved(self._keys, keys, rows, slots)
        self._values = self._moved(self._values, values, rows, slots)

    def _elements(self, keys: Tensor) -> int:
        """Return the elements that one slot takes in the keys of the whole batch."""
        rows = keys.shape[0] if self._keys is None else self._keys.shape[0]
        return rows * keys.shape[1] * keys.shape[3]

    def _moved(self, old: Tensor | None, new: Tensor, rows: int, slots: int) -> Tensor:
        """Return a new buffer with room for `slots`, holding the content of the old one."""
        buffer = self.memory.take(new, rows, new.shape[1], slots, new.shape[3])
        if old is not None:
            buffer[:, :, : self.own_slots] = old[:, :, : self.own_slots]
            self.memory.forget(old)
        return buffer


def room_for_steps(text: Sequence["LayerKV"], ancestry: Ancestry | None, most: int) -> int:
    """Make room for up to `most` decode steps, and add the slots of the first one to the ancestry.

    Args:
        text: Keys and values of each self-attention layer, after a compaction that was due.
        ancestry: Ancestry of the beams; None if there is none.
        most: Maximum number of decode steps.

    Returns:
        The number of decode steps until a buffer is full or the next compaction is due.
    """
    for layer in text:
        layer.ensure_capacity()
        most = min(most, layer.free_slots // layer.beams)
    if ancestry is not None:
        ancestry.have_open()
        most = min(
            most, room.COMPACT_EVERY - ancestry.steps % room.COMPACT_EVERY, ancestry.steps_left
        )
    return most


def note_steps(
    text: Sequence["LayerKV"], ancestry: Ancestry | None, steps: int, is_open: bool
) -> None:
    """Count decode steps that were run, and reordered, outside of these classes.

    Args:
        text: Keys and values of each self-attention layer.
        ancestry: Ancestry of the beams; None if there is none.
        steps: Number of decode steps.
        is_open: Whether the ancestry already has the slots of the next token.
    """
    for layer in text:
        layer.note_step(steps)
    if ancestry is not None:
        ancestry.note_steps(steps, is_open)
