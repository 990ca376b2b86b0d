"""When memory has run out: the reason that is counted, and how to go on with more of it."""

import gc
import logging

import torch

from fastgen.models.cuda_graphs import graph, graph_buffers
from fastgen.models.layers import packed_weights
from fastgen.models.memory import scratch

NO_MEMORY = "there was not enough memory"


_logger = logging.getLogger("fastgen")


def give_up(device: torch.device) -> None:
    """Let the next calls on a CPU take less memory, as one has failed that cannot be divided."""
    if device.type != "cpu":  # where no weights are packed
        return
    _logger.warning(
        "not enough memory for a call that cannot be divided; %s", packed_weights.GIVEN_UP
    )
    packed_weights.give_up()


def make_room() -> None:
    """Give back what nobody uses any more."""
    scratch.release()
    graph_buffers.release()
    graph.release()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
