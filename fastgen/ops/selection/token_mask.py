"""Token masks: sets of tokens, one per row, with one bit for each token of the vocabulary.

Kernels pass bans of n-gram blocking, bad words and minimal lengths to each other in this form. It
takes a thirty-second of the memory of fp32 scores, and banning a token twice has no further effect.
"""

import torch
from torch import Tensor

from fastgen.ops.dispatch import (
    TRITON,
    cdiv,
    constexpr,
    in_c,
    in_memory,
    jit,
    launch,
    power_of_two,
    select_backend,
    tl,
)
from fastgen.ops.native import selection as native_selection


def empty_mask(rows: int, vocabulary: int, device: torch.device) -> Tensor:
    """Return (R, ceil(V / 32)) int32, all zero: every row's set is empty."""
    return torch.zeros(rows, cdiv(vocabulary, 32), dtype=torch.int32, device=device)


def unpacked(mask: Tensor, vocabulary: int) -> Tensor:
    """Return the sets as (R, V) bool."""
    bits = mask[:, :, None] >> torch.arange(32, dtype=torch.int32, device=mask.device)
    return bits.bitwise_and_(1).flatten(1)[:, :vocabulary].bool()


def packed(sets: Tensor) -> Tensor:
    """Return sets (R, V) bool as a mask; the inverse of `unpacked`."""
    rows, vocabulary = sets.shape
    padded = torch.nn.functional.pad(sets, (0, -vocabulary % 32)).view(rows, -1, 32).to(torch.int64)
    words = (padded << torch.arange(32, device=sets.device, dtype=torch.int64)).sum(2)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def add_tokens_reference(mask: Tensor, tokens: Tensor, vocabulary: int) -> Tensor:
    """Return a copy of mask with tokens added; those outside the vocabulary are ignored.

    Args:
        mask: (R, W) int32.
        tokens: (R, N) int64, or (1, N) for all rows.
        vocabulary: V.
    """
    sets = torch.nn.functional.pad(unpacked(mask, vocabulary), (0, 1))
    inside = (tokens >= 0) & (tokens < vocabulary)
    sets.scatter_(1, torch.where(inside, tokens, vocabulary).expand(mask.shape[0], -1), True)
    return packed(sets[:, :vocabulary])


def add_tokens_(mask: Tensor, tokens: Tensor, vocabulary: int) -> Tensor:
    """Add tokens to the sets in place; arguments as `add_tokens_reference`.

    Raises:
        ValueError: the shapes do not fit; the message holds them.
    """
    if mask.dim() != 2 or tokens.dim() != 2 or tokens.shape[0] not in (1, mask.shape[0]):
        raise ValueError(
            f"mask {tuple(mask.shape)} (R, W), tokens {tuple(tokens.shape)} (R or 1, N)"
        )
    if mask.shape[1] != cdiv(vocabulary, 32):
        raise ValueError(f"mask {tuple(mask.shape)} is not that of {vocabulary} tokens")
    rows, count = mask.shape[0], tokens.shape[1]
    able_in_c = lambda: (  # noqa: E731
        mask.is_contiguous()
        and in_memory(mask, dtype=torch.int32)
        and in_memory(tokens, dtype=torch.int64)
    )
    backend = select_backend("token_mask", lambda: count > 0, able_in_c, mask, tokens)
    if in_c(backend):
        native_selection.add_tokens(backend, mask, tokens, vocabulary)
        return mask
    if backend is not TRITON:
        return mask.copy_(add_tokens_reference(mask, tokens, vocabulary))
    block = min(1024, power_of_two(count))
    launch(
        _add_tokens_kernel, (rows, cdiv(count, block)), mask, tokens, count, vocabulary,
        mask.stride(0), tokens.stride(0) if tokens.shape[0] > 1 else 0, tokens.stride(1),
        BLOCK=block,
    )  # fmt: skip
    return mask


@jit()
def add_bits(mask_ptr, tokens, valid):
    """Set the bits of valid tokens in the row at mask_ptr."""
    bit = (tl.full(tokens.shape, 1, tl.int32) << (tokens % 32).to(tl.int32)).to(tl.int32)
    tl.atomic_or(mask_ptr + tokens // 32, bit, mask=valid)


@jit()
def _add_tokens_kernel(
    mask_ptr,
    tokens_ptr,
    count,
    vocabulary,
    mask_stride,
    tokens_stride,
    token_stride,
    BLOCK: constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tokens = tl.load(
        tokens_ptr + row * tokens_stride + index * token_stride, mask=index < count, other=-1
    )
    add_bits(mask_ptr + row * mask_stride, tokens, (tokens >= 0) & (tokens < vocabulary))
