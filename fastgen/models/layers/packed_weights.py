"""Packed copies of the weights of linear layers, as they are or in int8, and their lifetime."""

import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from fastgen import config
from fastgen.models import state
from fastgen.models.comparison import comparison
from fastgen.models.memory import budget
from fastgen.models.memory.scratch import is_out_of_memory
from fastgen.models.state import CachedState, cached_state_of, process_state, state_of
from fastgen.ops import int8, logit_bounds
from fastgen.ops import linear as ops

EXPERT_PROBES = 64
"""Elements of each expert's matrix that are compared at the start of each call."""

AGAIN = 1000
"""Uses after which packing is tried again where memory was short."""


@dataclass(eq=False)
class Packed(CachedState):
    """A packed copy of a weight, with what is needed to detect changes of the weight.

    Layers keep it, as weak references to weights would block `torch.utils.swap_tensors`.

    Attributes:
        uses_to_pack: Uses of a weight after which packing pays: packing takes as long as about six
            plain products with one row. A call of one new token uses a weight once or twice.
        rows_per_use: Rows of a product that count as one more use: from about 1,150 rows on, the
            first product already saves the time of packing (Zen 4, 2.2 ns per element; C 225
            GFLOP/s, MKL 185).
        layer: A layer that has the weight.
        address: Data pointer of the weight.
        version: Version counter of the weight.
        stride: Stride of the probed elements.
        probe: Every stride-th element. Each call compares them at its start, to notice writes
            through `.data`, which do not change the version.
        uses: Uses so far without a copy.
        copy: The packed copy; None for none.
        shortage: Why memory was short when a copy was to be made; None where it was not.
    """

    label = "packed weights"
    uses_to_pack: ClassVar[int] = 9
    rows_per_use: ClassVar[int] = 128

    layer: weakref.ref[Any]
    address: int
    version: int
    stride: int
    probe: Tensor
    uses: int = 0
    copy: Any = None
    shortage: str | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self.copy is None else self.copy.nbytes

    @staticmethod
    def pack(weight: Tensor) -> Any:
        """Return a packed copy of a weight (.., N, K); None where C reads none."""
        return ops.pack(weight.flatten(0, -2))

    @staticmethod
    def bytes_of(weight: Tensor) -> int:
        """Return the bytes that the copy takes."""
        *outputs, inputs = weight.shape
        return ops.bytes_to_pack(math.prod(outputs), inputs, weight.dtype)

    def release(self) -> bool:
        return True  # a running call may still read the copy

    def is_of(self, weight: Tensor) -> bool:
        """Return whether this entry describes a weight in its present state."""
        return getattr(self.layer(), "weight", None) is weight and not self.is_stale(weight)

    def is_stale(self, weight: Tensor) -> bool:
        return self.address != weight.data_ptr() or self.version != weight._version

    def copied(self, weight: Tensor, plain: Tensor, always: bool, rows: int = 1) -> Any:
        """Return the copy, packing the weight if it is used often; None where there is none.

        Args:
            weight: The weight.
            plain: The weight as (.., N, K).
            always: Whether to pack regardless of the memory that is left.
            rows: Rows of the product that is to use it.
        """
        if self.copy is None:
            self.uses += 1 + rows // self.rows_per_use
            if self.uses >= self.uses_to_pack or comparison.get() is not None:
                self.shortage = _shortage(self.bytes_of(plain), always)
                if self.shortage is None:
                    if self.probe_differs(weight):  # written through `.data` since the first use
                        self.probe = _sample(weight, self.stride).clone()
                    self._pack(plain)
                if self.copy is None:
                    self.uses = self.uses_to_pack - AGAIN
                if self.shortage is not None:
                    packing().was_short = True
        return self.copy

    def _pack(self, plain: Tensor) -> None:
        try:
            self.copy = self.pack(plain)
        except RuntimeError as error:  # although the system reported free memory
            if not is_out_of_memory(error):
                raise
            self.shortage = "memory is short: a copy could not be allocated"

    def probe_differs(self, weight: Tensor) -> bool:
        return not torch.equal(self.probe, _sample(weight, self.stride))


@dataclass(eq=False)
class Int8Packed(Packed, CachedState):
    """A copy of a weight in int8."""

    label = "int8 weights"
    uses_to_pack = 1

    @staticmethod
    def pack(weight: Tensor) -> Any:
        return int8.pack(weight)

    @staticmethod
    def bytes_of(weight: Tensor) -> int:
        return int8.bytes_to_pack(*weight.shape)


@dataclass(eq=False)
class LogitErrors(Packed, CachedState):
    """Bounds of the errors of a head's copy in int8 (`ops.logit_bounds`)."""

    label = "int8 error bounds"
    uses_to_pack = 1

    @staticmethod
    def pack(weight: Tensor) -> Any:
        return logit_bounds.error_bounds(weight)

    @staticmethod
    def bytes_of(weight: Tensor) -> int:
        return logit_bounds.bytes_of_bounds(len(weight))


@dataclass(eq=False)
class LatentKeysPacked(Packed, CachedState):
    """A copy of the keys' part of a weight that maps latent vectors to keys and values."""

    label = "packed keys of latents"


@dataclass(eq=False)
class LatentValuesPacked(Packed, CachedState):
    """A copy of the values' part of such a weight."""

    label = "packed values of latents"


KINDS = Packed, Int8Packed, LogitErrors, LatentKeysPacked, LatentValuesPacked


