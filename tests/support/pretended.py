"""A pretended CUDA device: its tensors lie in CPU memory, and its operators run on the CPU.

A call makes the choices that it would make on a GPU, and its numbers can be compared:

- Tensors report `cuda:0` as their device and are no subclass of Tensor.
- Kernels run in Triton's interpreter, or are only counted.
- A capture records what runs, and a replay runs it again (`recorder`).
- An operator with tensors of both devices fails, as on a GPU, and so does a capture that reads a
  value.

It cannot show times, races, the contents of uninitialised memory, or what a kernel is compiled to
(see `tests.compiled`). To run the tests that need a GPU without one:

    PRETEND_GPU=1 FASTGEN_OPS=reference python -m pytest -m gpu tests/models/test_gpu.py
"""

import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fastgen.ops import dispatch
from tests.support.recorder import Recorder

H100 = SimpleNamespace(
    name="a pretended device", multi_processor_count=132, total_memory=80 * 2**30, major=9, minor=0,
    warp_size=32, L2_cache_size=50 * 2**20,
)  # fmt: skip

_SOURCE = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <mutex>
#include <vector>
namespace {
struct OneDevice final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return c10::Device(c10::DeviceType::CUDA, 0); }
};
C10_REGISTER_GUARD_IMPL(CUDA, OneDevice);
std::mutex lock;
std::vector<void*> gone;
}
extern "C" void let_go(void* tensor) {
  std::lock_guard<std::mutex> guard(lock);
  gone.push_back(tensor);
}
extern "C" void* next_gone() {
  std::lock_guard<std::mutex> guard(lock);
  if (gone.empty()) return nullptr;
  void* last = gone.back();
  gone.pop_back();
  return last;
}
"""
"""The guard that makes a CUDA device the current one, which torch's CPU build lacks.

