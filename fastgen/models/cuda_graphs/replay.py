"""Decode steps over static buffers, so that one CUDA graph serves many of them.

Three things change between steps: the newest tokens, the number of filled KV slots, and the slots
that each beam sees. A graph reads them on the device, from static buffers. Attention gets the whole
KV buffers and reads the filled slots. The prefix length and the first position after it are read on
the device as well, so that a graph serves later calls in the same buffers (`graph_buffers`).

A graph is valid until keys and values move: when they outgrow their buffers, or when sentences
leave the batch.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastgen.models import state
from fastgen.models.cuda_graphs import graph, graph_buffers
from fastgen.models.cuda_graphs.graph_buffers import GraphBuffers, GraphInputs, Layer, PooledBuffers
from fastgen.models.cuda_graphs.kept_graphs import KeptGraphs
from fastgen.models.memory.scratch import is_out_of_memory
from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.models.runtime.joint_step import joint_step
from fastgen.models.runtime.step_inputs import CallStepInputs
from fastgen.ops.cache import write_slots_
from fastgen.ops.rotation import Rotation, rotate_into_slots_

WORTH = 8
"""Minimum number of remaining steps for a capture, which takes the time of two."""


Result = tuple[Tensor, Tensor | None]
"""Logits (R, V), and cross-attention weights (R, S) in the same dtype if requested."""


def not_captured(reason: object) -> str:
    """Return the note of a plan that decode steps are not captured."""
    return f"decode steps are not captured as CUDA graphs: {reason}"


@dataclass
class _Fixed:
    """Static KV buffers of a layer.

    Attributes:
        keys: (B, Hkv, N, D), unused slots included.
        values: (B, Hkv, N, D).
        beams: M.
        start: (1,) int64, the slot of the newest token of the first beam.
    """

    keys: Tensor
    values: Tensor
    beams: int
    start: Tensor

    def append(self, keys: Tensor, values: Tensor) -> None:
        write_slots_(self.keys, self.values, keys, values, self.start)

    def reserve(self, keys: Tensor, values: Tensor) -> None:
        """Do nothing: static buffers always have room."""

    def append_rotated(
        self, query: Tensor, key: Tensor, value: Tensor, rotation: Rotation
    ) -> Tensor:
        return rotate_into_slots_(query, key, value, rotation, self.keys, self.values, self.start)

    def append_asking(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.append(keys, values)
        return self.keys, self.values


class Replay:
    """The decode steps of a text, captured and replayed.

    Args:
        step: The decode step.
        text: Self-attention KV cache of each layer.
        longest: Maximum number of steps.
    """

    def __init__(self, step: DecoderStep, text: Sequence[Layer], longest: int) -> None:
        self.step, self.text, self.longest = step, text, longest
        self._alone, self._borrowed_pool = JointReplay(), graph.BorrowedPool()
        self._pooled_buffers: PooledBuffers | None = None
        self._buffers: GraphBuffers | None = None
        self._held: tuple[object, ...] = ()

    @property
    def refused(self) -> str | None:
        """Fallback reason after a failed capture; None otherwise."""
        return self._alone.refused

    def kept_graphs(self, logits: Tensor) -> KeptGraphs | None:
        """Return the graphs of functions that read these logits; None if they serve one call."""
        if self._pooled_buffers is None or self._buffers is None:
            return None
        result: list[list[Result]] | None = self._buffers.repeated.result
        return (
            self._pooled_buffers.kept if result is not None and result[0][0][0] is logits else None
        )

    def supported(self, rows: int) -> bool:
        """Return whether the next step, of so many rows, should run here."""
        known = self._buffers is not None and len(self._buffers.tokens) == rows
        return self.refused is None and (known or self.longest - self.text[0].steps >= WORTH)

    def __call__(self, tokens: Tensor, reads: GraphInputs) -> Result:
        """Run a step for the newest tokens.

        Args:
            tokens: (R,) int64.
            reads: What the step reads, which may have moved.

        Returns:
            Logits (R, V), and cross-attention weights (R, S) or None. The next step overwrites
            both.
        """
        return self._alone([self.step], [[self.open(tokens, reads)]])[0][0]

    def open(self, tokens: Tensor, reads: GraphInputs) -> "Opened":
        """Write a step's tokens and numbers into the static buffers; arguments as in `__call__`."""
        buffers, first = self._buffers, self.text[0]
        for layer in self.text:
            layer.ensure_capacity(self.step.tokens)
        if buffers is None or not graph.same(reads.held, self._held):
            buffers = self._buffers = self._settle(reads)
            self._held = reads.held
            prefix, position = first.prefix, reads.first if isinstance(reads.first, int) else 0
            device, beams = tokens.device, first.beams
            self._offsets = torch.tensor(
                [prefix, prefix + beams, prefix + 1, position, prefix],
                device=device,
                dtype=torch.int64,
            )
            self._slopes = torch.tensor([beams, beams, 1, 1, 0], device=device, dtype=torch.int64)
        buffers.tokens.copy_(tokens)
        torch.add(
            self._offsets, self._slopes, alpha=first.filled // first.beams, out=buffers.numbers
        )
        return Opened(
            self,
            buffers,
            functools.partial(self._context, buffers, first.beams, reads.alignment_layer),
        )

    def close(self) -> None:
        """Count the opened step as run."""
        for layer in self.text:
            layer.note_step()

    def finished(self, logits: Tensor, weights: Tensor | None) -> Result:
        """Return a step's outputs as `__call__` does."""
        return logits, None if weights is None else weights.to(logits.dtype)

    def lose(self) -> None:
        """Drop the buffers without giving them back, after a failed capture."""
        self._pooled_buffers = None

    def _settle(self, reads: GraphInputs) -> GraphBuffers:
        """Select the buffers of the next steps: pooled ones, or the call's own tensors."""
        buffers, previous = self._pooled_buffers, self._pooled_buffers
        if buffers is None or not buffers.has_room_for(reads):
            buffers = graph_buffers.borrow(self.step, reads)
        self._pooled_buffers = buffers
        try:
            return (
                GraphBuffers.own(reads, self._borrowed_pool)
                if buffers is None
                else buffers.take(reads)
            )
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            state.release(graph_buffers.BufferPools)
            self._pooled_buffers = None
            return GraphBuffers.own(reads, self._borrowed_pool)
        finally:
            if previous is not None and previous is not self._pooled_buffers:
                graph_buffers.give_back(previous)

    def _context(
        self, buffers: GraphBuffers, beams: int, alignment_layer: int | None
    ) -> CallStepInputs:
        start, seen, length, at, prefix = buffers.numbers.split(1)
        position = at if buffers.first is None else (buffers.first + at).repeat_interleave(beams)
        mask = None if buffers.mask is None else buffers.mask[:, None].to(self.step.dtype)
        text, source = (
            [_Fixed(*pair, beams, start) for pair in of] for of in (buffers.text, buffers.source)
        )
        return CallStepInputs(
            buffers.sentences, length, prefix, position, text, source, mask, buffers.source_mask,
            seen=seen,
            alignment_layer=alignment_layer,
        )  # fmt: skip

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # in case `__init__` has failed
            if self._pooled_buffers is not None:
                graph_buffers.give_back(self._pooled_buffers)


