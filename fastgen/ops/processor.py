"""Which processor this is, where that decides what is faster."""

from functools import cache

import torch


@cache
def on_intel() -> bool:
    """Whether this is a processor of Intel's, where MKL leaves nothing unused."""
    return "Intel" in torch.cpu.get_capabilities().get("cpu_name", "")
