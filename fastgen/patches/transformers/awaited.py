"""Which sentences of a call of `generate` somebody still waits for: the others leave its batch as finished ones do.

What those have so far stands in the output. Loops of transformers' own, and big-little decoding, run on for all.
"""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from fastgen.decoding.leaving import Wanted

_asking: ContextVar[tuple[Any, Wanted] | None] = ContextVar("fastgen_awaited", default=None)


@contextmanager
def asking(model: Any, wanted: Wanted) -> Generator[None]:
    """Within it, a loop of ours that runs in a model's `generate` asks behind every step."""
    token = _asking.set((model, wanted))
    try:
        yield
    finally:
        _asking.reset(token)


@contextmanager
def from_sentence(first: int) -> Generator[None]:
    """Within it, sentence 0 of a call is that of number `first` to whoever is asked."""
    asked = _asking.get()
    token = _asking.set(None if asked is None else (asked[0], lambda i: asked[1](first + i)))
    try:
        yield
    finally:
        _asking.reset(token)


def asked_of(model: Any) -> Wanted | None:
    asked = _asking.get()
    return None if asked is None or asked[0] is not model else asked[1]
