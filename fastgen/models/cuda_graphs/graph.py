"""A function over fixed memory as a CUDA graph: its kernels are recorded once, and launched together from then on.

A decode step is some two hundred kernels of a few microseconds each, and launching them one by one takes longer than
running them.

Source: NVIDIA, CUDA C++ Programming Guide, CUDA graphs; PyTorch, `torch.cuda.CUDAGraph`.
"""

import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from fastgen import config
from fastgen.ops.dispatch import counting_in, new_counters

_T = TypeVar("_T")


def wanted(tensor: Tensor) -> bool:
    """Say whether what runs on the device of a tensor is to be captured."""
    return tensor.device.type == "cuda" and config.settings().graphs != "off"


ROOMY = 2048
"""One part in so many of a device's memory, up to which a buffer may be made for the longest text at once."""


def may_be_roomy(like: Tensor, elements: int) -> bool:
    """Whether a buffer of so many elements may be larger than a text needs now: a graph holds until its memory moves.

    A model has two of them for each layer, all of which then take a few hundredths of the device's memory.
    """
    return wanted(like) and elements * like.element_size() <= _bytes_of(like.device) // ROOMY


@functools.cache
def _bytes_of(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 2**36


class NotCaptured(Exception):
    """A function cannot be captured; it has not run."""


class CapturePool:
    """A pool of memory and a stream for the graphs of one function: of those only the newest is ever replayed.

    Functions that are replayed in turn must not share a pool: what one leaves in it for others to read may lie where
    another computes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self._first = torch.cuda.CUDAGraph()  # as long as it lives, the pool does
        self.counters = new_counters(device)  # set to 0 on the stream that graphs are launched on
        with torch.cuda.stream(self.stream):
            # cuBLAS makes its workspace for a stream at the first product there: outside of the pool, which would never
            # get it back.
            one = torch.ones(1, 1, device=device, dtype=torch.float32)
            torch.mm(one, one)
            self._first.capture_begin(capture_error_mode="thread_local")
            try:
                torch.zeros(1, device=device, dtype=torch.float32)
            finally:
                self._first.capture_end()
        self.pool: Any = self._first.pool()

    def give_up(self) -> None:
        """Let the allocator forget a capture that has failed: it goes on as if there was one."""
        with contextlib.suppress(Exception):  # where PyTorch has cleaned up by itself
            index = torch.cuda.current_device() if self.device.index is None else self.device.index
            cast(Any, torch._C)._cuda_endAllocateToPool(index, self.pool)
        with contextlib.suppress(Exception):
            CapturePool(
                self.device
            )  # until a capture ends well, the generator of random numbers refuses to draw outside one


def capture(
    function: Callable[[], _T], device: torch.device, place: CapturePool | None
) -> tuple[Callable[[], object], _T]:
    """Capture a function that has run before, with the same shapes; it does not run.

    Returns:
        What runs it, and its result: tensors that every run writes anew.
    Raises:
        NotCaptured: it waits for the device, or does something else that a graph cannot hold; the place is lost.
    """
    assert place is not None
    graph = torch.cuda.CUDAGraph()
    place.stream.wait_stream(torch.cuda.current_stream(device))
    collects = gc.isenabled()
    try:
        gc.disable()  # a graph that is collected meanwhile would end the capture
        with torch.cuda.stream(place.stream), counting_in(place.counters):
            graph.capture_begin(pool=place.pool, capture_error_mode="thread_local")
            try:
                result = function()
            finally:
                graph.capture_end()
    except BaseException as error:
        place.give_up()
        if not isinstance(error, Exception):
            raise
        raise NotCaptured(str(error).partition("\n")[0]) from error
    finally:
        if collects:
            gc.enable()
    return graph.replay, result


class BorrowedPool:
    """A place that is borrowed when it is first asked for, and given back with the last function that runs there."""

    def __init__(self) -> None:
        self._lent: tuple[Any, CapturePool] | None = None

    def place(self, device: torch.device) -> CapturePool | None:
        """The place; None on a CPU, which has no graphs."""
        if self._lent is None and device.type == "cuda":
            self._lent = _borrowed(device)
        return None if self._lent is None else self._lent[1]

    def lose(self) -> None:
        """What ran there has left it in a state that nobody knows."""
        self._lent = None

    def __del__(self) -> None:
        lent, self._lent = self._lent, None
        if lent is not None:
            with _lock:
                _free.setdefault(lent[0], []).append(lent[1])


class CapturedFunction:
    """A function that is run again and again over the same memory: captured at its second run, then replayed.

    lent: where it is captured, with others that never run between a run of this one and the last look at its result.
    """

    def __init__(self, lent: BorrowedPool | None = None) -> None:
        self._inputs: tuple[object, ...] | None = None
        self._launch: Callable[[], object] | None = None
        self._result: Any = None
        self._lent = BorrowedPool() if lent is None else lent

    def __call__(self, function: Callable[[], _T], device: torch.device, *inputs: object) -> _T:
        """Return the function's result, which the next run may write anew.

        inputs: what it reads, and what it depends on else. Where a tensor is not the one that it was, or anything else
            does not equal what it was, nothing that has been captured holds.
        Raises:
            NotCaptured: see `capture`; the function has not run.
        """
        if self._inputs is not None and same(inputs, self._inputs):
            if self._launch is None:
                self._launch, self._result = self._captured(function, device)
            self._launch()
            return self._result
        self._launch = self._result = None
        result = function()
        self._inputs = inputs
        return result

    def forget(self) -> None:
        """Hold on to nothing that was given or returned."""
        self._inputs = self._launch = self._result = None

    def _captured(
        self, function: Callable[[], _T], device: torch.device
    ) -> tuple[Callable[[], object], _T]:
        try:
            return capture(function, device, self._lent.place(device))
        except BaseException:
            self._lent.lose()
            raise


_lock = threading.RLock()  # as what is collected meanwhile may give its place back
_free: dict[
    Any, list[CapturePool]
] = {}  # by device and the stream that graphs are launched on, which brings them in order


def _borrowed(device: torch.device) -> tuple[Any, CapturePool]:
    """A place that nobody has, and where to give it back."""
    key = device, torch.cuda.current_stream(device).cuda_stream
    with _lock:
        places = _free.get(key)
        if places:
            return key, places.pop()
    return key, CapturePool(device)


def release() -> None:
    """Give back the memory of places that nobody has."""
    with _lock:
        _free.clear()


def generator(device: torch.device) -> torch.Generator:
    """What random numbers on a device come from, where no other generator is named."""
    return (
        torch.default_generator
        if device.type == "cpu"
        else torch.cuda.default_generators[device.index]
    )


@functools.cache
def draws_alike(device: torch.device) -> bool:
    """Whether graphs draw the random numbers that would be drawn without them, and leave the generator alike.

    It is tried once, with the generator put back where it was.
    """
    source = generator(device)
    before = source.get_state()
    drawn, repeated = torch.empty(TRIED, device=device, dtype=torch.float32), CapturedFunction()
    draw = functools.partial(_draw, drawn)
    try:
        alone = [draw().clone() for _ in range(3)]
        after = source.get_state()
        source.set_state(before)
        replayed = [repeated(draw, device, drawn).clone() for _ in range(3)]
        return torch.equal(source.get_state(), after) and all(map(torch.equal, replayed, alone))
    except NotCaptured:
        return False
    finally:
        source.set_state(before)


TRIED = 2**21
"""Random numbers that are drawn at once to see: more than a device has threads for."""


def _draw(numbers: Tensor) -> Tensor:
    return numbers.exponential_()


def same(new: Sequence[object], old: Sequence[object]) -> bool:
    """Whether all tensors are the very same ones, and all else is equal."""
    return len(new) == len(old) and all(map(_same, new, old))


def _same(new: object, old: object) -> bool:
    return new is old if isinstance(new, Tensor) or isinstance(old, Tensor) else new == old


class DelayedRead:
    """Values on their way from a device, which goes on meanwhile; in memory that serves again and again."""

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
        """Whether the values sent last are there, so that `read` does not wait."""
        return self._arrived is None or self._arrived.query()

    def read(self) -> Tensor:
        """Wait for the values sent last; return them, on the CPU."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values
