"""Encoder outputs of sources that have been encoded before, from the prefix cache."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fastgen import config as variables
from fastgen.decoding.kv_cache.prefix_cache import SourceCache, source_cache_of
from fastgen.models.model_fingerprint import model_fingerprint
from fastgen.models.runtime.encoder import Encoder
from fastgen.patches.transformers.encoders.encoder import lengths_of
from fastgen.patches.transformers.planning.cached_prompt import add, limit, note_hit

Encode = Callable[[Tensor, Tensor | None], Tensor]
"""Function from token ids (B, S) and their mask (B, S), or None, to an encoder's output (B, S, C),
which is zero at padding."""


def encode(
    module: Any, encoder: Encoder, ids: Tensor, visible: Tensor | None, run: Encode
) -> Tensor:
    """Return an encoder's output (B, S, C), zero at padding; only sources that are not known run.

    Args:
        module: The encoder.
        encoder: What was read of it in this call.
        ids: Token ids (B, S).
        visible: (B, S) bool, True for tokens; None if there is no padding.
        run: Runs the encoder.
    """
    if (
        limit() <= 0
        or not _is_on_the_right(visible)
        or (fingerprint := model_fingerprint(module)) is None
    ):
        return run(ids, visible)
    cache, precision = source_cache_of(module), variables.settings().precision
    cache.validate(fingerprint.with_options(encoder.fingerprint, precision))
    fingerprint = cache.model
    lengths = [ids.shape[1]] * len(ids) if visible is None else lengths_of(visible)
    sources = [row[:length].cpu() for row, length in zip(ids, lengths, strict=True)]
    outputs: list[Any] = [_known(cache, source) for source in sources]
    missing = [row for row, output in enumerate(outputs) if output is None]
    if missing:
        longest = max(lengths[row] for row in missing)
        part = None if visible is None else visible[missing, :longest]
        made = run(ids[missing, :longest], part)
        for output, row in zip(made, missing, strict=True):
            outputs[row] = output[: lengths[row]]
            add(cache, fingerprint, sources[row], [outputs[row]])
    hidden = outputs[0].new_zeros(*ids.shape, outputs[0].shape[1])
    for row, output in enumerate(outputs):
        hidden[row, : lengths[row]] = output
    return hidden


def _known(cache: SourceCache, source: Tensor) -> Tensor | None:
    """Return the output (N, C) of a source that is known; else None."""
    text, count = cache.find(source)
    if text is None:
        return None
    text.touch()
    note_hit(count)
    return text.tensors[0]


def _is_on_the_right(visible: Tensor | None) -> bool:
    """Return whether all padding follows the tokens, so that positions count from 0."""
    return visible is None or not bool((visible[:, 1:] & ~visible[:, :-1]).any())
