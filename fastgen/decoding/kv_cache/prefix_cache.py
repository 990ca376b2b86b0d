"""Keys and values of recent prompts, and encoder outputs of recent sources, kept between calls.

A chat sends its whole history again in every turn, and a system prompt begins many requests. With
the cache, only the tokens that follow the longest known prefix run through the model. A source that
comes again is not encoded again.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastgen.decoding.kv_cache.common_prefix import LEAST
from fastgen.models.model_fingerprint import ModelFingerprint
from fastgen.models.state import CachedState, iter_cached_states, state_of

KeysValues = tuple[Tensor, Tensor]


@dataclass(eq=False)
class CachedText:
    """What is kept of one text.

    Attributes:
        tokens: (N,) int64, on the CPU.
        tensors: Keys and values (1, Hkv, N, D) of each layer in turn, or an encoder's output
            (N, C).
        owner: What bounds the texts: a context, or None for the whole process.
        used: Time of the latest use in nanoseconds, by the monotonic clock.
    """

    tokens: Tensor
    tensors: Sequence[Tensor]
    owner: object = None
    used: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def touch(self) -> None:
        """Note a use."""
        self.used = time.monotonic_ns()


class PrefixCache(CachedState):
    """The texts that are kept of one model, with the keys and values of all their tokens.

    Attributes:
        model: Fingerprint of the model that they come from.
    """

    label = "prefix cache"

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may generate as well
        self._texts: list[CachedText] = []
        self.model: ModelFingerprint | None = None

    @property
    def nbytes(self) -> int:
        return sum(text.nbytes for text in self.texts)

    def release(self) -> bool:
        return True

    @property
    def texts(self) -> Sequence[CachedText]:
        """The texts that are kept now."""
        return list(self._texts)

    def find(self, tokens: Tensor) -> tuple[CachedText | None, int]:
        """Return the text that shares most first tokens with another, and how many they are.

        Args:
            tokens: (N,) int64, on the CPU.

        Returns:
            The text and the number of tokens; None and 0 if there are fewer than `LEAST`.
        """
        best, most = None, LEAST - 1
        for text in self.texts:
            if (count := _shared(text.tokens, tokens)) > most:
                best, most = text, count
        return best, 0 if best is None else most

    def validate(self, model: ModelFingerprint) -> None:
        """Drop all texts if they come from another state of the model."""
        if not model.is_same(self.model):
            with self._lock:
                self._texts, self.model = [], model

    def add(self, text: CachedText, model: ModelFingerprint | None, limit: int) -> None:
        """Keep a text, in place of those that it makes superfluous.

        Args:
            text: The text.
            model: `model` at the start of the call that made it.
            limit: Maximum number of bytes of all texts of its owner, of all models. Those used
                least recently are dropped. A text that is larger is not kept.
        """
        if text.nbytes > limit:
            return
        with self._lock:
            if model is not self.model:
                return
            for other in self._texts:
                if self._covers(other, text):
                    other.touch()
                    return
            text.touch()
            self._texts = [other for other in self._texts if not self._covers(text, other)] + [text]
        trim(text.owner, limit)

    def _covers(self, text: CachedText, other: CachedText) -> bool:
        """Return whether a text has everything that is kept of another."""
        return _shared(text.tokens, other.tokens) == len(other.tokens)

    def drop(self, text: CachedText) -> None:
        """Drop a text."""
        with self._lock:
            self._texts = [other for other in self._texts if other is not text]


class SourceCache(PrefixCache, CachedState):
    """The sources that are kept of one encoder, with its outputs."""

    def find(self, tokens: Tensor) -> tuple[CachedText | None, int]:
        """Return the text with exactly these tokens, and their number; None and 0 for none."""
        found = (text for text in self.texts if torch.equal(text.tokens, tokens))
        text = next(found, None)
        return text, 0 if text is None else len(tokens)

    def _covers(self, text: CachedText, other: CachedText) -> bool:
        return torch.equal(text.tokens, other.tokens)


def prefix_cache_of(model: object) -> PrefixCache:
    """Return the prefix cache of a model, created at its first use."""
    return state_of(model).of(PrefixCache)


def source_cache_of(encoder: object) -> SourceCache:
    """Return the cache of an encoder's outputs, created at its first use."""
    return state_of(encoder).of(SourceCache)


def trim(owner: object, limit: int) -> None:
    """Drop an owner's least recently used texts, of all models, until they fit into a limit.

    Args:
        owner: As in `CachedText`.
        limit: Maximum number of bytes.
    """
    kept = [
        (text, cache)
        for kind in (PrefixCache, SourceCache)
        for _, cache in iter_cached_states(kind)
        for text in cache.texts
        if text.owner is owner
    ]
    kept.sort(key=lambda pair: pair[0].used)
    size = sum(text.nbytes for text, _ in kept)
    for text, cache in kept:
        if size <= limit:
            break
        cache.drop(text)
        size -= text.nbytes


def _shared(one: Tensor, other: Tensor) -> int:
    """Return how many first tokens two texts share."""
    count = min(len(one), len(other))
    differ = (one[:count] != other[:count]).nonzero()
    return int(differ[0]) if len(differ) else count
