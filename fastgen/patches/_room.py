"""When memory has run out: the reason that is counted, and how to go on with more of it."""

import gc

import torch

from fastgen.models import graph, memory, seats

NO_MEMORY = "there was not enough memory"


def make_room() -> None:
    """Give back what nobody uses any more."""
    memory.release()
    seats.release()
    graph.release()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
