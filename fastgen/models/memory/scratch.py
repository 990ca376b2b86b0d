"""Memory of large tensors on a CPU, taken over once nobody holds it any more.

The system hands out fresh memory page by page, at the first write to each: a large tensor that is new costs up to
several times what computing it costs (44 ms for 33 MB, where a product takes 80 and an activation function 2.5, on a
virtual machine of two cores). What one layer, step or call has ended with serves the next. Whether a storage is free
is asked of the storage itself, so that whoever keeps a tensor, or a view of it, keeps its values.
A device has an allocator that does this.

Source: LightSeq (Wang et al. 2021), section 2.3: memory allocated once and reused.
"""

import ctypes
import itertools
import math
import operator
import sys
import threading
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fastgen import config
from fastgen.models.memory import budget

LIMIT = 2**30
"""Bytes held at most for one model, in use or free, ``FASTGEN_MEMORY`` willing; what goes beyond is fresh each time."""

_holders = getattr(torch._C, "_storage_Use_Count", None)


@dataclass
class _Kept:
    """A storage of so many bytes, and the number of the newest request that it served."""

    storage: torch.UntypedStorage
    size: int
    newest: int

    @property
    def is_free(self) -> bool:
        return cast(Any, _holders)(self.storage._cdata) == 1


_size = operator.attrgetter("size")


class Memory:
    """Storages that have been asked for, from small to large."""

    def __init__(self) -> None:
        self._kept: list[_Kept] = []
        self._held = 0  # bytes in all
        self._requests = 0
        self._lock = threading.RLock()  # a signal handler may come to it again

    @property
    def free(self) -> int:
        """Bytes that nobody uses."""
        with self._lock:
            return sum(kept.size for kept in self._kept if kept.is_free)

    @property
    def held(self) -> int:
        """Bytes in use or free."""
        return self._held

    def take(self, like: Tensor, *shape: int) -> Tensor:
        """Return an uninitialised tensor of a shape, with the dtype and on the device of `like`."""
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
                if (
                    cast(Any, _holders)(kept.storage._cdata) == 2
                ):  # else a signal handler has taken it meanwhile
                    return tensor
        return like.new_empty(shape)

    def room(self, like: Tensor, elements: int, least: int, most: int) -> int:
        """Return how many entries to take at once for each of two tensors, of so many elements each: `least`, or more.

        More, up to `most`, only where free memory has room for them twice, so that it need not be left for more soon.
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
        """Hold the memory of a tensor no longer than its other holders do."""
        storage = tensor.untyped_storage()
        with self._lock:
            self._drop([kept for kept in self._kept if kept.storage is storage])

    def drop_free(self) -> None:
        """Forget what nobody uses."""
        with self._lock:
            self._drop([kept for kept in self._kept if kept.is_free])

    def _fitting(self, least: int, most: int) -> Iterator[_Kept]:
        """Free storages of `least` bytes, up to twice as many as one of `most` bytes would have."""
        limit, holders = 2 * _rounded(most), cast(Any, _holders)
        for at in range(bisect_left(self._kept, least, key=_size), len(self._kept)):
            kept = self._kept[at]
            if kept.size > limit:
                return
            if holders(kept.storage._cdata) == 1:
                yield kept

    def _made(self, size: int) -> _Kept | None:
        """A new storage; None where there are too many."""
        long_ago = (
            self._requests - 4 * len(self._kept) - 16
        )  # free ones that have not served for so long may go
        self._drop([kept for kept in self._kept if kept.newest < long_ago and kept.is_free])
        if self._held + size > LIMIT or not _is_allowed(size):
            return None
        made = _Kept(torch.UntypedStorage(size, device="cpu"), size, self._requests)
        insort(self._kept, made, key=_size)
        self._held += size
        return made

    def _drop(self, dropped: Sequence[_Kept]) -> None:
        if dropped:
            gone = set(map(id, dropped))
            self._kept = [kept for kept in self._kept if id(kept) not in gone]
            self._held -= sum(map(_size, dropped))


def _rounded(size: int) -> int:
    """Up to a sixteenth more, so that one storage serves many sizes."""
    step = 1 << max(0, (size - 1).bit_length() - 5)
    return -(-size // step) * step


def _is_allowed(size: int) -> bool:
    limit = config.settings().memory
    return limit is None or (limit >= size and budget.shortage_now(size) is None)


_memories: "WeakKeyDictionary[object, Memory]" = WeakKeyDictionary()


def memory_of(model: object) -> Memory:
    """The memory that calls of a model share, as long as the model lives."""
    return _memories.setdefault(model, Memory())


def held() -> Iterator[tuple[Any, int]]:
    """Yield models and the bytes that are held for each now, in use or free."""
    for model, memory in list(_memories.items()):
        yield model, memory.held


budget.holders["buffers"] = held


def release() -> None:
    """Give back to the system what nobody uses, and what the C library keeps of what has been freed elsewhere."""
    for memory in list(_memories.values()):
        memory.drop_free()
    if (
        sys.platform.startswith("linux")
        and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None
    ):
        trim(
            0
        )  # which only glibc has, and needs: it gives back blocks of more than 32 MiB alone by itself


# The last one is what oneDNN says, whatever it was that a product has lacked; there is nothing else.
_MESSAGES = (
    "DefaultCPUAllocator: ", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "could not create a primitive"
)  # fmt: skip


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there was not enough memory."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        message in str(error) for message in _MESSAGES
    )
