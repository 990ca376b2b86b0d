"""Check families without a spec: shared once a first call has agreed, else left as they are."""

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import fastgen
from fastgen.models.state import process_state
from fastgen.patches.transformers.cache import attention
from fastgen.patches.transformers.compat import CACHE
from fastgen.patches.transformers.generate.module_stepper import ModuleStepper
from fastgen.patches.transformers.generate.report import last_call
from fastgen.patches.transformers.generate.shared_stepper import SharedStepper
from fastgen.patches.transformers.planning import sharing
from fastgen.patches.transformers.unlisted import checked_stepper, families
from fastgen.patches.transformers.unlisted.families import FamilyVerdicts
from tests.support import zoo
from tests.support.parity import assert_same, left_off

CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 7, "temperature": 0.8},
    "beams": {"num_beams": 3, "no_repeat_ngram_size": 2},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "dict": {"num_beams": 3, "return_dict_in_generate": True, "output_scores": True},
}


@pytest.fixture(autouse=True)
def _verdicts() -> Iterator[dict[Any, str]]:
    """Start without verdicts, and leave none."""
    process_state().drop(FamilyVerdicts)
    yield process_state().of(FamilyVerdicts).verdicts
    process_state().drop(FamilyVerdicts)


def _verdicts_now() -> list[str]:
    return list(process_state().of(FamilyVerdicts).verdicts.values())


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note the forwards of decode steps: over transformers' own cache, or the shared one."""
    noted: list[str] = []

    def forward(stepper: Any, ids: Tensor, own: Any = ModuleStepper._forward) -> Any:
        noted.append("shared" if isinstance(stepper, SharedStepper) and stepper.cache else "own")
        return own(stepper, ids)

    monkeypatch.setattr(ModuleStepper, "_forward", forward)
    return noted


