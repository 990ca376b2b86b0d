"""Which KV slots each beam sees: when beams are reordered this table changes, and no keys or values move.

Source: FasterTransformer (indirection instead of reordering the cache).
"""

import torch
from torch import Tensor

from fastgen.decoding.kv_cache import room
from fastgen.ops.cache import reorder_rows_
from fastgen.ops.tables import Table, extend_rows_


class Ancestry:
    """Which slots of the generated tokens each beam sees, shared by all layers.

    `visible` is additive, (B, M, T*M) in float32: 0 at the slots of a beam's own ancestors, -inf elsewhere. Beams soon
    have all but their last tokens in common, so that most slots are no beam's any more: where they have been swept
    there are fewer. `own`: the same (M, M) of the slots of one token.
    """

    def __init__(self, sentences: int, beams: int, longest: int, device: torch.device) -> None:
        self.beams, self.longest = beams, longest
        self.steps = self.filled = 0  # tokens of a beam; slots of all
        self.times: Tensor | None = (
            None  # (B, F) int64, behind a sweep: the step that each slot is of
        )
        self._open = False  # whether the slots of the next token are open already
        self.own = torch.full(
            (beams, beams), -torch.inf, dtype=torch.float32, device=device
        ).fill_diagonal_(0.0)
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
            slots = (
                filled
                + room.room_for(self.steps, self.longest, self._visible, elements) * self.beams
            )
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
            slots = room.aligned(prefix + slots, prefix + self.longest * beams, self._visible)
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
        count = min(
            self.filled + self.beams, self._visible.shape[2]
        )  # those that are open too, if there are any
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

    def compact(self) -> Tensor | None:
        """Give up slots that no beam sees, if it is time to look for them and they are half of all at least.

        Returns those that stay, (B, L) int64, in the order of time, and behind them slots of no beam where another
        sentence has more: to be told to every `LayerKV` of the text. None where all stay. On a CPU only: elsewhere
        the look at the device may cost more than it saves.
        """
        if (
            self.beams == 1
            or self.own.device.type != "cpu"
            or self.steps == 0
            or self.steps % room.COMPACT_EVERY
        ):
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
        self._visible[:, :, :longest] = self.visible.gather(
            2, slots[:, None].expand(-1, self.beams, -1)
        )
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


def _first_true(chosen: Tensor, count: int) -> Tensor:
    """The indices (..., count) of what is true in chosen (..., N), ascending; behind them, if any, of what is not."""
    return chosen.to(torch.int8).sort(dim=-1, descending=True, stable=True).indices[..., :count]
