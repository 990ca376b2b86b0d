"""Memory that decode steps run over, kept from one call to the next with the graphs that were captured over it.

A graph is of addresses. One call's graph serves the next where its keys, values and masks lie where the first one's
did, and all that a step reads of the model is where it was. So a call moves into a *seat*, which has room for a little
more than it needs. A weight is read where it is; what a step makes of weights, as queries, keys and values side by
side, moves too, and is written anew by every call. What was captured over a decoder's seats holds for as long as the
facts of its step (`models.build.step_fingerprint`) are the same: where each weight is, and every number.

A seat is one call's at a time, which may be smaller. When sentences leave, the others close up at its beginning; what
was captured for so many is kept as well.

Source: Wang et al. 2021 (LightSeq), section 2.3: memory planned once, and shared by all calls.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fastgen import config
from fastgen.models.build.step_fingerprint import Unknown, facts_of
from fastgen.models.cuda_graphs import graph
from fastgen.models.memory import budget
from fastgen.models.runtime.decode_step import DecoderStep, KeysAndValues
from fastgen.ops.processor import in_tf32

GRAPHS = 16
"""Graphs over one seat at most, each for another number of sentences."""

KEPT = 2**30
"""Bytes of seats for one decoder at most. A call that needs more has memory and graphs of its own.

