"""Operations in C for the CPU: which library of them this processor runs, and how it is called.

They work on torch's own threads. The libraries are made when fastgen is installed (`build.py`).
"""

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgen import config
from fastgen.ops import processor
from fastgen.ops.native import build
from fastgen.ops.torch_private import is_observed

LIBRARIES = Path(__file__).parent / "lib"

THREAD_WORK = 32 * 1024
"""Multiplications, or logits, for which another thread is woken up."""

HEAD_DIMS = (16, 32, 48, 64, 80, 96, 128)
"""Head dimensions that attention is compiled for."""

ROWS = 128
"""Most beams times query heads per key head."""

RANKED = 4096
"""Most hypotheses and candidates of a sentence that `choose` ranks: it has them on the stack."""

FEW_HEADS, FEW_SCORES = 16, 64
"""Key heads of all sentences, and scores of each, up to which one call of torch's own attention costs less (10 us)."""

_POINTER, _INTEGER, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "beam_attention": (*[_POINTER] * 5, *[_INTEGER] * 6, _FLOAT, *[_INTEGER] * 12),
    "log_softmax": (*[_POINTER] * 2, *[_INTEGER] * 3),
    "k_best": (*[_POINTER] * 7, *[_INTEGER] * 7),
    "product": (*[_POINTER] * 5, *[_INTEGER] * 5),
    "step": (_POINTER, _POINTER),
    "search_beams": (*[_POINTER] * 4,),
    "search_first_finished": (*[_POINTER] * 4,),
    "search_greedily": (*[_POINTER] * 5, _INTEGER),
    "choose": (*[_POINTER] * 14, *[_INTEGER] * 4, *[_FLOAT] * 3),
    "move_rows": (*[_POINTER] * 3, *[_INTEGER] * 5),
    "move_sentences": (*[_POINTER] * 3, *[_INTEGER] * 6),
    "embed": (*[_POINTER] * 5, *[_INTEGER] * 6, _FLOAT),
    "add_tokens": (*[_POINTER] * 2, *[_INTEGER] * 5),
    "add_repeats": (*[_POINTER] * 3, *[_INTEGER] * 9),
}
_RETURNS_NOTHING = ("log_softmax", "product", "add_tokens", "add_repeats")

BEHIND: dict[str | None, int] = {None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}
"""What may come behind a product, as product.h counts it."""


class Library(NamedTuple):
    """Operations of one library.

    Attributes:
        panel: outputs of a weight that lie side by side where it is packed.
        run, wait: what shares work among torch's threads, and lets them wait for each other.
    """

    beam_attention: Callable[..., int]
    log_softmax: Callable[..., None]
    k_best: Callable[..., int]
    product: Callable[..., None]
    step: Callable[..., int]
    search_beams: Callable[..., int]
    search_first_finished: Callable[..., int]
    search_greedily: Callable[..., int]
    choose: Callable[..., int]
    move_rows: Callable[..., int]
    move_sentences: Callable[..., int]
    embed: Callable[..., int]
    add_tokens: Callable[..., None]
    add_repeats: Callable[..., None]
    panel: int
    run: int
    wait: int


class Found(NamedTuple):
    """The library for a set of instructions, or the reason why there is none."""

    variant: str
    library: Library | None
    reason: str | None = None


@cache
def found() -> Found:
    """Look for the library that this processor runs."""
    variant = torch.backends.cpu.get_cpu_capability().lower()
    try:
        is_observed()  # C has to ask before every operation
        return Found(variant, load(variant))
    except (OSError, AttributeError) as error:
        return Found(variant, None, str(error))


def load(variant: str) -> Library:
    """Load the library for a set of instructions.

    Raises:
        OSError: there is none that can be used; the message says why.
    """
    path, how = LIBRARIES / f"{variant}.so", f"`{sys.executable} {build.__file__}` makes it"
    if (LIBRARIES / build.REASON).is_file():
        raise OSError((LIBRARIES / build.REASON).read_text("utf-8").strip())
    if variant not in build.VARIANTS:
        raise OSError(
            f"torch says that this processor has {variant}, and there is a library for AVX2 and AVX-512 alone"
        )
    if not path.is_file():
        raise OSError(f"{path} is missing; {how}")
    loaded = ctypes.CDLL(str(path))
    loaded.made_from.restype = ctypes.c_uint32
    if loaded.made_from() != build.fingerprint():
        raise OSError(f"{path} was made from other sources; {how} anew")
    for name, arguments in _SIGNATURES.items():
        getattr(loaded, name).argtypes = (_POINTER, ctypes.c_uint, *arguments)
        getattr(loaded, name).restype = None if name in _RETURNS_NOTHING else ctypes.c_int
    operations = {name: getattr(loaded, name) for name in _SIGNATURES}
    return Library(
        **operations,
        panel=loaded.panel(),
        run=_runtime("GOMP_parallel"),
        wait=_runtime("GOMP_barrier"),
    )


