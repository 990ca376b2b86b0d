"""The decode loop: a model runs decode steps and a search selects tokens until the search ends."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from torch import Tensor

from fastgen.decoding.backends.native_beam_search import NativeBeamSearch
from fastgen.decoding.backends.native_first_finished import NativeFirstFinished
from fastgen.decoding.backends.native_sampling import NativeSampling
from fastgen.decoding.logits.text import Text

# The output of a decode step: logits, or a prediction from which the search computes them.
_Output = TypeVar("_Output")
_Output_co = TypeVar("_Output_co", covariant=True)
_Output_contra = TypeVar("_Output_contra", contravariant=True)


class Search(Protocol[_Output_contra]):
    """A running search, such as beam search or sampling."""

    @property
    def text(self) -> Text: ...
    @property
    def present(self) -> int:
        """Number of sentences that are still in the batch."""
        ...

    def advance(self, model: Any, made: _Output_contra, /) -> bool:
        """Select the next tokens from the output of a decode step.

        Returns:
            False when the search is over.
        """
        ...


class Stepper(Protocol[_Output_co]):
    """An object that runs the decode steps of a model."""

    def step(self, ids: Tensor) -> _Output_co:
        """Run one decode step on the newest token of each row of ids, (R, L) int64."""
        ...


class DecodeBackend(Protocol):
    """A way to run the decode steps of one search."""

    def advance(self) -> bool:
        """Run one or more decode steps; return whether the search continues."""
        ...


class Eager:
    """A backend that runs one decode step per call and selects tokens in Python.

    The model itself replays a step that is captured as a CUDA graph.
    """

    def __init__(self, search: Search[Any], model: Stepper[Any]) -> None:
        self._search, self._model = search, model

    def advance(self) -> bool:
        return self._search.advance(self._model, self._model.step(self._search.text.ids))


NATIVE = (NativeBeamSearch, NativeSampling, NativeFirstFinished)
"""Backends that run many decode steps in C per call, token selection included."""


def backend_of(search: Search[Any], model: Stepper[Any]) -> DecodeBackend:
    """Return the first native backend that supports the search, or `Eager`."""
    native = next((kind for kind in NATIVE if kind.supports(search, model)), None)
    return Eager(search, model) if native is None else native(cast(Any, search), cast(Any, model))


def _never() -> bool:
    return False


def decode(
    search: Search[_Output],
    model: Stepper[_Output],
    made: _Output,
    pause: Callable[[], bool] = _never,
) -> bool:
    """Run the decode loop until the search ends or `pause` requests a suspend.

    Args:
        made: Output of the prefill. It is freed after the first token selection.
        pause: Polled before every call of the backend; True suspends the loop.

    Returns:
        Whether the search is over; False if it was suspended.
    """
    backend = backend_of(search, model)
    going = search.advance(model, made)
    made = cast(Any, None)  # Keeps the logits of only one step in memory.
    while going:
        if pause():
            return False
        going = backend.advance()
    return True
