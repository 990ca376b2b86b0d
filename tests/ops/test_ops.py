"""Every operation against its reference: odd shapes, real vocabularies, dtypes, strides, ties."""

import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor, TopPLogitsWarper

from fastgen.decoding.logits.text import Text
from fastgen.decoding.logits.top_p import TopP
from fastgen.ops import beam_attention as attention_module
from fastgen.ops import linear as linear_ops
from fastgen.ops import native, processor
from fastgen.ops.activation import activation_, activation_reference, kind_of
from fastgen.ops.beam_attention import beam_attention, beam_attention_reference
from fastgen.ops.latent_attention import latent_attention, latent_attention_reference
from fastgen.ops.selection import kbest as kbest_module
from fastgen.ops.selection.kbest import (
    LogitsUpdates,
    best_of_log_probs,
    best_of_log_probs_reference,
    kbest,
    kbest_reference,
)
from fastgen.ops.selection.ngram_block import ngram_block_, ngram_block_reference
from fastgen.ops.selection.sample import nucleus
from fastgen.ops.selection.token_mask import packed
from fastgen.ops.tables import Table, extend_rows_, finish_rows_

INF = torch.inf
VOCABULARIES = (32_128, 50_264)


def _randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def _unmodified(*tensors: Tensor) -> Callable[[], bool]:
    before = [(tensor.clone(), tensor._version) for tensor in tensors]

    def holds() -> bool:
        return all(
            torch.equal(tensor.nan_to_num(7.0), old.nan_to_num(7.0)) and tensor._version == version
            for tensor, (old, version) in zip(tensors, before, strict=True)
        )

    return holds


# Sampling.


def _warped(scores: Tensor, top_p: float, least: int) -> Tensor:
    ids = torch.zeros(scores.shape[0], 1, dtype=torch.int64)
    return TopPLogitsWarper(top_p, min_tokens_to_keep=least)(ids, scores)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.97])
@pytest.mark.parametrize(
    ("rows", "v", "least"), [(1, 1, 1), (3, 7, 2), (5, 65, 1), (4, 1_000, 3), (2, 50_264, 1)]
)
@pytest.mark.parametrize("top_k", [0, 50])
def test_nucleus(
    rows: int, v: int, least: int, top_p: float, top_k: int, dtype: torch.dtype
) -> None:
    """The scores equal those of the warper wherever they are certain, which is nearly always."""
    found = 0
    for seed in range(10):
        scores = _randn(rows, v, seed=seed, dtype=dtype) * 6
        if 0 < top_k < v:
            scores[scores < scores.topk(top_k).values[:, -1:]] = -torch.inf
        unmodified = _unmodified(scores)
        left, sure = nucleus(scores, top_p, least, 64 if top_k else 2_048)
        assert unmodified()
        assert torch.equal(left[sure], _warped(scores, top_p, least)[sure])
        found += int(sure.sum())
    assert found >= 9 * rows


def test_nucleus_leaves_to_the_toolkit_what_it_cannot_know() -> None:
    def sure(scores: Tensor, top_p: float, count: int = 64) -> list[bool]:
        return nucleus(scores, top_p, count=count)[1].tolist()

    flat = _randn(3, 5_000) * 2
    assert sure(flat, 0.9) == [False] * 3
    assert any(sure(flat, 0.9, 4_000))
    equal = torch.tensor([[3.0, 1.0, 1.0, 1.0, -9.0]])
    assert sure(equal, 0.8) == [False]  # one or two of three equal tokens remain
    assert sure(equal, 0.5) == [True]
    # Rounding decides whether the second token of the first row remains.
    halves = torch.tensor([[0.5, 0.25, 0.25], [0.6, 0.3, 0.1]]).log()
    assert sure(halves, 0.5) == [
        False,
        True,
    ]
    for bad in (torch.nan, torch.inf):
        assert sure(torch.tensor([[0.0, bad, 1.0]]), 0.9) == [False]
    assert sure(torch.full((1, 3), -torch.inf), 0.9) == [False]


@pytest.mark.parametrize("rows", [1, 9])
def test_top_p_asks_the_toolkit_for_rows_in_doubt(rows: int) -> None:
    asked: list[int] = []

    def dense(ids: Tensor, scores: Tensor) -> Tensor:
        asked.append(len(scores))
        return _warped(scores, 0.5, 1)

    transform = TopP(0.5, 1, dense)
    scores = _randn(rows, 100) * 6
    scores[0, :] = -torch.inf
    scores[0, :3] = torch.tensor([0.5, 0.25, 0.25]).log()
    for _ in range(3):
        text = Text(torch.zeros(rows, 1, dtype=torch.int64), 1)
        assert torch.equal(transform(scores, text), _warped(scores, 0.5, 1))
    assert set(asked) == {1}


# k-best.


def _check_kbest(log_probs: Tensor, scores: Tensor, k: int) -> None:
    """Assert that values and indices equal those of `torch.topk` bit for bit."""
    unmodified = _unmodified(log_probs, scores)
    values, indices = best_of_log_probs(log_probs, scores, k)
    wanted_values, wanted_indices = best_of_log_probs_reference(log_probs, scores, k)
    assert indices.dtype == torch.int64
    assert values.dtype == log_probs.dtype
    assert torch.equal(values.nan_to_num(7.0), wanted_values.nan_to_num(7.0))
    assert torch.equal(indices, wanted_indices)
    assert unmodified()


