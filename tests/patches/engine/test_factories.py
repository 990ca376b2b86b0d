"""Check that all tensor factories in fastgen state their dtype and device.

Otherwise `torch.set_default_dtype` and `torch.set_default_device` of the calling process decide,
and C code, which reads the memory as fp32 or int64, reads garbage.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fastgen
from tests.models.test_in_c import _wide  # noqa: F401  a fixture for all
from tests.ops.test_native import own_variant as variant  # noqa: F401  a fixture
from tests.support import zoo

ROOT = Path(__file__).parents[3]

DTYPE_AND_DEVICE = {
    "arange", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand",
    "randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "tril_indices",
    "triu_indices", "zeros",
}  # fmt: skip
# These keep the dtype of their argument, but the device of tensor arguments only.
DEVICE = {
    "as_tensor",
    "asarray",
}


def unstated(source: str) -> Iterator[str]:
    """Yield calls of torch factories in Python source that leave dtype or device to defaults."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)):
                wanted = (
                    {"dtype", "device"}
                    if name in DTYPE_AND_DEVICE
                    else {"device"}
                    if name in DEVICE
                    else set()
                )
                given = {keyword.arg for keyword in node.keywords}
                if None not in given and (missing := sorted(wanted - given)):
                    yield (
                        f"{node.lineno}: {ast.unparse(node)} does not state {' and '.join(missing)}"
                    )
            case _:
                pass


def test_factories_state_dtype_and_device() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{call}"
        for file in sorted((ROOT / "fastgen").rglob("*.py"))
        for call in unstated(file.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("torch.empty(0)", "device and dtype"),
        ("x = [torch.arange(3, device=x.device)]", "dtype"),
        ("torch.tensor([1], dtype=torch.int64)", "device"),
        ("torch.as_tensor(position, dtype=torch.int64)", "device"),
    ],
)
def test_unstated_factories_are_found(source: str, missing: str) -> None:
    (found,) = unstated(source)
    assert found.endswith(f"does not state {missing}")


def test_stated_factories_are_not_found() -> None:
    for call in ("empty(2, **like)", "empty_like(x)", "as_tensor(x, device=x.device)", "cat([x])"):
        assert not list(unstated(f"torch.{call}"))


OPTIONS = {
    "greedy": {},
    "beams": {"num_beams": 4, "no_repeat_ngram_size": 2},
    "samples": {"do_sample": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("family", ["gpt2", "llama", "t5", "bart"])
def test_another_default_dtype(variant: str, family: str, options: dict[str, object]) -> None:  # noqa: F811
    """The model is fp32; the tensors that a call creates have the dtypes that it needs."""
    model = zoo.build(family, torch.float32)
    call = zoo.batch(model, 3, 7) | options | {"max_new_tokens": 12}
    for _ in range(2):
        model.generate(**call)
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        found = model.generate(**call)
        with fastgen.disabled():
            torch.manual_seed(0)
            assert torch.equal(model.generate(**call), found)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("options", [OPTIONS["greedy"], OPTIONS["beams"]], ids=["greedy", "beams"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "t5", "bart"])
def test_another_default_device(variant: str, family: str, options: dict[str, object]) -> None:  # noqa: F811
    """Stock may raise for tensors on the default device; C reads the memory of none of them."""
    model = zoo.build(family, torch.float32)
    call = zoo.batch(model, 3, 7) | options | {"max_new_tokens": 12}
    for _ in range(2):
        wanted = model.generate(**call)
    with torch.device("meta"):
        try:
            found = model.generate(**call)
        except (NotImplementedError, RuntimeError) as error:
            with fastgen.disabled(), pytest.raises(type(error)):
                model.generate(**call)
        else:
            assert torch.equal(found, wanted)
