"""Decode steps of a model's own modules, captured once and replayed: equal to transformers'."""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn
from transformers import LogitsProcessor

import fastgen
from fastgen.models.build import equivalence_check
from fastgen.models.build.equivalence_check import OUTPUTS_DIFFER as NOT_FUSED
from fastgen.models.build.equivalence_check import UNDECIDED, by_modules
from fastgen.models.cuda_graphs import graph
from fastgen.models.cuda_graphs.replay import not_captured
from fastgen.patches.transformers.compat import CACHE
from fastgen.patches.transformers.generate.captured_module_step import OUTPUTS_DIFFER, SURE, WORTH
from fastgen.patches.transformers.generate.report import CallReport, last_call
from fastgen.patches.transformers.generate.shared_stepper import SharedStepper
from fastgen.patches.transformers.planning.sharing import MODULES_CANNOT, not_shared
from tests.models.test_fused import FIELDS, _build
from tests.support import zoo
from tests.support.parity import assert_same, left_off
from tests.support.recorder import Graphs

ENDS = {"eos_token_id": list(range(2, zoo.VOCABULARY, 4)), "pad_token_id": 2}


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    return Graphs(monkeypatch)


@pytest.fixture
def by_own_modules(setting: Callable[[str, str], None]) -> None:
    setting("FASTGEN_STEP", "module")


def _same(model: Any, kwargs: dict[str, Any], tolerance: float = 1e-5) -> CallReport:
    assert assert_same(model, kwargs, tolerance=tolerance).error is None
    call = last_call()
    assert call is not None
    assert call.plan.shared
    assert not call.plan.fused
    return call


def _reasons(call: CallReport) -> list[str]:
    return [text for text in call.plan.left_off if text.startswith(not_captured(""))]


def _call(model: Any, beams: int = 1, tokens: int = 24, sentences: int = 3) -> dict[str, Any]:
    batch = zoo.batch(model, sentences, 9)
    return batch | {"num_beams": beams, "max_new_tokens": tokens, "min_new_tokens": tokens}


CAPTURED = [
    "bart", "blenderbot", "marian", "pegasus", "t5", "umt5", "gpt2", "opt", "llama", "mistral",
    "gemma2", "gemma3_text", "gpt_neox", "phi", "phi3", "qwen3",
]  # fmt: skip


@pytest.mark.usefixtures("by_own_modules")
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("family", CAPTURED)
def test_family(family: str, beams: int, graphs: Graphs) -> None:
    """Scores and logits are returned.

    For some families the text outgrows the attention window while beams share its prefix.
    """
    model = _build(family) if beams == 1 else zoo.build(family)
    for padding in ("none",) if family == "gemma2" else ("none", "natural"):
        kwargs = (
            zoo.batch(model, 4, 9, padding) | {"num_beams": beams, "max_new_tokens": 24} | FIELDS
        )
        if padding == "none":
            kwargs |= ENDS
        call = _same(model, kwargs | {"min_new_tokens": 10})
        assert call.plan.graphs
        assert not _reasons(call)
    assert graphs.captured["_run_modules"] == (1 if family == "gemma2" else 2)
    assert graphs.replayed["_run_modules"] >= 6 * graphs.captured["_run_modules"]


