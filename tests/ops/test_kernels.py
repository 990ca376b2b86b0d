"""Every Triton kernel against its reference: interpreted without a GPU, compiled with one (`gpu`).

A kernel's outputs are poisoned before it runs, and its launches are counted. A mutant of each
kernel, which is the operation's file with one place changed, must fail the same checks.
"""

import faulthandler
import importlib.util
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    TypicalLogitsWarper,
)

from fastgen import config
from fastgen.decoding.backends.captured_first_finished import FinishedSlots, choose_by_rules
from fastgen.decoding.search.beam_search import Choice
from fastgen.decoding.search.candidates import Candidates
from fastgen.decoding.search.finishing_rules import Merged
from fastgen.decoding.search.first_finished import FirstFinished
from fastgen.ops import (
    activation,
    beam_attention,
    cache,
    dispatch,
    embedding,
    norm,
    rotation,
    tables,
)
from fastgen.ops.selection import choice as choices
from fastgen.ops.selection import kbest, kbest_kernels, ngram_block, sample, token_mask  # fmt: skip
from tests.support.beam_choices import VOCABULARY, assert_alike, choice
from tests.support.poison import poison

INF = torch.inf
HALVES = [torch.float16, torch.bfloat16]
FLOATS = [torch.float32, *HALVES]
interpreted = pytest.mark.skipif(
    not dispatch.INTERPRETED, reason="kernels are compiled where there is a GPU"
)