There is one device, and it is always current. The source also holds the list of tensors that were
released, because no Python may run where they are released.
"""


class Launch(NamedTuple):
    """A kernel launch.

    Attributes:
        kernel: the kernel's name.
        specialisation: what Triton compiles a separate version for: the kernel, its constants, and
            the type and inspected properties of each argument.
    """

    kernel: str
    specialisation: tuple[Any, ...]


class Pretended:
    """The device, active from construction to the end of a test.

    Attributes:
        launches: kernel launches so far.
        captures: for each capture, in order, what it would run, by name.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, computes: bool = True) -> None:
        """Activate the device.

        Args:
            monkeypatch: undoes the activation at the end of the test.
            computes: whether kernels and matrix products run; if not, their outputs are 0.
        """
        _register()
        monkeypatch.setattr(_device, "computes", computes)
        self.launches: list[Launch] = []
        self.captures: list[Counter[str]] = []
        self._recording: Recorder | None = None
        self._replaying = False
        monkeypatch.setattr(torch.version, "cuda", torch.version.cuda or "13.0")
        for name, value in self._of_torch_cuda().items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch, "empty", _without_pinning(torch.empty))
        monkeypatch.setattr(torch, "Generator", _Generator)
        monkeypatch.setattr(torch, "Stream", _Stream)
        monkeypatch.setattr(Tensor, "__deepcopy__", _deepcopy_of(Tensor.__deepcopy__))
        for name, module in list(sys.modules.items()):
            if name.startswith("fastgen.") and "launch" in vars(module):
                monkeypatch.setattr(module, "launch", self._launch)
        _forget_devices()

    def _of_torch_cuda(self) -> dict[str, Any]:
        return {
            "_lazy_init": lambda: None,
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "get_device_name": lambda device=None: H100.name,
            "get_device_properties": lambda device=None: H100,
            "get_device_capability": lambda device=None: (H100.major, H100.minor),
            "mem_get_info": lambda device=None: (
                H100.total_memory - allocated(),
                H100.total_memory,
            ),
            "memory_allocated": lambda device=None: allocated(),
            "max_memory_allocated": lambda device=None: allocated(),
            "reset_peak_memory_stats": lambda device=None: None,
            "get_rng_state": lambda device=None: torch.get_rng_state(),
            "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
            "empty_cache": lambda: None,
            "synchronize": lambda device=None: None,
            "default_generators": (torch.default_generator,),
            "device": lambda device: contextlib.nullcontext(),
            "stream": lambda stream: contextlib.nullcontext(),
            "current_stream": lambda device=None: _Stream(),
            "default_stream": lambda device=None: _Stream(),
            "Stream": _Stream,
            "Event": _Stream,
            "CUDAGraph": type("CUDAGraph", (_Graph,), {"_device": self}),
        }

    def _launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        dispatch.launches[kernel.__name__] += 1
        if not self._replaying:
            self.launches.append(Launch(kernel.__name__, _specialisation(kernel, args, constants)))
        if self._recording is None:
            self._run(kernel, grid, *args, **constants)
        else:
            self._recording.launch(
                functools.partial(self._run, kernel, grid), kernel, *args, **constants
            )

    def _run(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        args = tuple(arg for arg in args if arg is not kernel)
        away = [
            arg.device for arg in tree_leaves(args) if isinstance(arg, Tensor) and not arg.is_cuda
        ]
        assert not away, f"{kernel.__name__} is given memory of {away}"
        if _device.computes:
            kernel[grid](*tree_map_only(Tensor, _on_cpu, args), **constants)


class _Stream:
    """A stream or an event; everything runs in order."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, _: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_: object) -> None: ...


def _deepcopy_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `__deepcopy__` that copies tensors of the device by operators.

    torch's own copies storages and does not know those of such a device.
    """

    def deepcopy(tensor: Tensor, memo: dict[int, Any]) -> Any:
        if not tensor.is_cuda:
            return original(tensor, memo)
        if id(tensor) not in memo:
            copied = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            memo[id(tensor)] = (
                torch.nn.Parameter(copied) if isinstance(tensor, torch.nn.Parameter) else copied
            )
        return memo[id(tensor)]

    return deepcopy


class _Generator(torch.Generator):
    """A CPU generator, regardless of the requested device."""

    def __new__(cls, device: Any = "cpu") -> "_Generator":
        return super().__new__(cls, "cpu")  # pyright: ignore[reportCallIssue]


class _Graph:
    """A graph that records what runs between `capture_begin` and `capture_end`, and undoes it."""

    _device: Pretended

    def __init__(self) -> None:
        self._recorder = Recorder()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        assert self._device._recording is None, "a capture within a capture"
        self._random_state = torch.get_rng_state()
        self._device._recording = self._recorder
        self._recorder.__enter__()

    def capture_end(self) -> None:
        self._recorder.__exit__(None, None, None)
        self._device._recording = None
        self._recorder.undo()
        torch.set_rng_state(self._random_state)
        self._device.captures.append(self._recorder.kernels)

    def pool(self) -> tuple[int, int]:
        return 0, id(self)

    def replay(self) -> None:
        self._device._replaying = True
        self._recorder.replay()
        self._device._replaying = False


def _specialisation(
    kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]
) -> tuple[Any, ...]:
    """Return the key by which `triton.jit` compiles versions of a kernel.

    For an integer the key says whether it is 1, a multiple of 16, and of 32 or 64 bits.
    """
    unspecialised = kernel.kwargs["do_not_specialize"] or ()

    def key(name: str, arg: Any) -> Any:
        if isinstance(arg, list | tuple):
            return tuple(key(name, each) for each in arg)
        if isinstance(arg, Tensor):
            return arg.dtype, arg.data_ptr() % 16 == 0
        if isinstance(arg, bool) or not isinstance(arg, int):
            return type(arg)
        long = arg.bit_length() > 31
        return long if name in unspecialised else 1 if arg == 1 else (long, arg % 16 == 0)

    found = [key(name, arg) for name, arg in zip(kernel.arg_names, args, strict=False)]
    return kernel.__name__, *found, *sorted(constants.items())


