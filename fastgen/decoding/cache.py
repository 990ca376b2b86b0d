"""The keys and values of a decode step, stored once per sentence.

One buffer per layer holds, for every sentence, the prefix all its beams share (the prompt of a decoder, or its start
tokens) and behind it the slots of the generated tokens: the step t writes slots S + t*M + m, one per beam m.
Nothing is moved when beams are reordered. `Ancestry` says which slots a beam sees, and one attention call serves all
the beams of a sentence (`ops.beam_attention`).

Sources: FastSeq (shared prefix), FasterTransformer (indirection instead of reorder).
"""

import torch
from torch import Tensor

from fastgen.models.memory import Memory
from fastgen.ops.cache import move_sentences_, reorder_rows_, write_slots_

_GROWTH = 64
"""Decode steps for which a buffer gets room at least, when it grows and the text may become that long."""


def _room(steps: int, longest: int) -> int:
    """Steps to make room for beyond the `steps` that are filled: half as many again, and never beyond `longest`."""
    return max(1, min(max(_GROWTH, steps // 2), longest - steps))


class Ancestry:
    """Which slots of the generated tokens each beam sees, shared by all layers.

    `visible` is additive, (B, M, T*M) in float32: 0 at the slots of a beam's own ancestors, -inf elsewhere.
    """

    def __init__(self, sentences: int, beams: int, longest: int, device: torch.device) -> None:
        self.beams, self.longest = beams, longest
        self.steps = 0
        self._own = torch.full((beams, beams), -torch.inf, device=device).fill_diagonal_(0.0)
        self._visible = torch.empty(sentences, beams, 0, device=device)

    @property
    def visible(self) -> Tensor:
        return self._visible[:, :, : self.steps * self.beams]

    def begin_step(self) -> None:
        """Open the slots of one more token: each beam sees its own."""
        filled, total = self.steps * self.beams, (self.steps + 1) * self.beams
        if self._visible.shape[2] < total:
            slots = filled + _room(self.steps, self.longest) * self.beams
            grown = self._visible.new_empty(*self._visible.shape[:2], slots)
            grown[:, :, :filled] = self._visible[:, :, :filled]
            self._visible = grown
        self._visible[:, :, filled:total] = self._own
        self.steps += 1

    def reorder(self, parents: Tensor) -> None:
        """Let beam m continue beam parents[b, m]; parents: (B, M) int64."""
        filled = self.steps * self.beams
        reorder_rows_(self._visible[:, :, :filled], parents)

    def keep(self, sentences: Tensor) -> None:
        """Keep these sentences (int64 indices) and forget the others."""
        self._visible = self._visible.index_select(0, sentences)


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
        self.steps = 0
        self.beams = 1
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens that one beam sees."""
        return self.prefix + self.steps

    @property
    def slots(self) -> int:
        return self.prefix + self.steps * self.beams

    @property
    def keys(self) -> Tensor:
        """(B, Hkv, S + T*M, D), a view."""
        assert self._keys is not None
        return self._keys[:, :, : self.slots]

    @property
    def values(self) -> Tensor:
        assert self._values is not None
        return self._values[:, :, : self.slots]

    @property
    def nbytes(self) -> int:
        """Bytes of the slots in use, without the room to grow."""
        if self._keys is None or self._values is None:
            return 0
        return (self.keys.numel() + self.values.numel()) * self._keys.element_size()

    def extend(self, keys: Tensor, values: Tensor) -> None:
        """Append tokens that every beam shares: keys, values (B, Hkv, L, D)."""
        added = keys.shape[2]
        self._reserve(keys, values, self.prefix + added + _room(0, self.longest) * self.expected)
        assert self._keys is not None
        assert self._values is not None
        self._keys[:, :, self.prefix : self.prefix + added] = keys
        self._values[:, :, self.prefix : self.prefix + added] = values
        self.prefix += added

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Write one token of every beam into its slot: keys, values (B*M, Hkv, 1, D)."""
        start, end = self.slots, self.slots + self.beams
        if self._keys is None or self._keys.shape[2] < end:
            self._reserve(keys, values, start + _room(self.steps, self.longest) * self.beams)
        assert self._keys is not None
        assert self._values is not None
        write_slots_(self._keys, self._values, keys, values, start)
        self.steps += 1

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

    def of_beams(self, ancestors: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values as a plain cache holds them, (B*M, Hkv, S + T, D).

        ancestors: (B, M, T) int64, the beam whose slot holds token t of beam m.
        """
        b, m, steps = ancestors.shape
        prefix = torch.arange(self.prefix, device=ancestors.device).expand(b, m, -1)
        step = torch.arange(steps, device=ancestors.device) * self.beams + self.prefix
        index = torch.cat([prefix, ancestors + step], 2)
        sentence = torch.arange(b, device=ancestors.device)[:, None, None]
        keys, values = (
            kv.transpose(1, 2)[sentence, index].flatten(0, 1).transpose(1, 2) for kv in (self.keys, self.values)
        )
        return keys, values

    def _reserve(self, keys: Tensor, values: Tensor, slots: int) -> None:
        """Make room for `slots` in all, of the shape that new keys and values have."""
        held = self.slots
        for name, old, new in (("_keys", self._keys, keys), ("_values", self._values, values)):
            shape = new.shape[0] if old is None else old.shape[0], new.shape[1], slots, new.shape[3]
            buffer = self.memory.take(new, *shape)
            if old is not None:
                buffer[:, :, :held] = old[:, :, :held]
            setattr(self, name, buffer)
