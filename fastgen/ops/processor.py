"""Properties of the processor and the GPU settings that decide which implementation is faster."""

import ctypes
import os
from functools import cache
from pathlib import Path

import torch


@cache
def mkl_is_native() -> bool:
    """Return whether torch's products run MKL's code for this processor's widest vectors.

    MKL asks this function of its own before it uses them, and runs slower code elsewhere.
    """
    torch_cpu = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if not torch.backends.mkl.is_available() or not torch_cpu.is_file():
        return False
    accepts = getattr(ctypes.CDLL(str(torch_cpu)), "mkl_serv_intel_cpu_true", None)
    return accepts is not None and bool(accepts())


@cache
def multiplies(dtype: torch.dtype) -> str:
    """Return by which instructions torch multiplies matrices of a half precision.

    Returns:
        tiles: AMX. pairs: AVX-512's for this dtype. widened: AVX-512 after conversion to fp32.
        none: AVX2, for which torch has no optimised product. unknown: those of other architectures.
    """
    capabilities = torch.cpu.get_capabilities()
    name = "bf16" if dtype == torch.bfloat16 else "fp16"
    for kind, flag in (
        ("tiles", f"amx_{name}"),
        ("pairs", f"avx512_{name}"),
        ("widened", "avx512_f"),
    ):
        if capabilities.get(flag):
            return kind
    return "none" if capabilities.get("avx2") else "unknown"


@cache
def last_level_cache(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Return the bytes of the largest cache of a core; 32 MiB if the system does not tell."""
    units = {"K": 2**10, "M": 2**20}
    sizes = [file.read_text("utf-8").strip() for file in folder.glob("index*/size")]
    known = [int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units]
    return max(known, default=2**25)


def usable_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the number of cores of this process: its CPU affinity, up to a container's quota."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    if quota.is_file():
        allowed, period = quota.read_text("utf-8").split()
        if allowed != "max":
            cores = min(cores, max(1, int(allowed) // int(period)))
    return cores


def in_tf32() -> bool:
    """Return whether torch currently computes fp32 products in TF32 on a GPU."""
    matmul = torch.backends.cuda.matmul
    # Where the newer name exists, reading the older one may raise.
    precision = getattr(matmul, "fp32_precision", None)
    return bool(matmul.allow_tf32) if precision is None else precision == "tf32"
