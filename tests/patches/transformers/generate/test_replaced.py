"""Check that user replacements are respected at every call.

Users replace functions of torch, forwards and weights. Each model has been called before, so
weights are packed, plans cached and steps checked.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.models.llama import modeling_llama

import fastgen
from fastgen.models.build.patched_torch import replaced
from fastgen.patches.transformers.compat import CACHE_ARGUMENTS
from fastgen.patches.transformers.planning.sharing import not_shared
from tests.support import zoo
from tests.support.parity import assert_same, fallbacks, left_off

ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 8},
    "beams": {"max_new_tokens": 8, "num_beams": 3},
    "samples": {"max_new_tokens": 8, "do_sample": True, "num_return_sequences": 2},
}
FAMILIES = ("bart", "llama", "gpt2", "t5")


def _warm(
    family: str, more: dict[str, Any], dtype: torch.dtype = torch.float32
) -> tuple[Any, dict[str, Any]]:
    model = zoo.build(family, dtype)
    kwargs = zoo.batch(model, 3, 7) | more
    for seed in range(4):
        assert_same(model, kwargs, seed, tolerance=1e-4)
    return model, kwargs


def _differs(model: Any, kwargs: dict[str, Any], change: Callable[[], object]) -> None:
    """Assert that fastgen follows a change.

    The change must alter transformers' output, or the test would prove nothing.
    """
    with fastgen.disabled():
        torch.manual_seed(0)
        before = model.generate(**kwargs)
        change()
        torch.manual_seed(0)
        after = model.generate(**kwargs)
    assert not torch.equal(before, after)
    assert_same(model, kwargs, tolerance=1e-4)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch._C._nn.linear(x, weight, bias) * 0.5


def _sdpa(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch._C._nn.scaled_dot_product_attention(query, *args, **kwargs).flip(-1)


def _forward(self: nn.Linear, x: Tensor) -> Tensor:
    return torch._C._nn.linear(x, self.weight, self.bias) * 0.5


def _layer_norm(self: nn.LayerNorm, x: Tensor) -> Tensor:
    return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps).flip(-1)


FUNCTIONS: dict[str, tuple[Any, str, Any, tuple[str, ...]]] = {
    "linear": (F, "linear", _linear, ("bart", "llama", "t5")),
    "attention": (F, "scaled_dot_product_attention", _sdpa, ("bart", "llama", "gpt2")),
    "Linear": (nn.Linear, "forward", _forward, ("bart", "llama", "t5")),
    "LayerNorm": (nn.LayerNorm, "forward", _layer_norm, ("bart", "gpt2")),
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize(
    ("what", "family"), [(what, family) for what in FUNCTIONS for family in FUNCTIONS[what][3]]
)
def test_a_function_of_torch(
    what: str, family: str, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, kwargs = _warm(family, ASKED[asked])
    owner, name, function, _ = FUNCTIONS[what]
    before = fallbacks()
    _differs(model, kwargs, lambda: monkeypatch.setattr(owner, name, function))
    reason = replaced()
    assert reason is not None
    assert f"{name} was replaced by {__name__}.{function.__name__}" in reason
    assert (fallbacks() - before)[reason]
    monkeypatch.undo()
    assert replaced() is None
    before = fallbacks()
    assert_same(model, kwargs, tolerance=1e-4)
    assert not fallbacks() - before


def test_a_call_of_every_module(monkeypatch: pytest.MonkeyPatch) -> None:
    model, kwargs = _warm("llama", ASKED["greedy"])
    own, called = nn.Module.__call__, list[str]()

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        called.append(type(self).__name__)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "__call__", call)
    model.generate(**kwargs)
    ours = list(called)
    called.clear()
    with fastgen.disabled():
        model.generate(**kwargs)
    assert ours == called


@pytest.mark.parametrize("asked", ASKED)
def test_a_function_of_a_models_file(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernel libraries replace such functions: Liger replaces rotary positions and norms."""
    model, kwargs = _warm("llama", ASKED[asked])
    own = modeling_llama.apply_rotary_pos_emb

    def rotary(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        return own(query.flip(1), key, *args, **kwargs)

    before = left_off()
    _differs(
        model, kwargs, lambda: monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotary)
    )
    reason = (
        "decode steps run through the model's own modules: "
        "a function apply_rotary_pos_emb of its own"
    )
    assert (left_off() - before)[reason]


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("part", ["LlamaMLP", "LlamaRMSNorm"])
def test_a_forward_of_a_class(part: str, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, kwargs = _warm("llama", ASKED[asked])
    kind = getattr(modeling_llama, part)
    own = kind.forward
    _differs(
        model,
        kwargs,
        lambda: monkeypatch.setattr(kind, "forward", lambda self, x: own(self, x).flip(-1)),
    )


def _scaled(module: nn.Module) -> None:
    own = module.forward
    module.forward = lambda *args, **kwargs: own(*args, **kwargs) * -3.0


def _hooked(module: nn.Module) -> None:
    module.register_forward_hook(lambda _, __, output: output * -3.0)


def _pre_hooked(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda _, args: (args[0] * -3.0, *args[1:]))


class _Scale(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * -3.0


def _parametrised(module: nn.Module) -> None:
    parametrize.register_parametrization(module, "weight", _Scale())


def _swapped(module: nn.Module) -> None:
    with torch.no_grad():
        torch.utils.swap_tensors(module.weight, nn.Parameter(module.weight * -3.0))


def _exchanged(module: nn.Module) -> None:
    module.weight = nn.Parameter(module.weight.detach() * -3.0)


def _written(module: nn.Module) -> None:
    module.weight.data.mul_(-3.0)


CHANGES = (_scaled, _hooked, _pre_hooked, _parametrised, _swapped, _exchanged, _written)
LINEAR = {
    "bart": ("model.decoder.layers.0.fc1", "model.encoder.layers.1.self_attn.v_proj"),
    "llama": ("model.layers.1.mlp.down_proj", "lm_head"), "gpt2": ("transformer.h.0.mlp.c_fc",),
    "t5": ("decoder.block.0.layer.2.DenseReluDense.wo", "encoder.block.0.layer.0.SelfAttention.v"),
}  # fmt: skip


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize(
    ("family", "path"), [(family, path) for family in LINEAR for path in LINEAR[family]]
)
@pytest.mark.parametrize("change", CHANGES)
def test_a_linear_layer(
    change: Callable[[nn.Module], None], family: str, path: str, asked: str
) -> None:
    model, kwargs = _warm(family, ASKED[asked])
    _differs(model, kwargs, lambda: change(model.get_submodule(path)))


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_hook_that_prunes_the_cache(family: str, asked: str) -> None:
    """Tools that compress the cache after prefill use such hooks."""
    model, kwargs = _warm(family, ASKED[asked])
    layers = model.model.layers if family == "llama" else model.transformer.h
    attention = "self_attn" if family == "llama" else "attn"

    def prune(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given = next(
                value for name in CACHE_ARGUMENTS if (value := kwargs.get(name)) is not None
            )
            layer = given.layers[index]
            if output[0].shape[1] > 1:
                layer.keys, layer.values = layer.keys[:, :, -3:], layer.values[:, :, -3:]

        return hook

    def register() -> None:
        for index, layer in enumerate(layers):
            getattr(layer, attention).register_forward_hook(prune(index), with_kwargs=True)

    _differs(model, kwargs, register)


@pytest.mark.parametrize("by", ["a hook", "a replaced forward"])
@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_that_are_added_to_rows(family: str, by: str) -> None:
    """There is one vector for each row of transformers, beams included."""
    model, kwargs = _warm(family, ASKED["beams"])
    rows, width = 9, 16
    vectors = 20 * torch.randn(rows, 1, width, generator=torch.Generator().manual_seed(3))
    layers = {
        "bart": "model.decoder.layers.0",
        "llama": "model.layers.0",
        "gpt2": "transformer.h.0",
    }

    def add(_: nn.Module, __: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        assert hidden.shape[0] == rows
        added = hidden + vectors
        return (added, *output[1:]) if isinstance(output, tuple) else added

    layer = model.get_submodule(layers.get(family, "decoder.block.0"))
    own, before = layer.forward, left_off()

    def put() -> None:
        if by == "a hook":
            layer.register_forward_hook(add)
        else:
            layer.forward = lambda *args, **kwargs: add(layer, args, own(*args, **kwargs))

    _differs(model, kwargs, put)
    assert [reason for reason in left_off() - before if reason.startswith(not_shared(by))]


def test_vectors_that_are_added_while_another_call_runs() -> None:
    """Every call inspects the model again, even while another call runs."""
    model, kwargs = _warm("bart", ASKED["beams"])
    layer, rows = model.model.decoder.layers[0], list[int]()

    class Within(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            if not rows:
                handle = layer.register_forward_hook(lambda _, __, output: rows.append(len(output)))
                model.generate(**kwargs)
                handle.remove()
            return scores

    model.generate(**kwargs | {"logits_processor": LogitsProcessorList([Within()])})
    assert set(rows) == {9}


@pytest.mark.parametrize("asked", ["greedy", "beams"])
def test_an_adapter_for_each_sentence(asked: str) -> None:
    peft = pytest.importorskip("peft")
    config = lambda: peft.LoraConfig(  # noqa: E731
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    model = peft.get_peft_model(zoo.build("llama"), config(), adapter_name="one")
    model.add_adapter("other", config())
    model.double().eval()
    kwargs = zoo.batch(model, 3, 7) | ASKED[asked] | {"adapter_names": ["__base__", "one", "other"]}
    for seed in range(3):
        assert_same(model, kwargs, seed)


@pytest.mark.parametrize("asked", ASKED)
def test_offloaded_weights(asked: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, kwargs = _warm("llama", ASKED[asked], torch.float64)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert_same(model, kwargs)
    assert_same(model, kwargs)
    assert "offloaded" in str(fastgen.explain(model, **kwargs))


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("part", ["model.embed_tokens", "model.layers.1", "lm_head"])
def test_partly_offloaded_weights(asked: str, part: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, kwargs = _warm("llama", ASKED[asked], torch.float64)
    others = [
        "model.embed_tokens",
        "model.layers.0",
        "model.layers.1",
        "model.norm",
        "model.rotary_emb",
        "lm_head",
    ]
    devices = dict.fromkeys(others, "cpu") | {part: "disk"}
    accelerate.dispatch_model(
        model, devices, main_device="cpu", offload_dir=tmp_path, force_hooks=True
    )
    assert_same(model, kwargs)
    assert_same(model, kwargs)


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_a_prompt_in_chunks(family: str) -> None:
    """transformers omits the source's mask here, so attention reads the encoder's padding."""
    model = zoo.build(family)
    kwargs = zoo.batch(model, 3, 9) | {"max_new_tokens": 8, "prefill_chunk_size": 4}
    for _ in range(3):
        assert_same(model, kwargs)
