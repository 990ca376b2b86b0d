"""What a running call of a toolkit's generation carries beside its arguments."""

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fastgen.context import PREFIX, assigned, changed
from fastgen.decoding.batching.batch_compaction import CancellationCallback
from fastgen.decoding.batching.stable_prefix import OnTokens

if TYPE_CHECKING:
    from torch import Tensor

    from fastgen.patches.fairseq.bild.bild import BildSession
    from fastgen.patches.transformers.bild.bild import DraftingRequest
    from fastgen.patches.transformers.encoders.encoder import EncoderConsumer
    from fastgen.patches.transformers.loops.upcoming_calls import UpcomingCalls
    from fastgen.patches.transformers.planning.cached_prompt import PrefixCacheUse
    from fastgen.patches.transformers.streaming.suspend import Request


@dataclass(frozen=True)
class GenerationCall:
    """What one call of a model's `generate`, or of fairseq's generator, carries.

    Requests apply to the decoding loop of that model only.

    Attributes:
        model: The model; in fairseq, the generator.
        scored: Whether the loop returns `Scored` sequences instead of `generate`'s output.
        wanted: Returns whether a sentence, by number, is not cancelled; None if none ever is.
        on_tokens: Called with the tokens of each sentence as soon as they are final; or None.
        suspension: Request to suspend the call once its loop has begun; or None.
        drafting: Request for big-little decoding; or None.
        captures_call_only: Whether the loop returns its `Call` instead of running.
        resolves_legacy_modes: Whether to look for decoding methods that transformers 5 removed.
        source: (B, S) int64, the tokens that the call gives to an encoder; or None.
        skips_padding: Whether the encoder may skip padding: the call returns none of its outputs
            at padding.
        bild: In fairseq, options of big-little decoding for all generators in this context; or
            None.
        result: In fairseq, a batch and what the generator returns for it; or None.
        step: Attention of the decode step that runs; None outside of one.
        encoder_consumer: Which positions of an encoder's output are read; None if unknown.
        upcoming: The calls of the loop over batches that runs; None outside of one.
        prefix_cache: Use of the prefix cache by all models in this context; None for the setting
            of the process.
    """

    model: Any = None
    scored: bool = False
    wanted: CancellationCallback | None = None
    on_tokens: OnTokens | None = None
    suspension: "Request | None" = None
    drafting: "DraftingRequest | None" = None
    captures_call_only: bool = False
    resolves_legacy_modes: bool = False
    source: "Tensor | None" = None
    skips_padding: bool = False
    bild: "BildSession | None" = None
    result: tuple[Any, Any] | None = None
    step: Any = None
    encoder_consumer: "EncoderConsumer | None" = None
    upcoming: "UpcomingCalls | None" = None
    prefix_cache: "PrefixCacheUse | None" = None

    def of_sentences(self, rows: Sequence[int]) -> "GenerationCall":
        """Return the same requests for a part of the batch.

        Args:
            rows: Number of each of the part's sentences in the whole batch.
        """
        wanted, on_tokens = self.wanted, self.on_tokens

        def is_wanted(number: int) -> bool:
            assert wanted is not None
            return wanted(rows[number])

        def tell(number: int, place: int, tokens: Sequence[int]) -> None:
            assert on_tokens is not None
            on_tokens(rows[number], place, tokens)

        return replace(self, wanted=wanted and is_wanted, on_tokens=on_tokens and tell)


_NONE = GenerationCall()
current: ContextVar[GenerationCall] = ContextVar(f"{PREFIX}generation_call", default=_NONE)
"""The innermost running call, of any model."""


def call_of(model: Any) -> GenerationCall:
    """Return the running call if it is this model's, else one without requests."""
    call = current.get()
    return call if call.model is model else GenerationCall(model, prefix_cache=call.prefix_cache)


def requesting(model: Any, **changes: Any) -> assigned[GenerationCall]:
    """Return a context manager in which calls of this model's `generate` have the given fields."""
    return assigned(current, replace(call_of(model), **changes))


def in_part(rows: Sequence[int]) -> assigned[GenerationCall]:
    """Return a context manager in which the running call covers these sentences only."""
    return assigned(current, current.get().of_sentences(rows))


def in_step(attention: Any) -> changed[GenerationCall]:
    """Return a context manager of a decode step whose attention layers `attention` resolves."""
    return changed(current, step=attention)
