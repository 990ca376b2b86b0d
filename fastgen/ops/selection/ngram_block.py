"""Blocking of repeated n-grams: ban a token that would complete an n-gram already in its row.

Source: Paulus et al. 2018 (trigram blocking); FastSeq section 3.2 (blocking on the device).
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
    runs_kernels,
    select_backend,
    tl,
    use_triton,
)
from fastgen.ops.native import selection as native_selection
from fastgen.ops.selection.token_mask import add_bits, add_tokens_, empty_mask

ONE_PROGRAM = 4096
"""Largest number of n-grams of a row that one program of the kernel compares."""


def ngram_block_reference(
    scores: Tensor, ids: Tensor, n: int, source: Tensor | None = None
) -> Tensor:
    """Return a copy of scores with every token banned that would repeat an n-gram of its row.

    A plain Python loop.

    Args:
        scores: (R, V) floating point.
        ids: (R, L) int64, the tokens so far; ids outside the vocabulary are never banned.
        n: >= 1, the size of the n-grams.
        source: (B, S) int64, R a multiple of B. If given, the n-grams of this text must not be
            repeated, instead of the row's own; row r has the source r // (R / B).

    Returns:
        (R, V), -inf at banned tokens.
    """
    scores = scores.clone()
    texts = (
        ids
        if source is None
        else source.repeat_interleave(ids.shape[0] // max(1, source.shape[0]), 0)
    )
    for row, (tokens, text) in enumerate(zip(ids.tolist(), texts.tolist(), strict=True)):
        if len(tokens) + 1 < n:
            continue
        last = tokens[len(tokens) - n + 1 :]
        for start in range(len(text) - n + 1):
            gram = text[start : start + n]
            if gram[:-1] == last and 0 <= gram[-1] < scores.shape[1]:
                scores[row, gram[-1]] = -torch.inf
    return scores


def ngram_block_(scores: Tensor, ids: Tensor, n: int, source: Tensor | None = None) -> Tensor:
    """Ban, in place, every token that would repeat an n-gram of its row.

    Compares only the newest n - 1 tokens, with all n-grams at once, and writes the bans in one
    sparse write, without synchronising a device. Arguments and result as `ngram_block_reference`,
    except that scores is modified and returned. Traffic: n reads of the text and a sparse write.

    Raises:
        ValueError: n < 1, or the numbers of rows do not fit.
    """
    texts = _checked(scores, ids, n, source)
    vocabulary = scores.shape[1]
    if texts.shape[1] < n or ids.shape[1] < n - 1:
        return scores
    if use_triton("ngram_block", lambda: True, scores, ids, texts):
        _launch(scores, ids, n, texts, vocabulary, scores.stride(1), packed=False)
        return scores
    hit, follower = _hits(ids, n, texts, vocabulary)
    if scores.device.type == "cpu":
        row, start = hit.nonzero(as_tuple=True)
        return scores.index_put_((row, follower[row, start]), scores.new_tensor(-torch.inf))
    # Tokens that are not banned are scattered to an extra column beyond the vocabulary.
    banned = torch.zeros(scores.shape[0], vocabulary + 1, dtype=torch.bool, device=scores.device)
    banned.scatter_(1, torch.where(hit, follower, vocabulary), True)
    return scores.masked_fill_(banned[:, :vocabulary], -torch.inf)


def ngram_mask_(
    mask: Tensor,
    ids: Tensor,
    n: int,
    vocabulary: int,
    source: Tensor | None = None,
    length: Tensor | None = None,
) -> Tensor:
    """Add the tokens that `ngram_block_` would ban to a token mask, in place.

    Args:
        mask: (R, ceil(V / 32)) int32. Modified and returned.
        ids: (R, L) int64, the tokens so far.
        n: >= 1, the size of the n-grams.
        vocabulary: V.
        source: as in `ngram_block_reference`.
        length: (1,) int64 on the device, at least n: the number of columns of ids that hold text;
            None for all.

    Raises:
        ValueError: n < 1, or the shapes do not fit.
    """
    texts = _checked(mask, ids, n, source)
    if mask.shape[1] != cdiv(vocabulary, 32):
        raise ValueError(f"mask {tuple(mask.shape)} is not that of {vocabulary} tokens")
    if texts.shape[1] < n or ids.shape[1] < n - 1:
        return mask
    able_in_c = lambda: (  # noqa: E731
        length is None
        and len(texts) > 0
        and mask.is_contiguous()
        and in_memory(mask, dtype=torch.int32)
        and in_memory(ids, texts, dtype=torch.int64)
    )
    backend = select_backend("ngram_block", lambda: True, able_in_c, mask, ids, texts)
    if backend is TRITON:
        _launch(mask, ids, n, texts, vocabulary, 1, packed=True, length=length)
        return mask
    if in_c(backend):
        native_selection.add_repeats(backend, mask, ids, n, texts, vocabulary)
        return mask
    hit, follower = _hits(ids, n, texts, vocabulary, length)
    return add_tokens_(mask, torch.where(hit, follower, -1), vocabulary)


def ngram_mask(
    ids: Tensor,
    n: int,
    vocabulary: int,
    source: Tensor | None = None,
    length: Tensor | None = None,
) -> Tensor:
    """Return the tokens that `ngram_block_` would ban as a token mask, in one launch.

    Args:
        ids: as in `ngram_mask_`, like the other arguments.

    Returns:
        (R, ceil(V / 32)) int32.

    Raises:
        ValueError: n < 1, or the shapes do not fit.
    """
    texts = _checked(ids, ids, n, source)
    starts = texts.shape[1] - n + 1
    supported = lambda: 0 < starts <= ONE_PROGRAM and ids.shape[1] >= n - 1  # noqa: E731
    if not (runs_kernels(ids) and supported() and use_triton("ngram_block", supported, ids, texts)):
        return ngram_mask_(
            empty_mask(ids.shape[0], vocabulary, ids.device), ids, n, vocabulary, source, length
        )
    mask = ids.new_empty(ids.shape[0], cdiv(vocabulary, 32), dtype=torch.int32)
    _launch(mask, ids, n, texts, vocabulary, 1, packed=True, length=length, fresh=True)
    return mask


def _checked(rows: Tensor, ids: Tensor, n: int, source: Tensor | None) -> Tensor:
    texts = ids if source is None else source
    if n < 1 or ids.shape[0] != rows.shape[0] or ids.shape[0] % max(1, texts.shape[0]):
        raise ValueError(
            f"n = {n} (>= 1), ids {tuple(ids.shape)} (R, L), scores {tuple(rows.shape)} (R, V)"
            + ("" if source is None else f", source {tuple(source.shape)} (B, S)")
        )
    return texts


def _hits(
    ids: Tensor, n: int, texts: Tensor, vocabulary: int, length: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Find where an n-gram begins with the newest n - 1 tokens.

    Returns:
        Whether each n-gram does, bool, and its last token, int64; both (R, N).
    """
    rows, starts = ids.shape[0], texts.shape[1] - n + 1
    if length is None:
        last = ids[:, ids.shape[1] - n + 1 :]
    else:
        last = ids.index_select(
            1, torch.arange(n - 1, device=ids.device, dtype=torch.int64) + (length - n + 1)
        )
    own = texts is ids
    texts = (
        texts.repeat_interleave(rows // max(1, texts.shape[0]), 0)
        if texts.shape[0] != rows
        else texts
    )
    follower = texts[:, n - 1 :]
    hit = (follower >= 0) & (follower < vocabulary)
    if own and length is not None:
        hit = hit & (torch.arange(starts, device=ids.device, dtype=torch.int64) < length - n + 1)
    for i in range(n - 1):
        hit = hit & (texts[:, i : i + starts] == last[:, i, None])
    return hit, follower


def _launch(
    target: Tensor,
    ids: Tensor,
    n: int,
    texts: Tensor,
    vocabulary: int,
    stride: int,
    packed: bool,
    length: Tensor | None = None,
    fresh: bool = False,
) -> None:
    rows, starts = ids.shape[0], texts.shape[1] - n + 1
    block = min(ONE_PROGRAM if fresh else 1024, power_of_two(starts))
    launch(
        _ngram_kernel, (rows, cdiv(starts, block)), target, ids, texts, n,
        ids.shape[1] if length is None else length, starts, vocabulary, rows // texts.shape[0],
        target.stride(0), stride, ids.stride(0), ids.stride(1), texts.stride(0), texts.stride(1),
        PACKED=packed, FRESH=fresh, COUNTED=length is not None, OWN=texts is ids, BLOCK=block,
    )  # fmt: skip


@jit("n", "length", "starts", "rows_per_text")
def _ngram_kernel(
    target_ptr, ids_ptr, text_ptr, n, length, starts, vocabulary, rows_per_text, target_stride,
    token_stride, ids_stride, id_stride, text_stride, word_stride, PACKED: constexpr,
    FRESH: constexpr, COUNTED: constexpr, OWN: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Ban tokens of one row; FRESH means that a single program writes all of its mask."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if COUNTED:
        length = tl.load(length)
        if OWN:
            starts = length - n + 1
    inside = start < starts
    text = text_ptr + (row // rows_per_text) * text_stride
    newest = ids_ptr + row * ids_stride + (length - n + 1) * id_stride
    follower = tl.load(text + (start + n - 1) * word_stride, mask=inside, other=-1)
    hit = (follower >= 0) & (follower < vocabulary)
    for i in range(n - 1):
        hit = hit & (
            tl.load(text + (start + i) * word_stride, mask=inside, other=-1)
            == tl.load(newest + i * id_stride)
        )
    if FRESH:
        words = (vocabulary + 31) // 32
        for first in range(0, words, 1024):
            word = first + tl.arange(0, 1024)
            none = tl.zeros([1024], tl.int32)
            tl.store(target_ptr + row * target_stride + word, none, mask=word < words)
        tl.debug_barrier()  # other threads add to these words
    if PACKED:
        add_bits(target_ptr + row * target_stride, follower, hit)
    else:
        banned = tl.full(follower.shape, float("-inf"), tl.float32).to(target_ptr.dtype.element_ty)
        tl.store(target_ptr + row * target_stride + follower * token_stride, banned, mask=hit)
