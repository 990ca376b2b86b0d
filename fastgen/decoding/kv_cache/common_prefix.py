"""The tokens that all prompts of a batch begin with, such as a system prompt or few-shot examples.

Prompts of unequal lengths are padded on the left, so the common tokens begin at another place in
each row. They come to the same slots of the KV cache if padding follows them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

LEAST = 32
"""Minimum number of common tokens."""

SAVED, SHARE = 65536, 4
"""Thresholds of what running common tokens once has to save.

`SAVED` is a number of tokens times the model's width: the second forward has fixed costs, and reads
all weights once more. The tokens that are saved must be at least one in `SHARE` of all tokens,
because a prompt's own tokens then attend with a mask. Time of a call of two new tokens, relative
to one that runs every prompt whole (GPT-2, fp32, one thread of a busy Zen 4):

| layers x width | sentences | common | own | time               |
|----------------|-----------|--------|-----|--------------------|
| 8 x 512        | 2         | 256    | 250 | 0.76               |
| 8 x 512        | 9         | 32     | 8   | 0.47               |
| 2 x 64         | 5         | 256    | 250 | 0.76               |
| 2 x 64         | 9         | 32     | 8   | 1.10, so it is off |
| 2 x 64         | 2         | 256    | 750 | 1.33, so it is off |
"""


def padding_of(mask: Tensor | None) -> Tensor | None:
    """Return the number of padding tokens of each row, (B,) int64; None if no row has any.

    Args:
        mask: (B, P), nonzero at tokens; None if there is no padding.
    """
    if mask is None:
        return None
    padding = mask.shape[1] - mask.count_nonzero(1)
    return padding if bool(padding.any()) else None


def is_on_the_left(mask: Tensor, padding: Tensor) -> bool:
    """Return whether all padding of a mask (B, P), of which each row has `padding`, comes first."""
    places = torch.arange(mask.shape[1], device=mask.device, dtype=torch.int64)
    return torch.equal(mask.to(torch.bool), places >= padding[:, None])


def have_common_prefix(ids: Tensor, padding: Tensor | None) -> bool:
    """Return whether all prompts begin with the same `LEAST` tokens, and have more.

    Args:
        ids: (B, P) int64.
        padding: `padding_of` the prompts.
    """
    length = ids.shape[1] - (0 if padding is None else int(padding.max()))
    if length <= LEAST:
        return False
    first = _aligned(ids, padding, LEAST)
    return bool((first == first[:1]).all())


def common_tokens(ids: Tensor, padding: Tensor | None, positions: Tensor | None) -> int:
    """Return how many tokens all prompts begin with, at equal positions.

    At least one token of each prompt is not counted, because its logits are needed.

    Args:
        ids: (B, P) int64.
        padding: `padding_of` the prompts, on the left.
        positions: (1 or B, P) int64 position ids; None if they are those of the columns.
    """
    most = ids.shape[1] - 1 - (0 if padding is None else int(padding.max()))
    differ = _differ(_aligned(ids, padding, most))
    if positions is not None and len(positions) > 1:
        differ = differ | _differ(_aligned(positions, padding, most))
    columns = differ.nonzero()
    return int(columns[0]) if len(columns) else most


def pays(sentences: int, length: int, common: int, width: int) -> bool:
    """Return whether running common tokens once takes less time than running them everywhere.

    Args:
        sentences: B.
        length: Tokens of a row P, padding included.
        common: Tokens that all prompts begin with.
        width: Size of the model's hidden states.
    """
    saved = (sentences - 1) * common
    return common >= LEAST and saved * width >= SAVED and saved * SHARE >= sentences * length


APART = 32
"""Tokens that have to be saved for each decode step of another group of prompts that runs apart.

A decode step of a group reads all weights again, for few rows.
"""


def groups(texts: Sequence[Sequence[int]], steps: int, width: int) -> list[list[int]]:
    """Return groups of prompts that are best generated apart, as the prompts of each begin alike.

    Args:
        texts: Token ids of each prompt.
        steps: Maximum number of decode steps.
        width: Size of the model's hidden states.

    Returns:
        The indices of the prompts of each group, the last of which may be those that are in no
        other. An empty list if one group is best.
    """
    by_start: dict[tuple[int, ...], list[int]] = {}
    for row, text in enumerate(texts):
        by_start.setdefault(tuple(text[:LEAST]), []).append(row)
    found: list[list[int]] = []
    for members in by_start.values():
        common = min(_shared(texts[members[0]], texts[row]) for row in members)
        length = max(len(texts[row]) for row in members)
        saved = (len(members) - 1) * common
        if pays(len(members), length, common, width) and saved >= APART * steps:
            found.append(members)
    if not found or len(found[0]) == len(texts):
        return []
    others = set(range(len(texts))).difference(*found)
    return [*found, sorted(others)] if others else found


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many first tokens two texts share, at least one of each not counted."""
    most = min(len(one), len(other)) - 1
    pairs = zip(one[:most], other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), most)


def common_first(padding: Tensor, common: int, length: int) -> Tensor:
    """Return the order of tokens with common tokens first, then padding, then the rest.

    Args:
        padding: (B,) int64, padding tokens on the left of each row.
        common: Tokens that all prompts begin with.
        length: Tokens of a row P, padding included.

    Returns:
        (B, P) int64, the column that each token comes from.
    """
    places = torch.arange(length, device=padding.device, dtype=torch.int64).expand(len(padding), -1)
    start = padding[:, None]
    rest = torch.where(places < common + start, places - common, places)
    return torch.where(places < common, places + start, rest)


def _aligned(values: Tensor, padding: Tensor | None, count: int) -> Tensor:
    """Return the first `count` entries after the padding of each row of values (B, P)."""
    if padding is None:
        return values[:, :count]
    places = torch.arange(count, device=values.device, dtype=torch.int64)
    return values.gather(1, padding[:, None] + places)


def _differ(values: Tensor) -> Tensor:
    """Return in which columns of values (B, N) rows differ, (N,) bool."""
    return (values != values[:1]).any(0)
