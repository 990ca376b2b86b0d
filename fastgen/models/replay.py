"""The decode steps of a text over memory that stays in place, so that one capture serves many of them.

From one step to the next three things change: the newest tokens, how many slots of keys and values are filled, and
which of them each beam sees. They are read on the device, from memory that stays where it is. Attention is given all
the room that keys and values have, and looks at what is filled.

What has been captured holds until keys and values move, as they do when they need more room, or when sentences leave.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fastgen.models import graph
from fastgen.models.joint import joint_step
from fastgen.models.step import Context, DecoderStep, KeysAndValues
from fastgen.ops.cache import write_slots_

WORTH = 8
"""Steps that must be left at least: a capture takes the time of two."""


Result = tuple[Tensor, Tensor | None]
"""Logits (R, V), and attention over the source (R, S) in their type where it is wanted."""


def not_captured(reason: object) -> str:
    """How a plan says that steps are not captured."""
    return f"decode steps are not captured as CUDA graphs: {reason}"


class Growing(KeysAndValues, Protocol):
    """A layer of the cache with room for tokens to come."""

    steps: int
    filled: int

    @property
    def room(self) -> tuple[Tensor, Tensor]: ...
    def make_room(self, tokens: int = 1) -> None: ...
    def note_step(self) -> None: ...


@dataclass
class _Fixed:
    """All the room of a layer of the text; the newest tokens are written where `start` says."""

    keys: Tensor
    values: Tensor
    beams: int
    start: Tensor

    def append(self, keys: Tensor, values: Tensor) -> None:
        write_slots_(self.keys, self.values, keys, values, self.start)

    def append_asking(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.append(keys, values)
        return self.keys, self.values


class Replay:
    """The steps of a text.

    Args:
        longest: steps at most.
        wide: whether logits come as fp32.
    """

    def __init__(self, step: DecoderStep, text: Sequence[Growing], longest: int, wide: bool = False) -> None:
        self.step, self.text, self.longest, self.wide = step, text, longest, wide
        self._alone = JointReplay()
        self._tokens: Tensor | None = None
        self._numbers: Tensor | None = None  # steps so far, slots that are filled, and those behind this step

    @property
    def refused(self) -> str | None:
        """That steps are not captured and why, found when it was tried."""
        return self._alone.refused

    def able(self, rows: int) -> bool:
        """Whether the next step, of so many rows, is to be run here."""
        known = self._tokens is not None and len(self._tokens) == rows
        return self.refused is None and (known or self.longest - self.text[0].steps >= WORTH)

    def __call__(self, tokens: Tensor, make: Callable[[Tensor], Context], *inputs: Tensor | None) -> Result:
        """Return logits (R, V) and attention over the source (R, S) or None, for the newest tokens (R,) int64.

        The next step overwrites them.

        Args:
            make: says what a step reads, but for keys and values of the text, from (1,) int64, how many tokens a beam
                has generated before it.
            inputs: what it is made from.
        """
        return self._alone([self.step], [[self.open(tokens, make, *inputs)]])[0][0]

    def open(self, tokens: Tensor, make: Callable[[Tensor], Context], *inputs: Tensor | None) -> "Opened":
        """Have a step's numbers and tokens where the last one's were; arguments as `__call__`'s."""
        for layer in self.text:
            layer.make_room(self.step.tokens)
        first = self.text[0]
        if self._tokens is None or self._numbers is None or tokens.shape != self._tokens.shape:
            self._tokens = torch.empty_like(tokens, memory_format=torch.contiguous_format)
            before, beams = first.keys.shape[2] - first.filled, first.beams
            self._offsets = torch.tensor([0, before, before + beams], device=tokens.device)
            self._slopes = torch.tensor([1, beams, beams], device=tokens.device)
            self._numbers = torch.empty_like(self._offsets)
        self._tokens.copy_(tokens)
        torch.add(self._offsets, self._slopes, alpha=first.filled // first.beams, out=self._numbers)
        read = self._tokens, *(layer.room[0] for layer in self.text), *inputs
        return Opened(self, self._tokens, functools.partial(self._context, self._numbers, make), read)

    def close(self) -> None:
        """A step that was opened has been made."""
        for layer in self.text:
            layer.note_step()

    def finished(self, logits: Tensor, weights: Tensor | None) -> Result:
        """What `__call__` returns, of what a step has made."""
        return logits.float() if self.wide else logits, None if weights is None else weights.to(logits.dtype)

    def _context(self, numbers: Tensor, make: Callable[[Tensor], Context]) -> Context:
        steps, start, seen = numbers.split(1)
        context = make(steps)
        context.text = [_Fixed(*layer.room, layer.beams, start) for layer in self.text]
        context.seen = seen
        return context


@dataclass(frozen=True)
class Opened:
    """A step of a text that is about to be made.

    Attributes:
        tokens: (R,) int64. context: makes what the step reads, over memory that stays. inputs: all that it depends on.
    """

    replay: Replay
    tokens: Tensor
    context: Callable[[], Context]
    inputs: tuple[Tensor | None, ...]


class JointReplay:
    """The steps of several texts in one (`models.joint`), captured for as long as none moves, comes or leaves.

    Attributes:
        refused: that such steps are not captured and why, found when it was tried.
    """

    def __init__(self) -> None:
        self.refused: str | None = None
        self._repeated = graph.Repeated()

    def __call__(self, decoders: Sequence[DecoderStep], texts: Sequence[Sequence[Opened]]) -> list[list[Result]]:
        """Return for each text what `Replay` does, of each of the decoders, for which its step is open in `texts`."""
        opened = [each for of_text in texts for each in of_text]
        body = functools.partial(self._body, decoders, texts)
        inputs = [one for each in opened for one in each.inputs]  # of which the tokens are of one text alone
        try:
            result = self._repeated(body, opened[0].tokens.device, *inputs)
        except graph.NotCaptured as reason:
            self.refused = not_captured(reason)
            result = body()
        for each in opened:
            each.replay.close()
        return result

    def forget(self) -> None:
        """Hold on to no text: one of them is over."""
        self._repeated.forget()

    def _body(self, decoders: Sequence[DecoderStep], texts: Sequence[Sequence[Opened]]) -> list[list[Result]]:
        made = [self._of_decoder(*each) for each in zip(decoders, zip(*texts, strict=True), strict=True)]
        return [list(of_text) for of_text in zip(*made, strict=True)]

    def _of_decoder(self, decoder: DecoderStep, texts: Sequence[Opened]) -> list[Result]:
        made = joint_step(decoder, [text.tokens for text in texts], [text.context() for text in texts])
        return [text.replay.finished(*each) for text, each in zip(texts, made, strict=True)]
