"""Check continuous batching: sequences stay equal, and refusals have a reason."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper

import fastgen
from fastgen import config
from fastgen.decoding.batching import continuous_batching
from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.models.runtime.joint_step import JointStepInputs
from fastgen.patches.engine.out_of_memory import NO_MEMORY
from fastgen.patches.transformers.generate.shared_stepper import SharedStepper
from tests.support import zoo
from tests.support.parity import hits, left_off
from tests.support.recorder import Graphs
from tests.support.together import start_soon

EMPTY = "batches do not refill: "
ENDS = {"eos_token_id": [2, *range(20, 40)], "pad_token_id": 5}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": ENDS | {"max_new_tokens": 20, "no_repeat_ngram_size": 3},
    "greedy, blocked": ENDS
    | {"max_new_tokens": 20, "no_repeat_ngram_size": 2, "min_new_tokens": 3},
    "greedy, penalty": ENDS | {"max_new_tokens": 20, "repetition_penalty": 1.3},
    "beams": ENDS
    | {"max_new_tokens": 20, "num_beams": 4, "num_return_sequences": 2, "early_stopping": True},
    "beams, blocked": ENDS
    | {"max_new_tokens": 20, "num_beams": 4, "no_repeat_ngram_size": 3, "min_new_tokens": 2},
    "beams, penalty": ENDS | {"max_new_tokens": 20, "num_beams": 4, "repetition_penalty": 1.7},
}


def _sentences(count: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 12, (count,), generator=generator).tolist()
    return [torch.randint(40, zoo.VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def _alone(
    model: Any, sentences: list[list[int]], options: dict[str, Any]
) -> list[list[list[int]]]:
    """Return the output of transformers for each sentence by itself."""
    with fastgen.disabled():
        return [model.generate(input_ids=torch.tensor([s]), **options).tolist() for s in sentences]


def _streamed(
    model: Any, sentences: Any, options: dict[str, Any], **sizes: int
) -> list[list[list[int]]]:
    return [
        ids.tolist()
        for ids in fastgen.generate_stream(
            model, sentences, **{"max_tokens": 60} | sizes, **options
        )
    ]


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the number of batches in each joint step; batches start once a few sentences left."""
    return start_soon(monkeypatch)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("family", ["bart", "marian", "t5", "gpt2", "llama"])
def test_each_sentence_as_by_itself(family: str, options: str, together: list[int]) -> None:
    model, sentences, before = zoo.build(family), _sentences(40), hits()
    expected = _alone(model, sentences, OPTIONS[options])
    assert _streamed(model, sentences, OPTIONS[options]) == expected
    assert max(together) > 1
    assert hits() > before
    together.clear()
    assert _streamed(model, sentences, OPTIONS[options], window=30) == expected
    assert max(together) > 1


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    return Graphs(monkeypatch)


@pytest.mark.parametrize(
    "options", ["greedy, blocked", "greedy, penalty", "beams", "beams, blocked"]
)
@pytest.mark.parametrize("family", ["bart", "t5", "llama"])
def test_captured(family: str, options: str, together: list[int], graphs: Graphs) -> None:
    """As on a GPU, a joint step is captured until a batch joins, leaves or moves."""
    model, sentences = zoo.build(family), _sentences(40)
    expected = _alone(model, sentences, OPTIONS[options])
    assert _streamed(model, sentences, OPTIONS[options]) == expected
    assert max(together) > 1
    assert graphs.texts[2] + graphs.texts[3] >= 3