@pytest.fixture
def _groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tiny inputs go through groups, as large ones do."""
    monkeypatch.setattr(kbest_module, "SMALL", 0)
    monkeypatch.setattr(kbest_module, "GROUP", 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("b", "m", "v", "k"),
    [
        (1, 1, 1, 1), (1, 1, 7, 7), (3, 5, 33, 10), (2, 3, 127, 6), (2, 3, 128, 6), (7, 1, 129, 2),
        (1, 4, 5_001, 8), (64, 4, 5_000, 8), (5, 5, 4_999, 10), (1, 1, 70_000, 1),
        (2, 1, 128 * 300, 2), *((3, 4, v, 8) for v in VOCABULARIES),
        *((2, 5, v, 105) for v in VOCABULARIES),
    ],
)  # fmt: skip
def test_kbest(b: int, m: int, v: int, k: int, dtype: torch.dtype) -> None:
    log_probs = torch.log_softmax(_randn(b, m, v, dtype=dtype) * 3, -1)
    _check_kbest(log_probs, _randn(b, m, seed=1, dtype=dtype), k)
    first_step = torch.full((b, m), -1e9, dtype=dtype)
    first_step[:, 0] = 0  # in fp32 all beams except the first tie
    _check_kbest(log_probs, first_step, k)


@pytest.mark.parametrize("v", VOCABULARIES)
def test_kbest_ranks_groups_instead_of_tokens(v: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a tie the reference, which could hide an error in the groups, does not run."""
    log_probs, scores = (
        torch.log_softmax(_randn(3, 4, v, dtype=torch.float64), -1),
        _randn(3, 4, seed=1).double(),
    )
    wanted = best_of_log_probs_reference(log_probs, scores, 8)
    monkeypatch.setattr(
        kbest_module, "best_of_log_probs_reference", lambda *_: pytest.fail("the reference ran")
    )
    values, indices = best_of_log_probs(log_probs, scores, 8)
    assert torch.equal(values, wanted[0])
    assert torch.equal(indices, wanted[1])


@pytest.mark.parametrize(
    "kind", ["every other", "transposed", "expanded", "part", "tail", "scores"]
)
@pytest.mark.parametrize("v", [1_000, VOCABULARIES[1]])
def test_kbest_strided(kind: str, v: int) -> None:
    scores = _randn(2, 4, seed=1)
    log_probs = {
        "every other": lambda: _randn(2, 4, 2 * v)[:, :, ::2],
        "transposed": lambda: _randn(2, v, 4).transpose(1, 2),
        "expanded": lambda: _randn(2, 1, v).expand(2, 4, v),
        "part": lambda: _randn(4, 4, v + 9)[1:3, :, 5 : v + 5],
        "tail": lambda: _randn(2, 8, v)[:, ::2],
        "scores": lambda: _randn(2, 4, v),
    }[kind]()
    if kind == "scores":
        scores = _randn(4, 2, seed=1).t()
    _check_kbest(log_probs, scores, 8)


@pytest.mark.parametrize("v", [96, 1_000, *VOCABULARIES])
@pytest.mark.parametrize("levels", [1, 2, 40])
def test_kbest_ties(v: int, levels: int) -> None:
    """Few distinct values: equal ones come in the order of `torch.topk`."""
    log_probs = (
        torch.randint(0, levels, (3, 4, v), generator=torch.Generator().manual_seed(v)).float() / 8
    )
    _check_kbest(log_probs, torch.zeros(3, 4), 8)
    _check_kbest(log_probs, torch.tensor([[0.0, -0.125, -0.25, 0.0]] * 3), 8)


@pytest.mark.parametrize(
    "where", ["the last two", "the last and the next", "far below", "across groups", "in the tail"]
)
def test_kbest_one_tie(where: str) -> None:
    """A tie among the k best, one at their boundary, and one that does not matter."""
    b, m, v, k = 2, 4, VOCABULARIES[0], 8
    log_probs = torch.log_softmax(_randn(b, m, v).double(), -1)
    scores = torch.zeros(b, m, dtype=torch.float64)
    order = log_probs.flatten(1).argsort(1, descending=True)
    first, second = {
        "the last two": (k - 2, k - 1), "the last and the next": (k - 1, k),
        "far below": (k + 5, k + 6), "across groups": (0, 1), "in the tail": (0, k),
    }[where]  # fmt: skip
    for row in range(b):
        flat = log_probs[row].view(-1)
        if where == "in the tail":
            flat[m * v - 1] = flat[m * v - 2] = 1.0
        else:
            flat[order[row, second]] = flat[order[row, first]]
    _check_kbest(log_probs, scores, k)


