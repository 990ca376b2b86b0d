"""Recovery after running out of memory: the counted reason, and functions that free memory."""

import gc
import logging

import torch

from fastgen.models import state
from fastgen.models.cuda_graphs.graph import FreePools
from fastgen.models.cuda_graphs.graph_buffers import BufferPools
from fastgen.models.layers import packed_weights
from fastgen.models.memory.scratch import ScratchPool

NO_MEMORY = "there was not enough memory"


_logger = logging.getLogger("fastgen")


def stop_packing(device: torch.device) -> None:
    """Stop packing weights on a CPU after a batch that cannot be split ran out of memory."""
    if device.type != "cpu":  # weights are packed on CPUs only
        return
    _logger.warning(
        "not enough memory for a call that cannot be divided; %s", packed_weights.STOPPED
    )
    packed_weights.stop_packing()


def free_unused_memory() -> None:
    """Free all memory that is not in use: scratch buffers, CUDA graphs and torch's CUDA cache."""
    state.release(ScratchPool, BufferPools, FreePools)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
