"""Operations in C for the CPU: selection of the library for this processor, and the calls.

They run on torch's own threads. The libraries are built when fastgen is installed (`build.py`).
"""

import ctypes
import math
import platform
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgen import config
from fastgen.ops import processor
from fastgen.ops.cpu_rules import FEW_HEADS, FEW_SCORES, MOST_ROWS_IN_HALF, THREAD_WORK
from fastgen.ops.native import build
from fastgen.ops.torch_private import is_observed

LIBRARIES = Path(__file__).parent / "lib"

HEAD_DIMS = tuple(range(16, 257, 16))
"""Head dimensions that attention covers."""

ROWS = 128
"""Largest number of beams times query heads per key head."""

LEAST_BLOCK = 64
"""Least number of tokens for which `k_best` notes a maximum."""

CONVERTED_ROWS = 256
"""Rows of a product in half precision that are converted at a time, to stay in the cache."""

RANKED = 4096
"""Largest number of hypotheses and candidates per sentence that `choose` ranks, on the stack."""

_POINTER, _INTEGER, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "beam_attention": (*[_POINTER] * 6, *[_INTEGER] * 6, _FLOAT, *[_INTEGER] * 12),
    "log_softmax": (*[_POINTER] * 2, *[_INTEGER] * 3),
    "k_best": (*[_POINTER] * 7, *[_INTEGER] * 7),
    "product": (*[_POINTER] * 5, *[_INTEGER] * 6),
    "product_of_bytes": (*[_POINTER] * 8, *[_INTEGER] * 7),
    "step": (_POINTER,),
    "search_beams": (*[_POINTER] * 3,),
    "search_first_finished": (*[_POINTER] * 3,),
    "search_rows": (*[_POINTER] * 7, _INTEGER),
    "find_by_bounds": (*[_POINTER] * 5, *[_INTEGER] * 2),
    "exponential_noise": (*[_POINTER] * 2, _INTEGER),
    "choose": (*[_POINTER] * 14, *[_INTEGER] * 4, *[_FLOAT] * 3),
    "move_rows": (*[_POINTER] * 3, *[_INTEGER] * 5),
    "move_sentences": (*[_POINTER] * 3, *[_INTEGER] * 6),
    "embed": (*[_POINTER] * 5, *[_INTEGER] * 9, _FLOAT),
    "add_tokens": (*[_POINTER] * 2, *[_INTEGER] * 5),
    "add_repeats": (*[_POINTER] * 3, *[_INTEGER] * 9),
}
"""Arguments of the operations, after `run` and the number of threads."""

_RETURNS_NOTHING = (
    "log_softmax", "product", "product_of_bytes", "exponential_noise", "add_tokens", "add_repeats",
)  # fmt: skip

ACTIVATIONS: dict[str | None, int] = {
    None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4, "relu_squared": 5,
}  # fmt: skip
"""Codes of the activation functions after a product, as in product.h."""

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Codes of the dtypes of weights, keys and values, as in dtype.h."""

HALVES = (torch.bfloat16, torch.float16)


class Library(NamedTuple):
    """The operations of one library.

    Attributes:
        panel: outputs per panel of a packed weight.
        can_dot: whether the processor has an instruction for dot products of bytes.
        run: address of the function that distributes work to torch's threads; 0 for one thread.
    """

    beam_attention: Callable[..., int]
    log_softmax: Callable[..., None]
    k_best: Callable[..., int]
    product: Callable[..., None]
    product_of_bytes: Callable[..., None]
    step: Callable[..., int]
    search_beams: Callable[..., int]
    search_first_finished: Callable[..., int]
    search_rows: Callable[..., int]
    find_by_bounds: Callable[..., int]
    exponential_noise: Callable[..., None]
    choose: Callable[..., int]
    move_rows: Callable[..., int]
    move_sentences: Callable[..., int]
    embed: Callable[..., int]
    add_tokens: Callable[..., None]
    add_repeats: Callable[..., None]
    panel: int
    can_dot: bool
    run: int


class Found(NamedTuple):
    """The library for a set of instructions, or the reason why it cannot be used.

    Attributes:
        variant: the instructions of this processor, such as avx2 or avx512.
        library: the library, or None.
        reason: why there is no library, or None.
    """

    variant: str
    library: Library | None
    reason: str | None = None


@cache
def found() -> Found:
    """Look for the library for this processor; the result is cached."""
    try:
        is_observed()  # `dispatch` calls it before every operation in C
        return Found(instruction_set(), load(instruction_set()))
    except (OSError, AttributeError) as error:
        return Found(instruction_set(), None, str(error))


def instruction_set() -> str:
    """Return the instruction set of this processor, by its architecture and torch's own choice."""
    if build.architecture(platform.machine()) == "aarch64":
        return "neon"  # part of ARMv8
    name = torch.backends.cpu.get_cpu_capability().lower()
    wider = f"{name}_bf16"
    is_there = torch.cpu.get_capabilities().get(wider) and (LIBRARIES / f"{wider}.so").is_file()
    return wider if is_there else name