@pytest.mark.parametrize("v", [96, 1_000, *VOCABULARIES])
def test_kbest_bans(v: int) -> None:
    log_probs, scores, k = torch.log_softmax(_randn(3, 4, v), -1), _randn(3, 4, seed=1), 8
    log_probs[0, 1] = -INF  # one beam
    log_probs[1] = -INF  # a sentence
    _check_kbest(log_probs, scores, k)
    log_probs[2, :, 3:] = -INF  # a sentence with fewer candidates than requested groups
    _check_kbest(log_probs, scores, k)
    log_probs[2, :, 1:] = -INF  # fewer than k
    _check_kbest(log_probs, scores, k)
    scores[2, 0] = -INF
    _check_kbest(log_probs, scores, k)
    log_probs.fill_(-INF)
    _check_kbest(log_probs, scores, k)
    log_probs[0, 2, 5] = INF
    _check_kbest(log_probs, scores, k)


@pytest.mark.parametrize("v", [96, 1_000, *VOCABULARIES])
@pytest.mark.parametrize(
    "kind", ["one", "two", "a beam", "a sentence", "all", "in the tail", "score"]
)
def test_kbest_nan(v: int, kind: str) -> None:
    """`torch.topk` ranks NaN first, and decides about their order."""
    log_probs, scores = torch.log_softmax(_randn(3, 4, v), -1), _randn(3, 4, seed=1)
    if kind == "one":
        log_probs[1, 2, v // 2] = torch.nan
    elif kind == "two":
        log_probs[1, 2, v // 2] = log_probs[1, 3, v // 3] = torch.nan
    elif kind == "in the tail":
        log_probs[1, 2, -1] = torch.nan
    elif kind == "score":
        scores[1, 2] = torch.nan
    else:
        log_probs[{"a beam": (1, 2), "a sentence": (1,), "all": ()}[kind]] = torch.nan
    _check_kbest(log_probs, scores, 8)


@pytest.mark.usefixtures("_groups")
def test_kbest_in_groups_of_four() -> None:
    """Many small inputs put the winners at every position, in groups and after them."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(2_000):
        b, m = (int(torch.randint(1, 6, (1,), generator=generator)) for _ in range(2))
        v = int(torch.randint(16, 70, (1,), generator=generator))
        k = int(torch.randint(1, min(m * v, 4 * m) + 1, (1,), generator=generator))
        log_probs = torch.randn(b, m, v, generator=generator)
        if torch.rand(1, generator=generator) < 0.5:
            log_probs = (log_probs * 4).round() / 4
        if torch.rand(1, generator=generator) < 0.3:
            log_probs[torch.rand(b, m, v, generator=generator) < 0.7] = -INF
        _check_kbest(log_probs, torch.randn(b, m, generator=generator), k)


@pytest.mark.parametrize(
    ("log_probs", "scores", "shown"),
    [
        ((4, 9), (4,), "(4, 9)"), ((2, 3, 9), (3, 2), "(3, 2)"),
        ((2, 3, 9), (2, 3, 1), "(2, 3, 1)"), ((2, 3, 9), (6,), "(6,)"),
        ((1, 2, 3, 9), (1, 2), "(1, 2, 3, 9)"),
    ],
)  # fmt: skip
def test_kbest_errors(log_probs: tuple[int, ...], scores: tuple[int, ...], shown: str) -> None:
    with pytest.raises(ValueError, match=re.escape(shown)):
        best_of_log_probs(torch.zeros(log_probs), torch.zeros(scores), 2)


@pytest.mark.usefixtures("by_torch_alone")  # C stores no log-probabilities
@pytest.mark.parametrize("edited", [False, True])
@pytest.mark.parametrize("v", [257, *VOCABULARIES])
def test_kbest_in_given_memory(v: int, edited: bool) -> None:
    """The values do not depend on the contents of the scratch memory; logits are unmodified."""
    logits, scores = _randn(3, 4, v) * 3, _randn(3, 4, seed=1)
    banned = _randn(12, v, seed=2) > 1 if edited else None
    updates = LogitsUpdates(banned=None if banned is None else packed(banned))
    scratch, unmodified = torch.full_like(logits, torch.nan), _unmodified(logits, scores)
    found = kbest(logits, scores, 8, updates, scratch=scratch)
    wanted = kbest_reference(logits, scores, 8, updates)
    torch.testing.assert_close(found.values, wanted.values, atol=1e-5, rtol=0)
    assert torch.equal(found.indices, wanted.indices)
    assert unmodified()
    assert torch.equal(
        scratch.isinf().flatten(0, 1), torch.zeros(12, v).bool() if banned is None else banned
    )
    for wrong in (scratch[:2], scratch.double(), torch.empty(3, v, 4).transpose(1, 2)):
        with pytest.raises(
            ValueError, match=re.escape(f"scratch {tuple(wrong.shape)} in {wrong.dtype}")
        ):
            kbest(logits, scores, 8, scratch=wrong)


def test_kbest_more_than_there_are() -> None:
    for v in (5, VOCABULARIES[0]):
        with pytest.raises(RuntimeError, match="out of range"):
            best_of_log_probs(torch.zeros(1, 2, v), torch.zeros(1, 2), 2 * v + 1)


# n-grams.


def _ids(rows: int, length: int, tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(0, tokens, (rows, length), generator=torch.Generator().manual_seed(seed))


def _check_ngrams(scores: Tensor, ids: Tensor, n: int) -> Tensor:
    wanted = ngram_block_reference(scores, ids, n)
    unmodified = _unmodified(ids)
    found = ngram_block_(scores, ids, n)
    assert found is scores
    assert unmodified()
    torch.testing.assert_close(scores, wanted, atol=0, rtol=0, equal_nan=True)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(
    ("rows", "length", "vocabulary", "tokens"),
    [
        (1, 1, 1, 1), (1, 5, 3, 3), (5, 33, 7, 7), (16, 130, 96, 4), (3, 6, 96, 96),
        (4, 64, VOCABULARIES[0], 9), (4, 64, VOCABULARIES[1], 50_264),
    ],
)  # fmt: skip
def test_ngrams(
    rows: int, length: int, vocabulary: int, tokens: int, n: int, dtype: torch.dtype
) -> None:
    scores, ids = _randn(rows, vocabulary, dtype=dtype), _ids(rows, length, tokens)
    toolkit = NoRepeatNGramLogitsProcessor(n)(ids, scores.clone())
    found = _check_ngrams(scores, ids, n)
    assert torch.equal(found, toolkit)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_ngrams_of_length_n(n: int) -> None:
    for length in range(n + 2):
        _check_ngrams(_randn(3, 5), torch.ones(3, length, dtype=torch.int64), n)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_ngrams_outside_the_vocabulary(n: int) -> None:
    ids = _ids(6, 40, 4) * 7 - 7  # -7, 0, 7, 14 with 12 tokens
    _check_ngrams(_randn(6, 12), ids, n)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_ngrams_ban_everything(n: int) -> None:
    """All tokens are banned, and some scores, including token 0's, are already infinite."""
    scores = _randn(4, 3)
    scores[0], scores[1, 0], scores[2, 0], scores[3] = -INF, -INF, INF, INF
    ids = torch.tensor([[0, 1, 2, 0, 2, 1, 0, 0, 1, 1, 2, 2, 0]] * 4)
    found = _check_ngrams(scores, ids, n)
    assert n > 1 or bool((found == -INF).all())


@pytest.mark.parametrize("n", [1, 2])
def test_ngrams_beside_nan(n: int) -> None:
    """NaN stays NaN where nothing is banned."""
    scores, ids = _randn(3, 8), torch.tensor([[1, 2, 1, 2, 1]] * 3)
    scores[:, 0] = scores[:, 5] = torch.nan
    _check_ngrams(scores, ids, n)


def test_ngrams_over_nan() -> None:
    """A banned token gets -inf, whatever its score was."""
    scores, ids = _randn(2, 8), torch.tensor([[1, 2, 1, 2, 1]] * 2)
    scores[:, 2] = torch.nan
    _check_ngrams(scores, ids, 2)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_ngrams_strided(n: int) -> None:
    base = _randn(12, 40)
    untouched = base[1::2].clone()
    _check_ngrams(base[::2, ::4], _ids(6, 20, 5), n)
    assert torch.equal(base[1::2], untouched)
    _check_ngrams(_randn(9, 6).t(), _ids(6, 20, 5), n)
    _check_ngrams(_randn(6, 9), _ids(40, 12, 5)[::2, ::2].t()[:6], n)
    _check_ngrams(_randn(6, 9), _ids(1, 20, 5).expand(6, 20), n)


@pytest.mark.parametrize(
    ("n", "rows", "shown"),
    [(0, 2, "n = 0"), (-3, 2, "n = -3"), (2, 3, "(3, 4)")],
    ids=["zero", "negative", "rows"],
)
def test_ngrams_errors(n: int, rows: int, shown: str) -> None:
    with pytest.raises(ValueError, match=re.escape(shown)):
        ngram_block_(torch.zeros(2, 5), torch.zeros(rows, 4, dtype=torch.int64), n)


# Attention of beams.


def _attention(
    b: int, m: int, h: int, kv: int, n: int, d: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        _randn(b, m, h, d, dtype=dtype),
        _randn(b, kv, n, d, seed=1, dtype=dtype),
        _randn(b, kv, n, d, seed=2, dtype=dtype),
    )


def _check_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Check both implementations: equal in fp64, else about twice the reference's error at most."""
    blind = 0.0 if softcap is None else torch.nan
    with patch.object(attention_module, "FEW", 10**9):
        _check_one_attention(query, keys, values, mask, softcap, sinks, blind)
    with patch.object(attention_module, "FEW", 0):
        return _check_one_attention(query, keys, values, mask, softcap, sinks, blind=torch.nan)


def _check_one_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
    blind: float,
) -> Tensor:
    """Check attention; a beam that sees nothing gets `blind`."""
    scale = query.shape[-1] ** -0.5
    given = [x for x in (query, keys, values, mask, sinks) if x is not None]
    unmodified = _unmodified(*given)
    found = beam_attention(query, keys, values, mask, scale, softcap, sinks=sinks)
    assert unmodified()
    reference = beam_attention_reference(query, keys, values, mask, scale, softcap, sinks=sinks)
    assert found.shape == query.shape
    assert found.dtype == query.dtype
    exact = beam_attention_reference(
        query.double(),
        keys.double(),
        values.double(),
        None if mask is None else mask.double(),
        scale,
        softcap,
        sinks=None if sinks is None else sinks.double(),
    )
    expected = torch.full_like(found[exact.isnan()], blind)
    torch.testing.assert_close(found[exact.isnan()], expected, equal_nan=True, atol=0, rtol=0)
    error, allowed = (
        (x.double() - exact).nan_to_num(0.0).abs().max().item()
        for x in (found, reference.to(query.dtype))
    )
    assert error <= 2 * allowed + _FLOOR[query.dtype]
    return found


_FLOOR = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(
    ("b", "m", "h", "kv", "n", "d"),
    [
        (1, 1, 1, 1, 1, 1), (2, 3, 4, 4, 7, 8), (3, 5, 6, 2, 33, 5), (1, 4, 8, 1, 129, 64),
        (5, 2, 3, 3, 1, 7), (2, 1, 4, 2, 17, 16),
    ],
)  # fmt: skip
def test_attention(
    b: int, m: int, h: int, kv: int, n: int, d: int, softcap: float | None, dtype: torch.dtype
) -> None:
    query, keys, values = _attention(b, m, h, kv, n, d, dtype)
    _check_attention(query, keys, values, None, softcap)
    for shape in (
        (b, 1, m, n),
        (1, 1, 1, n),
        (b, 1, 1, n),
        (1, h, 1, n),
        (b, h, m, n),
        (1, h, m, n),
        (1, 1, m, n),
    ):
        mask = _randn(*shape, seed=3, dtype=dtype)
        mask[..., 1::2] = -INF
        _check_attention(query, keys, values, mask, softcap)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(("b", "m", "h", "kv", "n"), [(1, 1, 1, 1, 1), (3, 5, 6, 2, 33)])
def test_attention_with_sinks(
    b: int, m: int, h: int, kv: int, n: int, softcap: float | None, dtype: torch.dtype
) -> None:
    query, keys, values = _attention(b, m, h, kv, n, 8, dtype)
    sinks = _randn(h, seed=4, dtype=dtype) * 2
    for shape in (None, (1, 1, 1, n), (b, h, m, n)):
        mask = None if shape is None else _randn(*shape, seed=3, dtype=dtype)
        if mask is not None:
            mask[..., ::2] = -INF
        found = _check_attention(query, keys, values, mask, softcap, sinks)
        if n == 1 and mask is not None:  # the sink has all of the weight
            assert torch.equal(found, torch.zeros_like(found))
        else:
            without = beam_attention(query, keys, values, mask, 8**-0.5, softcap)
            assert not torch.equal(found, without)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize(("b", "m", "h", "n"), [(1, 1, 1, 1), (3, 5, 6, 33)])
def test_latent_attention(b: int, m: int, h: int, n: int, dtype: torch.dtype) -> None:
    """Heads attend to latent vectors, which are values too, and to a part of the keys alone."""
    query = _randn(b, m, h, 16, dtype=dtype)
    latents, turned = (_randn(b, 1, n + 2, d, seed=d, dtype=dtype)[:, :, :n] for d in (12, 4))
    for shape in (None, (1, 1, 1, n), (b, 1, m, n), (b, h, m, n)):
        mask = None if shape is None else _randn(*shape, seed=3, dtype=dtype)
        if mask is not None:
            mask[..., 1::2] = -INF
        given = query, latents, turned, mask
        unmodified = _unmodified(*(x for x in given if x is not None))
        found = latent_attention(*given, 0.3)
        assert unmodified()
        assert (found.shape, found.dtype) == ((b, m, h, 12), dtype)
        reference = latent_attention_reference(*given, 0.3)
        wide = [x if x is None else x.double() for x in given]
        exact = latent_attention_reference(*wide, 0.3)
        keys = torch.cat([wide[1], wide[2]], 3)
        plainly = beam_attention_reference(wide[0], keys, keys, wide[3], 0.3)[..., :12]
        torch.testing.assert_close(exact, plainly, atol=1e-12, rtol=1e-12)
        error, allowed = ((x.double() - exact).abs().max().item() for x in (found, reference))
        assert error <= 2 * allowed + _FLOOR[dtype]
        seen = torch.tensor([n // 2 + 1])
        cut = None if mask is None else mask[..., : n // 2 + 1]
        found = latent_attention(query, latents, turned, mask, 0.3, seen)
        wanted = latent_attention(query, latents[:, :, :seen], turned[:, :, :seen], cut, 0.3)
        torch.testing.assert_close(found, wanted, atol=_FLOOR[dtype], rtol=1e-2)


def test_latent_attention_of_other_shapes() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        latent_attention(_randn(2, 3, 4, 16), _randn(2, 1, 5, 12), _randn(2, 1, 5, 5), None, 1.0)


@pytest.mark.parametrize(("b", "expected"), [(2, True), (3, False)])
def test_few_heads_are_attended_to_at_once(b: int, expected: bool, by_torch_alone: None) -> None:
    """Check when torch's own attention runs; the tests above choose by setting `FEW`."""
    query, keys, values = _attention(b, 4, 8, 8, 30, 8, torch.float32)
    with patch.object(
        F, "scaled_dot_product_attention", wraps=F.scaled_dot_product_attention
    ) as own:
        found = beam_attention(query, keys, values, None, 8**-0.5)
    assert own.called == expected
    reference = beam_attention_reference(query, keys, values, None, 8**-0.5)
    torch.testing.assert_close(found, reference)


def test_attention_is_the_toolkits() -> None:
    query, keys, values = _attention(3, 4, 6, 2, 21, 8, torch.float64)
    mask = torch.zeros(3, 1, 4, 21, dtype=torch.float64).masked_fill_(
        _randn(3, 1, 4, 21) > 0.5, -INF
    )
    mask[..., 0] = 0
    found = _check_attention(query, keys, values, mask)
    torch_own = F.scaled_dot_product_attention(
        query.transpose(1, 2), keys, values, mask, enable_gqa=True
    )
    torch.testing.assert_close(found, torch_own.transpose(1, 2), atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", _DTYPES)
def test_attention_masked_rows(dtype: torch.dtype) -> None:
    """A beam that sees nothing gets NaN or 0; if masked by the lowest number, the values' mean."""
    query, keys, values = _attention(2, 3, 4, 2, 9, 8, dtype)
    mask = torch.zeros(2, 1, 3, 9, dtype=dtype)
    mask[1, :, 2] = -INF
    assert bool(_check_attention(query, keys, values, mask)[1, 2].isnan().all())
    if dtype not in (torch.float64, torch.float32):
        return  # its lowest number leaves differences between scores that are fp32
    mask[1, :, 2] = torch.finfo(dtype).min
    found = _check_attention(query, keys, values, mask)
    if dtype is torch.float64:
        torch.testing.assert_close(found[1, 2], values[1].mean(1).repeat_interleave(2, 0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_attention_strided(dtype: torch.dtype) -> None:
    query, keys, values = _attention(3, 4, 6, 2, 40, 8, dtype)
    part = slice(3, 21)
    _check_attention(query, keys[:, :, part], values[:, :, part], None)
    _check_attention(query, keys[:, :, ::2], values[:, :, ::2], None)
    folded = _randn(3, 6, 4, 8, dtype=dtype).transpose(1, 2)
    _check_attention(folded, keys.transpose(2, 3).contiguous().transpose(2, 3), values, None)
    _check_attention(_randn(3, 4, 6, 16, dtype=dtype)[..., ::2], keys, values, None)
    mask = _randn(3, 1, 4, 80, dtype=dtype)[..., ::2]
    _check_attention(query, keys, values, mask)
    _check_attention(
        query,
        keys,
        values,
        _randn(4, 6, 40, dtype=dtype).transpose(0, 1)[None].expand(3, -1, -1, -1),
    )


def test_attention_does_not_see_what_is_masked() -> None:
    """Slots that a beam does not see may hold any finite value."""
    query, keys, values = _attention(2, 3, 4, 4, 9, 8, torch.float64)
    mask = torch.zeros(2, 1, 3, 9, dtype=torch.float64)
    mask[..., 5:] = -INF
    short = beam_attention(query, keys[:, :, :5], values[:, :, :5], mask[..., :5], 1.0)
    keys[:, :, 5:], values[:, :, 5:] = 1e30, 1e30
    torch.testing.assert_close(
        beam_attention(query, keys, values, mask, 1.0), short, atol=1e-12, rtol=0
    )


@pytest.mark.parametrize(
    ("query", "keys"),
    [((2, 3, 4, 8), (3, 4, 5, 8)), ((2, 3, 4, 8), (2, 3, 5, 8)), ((2, 3, 4, 8), (2, 4, 5, 6))],
)
def test_attention_errors(query: tuple[int, ...], keys: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=re.escape(str(query)) + ".*" + re.escape(str(keys))):
        beam_attention(torch.zeros(query), torch.zeros(keys), torch.zeros(keys), None, 1.0)


# Linear layers.


def _forms(weight: Tensor) -> list[Tensor | linear_ops.PanelWeight]:
    """Return a weight in each of the forms that `linear` accepts."""
    packed = linear_ops.pack(weight)
    return [weight] if packed is None else [weight, packed]


def _check_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    reference = linear_ops.linear_reference(x, weight, bias)
    allowed = 2 * (reference.double() - exact).abs().max().item() if exact.numel() else 0.0
    allowed += 1e-6 * math.sqrt(weight.shape[1])
    unmodified = _unmodified(x, weight, *([] if bias is None else [bias]))
    for form in _forms(weight):
        found = linear_ops.linear(x, form, bias)
        assert found.shape == exact.shape
        assert found.dtype == torch.float32
        assert exact.numel() == 0 or (found.double() - exact).abs().max().item() <= allowed
    assert unmodified()


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(
    ("lead", "k", "n"),
    [
        ((1,), 1, 1), ((1,), 7, 5), ((3,), 33, 129), ((2, 1), 320, 320), ((17,), 321, 319),
        ((4, 5, 3), 96, 100), ((130,), 64, 64), ((4, 1), 64, VOCABULARIES[0]),
        ((3,), 31, VOCABULARIES[1]), ((), 16, 8),
    ],
)  # fmt: skip
def test_linear(lead: tuple[int, ...], k: int, n: int, with_bias: bool) -> None:
    _check_linear(_randn(*lead, k), _randn(n, k, seed=1), _randn(n, seed=2) if with_bias else None)


def test_linear_strided() -> None:
    """x and the weight are strided; see below for the bias."""
    weight, bias = _randn(48, 32, seed=1), _randn(48, seed=2)
    _check_linear(_randn(6, 64)[:, ::2], weight, bias)
    _check_linear(_randn(32, 6).t(), weight, bias)
    _check_linear(_randn(6, 9, 32)[:, -1], weight, bias)
    _check_linear(_randn(1, 32).expand(6, 32), weight, bias)
    _check_linear(_randn(6, 32), _randn(32, 48).t(), bias)  # like GPT-2's Conv1D
    _check_linear(_randn(6, 32), _randn(96, 64)[::2, ::2], bias)


@pytest.mark.parametrize("kind", ["every other", "expanded"])
def test_linear_strided_bias(kind: str) -> None:
    bias = _randn(96)[::2] if kind == "every other" else _randn(1).expand(48)
    _check_linear(_randn(6, 32), _randn(48, 32, seed=1), bias)


def test_linear_special_values() -> None:
    """NaN and infinity propagate as in torch's own product."""
    x, weight = _randn(4, 32), _randn(48, 32, seed=1)
    x[0, 3], x[1, 4] = torch.nan, INF
    for form in _forms(weight):
        found, reference = linear_ops.linear(x, form), F.linear(x, weight)
        assert torch.equal(found.isnan(), reference.isnan())
        assert torch.equal(found.isinf(), reference.isinf())


@pytest.mark.parametrize("variant", ["avx2", "avx512"])
def test_weights_that_are_packed_for_c(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack weights that fill their panels from a number of rows on.

    Small ones that do not fill them are packed for decode steps only.
    """
    try:
        by = native.load(variant)
    except OSError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(native, "library", lambda *_: by)
    wide = variant == "avx512"
    shapes = {
        (64, 64): (True, 16), (128, 128): (True, 2), (256, 256): (True, 1), (48, 64): (True, 16),
        (16, 64): (True, None if wide else 16),
        (15, 512): (False, None), (16, 4096): (not wide, None if wide else 1),
        (66, 1024): (not wide, None if wide else 1),
        (32000, 512): (True, 1),
    }  # fmt: skip
    for shape, (in_panels, least) in shapes.items():
        assert (linear_ops.native_for(*shape) is by) == in_panels, shape
        rows = linear_ops.useful_rows(*shape)
        assert (rows.start if rows else None) == least, shape
        form = linear_ops.pack(_randn(*shape))
        assert (form is not None) == in_panels
        bytes_ = linear_ops.bytes_to_pack(*shape)
        assert bytes_ == (0 if form is None else form.nbytes)
        assert form is None or linear_ops.suits(form, *shape)


def test_many_rows_run_by_mkl_where_it_is_native(monkeypatch: pytest.MonkeyPatch) -> None:
    if native.library() is None:
        pytest.skip("there are no operations in C here")
    shapes = {(512, 512): 256, (4096, 1024): 512}
    for shape, most in shapes.items():
        assert 10**9 in linear_ops.useful_rows(*shape)
        with monkeypatch.context() as patched:
            patched.setattr(processor, "mkl_is_native", lambda: True)
            assert linear_ops.useful_rows(*shape) == range(1, most + 1)
            assert linear_ops.described() == "in C up to 512 rows, beyond by MKL"
    assert linear_ops.described() == "in C"


def test_mkl_answers_whether_it_is_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """MKL's own function is asked; a torch without it counts as not native."""
    monkeypatch.undo()  # undoes the fixture's choice
    processor.mkl_is_native.cache_clear()
    try:
        assert processor.mkl_is_native() in (True, False)
        for answer in (0, 1):
            functions = SimpleNamespace(mkl_serv_intel_cpu_true=lambda answer=answer: answer)
            for has, expected in ((functions, bool(answer)), (SimpleNamespace(), False)):
                monkeypatch.setattr(processor.ctypes, "CDLL", lambda _, has=has: has)
                monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
                processor.mkl_is_native.cache_clear()
                assert processor.mkl_is_native() == expected
    finally:
        processor.mkl_is_native.cache_clear()


@pytest.mark.parametrize(("rows", "n"), [(1, 8), (64, 8), (65, 8), (200, 40), (3, 50_264)])
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("with_bias", [True, False])
def test_linear_into_memory(rows: int, n: int, activation: str | None, with_bias: bool) -> None:
    """Every element of the output is written, with the residual and the activation."""
    x, weight, bias = _randn(2, rows, 48), _randn(n, 48, seed=1), _randn(n, seed=2)
    residual = _randn(2, rows, n, seed=3) if activation is None else None
    expected = F.linear(x, weight, bias if with_bias else None)
    if activation is not None:
        expected = linear_ops.activation_(expected, activation)
    if residual is not None:
        expected = expected + residual
    for form in _forms(weight):
        out = torch.full((2, rows, n), torch.nan)
        found = linear_ops.linear(x, form, bias if with_bias else None, activation, residual, out)
        assert found.data_ptr() == out.data_ptr()
        torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)


# Activation functions.


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "relu", "relu_squared", "silu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5, 7), (64, 129)])
def test_activation(kind: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """The result is bit-identical and in place, for strided inputs too."""
    for x in (_randn(*shape, dtype=dtype) * 4, _randn(*shape, 2, dtype=dtype)[..., 0]):
        wanted = activation_reference(x, kind)
        found = activation_(x, kind)
        assert found.data_ptr() == x.data_ptr()
        assert torch.equal(found, wanted)
        assert torch.equal(x, wanted)


@pytest.mark.parametrize(
    "shape", [(1, 1280), (4, 3, 14), (16, 1024), (16, 1025), (3, 5), (2, 4, 4)]
)
def test_few_values_of_gelu(shape: tuple[int, ...]) -> None:
    """GELU of few values runs in place, with an error no larger than torch's."""
    x = _randn(*shape) * 3
    wanted, torchs = F.gelu(x.double()), F.gelu(x)
    found = activation_(x, "gelu", exactly=False)
    assert found is x
    assert x.is_contiguous()
    assert (found - wanted).abs().max() <= (torchs - wanted).abs().max() + 1e-7
    turned = (_randn(*shape) * 3).mT
    torch.testing.assert_close(activation_(turned.clone(), "gelu", exactly=False), F.gelu(turned))


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "relu", "relu_squared", "silu"])
def test_activation_special_values(kind: str) -> None:
    x = torch.tensor([torch.nan, INF, -INF, 0.0, -0.0, 1e38, -1e38])
    wanted = activation_reference(x, kind)
    torch.testing.assert_close(activation_(x.clone(), kind), wanted, equal_nan=True, rtol=0, atol=0)


KINDS = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh", "gelu_python_tanh": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu", "relu2": "relu_squared", "silu": "silu", "swish": "silu",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(ACT2FN))
def test_kind_of_an_activation(name: str) -> None:
    """Of all activations in transformers, exactly the supported ones are recognised, by value."""
    if name == "xielu":
        pytest.skip("has parameters of its own")
    assert kind_of(ACT2FN[name]) == KINDS.get(name)


def test_kind_of_other_functions() -> None:
    assert kind_of(lambda x: x.sum()) is None
    assert kind_of(lambda x: x[:, None] @ x) is None
    assert kind_of(lambda x: F.relu(x).double()) is None


# Tables of a beam search.


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 7])
@pytest.mark.parametrize(("m", "c"), [(1, 1), (4, 1), (3, 3), (9, 2)])
def test_extended_rows(m: int, c: int, steps: int, counted: bool) -> None:
    """Every row is its parent's, followed by its own newest values."""
    generator = torch.Generator().manual_seed(m)
    parents = torch.randint(0, m, (2, m), generator=generator)
    rows, newest = torch.randn(2, m, 5 + (steps + 2) * c, generator=generator), torch.randn(2, m, c)
    before, end = rows.clone(), 5 + steps * c
    extend_rows_([Table(rows, newest, 5)], parents, torch.tensor([steps]) if counted else steps)
    for b in range(2):
        for beam in range(m):
            assert torch.equal(rows[b, beam, :5], before[b, beam, :5])
            assert torch.equal(rows[b, beam, 5:end], before[b, parents[b, beam], 5:end])
            assert torch.equal(rows[b, beam, end : end + c], newest[b, beam])


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 7])
@pytest.mark.parametrize(("m", "k"), [(1, 2), (4, 8), (3, 9)])
def test_finished_rows(m: int, k: int, steps: int, counted: bool) -> None:
    """A row is a finished one, or a running one followed by its end token."""
    generator = torch.Generator().manual_seed(m)
    finished, running = (
        torch.randint(0, 99, (2, m, 5 + steps + 2), generator=generator) for _ in range(2)
    )
    # The tails are filled in the same way.
    running[:, :, 5 + steps :] = finished[:, :, 5 + steps :] = 1
    beams, tokens = (torch.randint(0, m, (2, k), generator=generator) for _ in range(2))
    order = torch.stack([torch.randperm(m + k, generator=generator)[:m] for _ in range(2)])
    before, end = finished.clone(), 5 + steps
    table = Table(running, tokens[:, :, None], 5)
    finish_rows_([finished], [table], order, beams, torch.tensor([steps]) if counted else steps)
    for b in range(2):
        for row in range(m):
            candidate = int(order[b, row]) - m
            wanted = before[b, row].clone()
            if candidate < 0:
                wanted[5:] = before[b, order[b, row], 5:]
            else:
                wanted[5:] = running[b, beams[b, candidate], 5:]
                wanted[end] = tokens[b, candidate]
            assert torch.equal(finished[b, row], wanted)
