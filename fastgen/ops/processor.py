"""Which processor this is and how much of it, where that decides what is faster."""

import os
from functools import cache
from pathlib import Path

import torch


@cache
def on_intel() -> bool:
    """Whether this is a processor of Intel's, where MKL leaves nothing unused."""
    return "Intel" in torch.cpu.get_capabilities().get("cpu_name", "")


@cache
def on_amd() -> bool:
    """Whether this is a processor of AMD's, where MKL uses half of what there is."""
    return "AMD" in torch.cpu.get_capabilities().get("cpu_name", "")


@cache
def on_zen5() -> bool:
    """Whether this is a processor of AMD's whose AVX-512 units are full ones, which oneDNN uses and MKL does not."""
    return on_amd() and bool(torch.cpu.get_capabilities().get("avx512_vp2intersect"))


@cache
def without_avx512() -> bool:
    """Whether this is a processor of AMD's that has AVX2 alone, as those before Zen 4 have."""
    capabilities = torch.cpu.get_capabilities()
    return on_amd() and bool(capabilities.get("avx2")) and not capabilities.get("avx512_f")


def usable_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return how many cores this process may use: those it may run on, and no more than a container's quota."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    if quota.is_file():
        allowed, period = quota.read_text("utf-8").split()
        if allowed != "max":
            cores = min(cores, max(1, int(allowed) // int(period)))
    return cores


def in_tf32() -> bool:
    """Whether products in fp32 run in TF32 on a GPU, as torch is set now."""
    matmul = torch.backends.cuda.matmul
    precision = getattr(
        matmul, "fp32_precision", None
    )  # where it is there, the older name may refuse to answer
    return bool(matmul.allow_tf32) if precision is None else precision == "tf32"
