"""A function over fixed memory as a CUDA graph: its kernels are recorded once, and launched together from then on.

A decode step is some two hundred kernels of a few microseconds each, and launching them one by one takes longer than
running them.

Source: NVIDIA, CUDA C++ Programming Guide, CUDA graphs; PyTorch, `torch.cuda.CUDAGraph`.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from fastgen import config

_T = TypeVar("_T")


def wanted(tensor: Tensor) -> bool:
    """Say whether what runs on the device of a tensor is to be captured."""
    return tensor.device.type == "cuda" and config.settings().graphs != "off"


class NotCaptured(Exception):
    """A function cannot be captured; it has not run."""


def capture(function: Callable[[], _T], device: torch.device) -> tuple[Callable[[], object], _T]:
    """Capture a function that has run before, with the same shapes; it does not run.

    Returns:
        What runs it, and its result: tensors that every run writes anew.
    Raises:
        NotCaptured: it waits for the device, or does something else that a graph cannot hold.
    """
    graph, stream = torch.cuda.CUDAGraph(), _stream(device)
    present = torch.cuda.current_stream(device)
    stream.wait_stream(present)
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=_anchor(device).pool(), capture_error_mode="thread_local")
            try:
                result = function()
            finally:
                graph.capture_end()
    except RuntimeError as error:
        raise NotCaptured(str(error).partition("\n")[0]) from error
    finally:
        present.wait_stream(stream)
    return graph.replay, result


class Repeated:
    """A function that is run again and again over the same memory: captured at its second run, then replayed."""

    def __init__(self) -> None:
        self._inputs: tuple[object, ...] = ()
        self._launch: Callable[[], object] | None = None
        self._result: Any = None

    def __call__(self, function: Callable[[], _T], device: torch.device, *inputs: object) -> _T:
        """Return the function's result, which the next run may write anew.

        inputs: what it reads, and what it depends on else. Where a tensor is not the one that it was, or anything else
            does not equal what it was, nothing that has been captured holds.
        Raises:
            NotCaptured: see `capture`; the function has not run.
        """
        if len(inputs) == len(self._inputs) and all(map(_same, inputs, self._inputs)):
            if self._launch is None:
                self._launch, self._result = capture(function, device)
            self._launch()
            return self._result
        self._launch = self._result = None
        result = function()
        self._inputs = inputs
        return result


def _same(new: object, old: object) -> bool:
    return new is old if isinstance(new, Tensor) or isinstance(old, Tensor) else new == old


class Late:
    """Values on their way from a device, which goes on meanwhile; in memory that serves again and again."""

    def __init__(self, like: Tensor) -> None:
        on_device = like.device.type == "cuda"
        self._values = torch.empty(like.shape, dtype=like.dtype, pin_memory=on_device)
        self._arrived = torch.cuda.Event() if on_device else None

    def send(self, values: Tensor) -> None:
        self._values.copy_(values, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record(torch.cuda.current_stream(values.device))

    def read(self) -> Tensor:
        """Wait for the values sent last; return them, on the CPU."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values


@functools.cache
def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


@functools.cache
def _anchor(device: torch.device) -> Any:
    """A graph that lives on, so that the memory that all of a device's graphs share does."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(_stream(device)):
        graph.capture_begin(capture_error_mode="thread_local")
        torch.zeros(1, device=device)
        graph.capture_end()
    return graph


def release() -> None:
    """Give back the memory that graphs share, once none is left."""
    _anchor.cache_clear()
