"""Which sentences of a call of `generate` somebody still waits for: the others leave its batch as finished ones do.

What those have so far stands in the output. Loops of transformers' own, and big-little decoding, run on for all.
"""

from contextvars import ContextVar
from typing import Any

from fastgen.context import assigned
from fastgen.decoding.leaving import Wanted

_asking: ContextVar[tuple[Any, Wanted] | None] = ContextVar("fastgen_awaited", default=None)


def asking(model: Any, wanted: Wanted) -> assigned[Any]:
    """Within it, a loop of ours that runs in a model's `generate` asks behind every step."""
    return assigned(_asking, (model, wanted))


def from_sentence(first: int) -> assigned[Any]:
    """Within it, sentence 0 of a call is that of number `first` to whoever is asked."""
    if (asked := _asking.get()) is None:
        return assigned(_asking, None)
    model, wanted = asked
    return asking(model, lambda number: wanted(first + number))


def asked_of(model: Any) -> Wanted | None:
    asked = _asking.get()
    return None if asked is None or asked[0] is not model else asked[1]
