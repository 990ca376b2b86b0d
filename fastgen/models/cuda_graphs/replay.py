"""The decode steps of a text over memory that stays in place, so that one capture serves many of them.

From one step to the next three things change: the newest tokens, how many slots of keys and values are filled, and
which of them each beam sees. They are read on the device, from memory that stays where it is. Attention is given all
the room that keys and values have, and looks at what is filled. How long the prefix is, and which position comes behind
it, is read there as well: so a capture serves the calls that come to the same memory later (`graph_buffers`).

What has been captured holds until keys and values move, as they do when they need more room, or when sentences leave.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastgen.models.cuda_graphs import graph, graph_buffers
from fastgen.models.cuda_graphs.graph_buffers import GraphBuffers, Layer, PooledBuffers, Reads
from fastgen.models.memory.scratch import is_out_of_memory
from fastgen.models.runtime.decode_step import Context, DecoderStep
from fastgen.models.runtime.joint_step import joint_step
from fastgen.ops.cache import write_slots_
from fastgen.ops.rotation import Rotation, turn_into_slots_

WORTH = 8
"""Steps that must be left at least: a capture takes the time of two."""


Result = tuple[Tensor, Tensor | None]
"""Logits (R, V), and attention over the source (R, S) in their type where it is wanted."""


def not_captured(reason: object) -> str:
    """How a plan says that steps are not captured."""
    return f"decode steps are not captured as CUDA graphs: {reason}"


@dataclass
class _Fixed:
    """All the room of a layer; of the text the newest tokens are written where `start` says."""

    keys: Tensor
    values: Tensor
    beams: int
    start: Tensor

    def append(self, keys: Tensor, values: Tensor) -> None:
        write_slots_(self.keys, self.values, keys, values, self.start)

    def reserve(self, keys: Tensor, values: Tensor) -> None:
        """There is room."""

    def append_turned(
        self, query: Tensor, key: Tensor, value: Tensor, rotation: Rotation
    ) -> Tensor:
        return turn_into_slots_(query, key, value, rotation, self.keys, self.values, self.start)

    def append_asking(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.append(keys, values)
        return self.keys, self.values


class Replay:
    """The steps of a text.

    Args:
        longest: steps at most.
    """

    def __init__(self, step: DecoderStep, text: Sequence[Layer], longest: int) -> None:
        self.step, self.text, self.longest = step, text, longest
        self._alone, self._lent = JointReplay(), graph.BorrowedPool()
        self._seat: PooledBuffers | None = None
        self._ground: GraphBuffers | None = None
        self._held: tuple[object, ...] = ()

    @property
    def refused(self) -> str | None:
        """That steps are not captured and why, found when it was tried."""
        return self._alone.refused

    def able(self, rows: int) -> bool:
        """Whether the next step, of so many rows, is to be run here."""
        known = self._ground is not None and len(self._ground.tokens) == rows
        return self.refused is None and (known or self.longest - self.text[0].steps >= WORTH)

    def __call__(self, tokens: Tensor, reads: Reads) -> Result:
        """Return logits (R, V) and attention over the source (R, S) or None, for the newest tokens (R,) int64.

        The next step overwrites them.

        Args:
            reads: where everything lies, which may move.
        """
        return self._alone([self.step], [[self.open(tokens, reads)]])[0][0]

    def open(self, tokens: Tensor, reads: Reads) -> "Opened":
        """Have a step's numbers and tokens where the last one's were; arguments as `__call__`'s."""
        ground, first = self._ground, self.text[0]
        for layer in self.text:
            layer.make_room(self.step.tokens)
        if ground is None or not graph.same(reads.held, self._held):
            ground = self._ground = self._settle(reads)
            self._held = reads.held
            before, at = first.prefix, reads.first if isinstance(reads.first, int) else 0
            device, beams = tokens.device, first.beams
            self._offsets = torch.tensor(
                [before, before + beams, before + 1, at, before], device=device, dtype=torch.int64
            )
            self._slopes = torch.tensor([beams, beams, 1, 1, 0], device=device, dtype=torch.int64)
        ground.tokens.copy_(tokens)
        torch.add(
            self._offsets, self._slopes, alpha=first.filled // first.beams, out=ground.numbers
        )
        return Opened(
            self, ground, functools.partial(self._context, ground, first.beams, reads.watched)
        )

    def close(self) -> None:
        """A step that was opened has been made."""
        for layer in self.text:
            layer.note_step()

    def finished(self, logits: Tensor, weights: Tensor | None) -> Result:
        """What `__call__` returns, of what a step has made."""
        return logits, None if weights is None else weights.to(logits.dtype)

    def lose(self) -> None:
        """What is captured here is not to serve anybody else."""
        self._seat = None

    def _settle(self, reads: Reads) -> GraphBuffers:
        """Where the steps to come run: in a seat, or where everything lies."""
        seat, before = self._seat, self._seat
        if seat is None or not seat.has_room_for(reads):
            seat = graph_buffers.borrow(self.step, reads)
        self._seat = seat
        try:
            return GraphBuffers.own(reads, self._lent) if seat is None else seat.take(reads)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            graph_buffers.release()
            self._seat = None
            return GraphBuffers.own(reads, self._lent)
        finally:
            if before is not None and before is not self._seat:
                graph_buffers.give_back(before)

    def _context(self, ground: GraphBuffers, beams: int, watched: int | None) -> Context:
        start, seen, length, at, prefix = ground.numbers.split(1)
        position = at if ground.first is None else (ground.first + at).repeat_interleave(beams)
        mask = None if ground.mask is None else ground.mask[:, None].to(self.step.dtype)
        text, source = (
            [_Fixed(*pair, beams, start) for pair in of] for of in (ground.text, ground.source)
        )
        return Context(
            ground.sentences, length, prefix, position, text, source, mask, ground.source_mask, seen=seen,
            watched=watched,
        )  # fmt: skip

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # where it was never made
            if self._seat is not None:
                graph_buffers.give_back(self._seat)


