"""Memory of large tensors on a CPU, taken over once nobody holds it any more.

The system hands out fresh memory page by page, at the first write to each: a large tensor that is new costs up to
several times what computing it costs (44 ms for 33 MB, where a product takes 80 and an activation function 2.5, on a
virtual machine of two cores). What one layer, step or call has ended with serves the next. Whether a storage is free
is asked of the storage itself, so that whoever keeps a tensor, or a view of it, keeps its values.
A device has an allocator that does this.

Source: LightSeq (Wang et al. 2021), section 2.3: memory allocated once and reused.
"""

import math
import threading
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

LIMIT = 2**30
"""Bytes held at most for one model, in use or free; what goes beyond is fresh from the system."""

_holders = getattr(torch._C, "_storage_Use_Count", None)


class Memory:
    """Storages that have been asked for, each with the number of the newest request that it served.

    planned: whether they take no memory, for tensors that are not computed (`models.footprint`).
    """

    def __init__(self, planned: bool = False) -> None:
        self.planned = planned
        self._storages: dict[int, tuple[torch.UntypedStorage, int]] = {}
        self._requests = 0
        self._lock = threading.Lock()

    @property
    def free(self) -> int:
        """Bytes that nobody uses."""
        with self._lock:
            return sum(storage.nbytes() for storage in self._free())

    def take(self, like: Tensor, *shape: int) -> Tensor:
        """Return an uninitialised tensor of a shape, with the dtype and on the device of `like`."""
        size = math.prod(shape) * like.element_size()
        if like.device.type != "cpu" or _holders is None or size == 0:
            return like.new_empty(shape)
        with self._lock:
            self._requests += 1
            fitting = [storage for storage in self._free() if size <= storage.nbytes() <= 2 * _rounded(size)]
            if fitting:
                storage = min(fitting, key=torch.UntypedStorage.nbytes)
            else:
                self._let_go()
                if self._held + _rounded(size) > LIMIT:
                    return like.new_empty(shape)
                storage = torch.UntypedStorage(_rounded(size), device="meta" if self.planned else "cpu")
            self._storages[id(storage)] = storage, self._requests
            return cast(Any, like.new_empty(0)).set_(storage, 0, shape)

    def room(self, like: Tensor, elements: int, least: int, most: int) -> int:
        """Return how many entries to take at once for each of two tensors, of so many elements each: `least`, or more.

        More, up to `most`, only where free memory has room for them twice, so that it need not be left for more soon.
        """
        size = elements * like.element_size()
        with self._lock:
            sizes = [storage.nbytes() for storage in self._free()]
        fitting = sorted(held for held in sizes if least * size <= held <= 2 * _rounded(most * size))
        return max(least, min(most, fitting[0] // size)) if len(fitting) > 1 and size else least

    def forget(self, tensor: Tensor) -> None:
        """Hold the memory of a tensor no longer than its other holders do."""
        with self._lock:
            self._storages.pop(id(tensor.untyped_storage()), None)

    def _free(self) -> list[torch.UntypedStorage]:
        return [storage for storage, _ in self._storages.values() if cast(Any, _holders)(storage._cdata) == 1]

    @property
    def _held(self) -> int:
        return sum(storage.nbytes() for storage, _ in self._storages.values())

    def drop_free(self) -> None:
        """Forget what nobody uses."""
        with self._lock:
            for storage in self._free():
                del self._storages[id(storage)]

    def _let_go(self) -> None:
        """Forget free storages that have not served for long."""
        long_ago = self._requests - 4 * len(self._storages) - 16
        for storage in self._free():
            if self._storages[id(storage)][1] < long_ago:
                del self._storages[id(storage)]


def _rounded(size: int) -> int:
    """Up to a sixteenth more, so that one storage serves many sizes."""
    step = 1 << max(0, (size - 1).bit_length() - 5)
    return -(-size // step) * step


_memories: "WeakKeyDictionary[object, Memory]" = WeakKeyDictionary()


def memory_of(model: object) -> Memory:
    """The memory that calls of a model share, as long as the model lives."""
    return _memories.setdefault(model, Memory())


def plan_for(model: object) -> None:
    """Let a model that has made no call yet make its calls on tensors that take no memory."""
    _memories[model] = Memory(planned=True)


def release() -> None:
    """Give back to the system what nobody uses."""
    for memory in list(_memories.values()):
        memory.drop_free()


_MESSAGES = ("DefaultCPUAllocator: ", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there was not enough memory."""
    return isinstance(error, torch.OutOfMemoryError) or any(message in str(error) for message in _MESSAGES)
