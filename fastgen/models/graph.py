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
