"""Routes that bring `ops` into a live model, and the memory that they reuse.

A route never uses a stale copy of a weight and leaves nothing behind. Memory is not reused while it
is in use.
"""

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationConfig
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.pytorch_utils import Conv1D

from fastgen import config
from fastgen.models import state
from fastgen.models.layers import activation, packed_weights
from fastgen.models.layers import linear as linears
from fastgen.models.layers import norm as norms
from fastgen.models.memory import scratch as memory_module
from fastgen.models.memory.scratch import ScratchPool, _rounded
from fastgen.models.routing import routes
from fastgen.models.specs.registry import SPECS
from fastgen.ops import native, processor
from fastgen.ops.activation import activation_reference
from fastgen.patches.transformers.compat import CACHE
from fastgen.patches.transformers.generate.resolve_setting import rows_at_most
from tests.support import zoo


def _randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Net(nn.Module):
    """Two linear layers worth packing, one that is too small, a Conv1D, and a tied one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(320, 640)
        self.small = nn.Linear(640, 4)
        self.conv = Conv1D(320, 640)
        self.last = nn.Linear(320, 640, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(self.conv(torch.tanh(hidden))) + self.small(hidden).sum()


@pytest.fixture
def net() -> Iterator[Net]:
    if native.library() is None:
        pytest.skip("there are no operations in C here")
    packed_weights.release()
    yield Net().eval()
    assert not list(state.iter_cached_states(routes.Route))
    packed_weights.release()


X = _randn(16, 320, seed=9)


def _run(net: nn.Module, times: int = packed_weights.Packed.uses_to_pack) -> Tensor:
    """Return the output of the last of several calls; the default packs the weights."""
    with torch.no_grad():
        for _ in range(times):
            found = net(X)
    return found


def _routed_run(net: nn.Module, times: int = packed_weights.Packed.uses_to_pack) -> Tensor:
    with routes.routed(net) as count:
        assert count
        return _run(net, times)


def _check_routes(net: nn.Module) -> None:
    """Assert that the routed model computes what the model computes with its current weights."""
    torch.testing.assert_close(_routed_run(net), _run(net, 1), atol=1e-3, rtol=1e-4)
    assert not _routed(net)


def _routed(net: nn.Module) -> list[str]:
    return [name for name, module in net.named_modules() if "forward" in module.__dict__]


def test_routes(net: Net) -> None:
    at_rest = {name: dict(module.__dict__) for name, module in net.named_modules()}
    with routes.routed(net) as count:
        assert count == 3
        assert _routed(net) == ["first", "conv", "last"]
        _run(net)
        # The tied weight is packed once, the small one not at all.
        assert packed_weights.packed_bytes() == 4 * (320 * 640 + 320 * 640)
    assert {name: dict(module.__dict__) for name, module in net.named_modules()} == at_rest
    _check_routes(net)
    packed_weights.release()
    assert packed_weights.packed_bytes() == 0
    _check_routes(net)


def _in_place(net: Net) -> None:
    with torch.no_grad():
        net.first.weight.add_(1.0)
        net.conv.weight.mul_(2.0)


def _data(net: Net) -> None:
    net.first.weight.data += 0.5
    net.conv.weight.data.copy_(_randn(640, 320, seed=5))


def _assigned(net: Net) -> None:
    net.first.weight.data = _randn(640, 320, seed=6)
    net.conv.weight.data = _randn(640, 320, seed=7)


def _parameter(net: Net) -> None:
    net.first.weight = nn.Parameter(_randn(640, 320, seed=6))


def _loaded(net: Net) -> None:
    net.load_state_dict({name: value + 0.25 for name, value in net.state_dict().items()})


def _optimised(net: Net) -> None:
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    net(X).pow(2).mean().backward()
    optimiser.step()


def _bias(net: Net) -> None:
    net.first.bias.data += 3.0


def _transposed(net: Net) -> None:
    net.first.weight.data = _randn(320, 640, seed=6).t()


def _bias_strided(net: Net) -> None:
    net.first.bias = nn.Parameter(_randn(1280, seed=6)[::2])


_CHANGES = [
    _in_place,
    _data,
    _assigned,
    _parameter,
    _loaded,
    _optimised,
    _bias,
    _bias_strided,
    _transposed,
]


@pytest.mark.parametrize("change", _CHANGES, ids=lambda change: change.__name__)
def test_routes_after_a_change(net: Net, change: Callable[[Net], None]) -> None:
    """Weights change between two calls."""
    _check_routes(net)
    before = _run(net)
    change(net)
    assert not torch.allclose(_run(net), before, atol=1e-3)
    _check_routes(net)


@pytest.mark.parametrize(
    "change", [c for c in _CHANGES if c is not _data], ids=lambda change: change.__name__
)
def test_routes_during_a_change(net: Net, change: Callable[[Net], None]) -> None:
    """Weights change within a call, which sees all changes except writes through `.data`."""
    with routes.routed(net):
        _run(net)
        change(net)
        found = _run(net)
    torch.testing.assert_close(found, _run(net, 1), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("where", ["first", "last", "middle row"])
def test_routes_after_one_row_changed(net: Net, where: str) -> None:
    """Write one row through `.data`, as when the output weights of one token are edited."""
    _check_routes(net)
    net.first.weight.data[{"first": 0, "last": -1, "middle row": 301}[where]] += 2.0
    _check_routes(net)


def test_copies_of_a_weight_share_a_probe(net: Net) -> None:
    weight = net.first.weight.detach()
    kinds = packed_weights.Packed, packed_weights.Int8Packed
    entries = [packed_weights.packed_of(net.first, kind) for kind in kinds]
    assert entries[0].probe is entries[1].probe
    for entry in entries:
        entry.copy = weight.clone()
    packed_weights.check(net.first)
    assert [packed_weights.packed_of(net.first, kind) for kind in kinds] == entries
    net.first.weight.data[301] += 2.0
    packed_weights.check(net.first)
    assert [state.cached_state_of(net.first, kind) for kind in kinds] == [None, None]
    assert not any(packed_weights.has_copy(net.first, kind) for kind in kinds)


@pytest.mark.parametrize("kind", [packed_weights.Packed, packed_weights.Int8Packed])
def test_probe_is_of_the_packed_values(net: Net, kind: type[packed_weights.Packed]) -> None:
    """Other values written through `.data` between a weight's first use and its packing."""
    weight = net.first.weight
    first = weight.detach().clone()
    packed_weights.packed_of(net.first)  # its probe is of the first values
    weight.data.neg_()
    packed_weights.check(net.first)
    entry = packed_weights.packed_of(net.first, kind)
    while entry.copied(weight, weight, always=True) is None:
        pass
    weight.data.copy_(first)
    packed_weights.check(net.first)
    assert not packed_weights.has_copy(net.first, kind)


