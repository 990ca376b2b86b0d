"""fairseq's `SequenceScorer` (`fairseq-eval-lm`, `--score-reference`) with routed linear layers."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from fastgen.models.routing.routes import routed
from fastgen.patches.engine import engine


def score(original: Callable[..., Any], self: Any, models: Any, sample: Any, **kwargs: Any) -> Any:
    """`SequenceScorer.generate` with routed linear layers.

    It runs a single forward pass over existing texts, so that there are no decode steps to
    accelerate.
    """
    with engine.running("score"), ExitStack() as stack:
        layers = sum(stack.enter_context(routed(model)) for model in models)
        scored = original(self, models, sample, **kwargs)
    if layers:
        engine.hit("fairseq.score")
    return scored