@pytest.mark.parametrize("padding", ["left", "none"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_calls(name: str, padding: str, dtype: torch.dtype, runs: list[str]) -> None:
    """The first call runs both ways, later ones over the shared cache alone."""
    model = zoo.unproven(dtype)
    kwargs = zoo.batch(model, 3, 9, padding) | {"max_new_tokens": 9, "min_new_tokens": 9}
    for call in range(2):
        runs.clear()
        tolerance = 1e-9 if dtype == torch.float64 else 1e-4
        assert assert_same(model, kwargs | CALLS[name], tolerance=tolerance).error is None
        assert runs.count("own") == (0 if call else checked_stepper.CHECKED)
        assert runs.count("shared") == 8
        assert last_call().plan.shared
    assert _verdicts_now() == [""]


def test_a_call_looks_at_all_modules_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call, which is checked, and the second find their key when they are planned."""
    keys = list[Any]()

    def key_of(*given: Any) -> Any:
        keys.append(families.key_of(*given))
        return keys[-1]

    monkeypatch.setattr(sharing, "key_of", key_of)
    model = zoo.unproven()
    for number in (1, 2):
        model.generate(**zoo.batch(model, 2, 7), max_new_tokens=6)
        assert last_call().plan.family == keys[0]
        assert len(keys) == number


def test_a_verdict_holds_for_all_models_of_a_class_that_compute_alike(runs: list[str]) -> None:
    first, second = zoo.unproven(), zoo.unproven()
    kwargs = zoo.batch(first, 2, 7) | {"num_beams": 3, "max_new_tokens": 6}
    first.generate(**kwargs)
    runs.clear()
    second.generate(**kwargs)
    assert "own" not in runs
    for changed in (copy.deepcopy(second), zoo.unproven(torch.float64)):
        changed.config.rms_norm_eps *= 1 if changed.dtype == torch.float64 else 2
        runs.clear()
        changed.generate(**kwargs)
        assert "own" in runs
    greedy = kwargs | {"num_beams": 1}
    runs.clear()
    second.generate(**greedy)
    assert "own" in runs


def test_short_calls_reach_a_verdict_together() -> None:
    model = zoo.unproven()
    kwargs = zoo.batch(model, 2, 7) | {"num_beams": 3, "max_new_tokens": 3}
    assert assert_same(model, kwargs).error is None
    assert _verdicts_now() == []
    assert assert_same(model, kwargs).error is None
    assert _verdicts_now() == [""]


def test_a_module_that_is_replaced_is_checked(runs: list[str]) -> None:
    model = zoo.unproven()
    kwargs = zoo.batch(model, 2, 7) | {"num_beams": 3, "max_new_tokens": 6}
    model.generate(**kwargs)

    class Odd(nn.Module):
        def __init__(self, own: nn.Module) -> None:
            super().__init__()
            self.own = own

        def forward(self, x: Tensor) -> Tensor:
            return self.own(x) * x.shape[0]

    model.model.layers[0].mlp = Odd(model.model.layers[0].mlp)
    runs.clear()
    assert assert_same(model, kwargs).error is None
    assert "own" in runs
    assert not last_call().plan.shared


def test_a_config_that_holds_objects() -> None:
    model = zoo.unproven()
    model.config.extra = object()
    kwargs = zoo.batch(model, 2, 7) | {"num_beams": 3, "max_new_tokens": 6}
    assert assert_same(model, kwargs).error is None
    assert f"keys and values are not shared: {families.NOT_COMPARABLE}" in left_off()


def test_returned_hidden_states() -> None:
    model = zoo.unproven(torch.float64)
    kwargs = zoo.batch(model, 2, 7) | {"num_beams": 3, "max_new_tokens": 6}
    kwargs |= {"return_dict_in_generate": True, "output_hidden_states": True}
    for _ in range(2):
        assert assert_same(model, kwargs).error is None


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
def test_an_exception_from_outside_is_raised(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.unproven()

    def prefill(self: Any) -> Tensor:
        model.model.marked = True
        raise error

    monkeypatch.setattr(SharedStepper, "prefill", prefill)
    with pytest.raises(error):
        model.generate(**zoo.batch(model, 2, 7), num_beams=3, max_new_tokens=6)
    assert not hasattr(model.model, "marked")
    assert _verdicts_now() == []


def test_half_precision() -> None:
    """Rounding alone, measured on the prompt, does not let a family fail."""
    for dtype in (torch.bfloat16, torch.float16):
        model = zoo.unproven(dtype)
        kwargs = zoo.batch(model, 2, 7, "left") | {"max_new_tokens": 6}
        for options in CALLS.values():
            torch.manual_seed(0)
            model.generate(**kwargs | options)
    assert set(_verdicts_now()) == {""}


def _attends_alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    return zoo.alone(zoo.unproven())


def _reads_the_batch(monkeypatch: pytest.MonkeyPatch) -> Any:
    model, layer = zoo.unproven(), tf.models.arcee.modeling_arcee.ArceeMLP

    def forward(self: Any, x: Tensor, own: Any = layer.forward) -> Tensor:
        return own(self, x) * x.shape[0]

    monkeypatch.setattr(layer, "forward", forward)
    return model


def _raises(monkeypatch: pytest.MonkeyPatch) -> Any:
    model, kind = zoo.unproven(), tf.models.arcee.modeling_arcee.ArceeModel

    def forward(self: Any, *args: Any, own: Any = kind.forward, **kwargs: Any) -> Any:
        if not isinstance(kwargs[CACHE], tf.DynamicCache):
            raise TypeError("no DynamicCache")
        return own(self, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", forward)
    return model


def _remembers(monkeypatch: pytest.MonkeyPatch) -> Any:
    model, kind = zoo.unproven(), tf.models.arcee.modeling_arcee.ArceeAttention

    def forward(self: Any, *args: Any, own: Any = kind.forward, **kwargs: Any) -> Any:
        self.mask = kwargs["attention_mask"]
        return own(self, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", forward)
    return model


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (_attends_alone, "Alone computes with the cache in a way of its own"),
        (_reads_the_batch, families.DIFFERS),
        (_raises, "TypeError over the shared cache"),
        (_remembers, "its modules keep state of their own"),
    ],
)
def test_families_that_cannot_share(
    build: Callable[[pytest.MonkeyPatch], Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller gets what transformers gives, in the first call and in later ones."""
    model = build(monkeypatch)
    kwargs = zoo.batch(model, 3, 9, "left") | {"num_beams": 3, "max_new_tokens": 7}
    for _ in range(2):
        assert assert_same(model, kwargs).error is None
        assert f"keys and values are not shared: {reason}" in left_off()
        assert not last_call().plan.shared
    assert _verdicts_now() == [reason]
    assert f"keys and values are not shared: {reason}" in fastgen.explain(model, **kwargs).notes


def test_a_lack_of_memory_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.unproven()
    kwargs = zoo.batch(model, 3, 9, "left") | {"num_beams": 3, "max_new_tokens": 7}

    def prefill(self: Any) -> Tensor:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patched:
        patched.setattr(SharedStepper, "prefill", prefill)
        assert assert_same(model, kwargs).error is None
    assert _verdicts_now() == []


def test_logits_that_are_not_finite_are_no_verdict() -> None:
    model = zoo.unproven()
    with torch.no_grad():
        model.lm_head.weight[5] = torch.nan
    kwargs = zoo.batch(model, 2, 7) | {"max_new_tokens": 6}
    for _ in range(2):
        assert assert_same(model, kwargs).error is None
        assert not last_call().plan.shared
    assert _verdicts_now() == []
    assert fastgen.explain(zoo.unproven(), **kwargs).plan.shared


@pytest.mark.parametrize("known", [True, False])
def test_attention_sinks(
    known: bool, setting: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A keyword that the shared cache does not know keeps a family from sharing."""
    setting("FASTGEN_STEP", "module")
    if not known:
        monkeypatch.setattr(attention, "_KNOWN", attention._KNOWN - {"s_aux"})
    torch.manual_seed(0)
    config = tf.GptOssConfig(
        vocab_size=zoo.VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=4,
        num_experts_per_tok=2, initializer_range=0.5, pad_token_id=zoo.PAD, eos_token_id=zoo.EOS,
        layer_types=["full_attention"] * 2, rope_scaling=None,
    )  # fmt: skip
    for sinks in (-40.0, 3.0):  # without effect, and with one
        model = tf.GptOssForCausalLM(config).float().eval()
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.sinks.fill_(sinks)
        kwargs = zoo.batch(model, 2, 7, "none") | {"num_beams": 3, "max_new_tokens": 8}
        assert assert_same(model, kwargs).error is None
        assert last_call().plan.shared == known
        assert assert_same(model, kwargs | {"num_beams": 1}).error is None
        assert last_call().plan.shared


def test_an_error_of_the_model_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.unproven()

    def forward(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("of the model")

    monkeypatch.setattr(nn.Embedding, "forward", forward)
    with pytest.raises(ValueError, match="of the model"):
        model.generate(**zoo.batch(model, 2, 7), max_new_tokens=6)


def test_dropout_that_draws_is_left_alone() -> None:
    model = zoo.unproven().train()
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    kwargs = zoo.batch(model, 2, 7) | {"num_beams": 3, "max_new_tokens": 6}
    assert assert_same(model, kwargs).error is None
    assert _verdicts_now() == []
    assert not last_call().plan.shared


def test_trust_honours_what_was_found(setting: Callable[[str, str], None]) -> None:
    model = zoo.alone(zoo.unproven())
    kwargs = zoo.batch(model, 2, 7) | {"num_beams": 3, "max_new_tokens": 6}
    model.generate(**kwargs)
    setting("FASTGEN_UNKNOWN", "trust")
    assert assert_same(model, kwargs).error is None
    assert not last_call().plan.shared


def test_trust(setting: Callable[[str, str], None], runs: list[str]) -> None:
    setting("FASTGEN_UNKNOWN", "trust")
    model = zoo.unproven()
    kwargs = zoo.batch(model, 2, 7) | {"num_beams": 3, "max_new_tokens": 6}
    assert assert_same(model, kwargs).error is None
    assert "own" not in runs
    assert last_call().plan.shared


def test_threads() -> None:
    """Two first calls at a time are both checked, and both are right."""
    model = zoo.unproven()
    kwargs = zoo.batch(model, 3, 9, "left") | {"num_beams": 3, "max_new_tokens": 7}
    with fastgen.disabled():
        expected = model.generate(**kwargs)
    found: list[Tensor] = []
    threads = [
        threading.Thread(target=lambda: found.append(model.generate(**kwargs))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert all(torch.equal(each, expected) for each in found)
    assert _verdicts_now() == [""]
