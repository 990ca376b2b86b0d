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
from fastgen.models.step import Context, DecoderStep, KeysAndValues
from fastgen.ops.cache import write_slots_

WORTH = 8
"""Steps that must be left at least: a capture takes the time of two."""


Result = tuple[Tensor, Tensor | None]
"""Logits (R, V), and attention over the source (R, S) where it is wanted."""


class Growing(KeysAndValues, Protocol):
    """A layer of the cache with room for tokens to come."""

    steps: int
    filled: int

    @property
    def room(self) -> tuple[Tensor, Tensor]: ...
    def make_room(self) -> bool: ...
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


@dataclass
class _Captured:
    """A step over the present memory, that has run; `launch` runs it again, once it has been captured.

    tokens, start: what it reads beside `inputs`.
    """

    tokens: Tensor
    start: Tensor
    inputs: tuple[Tensor | None, ...]
    launch: Callable[[], object] | None = None
    result: Result | None = None


class Replay:
    """The steps of a text.

    Args:
        longest: steps at most.

    Attributes:
        refused: that steps are not captured and why, found when it was tried.
    """

    def __init__(self, step: DecoderStep, text: Sequence[Growing], longest: int) -> None:
        self.step, self.text, self.longest = step, text, longest
        self.refused: str | None = None
        self._captured: _Captured | None = None

    @property
    def able(self) -> bool:
        """Whether the next step can be run here."""
        return self.refused is None and (self._captured is not None or self.longest - self.text[0].steps >= WORTH)

    def __call__(self, tokens: Tensor, make: Callable[[Tensor], Context], *inputs: Tensor | None) -> Result:
        """Return logits (R, V) and attention over the source (R, S) or None, for the newest tokens (R,) int64.

        The next step overwrites them.

        Args:
            make: says what a step reads, but for keys and values of the text, from (1,) int64, how many tokens a beam
                has generated before it.
            inputs: what it is made from: when one is another tensor than before, it is captured anew.
        """
        moved = [layer.make_room() for layer in self.text]
        captured = self._captured
        if captured is not None and (
            any(moved)
            or tokens.shape != captured.tokens.shape
            or any(new is not old for new, old in zip(inputs, captured.inputs, strict=True))
        ):
            captured = None
        ran = captured is not None
        if captured is None:
            start = torch.empty(1, dtype=torch.int64, device=tokens.device)
            captured = self._captured = _Captured(torch.empty_like(tokens), start, inputs)
        captured.tokens.copy_(tokens)
        captured.start.fill_(self.text[0].keys.shape[2])
        body = functools.partial(self._body, captured.tokens, captured.start, make)
        result = self._again(captured, body) if ran else body()  # nothing is captured that has not run
        for layer in self.text:
            layer.note_step()
        return result

    def _body(self, tokens: Tensor, start: Tensor, make: Callable[[Tensor], Context]) -> Result:
        first = self.text[0]
        prefix, beams = first.keys.shape[2] - first.filled, first.beams
        context = make((start - prefix) // beams)
        context.text = [_Fixed(*layer.room, beams, start) for layer in self.text]
        context.seen = start + beams
        return self.step(tokens, context), context.weights

    def _again(self, captured: _Captured, body: Callable[[], Result]) -> Result:
        if captured.launch is None:
            try:
                captured.launch, captured.result = graph.capture(body, captured.tokens.device)
            except graph.NotCaptured as reason:
                self.refused, self._captured = f"decode steps are not captured as CUDA graphs: {reason}", None
                return body()
        captured.launch()
        assert captured.result is not None
        return captured.result
