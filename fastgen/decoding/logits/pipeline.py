"""Application of several logits transforms, in order."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fastgen.decoding.logits.text import Text
from fastgen.decoding.logits.transform import LogitsTransform
from fastgen.ops.selection.kbest import LogitsUpdates, SparseUpdate


def apply_transforms(
    scores: Tensor, text: Text, transforms: Sequence[LogitsTransform], kept: bool = False
) -> Tensor:
    """Apply the transforms in order.

    Args:
        scores: (R, V) fp32; may be changed in place.
        text: Token ids of the running rows.
        transforms: Transforms in the order in which they apply.
        kept: Whether the caller keeps `scores`. fastgen's own transforms then change a copy; a
            user's function gets `scores` itself and may change it.

    Returns:
        The transformed scores.
    """
    original = scores
    for transform in transforms:
        if transform.idle(text):
            continue
        needs_copy = scores is original and kept and transform.in_place
        scores = transform(scores.clone() if needs_copy else scores, text)
    return scores


def sparse_updates(
    transforms: Sequence[LogitsTransform], text: Text, vocabulary: int
) -> LogitsUpdates | None:
    """Return the transforms of this step in the form that the k-best kernels apply.

    Args:
        transforms: Transforms in the order in which they apply.
        text: Token ids of the running rows.
        vocabulary: Vocabulary size V.

    Returns:
        The updates; None if the transforms cannot be expressed as such.
    """
    active = [transform for transform in transforms if not transform.idle(text)]
    updating = [transform for transform in active if transform.form == "sparse update"]
    if any(transform.form == "dense" for transform in active):
        return None
    # A later transform may ban or change the forced token.
    if any(transform.form == "forced token" for transform in active[:-1]):
        return None
    if any(
        transform.needs_log_probs and any(before.raises_scores for before in updating[:index])
        for index, transform in enumerate(updating)
    ):
        return None
    rows, device = text.ids.shape[0], text.ids.device
    mask, update, forced = None, None, None
    for transform in active:
        if transform.form == "token mask":
            if mask is None:
                mask = transform.token_mask(text, vocabulary)
            else:
                transform.add_to_mask(mask, text, vocabulary)
        elif transform.form == "sparse update":
            then = transform.sparse_update(text, vocabulary)
            update = then if update is None else composed(update, then, vocabulary)
        else:
            forced = transform.forced_tokens(rows, device)
    return LogitsUpdates(update, mask, forced)


def composed(first: SparseUpdate, then: SparseUpdate, vocabulary: int) -> SparseUpdate:
    """Return one sparse update that equals two in succession.

    Args:
        first: The update that applies first.
        then: The other one, of the same rows.
        vocabulary: Vocabulary size V.
    """
    tokens, order = torch.cat([first.tokens, then.tokens], 1).sort(dim=1, stable=True)
    factors = torch.cat([first.factors, then.factors], 1).gather(1, order)
    offsets = torch.cat([first.offsets, then.offsets], 1).gather(1, order)
    # A token of both is adjacent to itself. The first entry takes in the second, which is dropped.
    is_second = torch.nn.functional.pad(tokens[:, 1:] == tokens[:, :-1], (1, 0))
    is_first = is_second.roll(-1, 1)
    next_factors, next_offsets = factors.roll(-1, 1), offsets.roll(-1, 1)
    return SparseUpdate(
        tokens.masked_fill(is_second, vocabulary),
        torch.where(is_first, factors * next_factors, factors),
        torch.where(is_first, offsets * next_factors + next_offsets, offsets),
    )


def bans_alone(transforms: Sequence[LogitsTransform], text: Text) -> bool:
    """Return whether the transforms do nothing but ban tokens in this step."""
    return all(transform.form == "token mask" or transform.idle(text) for transform in transforms)


def capturable(transforms: Sequence[LogitsTransform]) -> bool:
    """Return whether the transforms can be captured as part of a CUDA graph.

    Then they run the same kernels whenever `phases` is equal, and read what changes on the device.
    """
    return all(transform.capturable for transform in transforms)


def phases(transforms: Sequence[LogitsTransform], length: int) -> tuple[int, ...]:
    """Return a key of the transforms' behavior at a length; equal keys mean equal behavior."""
    return tuple(transform.phase(length) for transform in transforms)


def keep_sentences(
    transforms: Iterable[LogitsTransform], sentences: Tensor, beams: int = 1
) -> None:
    """Keep the state of only the given sentences in the transforms.

    Args:
        transforms: Transforms of the search.
        sentences: int64 indices into the current batch.
        beams: Rows per sentence.
    """
    for transform in transforms:
        transform.keep_sentences(sentences, beams)
