"""Memory for the keys and values of a call, taken over from an earlier call of the same model.

On a CPU the system hands out fresh memory page by page, at the first write to each: a buffer that is new costs several
times what writing it costs. What one call has ended with serves the next. A device has an allocator that does this.

Source: LightSeq (Wang et al. 2021), section 2.3: memory allocated once and reused.
"""

import math
import threading
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

LIMIT = 2**30
"""Bytes kept for one model at most."""


class Memory:
    """Storages that calls have given back; never more of them than were in use at one time, nor more than `LIMIT`."""

    def __init__(self) -> None:
        self._free: list[torch.UntypedStorage] = []
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes that are kept for a next call."""
        with self._lock:
            return sum(storage.nbytes() for storage in self._free)

    def take(self, like: Tensor, *shape: int) -> Tensor:
        """Return an uninitialised tensor of a shape, with the dtype and on the device of `like`."""
        if like.device.type != "cpu":
            return like.new_empty(shape)
        size = math.prod(shape) * like.element_size()
        with self._lock:
            self._free.sort(key=torch.UntypedStorage.nbytes)
            fitting = next((i for i, storage in enumerate(self._free) if storage.nbytes() >= size), None)
            if fitting is not None:
                storage = self._free.pop(fitting)
            else:  # the largest of those that are too small gives way
                if self._free:
                    self._free.pop()
                storage = torch.UntypedStorage(size)
        return cast(Any, like.new_empty(0)).set_(storage, 0, shape)

    def give(self, tensor: Tensor) -> None:
        """Take back a tensor that `take` returned, which nothing may read any more."""
        storage = tensor.untyped_storage()
        if tensor.device.type == "cpu" and storage.nbytes() + self.nbytes <= LIMIT:
            with self._lock:
                self._free.append(storage)


_memories: "WeakKeyDictionary[object, Memory]" = WeakKeyDictionary()


def memory_of(model: object) -> Memory:
    """The memory that calls of a model share, as long as the model lives."""
    return _memories.setdefault(model, Memory())


def release() -> None:
    """Give all kept memory back to the system."""
    _memories.clear()