def _runtime(name: str) -> int:
    """The address of a function of the library of OpenMP that torch depends on.

    Raises:
        OSError: there is none.
    """
    runtime = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    try:
        return ctypes.cast(getattr(runtime, name), ctypes.c_void_p).value or 0
    except AttributeError as error:
        raise OSError(f"torch's threads cannot be used: {error}") from error


def library() -> Library | None:
    """The library, where operations run by it: on processors of AMD's, or on all with FASTGEN_OPS=native.

    Measured on Zen 5, with AVX-512 and held to AVX2. What torch runs instead, MKL's products, uses half of every AMD
    processor. On Intel's it uses all, and nobody has measured there.

    Raises:
        RuntimeError: FASTGEN_OPS=native and there is none; the message says why.
    """
    wanted = config.settings().ops
    if wanted == "native" or (wanted == "auto" and processor.on_amd()):
        if found().library is None and wanted == "native":
            raise RuntimeError(
                f"FASTGEN_OPS=native, but there are no operations in C here: {found().reason}"
            )
        return found().library
    return None


def state() -> str:
    """Say in one line whether operations on the CPU run in C, and why not."""
    if found().library is None:
        return f"none: {found().reason}"
    return f"for {found().variant}" + (f", not used: {why_off()}" if library() is None else "")


def why_off() -> str:
    """Say why operations on the CPU do not run in C; empty where they do."""
    if library() is not None:
        return ""
    if found().library is None:
        return f"there are none for this processor: {found().reason}"
    if config.settings().ops != "auto":
        return f"FASTGEN_OPS={config.settings().ops}"
    return "they are for processors of AMD's, but for FASTGEN_OPS=native"


