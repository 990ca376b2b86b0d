"""Products with weights in int8 in C against torch, for every instruction set."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastgen.ops import int8, native
from fastgen.ops.activation import FUNCTIONS
from fastgen.ops.counts import calls
from fastgen.ops.native import products as native_products
from tests.ops.test_native import variant  # noqa: F401  a fixture

SHAPES = [(1, 1), (16, 32), (40, 512), (130, 513), (1100, 64), (64, 1030), (129, 31), (17, 2)]
"""Outputs and inputs: whole and partial panels, whole and partial groups of four inputs."""

ROWS = [0, *range(1, 8), 11, 12, 13, 16, 33, 150, 301]
DTYPES = list(native.DTYPES)


@pytest.fixture(params=["at once", "by parts"])
def by(
    request: pytest.FixtureRequest,
    variant: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[native.Library]:
    """Run products with the instruction for dot products of bytes, if there is one, and without."""
    library = native.found().library
    assert library is not None
    if request.param == "by parts":
        library = library._replace(can_dot=False)
    elif not library.can_dot:
        pytest.skip("this processor has no instruction for dot products of bytes")
    monkeypatch.setattr(native, "found", lambda: native.Found(variant, library))
    yield library
    assert native.library() is library


def _randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _packed(by: native.Library, weight: Tensor) -> native_products.Int8Weight:
    return native_products.packed_bytes(by, *int8.rounded(weight))


def _assert_equal(by: native.Library, x: Tensor, weight: Tensor) -> Tensor:
    """Check that C gives the very numbers of the reference; return them."""
    packed, before = _packed(by, weight), [x.clone(), weight.clone()]
    found = int8.int8_linear(x, packed)
    assert all(map(torch.equal, before, (x, weight)))
    wanted = int8.int8_linear_reference(x, int8.rounded(weight))
    assert found.dtype == x.dtype
    assert torch.equal(found, wanted)
    assert not x.numel() or calls["int8_linear", "native"]
    assert all(map(torch.equal, int8.unpacked(packed), int8.rounded(weight)))
    return found


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_are_exact(
    by: native.Library, shape: tuple[int, int], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All instruction sets give the numbers of torch, bit for bit, for any number of rows."""
    monkeypatch.setattr(native, "threads_for", lambda work: threads)
    weight = _randn(*shape, seed=1)
    for rows in ROWS:
        x = _randn(rows, shape[1])
        found = _assert_equal(by, x, weight)
        exact = x.double() @ weight.double().T
        if rows and shape[1] > 30:  # a rounded product is near the product
            assert (found - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_after_the_product(by: native.Library, dtype: torch.dtype) -> None:
    """Bias, activation and residual sum; each rounds once, as separate operations do."""
    for rows in (1, 5, 14):
        for outputs, inputs in ((40, 48), (129, 31)):
            x, weight = _randn(rows, inputs, dtype=dtype), _randn(outputs, inputs, seed=1).to(dtype)
            bias, residual = _randn(outputs, dtype=dtype), _randn(rows, outputs, seed=3).to(dtype)
            packed = _packed(by, weight)
            for kind in (None, *FUNCTIONS):
                found = int8.int8_linear(x, packed, bias, kind, residual)
                given = x, int8.rounded(weight), bias, kind, residual
                wanted = int8.int8_linear_reference(*given)
                tolerance = 2 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
                torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("signs", [(1, 1), (-1, 1), (1, -1), (-1, -1)], ids=str)
def test_largest_numbers(by: native.Library, signs: tuple[int, int]) -> None:
    """127 times 127 everywhere: sums of pairs and of fours do not saturate."""
    for inputs in (4, 6, 64, 4099):
        x, weight = (
            torch.full((size, inputs), float(sign))
            for size, sign in zip((7, 33), signs, strict=True)
        )
        found = _assert_equal(by, x, weight)
        torch.testing.assert_close(found, torch.full((7, 33), float(inputs * signs[0] * signs[1])))
        weight[::2, 1::2] *= -1  # alternating signs within pairs
        _assert_equal(by, x, weight)


@pytest.mark.skipif(not Path("/proc/cpuinfo").is_file(), reason="not Linux")
@pytest.mark.parametrize(("name", "flag"), [("avx2", "avx_vnni"), ("avx512", "avx512_vnni")])
def test_dot_products_are_detected(variant: str, name: str, flag: str) -> None:  # noqa: F811
    library = native.found().library
    if variant != name or library is None:
        pytest.skip("another instruction set")
    assert library.can_dot == (flag in Path("/proc/cpuinfo").read_text("utf-8").split())


class _LargestMade(TorchDispatchMode):
    """Notes the bytes of the largest storage that an operation returns."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if isinstance(result, Tensor) and result.dtype != torch.bfloat16:
            self.nbytes = max(self.nbytes, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("shape", [(150, 513), (1100, 64), (64, 1030)], ids=str)
def test_packing_by_parts(
    by: native.Library, shape: tuple[int, int], transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight is packed some panels at a time, so no copy of it in fp32 is made."""
    weight = _randn(*shape, seed=1, dtype=torch.bfloat16)
    if transposed:
        weight = weight.t().contiguous().t()
    wanted = _packed(by, weight)
    monkeypatch.setattr(int8, "ROUNDED_AT_ONCE", 2**12)
    with _LargestMade() as made:
        packed = int8.pack(weight)
    assert packed is not None
    assert packed.outputs == wanted.outputs
    assert packed.inputs == wanted.inputs
    assert all(map(torch.equal, packed[:3], wanted[:3]))
    assert made.nbytes <= max(packed.panels.nbytes, 4 * by.panel * shape[1], 4 * 2**12)


def test_most_inputs(by: native.Library) -> None:
    """The largest sums fit 32 bits."""
    x, weight = torch.ones(1, int8.MOST_INPUTS), -torch.ones(16, int8.MOST_INPUTS)
    assert torch.equal(_assert_equal(by, x, weight), torch.full((1, 16), -float(int8.MOST_INPUTS)))
    assert not int8.supported(16, int8.MOST_INPUTS + 1)


def test_rows_of_zeros_and_outliers(by: native.Library) -> None:
    """Zeros stay zeros, in x and in the weight; an outlier leaves zeros beside it."""
    x, weight = _randn(9, 70), _randn(40, 70, seed=1)
    x[2], x[4] = 0.0, -0.0
    x[3, 7], x[5] = 1e6, 1e-35
    x[6] *= 1e-28
    x[7, :-1] = 0.0
    weight[5], weight[39] = 0.0, 0.0
    weight[6, 3] = -1e5
    found = _assert_equal(by, x, weight)
    assert not found[[2, 4, 5]].any()
    assert not found[:, [5, 39]].any()


def test_ties_are_rounded_to_even(by: native.Library) -> None:
    numbers = torch.arange(-127, 127) + 0.5
    x = torch.cat([numbers, torch.tensor([127.0])])[None]
    _assert_equal(by, x, torch.eye(255))


def test_nan_and_infinity_reach_all_of_their_row(by: native.Library) -> None:
    for value in (torch.nan, torch.inf, -torch.inf):
        for place in (0, 17, 69):
            x = _randn(3, 70)
            x[1, place] = value
            found = int8.int8_linear(x, _packed(by, _randn(20, 70, seed=1)))
            assert found[1].isnan().all()
            assert found[[0, 2]].isfinite().all()


def test_strided_rows_and_more_dimensions(by: native.Library) -> None:
    weight, wide = _randn(40, 50, seed=1), _randn(6, 64)
    packed = _packed(by, weight)
    wanted = int8.int8_linear_reference(wide[:, :50], int8.rounded(weight))
    assert torch.equal(int8.int8_linear(wide[:, :50], packed), wanted)
    assert torch.equal(
        int8.int8_linear(wide[:, :50].reshape(2, 3, 50), packed), wanted.view(2, 3, 40)
    )


def test_left_to_torch(by: native.Library) -> None:
    """Where C cannot run, torch gives the same numbers from the same bytes."""
    x, weight = _randn(3, 50).double(), _randn(40, 50, seed=1)
    wanted = int8.int8_linear_reference(x, int8.rounded(weight))
    assert torch.equal(int8.int8_linear(x, _packed(by, weight)), wanted)
    assert calls["int8_linear", "reference"] == 1


def test_bytes(by: native.Library) -> None:
    for outputs, inputs in ((16, 32), (640, 513), (1100, 64)):
        packed = int8.pack(_randn(outputs, inputs))
        assert packed is not None
        assert packed.nbytes == int8.bytes_to_pack(outputs, inputs)
    assert int8.pack(_randn(3, 50)) is None  # too few outputs
    assert int8.bytes_to_pack(3, 50) == 0
