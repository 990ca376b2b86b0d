"""Which processor this is, where that decides what is faster."""

from functools import cache

import torch


@cache
def on_intel() -> bool:
    """Whether this is a processor of Intel's, where MKL leaves nothing unused."""
    return "Intel" in torch.cpu.get_capabilities().get("cpu_name", "")


@cache
def on_zen5() -> bool:
    """Whether this is a processor of AMD's whose AVX-512 units are full ones, which oneDNN uses and MKL does not."""
    has = torch.cpu.get_capabilities()
    return "AMD" in has.get("cpu_name", "") and bool(has.get("avx512_vp2intersect"))