@dataclass(frozen=True)
class Opened:
    """A step of a text that is about to be made.

    Attributes:
        context: makes what the step reads, over memory that stays.
    """

    replay: Replay
    ground: GraphBuffers
    context: Callable[[], Context]


class JointReplay:
    """The steps of several texts in one (`joint_step`), captured for as long as none moves, comes or leaves.

    Attributes:
        refused: that such steps are not captured and why, found when it was tried.
    """

    def __init__(self) -> None:
        self.refused: str | None = None
        self._repeated = graph.CapturedFunction()

    def __call__(
        self, decoders: Sequence[DecoderStep], texts: Sequence[Sequence[Opened]]
    ) -> list[list[Result]]:
        """Return for each text what `Replay` does, of each of the decoders, for which its step is open in `texts`."""
        opened = [each for of_text in texts for each in of_text]
        body = functools.partial(self._body, decoders, texts)
        tokens = [each.ground.tokens for each in opened]  # which lie elsewhere, where anything does
        repeated = opened[0].ground.repeated if len(opened) == 1 else self._repeated
        try:
            result = repeated(body, tokens[0].device, *tokens)
        except graph.NotCaptured as reason:
            self.refused = not_captured(reason)
            for each in opened:
                each.replay.lose()
            result = body()
        for each in opened:
            each.replay.close()
        return result

    def forget(self) -> None:
        """Hold on to no text: one of them is over."""
        self._repeated.forget()

    def _body(
        self, decoders: Sequence[DecoderStep], texts: Sequence[Sequence[Opened]]
    ) -> list[list[Result]]:
        made = [
            self._of_decoder(*each) for each in zip(decoders, zip(*texts, strict=True), strict=True)
        ]
        return [list(of_text) for of_text in zip(*made, strict=True)]

    def _of_decoder(self, decoder: DecoderStep, texts: Sequence[Opened]) -> list[Result]:
        made = joint_step(
            decoder, [text.ground.tokens for text in texts], [text.context() for text in texts]
        )
        return [text.replay.finished(*each) for text, each in zip(texts, made, strict=True)]
