"""Search operations in C against their references: selection, tables, token sets, embeddings."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgen
from fastgen.models.layers.norm import Norm
from fastgen.models.runtime.decode_step import Embedding
from fastgen.ops import native
from fastgen.ops.cache import move_sentences_
from fastgen.ops.counts import calls
from fastgen.ops.embedding import embedding, embedding_reference
from fastgen.ops.selection.kbest import LogitsUpdates, SparseUpdate, kbest, kbest_reference
from fastgen.ops.selection.ngram_block import ngram_block_reference, ngram_mask_
from fastgen.ops.selection.token_mask import (
    add_tokens_,
    add_tokens_reference,
    empty_mask,
    packed,
    unpacked,
)
from fastgen.ops.tables import (
    Table,
    extend_rows_,
    extend_rows_reference,
    finish_rows_,
    finish_rows_reference,
)
from tests.ops.test_native import variant  # noqa: F401  a fixture
from tests.support import zoo
from tests.support.parity import assert_same

INF = torch.inf


@pytest.fixture(autouse=True, params=[1, 3])
def _threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "threads_for", lambda work: request.param)


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _integers(*shape: int, below: int, seed: int = 0) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


def _same(found: Any, wanted: Any) -> None:
    assert torch.equal(found.indices, wanted.indices)
    torch.testing.assert_close(found.values, wanted.values, atol=1e-5, rtol=1e-6)


# k-best.


@pytest.mark.parametrize(
    ("b", "m", "v", "k"), [(1, 1, 65, 1), (3, 4, 127, 8), (2, 5, 1_000, 10), (1, 4, 50_264, 8)]
)
def test_of_logits(variant: str, b: int, m: int, v: int, k: int) -> None:  # noqa: F811
    """Log-probabilities are not stored; logits may be strided, and are not modified."""
    room, scores = _randn(b, m, v + 3) * 4, _randn(b, m, seed=1)
    logits = room[:, :, :v]
    before = room.clone()
    _same(kbest(logits, scores, k), kbest_reference(logits, scores, k))
    assert torch.equal(room, before)
    assert calls == {("kbest", "native"): 1}


@pytest.mark.parametrize("v", [64, 129, 1_000])
def test_of_logits_with_bans(variant: str, v: int) -> None:  # noqa: F811
    """Ban tokens per row, for all rows, and each row's best; the sum includes banned tokens."""
    logits, scores = _randn(3, 4, v) * 3, _randn(3, 4, seed=1)
    each = packed(_randn(12, v, seed=2) > 1)
    best = packed(logits.flatten(0, 1) == logits.flatten(0, 1).amax(1, keepdim=True))
    last = packed((torch.arange(v) >= v - 30)[None])
    for banned in (each, best, last.expand(12, -1), torch.zeros_like(each)):
        updates = LogitsUpdates(banned=banned)
        _same(kbest(logits, scores, 8, updates), kbest_reference(logits, scores, 8, updates))
    assert calls == {("kbest", "native"): 4}


def test_of_logits_where_few_are_left(variant: str) -> None:  # noqa: F811
    """If fewer than K tokens are not banned, torch orders the others."""
    logits, scores = _randn(2, 2, 70), _randn(2, 2, seed=1)
    sets = torch.ones(4, 70, dtype=torch.bool)
    sets[:, 11:14] = False
    updates = LogitsUpdates(banned=packed(sets))
    _same(kbest(logits, scores, 8, updates), kbest_reference(logits, scores, 8, updates))


@pytest.mark.parametrize("bad", [torch.nan, INF])
def test_of_logits_that_are_no_numbers(variant: str, bad: float) -> None:  # noqa: F811
    logits, scores = _randn(2, 2, 200), _randn(2, 2, seed=1)
    logits[0, 0, 3] = bad
    found, wanted = (best(logits, scores, 4, without_nan=True) for best in (kbest, kbest_reference))
    _same(found, wanted)
    assert torch.equal(
        kbest(logits, scores, 4).values.isnan(), kbest_reference(logits, scores, 4).values.isnan()
    )


@pytest.mark.parametrize(
    "given",
    [
        {"bias": _randn(300, seed=3)},
        {"temperature": 0.7},
        {"updates": LogitsUpdates(forced=torch.tensor([4, -1, 9, -1, -1, 299]))},
        {
            "updates": LogitsUpdates(
                SparseUpdate(torch.tensor([[5]] * 6), torch.full((6, 1), 0.5), torch.zeros(6, 1))
            )
        },
    ],
)
def test_of_logits_with_more(variant: str, given: dict[str, Any]) -> None:  # noqa: F811
    logits, scores = _randn(2, 3, 300), _randn(2, 3, seed=1)
    _same(kbest(logits, scores, 2, **given), kbest_reference(logits, scores, 2, **given))


