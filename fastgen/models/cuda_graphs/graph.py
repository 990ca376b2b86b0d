"""Capture of functions over static memory as CUDA graphs.

The kernels of a function are recorded once and then launched together. A decode step consists of
some two hundred kernels of a few microseconds each, which take longer to launch one by one than to
run.

Source: NVIDIA, CUDA C++ Programming Guide, CUDA graphs; PyTorch, `torch.cuda.CUDAGraph`.
"""

import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from fastgen import config
from fastgen.models.state import CachedState, process_state
from fastgen.ops.dispatch import counting_in, new_counters

_T = TypeVar("_T")


def enabled(tensor: Tensor) -> bool:
    """Return whether functions that run on a tensor's device should be captured."""
    return tensor.device.type == "cuda" and config.settings().graphs != "off"


ROOMY = 2048
"""Inverse of the largest share of a device's memory that a single oversized buffer may take."""


def may_be_roomy(like: Tensor, elements: int) -> bool:
    """Return whether a buffer may be larger than a text needs now.

    A graph is valid until its memory moves, so that a roomy buffer avoids captures. A model has two
    such buffers per layer, all of which together take a few percent of the device's memory.

    Args:
        like: A tensor with the dtype and device of the buffer.
        elements: Elements of the buffer.
    """
    return enabled(like) and elements * like.element_size() <= _bytes_of(like.device) // ROOMY