Steps that read so much take longer than the capture that a seat saves, and memory that is kept is nobody else's.
"""


class Layer(KeysAndValues, Protocol):
    """A layer of the cache: tokens that all beams share, and behind them slots of those to come, if any."""

    prefix: int
    steps: int
    filled: int

    @property
    def room(self) -> tuple[Tensor, Tensor]: ...
    def make_room(self, tokens: int = 1) -> None: ...
    def note_step(self, steps: int = 1) -> None: ...
    def move(self, keys: Tensor, values: Tensor) -> None: ...


class Beams(Protocol):
    """Which slots each beam sees."""

    @property
    def whole(self) -> Tensor | None: ...
    def behind(self, prefix: int, mask: Tensor | None) -> Tensor: ...
    def move(self, whole: Tensor, prefix: int, mask: Tensor | None) -> None: ...


@dataclass
class Reads:
    """What the steps of a call read beside the weights, where it lies now.

    Attributes:
        sentences: B, of M beams each. text, source: keys and values of each layer. ancestry: None for one beam.
        first: the position of the first token behind the prefix; (B,) int64 where sentences differ.
        prefix_mask: (B, 1, 1, P), source_mask: (B, 1, 1, S), additive; None where all is seen.
        watched: the layer whose attention over the source is wanted; None for none.
    """

    sentences: int
    text: Sequence[Layer]
    source: Sequence[Layer]
    ancestry: Beams | None
    first: int | Tensor
    prefix_mask: Tensor | None = None
    source_mask: Tensor | None = None
    watched: int | None = None

    @property
    def held(self) -> tuple[object, ...]:
        """The same objects for as long as nothing moves."""
        layers = (layer.room[0] for layer in (*self.text, *self.source))
        seen = self.prefix_mask if self.ancestry is None else self.ancestry.whole
        return *layers, seen, self.source_mask, self.first


@dataclass(eq=False)
class GraphBuffers:
    """The memory that the steps of some sentences run over, and what is captured over it.

    Attributes:
        text, source: keys and values (B, Hkv, N, D) of each layer, with all their room.
        tokens: (B * M,) int64, the newest ones. numbers: (5,) int64, as `Replay` writes them.
        mask: (B, M, N) fp32, what is seen of the text; None where that is all. source_mask: (B, 1, 1, S) or None.
        first: (B,) int64; None where `numbers` hold it.
    """

    sentences: int
    text: Sequence[tuple[Tensor, Tensor]]
    source: Sequence[tuple[Tensor, Tensor]]
    tokens: Tensor
    numbers: Tensor
    mask: Tensor | None
    source_mask: Tensor | None
    first: Tensor | None
    repeated: graph.CapturedFunction

    @classmethod
    def own(cls, reads: Reads, lent: graph.BorrowedPool) -> "GraphBuffers":
        """What a call has, where it lies."""
        first, mask = reads.text[0], reads.prefix_mask
        slots = min(layer.room[0].shape[2] for layer in reads.text)
        if reads.ancestry is not None:
            mask = reads.ancestry.behind(first.prefix, mask)
            slots = min(slots, mask.shape[2])
            mask = mask[:, :, :slots]
        elif mask is not None:
            mask = nn.functional.pad(mask[:, 0].float(), (0, slots - first.prefix))
        text, source = (
            [
                (keys[:, :, :count], values[:, :, :count])
                for keys, values in (layer.room for layer in of)
            ]
            for of, count in (
                (reads.text, slots),
                (reads.source, reads.source[0].prefix if reads.source else 0),
            )
        )
        numbers = torch.empty(5, dtype=torch.int64, device=first.room[0].device)
        tokens = numbers.new_empty(reads.sentences * first.beams)
        at = reads.first if isinstance(reads.first, Tensor) else None
        return cls(
            reads.sentences,
            text,
            source,
            tokens,
            numbers,
            mask,
            reads.source_mask,
            at,
            graph.CapturedFunction(lent),
        )

    def of_first(self, sentences: int, lent: graph.BorrowedPool) -> "GraphBuffers":
        """The same of its first sentences."""
        n, beams = sentences, len(self.tokens) // self.sentences
        text, source = (
            [(keys[:n], values[:n]) for keys, values in of] for of in (self.text, self.source)
        )
        mask, source_mask, first = (
            None if each is None else each[:n] for each in (self.mask, self.source_mask, self.first)
        )
        tokens = self.tokens[: n * beams]
        return GraphBuffers(
            n,
            text,
            source,
            tokens,
            self.numbers,
            mask,
            source_mask,
            first,
            graph.CapturedFunction(lent),
        )


@dataclass(frozen=True)
class Shape:
    """Of a seat: how many sentences, slots of the text and positions of the source, and what else its graphs depend on.

    others: whether there are masks, and the like. nbytes: of its memory. outputs: bytes that a step puts out for a
    sentence, which lie with its graph.
    """

    sentences: int
    slots: int
    positions: int
    others: tuple[object, ...]
    nbytes: int
    outputs: int

    @classmethod
    def of(cls, reads: Reads, outputs: int) -> "Shape":
        """The shape of the seat that a call is to have; outputs: bytes that a step puts out for a row."""
        layers, beams = (*reads.text, *reads.source), reads.text[0].beams
        slots = rounded(reads.text[0].room[0].shape[2])
        positions = reads.source[0].prefix if reads.source else 0
        if reads.watched is None:  # else somebody gets as many weights as there are positions
            positions = rounded(positions)
        heads = tuple((kv.shape[1], kv.shape[3], kv.dtype) for layer in layers for kv in layer.room)
        masks = (
            reads.ancestry is not None,
            reads.prefix_mask is not None,
            isinstance(reads.first, Tensor),
        )
        text, source = (
            sum(kv.shape[1] * kv.shape[3] * kv.element_size() for layer in of for kv in layer.room)
            for of in (reads.text, reads.source)
        )
        nbytes = reads.sentences * (
            slots * (text + beams * 4) + positions * source
        )  # 4 of the mask
        others = beams, heads, masks, reads.watched
        return cls(reads.sentences, slots, positions, others, nbytes, beams * outputs)

    def has_room_for(self, other: "Shape") -> bool:
        """Whether a call that asks for the other shape may have this one."""
        large_enough = (
            other.sentences <= self.sentences and other.slots <= self.slots <= 2 * other.slots
        )
        return large_enough and (self.positions, self.others) == (other.positions, other.others)


def rounded(count: int) -> int:
    """Up to an eighth more, and a multiple of 16, so that what is captured for one length serves its neighbours."""
    step = max(16, 1 << max(0, count.bit_length() - 4))
    return -(-count // step) * step


@dataclass(eq=False)
class PooledBuffers:
    """A ground that calls take in turn.

    whole: all of it, once somebody has been here. grounds: of its first sentences, by how many they are, the newest
    last; what is captured over one of them is captured over that one alone.
    """

    shape: Shape
    of: "BufferPool"
    facts: object
    lent: graph.BorrowedPool = field(default_factory=graph.BorrowedPool)
    whole: GraphBuffers | None = None
    grounds: dict[int, GraphBuffers] = field(default_factory=dict[int, GraphBuffers])

    @property
    def nbytes(self) -> int:
        return self.shape.nbytes + sum(self.grounds) * self.shape.outputs

    def has_room_for(self, reads: Reads) -> bool:
        """Whether a call that sits here, and of which sentences may have left, can stay."""
        return (
            reads.sentences <= self.shape.sentences
            and reads.text[0].room[0].shape[2] <= self.shape.slots
        )

    def take(self, reads: Reads) -> GraphBuffers:
        """Move a call in: what it has is here from now on."""
        if self.whole is None:
            self.whole = self._ground(reads)
        ground = self.grounds.pop(reads.sentences, None) or self.whole.of_first(
            reads.sentences, self.lent
        )
        self.grounds[reads.sentences] = ground
        if len(self.grounds) > GRAPHS:
            del self.grounds[next(iter(self.grounds))]
        for layers, pairs in ((reads.text, ground.text), (reads.source, ground.source)):
            for layer, pair in zip(layers, pairs, strict=True):
                layer.move(*pair)
        _write(ground, reads)
        return ground

    def _ground(self, reads: Reads) -> GraphBuffers:
        """Memory for all sentences, of a call's shapes."""
        shape, keys, beams = self.shape, reads.text[0].room[0], reads.text[0].beams
        b = shape.sentences
        text, source = (
            [
                tuple(kv.new_empty(b, kv.shape[1], count, kv.shape[3]) for kv in layer.room)
                for layer in layers
            ]
            for layers, count in ((reads.text, shape.slots), (reads.source, shape.positions))
        )
        numbers = torch.empty(5, dtype=torch.int64, device=keys.device)
        masked = reads.ancestry is not None or reads.prefix_mask is not None
        return GraphBuffers(
            b, cast(Any, text), cast(Any, source), numbers.new_empty(b * beams), numbers,
            keys.new_empty(b, beams, shape.slots, dtype=torch.float32) if masked else None,
            keys.new_empty(b, 1, 1, shape.positions) if source else None,
            numbers.new_empty(b) if isinstance(reads.first, Tensor) else None, graph.CapturedFunction(self.lent),
        )  # fmt: skip


