"""Properties of the processor and the GPU settings that decide which implementation is faster."""

import os
from functools import cache
from pathlib import Path

import torch


@cache
def on_intel() -> bool:
    """Return whether this is an Intel processor, where MKL reaches the full throughput."""
    return "Intel" in torch.cpu.get_capabilities().get("cpu_name", "")


@cache
def on_amd() -> bool:
    """Return whether this is an AMD processor, where MKL reaches half of the throughput."""
    return "AMD" in torch.cpu.get_capabilities().get("cpu_name", "")


@cache
def on_zen5() -> bool:
    """Return whether this is an AMD processor with full-width AVX-512 units.

    oneDNN uses them; MKL does not.
    """
    return on_amd() and bool(torch.cpu.get_capabilities().get("avx512_vp2intersect"))


@cache
def without_avx512() -> bool:
    """Return whether this is an AMD processor with AVX2 alone, as those before Zen 4."""
    capabilities = torch.cpu.get_capabilities()
    return on_amd() and bool(capabilities.get("avx2")) and not capabilities.get("avx512_f")


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
