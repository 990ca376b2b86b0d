"""Packed copies of the weights of linear layers: when they are made, and when they are dropped."""

import math
import threading
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fastgen.models.memory import is_out_of_memory
from fastgen.ops import linear as ops

OFTEN = 3
"""Uses of a weight from which on a copy pays: a call of one token uses one once or twice."""

AGAIN = 1000
"""Uses after which a copy is thought of again for which there was no memory."""

_lock = threading.RLock()
_packed: "WeakTensorKeyDictionary" = WeakTensorKeyDictionary()
_at_once: ContextVar[bool] = ContextVar("fastgen_packing_at_once", default=False)


@dataclass
class Packed:
    """A packed copy of a weight and what tells whether the weight is still the one it was made from.

    probe: every stride-th element, compared at the start of each call to notice writes through `.data`, which no
        version shows.
    """

    address: int
    version: int
    stride: int
    probe: Tensor
    uses: int = 0
    copy: ops.Packed | None = None

    def is_stale(self, weight: Tensor) -> bool:
        return self.address != weight.data_ptr() or self.version != weight._version

    def copied(
        self, weight: Tensor, plain: Tensor, rows: int, activation: str | None, always: bool
    ) -> ops.Packed | None:
        """The copy, made now if the weight is used often; None where there is none.

        plain: the weight as (N, K). always: whether memory is not looked at.
        """
        if self.copy is None:
            self.uses += 1
            if self.uses >= OFTEN or _at_once.get():
                if always or _affordable(weight):
                    self.copy = _pack(plain, rows, activation)
                if self.copy is None:
                    self.uses = OFTEN - AGAIN
        return self.copy

    def probe_differs(self, weight: Tensor) -> bool:
        return not torch.equal(self.probe, _sample(weight, self.stride))


def _pack(plain: Tensor, rows: int, activation: str | None) -> ops.Packed | None:
    """A packed copy; None where there is no memory for one, whatever the system says is free."""
    try:
        return ops.pack(plain, rows, activation)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None


def _sample(weight: Tensor, stride: int) -> Tensor:
    return weight.detach().reshape(-1)[::stride]  # no copy but of weights that change within a call


def _stride(rows: int, columns: int) -> int:
    """The largest stride, about, that comes to every row and to every column of a contiguous matrix."""
    # No longer than a row, so that none is left out; K of them in succession are at K columns if K has no factor of it.
    return next((s for s in range(min(rows, columns) - 1, 1, -1) if math.gcd(s, columns) == 1), 1)


def packed_of(weight: Tensor) -> Packed:
    """What is known of a weight's copy."""
    entry = _packed.get(weight)
    if entry is None or entry.is_stale(weight):
        stride = _stride(*weight.shape)
        entry = Packed(weight.data_ptr(), weight._version, stride, _sample(weight, stride).clone())
        with _lock:
            _packed[weight] = entry
    return entry


@contextmanager
def packing_at_once() -> Generator[None]:
    """Within it weights are packed when they are first used, and not when they are used often."""
    token = _at_once.set(True)
    try:
        yield
    finally:
        _at_once.reset(token)


def _affordable(weight: Tensor) -> bool:
    """Whether packed copies, with one of this weight, take no more memory than they leave free."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return True  # not Linux: the system does not say
    free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return packed_bytes() + 2 * ops.bytes_to_pack(*weight.shape) <= free


def check(module: nn.Module) -> None:
    """Drop the packed copy of a layer's weight where the weight is no longer what it was."""
    weight: Any = module.weight
    entry = _packed.get(weight)
    if entry is not None and entry.copy is not None and (entry.is_stale(weight) or entry.probe_differs(weight)):
        del _packed[weight]


def forget(model: nn.Module) -> None:
    """Drop the packed copies of a model's weights, which have left the CPU or fp32 since."""
    with _lock:
        for weight in model.parameters() if _packed else ():
            _packed.pop(weight, None)


def packed_bytes() -> int:
    """Bytes that packed copies of weights hold now."""
    with _lock:
        return sum(ops.packed_bytes(entry.copy) for entry in _packed.values() if entry.copy is not None)


def release() -> None:
    """Drop every packed copy; the next calls make them again."""
    with _lock:
        _packed.clear()