@pytest.mark.usefixtures("by_own_modules")
@pytest.mark.parametrize("beams", [1, 3])
def test_speech(beams: int, graphs: Graphs) -> None:
    """Test a model that prepares its own inputs and has no source mask."""
    model = zoo.build("whisper")
    features = torch.randn(
        2, zoo.MELS, zoo.FRAMES, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    kwargs = {
        "input_features": features,
        "num_beams": beams,
        "max_new_tokens": 24,
        "language": "en",
    }
    call = _same(model, kwargs | {"return_timestamps": False})
    assert call.plan.graphs
    assert graphs.replayed["_run_modules"]


@pytest.mark.usefixtures("by_own_modules")
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("family", ["bart", "t5", "gpt2"])
def test_a_text_that_outgrows_its_memory(
    family: str, beams: int, graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few steps are computed both ways.

    A new model needs many of them, a known one needs one per capture.
    """
    model, own = _build(family), Counter[str]()
    kwargs = zoo.batch(model, 2, 5) | {
        "num_beams": beams,
        "max_new_tokens": 110,
        "min_new_tokens": 110,
    }
    forward = SharedStepper._of_module

    def counted(self: Any, *args: Any, **more: Any) -> Any:
        own.update(["steps"])
        return forward(self, *args, **more)

    monkeypatch.setattr(SharedStepper, "_of_module", counted)
    monkeypatch.setattr(graph, "ROOMY", 2**60)
    for known in (False, True):
        for counts in (graphs.captured, graphs.replayed, own):
            counts.clear()
        assert _same(model, kwargs).plan.graphs
        captures = graphs.captured["_run_modules"]
        # A known model reuses the buffers of the previous call.
        assert captures == (1 if known and beams == 1 else 2)
        # Except the first step, and the steps before a capture.
        assert graphs.replayed["_run_modules"] == 109 - 1 - captures
        both = captures if known else 2 * SURE + len((4, 8, 16, 32)) + len((4, 8, 16, 32))
        assert own["steps"] == 1 + both


@pytest.mark.usefixtures("by_own_modules")
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("family", ["pegasus", "gpt2", "t5"])
def test_sentences_that_leave(family: str, beams: int, graphs: Graphs) -> None:
    model = _build(family)
    kwargs = (
        zoo.batch(model, 24, 9)
        | ENDS
        | {"num_beams": beams, "early_stopping": beams > 1, "max_new_tokens": 60}
    )
    for _ in range(2):
        call = _same(model, kwargs)
        assert len({rows for rows, _ in call.steps}) > 1
        assert call.plan.graphs
    assert graphs.captured["_run_modules"] >= 2
    assert graphs.replayed["_run_modules"]


@pytest.mark.usefixtures("by_own_modules")
@pytest.mark.parametrize(
    ("family", "beams"), [("bart", 1), ("bart", 3), ("t5", 3), ("llama", 1), ("llama", 3)]
)
@pytest.mark.slow
def test_kernels(
    family: str, beams: int, setting: Callable[[str, str], None], graphs: Graphs
) -> None:
    setting("FASTGEN_OPS", "triton")
    model = _build(family, torch.float32)
    _same(model, _call(model, beams, 18, 2), tolerance=1e-4)
    assert graphs.kernels["_run_modules"]["_attention_kernel"] == (2 if family == "llama" else 4)
    assert graphs.kernels["_run_modules"]["_write_slots_kernel"] == 2
    assert graphs.replayed["_run_modules"]


class _Adapted(nn.Module):
    """A linear layer plus a low-rank product, as in LoRA."""

    def __init__(self, base: nn.Module, rank: int = 2) -> None:
        super().__init__()
        self.base, self.active = base, True
        rows, columns = base.weight.shape
        weights = functools.partial(
            torch.randn, generator=torch.Generator().manual_seed(1), dtype=base.weight.dtype
        )
        self.down, self.up = nn.Parameter(weights(rank, columns)), nn.Parameter(weights(rows, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.base(x)
        return made + x @ self.down.T @ self.up.T if self.active else made


def _adapt(model: Any, kind: Callable[[nn.Module], nn.Module] = _Adapted) -> Any:
    """Replace a linear layer of every decoder layer by a module; return the model."""
    for layer in (model.get_decoder() if model.config.is_encoder_decoder else model.model).layers:
        layer.self_attn.v_proj = kind(layer.self_attn.v_proj)
    return model.eval()


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("family", ["bart", "llama"])
def test_adapters(family: str, beams: int, graphs: Graphs) -> None:
    model = _adapt(_build(family))
    call = _same(model, _call(model, beams))
    assert by_modules("a tests._Adapted in place of a linear layer") in call.plan.left_off
    assert call.plan.graphs
    assert graphs.captured["_run_modules"] == 1
    explanation = fastgen.explain(model, **_call(model, beams))
    assert "through the model's own modules, as CUDA graphs" in str(explanation)


@pytest.mark.usefixtures("by_own_modules")
@pytest.mark.parametrize("beams", [1, 3])
def test_adapters_of_peft(beams: int, graphs: Graphs) -> None:
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(_build("llama"), options).eval()
    for _ in range(2):
        assert _same(model, _call(model, beams)).plan.graphs
    assert graphs.captured["_run_modules"] == 2


def test_a_model_that_is_not_what_its_family_is(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the weights compute something else, modules run the steps, and those are captured."""
    monkeypatch.setattr(equivalence_check, "agree", lambda *_: False)
    model = _build("llama")
    for _ in range(2):
        call = _same(model, _call(model, 3))
        assert by_modules(NOT_FUSED) in call.plan.left_off
        assert call.plan.graphs
    assert graphs.captured["_run_modules"] == 2


def _left(model: Any, graphs: Graphs, reason: str, beams: int = 1, **more: Any) -> None:
    """Assert that steps are unchanged and not captured, and that the reason is counted."""
    for _ in range(2):
        before = left_off()
        call = _same(model, _call(model, beams) | more)
        assert not call.plan.graphs
        assert _reasons(call) == [not_captured(reason)]
        assert left_off()[not_captured(reason)] == before[not_captured(reason)] + 1
        assert not graphs.replaying
    notes = fastgen.explain(model, **_call(model, beams) | more).notes
    assert not_captured(reason) in notes


@pytest.mark.usefixtures("by_own_modules")
@pytest.mark.parametrize("beams", [1, 3])
def test_a_hook_runs_at_every_step(beams: int, graphs: Graphs) -> None:
    model, called = _build("llama"), Counter[str]()
    model.model.layers[0].register_forward_hook(lambda *_: called.update(["hook"]))
    assert_same(model, _call(model, beams))
    call = last_call()
    assert call is not None
    assert not call.plan.graphs
    assert (
        not_shared("a hook on a LlamaDecoderLayer may look at rows, or at the cache")
        in call.plan.left_off
    )
    called.clear()
    model.generate(**_call(model, beams))
    assert called["hook"] == 24
    assert not graphs.captured["_run_modules"]


def _training(model: Any) -> None:
    model.lm_head.train()


def _own_inputs(model: Any) -> None:
    kind = type(model)

    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        return kind.prepare_inputs_for_generation(self, *args, **kwargs)

    model.__class__ = type(kind.__name__, (kind,), {"prepare_inputs_for_generation": prepare})


@pytest.mark.usefixtures("by_own_modules")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_training, "a Linear is in training mode"),
        (_own_inputs, "LlamaForCausalLM has its own prepare_inputs_for_generation"),
    ],
)
def test_what_is_known_beforehand(
    change: Callable[[Any], None], reason: str, graphs: Graphs
) -> None:
    model = _build("llama")
    change(model)
    _left(model, graphs, reason, 3)
    assert not graphs.captured["_run_modules"]


