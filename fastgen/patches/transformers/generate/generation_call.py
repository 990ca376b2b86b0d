"""What a caller of `generate` requested that is no argument of it: one record, in one context variable."""

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fastgen.context import PREFIX, assigned
from fastgen.decoding.batching.batch_compaction import Wanted
from fastgen.decoding.batching.stable_prefix import OnTokens

if TYPE_CHECKING:
    from fastgen.patches.transformers.bild.bild import DraftingRequest
    from fastgen.patches.transformers.streaming.suspend import Request


@dataclass(frozen=True)
class GenerationCall:
    """A call of a model's `generate` that is under way. It holds for that model's decoding loop alone.

    Attributes:
        scored: whether the caller takes `Scored` sequences instead of what `generate` returns.
        wanted: whether somebody still waits for a sentence, by its number; None where none is ever cancelled.
        on_tokens: hears the tokens of each sentence as soon as they are final; None where nobody listens.
        suspension: that the call may be suspended once its loop has begun; None where it may not.
        drafting: that a small model drafts; None where none does.
        captures_call_only: whether the loop is not to run, and hands over the `LoopCall` that it got.
        resolves_legacy_modes: whether decoding methods that transformers 5 has taken out are looked for.
        skips_padding: whether the encoder may leave out padding, as nothing of its output at padding is returned.
    """

    model: Any = None
    scored: bool = False
    wanted: Wanted | None = None
    on_tokens: OnTokens | None = None
    suspension: "Request | None" = None
    drafting: "DraftingRequest | None" = None
    captures_call_only: bool = False
    resolves_legacy_modes: bool = False
    skips_padding: bool = False

    def from_sentence(self, first: int) -> "GenerationCall":
        """The same call for a part of its batch, whose sentence 0 is number `first` of the whole."""
        wanted, on_tokens = self.wanted, self.on_tokens

        def is_wanted(number: int) -> bool:
            assert wanted is not None
            return wanted(first + number)

        def tell(number: int, place: int, tokens: Sequence[int]) -> None:
            assert on_tokens is not None
            on_tokens(first + number, place, tokens)

        return replace(self, wanted=wanted and is_wanted, on_tokens=on_tokens and tell)


_NONE = GenerationCall()
_current: ContextVar[GenerationCall] = ContextVar(f"{PREFIX}generation_call", default=_NONE)


def current_call() -> GenerationCall:
    """The innermost call of `generate` that is under way, whatever its model."""
    return _current.get()


def call_of(model: Any) -> GenerationCall:
    """The call that is under way if it is this model's, else one for which nothing is requested."""
    call = _current.get()
    return call if call.model is model else GenerationCall(model)


def requesting(model: Any, **changes: Any) -> assigned[GenerationCall]:
    """Within it, a call of this model's `generate` has these fields changed."""
    return assigned(_current, replace(call_of(model), **changes))


def in_part(first: int) -> assigned[GenerationCall]:
    """Within it, the call under way is that of a part of its batch, from sentence `first` on."""
    return assigned(_current, _current.get().from_sentence(first))