def load(variant: str) -> Library:
    """Load the library for a set of instructions.

    Raises:
        OSError: no usable library exists; the message says why.
    """
    path, how = LIBRARIES / f"{variant}.so", f"`{sys.executable} {build.__file__}` makes it"
    if (LIBRARIES / build.REASON).is_file():
        raise OSError((LIBRARIES / build.REASON).read_text("utf-8").strip())
    if variant not in build.variants():
        raise OSError(
            f"torch reports {variant} as the instruction set of this {platform.machine()} "
            f"processor, and there are libraries for {', '.join(build.variants()) or 'none'}"
        )
    if not path.is_file():
        raise OSError(f"{path} is missing; {how}")
    handle = ctypes.CDLL(str(path))
    handle.made_from.restype = ctypes.c_uint32
    if handle.made_from() != build.fingerprint():
        raise OSError(f"{path} was made from other sources; {how} anew")
    for name, arguments in SIGNATURES.items():
        getattr(handle, name).argtypes = (_POINTER, ctypes.c_uint, *arguments)
        getattr(handle, name).restype = None if name in _RETURNS_NOTHING else ctypes.c_int
    operations = {name: getattr(handle, name) for name in SIGNATURES}
    return Library(
        **operations,
        panel=handle.panel(),
        can_dot=bool(handle.can_dot()),
        run=_runtime("GOMP_parallel"),
    )


def _runtime(name: str) -> int:
    """Return the address of a function of torch's OpenMP library; 0 if it has no such function."""
    suffix = "dylib" if sys.platform == "darwin" else "so"
    runtime = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{suffix}"))
    function = getattr(runtime, name, None)
    return 0 if function is None else ctypes.cast(function, ctypes.c_void_p).value or 0


def library() -> Library | None:
    """Return the library if the C operations are in use, else None.

    Raises:
        RuntimeError: FASTGEN_OPS=native, but there is no library; the message says why.
    """
    requested = config.settings().ops
    if requested in ("auto", "native"):
        if found().library is None and requested == "native":
            raise RuntimeError(
                f"FASTGEN_OPS=native, but there are no operations in C here: {found().reason}"
            )
        by = found().library
        # torch's operations on all threads are the default beside C on one.
        return by if requested == "native" or (by is not None and by.run) else None
    return None


def most_rows(dtype: torch.dtype) -> float:
    """Return the most rows of a product for which C is faster than torch, in a dtype.

    A product of few rows takes the time it takes to read the weight, for which C needs no unpacking
    and no dispatch. With more rows the multiplications count, for which torch has better
    instructions on some processors.
    """
    if dtype not in HALVES or config.settings().ops == "native":
        return math.inf
    has_pairs = dtype == torch.bfloat16 and found().variant.endswith("_bf16")
    return MOST_ROWS_IN_HALF[processor.multiplies(dtype)][has_pairs]


def state() -> str:
    """Describe in one line whether operations on the CPU run in C, and why not."""
    variant, by, reason = found()
    if by is None:
        return f"none: {reason}"
    alone = "" if by.run else ", on one thread: torch's OpenMP library has no GOMP_parallel"
    return f"for {variant}{alone}" + (f", not used: {why_off()}" if library() is None else "")


def why_off() -> str:
    """Return why operations on the CPU do not run in C; empty if they do."""
    if library() is not None:
        return ""
    if found().library is None:
        return f"there are none for this processor: {found().reason}"
    return f"FASTGEN_OPS={config.settings().ops}"