def test_routes_leave_alone(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip layers that are not fp32 on a CPU, hooked, overridden, quantised or of another class.

    FASTGEN_LINEAR=off skips all layers.
    """

    class Other(nn.Linear):
        pass

    net.other = Other(320, 640)
    net.small = nn.Linear(640, 64)
    net.small.forward = net.small.forward
    net.conv.register_forward_hook(lambda *_: None)
    net.last.register_forward_pre_hook(lambda *_: None)
    net.half = nn.Linear(320, 640).half()
    own = net.small.__dict__["forward"]
    # The forward of `small` is its class's own, as in copies of a model. C alone runs `half`.
    routed = ["first", "small", *["half"] * (native.library() is not None)]
    with routes.routed(net) as count:
        assert count == len(routed)
        assert sorted(_routed(net)) == sorted(routed)
    assert _routed(net) == ["small"]
    assert net.small.__dict__["forward"] == own
    for dtype, reason in ((torch.float64, "float64"), (torch.bfloat16, "bfloat16")):
        in_c = dtype == torch.bfloat16 and native.library() is not None
        with routes.routed(nn.Linear(320, 640).to(dtype)) as count:
            assert count == in_c
        off = linears.reason_off(nn.Linear(320, 640).to(dtype))
        assert off is None if in_c else reason in str(off)
    assert linears.reason_off(nn.Module()) == "not on a CPU"
    settings = config.settings()
    monkeypatch.setattr(config, "settings", lambda: replace(settings, linear="off"))
    with routes.routed(net) as count:
        assert count == 0
    assert linears.reason_off(net) == "FASTGEN_LINEAR=off"


def test_routes_by_setting(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting that allows no packed copy leaves every product to torch."""
    own = config.settings()
    for change in ({"linear": "plain"}, {"memory": 0}):
        settings = replace(own, **change)
        monkeypatch.setattr(config, "settings", lambda settings=settings: settings)
        with routes.routed(net) as count:
            assert count == 0
            _run(net)
        assert packed_weights.packed_bytes() == 0


def test_routes_with_gradients_and_autocast(net: Net) -> None:
    """Training within a call uses torch's own product, which has a backward."""
    with routes.routed(net):
        net(X).sum().backward()
        gradients = {name: p.grad.clone() for name, p in net.named_parameters()}
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert net.first(X).dtype == torch.bfloat16
        assert net.double().first(X.double()).dtype == torch.float64
        net.float()
    net.zero_grad()
    net(X).sum().backward()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_routes_with_a_bias_of_another_dtype(net: Net, dtype: torch.dtype) -> None:
    """The bias is rejected as by torch's own product, rather than read as fp32."""
    net.first.bias = nn.Parameter(net.first.bias.to(dtype))
    for run in (_run, _routed_run):
        with pytest.raises(RuntimeError):
            run(net)


def test_routes_of_no_rows(net: Net) -> None:
    with routes.routed(net), torch.no_grad():
        for _ in range(3):
            assert net.first(X[:0]).shape == (0, 640)


def test_a_weight_is_packed_once(net: Net) -> None:
    """A weight is packed once for all numbers of rows and activation functions."""
    copies = set[int]()
    with routes.routed(net), torch.no_grad():
        layer = net.first.__dict__["forward"]
        for rows in (16, 20, 300, 20, 7000, 300, 16, 64, 300):
            x = _randn(rows, 320, seed=rows)
            expected = F.linear(x, net.first.weight, net.first.bias)
            for kind in (None, "gelu", "silu"):
                wanted = expected if kind is None else activation_reference(expected, kind)
                torch.testing.assert_close(layer.apply(x, kind), wanted, atol=1e-5, rtol=1e-4)
            copy = packed_weights.packed_of(net.first).copy
            copies |= set() if copy is None else {id(copy)}
    assert len(copies) == 1


@pytest.mark.parametrize("bias", [torch.ones(1), torch.ones(()), torch.ones(32, 640)])
def test_routes_with_a_bias_of_another_shape(net: Net, bias: Tensor) -> None:
    """torch broadcasts the bias over the rows."""
    net.first.bias = nn.Parameter(bias)
    x = _randn(32, 320, seed=0)
    with torch.no_grad(), routes.routed(net):
        for _ in range(2 * packed_weights.Packed.uses_to_pack):
            torch.testing.assert_close(net.first(x), F.linear(x, net.first.weight, bias))


@pytest.mark.parametrize("inputs", [300, 330, 1])
def test_routes_of_inputs_that_do_not_fit(net: Net, inputs: int) -> None:
    """The layer raises its own error before anything is read."""
    with torch.no_grad(), routes.routed(net):
        for _ in range(packed_weights.Packed.uses_to_pack):
            net.first(_randn(400, 320, seed=0))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            net.first(_randn(400, inputs, seed=0))


def test_products_of_many_rows_pack_sooner(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows save the time of packing in one product."""
    monkeypatch.setattr(processor, "mkl_is_native", lambda: False)
    kind = packed_weights.Packed
    enough = (kind.uses_to_pack - 1) * kind.rows_per_use
    for rows, times in ((enough, 1), (enough // 2, 2)):
        packed_weights.release()
        with torch.no_grad(), routes.routed(net):
            for call in range(times):
                assert packed_weights.packed_bytes() == 0, (rows, call)
                net.first(_randn(rows, 320, seed=0))
            assert packed_weights.packed_bytes() == 4 * 320 * 640


@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_many_rows_write_to_memory_that_is_there(
    net: Net, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linears, "LARGE", 4 * 300 * 320)
    monkeypatch.setattr(processor, "mkl_is_native", lambda: True)
    layer, x = (
        (net.conv, _randn(3, 100, 640, seed=1))
        if transposed
        else (net.first, _randn(3, 100, 320, seed=1))
    )
    with torch.no_grad():
        expected = layer(x)
        with routes.routed(net):
            found = layer(x)
            assert memory_module.scratch_pool_of(net).free == 0
            address = found.data_ptr()
            torch.testing.assert_close(found, expected)
            del found
            assert layer(x).data_ptr() == address


def test_rows_of_a_call() -> None:
    model = zoo.build("bart")
    ids, mask = torch.ones(3, 7, dtype=torch.int64), torch.ones(3, 7, dtype=torch.int64)
    assert rows_at_most(model, (ids,), {"attention_mask": mask}) == 21
    assert rows_at_most(model, (), {"input_ids": ids[:, :2], "num_beams": 5}) == 15
    assert (
        rows_at_most(model, (), {"inputs": ids[:, :2], "num_beams": 2, "num_return_sequences": 4})
        == 12
    )
    assert (
        rows_at_most(
            model, (), {"input_ids": ids, "generation_config": GenerationConfig(num_beams=9)}
        )
        == 27
    )
    unknown: list[dict[str, Any]] = [
        {"inputs_embeds": torch.zeros(3, 7, 4)}, {"input_features": torch.zeros(3, 7)}, {},
        {"input_ids": ids, "assistant_model": model},
        {"input_ids": ids, "prompt_lookup_num_tokens": 3}, {"input_ids": ids, CACHE: ()},
        {"attention_mask": mask, "encoder_outputs": ()},
    ]  # fmt: skip
    assert all(rows_at_most(model, (), arguments) is None for arguments in unknown)


@pytest.mark.parametrize("change", [lambda net: net.to(torch.bfloat16), lambda net: net.to("meta")])
def test_routes_forget_weights_that_have_left(net: Net, change: Callable[[nn.Module], Any]) -> None:
    _routed_run(net)
    assert packed_weights.packed_bytes()
    change(net)
    with routes.routed(net):
        assert not packed_weights.packed_bytes()


def test_routes_nested(net: Net) -> None:
    wanted = _run(net)
    with routes.routed(net) as outer:
        with routes.routed(net) as inner:
            assert inner == outer
        assert len(_routed(net)) == outer
        with pytest.raises(ZeroDivisionError), routes.routed(net):
            raise ZeroDivisionError
        assert len(_routed(net)) == outer
        with routes.routed(net.first) as part:  # a submodule, whose layer has a route already
            assert part == 0
        torch.testing.assert_close(_run(net), wanted, atol=1e-3, rtol=1e-4)
    assert not _routed(net)


def test_routes_overlapping(net: Net) -> None:
    """Calls of one model may end in the order in which they started."""
    first, second = ExitStack(), ExitStack()
    first.enter_context(routes.routed(net))
    second.enter_context(routes.routed(net))
    first.close()
    assert len(_routed(net)) == 3
    second.close()
    assert not _routed(net)


def test_routes_of_models_with_common_layers(net: Net) -> None:
    other = nn.Sequential(net.first, nn.Linear(640, 320))
    ours, others = ExitStack(), ExitStack()
    ours.enter_context(routes.routed(net))
    others.enter_context(routes.routed(other))
    ours.close()
    torch.testing.assert_close(_run(other), other(X), atol=1e-3, rtol=1e-4)
    others.close()
    assert not _routed(net)
    assert not _routed(other)


def test_routes_concurrent(net: Net) -> None:
    wanted, errors = _run(net), []

    def work() -> None:
        try:
            for _ in range(25):
                torch.testing.assert_close(_routed_run(net, 2), wanted, atol=1e-3, rtol=1e-4)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert not _routed(net)


def test_a_copy_is_no_part_of_the_route(net: Net) -> None:
    """A model copied while it generates always computes with its own weights."""
    with routes.routed(net):
        _run(net)
        twin: Any = copy.deepcopy(net)
    for parameter in twin.parameters():
        parameter.data.zero_()
    assert bool((_run(twin) == 0).all())
    with routes.routed(twin):
        assert bool((_run(twin) == 0).all())
    assert not bool((_run(net) == 0).all())


def test_routes_keep_no_model_alive(net: Net) -> None:
    other = Net().eval()
    _routed_run(other)
    held = packed_weights.packed_bytes()
    gone = weakref.ref(other)
    del other
    gc.collect()
    assert gone() is None
    assert held > 0
    assert packed_weights.packed_bytes() == 0


# Activation functions.


# phi3 splits the output of one product before its activation.
@pytest.mark.parametrize("family", sorted(name for name in zoo.FAMILIES if name != "phi3"))
def test_activations_of_every_family(family: str) -> None:
    """Every feed-forward block of a proven family fuses its activation, with the same results."""
    model = zoo.build(family, torch.float32)
    record = SPECS[model.config.model_type]
    found = list(activation.pairs(model.modules(), record.activated))
    # Two layers and a head's; two on each side.
    blocks = 3 if family == "unilm" else 4 if record.encoder_decoder else 2
    assert len(found) == blocks
    batch = zoo.batch(model, 3, 7)
    if record.encoder_decoder:
        batch |= {"decoder_input_ids": batch["input_ids"][:, :4]}
    with torch.no_grad():
        wanted = model(**batch).logits
        with routes.routed(model, record) as layers:
            assert layers
            torch.testing.assert_close(model(**batch).logits, wanted, atol=1e-4, rtol=1e-4)
    assert not _routed(model)


def _bart_block() -> tuple[Any, Any]:
    model = zoo.build("bart", torch.float32)
    return model, model.model.encoder.layers[0]


def test_an_activation_overwrites_what_nobody_else_reads() -> None:
    model, block = _bart_block()
    with torch.no_grad(), routes.routed(model, SPECS["bart"]):
        assert "forward" in block.activation_fn.__dict__
        hidden = block.fc1(_randn(2, 3, model.config.d_model, seed=1))
        assert block.activation_fn(hidden).data_ptr() == hidden.data_ptr()
        foreign = _randn(2, 3, 5, seed=2)
        kept = foreign.clone()
        block.activation_fn(foreign)
        assert torch.equal(foreign, kept), "only the output of its linear layer may be overwritten"
        twin = copy.deepcopy(block.activation_fn)
        assert not isinstance(twin.forward, activation.Activation)


@pytest.mark.parametrize(
    "what", ["hook on fc1", "hook on activation_fn", "pre-hook on activation_fn", "own forward"]
)
def test_an_activation_that_somebody_watches_is_left_alone(what: str) -> None:
    model, block = _bart_block()
    if what == "hook on fc1":
        block.fc1.register_forward_hook(lambda *_: None)
    elif what == "hook on activation_fn":
        block.activation_fn.register_forward_hook(lambda *_: None)
    elif what == "pre-hook on activation_fn":
        block.activation_fn.register_forward_pre_hook(lambda *_: None)
    else:
        block.activation_fn.forward = lambda x: x
    before = dict(block.activation_fn.__dict__)
    with torch.no_grad(), routes.routed(model, SPECS["bart"]):
        assert block.activation_fn.__dict__ == before


def test_an_activation_in_a_class_of_the_users_is_left_alone() -> None:
    """A user's class may read the layer's output twice."""
    model, block = _bart_block()

    class Twice(type(block)):
        pass

    block.__class__ = Twice
    with routes.routed(model, SPECS["bart"]):
        assert "forward" not in block.activation_fn.__dict__


def test_activations_with_gradients() -> None:
    model, block = _bart_block()
    x = _randn(2, 3, model.config.d_model, seed=1)
    with routes.routed(model, SPECS["bart"]):
        hidden = block.fc1(x)
        block.activation_fn(hidden).sum().backward()
    found = block.fc1.weight.grad.clone()
    block.fc1.weight.grad = None
    block.activation_fn(block.fc1(x)).sum().backward()
    torch.testing.assert_close(found, block.fc1.weight.grad)


# Memory.


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_memory_serves_again_once_nobody_holds_it() -> None:
    memory, like = ScratchPool(), torch.zeros(1)
    first = memory.take(like, 4, 6)
    assert (first.shape, first.dtype, first.is_contiguous()) == ((4, 6), torch.float32, True)
    address, view = _address(first), first[1:, ::2]
    view.fill_(3.0)
    del first
    second = memory.take(like, 4, 6)
    assert _address(second) != address, "a view is held"
    second.fill_(5.0)
    assert bool((view == 3.0).all())
    array = view.numpy()
    del view
    assert _address(memory.take(like, 4, 6)) != address, "an array is held"
    del array
    assert _address(memory.take(like.half(), 6, 5)) == address, "another dtype and shape that fits"
    assert memory.free == 2 * 4 * 24


def test_memory_lets_go_what_serves_no_more() -> None:
    memory, like = ScratchPool(), torch.zeros(1)
    for _ in range(3):
        for length in (1000, 10, 3000, 100):
            memory.take(like, length)
    assert memory.free == sum(_rounded(4 * length) for length in (1000, 10, 3000, 100)), (
        "one of each, turn by turn"
    )
    for length in range(10_000, 10_100):
        memory.take(like, length)
    assert memory.free < 4 * (6000 + 16_384), "one serves several sizes"
    for _ in range(100):
        memory.take(like, 10_000)
    memory.take(like, 50_000)
    assert memory.free == _rounded(4 * 10_000) + _rounded(4 * 50_000)


def test_memory_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers beyond the limit are not kept."""
    monkeypatch.setattr(memory_module, "LIMIT", 4 * 2500)
    memory, like = ScratchPool(), torch.zeros(1)
    tensors = [memory.take(like, 1000) for _ in range(5)]
    assert len({_address(tensor) for tensor in tensors}) == 5
    del tensors
    assert memory.free == 2 * _rounded(4 * 1000)


def test_memory_takes_little_more_than_it_is_asked_for() -> None:
    for size in (1, 31, 32, 33, 1000, 4096, 4097, 8_454_144, 2**31 + 1):
        assert size <= _rounded(size) <= size * 17 // 16


def test_memory_of_a_device_is_the_devices_own() -> None:
    memory = ScratchPool()
    assert memory.take(torch.zeros(1, device="meta"), 5).shape == (5,)
    assert memory.take(torch.zeros(1), 0, 5).shape == (0, 5)
    assert memory.free == 0


def test_memory_of_a_model_goes_with_the_model() -> None:
    model = nn.Linear(2, 2)
    memory = memory_module.scratch_pool_of(model)
    assert memory_module.scratch_pool_of(model) is memory
    held, free = memory.take(torch.zeros(1), 50), memory.take(torch.zeros(1), 5_000)
    del free
    assert memory.free
    state.release(memory_module.ScratchPool)  # releases unused buffers of running calls too
    assert memory_module.scratch_pool_of(model) is memory
    assert memory.free == 0
    assert held.shape == (50,)
    gone = weakref.ref(memory)
    del model, memory
    gc.collect()
    assert gone() is None


def test_memory_with_threads() -> None:
    """No storage serves two threads at once."""
    memory, like, errors = ScratchPool(), torch.zeros(1), []

    def work(number: int) -> None:
        for _ in range(300):
            mine = memory.take(like, 50)
            mine.fill_(number)
            if not bool((mine == number).all()):
                errors.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_large_outputs_lie_in_memory_used_again(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = _run(net, 1)
    monkeypatch.setattr(linears, "LARGE", 1)
    torch.testing.assert_close(_routed_run(net), wanted, atol=1e-3, rtol=1e-4)
    with torch.no_grad(), routes.routed(net):
        kept = [net.first(X + i) for i in range(4)]
        assert len({_address(y) for y in kept}) == 4
        for i, y in enumerate(kept):
            torch.testing.assert_close(
                y, F.linear(X + i, net.first.weight, net.first.bias), atol=1e-4, rtol=1e-4
            )


# The bias after the head.

BIASED = sorted(
    name
    for name in zoo.FAMILIES
    if SPECS[zoo.build(name, torch.float32).config.model_type].head.bias
)


def _head(model: Any) -> tuple[Tensor, Any]:
    return _randn(3, 1, model.config.d_model, seed=3), model.lm_head


@pytest.mark.parametrize("family", BIASED)
@pytest.mark.parametrize("zero", [True, False])
def test_the_bias_of_every_family_is_added_in_place(family: str, zero: bool) -> None:
    model = zoo.build(family, torch.float32)
    if not zero:
        model.final_logits_bias.copy_(_randn(*model.final_logits_bias.shape, seed=4))
    batch = zoo.batch(model, 3, 7)
    batch |= {"decoder_input_ids": batch["input_ids"][:, :4]}
    with torch.no_grad():
        wanted = model(**batch).logits
        with routes.routed(model, SPECS[model.config.model_type]):
            assert type(model.lm_head(_head(model)[0])) is not Tensor
            found = model(**batch).logits
    assert type(found) is Tensor
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert not _routed(model)


@pytest.mark.parametrize("zero", [True, False])
def test_the_output_of_a_head_is_a_plain_tensor_to_everything_else(zero: bool) -> None:
    model = zoo.build("marian", torch.float32)
    bias = model.final_logits_bias
    if not zero:
        bias.fill_(2.0)
    x, head = _head(model)
    with torch.no_grad(), routes.routed(model, SPECS["marian"]):
        y = head(x)
        plain = F.linear(x, head.weight)
        torch.testing.assert_close(y + bias.clone(), plain + bias)
        torch.testing.assert_close(y + 1.0, plain + 1.0)
        torch.testing.assert_close(1.0 + y, plain + 1.0)
        torch.testing.assert_close(y * 2, plain * 2)
        assert type(y + bias.clone()) is type(y[0]) is type(y * 2) is type(y.clone()) is Tensor
        at = y.data_ptr()
        result = y + bias
        assert (type(result), result.data_ptr()) == (Tensor, at), (
            "in the memory of the head's own output"
        )
        torch.testing.assert_close(result, plain + bias)


@pytest.mark.parametrize("what", ["own forward", "a user's class", "hook on the head", "gradients"])
def test_a_head_that_may_be_used_otherwise_is_left_alone(what: str) -> None:
    model = zoo.build("bart", torch.float32)
    x, head = _head(model)
    if what == "own forward":
        model.forward = lambda **_: None
    elif what == "a user's class":
        model.__class__ = type("Own", (type(model),), {"__module__": __name__})
    elif what == "hook on the head":
        head.register_forward_hook(lambda *_: None)
    with torch.set_grad_enabled(what == "gradients"), routes.routed(model, SPECS["bart"]):
        assert type(head(x)) is Tensor


def test_a_bias_that_changes_between_calls() -> None:
    model = zoo.build("marian", torch.float32)
    batch = zoo.batch(model, 2, 7)
    banned = int(model.generate(**batch, max_new_tokens=1, num_beams=1)[0, -1])
    model.final_logits_bias[0, banned] = -1e9
    assert int(model.generate(**batch, max_new_tokens=1, num_beams=1)[0, -1]) != banned


# Norms.

NORMED = {
    "t5": 0.0,
    "mt5": 0.0,
    "umt5": 0.0,
    "llama": 0.0,
    "mistral": 0.0,
    "phi3": 0.0,
    "qwen2": 0.0,
    "qwen3": 0.0,
    "gemma": 1.0,
    "gemma2": 1.0,
    "gemma3": 1.0,
}


@pytest.mark.parametrize("family", [name for name in NORMED if name in zoo.FAMILIES])
def test_norms_of_every_family(family: str) -> None:
    """Every RMSNorm is identified by its results, and its replacement computes the same bits."""
    model = zoo.build(family, torch.float32)
    modules = [module for module in model.modules() if type(module).__name__.endswith("Norm")]
    with torch.no_grad(), routes.routed(model):
        for module in modules:
            forward = module.__dict__["forward"]
            assert isinstance(forward, norms.RMSNorm)
            assert forward.offset == NORMED[family]
            weight: Any = module.weight
            for rows in (3, 1_000):
                x = _randn(rows, 7, weight.shape[0], seed=rows)
                assert torch.equal(module(x), type(module).forward(module, x))
    assert modules
    assert not _routed(model)


def test_a_norm_with_an_offset_in_half_precision() -> None:
    model = zoo.build("gemma2", torch.bfloat16)
    for forward in norms.norms(model.modules()):
        x = _randn(5, forward.module.weight.shape[0], seed=1).bfloat16()
        with torch.no_grad():
            assert torch.equal(forward(x), type(forward.module).forward(forward.module, x))


@pytest.mark.parametrize(
    "what", ["fp64", "half on a CPU", "hook", "own forward", "a user's class", "two parameters"]
)
def test_a_norm_that_is_left_alone(what: str) -> None:
    dtype = {"fp64": torch.float64, "half on a CPU": torch.bfloat16}.get(what, torch.float32)
    model: Any = zoo.build("llama", dtype)
    module = model.model.norm
    if what == "hook":
        module.register_forward_hook(lambda *_: None)
    elif what == "own forward":
        module.forward = lambda x: x
    elif what == "a user's class":
        module.__class__ = type("OwnNorm", (type(module),), {"__module__": __name__})
    elif what == "two parameters":
        module.bias = nn.Parameter(torch.zeros(3))
    before = module.__dict__.get("forward")
    with routes.routed(model):
        assert module.__dict__.get("forward") is before


def test_norms_with_gradients_or_another_dtype() -> None:
    model: Any = zoo.build("llama", torch.float32)
    module = model.model.norm
    x = _randn(3, module.weight.shape[0], seed=1)
    with routes.routed(model):
        module(x).sum().backward()
        assert module.weight.grad is not None
        with torch.no_grad():
            assert torch.equal(module(x.double()), type(module).forward(module, x.double()))
            assert not isinstance(copy.deepcopy(module).__dict__.get("forward"), norms.RMSNorm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("made", "rms", "offset"),
    [
        (lambda: CohereLayerNorm(48), False, 0.0),
        (lambda: NemotronLayerNorm1P(48), False, 1.0),
        (lambda: NemotronLayerNorm1P(48, bias=False), False, 1.0),
        (lambda: OlmoLayerNorm(48), False, 0.0),
        (lambda: LlamaRMSNorm(48), True, 0.0),
        (lambda: GemmaRMSNorm(48), True, 1.0),
    ],
)
def test_norms_of_transformers(
    made: Callable[[], nn.Module], rms: bool, offset: float, dtype: torch.dtype
) -> None:
    """LayerNorms are identified by their results, too, and rounded where their modules round."""
    module = made().to(dtype).eval().requires_grad_(False)
    for i, parameter in enumerate(module.parameters()):
        parameter.copy_(_randn(*parameter.shape, seed=i))
    found = norms.norm_of(module)
    assert found is not None
    assert (found.rms, found.offset) == (rms, offset)
    for size in (1.0, 1e-3):
        x = (_randn(5, 48, seed=7) * size).to(dtype)
        torch.testing.assert_close(found(x)[0], module(x), atol=2e-6, rtol=0)


def test_a_norm_of_several_heads_is_none() -> None:
    assert norms.norm_of(CohereLayerNorm((2, 8))) is None


def test_a_class_that_computes_something_else_is_no_norm() -> None:
    model: Any = zoo.build("llama", torch.float32)

    class Doubled(type(model.model.norm)):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return 2 * super().forward(hidden_states)

    Doubled.__module__ = "transformers.models.of_tomorrow"
    Doubled.__name__ = "DoubledRMSNorm"
    model.model.norm.__class__ = Doubled
    with routes.routed(model):
        assert "forward" not in model.model.norm.__dict__