def test_of_logits_the_sum_is_asked_for(variant: str) -> None:  # noqa: F811
    logits, scores = _randn(2, 3, 300), _randn(2, 3, seed=1)
    sums = kbest(logits, scores, 2, normalisers=True).normalisers
    assert sums is not None
    torch.testing.assert_close(sums, logits.logsumexp(2))


OPTIONS: dict[str, tuple[dict[str, Any], int]] = {
    "beams": ({"num_beams": 4}, 0),
    "bans": ({"num_beams": 3, "suppress_tokens": [5, 9], "min_new_tokens": 4}, 0),
    "n-grams": ({"num_beams": 4, "no_repeat_ngram_size": 2, "suppress_tokens": [7]}, 0),
    "penalty": ({"num_beams": 4, "repetition_penalty": 1.3}, 1),
    "scores": ({"num_beams": 4, "output_scores": True, "return_dict_in_generate": True}, 1),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_calls(variant: str, option: str) -> None:  # noqa: F811
    """Log-probabilities are stored only if transforms change some, or a caller needs them."""
    kwargs, written = OPTIONS[option]
    model = zoo.build("bart", torch.float32)
    assert (
        assert_same(
            model, zoo.batch(model, 3, 7) | kwargs | {"max_new_tokens": 15}, tolerance=1e-4
        ).error
        is None
    )
    assert calls["kbest", "native"] > 5
    assert (calls["log_softmax", "native"] > 5) == bool(written)


# Tables.


def _growing(b: int, m: int, n: int, prefix: int, seed: int) -> list[Table]:
    """Return tables of tokens, of the rows they came from, and of the ancestry of beams.

    The rows' newest values have a wider integer dtype; ancestry grows by several columns a step.
    """
    tokens, came_from = (
        _integers(b, m, n, below=900, seed=seed),
        _integers(b, m, n, below=900).to(torch.int32),
    )
    own = _randn(m, m).expand(b, -1, -1)
    return [
        Table(tokens, _integers(b, m, below=900, seed=seed + 1)[:, :, None], prefix),
        Table(came_from, _integers(b, m, 2, below=2**30, seed=seed + 2)[:, :, 1:]),
        Table(_randn(b, m, n * m), own),
    ]


@pytest.mark.parametrize(("b", "m"), [(1, 1), (3, 4), (5, 7)])
def test_extend_rows(variant: str, b: int, m: int) -> None:  # noqa: F811
    for steps, prefix in itertools.product((0, 1, 6), (0, 2)):
        tables, parents = _growing(b, m, 9, prefix, seed=steps), _integers(b, m, below=m)
        wanted = [extend_rows_reference(table, parents, steps) for table in tables]
        extend_rows_(tables, parents.t().contiguous().t(), steps)
        for table, rows in zip(tables, wanted, strict=True):
            assert torch.equal(table.rows, rows)
    assert calls == {("tables", "native"): 6}


@pytest.mark.parametrize(("b", "m", "k"), [(1, 1, 2), (3, 4, 8), (2, 5, 15)])
def test_finish_rows(variant: str, b: int, m: int, k: int) -> None:  # noqa: F811
    for steps, prefix in itertools.product((0, 1, 6), (0, 2)):
        running = _growing(b, m, 9, prefix, seed=steps)[:2]
        tables = [
            table._replace(newest=_integers(b, k, below=900, seed=7)[:, :, None])
            for table in running
        ]
        finished = [_integers(*table.rows.shape, below=99).to(table.rows.dtype) for table in tables]
        order, beams = _integers(b, m, below=m + k, seed=3), _integers(b, k, below=m, seed=4)
        wanted = [
            finish_rows_reference(f, t, order, beams, steps)
            for f, t in zip(finished, tables, strict=True)
        ]
        finish_rows_(finished, tables, order, beams, steps)
        for rows, expected in zip(finished, wanted, strict=True):
            assert torch.equal(rows, expected)
    assert calls == {("tables", "native"): 6}


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table._replace(newest=table.newest.double()),
        lambda table: table._replace(rows=table.rows.transpose(1, 2).contiguous().transpose(1, 2)),
    ],
)
def test_tables_left_to_torch(variant: str, change: Callable[[Table], Table]) -> None:  # noqa: F811
    """A dtype that would need rounding, and rows that are not contiguous."""
    table = change(Table(_randn(2, 3, 8), _randn(2, 3, 1)))
    parents = _integers(2, 3, below=3)
    wanted = extend_rows_reference(table, parents, 2)
    extend_rows_([table], parents, 2)
    assert torch.equal(table.rows, wanted)
    assert calls == {("tables", "reference"): 1}