def threads_for(work: int) -> int:
    """Return how many of torch's threads share this number of multiplications, or logits."""
    return max(1, min(torch.get_num_threads(), work // THREAD_WORK))


def covers_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> bool:
    """Return whether `beam_attention` supports these shapes and layouts and is faster.

    All tensors must be fp32.
    """
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
    by: Library,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the result of `ops.beam_attention.beam_attention`.

    The arguments must satisfy `covers_attention`.

    Raises:
        torch.OutOfMemoryError: no memory for the scores of each thread.
    """
    b, m, h, d = query.shape
    key_heads, n = keys.shape[1], keys.shape[2]
    threads = min(threads_for(b * h * m * n * d), b * key_heads)
    out = query.new_empty(b, m, h, d)
    mask_at, mask_strides = None, (0, 0, 0)
    sinks = None if sinks is None else sinks.contiguous()
    if mask is not None:
        (mask_b, mask_h, mask_m, _), (sentences, heads, beams, _) = mask.stride(), mask.shape
        mask_strides = (
            mask_b if sentences > 1 else 0,
            mask_h if heads > 1 else 0,
            mask_m if beams > 1 else 0,
        )
        mask_at = mask.data_ptr()
    done = by.beam_attention(
        by.run, threads, out.data_ptr(), query.data_ptr(), keys.data_ptr(), values.data_ptr(),
        mask_at, None if sinks is None else sinks.data_ptr(), b, m, key_heads, h // key_heads, n, d,
        scale, *query.stride()[:3], *keys.stride()[:3], *values.stride()[:3], *mask_strides,
    )  # fmt: skip
    if not done:
        scores = f"{m * h // key_heads} x {n}"
        raise torch.OutOfMemoryError(f"no memory for {scores} scores in each of {threads} threads")
    return out


def move_rows(
    by: Library, tables: Sequence[tuple[Tensor, Tensor, int]], finished: Sequence[Tensor],
    parents: Tensor, order: Tensor | None, steps: int,
) -> bool:  # fmt: skip
    """Reorder and extend the rows of tables; or, with `order`, select finished rows.

    Args:
        tables: rows (B, M, N), newest (B, M or K, C) and prefix of each `ops.tables.Table`; newest
            has the rows' dtype, or a wider integer dtype.
        finished: with `order`, a table of finished rows for each table.
        parents: (B, M); with `order`, (B, K).
        order: (B, M) into M finished rows, then K candidates; or None.
        steps: the number of steps so far.

    Returns:
        False, with nothing moved, if `parents` or `order` contain an index out of range; else True.

    Raises:
        torch.OutOfMemoryError: no memory for the rows of each thread.
    """
    (sentences, beams, _), fields, most = tables[0][0].shape, list[int](), 0
    for i, (rows, newest, prefix) in enumerate(tables):
        size, columns = rows.element_size(), newest.shape[2]
        row_b, row_m, _ = rows.stride()
        chosen = finished[i] if finished else rows
        chosen_b, chosen_m, _ = chosen.stride()
        fields += (
            rows.data_ptr(), newest.data_ptr(), chosen.data_ptr(), size * row_b, size * row_m,
            size * chosen_b, size * chosen_m, *newest.stride(), prefix, steps * columns, columns,
            size, newest.element_size(),
        )  # fmt: skip
        most = max(most, size * (steps + 1) * columns)
    records, parents = (_INTEGER * len(fields))(*fields), parents.contiguous()
    order = None if order is None else order.contiguous()
    done = by.move_rows(
        by.run, threads_for(len(tables) * sentences * beams * most // 4), ctypes.addressof(records),
        parents.data_ptr(), None if order is None else order.data_ptr(), len(tables), sentences,
        beams, parents.shape[1], beams * most,
    )  # fmt: skip
    if not done:
        raise torch.OutOfMemoryError(f"no memory for {beams} rows of {most} bytes in each thread")
    return done > 0


def move_sentences(by: Library, buffer: Tensor, to: Tensor, origin: Tensor) -> bool:
    """Copy the sentences `origin` of a buffer over the sentences `to`.

    Args:
        buffer: (B, H, N, D), N and D contiguous.
        to: (N,) int64.
        origin: (N,) int64.

    Returns:
        False, with nothing copied, if an index is out of range; else True.
    """
    (sentences, heads, count, dims), size = buffer.shape, buffer.element_size()
    to, origin = to.contiguous(), origin.contiguous()
    return bool(
        by.move_sentences(
            by.run, threads_for(len(to) * heads * count * dims), buffer.data_ptr(), to.data_ptr(),
            origin.data_ptr(), len(to), heads, size * count * dims, size * buffer.stride(0),
            size * buffer.stride(1), sentences,
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
    """Return rows `ids` of tokens times scale, plus a position's row.

    Args:
        ids: (R,) int64.
        tokens: (V, C).
        scale: the factor of the token embeddings.
        position: (C,) or (R, C), or None.
        padding: the token id that gets `other` instead of `position`.
        other: (C,) or (R, C), or None.

    Returns:
        (R, C); None if an id is out of range.
    """
    rows, width = ids.shape[0], tokens.shape[1]
    out = tokens.new_empty(rows, width)
    done = by.embed(
        by.run, 1, out.data_ptr(), ids.data_ptr(), tokens.data_ptr(),
        None if position is None else position.data_ptr(),
        None if other is None else other.data_ptr(), rows, width, len(tokens), ids.stride(0),
        tokens.stride(0), *(row.stride(0) if row is not None and row.dim() > 1 else 0
                            for row in (position, other)),
        padding, DTYPES[tokens.dtype], scale,
    )  # fmt: skip
    return out if done else None
