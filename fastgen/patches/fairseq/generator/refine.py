"""fairseq's iterative refinement, which is left to fairseq: whole texts are written anew, so that nothing is kept."""

from collections.abc import Callable
from typing import Any

from fastgen.patches.engine import engine


def refine(original: Callable[..., Any], self: Any, models: Any, sample: Any, *args: Any, **kwargs: Any) -> Any:
    """`IterativeRefinementGenerator.generate`: fairseq's own, and counted."""
    of = type(models[0]).__name__, "iterative refinement"
    engine.fallback("fairseq.refine", "iterative refinement", of)
    return original(self, models, sample, *args, **kwargs)