@pytest.mark.usefixtures("by_own_modules")
def test_arguments(graphs: Graphs) -> None:
    model = _build("llama")
    returned = {"output_hidden_states": True, "return_dict_in_generate": True}
    _left(model, graphs, "hidden states or attentions are returned", **returned)
    with torch.autocast("cpu", torch.bfloat16):
        model.generate(**_call(model))
    call = last_call()
    assert call is not None
    assert _reasons(call) == [not_captured("autocast chooses the types")]
    model = zoo.build("gptj", torch.float32)
    _left(model, graphs, MODULES_CANNOT)
    assert not graphs.captured["_run_modules"]


@pytest.mark.usefixtures("by_own_modules")
def test_few_steps_are_not_worth_it(graphs: Graphs) -> None:
    model = _build("bart")
    call = _same(model, _call(model, 3, WORTH))
    assert not call.plan.graphs
    assert not _reasons(call)
    assert not graphs.captured


def _dynamic() -> Any:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    return tf.LlamaForCausalLM(
        tf.LlamaConfig(**zoo._DECODER | {"max_position_embeddings": 20}, rope_parameters=rope)
    )


@pytest.mark.usefixtures("by_own_modules")
@pytest.mark.parametrize(
    "build", [functools.partial(_build, "m2m_100"), _dynamic], ids=["table", "rotation"]
)
def test_a_length_that_python_looks_at(build: Callable[[], Any], graphs: Graphs) -> None:
    """Python reads a length on the device, to grow a position table or change a rotation."""
    torch.manual_seed(0)
    model = build().double().eval()
    _left(
        model,
        graphs,
        "aten._local_scalar_dense.default: operation not permitted when stream is capturing",
        3,
    )