@functools.cache
def _bytes_of(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 2**36


class NotCaptured(Exception):
    """A function cannot be captured; it has not run."""


class CapturePool:
    """Memory pool and stream for CUDA graphs.

    A replay may overwrite the results of other graphs in the pool. Graphs that are replayed in turn
    therefore share a pool only if the result of each is read before the next one runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self._first = torch.cuda.CUDAGraph()  # keeps the pool alive
        self.counters = new_counters(device)  # zeroed on the stream that launches the graphs
        with torch.cuda.stream(self.stream):
            # cuBLAS allocates its workspace at the first product on a stream. This product keeps it
            # out of the pool, which would never get it back.
            one = torch.ones(1, 1, device=device, dtype=torch.float32)
            torch.mm(one, one)
            with _without_collection():
                self._first.capture_begin(capture_error_mode="thread_local")
                try:
                    torch.zeros(1, device=device, dtype=torch.float32)
                finally:
                    self._first.capture_end()
        self.pool: Any = self._first.pool()

    def abandon(self) -> None:
        """Make the allocator forget a failed capture, which it otherwise considers active."""
        with contextlib.suppress(Exception):  # in case PyTorch has cleaned up itself
            index = torch.cuda.current_device() if self.device.index is None else self.device.index
            cast(Any, torch._C)._cuda_endAllocateToPool(index, self.pool)
        with contextlib.suppress(Exception):
            # Until a capture succeeds, the random number generator refuses to draw outside of one.
            CapturePool(self.device)


def capture(
    function: Callable[[], _T], device: torch.device, pool: CapturePool | None
) -> tuple[Callable[[], object], _T]:
    """Capture a function that has already run with the same shapes, without running it.

    Args:
        function: The function.
        device: The device it runs on.
        pool: The pool to capture in.

    Returns:
        A callable that replays the graph, and the function's result: tensors that every replay
        overwrites.

    Raises:
        NotCaptured: The function synchronises with the device or does something else that a graph
            cannot record. The pool is unusable afterwards.
    """
    assert pool is not None
    graph = torch.cuda.CUDAGraph()
    pool.stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with _without_collection(), torch.cuda.stream(pool.stream), counting_in(pool.counters):
            graph.capture_begin(pool=pool.pool, capture_error_mode="thread_local")
            try:
                result = function()
            finally:
                graph.capture_end()
    except BaseException as error:
        pool.abandon()
        if not isinstance(error, Exception):
            raise
        raise NotCaptured(_first_line(error)) from error
    return graph.replay, result


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


class RunningCaptures(CachedState):
    """The captures that run now, in all threads.

    Attributes:
        count: Number of captures.
        collects: Whether garbage collection was enabled before the first of them.
    """

    def __init__(self) -> None:
        self.count, self.collects = 0, False


@contextlib.contextmanager
def _without_collection() -> Generator[None]:
    """Disable garbage collection, as collecting a graph would end a capture."""
    running = process_state().of(RunningCaptures)
    with _lock:
        if not running.count:
            running.collects = gc.isenabled()
            gc.disable()
        running.count += 1
    try:
        yield
    finally:
        with _lock:
            running.count -= 1
            if not running.count and running.collects:
                gc.enable()


class BorrowedPool:
    """A `CapturePool` borrowed at its first use and returned when the last user is collected."""

    def __init__(self) -> None:
        self._borrowed_pool: tuple[Any, CapturePool] | None = None

    def place(self, device: torch.device) -> CapturePool | None:
        """Return the pool; None on a CPU, which has no graphs.

        Raises:
            NotCaptured: There is no free pool, and the device cannot make one.
        """
        if self._borrowed_pool is None and device.type == "cuda":
            try:
                self._borrowed_pool = _borrowed(device)
            except RuntimeError as error:
                raise NotCaptured(_first_line(error)) from error
        return None if self._borrowed_pool is None else self._borrowed_pool[1]

    def lose(self) -> None:
        """Drop the pool without returning it, as a failed capture left it in an unknown state."""
        self._borrowed_pool = None

    def __del__(self) -> None:
        borrowed_pool, self._borrowed_pool = self._borrowed_pool, None
        if borrowed_pool is not None:
            with _lock:
                process_state().of(FreePools).pools.setdefault(borrowed_pool[0], []).append(
                    borrowed_pool[1]
                )


class CapturedFunction:
    """A function over static memory, captured at its second run and replayed from then on.

    Args:
        borrowed_pool: The pool to capture in. Functions may share it if none of them runs between a
            run of this one and the last read of its result. None for a pool of its own.
    """

    def __init__(self, borrowed_pool: BorrowedPool | None = None) -> None:
        self._inputs: tuple[object, ...] | None = None
        self._launch: Callable[[], object] | None = None
        self._result: Any = None
        self._borrowed_pool = BorrowedPool() if borrowed_pool is None else borrowed_pool

    def __call__(self, function: Callable[[], _T], device: torch.device, *inputs: object) -> _T:
        """Return the function's result, which the next run may overwrite.

        Args:
            function: The function to run or replay.
            device: The device it runs on.
            inputs: Everything it reads or depends on. A captured graph is valid only for the
                identical tensors and for equal values of all else.

        Raises:
            NotCaptured: As `capture`; the function has not run.
        """
        if self._repeats(inputs):
            if self._launch is None:
                self._launch, self._result = self._captured(function, device)
            self._launch()
            return self._result
        self._launch = self._result = None
        result = function()
        self._inputs = inputs
        return result

    def replays(self, inputs: Sequence[object]) -> bool:
        """Return whether a run with these inputs would be a replay."""
        return self._launch is not None and self._repeats(inputs)

    @property
    def result(self) -> Any:
        """The tensors that replays overwrite; None if nothing is captured."""
        return self._result

    def _repeats(self, inputs: Sequence[object]) -> bool:
        return self._inputs is not None and same(inputs, self._inputs)

    def forget(self) -> None:
        """Drop all references to inputs, graph and result."""
        self._inputs = self._launch = self._result = None

    def _captured(
        self, function: Callable[[], _T], device: torch.device
    ) -> tuple[Callable[[], object], _T]:
        try:
            return capture(function, device, self._borrowed_pool.place(device))
        except BaseException:
            self._borrowed_pool.lose()
            raise


_lock = threading.RLock()  # reentrant, as garbage collection may return a pool meanwhile


class FreePools(CachedState):
    """Pools that nobody uses, by device and by the stream that launches and so orders the graphs.

    Attributes:
        pools: The pools.
    """

    def __init__(self) -> None:
        self.pools: dict[tuple[torch.device, int], list[CapturePool]] = {}

    def release(self) -> bool:
        """Free the memory of the pools."""
        with _lock:
            self.pools.clear()
        return False


def _borrowed(device: torch.device) -> tuple[Any, CapturePool]:
    """Take a free pool or create one; return it with its key in `FreePools`."""
    key = device, torch.cuda.current_stream(device).cuda_stream
    with _lock:
        pools = process_state().of(FreePools).pools.get(key)
        if pools:
            return key, pools.pop()
    return key, CapturePool(device)


def generator(device: torch.device) -> torch.Generator:
    """Return the default random number generator of a device."""
    return (
        torch.default_generator
        if device.type == "cpu"
        else torch.cuda.default_generators[device.index]
    )


@functools.cache
def draws_alike(device: torch.device) -> bool:
    """Return whether graphs draw the same random numbers as eager calls.

    They must also leave the generator in the same state. The test runs once per device and restores
    the generator's state.
    """
    source = generator(device)
    before = source.get_state()
    numbers, recorded = torch.empty(TRIED, device=device, dtype=torch.float32), CapturedFunction()
    draw = functools.partial(_draw, numbers)
    try:
        eager = [draw().clone() for _ in range(3)]
        after = source.get_state()
        source.set_state(before)
        replayed = [recorded(draw, device, numbers).clone() for _ in range(3)]
        return torch.equal(source.get_state(), after) and all(map(torch.equal, replayed, eager))
    except NotCaptured:
        return False
    finally:
        source.set_state(before)


TRIED = 2**21
"""Random numbers drawn by the test of `draws_alike`: more than a device has threads."""


def _draw(numbers: Tensor) -> Tensor:
    return numbers.exponential_()


def same(new: Sequence[object], old: Sequence[object]) -> bool:
    """Return whether all tensors are identical objects and all other values are equal."""
    return len(new) == len(old) and all(map(_same, new, old))


def _same(new: object, old: object) -> bool:
    return new is old if isinstance(new, Tensor) or isinstance(old, Tensor) else new == old


class DelayedRead:
    """Asynchronous copy of values from a device into a reusable buffer on the host."""

    def __init__(self, like: Tensor) -> None:
        on_device = like.device.type == "cuda"
        self._values = torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=on_device)
        self._arrived = torch.cuda.Event() if on_device else None

    def send(self, values: Tensor) -> None:
        self._values.copy_(values, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record(torch.cuda.current_stream(values.device))

    @property
    def ready(self) -> bool:
        """Whether the latest values have arrived, so that `read` does not wait."""
        return self._arrived is None or self._arrived.query()

    def read(self) -> Tensor:
        """Wait for the latest values and return them, on the CPU."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values
