"""Static buffers that decode steps run over, kept across calls together with their CUDA graphs.

A CUDA graph records addresses. One call's graph is valid for the next if its keys, values and masks
lie at the same addresses, and everything a step reads of the model is unchanged. Each call
therefore moves into pooled buffers that are slightly larger than it needs. Steps read weights in
place. Tensors derived from weights, such as merged query, key and value projections, also move into
the pool, and every call rewrites them. Graphs over a decoder's buffers stay valid as long as the
fingerprint of its step (`models.build.step_fingerprint`) is unchanged.

One call at a time uses a set of buffers, and it may be smaller than they are. After batch
compaction the remaining sentences occupy the beginning of the buffers; graphs for that number of
sentences are kept as well.

Source: Wang et al. 2021 (LightSeq), section 2.3: memory planned once, and shared by all calls.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from fastgen import config
from fastgen.models.build.step_fingerprint import Unknown, fingerprint_of
from fastgen.models.cuda_graphs import graph
from fastgen.models.cuda_graphs.kept_graphs import KeptGraphs
from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.models.runtime.step_inputs import KeysAndValues
from fastgen.models.state import CachedState, state_of
from fastgen.ops.processor import in_tf32

GRAPHS = 16
"""Maximum number of graphs over one set of buffers, each for another number of sentences."""

KEPT = 2**30
"""Maximum size in bytes of the pooled buffers of one decoder.

A larger call uses memory and graphs of its own: its steps take longer than the capture that pooled
buffers save, and kept memory is unavailable to others.
"""


class Layer(KeysAndValues, Protocol):
    """A layer of the KV cache: a prefix shared by all beams, then slots of generated tokens."""

    prefix: int
    steps: int
    filled: int

    @property
    def capacity_buffers(self) -> tuple[Tensor, Tensor]: ...
    def ensure_capacity(self, tokens: int = 1) -> None: ...
    def note_step(self, steps: int = 1) -> None: ...
    def move(self, keys: Tensor, values: Tensor) -> None: ...


class Beams(Protocol):
    """The ancestry of beams: which slots each beam sees."""

    @property
    def whole(self) -> Tensor | None: ...
    def behind(
        self, prefix: int, mask: Tensor | None, dtype: torch.dtype | None = None
    ) -> Tensor: ...
    def move(self, whole: Tensor, prefix: int, mask: Tensor | None) -> None: ...


@dataclass
class GraphInputs:
    """The tensors, other than weights, that the decode steps of a call read.

    Attributes:
        sentences: B, with M beams each.
        text: Self-attention KV cache of each layer.
        source: Cross-attention KV cache of each layer.
        ancestry: Ancestry of the beams; None for one beam.
        first: Position of the first token after the prefix; (B,) int64 where sentences differ.
        prefix_mask: (B, 1, 1, P) additive; None where everything is visible.
        source_mask: (B, 1, 1, S) additive; None where everything is visible.
        alignment_layer: Layer whose cross-attention weights are requested; None for none.
    """

    sentences: int
    text: Sequence[Layer]
    source: Sequence[Layer]
    ancestry: Beams | None
    first: int | Tensor
    prefix_mask: Tensor | None = None
    source_mask: Tensor | None = None
    alignment_layer: int | None = None

    @property
    def held(self) -> tuple[object, ...]:
        """Objects that stay identical as long as nothing moves."""
        layers = (layer.capacity_buffers[0] for layer in (*self.text, *self.source))
        seen = self.prefix_mask if self.ancestry is None else self.ancestry.whole
        return *layers, seen, self.source_mask, self.first


@dataclass(eq=False)
class GraphBuffers:
    """The static buffers of a number of sentences, and the graph captured over them.

    Attributes:
        sentences: B, with M beams each.
        text: Self-attention keys and values (B, Hkv, N, D) of each layer, unused slots included.
        source: Cross-attention keys and values (B, Hkv, S, D) of each layer, unused positions
            included.
        tokens: (B * M,) int64, the newest tokens.
        numbers: (5,) int64, as written by `Replay.open`: slot of the newest token, filled keys,
            length of the text, position of the newest token (relative to `first` if there is one),
            length of the prefix.
        mask: (B, M, N) additive self-attention mask in the dtype of the keys; None where everything
            is visible.
        source_mask: (B, 1, 1, S) additive; None where everything is visible.
        first: (B,) int64, as `Reads.first`; None where `numbers` holds it.
        repeated: The captured step.
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
    def own(cls, reads: GraphInputs, borrowed_pool: graph.BorrowedPool) -> "GraphBuffers":
        """Return buffers that alias a call's own keys, values and masks."""
        first, mask = reads.text[0], reads.prefix_mask
        slots = min(layer.capacity_buffers[0].shape[2] for layer in reads.text)
        if reads.ancestry is not None:
            mask = reads.ancestry.behind(first.prefix, mask, first.capacity_buffers[0].dtype)
            slots = min(slots, mask.shape[2])
            mask = mask[:, :, :slots]
        elif mask is not None:
            mask = nn.functional.pad(mask[:, 0], (0, slots - first.prefix))
        text, source = (
            [
                (keys[:, :, :count], values[:, :, :count])
                for keys, values in (layer.capacity_buffers for layer in of)
            ]
            for of, count in (
                (reads.text, slots),
                (reads.source, reads.source[0].prefix if reads.source else 0),
            )
        )
        numbers = torch.empty(5, dtype=torch.int64, device=first.capacity_buffers[0].device)
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
            graph.CapturedFunction(borrowed_pool),
        )

    def of_first(self, sentences: int, borrowed_pool: graph.BorrowedPool) -> "GraphBuffers":
        """Return views of the first sentences, with a graph of their own."""
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
            graph.CapturedFunction(borrowed_pool),
        )