@dataclass(eq=False)
class Packing(CachedState):
    """State of packing in this process.

    Attributes:
        by_weight: Copies by their class and the `id` of the weight, for layers that share one.
        was_short: Whether memory has been short since the last `release`; avoids a search for
            missing copies.
        has_stopped: Whether no weights are packed until `release`, after a call ran out of memory.
    """

    by_weight: WeakValueDictionary[tuple[type[Packed], int], Packed] = field(
        default_factory=WeakValueDictionary[tuple[type[Packed], int], Packed]
    )
    was_short: bool = False
    has_stopped: bool = False

    def release(self) -> bool:
        self.was_short = self.has_stopped = False
        return False


def packing() -> Packing:
    """Return the state of packing in this process."""
    return process_state().of(Packing)


def _sample(weight: Tensor, stride: int) -> Tensor:
    return weight.detach().reshape(-1)[::stride]  # copies only weights that change within a call


def _stride(experts: int, rows: int, columns: int) -> int:
    """Return about the largest stride that visits every row and column of a contiguous matrix.

    Of several experts, it visits every column, and some `EXPERT_PROBES` elements of each matrix.
    """
    if experts > 1:
        step = max(rows * columns // EXPERT_PROBES, 1)
        return next(s for s in range(step, 0, -1) if math.gcd(s, columns) == 1)
    # A stride shorter than a row skips none. K successive elements lie in K different columns if
    # the stride is coprime with K.
    return next((s for s in range(min(rows, columns) - 1, 1, -1) if math.gcd(s, columns) == 1), 1)


def packed_of(module: Any, kind: type[Packed] = Packed) -> Packed:
    """Return the entry of a layer's weight, by its class."""
    weight: Any = module.weight
    known = cached_state_of(module, kind)
    if known is not None and known.is_of(weight):
        return known
    by_weight = packing().by_weight
    entry = by_weight.get((kind, id(weight)))
    if entry is None or not entry.is_of(weight):
        others = (by_weight.get((other, id(weight))) for other in KINDS)
        known = next((other for other in others if other is not None and other.is_of(weight)), None)
        if known is not None:  # copies share a probe, so that `check` compares it once
            stride, probe = known.stride, known.probe
        else:
            stride = _stride(weight.shape[:-2].numel(), *weight.shape[-2:])
            probe = _sample(weight, stride).clone()
        entry = kind(weakref.ref(module), weight.data_ptr(), weight._version, stride, probe)
    by_weight[kind, id(weight)] = entry
    state_of(module).keep(entry)
    return entry


def has_copy(module: nn.Module, kind: type[Packed] = Packed) -> bool:
    """Return whether a packed copy of a layer's weight, in its present state, exists."""
    weight: Any = module.weight
    entry = packing().by_weight.get((kind, id(weight)))
    return entry is not None and entry.copy is not None and entry.is_of(weight)


def note_shortage(module: nn.Module, kind: type[Packed], reason: str) -> None:
    """Note, for `not_packed`, why a layer's weight has no copy."""
    packed_of(module, kind).shortage = reason
    packing().was_short = True


def _shortage(needed: int, always: bool) -> str | None:
    """Return why there is no memory for the bytes of a packed weight; None where there is."""
    if always and config.settings().memory is None:
        return None
    return budget.shortage_now(needed)


def check(module: Any) -> None:
    """Drop the packed copies of a layer's weight if the weight has changed."""
    weight: Any = module.weight
    probe, differs = None, False
    for kind in KINDS:
        entry = cached_state_of(module, kind)
        if entry is None or entry.copy is None:
            continue
        is_stale = entry.is_stale(weight)
        if not is_stale and entry.probe is not probe:
            probe, differs = entry.probe, entry.probe_differs(weight)
        if is_stale or differs:
            state_of(module).drop(kind)
            by_weight = packing().by_weight
            if by_weight.get((kind, id(weight))) is entry:
                del by_weight[kind, id(weight)]


def forget(model: nn.Module) -> None:
    """Drop the packed copies of a model that has left the CPU or the dtypes that are packed."""
    if packing().by_weight:
        for module in model.modules():
            for kind in KINDS:
                if cached_state_of(module, kind) is not None:
                    state_of(module).drop(kind)


def packed_bytes() -> int:
    """Return the bytes that packed copies hold now."""
    held = budget.held_bytes()
    return sum(held[kind.label] for kind in KINDS)


def shortage_of(layers: Iterable[tuple[nn.Module, type[Packed]]]) -> str | None:
    """Return why memory was short for a copy of one of these layers; None if it was not.

    Args:
        layers: Each layer, and the class of its copy.
    """
    if not packing().was_short:
        return None
    entries = (cached_state_of(layer, kind) for layer, kind in layers)
    return next((entry.shortage for entry in entries if entry is not None and entry.shortage), None)


def not_packed() -> str:
    """Describe how many bytes of weights were not packed for lack of memory; "" if all were."""
    if not packing().was_short:
        return ""
    # By entry, as layers may share a weight.
    missing = {
        id(entry): (entry.shortage, layer)
        for kind in KINDS
        for layer, entry in state.iter_cached_states(kind)
    }
    short = [(reason, layer) for reason, layer in missing.values() if reason]
    sizes = [
        weight.nbytes
        for _, layer in short
        if isinstance(weight := getattr(layer, "weight", None), Tensor)
    ]
    return f"{budget.mib(sum(sizes))} of weights: {short[0][0]}" if sizes else ""


STOPPED = "memory ran out in an earlier call: weights are not packed until fastgen.release()"


def stop_packing() -> None:
    """Drop every packed copy and make none until `release`, after a call ran out of memory."""
    release()
    packing().has_stopped = True


def has_stopped_packing() -> bool:
    """Return whether packing has stopped, after an error, until `release`."""
    return packing().has_stopped


def release() -> None:
    """Drop every packed copy; later calls make them again."""
    state.release(*KINDS, Packing)
