"""Decode steps on weights in int8: equal to the toolkit's modules with products in int8."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastgen
from fastgen import config
from fastgen.models.build import int8_step as steps
from fastgen.models.build.encoder_builder import encoder_of
from fastgen.models.build.equivalence_check import distance
from fastgen.models.build.int8_step import (
    int8_bytes,
    int8_encoder,
    why_no_int8_encoder,
    why_not_int8,
)
from fastgen.models.build.step_builder import step_of
from fastgen.models.layers.linear import is_linear, is_transposed
from fastgen.models.layers.packed_weights import Int8Packed, has_copy
from fastgen.models.memory import budget
from fastgen.models.routing.routes import routed
from fastgen.models.runtime.native.step import NativeStep
from fastgen.models.specs.registry import ENCODERS, spec_of
from fastgen.ops import int8
from fastgen.ops.counts import calls
from fastgen.patches.transformers.encoders.encoder import sentences_of
from fastgen.patches.transformers.encoders.unpadded_encoder import _rows
from tests.models.test_in_c import _wide  # noqa: F401  a fixture
from tests.ops.test_native import own_variant as variant  # noqa: F401  a fixture
from tests.support import zoo
from tests.support.parity import assert_same

FAMILIES = [
    "marian", "t5", "bart", "llama", "qwen3", "gpt2", "phi3", "opt", "mistral", "gemma2",
    "falcon-40b",
]  # fmt: skip


@pytest.fixture
def in_int8(monkeypatch: pytest.MonkeyPatch, variant: str) -> Iterator[None]:  # noqa: F811
    monkeypatch.setenv("FASTGEN_PRECISION", "int8")
    config.reload()
    yield
    monkeypatch.undo()
    config.reload()


class _Int8:
    """A linear layer's forward with rounded weights and inputs, perhaps for decode steps alone."""

    def __init__(self, module: Any, steps_alone: bool) -> None:
        self.steps_alone = steps_alone
        weight = module.weight.detach()
        self.weight = int8.rounded(weight.t() if is_transposed(module) else weight)
        self.bias = module.bias
        self.own = module.forward

    def __call__(self, x: Tensor) -> Tensor:
        if self.steps_alone and x.shape[-2] > 1:
            return self.own(x)
        return int8.int8_linear_reference(x, self.weight, self.bias)


@contextlib.contextmanager
def _rounded(model: nn.Module, steps_alone: bool = True) -> Iterator[None]:
    layers = [module for module in model.modules() if is_linear(module)]
    for layer in layers:
        layer.forward = _Int8(layer, steps_alone)  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _logits(model: Any, kwargs: dict[str, Any]) -> Any:
    with torch.no_grad():
        return model.generate(
            **kwargs, output_logits=True, return_dict_in_generate=True, do_sample=False
        )


def _kwargs(model: Any, sentences: int = 3) -> dict[str, Any]:
    kwargs: dict[str, Any] = zoo.batch(model, sentences, 9, "natural") | {"max_new_tokens": 8}
    if model.config.is_encoder_decoder:  # a prompt of one token would look like a decode step
        prompt = torch.tensor([[zoo.START, 7]])
        kwargs["decoder_input_ids"] = prompt.expand(sentences, -1)
    return kwargs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits(in_int8: None, family: str, dtype: torch.dtype) -> None:
    """Each step gives the logits of the toolkit's modules whose products are in int8."""
    model = zoo.build(family, dtype)
    kwargs = _kwargs(model, 1 if family == "opt" else 3)  # OPT's modules flatten a batch
    _logits(model, kwargs)  # the first call compares a step with the modules
    before = calls["decoder_step", "native"]
    found = _logits(model, kwargs)
    assert calls["decoder_step", "native"] > before
    with fastgen.disabled():
        own = _logits(model, kwargs)
        with _rounded(model):
            wanted = _logits(model, kwargs)
    apart = list[float]()
    for step in range(1, 4):
        ours, same, exact = (each.logits[step].float() for each in (found, wanted, own))
        length = found.sequences.shape[1] - len(found.logits) + step
        rows = (found.sequences == wanted.sequences)[:, :length].all(1)
        assert rows.any()
        apart.append(distance(ours[rows], same[rows]))
        assert distance(ours[rows], exact[rows]) > 1e-3, "the step did not run in int8"
    # An input near the middle between two bytes may become either, which changes the logits.
    assert max(apart) < 0.05, apart
    assert dtype != torch.float32 or min(apart) < 1e-6, apart
    with torch.no_grad():  # many steps in one C call
        several = model.generate(**kwargs, do_sample=False)
    assert torch.equal(several, found.sequences)


