"""The decode loop: a model makes decode steps and a search selects tokens, until the search is over."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from torch import Tensor

from fastgen.decoding.backends.native_beam_search import NativeBeamSearch
from fastgen.decoding.backends.native_first_finished import NativeFirstFinished
from fastgen.decoding.backends.native_sampling import NativeSampling
from fastgen.decoding.logits.transforms import Text

_Made = TypeVar("_Made")  # what a step returns: logits, or a prediction that a search makes them of
_Made_co = TypeVar("_Made_co", covariant=True)
_Made_contra = TypeVar("_Made_contra", contravariant=True)


class Search(Protocol[_Made_contra]):
    """A search that has begun: beam search, sampling, or another."""

    @property
    def text(self) -> Text: ...
    @property
    def present(self) -> int:
        """Sentences that are still in the batch."""
        ...

    def advance(self, model: Any, made: _Made_contra, /) -> bool:
        """Select the next tokens from what a decode step returned; False when the search is over."""
        ...


class Stepper(Protocol[_Made_co]):
    """What runs a model's decode steps."""

    def step(self, ids: Tensor) -> _Made_co:
        """Run the newest token of ids (R, L)."""
        ...


class DecodeBackend(Protocol):
    """How the decode steps of one search run."""

    def advance(self) -> bool:
        """Run one decode step, or several; return whether the search goes on."""
        ...


class Eager:
    """One decode step per call; Python selects the tokens. A captured step is replayed by the model itself."""

    def __init__(self, search: Search[Any], model: Stepper[Any]) -> None:
        self._search, self._model = search, model

    def advance(self) -> bool:
        return self._search.advance(self._model, self._model.step(self._search.text.ids))


NATIVE = (NativeBeamSearch, NativeSampling, NativeFirstFinished)
"""Backends that run many steps in C per call, token selection included."""


def backend_of(search: Search[Any], model: Stepper[Any]) -> DecodeBackend:
    """Return the backend of a search: the native one that supports it, else `Eager`."""
    native = next((kind for kind in NATIVE if kind.supports(search, model)), None)
    return Eager(search, model) if native is None else native(cast(Any, search), cast(Any, model))


def _never() -> bool:
    return False


def decode(
    search: Search[_Made], model: Stepper[_Made], made: _Made, pause: Callable[[], bool] = _never
) -> bool:
    """Decode until the search is over, or until `pause` asks to stop after a step; return whether it is over.

    Args:
        made: what the model returned for the prompt; it is freed after the first selection.
    """
    backend = backend_of(search, model)
    going = search.advance(model, made)
    made = cast(Any, None)  # so that no two steps' logits are in memory at once
    while going:
        if pause():
            return False
        going = backend.advance()
    return True
