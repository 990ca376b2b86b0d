"""Check models with adapters, quantised layers and layers of users in the place of linear ones.

Their decode steps run from the weights, with the output of unpatched transformers.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastgen
from fastgen.models.build.equivalence_check import OUTPUTS_DIFFER, by_modules
from fastgen.models.layers.low_rank import LowRank
from fastgen.patches.transformers.generate.report import last_call
from tests.support import zoo
from tests.support.parity import assert_same, left_off

BEAMS: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 8}
GREEDY: dict[str, Any] = {"max_new_tokens": 8}
SCORES: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True}
FEW = {
    "llama": ["q_proj", "v_proj"], "gpt2": ["c_attn"], "bart": ["q_proj", "v_proj"],
    "t5": ["q", "v"], "marian": ["q_proj", "v_proj"],
}  # fmt: skip
ALL = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "bart": ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"],
    "t5": ["q", "k", "v", "o", "wi", "wo"],
    "marian": ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"],
}  # fmt: skip
EMBEDDING = {"llama": "embed_tokens", "gpt2": "wte", "bart": "embed_tokens", "t5": "shared"}


def _config(family: str, layers: list[str], **options: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    return peft.LoraConfig(
        r=4, target_modules=layers, init_lora_weights=False, fan_in_fan_out=family == "gpt2",
        **options,
    )  # fmt: skip


def _lora(
    family: str, layers: list[str], dtype: torch.dtype = torch.float64, **options: Any
) -> Any:
    peft = pytest.importorskip("peft")
    config = _config(family, layers, **options)
    return peft.get_peft_model(zoo.build(family, dtype), config).to(dtype).eval()


def _bare(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _check(model: Any, tolerance: float = 1e-9, **more: Any) -> list[Any]:
    """Assert that steps run from the weights with the same output, and return the outputs."""
    made = list[Any]()
    for given in (GREEDY, BEAMS):
        kwargs = zoo.batch(_bare(model), 3, 7) | given | SCORES | more
        before = left_off()
        made.append(assert_same(model, kwargs, tolerance=tolerance).value)
        call = last_call()
        assert call is not None
        assert call.plan.fused, call.plan
        assert not [new for new in left_off() - before if new.startswith(by_modules(""))]
    return made


def _differ(some: list[Any], others: list[Any]) -> bool:
    pairs = zip(some, others, strict=True)
    return all(not torch.equal(a.scores[0], b.scores[0]) for a, b in pairs)


@pytest.mark.parametrize("family", FEW)
@pytest.mark.parametrize("layers", [FEW, ALL], ids=["few", "all"])
def test_lora(family: str, layers: dict[str, list[str]]) -> None:
    model = _lora(family, layers[family])
    adapted = _check(model)
    with model.disable_adapter():
        assert _differ(_check(model), adapted)
    _check(model)


@pytest.mark.parametrize("family", FEW)
def test_adapters_switched_scaled_and_merged_between_calls(family: str) -> None:
    """No call runs on what an earlier one has read."""
    model = _lora(family, FEW[family])
    model.add_adapter("other", _config(family, FEW[family], lora_alpha=16))
    model.double().eval()
    outputs = [_check(model)]
    model.set_adapter("other")
    outputs.append(_check(model))
    model.base_model.set_adapter(["default", "other"])
    outputs.append(_check(model))
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("other", 0.25)
    outputs.append(_check(model))
    with model.disable_adapter():
        outputs.append(_check(model))
    for i, some in enumerate(outputs):
        assert all(_differ(some, others) for others in outputs[:i])
    model.set_adapter("other")
    several = _check(model)
    model.merge_adapter()
    for found, expected in zip(_check(model), several, strict=True):
        assert torch.equal(found.sequences, expected.sequences)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B.other" in name:
                parameter.neg_()  # Merged adapters are not read.
    _check(model)
    model.unmerge_adapter()
    _check(model)


@pytest.mark.parametrize("family", FEW)
def test_merged_lora_runs_in_c(family: str) -> None:
    model = _lora(family, FEW[family], torch.float32)
    kwargs = zoo.batch(_bare(model), 3, 7) | BEAMS
    plain = fastgen.explain(zoo.build(family, torch.float32), **kwargs)
    model.merge_adapter()
    explanation = fastgen.explain(model, **kwargs)
    assert plain.plan is not None
    assert explanation.plan is not None
    assert explanation.plan.not_in_c == plain.plan.not_in_c
    assert_same(model, kwargs | SCORES, tolerance=1e-3)


@pytest.mark.parametrize("family", FEW)
def test_other_forms_of_lora(family: str) -> None:
    _check(_lora(family, FEW[family], use_dora=True))
    _check(_lora(family, FEW[family], use_rslora=True))
    _check(_lora(family, FEW[family], modules_to_save=["lm_head"]))
    _check(_lora(family, ["lm_head"]))
    if family != "gpt2":  # whose layer has no bias of that kind
        _check(_lora(family, FEW[family], lora_bias=True))


MIXTURES: dict[str, tuple[list[str], list[str]]] = {
    "attention": (["q_proj", "v_proj"], []),
    "router": (["q_proj", "gate"], []),
    "experts": (["q_proj"], ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
}


@pytest.mark.parametrize("where", MIXTURES)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_lora_in_models_with_experts(family: str, where: str) -> None:
    layers, parameters = MIXTURES[where]
    model = _lora(family, layers, target_parameters=parameters)
    adapted = _check(model)
    with model.disable_adapter():
        assert _differ(_check(model), adapted)
    _check(model)
    model.merge_adapter()
    _check(model)


@pytest.mark.parametrize("family", EMBEDDING)
def test_lora_on_embeddings(family: str) -> None:
    model = _lora(family, [EMBEDDING[family], *FEW[family]])
    adapted = _check(model)
    with model.disable_adapter():
        assert _differ(_check(model), adapted)
    model.merge_adapter()
    _check(model)


@pytest.mark.parametrize("kind", ["IA3Config", "LoHaConfig", "OFTConfig"])
def test_other_adapters_run_as_modules(kind: str) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    options: dict[str, Any] = {"target_modules": ["q_proj", "v_proj", "up_proj"]}
    if kind == "IA3Config":
        options |= {"feedforward_modules": ["up_proj"], "init_ia3_weights": False}
    elif kind == "OFTConfig":
        options |= {"oft_block_size": 4, "r": 0}
    else:
        options |= {"r": 2, "init_weights": False}
    model = peft.get_peft_model(zoo.build("llama"), getattr(peft, kind)(**options))
    _check(model.double().eval(), tolerance=1e-6)


def test_weights_of_adapters_in_fp32_beside_bf16() -> None:
    peft = pytest.importorskip("peft")
    model = zoo.build("llama", torch.bfloat16)
    model = peft.get_peft_model(model, _config("llama", FEW["llama"])).eval()
    kwargs = zoo.batch(_bare(model), 3, 7) | BEAMS
    explanation = fastgen.explain(model, **kwargs)
    assert "a peft.Linear is called as a module" in str(explanation)


def test_hooks_and_training_still_run_the_modules() -> None:
    model = _lora("llama", FEW["llama"])
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    kwargs = zoo.batch(_bare(model), 3, 7) | GREEDY
    for part in (layer, layer.lora_A["default"], layer.base_layer):
        handle = part.register_forward_hook(lambda _, __, y: y * 1.5)
        assert_same(model, kwargs)
        assert not fastgen.explain(model, **kwargs).plan.fused
        handle.remove()
    layer.lora_dropout["default"] = nn.Dropout(0.5).train()
    assert not fastgen.explain(model, **kwargs).plan.fused
    assert_same(model, kwargs)


def test_a_forward_of_peft_that_was_replaced_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _lora("llama", FEW["llama"])
    before = _check(model)
    kind: Any = type(model.base_model.model.model.layers[0].self_attn.q_proj)
    own = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: own(self, x) * 2.0)
    assert _differ(_check(model), before)


def test_low_rank_products_are_those_of_peft() -> None:
    from fastgen.models.build.step_builder import step_of
    from fastgen.models.specs.registry import spec_of

    model = _lora("llama", FEW["llama"])
    bare, x = _bare(model), torch.randn(5, 16, dtype=torch.float64)
    with torch.no_grad():
        step = step_of(bare, spec_of(bare.config), 32)
        query = step.sublayers[0].mixer.projections[0]
        assert type(query) is LowRank
        expected = bare.model.layers[0].self_attn.q_proj(x)
        assert torch.allclose(query.apply(x), expected, atol=1e-12, rtol=0)
        residual = torch.randn_like(expected)
        found = query.apply(x, "gelu"), query.apply(x, residual=residual)
        assert torch.allclose(found[0], nn.functional.gelu(expected), atol=1e-12, rtol=0)
        assert torch.allclose(found[1], expected + residual, atol=1e-12, rtol=0)


class _Bytes(nn.Module):
    """A layer with weights in int8 and a forward of its own, as GPTQ's and AWQ's."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        weight = layer.weight.detach()
        scales = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("qweight", (weight / scales).round().to(torch.int8))
        self.register_buffer("scales", scales)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        assert x.dim() == 3
        return nn.functional.linear(x, self.qweight.to(x.dtype) * self.scales, self.bias)