@pytest.mark.parametrize("family", ["marian", "llama"])
def test_one_operation_at_a_time(
    in_int8: None, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that C does not run as a whole have their products in int8, too."""
    model = zoo.build(family, torch.float32)
    kwargs = _kwargs(model)
    _logits(model, kwargs)
    found = _logits(model, kwargs)
    monkeypatch.setattr(NativeStep, "__call__", lambda *_: None)
    before = calls["int8_linear", "native"]
    single = _logits(model, kwargs)
    assert calls["int8_linear", "native"] > before
    assert distance(single.logits[1], found.logits[1]) < 0.02


def test_weights_may_change_between_calls(in_int8: None) -> None:
    model = zoo.build("marian", torch.float32)
    kwargs = _kwargs(model)
    _logits(model, kwargs)
    first = _logits(model, kwargs).logits[1]
    head = model.lm_head.weight
    head.data *= 2.0  # does not change the version
    changed = _logits(model, kwargs).logits[1]
    assert distance(changed, first) > 0.1
    head.data /= 2.0
    assert distance(_logits(model, kwargs).logits[1], first) < 0.01


def test_memory(in_int8: None) -> None:
    """Copies are kept between calls, counted, and freed; tied weights share one."""
    model = zoo.build("marian", torch.float32)
    kwargs = _kwargs(model)
    _logits(model, kwargs)
    _logits(model, kwargs)
    held = fastgen.status().memory["int8 weights"]
    products = [
        module
        for name, module in model.model.decoder.named_modules()
        if is_linear(module) and not name.endswith(("encoder_attn.k_proj", "encoder_attn.v_proj"))
    ]
    sizes = [int8.bytes_to_pack(*each.weight.shape) for each in (*products, model.lm_head)]
    assert held == sum(sizes)
    assert has_copy(model.lm_head, Int8Packed)
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
    assert not has_copy(model.lm_head, Int8Packed), "the copy of another state does not count"
    fastgen.release()
    assert not fastgen.status().memory["int8 weights"]


@pytest.mark.parametrize("family", ["llama", "marian"])
def test_too_little_memory_for_all_copies(
    in_int8: None, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where only some copies fit, none is made; the model's precision and the reason remain."""
    model = zoo.build(family, torch.float32)
    kwargs = zoo.batch(model, 3, 9, "natural") | {"max_new_tokens": 8}
    for _ in range(2):
        _logits(model, kwargs)
    with fastgen.disabled():
        wanted = _logits(model, kwargs)
    fastgen.release()
    stack: Any = model.get_encoder() if family == "marian" else model
    sizes = [each.weight.shape for each in stack.modules() if is_linear(each)]
    limit = sum(int8.bytes_to_pack(*size) for size in sizes) - 1
    monkeypatch.setattr(budget, "shortage_now", lambda needed: _over_limit(needed, limit))
    found = _logits(model, kwargs)
    for ours, theirs in zip(found.logits, wanted.logits, strict=True):
        assert distance(ours, theirs) < 1e-5
    status = fastgen.status()
    assert not status.memory["int8 weights"]
    assert status.not_packed.endswith("of weights: too little memory")
    note = "decode steps do not run in int8: too little memory"
    assert note in str(fastgen.explain(model, **kwargs))


def _over_limit(needed: int, limit: int) -> str | None:
    held = budget.held_bytes()["int8 weights"]
    return "too little memory" if held + needed > limit else None


def test_reasons(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Without C, and for families whose steps are not written in C, the reason is clear."""
    monkeypatch.setenv("FASTGEN_UNKNOWN", "check")
    for family, ops, reason in (
        ("marian", "auto", ""),
        ("cohere-norms", "auto", "its layers are not written in C"),
        ("marian", "reference", "FASTGEN_OPS=reference"),
    ):
        monkeypatch.setenv("FASTGEN_OPS", ops)
        config.reload()
        model = zoo.build(family, torch.float32)
        spec = spec_of(model.config)
        assert spec is not None
        with torch.no_grad(), routed(model, spec):
            step = step_of(model, spec, 64)
            assert why_not_int8(step) == reason
            if not reason:
                assert int8_bytes(step) > 0
    monkeypatch.undo()
    config.reload()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["marian", "t5", "bart"])
def test_encoder(variant: str, family: str, dtype: torch.dtype) -> None:  # noqa: F811
    """The encoder gives what the toolkit's modules give whose products are in int8."""
    model = zoo.build(family, dtype)
    module = model.get_encoder()
    ids = zoo.batch(model, 3, 9, "none")["input_ids"]
    with torch.no_grad():
        encoder = encoder_of(module, ENCODERS[module.config.model_type], ids.shape[1])
        assert (encoder.run_layers is not None) == (not why_no_int8_encoder(encoder))
        sentences = sentences_of(None, (ids.shape[0], ids.shape[1]), "none")
        before = calls["encoder", "native"]
        found = sentences.restored(_rows(int8_encoder(encoder), ids, sentences))
        assert calls["encoder", "native"] > before
        own = module(input_ids=ids).last_hidden_state
        with _rounded(module, steps_alone=False):
            wanted = module(input_ids=ids).last_hidden_state
    assert distance(found.flatten(0, 1), own.flatten(0, 1)) > 1e-3
    apart = [distance(a, b) for a, b in zip(found, wanted, strict=True)]
    assert max(apart) < 0.05, apart
    assert dtype != torch.float32 or min(apart) < 1e-6, apart


def test_encoder_and_first_token_in_a_call(in_int8: None) -> None:
    """A call of a model that has been compared runs all of its products in int8."""
    model = zoo.build("marian", torch.float32)
    kwargs = zoo.batch(model, 3, 9, "natural") | {"max_new_tokens": 8}
    for _ in range(3):
        model.generate(**kwargs)
    fastgen.release()
    model.generate(**kwargs)
    status = fastgen.status()
    assert status.memory["int8 weights"] > 0
    assert status.memory["packed weights"] == 0


def test_what_is_said(
    in_int8: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """explain() and the log say that outputs differ; or why weights are not rounded."""
    steps._warn.cache_clear()
    model = zoo.build("marian", torch.float32)
    kwargs = _kwargs(model)
    explained = fastgen.explain(model, **kwargs)
    assert explained.plan is not None
    assert explained.plan.int8
    assert "on weights rounded to int8: outputs differ" in str(explained)
    for _ in range(3):
        _logits(model, kwargs)
    assert [record.getMessage() for record in caplog.records] == [
        "FASTGEN_PRECISION=int8: weights are rounded to int8, so outputs differ from the toolkit's"
    ]
    model = zoo.build("cohere-norms", torch.float32)
    explained = fastgen.explain(model, **_kwargs(model))
    assert explained.plan is not None
    assert not explained.plan.int8
    assert "decode steps do not run in int8: its layers are not written in C" in str(explained)
    monkeypatch.setenv("FASTGEN_PRECISION", "model")
    config.reload()
    explained = fastgen.explain(model, **_kwargs(model))
    assert "int8" not in str(explained)


def test_fewer_than_all_can(in_int8: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call whose steps cannot run in int8 runs in full precision, with the same output."""
    monkeypatch.setenv("FASTGEN_STEP", "module")
    config.reload()
    model = zoo.build("llama", torch.float32)
    for _ in range(2):
        assert_same(model, _kwargs(model))