@dataclass(frozen=True)
class Shape:
    """Size of a set of buffers, and everything else that its graphs depend on.

    Attributes:
        sentences: B.
        slots: Slots of the self-attention KV cache.
        positions: Positions of the source.
        others: Presence of masks, sizes of heads and the like.
        nbytes: Size of the buffers in bytes.
        outputs: Bytes that a step outputs per sentence, which each graph holds.
    """

    sentences: int
    slots: int
    positions: int
    others: tuple[object, ...]
    nbytes: int
    outputs: int

    @classmethod
    def of(cls, reads: GraphInputs, outputs: int) -> "Shape":
        """Return the shape of the buffers for a call.

        Args:
            reads: What the call reads.
            outputs: Bytes that a step outputs per row.
        """
        layers, beams = (*reads.text, *reads.source), reads.text[0].beams
        slots = rounded(reads.text[0].capacity_buffers[0].shape[2])
        positions = reads.source[0].prefix if reads.source else 0
        if reads.alignment_layer is None:  # else the attention weights have exactly this length
            positions = rounded(positions)
        heads = tuple(
            (kv.shape[1], kv.shape[3], kv.dtype)
            for layer in layers
            for kv in layer.capacity_buffers
        )
        masks = (
            reads.ancestry is not None,
            reads.prefix_mask is not None,
            isinstance(reads.first, Tensor),
        )
        text, source = (
            sum(
                kv.shape[1] * kv.shape[3] * kv.element_size()
                for layer in of
                for kv in layer.capacity_buffers
            )
            for of in (reads.text, reads.source)
        )
        mask = beams * reads.text[0].capacity_buffers[0].element_size()  # bytes per slot
        nbytes = reads.sentences * (slots * (text + mask) + positions * source)
        others = beams, heads, masks, reads.alignment_layer
        return cls(reads.sentences, slots, positions, others, nbytes, beams * outputs)

    def has_room_for(self, other: "Shape") -> bool:
        """Return whether these buffers suit a call of another shape."""
        large_enough = (
            other.sentences <= self.sentences and other.slots <= self.slots <= 2 * other.slots
        )
        return large_enough and (self.positions, self.others) == (other.positions, other.others)