def _write(ground: GraphBuffers, reads: Reads) -> None:
    """Write a call's masks and positions to where they are read, and hide what is behind its source."""
    if ground.source_mask is not None:
        count = reads.source[0].prefix
        for buffer in (kv for pair in ground.source for kv in pair if count < kv.shape[2]):
            buffer[:, :, count:] = 0.0  # what is hidden is multiplied all the same
        ground.source_mask[..., :count] = 0.0 if reads.source_mask is None else reads.source_mask
        ground.source_mask[..., count:] = -torch.inf
    if ground.first is not None and isinstance(reads.first, Tensor):
        ground.first.copy_(reads.first)
    if ground.mask is None:
        return
    if reads.ancestry is not None:
        reads.ancestry.move(ground.mask, reads.text[0].prefix, reads.prefix_mask)
    elif reads.prefix_mask is not None:
        ground.mask.zero_()
        ground.mask[:, :, : reads.text[0].prefix] = reads.prefix_mask[:, 0]


def most_kept() -> int:
    """Bytes of seats to keep for one decoder at most, as ``FASTGEN_MEMORY`` may say."""
    limit = config.settings().memory
    return KEPT if limit is None else min(KEPT, limit)


class BufferPool:
    """The seats of one decoder, as its step is now."""

    def __init__(self) -> None:
        self.facts: object = None
        self.made: list[Tensor] = []
        self.free: list[PooledBuffers] = []  # those that were left last at the end

    def adopt(self, step: DecoderStep) -> None:
        """Have what a step has made where it was for the calls before, if it is the same step; else forget those.

        Raises:
            Unknown: it cannot be told.
        """
        holders: list[tuple[Any, str]] = []
        facts = facts_of(step, holders)
        made: list[Tensor] = [getattr(holder, name) for holder, name in holders]
        if facts != self.facts:
            self.facts, self.made, self.free = facts, made, []
        for (holder, name), kept, new in zip(holders, self.made, made, strict=True):
            if new is not kept:
                kept.copy_(new)
                vars(holder)[name] = kept

    def pick(self, shape: Shape) -> PooledBuffers:
        """The smallest free seat that has room for a call, or a new one."""
        fitting = [seat for seat in self.free if seat.shape.has_room_for(shape)]
        if not fitting:
            return PooledBuffers(shape, self, self.facts)
        seat = min(fitting, key=lambda each: each.shape.nbytes)
        self.free.remove(seat)
        return seat

    def take_back(self, seat: PooledBuffers) -> None:
        """Keep a seat for calls to come, and of the others as many as there is to be memory for."""
        if seat.facts is not self.facts:
            return
        self.free.append(seat)
        while sum(each.nbytes for each in self.free) > most_kept():
            del self.free[0]


