"""Reuse of the memory of large CPU tensors.

The system maps fresh memory page by page at the first write. A new large tensor thus costs up to
several times its computation: 44 ms for 33 MB, where a product takes 80 ms and an activation
function 2.5 ms (virtual machine, 2 cores). Here, memory that one layer, step or call has released
serves the next. The reference count of a storage tells whether it is free, so that tensors and
views that someone still holds keep their values. On devices, PyTorch's caching allocator does this.

Source: LightSeq (Wang et al. 2021), section 2.3: memory allocated once and reused.
"""

import itertools
import math
import operator
import threading
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fastgen import config
from fastgen.models.memory import budget
from fastgen.models.state import CachedState, state_of

LIMIT = 2**30
"""Maximum number of bytes held for one model, in use or free, within `FASTGEN_MEMORY`.

Requests beyond it get fresh memory each time.
"""

_holders = getattr(torch._C, "_storage_Use_Count", None)


@dataclass
class _Kept:
    """A held storage.

    Attributes:
        storage: The storage.
        size: Its size in bytes.
        newest: Number of the latest request that it served.
    """

    storage: torch.UntypedStorage
    size: int
    newest: int

    @property
    def is_free(self) -> bool:
        return cast(Any, _holders)(self.storage._cdata) == 1


_size = operator.attrgetter("size")


class ScratchPool(CachedState):
    """Pool of storages, sorted by size."""

    label = "buffers"

    def __init__(self) -> None:
        self._kept: list[_Kept] = []
        self._held = 0  # bytes
        self._requests = 0
        self._lock = threading.RLock()  # reentrant, as a signal handler may allocate

    @property
    def free(self) -> int:
        """Bytes that are held but not in use."""
        with self._lock:
            return sum(kept.size for kept in self._kept if kept.is_free)

    @property
    def nbytes(self) -> int:
        """Bytes held, in use or free."""
        return self._held

    def release(self) -> bool:
        """Drop all free storages."""
        with self._lock:
            self._drop([kept for kept in self._kept if kept.is_free])
        return False

    def take(self, like: Tensor, *shape: int) -> Tensor:
        """Return an uninitialised tensor.

        Args:
            like: Provides dtype and device.
            shape: Shape of the tensor.
        """
        size = math.prod(shape) * like.element_size()
        if like.device.type != "cpu" or _holders is None or size == 0:
            return like.new_empty(shape)
        with self._lock:
            self._requests += 1
            while (
                kept := next(self._fitting(size, size), None) or self._made(_rounded(size))
            ) is not None:
                kept.newest = self._requests
                tensor = cast(Any, like.new_empty(0)).set_(kept.storage, 0, shape)
                # Otherwise a signal handler took it meanwhile.
                if cast(Any, _holders)(kept.storage._cdata) == 2:
                    return tensor
        return like.new_empty(shape)

    def capacity(self, like: Tensor, elements: int, least: int, most: int) -> int:
        """Return how many entries to allocate at once for each of two tensors.

        More than `least` pays only where free memory fits them twice, so that they need not move
        soon.

        Args:
            like: Provides dtype and device.
            elements: Elements per entry.
            least: Minimum number of entries.
            most: Maximum number of entries.
        """
        size = elements * like.element_size()
        if size == 0 or like.device.type != "cpu" or _holders is None:
            return least
        with self._lock:
            fitting = [
                kept.size for kept in itertools.islice(self._fitting(least * size, most * size), 2)
            ]
        return max(least, min(most, fitting[0] // size)) if len(fitting) > 1 else least

    def forget(self, tensor: Tensor) -> None:
        """Drop the storage of a tensor from the pool; its other holders keep it alive."""
        storage = tensor.untyped_storage()
        with self._lock:
            self._drop([kept for kept in self._kept if kept.storage is storage])

    def _fitting(self, least: int, most: int) -> Iterator[_Kept]:
        """Yield free storages from `least` bytes up to twice the rounded size of `most` bytes."""
        limit, holders = 2 * _rounded(most), cast(Any, _holders)
        for at in range(bisect_left(self._kept, least, key=_size), len(self._kept)):
            kept = self._kept[at]
            if kept.size > limit:
                return
            if holders(kept.storage._cdata) == 1:
                yield kept

    def _made(self, size: int) -> _Kept | None:
        """Allocate a storage and add it to the pool; return None where that exceeds the limits."""
        # Drop free storages that have not served a request for long.
        long_ago = self._requests - 4 * len(self._kept) - 16
        self._drop([kept for kept in self._kept if kept.newest < long_ago and kept.is_free])
        if self._held + size > LIMIT or not _is_allowed(size):
            return None
        entry = _Kept(torch.UntypedStorage(size, device="cpu"), size, self._requests)
        insort(self._kept, entry, key=_size)
        self._held += size
        return entry

    def _drop(self, dropped: Sequence[_Kept]) -> None:
        if dropped:
            gone = set(map(id, dropped))
            self._kept = [kept for kept in self._kept if id(kept) not in gone]
            self._held -= sum(map(_size, dropped))


def _rounded(size: int) -> int:
    """Round up by at most a sixteenth, so that one storage serves many sizes."""
    step = 1 << max(0, (size - 1).bit_length() - 5)
    return -(-size // step) * step


def _is_allowed(size: int) -> bool:
    limit = config.settings().memory
    return limit is None or (limit >= size and budget.shortage_now(size) is None)


def scratch_pool_of(model: object) -> ScratchPool:
    """Return the pool shared by all calls of a model, for as long as the model lives."""
    return state_of(model).of(ScratchPool)


# The last message is oneDNN's for any resource a product lacked; it offers no other.
_MESSAGES = (
    "DefaultCPUAllocator: ", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED",
    "could not create a primitive"
)  # fmt: skip


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports a lack of memory."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        message in str(error) for message in _MESSAGES
    )
