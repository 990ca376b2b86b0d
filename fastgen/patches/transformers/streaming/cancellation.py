"""Who waits for the sentences of a call of `generate`, and hears their tokens while it runs.

Sentences that nobody waits for leave the batch as finished ones do; what they have so far stands in the output. Loops
of transformers' own, and big-little decoding, run on for all, and tell no tokens.
"""

from contextvars import ContextVar
from typing import Any, NamedTuple

from fastgen.context import assigned
from fastgen.decoding.batching.batch_compaction import Wanted
from fastgen.decoding.batching.stable_prefix import OnTokens


class _Asked(NamedTuple):
    model: Any
    wanted: Wanted | None
    on_tokens: OnTokens | None


_NOTHING = _Asked(None, None, None)
_asking: ContextVar[_Asked] = ContextVar("fastgen_awaited", default=_NOTHING)


def asking(model: Any, wanted: Wanted | None, on_tokens: OnTokens | None = None) -> assigned[Any]:
    """Within it, a loop of ours that runs in a model's `generate` asks behind every step, and tells its tokens."""
    return assigned(_asking, _Asked(model, wanted, on_tokens))


def from_sentence(first: int) -> assigned[Any]:
    """Within it, sentence 0 of a call is that of number `first` to whoever is asked or told."""
    model, wanted, on_tokens = _asking.get()
    return asking(
        model,
        None if wanted is None else lambda number: wanted(first + number),
        None if on_tokens is None else lambda number, place, tokens: on_tokens(first + number, place, tokens),
    )


def asked_of(model: Any) -> tuple[Wanted | None, OnTokens | None]:
    asked = _asking.get()
    return (asked.wanted, asked.on_tokens) if asked.model is model else (None, None)