def threads_for(work: int) -> int:
    """How many of torch's threads share so many multiplications, or logits."""
    return max(1, min(torch.get_num_threads(), work // THREAD_WORK))


def covers_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> bool:
    """Whether `beam_attention` takes these shapes and layouts, all in fp32, and is faster."""
    sentences, beams, heads, dims = query.shape
    _, key_heads, count, _ = keys.shape
    return (
        keys.shape == values.shape
        and dims in HEAD_DIMS
        and beams * heads <= ROWS * key_heads
        and 0 < count < 2**31
        and (sentences * key_heads > FEW_HEADS or beams * heads * count > FEW_SCORES * key_heads)
        and query.stride(3) == keys.stride(3) == values.stride(3) == 1
        and (
            mask is None
            or (
                mask.dim() == 4
                and mask.shape[3] == count
                and mask.stride(3) == 1
                and all(
                    size in (1, all_)
                    for size, all_ in zip(mask.shape, (sentences, heads, beams), strict=False)
                )
            )
        )
    )


def beam_attention(
    by: Library, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Return what `ops.beam_attention.beam_attention` does, of what `covers_attention` says yes to."""
    b, m, h, d = query.shape
    key_heads, n = keys.shape[1], keys.shape[2]
    threads = min(threads_for(b * h * m * n * d), b * key_heads)
    out = query.new_empty(b, m, h, d)
    mask_at, mask_strides = None, (0, 0, 0)
    if mask is not None:
        (mask_b, mask_h, mask_m, _), (sentences, heads, beams, _) = mask.stride(), mask.shape
        mask_strides = (
            mask_b if sentences > 1 else 0,
            mask_h if heads > 1 else 0,
            mask_m if beams > 1 else 0,
        )
        mask_at = mask.data_ptr()
    done = by.beam_attention(
        by.run, threads, out.data_ptr(), query.data_ptr(), keys.data_ptr(), values.data_ptr(), mask_at, b, m, key_heads,
        h // key_heads, n, d, scale, *query.stride()[:3], *keys.stride()[:3], *values.stride()[:3], *mask_strides,
    )  # fmt: skip
    if not done:
        scores = f"{m * h // key_heads} x {n}"
        raise torch.OutOfMemoryError(f"no memory for {scores} scores in each of {threads} threads")
    return out


def log_softmax(by: Library, logits: Tensor, out: Tensor) -> Tensor:
    """Return out, the log-probabilities of logits (R, V) fp32 with contiguous rows; out: alike and contiguous."""
    rows, vocabulary = logits.shape
    by.log_softmax(
        by.run,
        threads_for(logits.numel()),
        out.data_ptr(),
        logits.data_ptr(),
        rows,
        vocabulary,
        logits.stride(0),
    )
    return out


def k_best(
    by: Library,
    rows: Tensor,
    scores: Tensor,
    k: int,
    normalised: bool,
    banned: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Return values (B, k) and indices of the k best of log-probabilities (B, M, V) + scores (B, M), in fp32.

    None where any two of the k + 1 best of a sentence are equal, or one sum is NaN.

    Args:
        rows: (B, M, V), log-probabilities, or logits of which they are made, unless `normalised`.
        banned: (B * M, ceil(V / 32)) int32, a set of tokens of each row that are out (`ops.selection.token_mask`).
    """
    b, m, v = rows.shape
    scores = scores.contiguous()
    room = scores.new_empty(b * m * (-(-v // 64) + 2))
    values, indices = scores.new_empty(b, k + 1), scores.new_empty(b, k + 1, dtype=torch.int64)
    maxima = room.data_ptr() + 8 * b * m
    if banned is not None and banned.stride(1) != 1:
        banned = banned.contiguous()
    decided = by.k_best(
        by.run, threads_for(rows.numel()), values.data_ptr(), indices.data_ptr(), maxima,
        None if normalised else room.data_ptr(), rows.data_ptr(), scores.data_ptr(),
        None if banned is None else banned.data_ptr(), b, m, v, k + 1, *rows.stride()[:2],
        0 if banned is None else banned.stride(0),
    )  # fmt: skip
    return (values[:, :k], indices[:, :k]) if decided else None


def packed(by: Library, weight: Tensor) -> Tensor:
    """Return weight (N, K) fp32 as `product` reads it, (P, K, W): P panels of W outputs, the last filled with zeros."""
    outputs, inputs = weight.shape
    whole, width = outputs // by.panel, by.panel
    panels = weight.new_empty(-(-outputs // width), inputs, width)
    panels[:whole].copy_(weight[: whole * width].unflatten(0, (whole, width)).transpose(1, 2))
    if whole < len(panels):
        panels[whole].zero_()[:, : outputs - whole * width] = weight[whole * width :].t()
    return panels


def product(
    by: Library,
    x: Tensor,
    panels: Tensor,
    bias: Tensor | None,
    behind: str | None,
    residual: Tensor | None,
    out: Tensor,
) -> Tensor:
    """Return out (..., N), contiguous: x (..., K) times a weight that is `packed`, plus bias (N,), and what is behind.

    behind: an activation function, or None. residual: of out's shape, to be added after it.
    """
    outputs, (_, inputs, _) = out.shape[-1], panels.shape
    if x.dim() != 2 or x.stride(1) != 1:
        x = x.reshape(-1, inputs).contiguous()
    bias = None if bias is None else bias.contiguous()
    residual = None if residual is None else residual.contiguous()
    rows = x.shape[0]
    by.product(
        by.run, threads_for(rows * inputs * outputs), out.data_ptr(), x.data_ptr(), panels.data_ptr(),
        None if bias is None else bias.data_ptr(), None if residual is None else residual.data_ptr(), rows, outputs,
        inputs, x.stride(0), BEHIND[behind],
    )  # fmt: skip
    return out


class Chosen(NamedTuple):
    """What `choose` returns; as `decoding.search.beam_search.Choice` has it."""

    parents: Tensor
    tokens: Tensor
    order: Tensor
    scores: Tensor
    merged: Tensor
    merged_done: Tensor
    flags: Tensor


def choose(
    by: Library, values: Tensor, beam: Tensor, token: Tensor, hits: Tensor, finished: Tensor, done: Tensor,
    improvable: Tensor, never: float, power: float, far: float, stops_early: bool,
) -> Chosen | None:  # fmt: skip
    """What becomes of candidates (B, K) of beam search by `TransformersRule`; None if undecided.

    Args:
        values, beam, token, hits: of the candidates. finished, done: (B, M), of what has finished. improvable: (B,).
        power, far: what scores are divided by for their length, now and at the greatest length.
    """
    (sentences, candidates), beams = values.shape, finished.shape[1]
    given = [each.contiguous() for each in (values, beam, token, hits, finished, done, improvable)]
    indices = token.new_empty(3, sentences, beams)
    scores = values.new_empty(2, sentences, beams)
    merged_done, flags = hits.new_empty(sentences, beams), hits.new_empty(4, sentences)
    (parents, tokens, order), (running, merged) = indices.unbind(), scores.unbind()
    made = Chosen(parents, tokens, order, running, merged, merged_done, flags)
    decided = by.choose(
        by.run, 1, *(each.data_ptr() for each in (*given, *made)), sentences, beams, candidates, stops_early, never,
        power, far,
    )  # fmt: skip
    return made if decided else None


def move_rows(
    by: Library, tables: Sequence[tuple[Tensor, Tensor, int]], finished: Sequence[Tensor], parents: Tensor,
    order: Tensor | None, steps: int,
) -> bool:  # fmt: skip
    """Reorder and extend the rows of tables (`Table`); or, where there is an order, choose finished rows.

    Return whether that was done: not where `parents` or `order` name a row that is not there.

    Args:
        tables: rows (B, M, N), newest (B, M or K, C) and prefix; newest of the rows' dtype, or longer integers.
        finished: with an order, a table of finished rows for each.
        parents: (B, M), or, with an order, (B, K). order: (B, M) into M finished rows, then K candidates.
    """
    (sentences, beams, _), fields, most = tables[0][0].shape, list[int](), 0
    for i, (rows, newest, prefix) in enumerate(tables):
        size, columns = rows.element_size(), newest.shape[2]
        row_b, row_m, _ = rows.stride()
        chosen = finished[i] if finished else rows
        chosen_b, chosen_m, _ = chosen.stride()
        fields += (
            rows.data_ptr(), newest.data_ptr(), chosen.data_ptr(), size * row_b, size * row_m, size * chosen_b,
            size * chosen_m, *newest.stride(), prefix, steps * columns, columns, size, newest.element_size(),
        )  # fmt: skip
        most = max(most, size * (steps + 1) * columns)
    given, parents = (_INTEGER * len(fields))(*fields), parents.contiguous()
    order = None if order is None else order.contiguous()
    done = by.move_rows(
        by.run, threads_for(len(tables) * sentences * beams * most // 4), ctypes.addressof(given), parents.data_ptr(),
        None if order is None else order.data_ptr(), len(tables), sentences, beams, parents.shape[1], beams * most,
    )  # fmt: skip
    if not done:
        raise torch.OutOfMemoryError(f"no memory for {beams} rows of {most} bytes in each thread")
    return done > 0


def move_sentences(by: Library, buffer: Tensor, to: Tensor, origin: Tensor) -> bool:
    """Copy the sentences `origin` of buffer (B, H, N, D), whose N and D lie side by side, over the sentences `to`.

    Return whether that was done: not where one of them is not there.
    """
    (sentences, heads, count, dims), size = buffer.shape, buffer.element_size()
    to, origin = to.contiguous(), origin.contiguous()
    return bool(
        by.move_sentences(
            by.run, threads_for(len(to) * heads * count * dims), buffer.data_ptr(), to.data_ptr(), origin.data_ptr(),
            len(to), heads, size * count * dims, size * buffer.stride(0), size * buffer.stride(1), sentences,
        )
    )  # fmt: skip


def embedding(
    by: Library,
    ids: Tensor,
    tokens: Tensor,
    scale: float,
    position: Tensor | None,
    padding: int,
    other: Tensor | None,
) -> Tensor | None:
    """Return (R, C): rows `ids` of tokens (V, C) times scale, plus position (C,), or `other` (C,) where id is padding.

    None where an id is no row.
    """
    rows, width = ids.shape[0], tokens.shape[1]
    out = tokens.new_empty(rows, width)
    done = by.embed(
        by.run, 1, out.data_ptr(), ids.data_ptr(), tokens.data_ptr(), None if position is None else position.data_ptr(),
        None if other is None else other.data_ptr(), rows, width, len(tokens), ids.stride(0), tokens.stride(0), padding,
        scale,
    )  # fmt: skip
    return out if done else None


def add_tokens(by: Library, mask: Tensor, tokens: Tensor, vocabulary: int) -> None:
    """Add tokens (R or 1, N) int64 to the sets of mask (R, W) int32, contiguous (`ops.selection.token_mask`)."""
    (rows, words), tokens = mask.shape, tokens.contiguous()
    by.add_tokens(
        by.run, 1, mask.data_ptr(), tokens.data_ptr(), rows, words, tokens.shape[1], vocabulary,
        tokens.stride(0) if tokens.shape[0] > 1 else 0,
    )  # fmt: skip


def add_repeats(
    by: Library, mask: Tensor, ids: Tensor, n: int, texts: Tensor, vocabulary: int
) -> None:
    """Add to the sets of mask (R, W) int32, contiguous, what would repeat n-grams of texts (B, S) behind ids (R, L)."""
    (rows, words), (ids, texts) = (
        mask.shape,
        (x if x.stride(1) == 1 else x.contiguous() for x in (ids, texts)),
    )
    by.add_repeats(
        by.run, threads_for(rows * texts.shape[1]), mask.data_ptr(), ids.data_ptr(), texts.data_ptr(), rows, words, n,
        ids.shape[1], texts.shape[1], vocabulary, rows // texts.shape[0], ids.stride(0), texts.stride(0),
    )  # fmt: skip
