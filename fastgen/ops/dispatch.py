"""Which implementation of an operation runs: Triton's kernel, C, or the reference in torch, and how often each did.

On a CUDA device with Triton installed the kernel runs; on a CPU, in fp32, what is written in C (`ops.native`), where it
is; elsewhere the reference, which is written for speed too. FASTGEN_OPS=reference asks for the reference everywhere,
FASTGEN_OPS=native for C on every processor, FASTGEN_OPS=triton for kernels, on a CPU too under Triton's interpreter
(TRITON_INTERPRET=1). This module is the only one that imports Triton: where it is missing, or torch is
built for CPUs alone, kernels are plain functions that nobody calls.
"""

import contextlib
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
"""Whether kernels run as numpy on the CPU; Triton reads the variable when a kernel is declared."""

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

    varying: names of its integers that are compiled for no value: Triton compiles a kernel anew for a 1 and for a
        multiple of 16 in place of another number, which pays for strides and for what ends an aligned load alone.
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
"""Groups of programs of one launch that count how many of them have ended."""

_counted = threading.local()
_of_stream: dict[tuple[torch.device, int], Tensor] = {}


def counters(device: torch.device, groups: int) -> Tensor:
    """Return (groups,) int32 zeros, which a launch has to leave so: for kernels that run one behind the other.

    Those of a stream do, and those of the graphs of one place (`counting_in`).
    """
    assert groups <= MOST_COUNTED, groups
    held: Tensor | None = getattr(_counted, "held", None)
    if held is None:
        key = device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        held = _of_stream.get(key)
        if held is None:
            held = _of_stream.setdefault(key, new_counters(device))
    return held[:groups]


def new_counters(device: torch.device) -> Tensor:
    """Zeros that `counters` may give."""
    return torch.zeros(MOST_COUNTED, dtype=torch.int32, device=device)


@contextlib.contextmanager
def counting_in(held: Tensor) -> Iterator[None]:
    """Have `counters` give memory of a graph's own, as it may run beside others of its stream."""
    before, _counted.held = getattr(_counted, "held", None), held
    try:
        yield
    finally:
        _counted.held = before


def runs_kernels(tensor: Tensor) -> bool:
    """Say whether kernels run on the device of a tensor, for shapes that they cover.

    Raises:
        RuntimeError: FASTGEN_OPS=triton and there are no kernels.
    """
    wanted = config.settings().ops
    if triton is None:
        if wanted == "triton":
            raise RuntimeError(
                "FASTGEN_OPS=triton, but there are no kernels here: Triton is not installed (`pip install triton`), or "
                "torch is built for CPUs and TRITON_INTERPRET=1 is not set"
            )
        return False
    kind = tensor.device.type
    return (
        INTERPRETED and wanted == "triton"
        if kind == "cpu"
        else kind == "cuda" and wanted != "reference"
    )


def use_triton(
    operation: str, able: Callable[[], bool], tensor: Tensor, *others: Tensor | None
) -> bool:
    """Decide whether `operation`, of which there is nothing in C, runs its kernel on these tensors, and count it.

    Args:
        able: asked, where kernels run at all, whether they cover these shapes and dtypes.
    Raises:
        RuntimeError: FASTGEN_OPS=triton and there are no kernels.
    """
    return chosen(operation, able, never, tensor, *others) is TRITON


def chosen(
    operation: str,
    able: Callable[[], bool],
    able_in_c: Callable[[], bool],
    tensor: Tensor,
    *others: Tensor | None,
) -> "native.Library | str":
    """Decide what runs `operation` on these tensors, and count it: `TRITON`, `REFERENCE`, or a library in C.

    Args:
        able: asked, where kernels run, whether they cover these shapes and dtypes.
        able_in_c: asked, where there is such a library, whether it does, and whether the tensors are `plain`.
    Raises:
        RuntimeError: FASTGEN_OPS=triton and there are no kernels, or FASTGEN_OPS=native and there is no library.
    """
    found: native.Library | str = REFERENCE
    if tensor.numel() > 0:
        if runs_kernels(tensor) and all(
            other is None or other.device == tensor.device for other in others
        ):
            found = TRITON if able() else REFERENCE
        elif able_in_c is not never and (by := native.library()) is not None:
            found = by if _in_the_open() and able_in_c() else REFERENCE
    calls[operation, found if isinstance(found, str) else "native"] += 1
    return found


def in_c(found: "native.Library | str") -> TypeGuard["native.Library"]:
    """Whether `chosen` has found a library."""
    return not isinstance(found, str)


def never() -> bool:
    """For `chosen`: there is no kernel, or nothing in C."""
    return False


def _in_the_open() -> bool:
    """Whether nobody records, transforms or replaces what is computed with tensors."""
    return not (torch.compiler.is_compiling() or is_observed() or torch.is_autocast_enabled("cpu"))


def in_memory(*tensors: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether tensors are memory of a CPU that C can read; numbers of no gradient, as indices are.

    dtype: which all of them have; None for any.
    """
    return all(
        type(tensor) is Tensor
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and (dtype is None or tensor.dtype is dtype)
        and not (tensor.requires_grad or tensor.is_neg() or tensor.is_conj())
        for tensor in tensors
    )


def plain(*tensors: Tensor | None) -> bool:
    """Whether tensors are memory of a CPU that C can read, in fp32, and no gradient is asked for."""
    graph = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is not None and (
            type(tensor) is not Tensor
            or tensor.dtype != torch.float32
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