@pytest.fixture(
    params=[pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Request Triton kernels, and poison memory that they do not write."""
    monkeypatch.setenv("FASTGEN_OPS", "triton")
    config.reload()
    poison(monkeypatch)
    yield
    monkeypatch.undo()
    config.reload()


def _randn(
    *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(device, dtype)


def _integers(*shape: int, below: int, seed: int = 0, device: str = "cpu") -> Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed)).to(device)


class _Watched:
    """A context that checks that inputs are unmodified and how often each kernel runs."""

    def __init__(self, *inputs: Tensor | None, **expected: int) -> None:
        self.inputs = [tensor for tensor in inputs if tensor is not None]
        self.expected = expected

    def __enter__(self) -> None:
        self.copies = [tensor.clone() for tensor in self.inputs]
        self.before = dispatch.launches.copy()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            return
        for tensor, copy in zip(self.inputs, self.copies, strict=True):
            assert torch.equal(tensor.nan_to_num(7.0), copy.nan_to_num(7.0)), (
                "an input was modified"
            )
        ran = dispatch.launches - self.before
        assert ran == {f"_{name}_kernel": count for name, count in self.expected.items()}


def _close(found: Tensor, reference: Tensor, exact: Tensor, floor: float) -> None:
    """Assert that the error is at most twice the reference's in the same dtype, plus `floor`.

    Triton's interpreter truncates bfloat16 where a device rounds it.
    """
    factor = 6 if dispatch.INTERPRETED and reference.dtype == torch.bfloat16 else 2
    assert found.shape == exact.shape
    assert torch.equal(found.isnan(), exact.isnan())
    difference, allowed = (
        (x.double() - exact.double()).masked_fill(exact.isnan(), 0).nan_to_num(0, 0, 0)
        for x in (found, reference)
    )
    assert torch.equal(found.isinf(), reference.isinf())
    assert float(difference.abs().max()) <= factor * float(allowed.abs().max()) + floor


FLOOR = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 4e-2}


# k-best.


def _check_kbest(
    kernels: Any, device: str, b: int, m: int, v: int, k: int, dtype: torch.dtype, **given: Any
) -> Any:
    logits = _randn(b, m, v, dtype=dtype, device=device) * 3
    scores = _randn(b, m, seed=1, device=device)
    return _check_kbest_of(kernels, logits, scores, k, **given)


def _check_kbest_of(
    kernels: Any, logits: Tensor, scores: Tensor, k: int, group: int | None = None, **given: Any
) -> Any:
    """Compare k-best with its reference.

    Values have to be equal. Indices name distinct tokens with these values, and the lowest index
    comes first in a tie.
    """
    b, m, v = logits.shape
    updates = {name: given[name] for name in ("changes", "banned", "forced") if name in given}
    others = {name: value for name, value in given.items() if name not in updates}
    if group is None:
        group = kernels.group_size(
            m, v, k, updates["changes"][0].shape[1] if "changes" in updates else 0
        )
    first = {"group" if group else "part": 1}
    with _Watched(
        logits,
        scores,
        *_tensors(given),
        **first,
        merge=1,
        **({"add_tokens": 1} if "changes" in given else {}),
    ):
        values, indices, normalisers = kernels.run(logits, scores, k, **given, group=group)
    edited = kbest.LogitsUpdates(**updates)
    reference = kbest.kbest_reference(
        logits.float(), scores, m * v, edited, **others, normalisers=True
    )
    torch.testing.assert_close(
        values, reference.values[:, :k], atol=2e-5, rtol=1e-5, equal_nan=True
    )
    torch.testing.assert_close(
        normalisers, reference.normalisers, atol=2e-5, rtol=1e-5, equal_nan=True
    )
    assert indices.dtype == torch.int64
    assert bool(((indices >= 0) & (indices < m * v)).all())
    by_index = torch.empty(b, m * v, device=logits.device).scatter_(
        1, reference.indices, reference.values
    )
    torch.testing.assert_close(
        by_index.gather(1, indices), values, atol=2e-5, rtol=1e-5, equal_nan=True
    )
    for row_values, row in zip(values.tolist(), indices.tolist(), strict=True):
        finite = [i for i, value in zip(row, row_values, strict=True) if value > -INF]
        assert len(set(finite)) == len(finite)
    return indices


def _tensors(given: dict[str, Any]) -> list[Tensor]:
    return [
        t
        for value in given.values()
        for t in (value if isinstance(value, tuple) else (value,))
        if torch.is_tensor(t)
    ]


KBEST_SHAPES = [
    (1, 1, 1, 1),
    (1, 1, 7, 7),
    (3, 5, 33, 10),
    (2, 3, 127, 6),
    (2, 3, 128, 6),
    (7, 1, 129, 2),
    (1, 4, 5_001, 8),
    (2, 4, 4_096, 8),
    (2, 4, 4_097, 64),
    (3, 2, 9_000, 33),
]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("b", "m", "v", "k"), [*KBEST_SHAPES, (1, 4, 32_128, 8), (2, 4, 50_264, 8), (1, 1, 262_144, 64)]
)
def test_kbest(b: int, m: int, v: int, k: int, dtype: torch.dtype, device: str) -> None:
    _check_kbest(kbest_kernels, device, b, m, v, k, dtype)


@pytest.mark.parametrize(("b", "m", "v", "k"), KBEST_SHAPES)
@pytest.mark.parametrize("group", [0, 32, 64, 256])
def test_kbest_by_each_strategy(b: int, m: int, v: int, k: int, group: int, device: str) -> None:
    _check_kbest(kbest_kernels, device, b, m, v, k, torch.float32, group=group)


def test_kbest_strategies() -> None:
    assert kbest_kernels.group_size(4, 50_264, 8) == 32
    assert kbest_kernels.group_size(9, 50_264, 18) == 64
    assert kbest_kernels.group_size(1, 50_264, 2) == 0
    assert kbest_kernels.group_size(16, 262_144, 64) == 256
    assert kbest_kernels.group_size(64, 262_144, 64) is None
    assert kbest_kernels.group_size(4, 50_264, 8, changed=4_097) is None


def _edits(b: int, m: int, v: int, device: str) -> dict[str, Any]:
    mask = token_mask.packed(_integers(b * m, v, below=3, seed=5, device=device) == 0)
    count = min(v, 11)
    tokens = torch.stack(
        [
            torch.randperm(v, generator=torch.Generator().manual_seed(i))[:count]
            for i in range(b * m)
        ]
    )
    tokens[:, ::4] = torch.tensor([-1, v, -7, v + 5])[: tokens[:, ::4].shape[1]]
    changes = kbest.SparseUpdate(
        tokens.to(device),
        _randn(b * m, count, seed=6, device=device).abs() + 0.5,
        _randn(b * m, count, seed=7, device=device) * 3,
    )
    forced = torch.full((b * m,), -1, device=device)
    forced[::3] = _integers(len(forced[::3]), below=v, seed=8, device=device)
    return {
        "bias": _randn(v, seed=9, device=device),
        "temperature": 0.7,
        "banned": mask,
        "changes": changes,
        "forced": forced,
    }


@pytest.mark.parametrize("left_out", ["", "bias", "temperature", "banned", "changes", "forced"])
@pytest.mark.parametrize(("b", "m", "v", "k"), [(1, 1, 7, 2), (3, 5, 33, 10), (2, 4, 5_001, 8)])
@pytest.mark.parametrize("group", [0, 32])
def test_kbest_edits(
    b: int, m: int, v: int, k: int, group: int, left_out: str, device: str
) -> None:
    updates = _edits(b, m, v, device)
    updates.pop(left_out, None)
    _check_kbest(kbest_kernels, device, b, m, v, k, torch.float32, group=group, **updates)


def _check_kbest_ties(kernels: Any, device: str, group: int) -> None:
    """Check that equal values come with the lowest index first, across groups, parts and beams."""
    logits, scores = torch.zeros(2, 3, 9_000, device=device), torch.zeros(2, 3, device=device)
    found = _check_kbest_of(kernels, logits, scores, 8, group)
    assert found.tolist() == [list(range(8))] * 2
    logits[:, 1, [8_999, 5_000, 17]] = 4.0
    logits[0, 2, 17] = 4.0
    found = _check_kbest_of(kernels, logits, scores, 3, group)
    assert found[1].tolist() == [9_000 + 17, 9_000 + 5_000, 9_000 + 8_999]
    assert found[0, 0] == 18_000 + 17


@pytest.mark.parametrize("group", [0, 32])
@pytest.mark.parametrize("k", [1, 8])
def test_kbest_infinite(device: str, k: int, group: int) -> None:
    logits, scores = _randn(2, 3, 500, device=device), _randn(2, 3, seed=1, device=device)
    logits[0, 1, 3:] = -INF  # few tokens left
    _check_kbest_of(kbest_kernels, logits, scores, k, group)
    banned = token_mask.packed(torch.ones(6, 500, dtype=torch.bool, device=device))
    values, indices, _ = kbest_kernels.run(logits, scores, k, banned=banned, group=group)
    assert bool((values == -INF).all())
    assert bool(((indices >= 0) & (indices < 1_500)).all())
    logits[1, 2, 7] = torch.nan
    assert bool(kbest_kernels.run(logits, scores, k, group=group)[0][1, 0].isnan())


def _check_kbest_without_nan(kernels: Any, device: str, group: int, **given: Any) -> None:
    """Check that rows whose log-softmax is NaN are not selected.

    It is NaN for a row with a NaN or an infinity, and for a row of -inf.
    """
    logits, scores = _randn(3, 3, 500, device=device), _randn(3, 3, seed=1, device=device)
    logits[0, 1, 7], logits[1, 2, 7], logits[1, 1] = torch.nan, INF, -INF
    logits[2] = torch.nan
    values, indices, _ = kernels.run(logits, scores, 8, group=group, without_nan=True, **given)
    wanted = kbest.kbest_reference(
        logits, scores, 8, kbest.LogitsUpdates(**given), without_nan=True
    )
    torch.testing.assert_close(values, wanted.values, atol=2e-5, rtol=1e-5)
    assert torch.equal(indices[:2], wanted.indices[:2])
    assert bool(((indices >= 0) & (indices < 1_500)).all())


@pytest.mark.parametrize("group", [0, 32])
@pytest.mark.parametrize("updates", ["", "banned", "changes"])
def test_kbest_without_nan(group: int, updates: str, device: str) -> None:
    given = {name: value for name, value in _edits(3, 3, 500, device).items() if name == updates}
    _check_kbest_without_nan(kbest_kernels, device, group, **given)


@pytest.mark.parametrize("group", [0, 32])
def test_kbest_ties(group: int, device: str) -> None:
    _check_kbest_ties(kbest_kernels, device, group)


def test_kbest_strided(device: str) -> None:
    base = _randn(4, 6, 700, device=device)
    _check_kbest_of(
        kbest_kernels, base[::2, 1:4, 50:650], _randn(3, 2, seed=1, device=device).t(), 8
    )


def test_kbest_falls_back_by_itself(device: str) -> None:
    """The reference computes what the kernels do not cover."""
    logits, scores = (
        _randn(2, 3, 50, dtype=torch.float64, device=device),
        _randn(2, 3, dtype=torch.float64, device=device),
    )
    with _Watched():
        found = kbest.kbest(logits, scores, 5)
    assert torch.equal(found.values, kbest.kbest_reference(logits, scores, 5).values)


@pytest.mark.parametrize(("b", "m", "v", "k"), KBEST_SHAPES)
def test_best_of_log_probs(b: int, m: int, v: int, k: int, device: str) -> None:
    log_probs, scores = (
        _randn(b, m, v, device=device).log_softmax(-1),
        _randn(b, m, seed=1, device=device),
    )
    first = {"group" if kbest_kernels.group_size(m, v, k) else "part": 1}
    with _Watched(log_probs, scores, **first, merge=1):
        values, indices = kbest.best_of_log_probs(log_probs, scores, k)
    wanted = kbest.best_of_log_probs_reference(log_probs, scores, k)
    assert torch.equal(values, wanted[0])
    assert torch.equal(indices, wanted[1])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("rows", "v"), [(1, 1), (3, 33), (5, 4_097), (2, 50_264), (8, 50_264), (32, 32_768)]
)
def test_argmax(rows: int, v: int, dtype: torch.dtype, device: str) -> None:
    logits = _randn(rows, v, dtype=dtype, device=device)
    with _Watched(logits, argmax=1):
        assert torch.equal(kbest.argmax(logits), logits.argmax(-1))
    _check_argmax(kbest, rows, v, dtype, device)


def _check_argmax(ops: Any, rows: int, v: int, dtype: torch.dtype, device: str = "cpu") -> None:
    logits = _randn(rows, v, dtype=dtype, device=device)
    for first in (v // 2, 0, v - 1):
        logits[:, first:] = logits.max() + 1
        assert ops.argmax(logits).tolist() == [first] * rows
    logits[:] = -torch.inf
    assert ops.argmax(logits).tolist() == [0] * rows
    logits[:, v // 3 :] = torch.nan
    assert ops.argmax(logits).tolist() == [v // 3] * rows


def test_argmax_of_more_rows_than_are_counted() -> None:
    logits = torch.arange(4_200.0)[:, None] == torch.arange(4_200.0)
    assert torch.equal(kbest.argmax(logits.to(torch.float16)), torch.arange(4_200))


@pytest.mark.parametrize("v", [1_000, 50_264, 50_304])
def test_argmax_of_equal_values_and_of_nan(v: int) -> None:
    """On a CPU, where torch.argmax is slow, the result is the same at every place of a group."""
    places = [0, 1, 127, 128, v // 2, v - 129, v - 128, v - 127, v - 1]
    for value in (torch.inf, torch.nan):
        logits = _randn(len(places), v)
        for row, place in enumerate(places):
            logits[row, [place, v - 1]] = value
        assert kbest.argmax(logits).tolist() == logits.argmax(1).tolist() == places
    assert kbest.argmax(torch.full((9, v), -torch.inf)).tolist() == [0] * 9


# Tokens and n-grams.


@pytest.mark.parametrize("v", [1, 31, 32, 33, 1_000])
def test_token_mask(v: int, device: str) -> None:
    _check_token_mask(token_mask, device, v)


def _check_token_mask(ops: Any, device: str, v: int = 100) -> None:
    sets = _integers(5, v, below=2, device=device).bool()
    mask = ops.packed(sets)
    assert torch.equal(ops.unpacked(mask, v), sets)
    for tokens in (
        _integers(5, 3, below=v + 40, seed=2, device=device) - 20,
        _integers(1, 2_000, below=v, device=device),
    ):
        wanted = ops.add_tokens_reference(mask, tokens, v)
        with _Watched(tokens, add_tokens=1):
            found = ops.add_tokens_(mask.clone(), tokens, v)
        assert torch.equal(found, wanted)
        inside = tokens[0][(tokens[0] >= 0) & (tokens[0] < v)]
        assert bool(ops.unpacked(found, v)[0, inside].all())


def _check_ngrams(
    ops: Any, device: str, rows: int, length: int, v: int, tokens: int, n: int, dtype: torch.dtype
) -> None:
    scores, ids = (
        _randn(rows, v, dtype=dtype, device=device),
        _integers(rows, length, below=tokens, device=device),
    )
    for source in (
        None,
        _integers(max(1, rows // 3), 40, below=tokens, seed=3, device=device)[
            : 1 if rows % 3 else None
        ],
    ):
        wanted = ops.ngram_block_reference(scores, ids, n, source)
        text = length if source is None else 40
        count = {"ngram": 1} if text >= n and length >= n - 1 else {}
        found = scores.clone()
        with _Watched(ids, source, **count):
            assert ops.ngram_block_(found, ids, n, source) is found
        assert torch.equal(found, wanted)
        mask = token_mask.empty_mask(rows, v, scores.device)
        ops.ngram_mask_(mask, ids, n, v, source)
        assert torch.equal(token_mask.unpacked(mask, v), wanted == -INF)
        with _Watched(ids, source, **count):
            assert torch.equal(ops.ngram_mask(ids, n, v, source), mask)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("rows", "length", "v", "tokens"),
    [(1, 1, 1, 1), (3, 33, 7, 9), (6, 130, 96, 4), (4, 1_500, 50_264, 9), (3, 4, 9, 9)],
)
def test_ngrams(
    rows: int, length: int, v: int, tokens: int, n: int, dtype: torch.dtype, device: str
) -> None:
    _check_ngrams(ngram_block, device, rows, length, v, tokens, n, dtype)


@pytest.mark.parametrize("n", [1, 3])
def test_ngrams_of_a_counted_text(n: int, device: str) -> None:
    """Only the first columns hold text; texts of more than one program take two launches."""
    for rows, length, room, v in ((5, 30, 9, 40), (1, 4_200, 0, 70)):
        ids = _integers(rows, length + room, below=9, device=device)
        filled = torch.tensor([length], device=device)
        wanted = ngram_block.ngram_block_reference(
            torch.zeros(rows, v, device=device), ids[:, :length], n
        )
        with _Watched(ids, filled, ngram=1):
            found = ngram_block.ngram_mask(ids, n, v, length=filled)
        assert torch.equal(token_mask.unpacked(found, v), wanted == -INF)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_ngrams_are_the_toolkits(n: int, device: str) -> None:
    scores, ids, source = (
        _randn(6, 20, device=device),
        _integers(6, 30, below=6, device=device),
        _integers(2, 12, below=6),
    )
    wanted = NoRepeatNGramLogitsProcessor(n)(ids, scores)
    assert torch.equal(ngram_block.ngram_block_(scores.clone(), ids, n), wanted)
    wanted = EncoderNoRepeatNGramLogitsProcessor(n, source)(ids, scores)
    assert torch.equal(ngram_block.ngram_block_(scores.clone(), ids, n, source.to(device)), wanted)


def test_ngrams_strided(device: str) -> None:
    scores, ids = _randn(12, 40, device=device), _integers(20, 12, below=5, device=device)
    wanted = ngram_block.ngram_block_reference(scores[::2, ::4], ids[:, ::2].t(), 2)
    kept = scores[1::2].clone()
    assert torch.equal(ngram_block.ngram_block_(scores[::2, ::4], ids[:, ::2].t(), 2), wanted)
    assert torch.equal(scores[1::2], kept)


# Attention of beams.


def _check_attention(
    ops: Any, device: str, b: int, m: int, h: int, kv: int, n: int, d: int,
    dtype: torch.dtype = torch.float32, softcap: float | None = None,
    mask_shape: tuple[int, ...] | None = None, sunk: bool = False,
) -> None:  # fmt: skip
    query = _randn(b, m, h, d, dtype=dtype, device=device)
    sinks = _randn(h, seed=4, dtype=dtype, device=device) * 2 if sunk else None
    room = n + 5
    keys, values = (
        _randn(b, kv, room, d, seed=s, dtype=dtype, device=device)[:, :, :n] for s in (1, 2)
    )
    mask = None
    if mask_shape is not None:
        mask = _randn(*mask_shape, seed=3, dtype=dtype, device=device)
        mask[..., 1::2] = -INF
    scale = d**-0.5
    with _Watched(query, keys, values, mask):
        pass
    before = dispatch.launches["_attention_kernel"]
    found = ops.beam_attention(query, keys, values, mask, scale, softcap, sinks=sinks)
    assert dispatch.launches["_attention_kernel"] == before + 1
    assert (found.shape, found.dtype) == (query.shape, dtype)
    reference = ops.beam_attention_reference(query, keys, values, mask, scale, softcap, sinks=sinks)
    *wide, sinks = (x if x is None else x.double() for x in (query, keys, values, mask, sinks))
    exact = ops.beam_attention_reference(*wide, scale, softcap, sinks=sinks)
    _close(found, reference, exact, FLOOR[dtype])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("d", [32, 64, 80, 96, 128, 256])
def test_attention_dims(d: int, dtype: torch.dtype, device: str) -> None:
    _check_attention(beam_attention, device, 2, 3, 4, 2, 70, d, dtype, None, (2, 1, 3, 70))


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(
    ("b", "m", "h", "kv", "n"),
    [
        (1, 1, 1, 1, 1),
        (3, 5, 6, 2, 33),
        (1, 4, 8, 1, 129),
        (2, 1, 4, 2, 17),
        (1, 4, 2, 2, 1_100),
        (2, 16, 8, 1, 65),
        (1, 9, 8, 1, 600),
    ],
)
def test_attention(
    b: int, m: int, h: int, kv: int, n: int, softcap: float | None, device: str
) -> None:
    _check_attention(beam_attention, device, b, m, h, kv, n, 8, softcap=softcap)
    for shape in (
        (b, 1, m, n),
        (1, 1, 1, n),
        (b, 1, 1, n),
        (1, h, 1, n),
        (b, h, m, n),
        (1, h, m, n),
    ):
        _check_attention(
            beam_attention, device, b, m, h, kv, n, 8, softcap=softcap, mask_shape=shape
        )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("b", "m", "h", "kv", "n"), [(1, 1, 1, 1, 1), (3, 5, 6, 2, 33), (1, 4, 2, 2, 1_100)]
)
def test_attention_with_sinks(
    b: int, m: int, h: int, kv: int, n: int, dtype: torch.dtype, device: str
) -> None:
    for shape in (None, (b, h, m, n)):
        _check_attention(
            beam_attention, device, b, m, h, kv, n, 8, dtype, mask_shape=shape, sunk=True
        )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("seen", [1, 64, 65, 700, 1_100])
def test_attention_to_some_of_the_room(seen: int, masked: bool, device: str) -> None:
    """Keys beyond the visible ones are not read, wherever they start."""
    b, m, h, n = 1, 3, 2, 1_100
    query, keys, values, mask = (
        _randn(b, x, y, 8, seed=i, device=device)
        for i, (x, y) in enumerate([(m, h), *[(h, n)] * 3])
    )
    mask = mask[:, :1, None, :, 0].expand(b, 1, m, n).contiguous() if masked else None
    for room in (
        keys[:, :, seen:],
        values[:, :, seen:],
        *([mask[..., seen:]] if mask is not None else []),
    ):
        room.fill_(torch.nan)
    counted = torch.tensor([seen], device=device)
    found = beam_attention.beam_attention(query, keys, values, mask, 0.3, seen=counted)
    reference = beam_attention.beam_attention_reference(
        query, keys, values, mask, 0.3, seen=counted
    )
    short = None if mask is None else mask[..., :seen]
    wanted = beam_attention.beam_attention_reference(
        query, keys[:, :, :seen], values[:, :, :seen], short, 0.3
    )
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(reference, wanted)


def test_attention_in_parts(device: str) -> None:
    """With few sentences, keys are split over programs, and the last program adds up the parts."""
    for _ in range(2):
        _check_attention(beam_attention, device, 1, 4, 2, 2, 1_100, 64, mask_shape=(1, 1, 4, 1_100))
    assert not dispatch.counters(torch.zeros(1, device=device).device, dispatch.MOST_COUNTED).any()


def _check_newest(
    ops: Any, device: str, b: int, m: int, h: int, kv: int, n: int, d: int, room: int = 0
) -> None:
    """Check attention that writes the newest keys and values: the last M visible slots."""
    query = _randn(b, m, h, d, device=device)
    keys, values = (_randn(b, kv, n + room, d, seed=s, device=device) for s in (1, 2))
    made = _randn(b * m, 3 * kv, d, seed=3, device=device)  # strided, as in a merged QKV product
    newest = ops.Newest(made[:, kv : 2 * kv], made[:, 2 * kv :])
    written = [keys.clone(), values.clone()]
    cache.write_slots_(*written, newest.keys[:, :, None], newest.values[:, :, None], n - m)
    for buffer in (keys, values):
        buffer[:, :, n - m :] = torch.nan
    seen = torch.tensor([n], device=device) if room else None
    mask = _randn(b, 1, m, n + room, seed=4, device=device)
    with pytest.MonkeyPatch.context() as patch:
        # 513 keys are then split into parts of 128.
        patch.setattr(ops, "_multiprocessors", lambda device: 132)
        found = ops.beam_attention(query, keys, values, mask, 0.3, seen=seen, newest=newest)
    for buffer, wanted in zip((keys, values), written, strict=True):
        assert torch.equal(buffer[:, :, :n], wanted[:, :, :n])
        assert buffer[:, :, n:].isnan().all()
    torch.testing.assert_close(
        found, ops.beam_attention_reference(query, *written, mask, 0.3, seen=seen)
    )


@pytest.mark.parametrize("room", [0, 40])
@pytest.mark.parametrize(
    ("b", "m", "h", "kv", "n"),
    [(1, 1, 1, 1, 1), (3, 5, 6, 2, 35), (1, 3, 2, 2, 513), (1, 9, 8, 1, 601), (2, 4, 4, 4, 256)],
)
def test_attention_writes_the_newest(
    b: int, m: int, h: int, kv: int, n: int, room: int, device: str
) -> None:
    """The newest slots lie within one part of the keys, or cross the boundary of two."""
    _check_newest(beam_attention, device, b, m, h, kv, n, 8, room)


def test_attention_rows_that_see_nothing(device: str) -> None:
    for n in (9, 1_100):
        query, keys, values = (
            _randn(1, *s, device=device) for s in ((3, 2, 8), (2, n, 8), (2, n, 8))
        )
        mask = torch.zeros(1, 1, 3, n, device=device)
        mask[:, :, 2] = -INF
        found = beam_attention.beam_attention(query, keys, values, mask, 1.0)
        assert torch.equal(
            found.isnan().flatten(2).all(2), torch.tensor([[False, False, True]], device=device)
        )


# Norms and activation functions.


def _check_norm(
    ops: Any, device: str, rows: int, d: int, dtype: torch.dtype, rms: bool, weight: bool,
    bias: bool, residual: bool, added: bool,
) -> None:  # fmt: skip
    x = _randn(rows, 1, d, dtype=dtype, device=device) * 3 + 1
    parameters = [
        _randn(d, seed=i, dtype=dtype, device=device) if on else None
        for i, on in ((1, weight), (2, bias))
    ]
    other = _randn(rows, 1, d, seed=3, dtype=dtype, device=device) if residual else None
    linear = _randn(d, seed=4, dtype=dtype, device=device) if added else None
    with _Watched(x, *parameters, other, linear, norm=1):
        found, total = ops.norm(x, *parameters, 1e-5, other, linear, rms)
    reference, wanted_total = ops.norm_reference(x, *parameters, 1e-5, other, linear, rms)
    wide = [None if t is None else t.double() for t in (x, *parameters, other, linear)]
    exact, exact_total = ops.norm_reference(wide[0], wide[1], wide[2], 1e-5, wide[3], wide[4], rms)
    assert found.dtype == total.dtype == dtype
    _close(found, reference, exact, FLOOR[dtype] * 4)
    _close(total, wanted_total, exact_total, FLOOR[dtype])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize(("rows", "d"), [(1, 1), (5, 33), (3, 768), (2, 4_100)])
def test_norm(rows: int, d: int, rms: bool, dtype: torch.dtype, device: str) -> None:
    for given in range(16):
        _check_norm(norm, device, rows, d, dtype, rms, *(bool(given >> i & 1) for i in range(4)))


def test_norm_is_torchs(device: str) -> None:
    x, weight, bias = (
        _randn(4, 50, device=device),
        _randn(50, seed=1, device=device),
        _randn(50, seed=2, device=device),
    )
    found, total = norm.norm(x, weight, bias)
    assert total is x
    torch.testing.assert_close(found, torch.nn.functional.layer_norm(x, (50,), weight, bias))
    torch.testing.assert_close(
        norm.norm(x, weight, eps=1e-6, rms=True)[0],
        torch.nn.functional.rms_norm(x, (50,), weight, 1e-6),
    )


def _check_embedding(
    ops: Any, device: str, rows: int, d: int, dtype: torch.dtype, rms: bool, at: Any
) -> None:
    """Compare with the operations one after the other; fp16 and fp32 sums are equal bit by bit."""
    ids = _integers(rows, below=9, device=device)
    ids[0] = 4
    tokens, table = (_randn(9, d, seed=s, dtype=dtype, device=device) * 3 for s in (0, 1))
    weight, bias = (_randn(d, seed=s, dtype=dtype, device=device) for s in (2, 3))
    at = torch.tensor(at, device=device)[:rows] if isinstance(at, list) else at
    of = norm.NormParameters(weight, None if rms else bias, 1e-5, rms)
    for scale, positions in (
        (1.0, None),
        (1.0, ops.Positions(table, 2, at)),
        (5.6568, ops.Positions(table, 2, at, 4)),
        (5.6568, ops.Positions(table, 2, at, 4, 0)),
    ):
        given = () if positions is None else positions.rows()
        wanted_total = ops.embedding_reference(ids, tokens, scale, *given)
        wanted, _ = norm.norm_reference(wanted_total, *of[:3], rms=rms)
        exact, _ = norm.norm_reference(
            wanted_total.double(), weight.double(), None if rms else bias.double(), 1e-5, rms=rms
        )
        with _Watched(ids, tokens, table, weight, bias, embedding=1):
            found, total = ops.normed_embedding(ids, tokens, scale, positions, of)
        if dtype == torch.bfloat16 and dispatch.INTERPRETED:  # which truncates
            torch.testing.assert_close(total, wanted_total, rtol=0.02, atol=0.2)
            torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.2)
        else:
            assert torch.equal(total, wanted_total)
            _close(found, wanted, exact, FLOOR[dtype] * 4)


@pytest.mark.parametrize("at", [3, [3], [0, 5, 2, 6, 1]], ids=str)
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_embedding(dtype: torch.dtype, rms: bool, at: Any, device: str) -> None:
    for rows, d in ((1, 33), (5, 96), (5, 1_100)):
        _check_embedding(embedding, device, rows, d, dtype, rms, at)


def test_embedding_of_unknown_ids(device: str) -> None:
    ids, tokens = torch.tensor([1, 9, -1], device=device), torch.ones(9, 8, device=device)
    of = norm.NormParameters(None, None, 1e-5)
    for found in embedding.normed_embedding(ids, tokens, 1.0, None, of):
        assert found.isnan().all(1).tolist() == [False, True, True]


def _check_activation(
    ops: Any, device: str, kind: str, dtype: torch.dtype, count: int = 1_100
) -> None:
    x, gate = (_randn(3, count, seed=s, dtype=dtype, device=device) * 4 for s in (0, 1))
    bias = _randn(count, seed=2, dtype=dtype, device=device)
    x[0, :3] = torch.tensor([INF, -INF, torch.nan])
    for b, g in ((None, None), (bias, None), (None, gate), (bias, gate)):
        with _Watched(x, b, g, activation=1):
            found = ops.fused_activation(x, kind, b, g)
        exact = ops.fused_activation_reference(
            *(t if not torch.is_tensor(t) else t.double() for t in (x, kind, b, g))
        )
        reference = ops.fused_activation_reference(x, kind, b, g)
        finite = exact.isfinite() & reference.isfinite()
        assert bool((found.isfinite() | ~finite).all())
        _close(found[finite], reference[finite], exact[finite], FLOOR[dtype] * 4)
        assert bool(found[0, 2].isnan())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "relu", "relu_squared", "silu"])
def test_activation(kind: str, dtype: torch.dtype, device: str) -> None:
    _check_activation(activation, device, kind, dtype)


# Sampling.

FILTERS = [
    {}, {"top_k": 1}, {"top_k": 5}, {"top_k": 10**6}, {"top_p": 0.9}, {"top_p": 1e-9},
    {"min_p": 0.2}, {"min_p": 1.0}, {"top_k": 20, "top_p": 0.7, "min_p": 0.01, "temperature": 0.8},
    {"typical_p": 0.5}, {"typical_p": 1e-9}, {"top_k": 20, "min_p": 0.05, "typical_p": 0.8},
]  # fmt: skip


def _check_sample(ops: Any, device: str, options: dict[str, Any], v: int = 40) -> None:
    """Check that tokens pass the filters and are as frequent as their probability says."""
    bisected = options.keys() & {"top_k", "top_p", "typical_p"}
    # The interpreter needs a tenth of a second for a bisection.
    draws = 10 if bisected and device == "cpu" else 200
    logits = (_randn(2, v, seed=4, device=device) * 2).repeat_interleave(draws, 0)
    with _Watched(logits, sample=1):
        tokens = ops.sample(logits, **options, generator=torch.Generator(device).manual_seed(0))
    again = ops.sample(logits[:4], **options, generator=torch.Generator(device).manual_seed(0))
    assert torch.equal(tokens[:4], again)
    assert tokens.dtype == torch.int64
    left = ops.filtered_reference(logits, **options)
    assert bool((left.gather(1, tokens[:, None]) > -INF).all())
    probabilities = left.softmax(-1)[::draws].double()
    found = torch.nn.functional.one_hot(tokens, v).view(2, draws, v).double().mean(1)
    deviation = (probabilities * (1 - probabilities) / draws).sqrt()
    assert bool(((found - probabilities).abs() <= 5 * deviation + 1.5 / draws).all())
    assert bool((tokens.view(2, draws)[0] != tokens[0]).any()) == bool(
        probabilities[0].max() < 0.999
    )


@pytest.mark.parametrize("options", FILTERS, ids=str)
@pytest.mark.slow
def test_sample(options: dict[str, Any], device: str) -> None:
    _check_sample(sample, device, options)


@pytest.mark.parametrize("dtype", FLOATS)
def test_sample_of_a_large_vocabulary(dtype: torch.dtype, device: str) -> None:
    logits = _randn(2, 9_001, dtype=dtype, device=device)
    logits[:, 9_000] = 30
    assert sample.sample(logits, top_p=0.9, top_k=50).tolist() == [9_000, 9_000]
    logits[0, 4_000] = 60
    assert sample.sample(logits, temperature=0.5, min_p=0.1).tolist() == [4_000, 9_000]


@pytest.mark.parametrize("mass", [0.05, 0.5, 0.95])
def test_typical_tokens_are_those_of_transformers(mass: float) -> None:
    logits = _randn(6, 300, dtype=torch.float64) * 3
    logits[:, 7] = -INF
    wanted = TypicalLogitsWarper(mass)(torch.empty(6, 0), logits)
    assert torch.equal(sample.filtered_reference(logits, typical_p=mass), wanted)


def test_sample_reaches_what_equals_the_last(device: str) -> None:
    """With four equal logits and top_k=2, all four remain."""
    logits = torch.full((30, 6), -5.0, device=device)
    logits[:, :4] = 1.0
    assert set(sample.sample(logits, top_k=2).tolist()) == {0, 1, 2, 3}


# KV cache moves.


def _check_cache(ops: Any, device: str) -> None:
    for dtype in FLOATS:
        keys, values = (_randn(2, 3, 10, 5, seed=s, dtype=dtype, device=device) for s in (0, 1))
        new_keys, new_values = (
            _randn(8, 1, 3, 5, seed=s, dtype=dtype, device=device).transpose(1, 2) for s in (2, 3)
        )
        wanted = [
            ops.write_slots_reference(b, n, 3) for b, n in ((keys, new_keys), (values, new_values))
        ]
        with _Watched(new_keys, new_values, write_slots=1):
            ops.write_slots_(keys, values, new_keys, new_values, 3)
        assert torch.equal(keys, wanted[0])
        assert torch.equal(values, wanted[1])
        with _Watched(new_keys, new_values, write_slots=1):
            ops.write_slots_(keys, values, new_keys, new_values, torch.tensor([6], device=device))
        assert torch.equal(keys, ops.write_slots_reference(wanted[0], new_keys, 6))
        assert torch.equal(
            values,
            ops.write_slots_reference(wanted[1], new_values, torch.tensor([6], device=device)),
        )
        buffer = _randn(6, 3, 2_000, 5, dtype=dtype, device=device)
        wanted_buffer = buffer.clone()
        wanted_buffer[[1, 0], :, :1_900] = wanted_buffer[[5, 4], :, :1_900]
        with _Watched(move_sentences=1):
            ops.move_sentences_(
                buffer[:, :, :1_900], *(torch.tensor(t, device=device) for t in ([1, 0], [5, 4]))
            )
        assert torch.equal(buffer, wanted_buffer)
    for m, n in ((1, 1), (4, 37), (5, 3_000)):
        for table in (
            _integers(3, m, n + 4, below=9, device=device),
            _randn(3, m, n + 4, device=device),
        ):
            parents = _integers(3, m, below=m, seed=1, device=device)
            wanted = torch.cat(
                [ops.reorder_rows_reference(table[:, :, :n], parents), table[:, :, n:]], 2
            )
            with _Watched(parents, reorder_rows=1):
                ops.reorder_rows_(table[:, :, :n], parents)
            assert torch.equal(table, wanted)


def test_cache(device: str) -> None:
    _check_cache(cache, device)


# Rotary positions.


def _check_rotation(
    ops: Any, device: str, dtype: torch.dtype, dims: int, turned: int, interleaved: bool
) -> None:
    b, m, heads, kv_heads = 2, 3, 4, 2
    made = _randn(b * m, heads + 2 * kv_heads, dims, dtype=dtype, device=device)
    # Strided, as in a merged QKV product.
    query, key, value = made.split((heads, kv_heads, kv_heads), 1)
    for rows, angles in ((1, torch.float32), (b * m, dtype)):
        angle = _randn(rows, 1, turned, seed=1, device=device)
        turn = ops.Rotation(angle.cos().to(angles), angle.sin().to(angles), interleaved)
        exact = ops.Rotation(turn.cosine.double(), turn.sine.double(), interleaved)
        for start in (4, torch.tensor([4], device=device)):
            keys, values = (
                _randn(b, kv_heads, 9, dims, seed=s, dtype=dtype, device=device) for s in (2, 3)
            )
            wanted_keys = cache.write_slots_reference(
                keys, ops.rotated(key, turn)[:, :, None], start
            )
            exact_keys = cache.write_slots_reference(
                keys.double(), ops.rotated(key.double(), exact)[:, :, None], start
            )
            wanted_values = cache.write_slots_reference(values, value[:, :, None], start)
            with _Watched(query, key, value, rotate=1):
                found = ops.rotate_into_slots_(query, key, value, turn, keys, values, start)
            _close(found, ops.rotated(query, turn), ops.rotated(query.double(), exact), 1e-6)
            _close(keys, wanted_keys, exact_keys, 1e-6)
            assert torch.equal(values, wanted_values)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dims", "turned"), [(8, 8), (80, 32)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_rotation(
    dtype: torch.dtype, dims: int, turned: int, interleaved: bool, device: str
) -> None:
    _check_rotation(rotation, device, dtype, dims, turned, interleaved)


# Tables of a beam search.


def _beam_tables(b: int, m: int, k: int, steps: int, device: str) -> list[tables.Table]:
    """Return tables of tokens, rows and ancestry.

    They are views of larger tensors, with poison after the filled part.
    """
    ids = _integers(b, m + 1, steps + 9, below=99, device=device)[:, 1:, :-1]
    rows = _integers(b, m, steps + 3, below=99, seed=1, device=device).int()
    seen = _randn(b, m, (steps + 2) * m, device=device)
    ids[:, :, 6 + steps :], rows[:, :, steps:], seen[:, :, steps * m :] = -7, -7, torch.nan
    own = torch.full((m, m), -INF, device=device).fill_diagonal_(0.0).expand(b, m, m)
    tokens = _integers(k, b, below=99, seed=2, device=device).t()[:, :, None]
    return [tables.Table(ids, tokens, 6), tables.Table(rows, tokens + 100), tables.Table(seen, own)]


def _check_extend(ops: Any, device: str, b: int, m: int, steps: int, counted: bool) -> None:
    growing = _beam_tables(b, m, m, steps, device)
    parents = _integers(m, b, below=m, seed=3, device=device).t()
    wanted = [ops.extend_rows_reference(table, parents, steps) for table in growing]
    around = growing[0].rows._base
    assert around is not None
    before = around[:, 0].clone(), around[:, :, -1].clone()
    count = torch.tensor([steps], device=device) if counted else steps
    with _Watched(parents, *(table.newest for table in growing), move_rows=1):
        ops.extend_rows_(growing, parents, count)
    for table, expected in zip(growing, wanted, strict=True):
        torch.testing.assert_close(table.rows, expected, atol=0, rtol=0, equal_nan=True)
    assert torch.equal(around[:, 0], before[0])
    assert torch.equal(around[:, :, -1], before[1])


def _check_finish(ops: Any, device: str, b: int, m: int, k: int, steps: int, counted: bool) -> None:
    growing = _beam_tables(b, m, k, steps, device)[:2]
    finished = [
        _integers(*t.rows.shape, below=99, seed=4, device=device).to(t.rows.dtype) for t in growing
    ]
    order = torch.stack(
        [torch.randperm(m + k, generator=torch.Generator().manual_seed(i))[:m] for i in range(b)]
    )
    beams, order = _integers(k, b, below=m, seed=5, device=device).t(), order.to(device)
    wanted = [
        ops.finish_rows_reference(f, t, order, beams, steps)
        for f, t in zip(finished, growing, strict=True)
    ]
    count = torch.tensor([steps], device=device) if counted else steps
    both = [rows.clone() for rows in finished], _beam_tables(b, m, m, steps, device)
    parents = _integers(m, b, below=m, seed=6, device=device).t()
    extended = [ops.extend_rows_reference(table, parents, steps) for table in both[1]]
    with _Watched(order, beams, *(part for table in growing for part in table[:2]), move_rows=1):
        ops.finish_rows_(finished, growing, order, beams, count)
    for rows, expected in zip(finished, wanted, strict=True):
        assert torch.equal(rows, expected)
    ended = [ops.Finished(rows, t.newest) for rows, t in zip(both[0], growing, strict=True)]
    newest = [table.newest for table in (*growing, *both[1])]
    with _Watched(order, beams, parents, *newest, move_rows=1):
        ops.finish_and_extend_(both[1], parents, ended, order, beams, count)
    found = [*both[0], *(table.rows for table in both[1])]
    for rows, expected in zip(found, [*wanted, *extended], strict=True):
        torch.testing.assert_close(rows, expected, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize(
    ("m", "steps"), [*itertools.product(range(1, 10), (0, 1, 13)), (4, 300), (33, 13)]
)
def test_tables(m: int, steps: int, counted: bool, device: str) -> None:
    _check_extend(tables, device, 3, m, steps, counted)
    _check_finish(tables, device, 3, m, 2 * m, steps, counted)


def test_tables_of_one_sentence_and_many_beams(device: str) -> None:
    """More candidates than twice the beams, and more beams than the kernels support."""
    _check_finish(tables, device, 1, 4, 36, 5, True)
    growing = _beam_tables(1, 65, 65, 2, device)
    parents = _integers(1, 65, below=65, device=device)
    wanted = [tables.extend_rows_reference(table, parents, 2) for table in growing]
    with _Watched(parents):
        tables.extend_rows_(growing, parents, 2)
    for table, expected in zip(growing, wanted, strict=True):
        torch.testing.assert_close(table.rows, expected, atol=0, rtol=0, equal_nan=True)


# Beam search selection.


def _check_choice(
    ops: Any, device: str, trials: int, beams: int, penalty: float, early: Any, ends: int = 2
) -> None:
    """Compare selection with the rules in torch; after the end of a search, nothing finishes.

    In every fifth trial, all candidates end.
    """
    for trial in range(trials):
        search, candidates, length = choice(trial, beams, penalty, early, device, ends)
        last = trial % 5 == 4
        if last:
            candidates = candidates._replace(hits=torch.ones_like(candidates.hits))
        indices = candidates.beam * VOCABULARY + candidates.token
        stops = torch.arange(ends, device=device)
        sentences = torch.arange(len(search.prompt), device=device).flip(0) + 3
        powers = search.rule._powers_of_lengths(candidates.values)
        rules = choices.Rules(search.rule.mask_value, early is True, powers, search.rule.far or 0)
        wanted, finished = search.by_rules(candidates, length), search.finished
        for over in (False, True):
            kept = (
                each.clone()
                for each in (search.scores, finished.scores, finished.done, search.improvable)
            )
            state = choices.State(*kept, torch.tensor([over], device=device))
            count = torch.tensor([length], device=device)
            step = choices.Step(stops, last, sentences, state, rules, count)
            with _Watched(candidates.values, indices, stops, sentences, powers, choose=1):
                found = ops.choose_(candidates.values, indices, VOCABULARY, step)
            assert torch.equal(found.beam, candidates.beam)
            assert torch.equal(found.token, candidates.token)
            for rows, of in ((found.rows, found.parents), (found.row, found.beam)):
                assert torch.equal(rows, of + sentences[:, None] * beams)
            merged, flags = Merged(state.finished, state.done, found.order), wanted.flags.clone()
            flags[3] |= over
            assert torch.equal(state.improvable, found.flags[1])
            assert state.over.tolist() == [bool(flags[3, 0])]
            # Finished hypotheses stay as they were, and what could still finish does not matter.
            if over:
                order = torch.arange(beams, device=device).expand_as(found.order)
                flags[1], flags[2] = found.flags[1], finished.done.all(1)
                wanted = wanted._replace(
                    merged=Merged(finished.scores, finished.done, order), improvable=flags[1]
                )
            chosen = Choice(
                found.parents, found.tokens, state.scores, merged, state.improvable, found.flags
            )
            assert_alike(chosen, wanted._replace(flags=flags))


@pytest.mark.parametrize("early", [True, False, "never"])
@pytest.mark.parametrize("penalty", [1.0, 0.0, -1.5, 2.0])
@pytest.mark.parametrize("beams", [1, 3, 5])
def test_choice(beams: int, penalty: float, early: Any, device: str) -> None:
    _check_choice(choices, device, 12, beams, penalty, early)


def test_choice_of_many(device: str) -> None:
    """More than one warp, and more than the kernels support."""
    _check_choice(choices, device, 3, 30, 0.7, True, 7)
    scores = torch.zeros(2, 4)
    assert choices.covered(scores, choices.MOST - 4)
    assert not choices.covered(scores, choices.MOST - 3)
    assert not choices.covered(scores.double(), 2)


def test_the_end_of_many_sentences(device: str) -> None:
    """The search is over once no sentence is improvable, whichever was the last."""
    b = 130
    values = torch.tensor([[-1.0, -2.0]], device=device).repeat(b, 1)
    indices = torch.tensor([[4, 5]], device=device).repeat(b, 1)
    rules = choices.Rules(-1.0e9, False, torch.ones(9, device=device), 0)
    for improvable in (None, 0, 129):
        state = choices.State(
            torch.zeros(b, 1), torch.zeros(b, 1), torch.ones(b, 1).bool(), torch.zeros(b).bool(),
            torch.zeros(1).bool(),
        )  # fmt: skip
        if improvable is not None:
            state.improvable[improvable] = True
            state.finished[improvable] = -5.0
        state = choices.State(*(each.to(device) for each in state))
        sentences, one = torch.arange(b, device=device), torch.tensor([1], device=device)
        step = choices.Step(None, False, sentences, state, rules, one)
        chosen = choices.choose_(values, indices, 9, step)
        assert state.over.tolist() == [improvable is None]
        assert chosen.flags[3].unique().tolist() == [improvable is None]


def _check_kbest_and_choice(
    ops: Any, device: str, beams: int, v: int, k: int, **updates: Any
) -> None:
    """Compare with the two operations one after the other."""
    b, peeled = 3, k <= kbest_kernels.PEELED
    logits = _randn(b, beams, v, dtype=torch.float16, device=device) * 3
    transforms = kbest.LogitsUpdates(**updates)
    done = torch.rand(b, beams, generator=torch.Generator().manual_seed(1)) < 0.5
    done = done.sort(1, descending=True).values.to(device)
    scores = _randn(b, beams, seed=2, device=device)
    finished = torch.where(done, _randn(b, beams, seed=3, device=device) - 5, -1.0e9)
    finished = finished.sort(1, descending=True).values
    rules = choices.Rules(-1.0e9, False, torch.linspace(1, 9, 9, device=device), 0)
    stops = torch.arange(0, v, 3, device=device)
    found = []
    for at_once in (False, True):
        state = choices.State(
            scores.clone(), finished.clone(), done.clone(),
            torch.ones(b, dtype=torch.bool, device=device), torch.tensor([False], device=device),
        )  # fmt: skip
        sentences, count = torch.arange(b, device=device), torch.tensor([4], device=device)
        step = choices.Step(stops, False, sentences, state, rules, count)
        launched = {"kbest_and_choose": 1} if at_once else {"merge": 1, "choose": 1}
        first = {"part" if peeled else "group": 1}
        with _Watched(logits, *transforms[1:], **launched, **first):
            if at_once:
                chosen = ops.kbest_and_choose_(logits, k, transforms, step)
            else:
                best = kbest.kbest(logits, scores, k, transforms)
                chosen = choices.choose_(best.values, best.indices, v, step)
        found.append((*chosen, *state))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("beams", "v", "k"), [(1, 33, 2), (4, 500, 8), (3, 5_001, 6), (9, 300, 18)]
)
def test_kbest_and_choice(beams: int, v: int, k: int, device: str) -> None:
    _check_kbest_and_choice(choices, device, beams, v, k)
    updates = {
        name: value for name, value in _edits(3, beams, v, device).items() if name == "banned"
    }
    _check_kbest_and_choice(choices, device, beams, v, k, **updates)


def _check_first(ops: Any, device: str, trials: int, m: int, k: int, last: bool) -> None:
    """Compare with `choose_by_rules` in torch, for sentences at any stage."""
    for trial in range(trials):
        generator, b = torch.Generator().manual_seed(100 * trial + m), 1 + trial % 4
        scores = (torch.randn(b, k, generator=generator) * 3 - 8).sort(descending=True).values
        scores[torch.rand(b, k, generator=generator) < 0.1] = -INF
        tokens = torch.randint(2, (9, 3, 5)[trial % 3], (b, k), generator=generator)
        beams = torch.randint(0, m, (b, k), generator=generator)
        counts, lengths = (
            torch.randint(0, m + 1, shape, generator=generator) for shape in ((b,), (b, m))
        )
        ignored = (torch.rand(b, m, generator=generator) < 0.3).sort(1).values
        found = Candidates(*(each.to(device) for each in (scores, tokens, beams)))
        state = [each.to(device) for each in (ignored, counts, lengths)]
        search: Any = _First(m, state[0].clone())
        finished = FinishedSlots([], state[2].clone(), state[1].clone())
        length = torch.tensor([7 + trial], device=device)
        wanted = choose_by_rules(search, found, finished, length, last)
        slots = choices.Slots(*state)
        with _Watched(*found, length, choose_first=1):
            chosen = ops.choose_first_(
                found.scores, found.tokens, found.beams, slots, 2, length, last
            )
        for name in ("scores", "tokens", "beams", "order", "over"):
            assert torch.equal(getattr(chosen, name), getattr(wanted, name)), name
        for one, other in zip(
            slots, (search.ignored, finished.counts, finished.lengths), strict=True
        ):
            assert torch.equal(one, other)


class _First(FirstFinished):
    """A search that has only the attributes its selection reads."""

    def __init__(self, beams: int, ignored: Tensor) -> None:
        self.beams, self.ignored, self.end, self.device = beams, ignored, 2, ignored.device


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("m", "k"), [(1, 2), (3, 6), (4, 7), (5, 5), (30, 60)])
def test_choice_by_the_first_finished(m: int, k: int, last: bool, device: str) -> None:
    _check_first(choices, device, 9, m, k, last)


def test_what_the_choice_by_the_first_finished_covers() -> None:
    assert choices.first_covered(torch.zeros(1, 6), 3)
    assert not choices.first_covered(torch.zeros(1, 6).double(), 3)
    assert not choices.first_covered(torch.zeros(1, 7), 3)
    assert not choices.first_covered(torch.zeros(1, 2), 3)
    assert not choices.first_covered(torch.zeros(1, choices.MOST + 1), choices.MOST)


# Dispatch and errors.


@interpreted
@pytest.mark.parametrize(
    ("wanted", "ran"), [("auto", "reference"), ("reference", "reference"), ("triton", "triton")]
)
def test_the_variable_chooses(wanted: str, ran: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTGEN_OPS", wanted)
    config.reload()
    before = dispatch.calls.copy()
    norm.norm(_randn(2, 5), None)
    assert dispatch.calls - before == {("norm", ran): 1}


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "triton", None)
    with pytest.raises(RuntimeError, match="FASTGEN_OPS=triton, but there are no kernels here"):
        norm.norm(_randn(2, 5), None)


ZEROS = torch.zeros
TABLE = tables.Table(ZEROS(2, 3, 5), ZEROS(2, 3, 1), 1)


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        (lambda: kbest.kbest(ZEROS(2, 3), ZEROS(2), 1), r"\(2, 3\)"),
        (lambda: kbest.kbest(ZEROS(1, 2, 3), ZEROS(1, 2), 7), "k = 7"),
        (lambda: kbest.kbest(ZEROS(1, 2, 3), ZEROS(1, 2), 0), "k = 0"),
        (
            lambda: kbest.kbest(ZEROS(1, 2, 3), ZEROS(1, 2), 1, temperature=0.0),
            r"temperature = 0\.0",
        ),
        (
            lambda: kbest.kbest(ZEROS(1, 2, 3), ZEROS(1, 2), 1, bias=ZEROS(4)),
            r"bias \(4,\) must be \(3,\)",
        ),
        (
            lambda: kbest.kbest(
                ZEROS(1, 2, 3), ZEROS(1, 2), 1, kbest.LogitsUpdates(banned=ZEROS(2, 2))
            ),
            r"banned \(2, 2\) must be \(2, 1\)",
        ),
        (lambda: ngram_block.ngram_block_(ZEROS(2, 3), ZEROS(2, 4), 0), "n = 0"),
        (
            lambda: ngram_block.ngram_block_(ZEROS(2, 3), ZEROS(2, 4), 2, ZEROS(3, 4)),
            r"source \(3, 4\)",
        ),
        (
            lambda: ngram_block.ngram_mask_(ZEROS(2, 3), ZEROS(2, 4), 2, 300),
            "not that of 300 tokens",
        ),
        (lambda: token_mask.add_tokens_(ZEROS(2, 3), ZEROS(2, 4), 300), "not that of 300 tokens"),
        (lambda: token_mask.add_tokens_(ZEROS(2, 3), ZEROS(3, 4), 96), r"tokens \(3, 4\)"),
        (lambda: norm.norm(ZEROS(2, 3), ZEROS(4)), r"weight \(4,\) do not fit x \(2, 3\)"),
        (
            lambda: norm.norm(ZEROS(2, 3), None, residual=ZEROS(3)),
            r"residual \(3,\) do not fit x \(2, 3\)",
        ),
        (lambda: activation.fused_activation(ZEROS(2, 3), "tanh"), "kind = 'tanh'"),
        (
            lambda: activation.fused_activation(ZEROS(2, 3), "relu", ZEROS(2)),
            r"bias \(2,\) do not fit",
        ),
        (lambda: sample.sample(ZEROS(3)), r"\(3,\)"),
        (lambda: sample.sample(ZEROS(2, 3), temperature=0.0), r"temperature = 0\.0"),
        (lambda: sample.sample(ZEROS(2, 3), top_p=0.0), r"top_p = 0\.0"),
        (lambda: sample.sample(ZEROS(2, 3), top_k=-1), "top_k = -1"),
        (lambda: sample.sample(ZEROS(2, 3), typical_p=0.0), r"typical_p = 0\.0"),
        (
            lambda: cache.write_slots_(
                ZEROS(2, 3, 4, 5), ZEROS(2, 3, 4, 5), *[ZEROS(4, 3, 1, 5)] * 2, 3
            ),
            "slot 3",
        ),
        (lambda: cache.reorder_rows_(ZEROS(2, 3, 4), ZEROS(2, 4)), r"parents \(2, 4\)"),
        (lambda: cache.move_sentences_(ZEROS(2, 3), ZEROS(1), ZEROS(1)), r"buffer \(2, 3\)"),
        (lambda: tables.extend_rows_([TABLE], ZEROS(2, 4), 0), r"parents \(2, 4\)"),
        (lambda: tables.extend_rows_([TABLE], ZEROS(2, 3), 4), "4 steps"),
        (
            lambda: tables.extend_rows_([TABLE._replace(newest=ZEROS(2, 3))], ZEROS(2, 3), 0),
            r"newest \(2, 3\)",
        ),
        (
            lambda: tables.finish_rows_([ZEROS(2, 3, 5)], [TABLE], ZEROS(2, 3), ZEROS(2, 6), 0),
            r"beams \(2, 6\)",
        ),
        (
            lambda: tables.finish_rows_([ZEROS(2, 3, 5).int()], [TABLE], *[ZEROS(2, 3)] * 2, 0),
            r"int32, order",
        ),
    ],
)
def test_errors(call: Callable[[], object], shown: str) -> None:
    with pytest.raises(ValueError, match=shown):
        call()


# Mutants.

_SMALL_ATTENTION = ("cpu", 2, 3, 4, 2, 70, 8)
MUTANTS: dict[str, tuple[ModuleType, str, str, Callable[[Any], object]]] = {
    "kbest: the end of the vocabulary": (
        kbest_kernels, "[:, None] & (token < vocabulary)", "[:, None] & (token <= vocabulary)",
        lambda kernels: _check_kbest(kernels, "cpu", 2, 3, 33, 40, torch.float32),
    ),
    "kbest: nothing beyond the end": (
        kbest_kernels, "mask=inside, other=float(\"-inf\")", "mask=inside, other=0.0",
        lambda kernels: _check_kbest(kernels, "cpu", 2, 3, 33, 2, torch.float32),
    ),
    "kbest: ties": (
        kbest_kernels, "(0x7FFFFFFF - index).to", "index.to",
        lambda kernels: [_check_kbest_ties(kernels, "cpu", group) for group in (0, 32)],
    ),
    "kbest: NaN": (
        kbest_kernels, "tl.where(value != value, float(\"-inf\"), value)", "value",
        lambda kernels: _check_kbest_without_nan(kernels, "cpu", 32),
    ),
    "kbest: bans": (
        kbest_kernels, "(words >> (token % 32)", "(words >> (token % 31)",
        lambda kernels: _check_kbest(
            kernels, "cpu", 2, 3, 500, 8, torch.float32, banned=_edits(2, 3, 500, "cpu")["banned"]
        ),
    ),
    "kbest: the parts' maxima": (
        kbest_kernels, "sums * tl.exp(highest - top[:, None])", "sums",
        lambda kernels: _check_kbest(kernels, "cpu", 1, 2, 5_001, 8, torch.float32),
    ),
    "kbest: whose group it is": (
        kbest_kernels, "of = tl.where(chosen >= 0, chosen // groups, 0)",
        "of = tl.where(chosen >= 0, 0, 0)",
        lambda kernels: _check_kbest(kernels, "cpu", 1, 2, 5_001, 8, torch.float32),
    ),
    "kbest: one group less": (
        kbest_kernels, "(slot == i) & (best !=", "(slot == i + 1) & (best !=",
        lambda kernels: _check_kbest(kernels, "cpu", 1, 2, 5_001, 8, torch.float32),
    ),
    "argmax: the end of the vocabulary": (
        kbest_kernels, "tl.max(tl.where(inside, key_of(value, token), lowest), 0)",
        "tl.max(key_of(value, token), 0)",
        lambda kernels: _check_argmax(kernels, 2, 5_001, torch.float32),
    ),
    "argmax: all parts": (
        kbest_kernels, "mask=other < parts, other=lowest", "mask=other < parts - 1, other=lowest",
        lambda kernels: _check_argmax(kernels, 2, 9_001, torch.float32),
    ),
    "argmax: the next launch": (
        kbest_kernels, "tl.store(ended_ptr + row, 0)", "tl.store(ended_ptr + row, 2)",
        lambda kernels: _check_argmax(kernels, 2, 5_001, torch.float32),
    ),
    "token mask: the end": (
        token_mask, "(tokens < vocabulary))", "(tokens <= vocabulary))",
        lambda ops: [_check_token_mask(ops, "cpu", v) for v in (33, 40, 1_000)],
    ),
    "ngram: newest tokens": (
        ngram_block, "newest + i * id_stride", "newest + 0 * id_stride",
        lambda ops: _check_ngrams(ops, "cpu", 6, 130, 96, 4, 3, torch.float32),
    ),
    "ngram: the last n-gram": (
        ngram_block, "inside = start < starts", "inside = start < starts - 1",
        lambda ops: _check_ngrams(ops, "cpu", 6, 8, 96, 96, 1, torch.float32),
    ),
    "ngram: words of a new mask": (
        ngram_block, "tl.zeros([1024], tl.int32)", "tl.full([1024], 2, tl.int32)",
        lambda ops: _check_ngrams(ops, "cpu", 6, 8, 96, 96, 1, torch.float32),
    ),
    "attention: keys beyond the end": (
        beam_attention, "scores = tl.where(is_slot[None, :], scores, float(\"-inf\"))",
        "scores = scores", lambda ops: _check_attention(ops, *_SMALL_ATTENTION),
    ),
    "attention: the running softmax": (
        beam_attention, "mixed = mixed * shrink[:, None] + tl.dot", "mixed = mixed + tl.dot",
        lambda ops: _check_attention(ops, *_SMALL_ATTENTION),
    ),
    "attention: query heads of a key head": (
        beam_attention, "kv_head * groups + row // beams", "kv_head + row // beams",
        lambda ops: _check_attention(ops, *_SMALL_ATTENTION),
    ),
    "attention: pieces of the rows": (
        beam_attention, "tl.program_id(0) % chunks * ROWS", "0 * chunks",
        lambda ops: _check_attention(ops, "cpu", 2, 16, 8, 1, 65, 8),
    ),
    "attention: the newest of each sentence": (
        beam_attention, "new_row = sentence * beams + new", "new_row = new",
        lambda ops: _check_newest(ops, "cpu", 3, 5, 6, 2, 35, 8),
    ),
    "attention: the newest of each part": (
        beam_attention, "(last - beams < end)", "(last - 1 < end)",
        lambda ops: _check_newest(ops, "cpu", 1, 3, 2, 2, 513, 8),
    ),
    "attention: counters of the next launch": (
        beam_attention, "tl.store(ended_ptr + tl.program_id(0), 0)",
        "tl.store(ended_ptr + tl.program_id(0), 1)",
        lambda ops: [_check_attention(ops, "cpu", 1, 4, 2, 2, 1_100, 8) for _ in range(2)],
    ),
    "attention: parts": (
        beam_attention, "part_mixed * share[:, None]", "part_mixed",
        lambda ops: _check_attention(ops, "cpu", 1, 4, 2, 2, 1_100, 8),
    ),
    "norm: the mean over what is there": (
        norm, "tl.where(inside, total - tl.sum(total, 0) / dims, 0.0)",
        "total - tl.sum(total, 0) / dims",
        lambda ops: _check_norm(ops, "cpu", 5, 33, torch.float32, False, True, True, True, True),
    ),
    "norm: residual": (
        norm, "RESIDUAL=residual is not None", "RESIDUAL=False",
        lambda ops: _check_norm(ops, "cpu", 5, 33, torch.float32, True, True, True, True, False),
    ),
    "embedding: the product is rounded": (
        embedding, "(total * scale).to(dtype)", "(total * scale)",
        lambda ops: _check_embedding(ops, "cpu", 5, 96, torch.float16, False, [3]),
    ),
    "embedding: the sum is what is normalised": (
        embedding, "total = (total + position", "_ = (total + position",
        lambda ops: _check_embedding(ops, "cpu", 5, 96, torch.float16, False, [3]),
    ),
    "embedding: the position of padding": (
        embedding, "padding_row < 0, row - 1", "padding_row < 0, row",
        lambda ops: _check_embedding(ops, "cpu", 5, 96, torch.float32, False, [3]),
    ),
    "embedding: positions by row": (
        embedding, "at += out", "at += 0",
        lambda ops: _check_embedding(ops, "cpu", 5, 96, torch.float32, False, [0, 5, 2, 6, 1]),
    ),
    "activation: the bias's place": (
        activation, "offset % dims", "offset",
        lambda ops: _check_activation(ops, "cpu", "relu", torch.float32, 33),
    ),
    "sample: the last of k": (
        sample, "count >= top_k, middle, low", "count > top_k, middle, low",
        lambda ops: _check_sample(ops, "cpu", {"top_k": 1}),
    ),
    "sample: mass": (
        sample, "_ordered(value) >= middle, tl.exp(value - highest)",
        "_ordered(value) >= middle, tl.exp(value)",
        lambda ops: _check_sample(ops, "cpu", {"top_p": 0.9}),
    ),
    "sample: entropy": (
        sample, "highest + weighted / total_mass", "highest - weighted / total_mass",
        lambda ops: _check_sample(ops, "cpu", {"typical_p": 0.3}),
    ),
    "rotation: the sign": (
        rotation, "tl.where(first, -other, other)", "other",
        lambda ops: _check_rotation(ops, "cpu", torch.float32, 8, 8, True),
    ),
    "rotation: whose head": (
        rotation, "head -= heads\n", "head -= heads + 1\n",
        lambda ops: _check_rotation(ops, "cpu", torch.float32, 8, 8, False),
    ),
    "rotation: what is not turned": (
        rotation, "tl.where(is_turned, (cosine_term", "tl.where(is_dim, (cosine_term",
        lambda ops: _check_rotation(ops, "cpu", torch.float32, 80, 32, False),
    ),
    "cache: slots": (
        cache, "start + row % beams", "start + row // beams", lambda ops: _check_cache(ops, "cpu"),
    ),
    "cache: parents": (
        cache, "(parents * table_m)", "(beam * table_m)", lambda ops: _check_cache(ops, "cpu"),
    ),
    "cache: moves": (
        cache, "* BLOCK + tl.arange(0, BLOCK) < size", "* BLOCK + tl.arange(0, BLOCK) < BLOCK",
        lambda ops: _check_cache(ops, "cpu"),
    ),
    "choice: what ends does not go on": (
        choices, "tl.where(hit, value + mask_value, value)", "value",
        lambda ops: _check_choice(ops, "cpu", 6, 3, 1.0, False),
    ),
    "choice: who may finish": (
        choices, "(slot < 2 * BEAMS)", "(slot < 3 * BEAMS)",
        lambda ops: _check_choice(ops, "cpu", 6, 3, 1.0, False),
    ),
    "choice: full sentences": (
        choices, "tl.where(full, ranked + mask_value, ranked)", "ranked",
        lambda ops: _check_choice(ops, "cpu", 12, 3, 1.0, True),
    ),
    "choice: hopeless sentences": (
        choices, "tl.where(improvable, ranked, ranked + mask_value)", "ranked",
        lambda ops: _check_choice(ops, "cpu", 12, 3, 1.0, False),
    ),
    "choice: the length that is judged by": (
        choices, "tl.where(far > 0, far, new_tokens)", "new_tokens",
        lambda ops: _check_choice(ops, "cpu", 24, 3, 2.0, "never"),
    ),
    "choice: empty slots": (
        choices, "(open_slots > 0) &", "(open_slots < 0) &",
        lambda ops: _check_choice(ops, "cpu", 12, 1, 1.0, False),
    ),
    "choice: enough has finished": (
        choices, "over = over | (tl.min(full.to(tl.int32), 0) == 1)", "over = over",
        lambda ops: _check_choice(ops, "cpu", 12, 3, 1.0, True),
    ),
    "choice: once it is over": (
        choices, "old | (new & (tl.load(over_ptr) == 0))", "old | new",
        lambda ops: _check_choice(ops, "cpu", 6, 3, 1.0, False),
    ),
    "choice: every end token": (
        choices, "tl.load(ends_ptr + i)", "tl.load(ends_ptr)",
        lambda ops: _check_choice(ops, "cpu", 6, 3, 1.0, False),
    ),
    "choice: rows of the original batch": (
        choices, "2 * column, first_row + beam", "2 * column, beam",
        lambda ops: _check_choice(ops, "cpu", 6, 3, 1.0, False),
    ),
    "choice: counters of the next launch": (
        choices, "tl.store(ended_ptr, 0)", "tl.store(ended_ptr, 1)",
        lambda ops: _check_choice(ops, "cpu", 6, 3, 1.0, False),
    ),
    "choice: candidates of the same launch": (
        choices, "_kernel(values_ptr, indices_ptr,", "_kernel(values_ptr, values_ptr,",
        lambda ops: _check_kbest_and_choice(ops, "cpu", 3, 500, 6),
    ),
    "choice: who may fill a slot": (
        choices, "(candidate < BEAMS) & (ignored == 0)", "(candidate < BEAMS)",
        lambda ops: _check_first(ops, "cpu", 9, 4, 8, False),
    ),
    "choice: how many slots there are": (
        choices, "finishing & (place <= BEAMS)", "finishing",
        lambda ops: _check_first(ops, "cpu", 9, 4, 8, False),
    ),
    "choice: -inf does not end": (
        choices, " & (score != float(\"-inf\"))", "",
        lambda ops: _check_first(ops, "cpu", 18, 4, 8, False),
    ),
    "choice: who goes on": (
        choices, "tl.where(ends | ignored,", "tl.where(ends,",
        lambda ops: _check_first(ops, "cpu", 9, 4, 8, False),
    ),
    "choice: the longest text": (
        choices, "LAST=last", "LAST=False", lambda ops: _check_first(ops, "cpu", 9, 4, 8, True),
    ),
    "tables: parents": (
        tables, "table + (parents *", "table + (beam *",
        lambda ops: _check_extend(ops, "cpu", 3, 4, 13, True),
    ),
    "tables: how far they are filled": (
        tables, "prefixes[i] + steps * counts[i]", "prefixes[i] + steps",
        lambda ops: _check_extend(ops, "cpu", 3, 4, 13, False),
    ),
    "tables: the end of what is new": (
        tables, "(beyond < count)", "(beyond <= count)",
        lambda ops: _check_extend(ops, "cpu", 3, 4, 13, True),
    ),
    "tables: what had finished": (
        tables, "stays = inside & (candidate < 0)", "stays = inside & (candidate <= 0)",
        lambda ops: [_check_finish(ops, "cpu", 3, m, 2 * m, 13, True) for m in range(1, 10)],
    ),
    "tables: the newest token": (
        tables, "candidate * ending_strides[i][1]", "origins * ending_strides[i][1]",
        lambda ops: _check_finish(ops, "cpu", 3, 4, 8, 13, False),
    ),
}  # fmt: skip


@interpreted
@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.slow
def test_mutant(name: str, tmp_path: Path) -> None:
    """The checks pass on the operation's file, and fail once one place of it is changed."""
    module, old, new, check = MUTANTS[name]
    assert module.__file__
    source = Path(module.__file__).read_text("utf-8")
    assert source.count(old) == 1, f"{old!r} must be one place of {module.__file__}"
    check(module)
    changed = tmp_path / "mutant.py"
    changed.write_text(source.replace(old, new), "utf-8")
    spec = importlib.util.spec_from_file_location("mutant", changed)
    assert spec is not None
    assert spec.loader is not None
    mutant = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutant)
    assert _is_found(lambda: check(mutant))


def _is_found(check: Callable[[], object]) -> bool:
    """Return whether a check fails in a forked process, as a mutant may crash."""
    broken = 2
    process = os.fork()
    if process == 0:
        status = 1
        try:
            faulthandler.disable()
            check()
            status = 0
        except BaseException as error:
            if _has_no_such_name(error):
                status = broken
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert status != broken, "the mutant uses a name that its kernel does not have"
    return status != 0


def _has_no_such_name(error: BaseException | None) -> bool:
    """Return whether an error, or one that it stems from, is a NameError."""
    while error is not None:
        if isinstance(error, NameError):
            return True
        error = error.__cause__ or error.__context__
    return False