def rounded(count: int) -> int:
    """Round up by at most an eighth, to a multiple of 16, so that graphs serve similar lengths."""
    step = max(16, 1 << max(0, count.bit_length() - 4))
    return -(-count // step) * step


@dataclass(eq=False)
class PooledBuffers:
    """Static buffers that successive calls share.

    Attributes:
        shape: Their shape.
        of: The pool they belong to.
        fingerprint: The fingerprint of the step their graphs are valid for.
        borrowed_pool: The pool of graph memory.
        kept: Graphs of other functions that read the step's output, such as token selection.
        whole: Buffers of all sentences; None before the first use.
        by_sentences: Buffers of the first n sentences by n, the latest last, each with its graph.
    """

    shape: Shape
    of: "BufferPool"
    fingerprint: object
    borrowed_pool: graph.BorrowedPool = field(default_factory=graph.BorrowedPool)
    kept: KeptGraphs = field(default_factory=KeptGraphs)
    whole: GraphBuffers | None = None
    by_sentences: dict[int, GraphBuffers] = field(default_factory=dict[int, GraphBuffers])

    @property
    def nbytes(self) -> int:
        return self.shape.nbytes + sum(self.by_sentences) * self.shape.outputs + self.kept.nbytes

    def has_room_for(self, reads: GraphInputs) -> bool:
        """Return whether a call in these buffers still fits after a compaction or growth."""
        return (
            reads.sentences <= self.shape.sentences
            and reads.text[0].capacity_buffers[0].shape[2] <= self.shape.slots
        )

    def take(self, reads: GraphInputs) -> GraphBuffers:
        """Move a call's tensors into these buffers."""
        if self.whole is None:
            self.whole = self._buffers(reads)
        buffers = self.by_sentences.pop(reads.sentences, None) or self.whole.of_first(
            reads.sentences, self.borrowed_pool
        )
        self.by_sentences[reads.sentences] = buffers
        if len(self.by_sentences) > GRAPHS:
            dropped = self.by_sentences.pop(next(iter(self.by_sentences)))
            if (result := dropped.repeated.result) is not None:
                self.kept.drop(result[0][0][0])
        for layers, pairs in ((reads.text, buffers.text), (reads.source, buffers.source)):
            for layer, pair in zip(layers, pairs, strict=True):
                layer.move(*pair)
        _write(buffers, reads)
        return buffers

    def _buffers(self, reads: GraphInputs) -> GraphBuffers:
        """Allocate buffers for all sentences, with the head sizes and dtypes of a call."""
        shape, keys, beams = self.shape, reads.text[0].capacity_buffers[0], reads.text[0].beams
        b = shape.sentences
        text, source = (
            [
                tuple(
                    kv.new_empty(b, kv.shape[1], count, kv.shape[3])
                    for kv in layer.capacity_buffers
                )
                for layer in layers
            ]
            for layers, count in ((reads.text, shape.slots), (reads.source, shape.positions))
        )
        numbers = torch.empty(5, dtype=torch.int64, device=keys.device)
        masked = reads.ancestry is not None or reads.prefix_mask is not None
        return GraphBuffers(
            b, cast(Any, text), cast(Any, source), numbers.new_empty(b * beams), numbers,
            keys.new_empty(b, beams, shape.slots) if masked else None,
            keys.new_empty(b, 1, 1, shape.positions) if source else None,
            numbers.new_empty(b) if isinstance(reads.first, Tensor) else None,
            graph.CapturedFunction(self.borrowed_pool),
        )  # fmt: skip


def _write(buffers: GraphBuffers, reads: GraphInputs) -> None:
    """Write a call's masks and positions into static buffers; mask what lies beyond its source."""
    if buffers.source_mask is not None:
        count = reads.source[0].prefix
        for buffer in (kv for pair in buffers.source for kv in pair if count < kv.shape[2]):
            buffer[:, :, count:] = 0.0  # masked values are multiplied all the same
        buffers.source_mask[..., :count] = 0.0 if reads.source_mask is None else reads.source_mask
        buffers.source_mask[..., count:] = -torch.inf
    if buffers.first is not None and isinstance(reads.first, Tensor):
        buffers.first.copy_(reads.first)
    if buffers.mask is None:
        return
    if reads.ancestry is not None:
        reads.ancestry.move(buffers.mask, reads.text[0].prefix, reads.prefix_mask)
    elif reads.prefix_mask is not None:
        buffers.mask.zero_()
        buffers.mask[:, :, : reads.text[0].prefix] = reads.prefix_mask[:, 0]


def most_kept() -> int:
    """Return the maximum size in bytes of one decoder's pooled buffers, given `FASTGEN_MEMORY`."""
    limit = config.settings().memory
    return KEPT if limit is None else min(KEPT, limit)


class BufferPool:
    """Pooled buffers of one decoder, valid for the current fingerprint of its step."""

    def __init__(self) -> None:
        self.fingerprint: object = None
        self.made: list[Tensor] = []
        self.free: list[PooledBuffers] = []  # from least to most recently used

    def adopt(self, step: DecoderStep) -> None:
        """Move the tensors a step has derived from weights into the pool's buffers.

        If the fingerprint of the step has changed, the pool drops its buffers instead.

        Args:
            step: The decode step.

        Raises:
            Unknown: The step has no fingerprint.
        """
        holders: list[tuple[Any, str]] = []
        fingerprint = fingerprint_of(step, holders)
        made: list[Tensor] = [getattr(holder, name) for holder, name in holders]
        if fingerprint != self.fingerprint:
            self.fingerprint, self.made, self.free = fingerprint, made, []
        for (holder, name), kept, new in zip(holders, self.made, made, strict=True):
            if new is not kept:
                kept.copy_(new)
                vars(holder)[name] = kept

    def pick(self, shape: Shape) -> PooledBuffers:
        """Return the smallest free buffers that suit a call, or new ones."""
        fitting = [buffers for buffers in self.free if buffers.shape.has_room_for(shape)]
        if not fitting:
            return PooledBuffers(shape, self, self.fingerprint)
        buffers = min(fitting, key=lambda each: each.shape.nbytes)
        self.free.remove(buffers)
        return buffers

    def take_back(self, seat: PooledBuffers) -> None:
        """Keep buffers for later calls, and drop the least recently used ones beyond the limit."""
        if seat.fingerprint is not self.fingerprint:
            return
        self.free.append(seat)
        while sum(each.nbytes for each in self.free) > most_kept():
            del self.free[0]


_lock = threading.RLock()  # reentrant, as garbage collection may return buffers meanwhile


class BufferPools(CachedState):
    """The pools of one decoder, by `_circumstances`."""

    label = "CUDA graphs' buffers"

    def __init__(self) -> None:
        self.pools: dict[tuple[object, ...], BufferPool] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of pooled buffers that no call uses now."""
        with _lock:
            return sum(buffers.nbytes for pool in self.pools.values() for buffers in pool.free)

    def release(self) -> bool:
        """Free the pooled buffers that no call uses, and forget their graphs."""
        with _lock:
            for pool in self.pools.values():
                pool.fingerprint, pool.made, pool.free = None, [], []
        return False


def borrow(step: DecoderStep, reads: GraphInputs) -> PooledBuffers | None:
    """Return buffers for a call, to be given back; None where it should use memory of its own."""
    if config.settings().graphs == "call":
        return None
    shape = Shape.of(reads, step.head.outputs * step.dtype.itemsize)
    if shape.nbytes + shape.sentences * shape.outputs > most_kept():
        return None
    now = _circumstances(reads.text[0].capacity_buffers[0].device)
    with _lock:
        pools = state_of(step.module).of(BufferPools).pools
        # Drop pools of a device that the model has left.
        for key in [each for each in pools if each[0] != now[0]]:
            del pools[key]
        pool = pools.setdefault(now, BufferPool())
        try:
            pool.adopt(step)
        except Unknown:
            return None
        return pool.pick(shape)


def give_back(buffers: PooledBuffers) -> None:
    """Return buffers to the pool that they were borrowed from."""
    with _lock:
        buffers.of.take_back(buffers)


def _circumstances(device: torch.device) -> tuple[object, ...]:
    """Return what else decides which kernels run and how they are ordered."""
    backend, stream = torch.backends.cuda.matmul, 0
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device).cuda_stream
    precision = (
        in_tf32(), backend.allow_fp16_reduced_precision_reduction,
        backend.allow_bf16_reduced_precision_reduction,
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    return device, stream, precision, torch.is_inference_mode_enabled(), config.settings()