class _Scaled(nn.Linear):
    def forward(self, *args: Tensor) -> Tensor:
        return super().forward(*args) * 1.25


class _Wrapper(nn.Module):
    """A wrapper whose sizes are those of its weight."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    @property
    def weight(self) -> Tensor:
        return self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) - x.sum(-1, keepdim=True)


class _LooksAtRows(_Wrapper):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) - 2 * x.mean((0, 1), keepdim=True).sum(-1, keepdim=True)


class _Counts(_Wrapper):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) * (1 + self.calls % 2)


def _scaled(layer: nn.Linear) -> nn.Module:
    new = _Scaled(layer.in_features, layer.out_features, layer.bias is not None)
    new.load_state_dict(layer.state_dict())
    return new.to(layer.weight.dtype)


def _swapped(family: str, new: Callable[[nn.Linear], nn.Module]) -> Any:
    model = zoo.build(family)
    for module in list(model.modules()):
        for name, layer in list(module._modules.items()):
            if type(layer) is nn.Linear and name != "wo":  # T5 reads that weight's dtype
                module._modules[name] = new(layer)
    return model.eval()


@pytest.mark.parametrize("new", [_Bytes, _scaled, _Wrapper])
@pytest.mark.parametrize("family", ["llama", "bart", "t5", "marian"])
def test_layers_of_users(family: str, new: Callable[[nn.Linear], nn.Module]) -> None:
    model = _swapped(family, new)
    _check(model)
    kwargs = zoo.batch(model, 3, 7) | BEAMS
    assert_same(model, kwargs | {"eos_token_id": list(range(2, 14))})


@pytest.mark.parametrize("family", ["llama", "bart"])
def test_a_layer_that_looks_at_rows_keeps_them(family: str) -> None:
    model = _swapped(family, _LooksAtRows)
    kwargs = zoo.batch(model, 6, 7) | {"eos_token_id": list(range(2, 14)), "max_new_tokens": 12}
    before = left_off()
    for more in (GREEDY, BEAMS):
        assert_same(model, kwargs | more)
    reason = "finished sentences stay in the batch: tests._LooksAtRows may look at the whole batch"
    assert reason in left_off() - before


def test_a_layer_that_keeps_state_is_not_fused() -> None:
    model = _swapped("llama", _Counts)
    before = left_off()
    for more in (GREEDY, BEAMS):
        assert_same(model, zoo.batch(model, 3, 7) | more)
    assert by_modules(OUTPUTS_DIFFER) in left_off() - before


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("family", ["llama", "gpt2", "bart", "t5", "marian"])
def test_dynamically_quantised_layers(family: str) -> None:
    model = torch.ao.quantization.quantize_dynamic(
        zoo.build(family, torch.float32), {nn.Linear}, dtype=torch.qint8
    )
    _check(model, tolerance=1e-3)
    kwargs = zoo.batch(model, 3, 7) | BEAMS
    assert "a torch.Linear is called as a module" in str(fastgen.explain(model, **kwargs))


class _Doubled(Tensor):
    """A weight that is a tensor subclass, as torchao's."""

    @staticmethod
    def __new__(cls, held: Tensor) -> "_Doubled":
        return Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            x, weight, bias = (*args, None)[:3]
            return func(x, weight.held * 2, bias, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].held)
        raise NotImplementedError(str(func))


@pytest.mark.parametrize("family", ["llama", "bart"])
def test_weights_of_tensor_subclasses(family: str) -> None:
    model = zoo.build(family)
    for layer in model.modules():
        if type(layer) is nn.Linear and layer is not model.lm_head:
            weight = _Doubled(layer.weight.detach())
            layer._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
    _check(model)


def test_torchao() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = zoo.build("llama", torch.float32)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    _check(model, tolerance=1e-3)
