"""The ancestry of beams: a table of the KV slots that each beam attends to.

Reordering beams updates this table; keys and values stay in place.

Source: FasterTransformer (indirection instead of reordering the cache).
"""

import torch
from torch import Tensor

from fastgen.decoding.kv_cache import room
from fastgen.ops.cache import reorder_rows_
from fastgen.ops.tables import Table, extend_rows_


class Ancestry:
    """The slots of generated tokens that each beam sees, shared by all layers.

    Beams soon have all but their last tokens in common, so no beam sees most of the slots any more.
    `compact` frees those slots, after which there are fewer than T*M of them.

    Args:
        sentences: Batch size B.
        beams: Beams per sentence M.
        longest: Maximum number of generated tokens T.
        device: Device of the tables.

    Attributes:
        steps: Generated tokens per beam.
        filled: Slots in use, of all beams of a sentence together.
        times: (B, F) int64, the decode step that filled each slot; None before the first
            compaction, while slot t * M + m belongs to step t.
        own: (M, M) fp32 additive mask of the slots of one token: each beam sees its own.
    """

    def __init__(self, sentences: int, beams: int, longest: int, device: torch.device) -> None:
        self.beams, self.longest = beams, longest
        self.steps = self.filled = 0
        self.slot_steps: Tensor | None = None
        self._open = False  # Whether the table already has the slots of the next token.
        self.own = torch.full(
            (beams, beams), -torch.inf, dtype=torch.float32, device=device
        ).fill_diagonal_(0.0)
        self._visible = torch.empty(sentences, beams, 0, dtype=torch.float32, device=device)
        self._whole: Tensor | None = None  # (B, M, prefix + F), of which `_visible` is a view.

    @property
    def visible(self) -> Tensor:
        """Additive mask (B, M, F): 0 at the slots of a beam's ancestors, -inf elsewhere.

        It is fp32, or has the dtype that `behind` or `move` gave it.
        """
        return self._visible[:, :, : self.filled]

    @property
    def capacity_buffers(self) -> Tensor:
        """`visible` including its unused capacity, (B, M, capacity)."""
        return self._visible

    @property
    def steps_left(self) -> int:
        """Number of decode steps for which the table has room without growing."""
        return (self._visible.shape[2] - self.filled) // self.beams

    def ensure_capacity(self) -> None:
        """Grow the table, if necessary, to hold one more token of every beam."""
        filled = self.filled
        if self._visible.shape[2] < filled + self.beams:
            elements = self._visible.shape[0] * self.beams**2
            slots = (
                filled
                + room.steps_to_reserve(self.steps, self.longest, self._visible, elements)
                * self.beams
            )
            grown = self._visible.new_empty(*self._visible.shape[:2], slots)
            grown[:, :, :filled] = self.visible
            self._visible, self._whole = grown, None

    def begin_step(self) -> None:
        """Add the slots of one more token, of which each beam sees its own."""
        self.have_open()
        self._open = False
        self._note_times(1)
        self.note_step()

    def have_open(self) -> None:
        """Add the slots of one more token without counting them in `filled`."""
        rows, own, _ = self.next_slots()
        if not self._open:
            rows[:, :, self.filled : self.filled + self.beams] = own
        self._open = True

    def behind(self, prefix: int, mask: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        """Return `capacity_buffers` preceded by the mask of the prefix, as one tensor.

        `capacity_buffers` becomes a view of the returned tensor.

        Args:
            prefix: Length of the prefix in tokens.
            mask: (B, .., prefix) additive mask, the same in every call; None if all of the prefix
                is visible.
            dtype: dtype of the table from now on; None for its present one.

        Returns:
            (B, M, prefix + capacity).
        """
        if self._whole is None:
            sentences, beams, slots = self._visible.shape
            slots = room.aligned(prefix + slots, prefix + self.longest * beams, self._visible)
            self.move(self._visible.new_zeros(sentences, beams, slots, dtype=dtype), prefix, mask)
        assert self._whole is not None
        return self._whole

    @property
    def whole(self) -> Tensor | None:
        """The tensor of `behind` or `move`, prefix included.

        None before the first call of either, and after the table has grown or lost sentences.
        """
        return self._whole

    def move(self, whole: Tensor, prefix: int, mask: Tensor | None) -> None:
        """Move the table into a caller-provided buffer, behind the mask of the prefix.

        Args:
            whole: (B, M, N) buffer, whose dtype the table has from now on.
            prefix: Length of the prefix in tokens.
            mask: Mask of the prefix, as in `behind`.
        """
        whole[:, :, :prefix] = 0.0 if mask is None else mask.view(len(whole), 1, prefix)
        # Includes slots that `have_open` has added but not counted.
        count = min(self.filled + self.beams, self._visible.shape[2])
        whole[:, :, prefix : prefix + count] = self._visible[:, :, :count]
        self._whole, self._visible = whole, whole[:, :, prefix:]

    def note_steps(self, steps: int, is_open: bool) -> None:
        """Count decode steps, and their reordering, that were written to the table elsewhere.

        Args:
            steps: Number of decode steps.
            is_open: Whether the table already has the slots of the next token (`have_open`).
        """
        self._note_times(steps)
        self.steps, self.filled = self.steps + steps, self.filled + steps * self.beams
        self._open = is_open

    def _note_times(self, steps: int) -> None:
        if self.slot_steps is not None:
            now = torch.arange(
                self.steps, self.steps + steps, device=self.slot_steps.device, dtype=torch.int64
            ).repeat_interleave(self.beams)
            self.slot_steps = torch.cat(
                [self.slot_steps, now.expand(self.slot_steps.shape[0], -1)], 1
            )

    def note_step(self) -> None:
        """Count the slots of one more token, which are already in the table."""
        self.steps, self.filled = self.steps + 1, self.filled + self.beams

    def next_slots(self) -> Table:
        """Return a table to which one more token can be added, grown if necessary."""
        self.ensure_capacity()
        return Table(self._visible, self.own.expand(self._visible.shape[0], -1, -1))

    def reorder(self, parents: Tensor) -> None:
        """Let beam m of sentence b continue beam parents[b, m]; parents is (B, M) int64."""
        if self.slot_steps is None and self.steps < self.longest:
            extend_rows_([self.next_slots()], parents, self.steps)
            self.note_extended()
        else:
            reorder_rows_(self.visible, parents)

    def note_extended(self) -> None:
        """Record that the table of `next_slots` has been reordered and extended."""
        self._open = True

    def compact(self) -> Tensor | None:
        """Free the slots that no beam sees, if a compaction is due and removes at least half.

        It runs on a CPU only: on a GPU the synchronization may cost more than it saves.

        Returns:
            (B, L) int64, the slots that stay in chronological order, padded with unused slots in
            sentences that have fewer. Every `LayerKV` of the self-attention has to be compacted
            with it. None if all slots stay.
        """
        if (
            self.beams == 1
            or self.own.device.type != "cpu"
            or self.steps == 0
            or self.steps % room.COMPACT_EVERY
        ):
            return None
        is_seen = self.visible.eq(0).any(1)
        longest = int(is_seen.sum(1).max()) if is_seen.numel() else 0
        if 2 * longest > self.filled:
            return None
        slots = _first_true(is_seen, longest)
        if self.slot_steps is None:
            self.slot_steps = torch.arange(self.filled, device=slots.device, dtype=torch.int64).div(
                self.beams, rounding_mode="floor"
            )
            self.slot_steps = self.slot_steps.expand(slots.shape[0], -1)
        self.slot_steps = self.slot_steps.gather(1, slots)
        self._visible[:, :, :longest] = self.visible.gather(
            2, slots[:, None].expand(-1, self.beams, -1)
        )
        self.filled, self._open = longest, False
        return slots

    @property
    def slots(self) -> Tensor:
        """(B, M, T) int64, the slots of each beam's tokens in chronological order."""
        return _first_true(self.visible.eq(0), self.steps)

    def keep(self, sentences: Tensor) -> None:
        """Keep only the given sentences, int64 indices into the current batch."""
        self._visible, self._whole = self._visible.index_select(0, sentences), None
        self.slot_steps = (
            None if self.slot_steps is None else self.slot_steps.index_select(0, sentences)
        )


def _first_true(chosen: Tensor, count: int) -> Tensor:
    """Return the ascending indices of true elements, then those of false ones.

    Args:
        chosen: (..., N) bool.
        count: Number of indices to return.

    Returns:
        (..., count) int64.
    """
    return chosen.to(torch.int8).sort(dim=-1, descending=True, stable=True).indices[..., :count]
