"""Images, videos and sound of prompts, which `generate` repeats for all rows."""

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fastgen.patches.transformers import compat

ENCODED, _POSITIONS = "mm_encoder_outputs", "position_ids"
"""Arguments of the forward: outputs of the encoders of images and videos, and positions."""

GIVEN = "images or videos are given"
"""Reason for calls whose rows cannot share them."""

_MODALITIES = {
    **dict.fromkeys(("image_patches", "pixel_values", "pixel_values_images"), "image"),
    "pixel_values_videos": "video",
    **dict.fromkeys(("audio_input_features", "input_features", "input_values"), "audio"),
}
"""Arguments of the forward with images, videos or sound that are not encoded yet."""


def dimension_of_rows(name: str, value: Any) -> int:
    """Return the dimension of an argument of the forward that counts rows."""
    return 1 if name == _POSITIONS and isinstance(value, Tensor) and value.dim() > 2 else 0


def reason_not_to_share(
    model: Any, input_ids: Tensor, kwargs: dict[str, Any], beams: int
) -> str | None:
    """Return why a prompt with images cannot run once per sentence, or None if it can.

    Args:
        input_ids: (B * M, P) int64.
        kwargs: Arguments of the forward, at B * M rows.
        beams: M.
    """
    # What an encoder has read is not read again, whatever its rows.
    known = model.config.is_encoder_decoder or _has_one_per_row(model, input_ids, kwargs)
    known = known and _of_sentences(model, input_ids, kwargs, beams) is not None
    return None if known else GIVEN


def reason_not_to_capture(kwargs: dict[str, Any]) -> str | None:
    """Return why steps of a model's modules are not captured, or None if they may be."""
    positions = kwargs.get(_POSITIONS)
    if kwargs.get(ENCODED):
        return GIVEN
    return None if positions is None or positions.dim() == 2 else "multimodal position ids"


def once_per_sentence(
    model: Any, input_ids: Tensor, kwargs: dict[str, Any], beams: int
) -> dict[str, Any]:
    """Return the arguments about images and positions at B rows; the arguments are as above."""
    if beams == 1:
        return {}
    encoded, positions = _of_sentences(model, input_ids, kwargs, beams), kwargs.get(_POSITIONS)
    once = {ENCODED: encoded} if encoded else {}
    if positions is not None and positions.dim() > 2:
        once[_POSITIONS] = positions[:, ::beams].contiguous()
    return once


def _has_one_per_row(model: Any, input_ids: Tensor, kwargs: dict[str, Any]) -> bool:
    """Return whether each prompt reads its own row of all arguments that are not encoded yet.

    `generate` repeats such rows one by one: with two images for one prompt and none for another,
    one of its beams would read the first image twice. As there are as many rows as prompts, each
    prompt has one if none is without.
    """
    others = (value for name, value in kwargs.items() if name != _POSITIONS)
    if any(value.shape[:1] != input_ids.shape[:1] for value in others if isinstance(value, Tensor)):
        return False
    given = {kind for name, kind in _MODALITIES.items() if kwargs.get(name) is not None}
    tokens = {compat.placeholder_token(model, kind) for kind in given} - {None}
    newest = input_ids[:, compat.cache_of(kwargs).get_seq_length() :]
    return all(bool((newest == token).any(1).all()) for token in tokens)


def _of_sentences(
    model: Any, input_ids: Tensor, kwargs: dict[str, Any], beams: int
) -> dict[str, Any] | None:
    """Return encoder outputs with each image once; None if it is unknown whose they are."""
    encoded: dict[str, Any] = kwargs.get(ENCODED) or {}
    once: dict[str, Any] = {}
    for modality, output in encoded.items():
        if output is None or (parts := getattr(output, "pooler_output", None)) is None:
            once[modality] = output  # nothing was repeated
            continue
        token = compat.placeholder_token(model, modality)
        if token is None or input_ids.shape[1] == 0:
            return None
        counts: list[int] = (input_ids[::beams] == token).sum(1).tolist()
        first = _first_of_each(list(map(len, parts)), counts, beams)
        if first is None:
            return None
        once[modality] = copy.copy(output)
        once[modality]["pooler_output"] = _picked(parts, first)
        deep = getattr(output, "deepstack_features", None)
        if deep is not None and isinstance(deep[0][0], Tensor):
            once[modality]["deepstack_features"] = [_picked(layer, first) for layer in deep]
    return once


def _first_of_each(lengths: Sequence[int], counts: Sequence[int], beams: int) -> list[int] | None:
    """Return the indices of one copy of each image.

    The images of a sentence follow one another, and then again for each of its other rows.

    Args:
        lengths: Number of tokens of each image, copies included.
        counts: Number of image tokens of each sentence.
        beams: Number of copies M.

    Returns:
        The indices; None if lengths and counts do not match.
    """
    at, first = 0, list[int]()
    for count in counts:
        begin = at
        while count > 0 and at < len(lengths):
            count -= lengths[at]
            at += 1
        copies = lengths[begin : begin + beams * (at - begin)]
        if count or list(copies) != list(lengths[begin:at]) * beams:
            return None
        first += range(begin, at)
        at = begin + len(copies)
    return first if at == len(lengths) else None


def _picked(parts: Any, indices: list[int]) -> Any:
    if isinstance(parts, Tensor):
        return parts[torch.tensor(indices, device=parts.device, dtype=torch.int64)]
    return [cast("Sequence[Tensor]", parts)[index] for index in indices]
