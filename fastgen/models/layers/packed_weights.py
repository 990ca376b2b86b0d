"""Packed copies of the weights of linear layers: when they are made, and when they are dropped."""

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
"""Uses of a weight from which on a copy pays: a call of one token uses one once or twice."""

AGAIN = 1000
"""Uses after which a copy is thought of again for which there was no memory."""

_lock = threading.RLock()
_packed: "WeakKeyDictionary[nn.Module, Packed]" = WeakKeyDictionary()
"""By layer. A weak reference to a weight itself would be in the way of `torch.utils.swap_tensors`."""
_of_weights: "WeakValueDictionary[int, Packed]" = WeakValueDictionary()
"""The same by the `id` of the weight, for layers that share one."""
_at_once: ContextVar[bool] = ContextVar("fastgen_packing_at_once", default=False)


@dataclass
class Packed:
    """A packed copy of a weight and what tells whether the weight is still the one it was made from.

    layer: one that has the weight.
    probe: every stride-th element, compared at the start of each call to notice writes through `.data`, which no
        version shows.
    shortage: why there was no memory for a copy when one was to be made.
    """

    layer: weakref.ref[nn.Module]
    address: int
    version: int
    stride: int
    probe: Tensor
    uses: int = 0
    copy: ops.Packed | None = None
    shortage: str | None = None

    def is_of(self, weight: Tensor) -> bool:
        """Whether this is of a weight, as it is."""
        return getattr(self.layer(), "weight", None) is weight and not self.is_stale(weight)

    def is_stale(self, weight: Tensor) -> bool:
        return self.address != weight.data_ptr() or self.version != weight._version

    def copied(
        self, weight: Tensor, plain: Tensor, rows: int, activation: str | None, always: bool
    ) -> ops.Packed | None:
        """The copy, made now if the weight is used often; None where there is none.

        plain: the weight as (N, K). always: whether what the system has left is not looked at.
        """
        global _was_short
        if self.copy is None:
            self.uses += 1
            if self.uses >= OFTEN or _at_once.get():
                self.shortage = _shortage(plain, always)
                if self.shortage is None:
                    self._pack(plain, rows, activation)
                if self.copy is None:
                    self.uses = OFTEN - AGAIN
                _was_short = _was_short or self.shortage is not None
        return self.copy

    def _pack(self, plain: Tensor, rows: int, activation: str | None) -> None:
        try:
            self.copy = ops.pack(plain, rows, activation)
        except RuntimeError as error:  # whatever the system says is free
            if not is_out_of_memory(error):
                raise
            self.shortage = "memory is short: a copy could not be allocated"

    def probe_differs(self, weight: Tensor) -> bool:
        return not torch.equal(self.probe, _sample(weight, self.stride))


def _sample(weight: Tensor, stride: int) -> Tensor:
    return weight.detach().reshape(-1)[::stride]  # no copy but of weights that change within a call


def _stride(rows: int, columns: int) -> int:
    """The largest stride, about, that comes to every row and to every column of a contiguous matrix."""
    # No longer than a row, so that none is left out; K of them in succession are at K columns if K has no factor of it.
    return next((s for s in range(min(rows, columns) - 1, 1, -1) if math.gcd(s, columns) == 1), 1)


def packed_of(module: nn.Module) -> Packed:
    """What is known of the copy of a layer's weight."""
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
    """Whether there is a packed copy of a layer's weight."""
    entry = _of_weights.get(id(module.weight))
    return entry is not None and entry.copy is not None


def packing_at_once() -> assigned[bool]:
    """Within it weights are packed when they are first used, and not when they are used often."""
    return assigned(_at_once, True)


def _shortage(plain: Tensor, always: bool) -> str | None:
    """Why there is no memory for a copy of a weight (N, K); None where there is."""
    if always and config.settings().memory is None:
        return None
    return budget.shortage_now(ops.bytes_to_pack(*plain.shape))


def check(module: nn.Module) -> None:
    """Drop the packed copy of a layer's weight where the weight is no longer what it was."""
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
    """Drop the packed copies of a model's weights, which have left the CPU or fp32 since."""
    with _lock:
        for module in model.modules() if _packed else ():
            _packed.pop(module, None)


def _entries() -> list[tuple[nn.Module, Packed]]:
    """What is known of each weight, with one of its layers."""
    with _lock:
        return list({id(entry): (layer, entry) for layer, entry in _packed.items()}.values())


def held() -> list[tuple[nn.Module, int]]:
    """Return layers whose weights have packed copies, one for each copy, and its bytes."""
    return [
        (layer, ops.packed_bytes(entry.copy))
        for layer, entry in _entries()
        if entry.copy is not None
    ]


budget.holders["packed weights"] = held


def packed_bytes() -> int:
    """Bytes that packed copies of weights hold now."""
    return sum(size for _, size in held())


_was_short = False
"""Whether there has been no memory for a copy since the last `release`: else nobody looks for one that lacks."""


def shortage_of(layers: Iterable[nn.Module]) -> str | None:
    """Return why there was no memory for a copy of a weight of these layers; None where there was for all."""
    if not _was_short:
        return None
    found = (_packed.get(layer) for layer in layers)
    return next((entry.shortage for entry in found if entry is not None and entry.shortage), None)


def not_packed() -> str:
    """Say how many bytes of weights there was no memory to copy for, and why first; empty where there was for all."""
    found = (
        [(entry.shortage, layer) for layer, entry in _entries() if entry.shortage]
        if _was_short
        else []
    )
    sizes = [
        weight.nbytes
        for _, layer in found
        if isinstance(weight := getattr(layer, "weight", None), Tensor)
    ]
    return f"{budget.mib(sum(sizes))} of weights: {found[0][0]}" if sizes else ""


GIVEN_UP = "memory ran out in an earlier call: weights are not packed until fastgen.release()"
_given_up = False


def give_up() -> None:
    """Drop every packed copy, and make none before `release`: a call has failed for want of memory."""
    global _given_up
    release()
    _given_up = True


def has_given_up() -> bool:
    return _given_up


def release() -> None:
    """Drop every packed copy; the next calls make them again."""
    global _given_up, _was_short
    with _lock:
        _packed.clear()
        _given_up = _was_short = False
