"""Decode backends: how the decode steps of a search run and where its tokens are selected."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from torch import Tensor

from fastgen.decoding.logits.text import Text
from fastgen.models.cuda_graphs.kept_graphs import KeptGraphs


class Search(Protocol):
    """A running search, such as beam search or sampling.

    Attributes:
        captured: Whether decode steps are captured as CUDA graphs.
    """

    captured: bool

    @property
    def text(self) -> Text: ...
    @property
    def batch_size(self) -> int:
        """Number of sentences that are still in the batch."""
        ...

    @property
    def eager_selection(self) -> str | None:
        """Why token selection cannot be captured as a CUDA graph; None if it can."""
        ...

    def advance(self, model: Any, output: Any, /) -> bool:
        """Select the next tokens from the output of a decode step.

        Returns:
            False when the search is over.
        """
        ...


class Stepper(Protocol):
    """An object that runs the decode steps of a model."""

    @property
    def eager_selection(self) -> str | None:
        """Why tokens cannot be selected from its output in a CUDA graph; None if they can."""
        ...

    def kept_graphs(self, logits: Tensor) -> KeptGraphs | None:
        """Return graphs of earlier calls that read the logits of a step; None for none."""
        ...

    def step(self, ids: Tensor) -> Any:
        """Run one decode step on the newest token of each row of ids, (R, L) int64.

        Returns:
            The output of the step: logits, or a prediction from which the search computes them.
        """
        ...


def not_captured(reason: str) -> str:
    """Return the note of a plan that token selection is not captured."""
    return f"token selection is not captured as a CUDA graph: {reason}"


_Search = TypeVar("_Search", bound=Search)


class DecodeBackend(ABC, Generic[_Search]):
    """A way to run the decode steps of one search.

    Without methods of its own, a backend runs one step per call and selects tokens in Python. The
    model itself replays a step that is captured as a CUDA graph.

    Args:
        search: The search; it holds its own state, which may have advanced.
        model: The stepper of its decode steps.

    Attributes:
        description: How tokens are selected, as `explain` prints it.
    """

    description: ClassVar[str]

    def __init__(self, search: _Search, model: Any) -> None:
        self.search, self.model = search, model
        self._refused: str | None = reason_not_to_capture(search, model)

    @classmethod
    @abstractmethod
    def supports(cls, search: Search, model: Any) -> bool:
        """Return whether the backend can run this search with this model."""

    @property
    def left_off(self) -> tuple[str, ...]:
        """Features that the backend runs without, each with its reason."""
        return () if self._refused is None else (not_captured(self._refused),)

    def select(self, output: Any) -> bool:
        """Select the next tokens from the output of a decode step or of the prefill.

        Returns:
            False when the search is over.
        """
        return self.search.advance(self.model, output)

    def advance(self) -> bool:
        """Run one or more decode steps; return whether the search continues."""
        return self.select(self.model.step(self.search.text.ids))


def reason_not_to_capture(search: Search, model: Stepper) -> str | None:
    """Return why token selection is not captured although decode steps are; None otherwise."""
    return (model.eager_selection or search.eager_selection) if search.captured else None


class Eager(DecodeBackend[Search]):
    """A backend for every search and every model."""

    description = "after each decode step"

    @classmethod
    def supports(cls, search: Search, model: Any) -> bool:
        """Return True."""
        return True