def test_no_memory_for_tables(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    by = native.library()
    assert by is not None
    monkeypatch.setattr(native, "library", lambda *_: by._replace(move_rows=lambda *_: 0))
    with pytest.raises(torch.OutOfMemoryError, match="no memory for 3 rows of 12 bytes"):
        extend_rows_([Table(_randn(2, 3, 8), _randn(2, 3, 1))], _integers(2, 3, below=3), 2)


def test_move_sentences(variant: str) -> None:  # noqa: F811
    for dtype in (torch.float32, torch.int64, torch.bfloat16):
        buffer = (_randn(6, 3, 20, 5) * 9).to(dtype)
        wanted = buffer.clone()
        wanted[[1, 0], :, :17] = wanted[[5, 4], :, :17]
        move_sentences_(buffer[:, :, :17], torch.tensor([1, 0]), torch.tensor([5, 4]))
        assert torch.equal(buffer, wanted)
        move_sentences_(buffer, *torch.zeros(2, 0, dtype=torch.int64))
        assert torch.equal(buffer, wanted)
    assert calls["cache", "native"] == 3


# Token sets.


@pytest.mark.parametrize("v", [20, 64, 100])
def test_add_tokens(variant: str, v: int) -> None:  # noqa: F811
    """Tokens are added to the set; those outside the vocabulary are ignored.

    Unused bits of the last word stay clear.
    """
    before = packed(_randn(5, v) > 1)
    for rows in (1, 5):
        tokens = _integers(rows, 9, below=v + 40, seed=1) - 20
        wanted = add_tokens_reference(before, tokens, v)
        assert torch.equal(add_tokens_(before.clone(), tokens, v), wanted)
        assert torch.equal(add_tokens_(before.clone(), tokens.t().contiguous().t(), v), wanted)
    assert calls == {("token_mask", "native"): 4}


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("with_source", [False, True])
def test_repeated_ngrams(variant: str, n: int, with_source: bool) -> None:  # noqa: F811
    for length in (1, 4, 30):
        ids, scores = _integers(6, length + 2, below=4)[:, :length], torch.zeros(6, 33)
        source = _integers(3, 17, below=4, seed=1) if with_source else None
        banned = ngram_block_reference(scores, ids, n, source).isinf()
        mask = ngram_mask_(empty_mask(6, 33, ids.device), ids, n, 33, source)
        assert torch.equal(unpacked(mask, 33), banned)
    assert calls["ngram_block", "native"] > 0


# Embeddings.


@pytest.mark.parametrize("scale", [1.0, 5.5])
def test_embedding(variant: str, scale: float) -> None:  # noqa: F811
    tokens, row, other = _randn(50, 33), _randn(33, seed=1), _randn(33, seed=2)
    ids = _integers(7, 4, below=50)[:, 2]
    ids[3] = 9
    rows, others = _randn(7, 40, seed=3)[:, :33], _randn(7, 33, seed=4)  # of each id
    each = (rows,), (rows, (9, others)), (rows, (9, other)), (row, (9, others))
    for given in ((), (row,), (row, (9, other)), *each):
        found, wanted = (
            embedding(ids, tokens, scale, *given),
            embedding_reference(ids, tokens, scale, *given),
        )
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)
    assert calls == {("embedding", "native"): 7}
    for outside in (50, -1):
        with pytest.raises(IndexError):
            embedding(torch.tensor([1, outside]), tokens, scale)


def test_embedding_of_parameters(variant: str) -> None:  # noqa: F811
    tokens = torch.nn.Parameter(_randn(50, 32))
    with torch.no_grad():
        embedding(torch.tensor([3]), tokens, 2.0)
    assert calls == {("embedding", "native"): 1}


@pytest.mark.parametrize("norm_tokens", [False, True])
def test_padding_and_a_norm(variant: str, norm_tokens: bool) -> None:  # noqa: F811
    """A padding token has its own position, whether the norm covers only the tokens or the sum."""
    norm = Norm(_randn(32, seed=5), None, 1e-5)
    made = Embedding(_randn(50, 32), 2.0, _randn(9, 32, seed=1), 2, 7, 0, norm, norm_tokens)
    ids, (tokens, positions) = torch.tensor([3, 7, 4]), (made.tokens, made.positions)
    assert positions is not None
    rows = positions[[5, 0, 5]]
    wanted = norm(2 * tokens[ids])[0] + rows if norm_tokens else norm(2 * tokens[ids] + rows)[0]
    torch.testing.assert_close(made(ids, 3), wanted, atol=1e-5, rtol=1e-5)


def test_disabled(variant: str) -> None:  # noqa: F811
    model = zoo.build("bart", torch.float32)
    with fastgen.disabled():
        model.generate(**zoo.batch(model, 2, 5), num_beams=2, max_new_tokens=5)
    assert not calls