def _without_pinning(empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs)


def _forget_devices() -> None:
    """Clear fastgen's cached device properties."""
    from fastgen.models.cuda_graphs import graph
    from fastgen.ops import beam_attention

    for function in (graph._bytes_of, graph.draws_alike, beam_attention._multiprocessors):
        function.cache_clear()


# Views of the same memory on another device, by DLPack.


class _DLDevice(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class _DLDataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    _fields_ = [
        ("dl_tensor", _DLTensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


_CPU, _CUDA = 1, 2
_CODES = {
    torch.bool: (6, 8), torch.uint8: (1, 8), torch.int8: (0, 8), torch.int16: (0, 16),
    torch.int32: (0, 32), torch.int64: (0, 64), torch.float16: (2, 16), torch.bfloat16: (4, 16),
    torch.float32: (2, 32), torch.float64: (2, 64),
}  # fmt: skip
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = (
    ctypes.py_object,
    [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
)
_held: dict[int, tuple[Any, ...]] = {}


def _sweep() -> None:
    """Release the memory of tensors that were deleted."""
    while (tensor := _native().next_gone()) is not None:
        _held.pop(tensor, None)


def _moved(tensor: Tensor, device: int) -> Tensor:
    _sweep()
    sizes = ctypes.c_int64 * tensor.dim()
    shape, strides = sizes(*tensor.shape), sizes(*tensor.stride())
    described = _DLTensor(
        tensor.data_ptr(),
        _DLDevice(device, 0),
        tensor.dim(),
        _DLDataType(*_CODES[tensor.dtype], 1),
        shape,
        strides,
        0,
    )
    managed = _DLManagedTensor(described, None, ctypes.cast(_native().let_go, ctypes.c_void_p))
    _held[ctypes.addressof(managed)] = managed, shape, strides, tensor
    return torch._C._from_dlpack(_new_capsule(ctypes.addressof(managed), b"dltensor", None))  # type: ignore[attr-defined]


def _on_cpu(tensor: Tensor) -> Tensor:
    return _moved(tensor, _CPU) if tensor.is_cuda else tensor


def allocated() -> int:
    """Return the bytes of device memory in use."""
    _sweep()
    storages = (
        tensor.untyped_storage() for *_, tensor in list(_held.values()) if not tensor.is_cuda
    )
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


# Operators.


_device = SimpleNamespace(computes=True)
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear")
_LOOKUPS = ("embedding", "index_select", "gather")


class _Known(NamedTuple):
    """An operator's name, the positions of its tensor arguments, and its `out` arguments."""

    name: str
    tensors: frozenset[int]
    outs: tuple[tuple[int, str], ...]


@functools.cache
def _known(op: Any) -> _Known:
    arguments = list(enumerate(op._schema.arguments))
    return _Known(
        op.overloadpacket.__name__,
        frozenset(place for place, argument in arguments if str(argument.type) == "Tensor"),
        tuple((place, argument.name) for place, argument in arguments if argument.is_out),
    )


def _run_on_cpu(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator of the device on the CPU; its results lie on the device."""
    name, tensors, outs = _known(op)
    # CPU tensors for the duration of the operator, and the device tensors they stand for.
    origin: dict[int, tuple[Tensor, Tensor]] = {}

    def lowered(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not isinstance(value, Tensor):
            return value
        if not value.is_cuda:
            if value.dim():
                raise RuntimeError(
                    f"{name}: expected all tensors on cuda:0, found one on {value.device}"
                )
            return value
        found = _moved(value, _CPU)
        origin[id(found)] = found, value
        return found

    def lifted(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return origin[id(value)][1] if id(value) in origin else _moved(value, _CUDA)

    # CPUs have no function that also converts half precision to fp32.
    if name in ("_softmax", "_log_softmax") and args[2]:
        args = (args[0].float(), args[1], False)
    down = [
        torch.tensor(arg)
        if place in tensors and isinstance(arg, bool | int | float)
        else _each(lowered, arg)
        for place, arg in enumerate(args)
    ]
    named = {key: _each(lowered, value) for key, value in kwargs.items()}
    written: list[tuple[Tensor, Tensor]] = []
    # An operator may resize an output, which it cannot do with memory it does not own.
    for (
        place,
        key,
    ) in outs:
        out = kwargs[key] if key in kwargs else args[place]
        fresh = torch.empty(0, dtype=out.dtype, device="cpu")
        if key in named:
            named[key] = fresh
        else:
            down[place] = fresh
        origin[id(fresh)] = fresh, out
        written.append((fresh, out))
    result = op(*down, **named) if _device.computes else _unwritten(op, name, down, named, written)
    for fresh, out in written:
        if fresh.shape == out.shape:
            _moved(out, _CPU).copy_(fresh)
        else:
            out.data = _moved(fresh, _CUDA)
    return result if name == "_local_scalar_dense" else _each(lifted, result)


def _unwritten(
    op: Any, name: str, down: list[Any], named: dict[str, Any], written: list[tuple[Tensor, Tensor]]
) -> Any:
    """Run an operator where kernels do not run: new memory and matrix products hold 0."""
    if name in _PRODUCTS:
        bare, bare_named = tree_map_only(Tensor, lambda each: each.to("meta"), (down, named))
        shape = op(*bare, **bare_named).shape
        if written:
            return written[0][0].resize_(shape).zero_()
        return torch.zeros(shape, dtype=down[0].dtype, device="cpu")
    if name in _LOOKUPS:  # tokens that no kernel has written may have any value
        down = [
            each.clamp(min=0) if isinstance(each, Tensor) and each.dtype == torch.int64 else each
            for each in down
        ]
    result = op(*down, **named)
    return result.zero_() if name.startswith(("empty", "new_empty")) else result


def _each(of: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to a value, or to each item of a list or tuple."""
    return [of(each) for each in value] if isinstance(value, list | tuple) else of(value)


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Implement `aten::copy_`, the only operator that moves data between devices."""
    _on_cpu(target).copy_(_on_cpu(source))
    return target


def _to_copy(
    source: Tensor, *, dtype: torch.dtype | None = None, device: torch.device | None = None,
    memory_format: torch.memory_format | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    """Implement `aten::_to_copy`, whose copies to the CPU would be pinned if they do not block."""
    kept = torch.preserve_format if memory_format is None else memory_format
    copy = _on_cpu(source).to(dtype or source.dtype, copy=True, memory_format=kept)
    return copy if device is not None and device.type == "cpu" else _moved(copy, _CUDA)


@functools.cache
def _native() -> Any:
    """Compile and load the C++ part, using torch's own headers."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("a device is pretended with a few lines of C++, and there is no g++")
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        library = os.path.join(folder, "guard.so")
        command = [
            compiler,
            "-O1",
            "-shared",
            "-fPIC",
            "-std=c++20",
            "-x",
            "c++",
            "-",
            "-o",
            library,
        ]
        paths = [f"-I{root / 'include'}", f"-L{root / 'lib'}", "-lc10"]
        subprocess.run([*command, *paths], input=_SOURCE, text=True, check=True)
        loaded = ctypes.CDLL(library)
    loaded.next_gone.restype = ctypes.c_void_p
    return loaded


@functools.cache
def _register() -> tuple[torch.library.Library, ...]:
    """Register the device and its operators with torch, for the rest of the process."""
    _native()
    rest, own = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    rest.fallback(_run_on_cpu, "CUDA")
    own.impl("copy_", _copy, "CUDA")
    own.impl("_to_copy", _to_copy, "CUDA")
    return rest, own
