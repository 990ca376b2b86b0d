"""Products in C with weights of 16 bits against torch, for every instruction set."""

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fastgen.ops import cpu_rules, native, processor
from fastgen.ops import linear as linear_ops
from fastgen.ops.activation import FUNCTIONS
from fastgen.ops.counts import calls
from fastgen.ops.native import build
from fastgen.ops.native import products as native_products
from tests.ops.test_native import variant  # noqa: F401  a fixture

INF = torch.inf
HALVES = [torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (16, 32), (40, 512), (130, 513), (1100, 64), (64, 1030), (129, 31)]
"""Outputs and inputs: whole and partial panels, one pass over the inputs or several."""


def _randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _all_numbers(dtype: torch.dtype) -> Tensor:
    """Return all bit patterns of a half precision, (65536,)."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def _by() -> native.Library:
    by = native.found().library
    assert by is not None
    return by


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None, **given: object) -> Tensor:
    by, out = _by(), x.new_full((*x.shape[:-1], len(weight)), torch.nan)
    options = {"activation": None, "residual": None} | given
    return native_products.product(
        by, x, native_products.packed(by, weight), bias, out=out, **options
    )  # type: ignore


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [0, 1, 4, 7, 13, 301])
@pytest.mark.parametrize("dtype", HALVES)
def test_products(
    variant: str,  # noqa: F811
    dtype: torch.dtype,
    rows: int,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sums are fp32, and each operation after them rounds once, as separate operations do."""
    monkeypatch.setattr(native, "threads_for", lambda work: threads)
    for outputs, inputs in SHAPES:
        x, weight = _randn(rows, inputs, dtype=dtype), _randn(outputs, inputs, dtype=dtype, seed=1)
        bias, residual = (
            _randn(*shape, dtype=dtype, seed=2) for shape in ((outputs,), x.shape[:1])
        )
        residual = residual[:, None].expand(-1, outputs)
        before = [each.clone() for each in (x, weight, bias, residual)]
        total = x.double() @ weight.double().T
        _check(_product(x, weight), total.to(dtype))
        _check(_product(x, weight, bias), (total + bias).to(dtype))
        for kind, function in FUNCTIONS.items():
            wanted = function((total + bias).to(dtype).float()).to(dtype) + residual
            _check(_product(x, weight, bias, activation=kind, residual=residual), wanted)
        assert all(map(torch.equal, before, (x, weight, bias, residual)))


def _check(found: Tensor, wanted: Tensor) -> None:
    """Check that nearly all values are equal, and the others adjacent, as fp32 sums differ."""
    assert found.dtype == wanted.dtype
    tolerance = 2 * torch.finfo(wanted.dtype).eps
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    assert not found.numel() or (found == wanted).double().mean() > 0.9


@pytest.mark.parametrize("dtype", HALVES)
def test_all_numbers_are_read(variant: str, dtype: torch.dtype) -> None:  # noqa: F811
    """Infinities and NaN included; also where the last panel is not full.

    Instructions for pairs of bf16, which torch uses too, take subnormal numbers as 0.
    """
    for numbers in (_all_numbers(dtype), _all_numbers(dtype)[5:-9]):
        found = _product(torch.ones(1, 1, dtype=dtype), numbers[:, None])
        wanted = torch.where(_is_subnormal(numbers), 0, numbers) if _by_pairs(dtype) else numbers
        torch.testing.assert_close(found[0], wanted, rtol=0, atol=0, equal_nan=True)