@dataclass(frozen=True)
class Opened:
    """A step of a text that is about to run.

    Attributes:
        replay: The text's steps.
        buffers: The static buffers.
        context: Returns what the step reads, over the static buffers.
    """

    replay: Replay
    buffers: GraphBuffers
    context: Callable[[], CallStepInputs]


class JointReplay:
    """Joint decode steps of several texts (`models.runtime.joint_step`), captured and replayed.

    A graph is valid until a text moves, joins or leaves.

    Attributes:
        refused: Fallback reason after a failed capture; None otherwise.
    """

    def __init__(self) -> None:
        self.refused: str | None = None
        self._repeated = graph.CapturedFunction()

    def __call__(
        self, decoders: Sequence[DecoderStep], texts: Sequence[Sequence[Opened]]
    ) -> list[list[Result]]:
        """Run one step of several texts.

        Args:
            decoders: The decoders, all of which run every text.
            texts: For each text, its opened step for each decoder.

        Returns:
            For each text, the result of each decoder.
        """
        opened = [each for of_text in texts for each in of_text]
        body = functools.partial(self._body, decoders, texts)
        tokens = [each.buffers.tokens for each in opened]  # these move whenever anything else does
        repeated = opened[0].buffers.repeated if len(opened) == 1 else self._repeated
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
        """Drop the graph and its references to texts, as one of them has ended."""
        self._repeated.forget()

    def _body(
        self, decoders: Sequence[DecoderStep], texts: Sequence[Sequence[Opened]]
    ) -> list[list[Result]]:
        outputs = [
            self._of_decoder(*each) for each in zip(decoders, zip(*texts, strict=True), strict=True)
        ]
        return [list(of_text) for of_text in zip(*outputs, strict=True)]

    def _of_decoder(self, decoder: DecoderStep, texts: Sequence[Opened]) -> list[Result]:
        outputs = joint_step(
            decoder, [text.buffers.tokens for text in texts], [text.context() for text in texts]
        )
        return [text.replay.finished(*each) for text, each in zip(texts, outputs, strict=True)]
