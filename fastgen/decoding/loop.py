"""The decode loop: a model runs decode steps and a search selects tokens until the search ends."""

from collections.abc import Callable
from typing import Any

from fastgen.decoding.backends.captured_beam_search import CapturedBeamSearch
from fastgen.decoding.backends.captured_first_finished import CapturedFirstFinished
from fastgen.decoding.backends.captured_sampling import CapturedSampling
from fastgen.decoding.backends.decode_backend import DecodeBackend, Eager, Search
from fastgen.decoding.backends.drafted_sampling import DraftedSampling
from fastgen.decoding.backends.native_beam_search import NativeBeamSearch
from fastgen.decoding.backends.native_first_finished import NativeFirstFinished
from fastgen.decoding.backends.native_sampling import NativeSampling

BACKENDS: tuple[type[DecodeBackend[Any]], ...] = (
    CapturedBeamSearch,
    CapturedSampling,
    CapturedFirstFinished,
    DraftedSampling,
    NativeBeamSearch,
    NativeSampling,
    NativeFirstFinished,
    Eager,
)
"""Decode backends in order of preference: CUDA graphs, drafts, many steps per C call, eager."""


def backend_type_of(search: Search, model: Any) -> type[DecodeBackend[Any]]:
    """Return the first type of backend that supports a search and its model."""
    return next(kind for kind in BACKENDS if kind.supports(search, model))


def backend_of(search: Search, model: Any) -> DecodeBackend[Any]:
    """Return the backend that runs the decode steps of a search."""
    return backend_type_of(search, model)(search, model)


def _never() -> bool:
    return False


def decode(
    backend: DecodeBackend[Any], output: Any, should_suspend: Callable[[], bool] = _never
) -> bool:
    """Run the decode loop until the search ends or a suspend is requested.

    Args:
        backend: Runs the decode steps of the search.
        output: Output of the prefill. It is freed after the first token selection.
        should_suspend: Polled before every call of the backend; True suspends the loop.

    Returns:
        Whether the search is over; False if it was suspended.
    """
    going = backend.select(output)
    output = None  # Keeps the logits of only one step in memory.
    while going:
        if should_suspend():
            return False
        going = backend.advance()
    return True