def _by_pairs(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and native.found().variant == "avx512_bf16"


def _is_subnormal(numbers: Tensor) -> Tensor:
    return (numbers != 0) & (numbers.abs() < torch.finfo(numbers.dtype).smallest_normal)


@pytest.mark.parametrize("dtype", HALVES)
def test_sums_are_rounded_to_nearest(variant: str, dtype: torch.dtype) -> None:  # noqa: F811
    """Ties go to even, and sums beyond the range become infinite."""
    numbers = _all_numbers(dtype)
    finite = numbers[numbers.isfinite()]
    if _by_pairs(dtype):
        finite = finite[~_is_subnormal(finite)]
    one = torch.ones(1, 1, dtype=dtype)
    for seed in range(3):
        order = torch.randperm(len(finite), generator=torch.Generator().manual_seed(seed))
        bias = finite[order] * torch.tensor([1, 2**-9, 2**-11][seed], dtype=dtype)
        found = _product(one, finite[:, None], bias)
        assert torch.equal(found[0], finite + bias)
    # Half of the last bit more, and a little more than that.
    last = torch.finfo(dtype).eps
    weight = torch.tensor([1.0, 1 + last, 1.0, -1 - last], dtype=dtype)[:, None]
    bias = torch.tensor([last / 2, last / 2, last / 2 * (1 + last), -last / 2], dtype=dtype)
    wanted = torch.tensor([[1.0, 1 + 2 * last, 1 + last, -1 - 2 * last]], dtype=dtype)
    assert torch.equal(_product(one, weight, bias), wanted)
    highest = torch.full((1, 1), torch.finfo(dtype).max, dtype=dtype)
    assert _product(one * 2, highest).isinf().all()


@pytest.mark.parametrize("dtype", HALVES)
def test_linear(variant: str, dtype: torch.dtype) -> None:  # noqa: F811
    """Weights are packed in their own dtype, in half of the bytes of fp32."""
    x, weight, bias = (
        _randn(2, 3, 70, dtype=dtype),
        _randn(100, 70, dtype=dtype, seed=1),
        _randn(100, dtype=dtype, seed=2),
    )
    form = linear_ops.pack(weight)
    assert isinstance(form, linear_ops.PanelWeight)
    assert torch.equal(form.unpacked(), weight)
    size = linear_ops.bytes_to_pack(100, 70, dtype)
    assert form.nbytes == size == linear_ops.bytes_to_pack(100, 70) // 2
    assert linear_ops.suits(form, 100, 70)
    _check(linear_ops.linear(x, form, bias), torch.nn.functional.linear(x, weight, bias))
    assert calls == {("linear", "native"): 1}


@pytest.mark.parametrize("shape", [(130, 70), (130, 71), (64, 2), (16, 1)])
def test_layouts_of_weights(variant: str, shape: tuple[int, int]) -> None:  # noqa: F811
    """A weight is packed alike whether or not its pairs can be moved as they lie in memory."""
    weight, by = _randn(*shape, dtype=torch.bfloat16), _by()
    wanted = native_products.packed(by, weight)
    shifted = torch.cat([weight.new_zeros(1), weight.flatten()])[1:].view(shape)
    for other in (weight.T.contiguous().T, shifted):
        assert torch.equal(native_products.packed(by, other), wanted)
    form = linear_ops.PanelWeight(wanted, *shape)
    assert torch.equal(form.unpacked(), weight)


def test_other_dtypes_are_left_to_torch(variant: str) -> None:  # noqa: F811
    form = linear_ops.pack(_randn(64, 32, dtype=torch.bfloat16))
    assert form is not None
    calls.clear()
    with pytest.raises(RuntimeError, match="dtype"):
        linear_ops.linear(_randn(2, 32, dtype=torch.float16), form)
    assert calls == {("linear", "reference"): 1}


@pytest.mark.parametrize(
    ("has", "kind"),
    [
        ({"avx2": True}, "none"),
        ({}, "unknown"),
        ({"avx512_f": True}, "widened"),
        ({"avx512_f": True, "avx512_bf16": True}, "pairs"),
        ({"avx512_f": True, "avx512_bf16": True, "amx_bf16": True}, "tiles"),
    ],
)
def test_many_rows_are_left_to_faster_instructions(
    has: dict[str, bool],
    kind: str,
    variant: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Products of few rows take the time it takes to read the weight, with any instructions."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    processor.multiplies.cache_clear()
    try:
        assert processor.multiplies(torch.bfloat16) == kind
        rows = linear_ops.useful_rows(1024, 1024, dtype=torch.bfloat16)
        assert rows.start == 1
        most = cpu_rules.MOST_ROWS_IN_HALF[kind][variant == "avx512_bf16"]
        assert rows[-1] == most or (most == math.inf and 10**9 in rows)
        assert linear_ops.useful_rows(1024, 1024)
    finally:
        processor.multiplies.cache_clear()


def test_another_library_where_the_compiler_has_no_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An optional library that was not made leaves its place to the one for AVX-512."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(native.build, "architecture", lambda _: "x86_64")
    monkeypatch.setattr(native, "LIBRARIES", tmp_path)
    assert native.instruction_set() == "avx512"
    (tmp_path / "avx512_bf16.so").touch()
    assert native.instruction_set() == "avx512_bf16"


_OLD_ASSEMBLER = """#!/bin/sh
case "$*" in
  *-dumpmachine*) echo x86_64-linux-gnu; exit ;;
  *-fsyntax-only*) exit ;;
  *-mavx512bf16*) echo "Error: no such instruction: vdpbf16ps" >&2; exit 1 ;;
esac
while [ "$1" != -o ]; do shift; done
echo new > "$2"
"""
"""A compiler that accepts all flags; its assembler does not know the products of pairs."""


@pytest.mark.skipif(sys.platform not in build.SYSTEMS, reason="no operations in C")
@pytest.mark.parametrize("fails", [False, True], ids=["optional", "all"])
def test_libraries_that_do_not_compile_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """A library that does not compile leaves no older one of its name behind."""
    compiler, libraries = tmp_path / "cc", tmp_path / "lib"
    compiler.write_text(_OLD_ASSEMBLER.replace("-mavx512bf16", "-mf") if fails else _OLD_ASSEMBLER)
    compiler.chmod(0o755)
    libraries.mkdir()
    for name in build.VARIANTS:
        (libraries / f"{name}.so").write_text("old\n")
    monkeypatch.setenv("CC", str(compiler))
    reason = build.build(libraries)
    written = {path.name: path.read_text() for path in libraries.iterdir()}
    if fails:
        assert reason is not None
        assert "no such instruction" in reason
        assert written == {build.REASON: reason + "\n"}
    else:
        assert reason is None
        assert written == {"avx512.so": "new\n", "avx2.so": "new\n"}
