"""torch's private operators: if one changes, the next product runs, with a reason."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastgen
from fastgen.cli.environment import checks
from fastgen.models.layers import linear as linears
from fastgen.models.layers import packed_weights
from fastgen.models.routing import routes
from fastgen.ops import linear as linear_ops
from fastgen.ops import native, processor, torch_private
from tests.support import zoo

ONEDNN = torch_private.ONEDNN_LINEAR, torch_private.ONEDNN_LINEAR_ADD
PACK, MKL = torch_private.ONEDNN_PACK, (torch_private.MKL_LINEAR, torch_private.MKL_PACK)
CHANGES = {
    "is missing": "has no operator {name}",
    "takes something else": "is {name}(Tensor x) -> Tensor, not {name}(",
    "computes something else": "differs from torch.nn.functional.linear",
    "raises": "fails: unsupported",
}
"""Changes to an operator, and the fallback reason that each one leads to."""

pytestmark = pytest.mark.skipif(
    bool(linear_ops.unusable("onednn") or linear_ops.unusable("mkl")),
    reason="oneDNN or MKL cannot be used",
)


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    """Clear what is cached about operators, before and after each test."""
    caches: Any = (
        torch_private.operator,
        linear_ops.unusable,
        linears._useful,
        linears._least,
        native.found,
    )

    def forget() -> None:
        packed_weights.release()
        for cache in caches:
            cache.cache_clear()

    forget()
    yield
    forget()


@pytest.fixture(params=CHANGES)
def change(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Return a function that changes a schema's operator and returns the expected reason."""

    def apply(schema: str) -> str:
        own, name = torch_private.operator(schema), schema.partition("(")[0]
        library, _, packet = name.partition("::")
        packet, _, overload = packet.partition(".")
        packets = getattr(torch.ops, library)
        overloads = {
            key: getattr(getattr(packets, packet), key)
            for key in getattr(packets, packet).overloads()
        }
        del overloads[overload or "default"]
        if request.param == "takes something else":
            overloads[overload or "default"] = _Operator(own, f"{name}(Tensor x) -> Tensor")
        elif request.param == "computes something else":
            overloads[overload or "default"] = _Operator(lambda x, *args: own(-x, *args), schema)
        elif request.param == "raises":
            overloads[overload or "default"] = _Operator(_unsupported, schema)
        monkeypatch.setattr(packets, packet, SimpleNamespace(**overloads))
        torch_private.operator.cache_clear()
        return CHANGES[request.param].format(name=name)

    return apply


class _Operator:
    def __init__(self, call: Callable[..., Any], schema: str) -> None:
        self.call, self._schema = call, schema

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)


def _unsupported(*_: Any) -> Tensor:
    raise RuntimeError("unsupported\nat a line of C++")


def _check_product(net: nn.Module, packs: bool, exactly: bool) -> None:
    """Assert that a routed net computes what it computes without routes, packed or not."""
    x = torch.randn(64, 320, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), packed_weights.packing_at_once():
        with routes.routed(net):
            found = net(x)
        if exactly:
            assert torch.equal(found, net(x))
        torch.testing.assert_close(found, net(x), atol=1e-5, rtol=1e-4)
    assert (packed_weights.packed_bytes() > 0) == packs


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(320, 640), nn.Tanh(), nn.Linear(640, 320))


def _explained() -> str:
    model = zoo.build("gpt2", torch.float32)
    return str(
        fastgen.explain(model, **zoo.batch(model, 2, 3), max_new_tokens=4, pad_token_id=0).linears
    )


def _examined() -> tuple[str, str]:
    (found,) = [
        finding for finding in checks.devices() if finding.text.startswith("fp32 linear layers")
    ]
    return found.level, found.text


@pytest.mark.usefixtures("by_torch_alone")
def test_weights_stay_as_they_are_where_onednn_does_not_pack(
    net: nn.Module, change: Callable[[str], str]
) -> None:
    said = change(PACK)
    assert linears.reason_off(net) is None
    assert not routes.survey(net, None).packed
    _check_product(net, packs=False, exactly=False)
    with torch.no_grad(), routes.routed(net):
        assert net[0].__dict__["forward"]._form(torch.ones(64, 320), None) is net[0].weight
    level, text = _examined()
    assert level == "note"
    assert text.startswith("fp32 linear layers on the CPU: by oneDNN, weights unpacked: ")
    assert said in text
    assert said in linear_ops.described()[1]


@pytest.mark.usefixtures("by_torch_alone")
@pytest.mark.parametrize("schema", ONEDNN)
def test_products_are_torchs_own_without_onednn(
    schema: str, net: nn.Module, change: Callable[[str], str]
) -> None:
    said = change(schema)
    assert said in str(linears.reason_off(net))
    assert "\n" not in str(linears.reason_off(net))
    _check_product(net, packs=False, exactly=True)
    level, text = _examined()
    assert (level, said in text, "torch's own" in text) == ("note", True, True)
    assert said in _explained()


@pytest.mark.usefixtures("by_torch_alone")
@pytest.mark.parametrize("schema", MKL)
def test_products_are_torchs_own_without_mkl_on_intel(
    schema: str, net: nn.Module, change: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "on_intel", lambda: True)
    said = change(schema)
    assert said in str(linears.reason_off(net))
    _check_product(net, packs=False, exactly=True)
    assert said in _explained()


@pytest.mark.usefixtures("by_torch_alone")
def test_mkl_packs_every_weight_on_intel_without_onednn(
    net: nn.Module, change: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes weights followed by gelu, which oneDNN would otherwise pack."""
    monkeypatch.setattr(processor, "on_intel", lambda: True)
    said = change(PACK)
    assert linears.reason_off(net) is None
    assert isinstance(linear_ops.pack(torch.ones(640, 320), 16, "gelu"), linear_ops.MklWeight)
    _check_product(net, packs=True, exactly=False)
    by, reason = linear_ops.described()
    assert (by, said in str(reason)) == ("by MKL", True)


@pytest.mark.parametrize("schema", ONEDNN)
def test_products_in_c_need_nothing_of_torchs(
    schema: str, net: nn.Module, change: Callable[[str], str]
) -> None:
    if native.library() is None:
        pytest.skip("there are no operations in C here")
    said = change(schema)
    assert " in C alone (" in _explained()
    assert said in str(linear_ops.unusable("plain")), (
        "for the small weights that C leaves to oneDNN"
    )
    assert linears.reason_off(net) is None
    assert (_examined()[0], said in _examined()[1]) == ("note", True)
    _check_product(net, packs=True, exactly=False)
    few, x = nn.Linear(2048, 15), torch.ones(64, 2048)  # too few outputs for C
    with torch.no_grad(), routes.routed(few), packed_weights.packing_at_once():
        expected = nn.Linear.forward(few, x)
        assert torch.equal(few(x), expected)
        assert torch.equal(linear_ops.linear(x, few.weight, few.bias), expected)


def test_nothing_runs_in_c_where_torch_does_not_say_who_observes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch._C, "_len_torch_dispatch_stack")
    assert native.found().library is None
    assert "_len_torch_dispatch_stack" in native.state()


def test_an_operator_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = torch_private.operator(PACK)
    monkeypatch.setattr(torch, "ops", None)
    assert torch_private.operator(PACK) is found