def test_steps_of_several_that_cannot_be_captured(
    together: list[int], graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running batches continue, and no further ones start beside others."""
    position = JointStepInputs._position

    def asking(self: JointStepInputs) -> Any:
        assert torch.ones(1).item()
        return position(self)

    monkeypatch.setattr(JointStepInputs, "_position", asking)
    model, sentences, before = zoo.build("bart"), _sentences(40), left_off()
    assert _streamed(model, sentences, OPTIONS["beams"]) == _alone(
        model, sentences, OPTIONS["beams"]
    )
    (reason,) = (reason for reason in left_off() - before if reason.startswith(EMPTY))
    assert "captured as CUDA graphs" in reason
    assert graphs.texts[2] == 0 < graphs.texts[1]
    assert 2 in together


@pytest.mark.parametrize(
    ("refill", "devices", "reason"),
    [
        ("auto", ["cpu"], None),
        ("auto", ["cuda", "cpu", "cuda"], "on cuda it has not been measured"),
        ("on", ["cuda"], None),
        ("off", ["cpu"], "FASTGEN_REFILL=off"),
    ],
)
def test_asked_for(
    refill: str, devices: list[str], reason: str | None, setting: Callable[[str, str], None]
) -> None:
    setting("FASTGEN_REFILL", refill)
    assert continuous_batching.reason_not_to_refill(devices) == reason


def test_order_is_that_of_the_inputs(together: list[int]) -> None:
    model, sentences, options = zoo.build("bart"), _sentences(40), OPTIONS["beams"]
    order = torch.randperm(40, generator=torch.Generator().manual_seed(3)).tolist()
    found = _streamed(model, sentences, options)
    moved = _streamed(model, [sentences[i] for i in order], options)
    assert [found[i] for i in order] == moved
    assert max(together) > 1


def test_steps_made_together_are_reported(
    together: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = list[Any]()
    note = lambda _patch, _model, report, *_: reports.append(report)  # noqa: E731
    monkeypatch.setattr("fastgen.patches.transformers.streaming.suspend.note_served", note)
    _streamed(zoo.build("bart"), _sentences(40), OPTIONS["greedy"])
    assert sum(report.joined for report in reports) == sum(together) > 0
    assert sum(report.plan.sentences for report in reports) == 40


def test_not_where_batches_end_at_once(
    monkeypatch: pytest.MonkeyPatch, together: list[int]
) -> None:
    """The rule looks at finished work: here no sentence leaves before the others."""
    monkeypatch.setattr(continuous_batching, "OCCUPIED", 0.5)
    _streamed(zoo.build("bart"), _sentences(40), {"max_new_tokens": 9, "min_new_tokens": 9})
    assert together == []


class _Own(TemperatureLogitsWarper):
    """A processor that fastgen must assume to look at the whole batch."""


def _by_modules(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    monkeypatch.setenv("FASTGEN_STEP", "module")
    config.reload()


def _both_ways(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    monkeypatch.setenv("FASTGEN_PARITY", "1")
    config.reload()


def _refill_off(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    monkeypatch.setenv("FASTGEN_REFILL", "off")
    config.reload()


def _own_generate(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    kind, generate = type(model), type(model).generate

    class Own(kind):
        def generate(self, *args: Any, **kwargs: Any) -> Any:
            return generate(self, *args, **kwargs).clone()

    model.__class__ = Own


def _patched_over(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    from transformers import GenerationMixin

    original = GenerationMixin._beam_search
    monkeypatch.setattr(
        GenerationMixin, "_beam_search", lambda *args, **kwargs: original(*args, **kwargs).clone()
    )


_Change = Callable[[pytest.MonkeyPatch, Any], object] | None
REFUSED: dict[str, tuple[_Change, dict[str, Any], str]] = {
    "steps": (_by_modules, {}, "decode steps are not made from the weights"),
    "processor": (
        None,
        {"logits_processor": LogitsProcessorList([_Own(0.5)])},
        "finished sentences stay in the batch",
    ),
    "time": (None, {"max_time": 1000.0}, "max_time"),
    "parity": (_both_ways, {}, "FASTGEN_PARITY=1"),
    "setting": (_refill_off, {}, "FASTGEN_REFILL=off"),
    "generate": (_own_generate, {}, "Own has its own generate"),
    "loop": (_patched_over, {}, "transformers.beam_search is not in place"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str, together: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    change, more, reason = REFUSED[what]
    model, sentences, options = zoo.build("bart"), _sentences(30), OPTIONS["beams"] | more
    expected = _alone(model, sentences, options)
    if change is not None:
        change(monkeypatch, model)
    before = left_off()[EMPTY + reason]
    try:
        found = _streamed(model, sentences, options)
    finally:
        monkeypatch.undo()
        config.reload()
    assert found == expected
    assert together == []
    assert left_off()[EMPTY + reason] > before


def test_switched_off(together: list[int]) -> None:
    model, sentences, before = zoo.build("bart"), _sentences(30), hits()
    with fastgen.disabled():
        found = _streamed(model, sentences, OPTIONS["beams"])
    assert (together, hits()) == ([], before)
    assert found == _alone(model, sentences, OPTIONS["beams"])


def _raising_in(stage: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let joint steps fail, or the start of a batch beside another."""
    step, prefill = DecoderStep.__call__, SharedStepper.prefill
    joined = [False]

    def stepped(self: Any, ids: torch.Tensor, context: Any) -> torch.Tensor:
        joined[0] = joined[0] or isinstance(context, JointStepInputs)
        if stage == "step" and isinstance(context, JointStepInputs):
            raise error
        return step(self, ids, context)

    def prefilled(self: SharedStepper) -> torch.Tensor:
        if stage == "begin" and joined[0] and self.plan.sentences > 1:
            raise error
        return prefill(self)

    monkeypatch.setattr(DecoderStep, "__call__", stepped)
    monkeypatch.setattr(SharedStepper, "prefill", prefilled)


@pytest.mark.parametrize("stage", ["step", "begin"])
@pytest.mark.parametrize("method", ["greedy", "beams"])
def test_out_of_memory(
    stage: str,
    method: str,
    together: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, sentences, options = zoo.build("bart"), _sentences(40), OPTIONS[method]
    expected = _alone(model, sentences, options)
    _raising_in(stage, torch.OutOfMemoryError("no memory"), monkeypatch)
    before = left_off()
    assert _streamed(model, sentences, options) == expected
    assert "not enough memory" in caplog.text
    assert (left_off() - before)[EMPTY + NO_MEMORY] > 0


@pytest.mark.parametrize("stage", ["step", "begin"])
def test_other_errors_come_out_and_leave_nothing_behind(
    stage: str, together: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sentences, options = zoo.build("bart", torch.float32), _sentences(40), OPTIONS["greedy"]
    expected = _streamed(model, sentences, options)
    with monkeypatch.context() as patch:
        _raising_in(stage, RuntimeError("something else"), patch)
        with pytest.raises(RuntimeError, match="something else"):
            _streamed(model, sentences, options)
    _assert_untouched(model)
    assert _streamed(model, sentences, options) == expected


def test_a_stream_that_is_closed_leaves_nothing_behind(together: list[int]) -> None:
    model = zoo.build("bart", torch.float32)
    stream = fastgen.generate_stream(model, _sentences(40), max_tokens=60, **OPTIONS["greedy"])
    next(stream)
    _assert_untouched(model)  # nothing runs while the consumer handles a sentence
    stream.close()
    assert max(together) > 1


def _assert_untouched(model: nn.Module) -> None:
    assert not any("forward" in vars(module) for module in model.modules())
    fastgen.disable()  # raises while anything runs
    fastgen.enable()
