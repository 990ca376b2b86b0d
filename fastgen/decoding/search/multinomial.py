"""Draws of tokens, from random numbers that several threads may share.

`draw` is `torch.multinomial` without validation of its input, which would synchronise with the
device.

Source: Gumbel 1954 and Maddison et al. 2014: the k largest values of weights divided by exponential
noise are k draws without replacement.
"""

import os
import threading
from dataclasses import dataclass, field
from weakref import WeakSet

import torch
from torch import Tensor

from fastgen.models.state import CachedState, process_state


@dataclass(eq=False)
class DefaultGenerator(CachedState):
    """Use of torch's default generator for CPUs.

    Attributes:
        lock: Held while a token is drawn, and while C draws those of several steps: it reads the
            generator's state and writes it back. Other code may draw meanwhile.
        users: The searches that draw, of all threads.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)
    users: "WeakSet[GeneratorUser]" = field(default_factory=lambda: WeakSet["GeneratorUser"]())


def default_generator() -> DefaultGenerator:
    """Return what is known of the use of the default generator in this process."""
    return process_state().of(DefaultGenerator)


if hasattr(os, "register_at_fork"):
    # A thread that the child does not have may hold the lock.
    os.register_at_fork(after_in_child=lambda: process_state().drop(DefaultGenerator))


class GeneratorUser:
    """A search that draws from the default generator."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        generator = default_generator()
        with generator.lock:
            generator.users.add(self)

    def is_alone(self) -> bool:
        """Return whether no search of another thread draws."""
        self.thread = threading.get_ident()
        generator = default_generator()
        with generator.lock:
            return all(user.thread == self.thread for user in generator.users)


def multinomial(weights: Tensor, count: int) -> Tensor:
    """Return `torch.multinomial(weights, count)`, drawn when no other thread draws."""
    with default_generator().lock:
        return torch.multinomial(weights, count)


def draw(weights: Tensor, count: int) -> Tensor:
    """Return the same samples as `torch.multinomial(weights, count)`, from the same random numbers.

    Args:
        weights: (N, V) floating point. Values must be finite and non-negative, with a positive one
            in each row; this is not checked. Not modified.
        count: number of samples per row.

    Returns:
        (N, count) int64, drawn without replacement.
    """
    noise = torch.empty_like(weights).exponential_()
    ratios = torch.div(weights, noise, out=noise)
    return ratios.argmax(-1, keepdim=True) if count == 1 else ratios.topk(count, -1).indices
