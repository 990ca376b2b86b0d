"""Recovery after running out of memory: the counted reason, and functions that free memory."""

import gc
import logging

import torch

from fastgen.models.cuda_graphs import graph, graph_buffers
from fastgen.models.layers import packed_weights
from fastgen.models.memory import scratch

NO_MEMORY = "there was not enough memory"


_logger = logging.getLogger("fastgen")


def give_up(device: torch.device) -> None:
    """Stop packing weights on a CPU after a batch that cannot be split ran out of memory."""
    if device.type != "cpu":  # weights are packed on CPUs only
        return
    _logger.warning(
        "not enough memory for a call that cannot be divided; %s", packed_weights.GIVEN_UP
    )
    packed_weights.give_up()


def make_room() -> None:
    """Free all memory that is not in use: scratch buffers, CUDA graphs and torch's CUDA cache."""
    scratch.release()
    graph_buffers.release()
    graph.release()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
