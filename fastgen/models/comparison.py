"""The scope of an equivalence check: what differs while a step is compared with the model's own."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import NamedTuple

from torch import Tensor

from fastgen.context import PREFIX, assigned


class Comparison(NamedTuple):
    """How steps run during an equivalence check. Weights are packed at their first use.

    Attributes:
        rounding: Perturbs the output of each sublayer by a rounding error, to measure how much
            rounding changes a model's output; None for outputs as they are.
    """

    rounding: Callable[[Tensor], Tensor] | None = None


comparison: ContextVar[Comparison | None] = ContextVar(f"{PREFIX}comparison", default=None)
"""The comparison that runs in this context; None outside of equivalence checks."""


def comparing(
    rounding: Callable[[Tensor], Tensor] | None = None,
) -> assigned[Comparison | None]:
    """Return a context manager in which steps run for an equivalence check."""
    return assigned(comparison, Comparison(rounding))