class _Scaled(nn.Module):
    """A linear layer whose output is scaled by `number`, which may change from step to step."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) * (1 + self.number(x) / 10)

    def number(self, x: torch.Tensor) -> float:
        raise NotImplementedError


class _OfDevice(_Scaled):
    def number(self, x: torch.Tensor) -> float:
        return float(x.sum().tanh().item())


class _Counting(_Scaled):
    """Scale by the number of tokens seen, which the module counts itself."""

    seen = 0

    def number(self, x: torch.Tensor) -> float:
        self.seen = x.shape[1] if x.shape[1] > 1 else self.seen + 1
        return self.seen % 7


class _Length(LogitsProcessor):
    """Record the text length on the host at every step."""

    now = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any) -> Any:
        _Length.now = input_ids.shape[1] + 1
        return scores


class _Baked(_Scaled):
    """Scale by the text length, as known on the host."""

    def number(self, x: torch.Tensor) -> float:
        return _Length.now % 7 if x.shape[1] == 1 else 0


@pytest.mark.parametrize("beams", [1, 3])
def test_a_value_that_is_asked_for(beams: int, graphs: Graphs) -> None:
    reason = "aten._local_scalar_dense.default: operation not permitted when stream is capturing"
    _left(_adapt(_build("llama"), _OfDevice), graphs, reason, beams)


@pytest.mark.parametrize("beams", [1, 3])
def test_modules_that_count(beams: int, graphs: Graphs) -> None:
    """No step is counted twice, even though one of them is a trial."""
    reason = (
        "its forward does not run over memory that stays in place: it changes what its modules hold"
    )
    _left(_adapt(_build("llama"), _Counting), graphs, reason, beams)


@pytest.mark.parametrize("beams", [1, 3])
def test_a_number_that_a_capture_would_fix(beams: int, graphs: Graphs) -> None:
    """The number is right when captured, and found to be wrong at the next length."""
    model = _adapt(_build("bart"), _Baked)
    _left(model, graphs, OUTPUTS_DIFFER, beams, logits_processor=[_Length()])
    assert graphs.replayed["_run_modules"] == SURE - 1


@pytest.mark.parametrize("beams", [1, 3])
def test_a_number_that_a_model_known_to_be_good_has_begun_to_fix(
    beams: int, graphs: Graphs
) -> None:
    """After every capture, a step other than the captured one is compared."""
    model = _adapt(_build("bart"), _Baked)
    _Length.now = 0
    assert _same(model, _call(model, beams)).plan.graphs
    _left(model, graphs, OUTPUTS_DIFFER, beams, logits_processor=[_Length()])


class _Looking(nn.Module):
    """Attention whose queries are scaled by the text length that the cache reports."""

    def __init__(self, attention: Any, ask: Callable[[Any], float]) -> None:
        super().__init__()
        self.attention, self.ask = attention, ask

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        scale = 1 + self.ask(kwargs[CACHE]) % 7 / 10
        return self.attention(hidden_states=hidden_states * scale, **kwargs)


def _by_length(past: Any) -> float:
    return float(past.get_seq_length(1))


def _by_shape(past: Any) -> float:
    return past.layers[0].keys.shape[2]


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        (
            _by_length,
            "aten._local_scalar_dense.default: operation not permitted when stream is capturing",
        ),
        (_by_shape, OUTPUTS_DIFFER),
    ],
)
def test_the_length_as_a_number(
    ask: Callable[[Any], float], reason: str, beams: int, graphs: Graphs
) -> None:
    model = _build("llama")
    model.model.layers[1].self_attn = _Looking(model.model.layers[1].self_attn, ask)
    for call in (_same(model.eval(), _call(model, beams)), _same(model, _call(model, beams))):
        assert _reasons(call) == [not_captured(reason)]


@pytest.mark.usefixtures("by_own_modules")
def test_logits_that_cannot_be_compared(graphs: Graphs) -> None:
    model = _build("bart")
    model.final_logits_bias[0, 5] = -torch.inf
    call = _same(model, _call(model, 3))
    assert _reasons(call) == [not_captured(UNDECIDED)]
    model.final_logits_bias[0, 5] = 0
    assert _same(model, _call(model, 3)).plan.graphs


@pytest.mark.usefixtures("by_own_modules")
@pytest.mark.parametrize("beams", [1, 3])
def test_a_capture_that_fails_late(
    beams: int, graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the failed capture on, steps run one by one, although sentences have left."""
    capture, model = graph.capture, _build("gpt2")
    kwargs = (
        zoo.batch(model, 24, 9)
        | ENDS
        | {"num_beams": beams, "max_new_tokens": 60, "early_stopping": beams > 1}
    )

    def refusing(function: Any, *others: Any) -> Any:
        if graphs.captured["_run_modules"]:
            raise graph.NotCaptured("out of luck")
        return capture(function, *others)

    monkeypatch.setattr(graph, "capture", refusing)
    call = _same(model, kwargs)
    assert not call.plan.graphs
    assert _reasons(call) == [not_captured("out of luck")]
    assert graphs.replayed["_run_modules"]


def test_nothing_on_a_cpu(by_own_modules: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _build("llama")
    call = _same(model, _call(model, 3))
    assert not call.plan.graphs
    assert not _reasons(call)
