"""The highest logit by bounds of an int8 copy, for every instruction set: that of all logits."""

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgen.ops import int8, logit_bounds, native
from fastgen.ops.logit_bounds import ErrorBounds
from fastgen.ops.native import products
from fastgen.ops.selection.token_mask import empty_mask
from tests.ops.test_int8 import by  # noqa: F401  a fixture
from tests.ops.test_native import variant  # noqa: F401  a fixture

SHAPES = [(70, 1), (64, 2), (99, 3), (300, 511), (130, 512), (300, 513), (4097, 33), (9000, 65)]
"""Vocabulary and inputs: odd, whole and partial pieces of a sum, one and several chunks."""


class _Head:
    """A head, its copy and its bounds."""

    def __init__(
        self,
        by: native.Library,  # noqa: F811
        weight: Tensor,
        bias: Tensor | None = None,
        bounds: ErrorBounds | None = None,
    ) -> None:
        self.by, self.weight, self.bias = by, weight, bias
        self.copy = products.packed_bytes(by, *int8.rounded(weight))
        found = bounds or logit_bounds.error_bounds(weight)
        assert found is not None
        self.bounds, self.counts = found, torch.zeros(3, dtype=torch.int64)
        record = logit_bounds.record_of(by, weight, self.copy, found, bias, self.counts)
        assert record is not None
        self.record = record

    def logits(self, x: Tensor) -> Tensor:
        """Return all logits (R, V) fp32, by the product in C."""
        panels = products.packed(self.by, self.weight)
        out = torch.empty(len(x), len(self.weight), dtype=self.weight.dtype)
        x = x.to(out.dtype)
        return products.product(self.by, x, panels, self.bias, None, None, out).float()

    def find(self, x: Tensor, banned: Tensor | None = None) -> Tensor | None:
        return logit_bounds.find_highest(self.by, x, self.record, self.weight.dtype, banned)

    def upper(self, x: Tensor) -> Tensor:
        """Return the upper bounds (R, V) of the logits."""
        tokens, held = torch.empty(len(x), dtype=torch.int64), x.new_empty(len(x), 2, self.size)
        self.by.find_by_bounds(
            self.by.run, 1, tokens.data_ptr(), x.data_ptr(), held.data_ptr(), None,
            ctypes.addressof(self.record), len(x), native.DTYPES[self.weight.dtype],
        )  # fmt: skip
        return held[:, 0]

    @property
    def size(self) -> int:
        return len(self.weight)

    def check(self, x: Tensor, banned: Tensor | None = None) -> None:
        """Check that the highest of all logits are found, the first of equal ones."""
        logits = self.logits(x)
        if banned is not None:
            words = torch.arange(self.size)
            out = banned[:, words // 32] >> (words % 32) & 1
            logits = logits.masked_fill(out.bool(), -torch.inf)
        found = self.find(x, banned)
        assert found is not None
        assert found.tolist() == _first_highest(logits)


def _first_highest(logits: Tensor) -> list[int]:
    highest = logits == logits.amax(1, keepdim=True)
    return highest.int().argmax(1).tolist()  # the first, as `int` has ties


def _randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _x(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return _randn(*shape, seed=seed, dtype=dtype).float()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", logit_bounds.DTYPES, ids=str)
def test_shapes(by: Any, dtype: torch.dtype, threads: int, monkeypatch: Any) -> None:  # noqa: F811
    monkeypatch.setattr(native, "threads_for", lambda work: threads)
    for seed, shape in enumerate(SHAPES):
        bias = _randn(shape[0], seed=seed + 9, dtype=dtype) if seed % 2 else None
        head = _Head(by, _randn(*shape, seed=seed, dtype=dtype), bias)
        head.record.most = shape[0]
        for rows in (1, 2, 3, 4, 7):
            head.check(_x(rows, shape[1], seed=50 + seed, dtype=dtype))
        assert head.counts.tolist() == [5, 5, 0]


@pytest.mark.parametrize("dtype", logit_bounds.DTYPES, ids=str)
def test_the_bounds_hold(by: Any, dtype: torch.dtype) -> None:  # noqa: F811
    """They are no lower than the logits, and near them."""
    for seed, scale in enumerate((1.0, 1e-12, 1e-35, 1e15)):
        weight, x = _randn(200, 300, seed=seed) * 0.1, _x(2, 300, seed=seed, dtype=dtype)
        weight[::7] *= torch.linspace(0.5, 30, 29)[:, None]
        weight[3:9, 5] += 40
        x[0, 17] *= 100
        head = _Head(by, (weight * scale).to(dtype), _randn(200, dtype=dtype))
        # Rounding a logit may raise it by half of the space between two numbers of bf16.
        rounding = 0.0 if dtype == torch.float32 else 2**-8
        logits, upper = head.logits(x), head.upper(x)
        assert (upper >= logits - logits.abs() * rounding).all()
        size = x.norm(dim=1)[:, None] * head.weight.float().norm(dim=1) + 1.0
        assert ((upper - logits) < 0.1 * size).all()


@pytest.mark.parametrize("dtype", logit_bounds.DTYPES, ids=str)
def test_ties(by: Any, dtype: torch.dtype) -> None:  # noqa: F811
    """The first of equal logits wins, also if rounding to bf16 makes them equal."""
    weight, x = _randn(500, 64, dtype=dtype), _x(1, 64, dtype=dtype)
    best = int((x @ weight.float().T).argmax())
    for places in ([490, 499], [3, 470], [best + 1, 17, 18]):
        tied = weight.clone()
        tied[places] = weight[best]
        head = _Head(by, tied)
        found = head.find(x)
        assert found is not None
        assert found.item() == min([best, *places])
    if dtype == torch.bfloat16:
        near = weight[best] * (1 + 2**-7 * (_randn(15, 64) > 1.5)).to(dtype)
        tied = weight.clone()
        tied[100:115] = near
        head = _Head(by, tied)
        assert (head.logits(x) == head.logits(x).max()).sum() > 1
        head.check(x)


@pytest.mark.parametrize("dtype", logit_bounds.DTYPES, ids=str)
def test_the_copy_prefers_another_token(by: Any, dtype: torch.dtype) -> None:  # noqa: F811
    """Rounding errors that all have one sign hide the best token; its bound does not."""
    inputs = 96
    weight, x = torch.zeros(80, inputs), torch.ones(1, inputs)
    weight[:, 0] = 127.0  # the scale is 1
    weight[:60, 1:] = 2.0
    weight[70, 1:] = 2.48
    head = _Head(by, weight.to(dtype))
    values, scales = int8.rounded(weight.to(dtype))
    assert values[70].equal(values[0])
    assert scales[70] == scales[0]
    head.check(x)
    assert head.find(x) is not None
    wrong = ErrorBounds(torch.zeros_like(head.bounds.errors), 0.0)
    found = _Head(by, weight.to(dtype), bounds=wrong).find(x)
    assert found is None or found.item() != 70  # so this test depends on the bounds


@pytest.mark.parametrize("dtype", logit_bounds.DTYPES, ids=str)
def test_outliers(by: Any, dtype: torch.dtype) -> None:  # noqa: F811
    for seed in range(6):
        weight, x = _randn(700, 130, seed=seed), _x(3, 130, seed=seed + 7)
        weight[seed], weight[50 + seed] = 0.0, weight[50 + seed] * 1e3
        weight[:, seed] *= 20
        x[:, 2 * seed] *= 1e4
        x[1] *= 1e-9
        x = x.to(dtype).float()
        head = _Head(by, weight.to(dtype), _randn(700, dtype=dtype) if seed % 2 else None)
        head.record.most = 700
        head.check(x)


@pytest.mark.parametrize("dtype", logit_bounds.DTYPES, ids=str)
def test_all_logits_are_needed(by: Any, dtype: torch.dtype) -> None:  # noqa: F811
    weight = _randn(300, 40, dtype=dtype)
    for x in (torch.zeros(1, 40), torch.full((1, 40), 1e-36)):
        assert _Head(by, weight).find(x) is None  # all are equal, or nearly so
    equal = _Head(by, weight[:1].repeat(300, 1))
    assert equal.find(_x(1, 40, dtype=dtype)) is None
    for value in (torch.nan, torch.inf, -torch.inf, 3e38):
        x = _x(3, 40, dtype=dtype)
        x[1, 33] = value
        head = _Head(by, weight)
        assert head.find(x) is None
        assert head.counts.tolist() == [1, 1, 1]
    with_zeros = _Head(by, torch.cat([weight[:3], torch.zeros(297, 40, dtype=dtype)]))
    # The zeros are the best, and exactly equal.
    x = -with_zeros.weight[:3].float().sum(0, keepdim=True)
    assert with_zeros.find(x) is None


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_heads_without_bounds(by: Any, value: float) -> None:  # noqa: F811
    weight, bias = _randn(90, 20), torch.zeros(90)
    head = _Head(by, weight)
    bias[5] = value
    assert logit_bounds.record_of(by, weight, head.copy, head.bounds, bias, head.counts) is None
    weight[80, 3] = value
    assert logit_bounds.error_bounds(weight) is None


@pytest.mark.parametrize("dtype", logit_bounds.DTYPES, ids=str)
def test_banned_tokens(by: Any, dtype: torch.dtype) -> None:  # noqa: F811
    head = _Head(by, _randn(9001, 48, dtype=dtype))
    x = _x(3, 48, dtype=dtype)
    banned = empty_mask(3, 9001, torch.device("cpu"))
    for row, order in enumerate(head.logits(x).argsort(1, descending=True)[:, :5]):
        for token in order[:row].tolist():  # none of the first row
            banned[row, token // 32] |= torch.tensor(1 << token % 32).to(torch.int32)
    head.check(x, banned)
    without, free = head.find(x, banned), head.find(x)
    assert without is not None
    assert free is not None
    assert (without == free).tolist() == [True, False, False]
    banned[1] = -1
    assert head.find(x, banned) is None


def test_a_head_that_has_too_many_candidates_is_given_up(by: Any) -> None:  # noqa: F811
    head = _Head(by, _randn(300, 40))
    x = torch.zeros(1, 40)
    for _ in range(30):
        assert head.find(x) is None
    counts = head.counts.tolist()
    assert counts[0] == 30
    assert counts[1] == counts[2] < 10
    for tried, missed, goes_on in ((0, 4, True), (3, 5, False), (4, 5, True), (80, 25, False)):
        head.counts[1:] = torch.tensor([tried, missed])
        assert (head.find(_x(1, 40)) is not None) == goes_on


def test_what_rounding_a_row_leaves(by: Any) -> None:  # noqa: F811
    """A token may gain all that the two rows of bytes lack, though its weights have no error."""
    x, weight = _x(1, 24), 127.0 * _randn(90, 24, seed=1).sign()
    values, scales = int8.rounded(x)
    high = values.float() * scales[:, None]
    values, scales = int8.rounded(x - high)
    low = values.float() * scales[:, None]
    left = x.double() - high - low
    weight[7] = 127.0 * left[0].sign()
    head = _Head(by, weight)
    assert head.bounds.errors.max() == 0.0
    rounding = 1.01 * (24 + 32) * 2**-24 * head.bounds.longest
    most = rounding * sum(float(each.norm()) for each in (x, high, low))
    assert float(left[0] @ weight[7].double()) > 1.2 * most  # so this test depends on it
    assert float(head.upper(x)[0, 7]) >= float(x[0].double() @ weight[7].double())
    head.check(x)
