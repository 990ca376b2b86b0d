"""Dispatch of an operation to a Triton kernel, C or the torch reference, with call counts.

On a CUDA device with Triton installed, the Triton kernel runs. On a CPU, operations run in C
(`ops.native`) where a C implementation exists: all of them in fp32, products and whole decode steps
in bf16 and fp16 too. Everything else runs the reference, which is optimised too.

FASTGEN_OPS selects a backend: reference everywhere; native for C on every processor; triton for
kernels, on a CPU too under Triton's interpreter (TRITON_INTERPRET=1).

No other module imports Triton. If Triton is missing, or torch is built for CPUs alone, kernels are
plain functions that are never called.
"""

import contextlib
import functools
import importlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from fastgen import config
from fastgen.ops import native
from fastgen.ops.counts import calls, launches
from fastgen.ops.torch_private import is_observed

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run as numpy on the CPU.

Triton reads the variable when a kernel is declared.
"""

triton: Any = None
tl: Any = None
if INTERPRETED or torch.version.cuda is not None:
    try:
        triton = importlib.import_module("triton")
        tl = importlib.import_module("triton.language")
    except ImportError:
        pass

TRITON, REFERENCE = "triton", "reference"

if TYPE_CHECKING:
    constexpr = Any  # what a kernel's constants are declared as
else:
    constexpr = int if tl is None else tl.constexpr


def jit(*varying: str) -> Callable[[Callable[..., Any]], Any]:
    """Declare a kernel.

    Args:
        varying: names of integer arguments that Triton must not specialise. Triton compiles
            separate kernels for integers that are 1 or a multiple of 16. This pays only for strides
            and for the bounds of aligned loads.
    """
    return lambda kernel: (
        kernel if triton is None else triton.jit(kernel, do_not_specialize=list(varying))
    )


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Run a kernel on a grid of programs, on the device of its first argument."""
    launches[kernel.__name__] += 1
    first = args[0]
    if first.device.type == "cuda":
        with torch.cuda.device(first.device):
            kernel[grid](*args, **constants)
    else:
        kernel[grid](*args, **constants)


MOST_COUNTED = 4096
"""Largest number of program groups in one launch that count their finished programs."""

_counted = threading.local()


def counters(device: torch.device, groups: int) -> Tensor:
    """Return (groups,) int32 zeros, which a launch must leave zeroed.

    Launches that share counters must run one after the other. Launches on one stream do, so each
    stream has its own counters. A CUDA graph uses those of `counting_in`.
    """
    assert groups <= MOST_COUNTED, groups
    held: Tensor | None = getattr(_counted, "held", None)
    if held is None:
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        held = _counters_of(device, stream)
    return held[:groups]


@functools.cache
def _counters_of(device: torch.device, stream: int) -> Tensor:
    return new_counters(device)


def new_counters(device: torch.device) -> Tensor:
    """Allocate zeros that `counters` can return."""
    return torch.zeros(MOST_COUNTED, dtype=torch.int32, device=device)


@contextlib.contextmanager
def counting_in(held: Tensor) -> Iterator[None]:
    """Let `counters` return `held`, memory of a graph's own.

    A graph needs its own counters because it may run concurrently with others captured on its
    stream.
    """
    previous, _counted.held = getattr(_counted, "held", None), held
    try:
        yield
    finally:
        _counted.held = previous


def runs_kernels(tensor: Tensor) -> bool:
    """Return whether Triton kernels run on the device of a tensor, for shapes that they cover.

    Raises:
        RuntimeError: FASTGEN_OPS=triton, but no kernels are available.
    """
    requested = config.settings().ops
    if triton is None:
        if requested == "triton":
            raise RuntimeError(
                "FASTGEN_OPS=triton, but there are no kernels here: Triton is not installed "
                "(`pip install triton`), or torch is built for CPUs and TRITON_INTERPRET=1 is not "
                "set"
            )
        return False
    kind = tensor.device.type
    return (
        INTERPRETED and requested == "triton"
        if kind == "cpu"
        else kind == "cuda" and requested != "reference"
    )


def use_triton(
    operation: str, supported: Callable[[], bool], tensor: Tensor, *others: Tensor | None
) -> bool:
    """Decide whether `operation` runs its Triton kernel on these tensors, and count the call.

    For operations without a C implementation.

    Args:
        operation: the name that the call is counted under.
        supported: whether the kernel covers these shapes and dtypes; called only where kernels run.
        tensor: decides on the device; an empty tensor runs the reference.
        others: must be on the same device, or None.

    Raises:
        RuntimeError: FASTGEN_OPS=triton, but no kernels are available.
    """
    return select_backend(operation, supported, unsupported, tensor, *others) is TRITON


def select_backend(
    operation: str,
    supported: Callable[[], bool],
    able_in_c: Callable[[], bool],
    tensor: Tensor,
    *others: Tensor | None,
) -> "native.Library | str":
    """Decide which backend runs `operation` on these tensors, and count the call.

    Args:
        operation: the name that the call is counted under.
        supported: whether the kernel covers these shapes and dtypes; called only where kernels run.
        able_in_c: whether the C implementation covers these shapes and dtypes, and whether the
            tensors are `plain`; called only where a library is loaded.
        tensor: decides on the device; an empty tensor runs the reference.
        others: must be on the same device for the kernel to run, or None.

    Returns:
        `TRITON`, `REFERENCE`, or the C library.

    Raises:
        RuntimeError: FASTGEN_OPS=triton, but no kernels are available; or FASTGEN_OPS=native, but
            no library is available.
    """
    backend: native.Library | str = REFERENCE
    if tensor.numel() > 0:
        if runs_kernels(tensor) and all(
            other is None or other.device == tensor.device for other in others
        ):
            backend = TRITON if supported() else REFERENCE
        elif able_in_c is not unsupported and (library := native.library()) is not None:
            backend = library if _in_the_open() and able_in_c() else REFERENCE
    calls[operation, backend if isinstance(backend, str) else "native"] += 1
    return backend


def in_c(found: "native.Library | str") -> TypeGuard["native.Library"]:
    """Return whether the result of `select_backend` is a C library."""
    return not isinstance(found, str)


def unsupported() -> bool:
    """Return False: for `select_backend`, of an operation without a kernel or without C."""
    return False


def _in_the_open() -> bool:
    """Whether no tracing, function transform, dispatch mode or autocast is active."""
    return not (torch.compiler.is_compiling() or is_observed() or torch.is_autocast_enabled("cpu"))


def in_memory(*tensors: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Return whether all tensors are CPU memory that C can read and carry no gradient.

    Meant for indices and masks.

    Args:
        dtype: the dtype that all must have; None for any.
    """
    return all(
        type(tensor) is Tensor
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and (dtype is None or tensor.dtype is dtype)
        and not (tensor.requires_grad or tensor.is_neg() or tensor.is_conj())
        for tensor in tensors
    )


def plain(*tensors: Tensor | None, dtype: torch.dtype = torch.float32) -> bool:
    """Return whether all tensors are CPU memory of a dtype that C can read, without gradients.

    None counts as readable.
    """
    graph = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is not None and (
            type(tensor) is not Tensor
            or tensor.dtype != dtype
            or not tensor.is_cpu
            or tensor.layout is not torch.strided
            or tensor.is_neg()
            or (graph and tensor.requires_grad)
        ):
            return False
    return True


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below `number`."""
    return 1 << max(0, number - 1).bit_length()


def cdiv(number: int, by: int) -> int:
    """Return number / by, rounded up."""
    return -(-number // by)
