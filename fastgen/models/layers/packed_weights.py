"""Packed copies of the weights of linear layers, and their lifetime."""

import math
import threading
import weakref
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn

from fastgen import config
from fastgen.context import assigned
from fastgen.models.memory import budget
from fastgen.models.memory.scratch import is_out_of_memory
from fastgen.ops import linear as ops

OFTEN = 3
"""Uses of a weight after which packing pays; a call of one token uses it once or twice."""

AGAIN = 1000
"""Uses after which packing is tried again where memory was short."""

_lock = threading.RLock()
_packed: "WeakKeyDictionary[nn.Module, Packed]" = WeakKeyDictionary()
"""Entries by layer. Weak references to the weights would block `torch.utils.swap_tensors`."""
_of_weights: "WeakValueDictionary[int, Packed]" = WeakValueDictionary()
"""Entries by the `id` of the weight, for layers that share one."""
_at_once: ContextVar[bool] = ContextVar("fastgen_packing_at_once", default=False)


@dataclass
class Packed:
    """A packed copy of a weight, with what is needed to detect changes of the weight.

    Attributes:
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

    layer: weakref.ref[nn.Module]
    address: int
    version: int
    stride: int
    probe: Tensor
    uses: int = 0
    copy: ops.PanelWeight | None = None
    shortage: str | None = None

    def is_of(self, weight: Tensor) -> bool:
        """Return whether this entry describes a weight in its present state."""
        return getattr(self.layer(), "weight", None) is weight and not self.is_stale(weight)

    def is_stale(self, weight: Tensor) -> bool:
        return self.address != weight.data_ptr() or self.version != weight._version

    def copied(self, weight: Tensor, plain: Tensor, always: bool) -> ops.PanelWeight | None:
        """Return the copy, packing the weight if it is used often; None where there is none.

        Args:
            weight: The weight.
            plain: The weight as (N, K).
            always: Whether to pack regardless of the memory that is left.
        """
        global _was_short
        if self.copy is None:
            self.uses += 1
            if self.uses >= OFTEN or _at_once.get():
                self.shortage = _shortage(plain, always)
                if self.shortage is None:
                    self._pack(plain)
                if self.copy is None:
                    self.uses = OFTEN - AGAIN
                _was_short = _was_short or self.shortage is not None
        return self.copy

    def _pack(self, plain: Tensor) -> None:
        try:
            self.copy = ops.pack(plain)
        except RuntimeError as error:  # although the system reported free memory
            if not is_out_of_memory(error):
                raise
            self.shortage = "memory is short: a copy could not be allocated"

    def probe_differs(self, weight: Tensor) -> bool:
        return not torch.equal(self.probe, _sample(weight, self.stride))


def _sample(weight: Tensor, stride: int) -> Tensor:
    return weight.detach().reshape(-1)[::stride]  # copies only weights that change within a call


def _stride(rows: int, columns: int) -> int:
    """Return about the largest stride that visits every row and column of a contiguous matrix."""
    # A stride shorter than a row skips none. K successive elements lie in K different columns if
    # the stride is coprime with K.
    return next((s for s in range(min(rows, columns) - 1, 1, -1) if math.gcd(s, columns) == 1), 1)


def packed_of(module: nn.Module) -> Packed:
    """Return the entry of a layer's weight."""
    weight: Any = module.weight
    known = _packed.get(module)
    if known is not None and known.is_of(weight):
        return known
    entry = _of_weights.get(id(weight))
    if entry is None or not entry.is_of(weight):
        stride = _stride(*weight.shape)
        probe = _sample(weight, stride).clone()
        entry = Packed(weakref.ref(module), weight.data_ptr(), weight._version, stride, probe)
    with _lock:
        _packed[module] = _of_weights[id(weight)] = entry
    return entry


def has_copy(module: nn.Module) -> bool:
    """Return whether a packed copy of a layer's weight exists."""
    entry = _of_weights.get(id(module.weight))
    return entry is not None and entry.copy is not None


def packing_at_once() -> assigned[bool]:
    """Context manager in which weights are packed at their first use."""
    return assigned(_at_once, True)


def _shortage(plain: Tensor, always: bool) -> str | None:
    """Return why there is no memory to pack a weight (N, K); None where there is."""
    if always and config.settings().memory is None:
        return None
    return budget.shortage_now(ops.bytes_to_pack(*plain.shape))


def check(module: nn.Module) -> None:
    """Drop the packed copy of a layer's weight if the weight has changed."""
    weight: Any = module.weight
    entry = _packed.get(module)
    if (
        entry is not None
        and entry.copy is not None
        and (entry.is_stale(weight) or entry.probe_differs(weight))
    ):
        _packed.pop(module, None)
        if _of_weights.get(id(weight)) is entry:
            del _of_weights[id(weight)]


def forget(model: nn.Module) -> None:
    """Drop the packed copies of a model that has left the CPU or fp32."""
    with _lock:
        for module in model.modules() if _packed else ():
            _packed.pop(module, None)


def _entries() -> list[tuple[nn.Module, Packed]]:
    """Return one layer and the entry of each weight."""
    with _lock:
        return list({id(entry): (layer, entry) for layer, entry in _packed.items()}.values())


def held() -> list[tuple[nn.Module, int]]:
    """Return one layer and the bytes of each packed copy."""
    return [
        (layer, ops.packed_bytes(entry.copy))
        for layer, entry in _entries()
        if entry.copy is not None
    ]


budget.holders["packed weights"] = held


def packed_bytes() -> int:
    """Return the bytes that packed copies hold now."""
    return sum(size for _, size in held())


_was_short = False
"""Whether memory has been short since the last `release`; avoids a search for missing copies."""


def shortage_of(layers: Iterable[nn.Module]) -> str | None:
    """Return why memory was short for packing one of these layers; None if it was not."""
    if not _was_short:
        return None
    entries = (_packed.get(layer) for layer in layers)
    return next((entry.shortage for entry in entries if entry is not None and entry.shortage), None)


def not_packed() -> str:
    """Describe how many bytes of weights were not packed for lack of memory; "" if all were."""
    missing = (
        [(entry.shortage, layer) for layer, entry in _entries() if entry.shortage]
        if _was_short
        else []
    )
    sizes = [
        weight.nbytes
        for _, layer in missing
        if isinstance(weight := getattr(layer, "weight", None), Tensor)
    ]
    return f"{budget.mib(sum(sizes))} of weights: {missing[0][0]}" if sizes else ""


GIVEN_UP = "memory ran out in an earlier call: weights are not packed until fastgen.release()"
_given_up = False


def give_up() -> None:
    """Drop every packed copy and make none until `release`, after a call ran out of memory."""
    global _given_up
    release()
    _given_up = True


def has_stopped_packing() -> bool:
    """Return whether packing has stopped, after an error, until `release`."""
    return _given_up


def release() -> None:
    """Drop every packed copy; later calls make them again."""
    global _given_up, _was_short
    with _lock:
        _packed.clear()
        _given_up = _was_short = False