_lock = threading.RLock()  # as what is collected meanwhile may give its seat back
_all: "WeakKeyDictionary[nn.Module, dict[tuple[object, ...], BufferPool]]" = WeakKeyDictionary()
"""By decoder, and by `_circumstances`."""


def borrow(step: DecoderStep, reads: Reads) -> PooledBuffers | None:
    """A seat for a call, to be given back; None where it is to have memory of its own."""
    if config.settings().graphs == "call":
        return None
    shape = Shape.of(reads, step.head.outputs * step.dtype.itemsize)
    if shape.nbytes + shape.sentences * shape.outputs > most_kept():
        return None
    now = _circumstances(reads.text[0].room[0].device)
    with _lock:
        of_decoder = _all.setdefault(step.module, {})
        for gone in [
            each for each in of_decoder if each[0] != now[0]
        ]:  # the model has been moved to another device
            del of_decoder[gone]
        seats = of_decoder.setdefault(now, BufferPool())
        try:
            seats.adopt(step)
        except Unknown:
            return None
        return seats.pick(shape)


def give_back(seat: PooledBuffers) -> None:
    with _lock:
        seat.of.take_back(seat)


def held() -> list[tuple[nn.Module, int]]:
    """Decoders and the bytes of the seats of each that no call has now."""
    with _lock:
        return [
            (decoder, sum(seat.nbytes for seats in list(by.values()) for seat in seats.free))
            for decoder, by in list(_all.items())
        ]


budget.holders["CUDA graphs' buffers"] = held


def release() -> None:
    """Give back the memory of seats that nobody has, and forget what was captured over them."""
    with _lock:
        for by_circumstances in list(_all.values()):
            for seats in by_circumstances.values():
                seats.facts, seats.made, seats.free = None, [], []


def _circumstances(device: torch.device) -> tuple[object, ...]:
    """What decides, beside step and shapes, which kernels run, and in which order with others."""
    backend, stream = torch.backends.cuda.matmul, 0
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device).cuda_stream
    precision = (
        in_tf32(), backend.allow_fp16_reduced_precision_reduction, backend.allow_bf16_reduced_precision_reduction,
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    return device, stream, precision, torch.is_inference_mode_enabled(), config.settings()
