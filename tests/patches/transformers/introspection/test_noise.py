"""Half precision judged by its own noise: rounding is told from errors when tokens differ."""

from typing import Any

import pytest
import torch

import fastgen
from fastgen.cli.bench.agreement import Agreement
from fastgen.cli.bench.measure import Verdict, compare
from fastgen.patches.transformers.introspection import noise as noise_module
from fastgen.patches.transformers.introspection.noise import LIMIT, Noise, noise
from tests.support import zoo

HALVES = [torch.bfloat16, torch.float16]


def _model(family: str, dtype: torch.dtype) -> Any:
    return zoo.build(family, torch.float32).to(dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3, "num_return_sequences": 2}], ids=["greedy", "beams"]
)
@pytest.mark.parametrize("family", ["bart", "gpt2", "llama", "t5"])
def test_fastgen_rounds_no_worse_than_the_toolkit(family, options, dtype):
    model = _model(family, dtype)
    found = noise(model, zoo.batch(model, 4, 9), options | {"max_new_tokens": 12})
    assert 0 < found.own < 1
    assert found.explains, found


def test_a_function_in_place_of_generate_has_the_same_noise():
    """A copy of the model in float32 carries the function, which still calls the model itself."""
    model = _model("gpt2", torch.bfloat16)
    inputs, options = zoo.batch(model, 4, 9), {"max_new_tokens": 12, "do_sample": True}
    kind = type(model)

    def generate(*args: Any, **kwargs: Any) -> Any:
        torch.manual_seed(0)
        return kind.generate(model, *args, **kwargs)

    torch.manual_seed(0)
    wanted = noise(model, inputs, options)
    model.generate = generate
    found = noise(model, inputs, options)
    assert found.own > 0
    assert found == wanted


def test_a_compiled_model_has_the_same_noise():
    """`torch.compile` wraps a model in a module whose class has no `generate`."""
    model = _model("gpt2", torch.bfloat16)
    inputs, options = zoo.batch(model, 4, 9), {"max_new_tokens": 12}
    assert noise(torch.compile(model), inputs, options) == noise(model, inputs, options)


@pytest.mark.parametrize("family", ["bart", "gpt2"])
def test_an_error_is_no_rounding(family, monkeypatch):
    """A wrong mask, which hides the last token but one of each source, counts as an error."""
    model = _model(family, torch.bfloat16)
    generate = type(model).generate

    def wrong(self, *args, **kwargs):
        from fastgen.patches.engine import engine

        if not engine.is_disabled():
            kwargs["attention_mask"] = kwargs["attention_mask"].clone()
            kwargs["attention_mask"][:, -2] = 0
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "generate", wrong)
    found = noise(model, zoo.batch(model, 4, 9), {"max_new_tokens": 12})
    assert not found.explains
    assert "error of the logits" in str(found)


def test_another_expert_is_an_outlier(monkeypatch):
    """One token whose router chose by rounding does not decide for a mixture of experts."""
    outlier = torch.full((4, 12), 0.1)
    outlier[2, 5] = 9.0
    assert noise_module._median([outlier.flatten()]) == pytest.approx(0.1)
    assert noise_module.root_mean_square([outlier]) > 1
    found: dict[str, list[int]] = {"_median": [], "root_mean_square": []}
    for name, calls in found.items():
        own = getattr(noise_module, name)
        monkeypatch.setattr(
            noise_module, name, lambda e, own=own, calls=calls: calls.append(1) or own(e)
        )
    for family in ("mixtral", "llama"):
        model = _model(family, torch.bfloat16)
        assert noise(model, zoo.batch(model, 4, 9), {"max_new_tokens": 12}).own > 0
    assert [len(calls) for calls in found.values()] == [2, 2]


def test_inputs_that_are_no_tokens_are_widened():
    model = _model("whisper", torch.bfloat16)
    shape = 2, model.config.num_mel_bins, 2 * model.config.max_source_positions
    features = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = noise(model, {"input_features": features}, {"max_new_tokens": 8})
    assert found.explains, found


def test_the_limit():
    assert Noise(LIMIT * 0.1, 0.1).explains
    assert not Noise(1.01 * LIMIT * 0.1, 0.1).explains
    assert Noise(0.0, 0.0).explains


def test_tokens_behind_the_end_do_not_count():
    """Padding after texts that end early is not compared."""
    model = _model("gpt2", torch.bfloat16)
    ends = list(range(2, 60, 3))
    found = noise(
        model,
        zoo.batch(model, 6, 9),
        {"max_new_tokens": 20, "eos_token_id": ends, "pad_token_id": 2},
    )
    assert found.explains, found


def test_a_verdict_keeps_the_times():
    model = _model("gpt2", torch.bfloat16)
    inputs, options = zoo.batch(model, 4, 9), {"max_new_tokens": 12}
    agreement = Agreement(model, inputs, options)
    stock = model.generate(**inputs, **options)
    other = stock.clone()
    other[1, -1] += 1
    verdict = agreement(stock, other)
    assert not verdict.equal
    assert verdict.agrees
    assert verdict.within_noise
    assert verdict.note.startswith("1 of 4 sequences differ, error of the logits ")
    outcome = compare(lambda: stock, lambda: other, 3, agreement)
    assert len(outcome.rounds) == 3
    assert not outcome.equal
    assert outcome.to_dict()["within_noise"]


def test_another_program_is_judged_by_its_own_error():
    """A peer that reads another mask is wrong, although fastgen's logits are right."""
    model = _model("gpt2", torch.bfloat16)
    inputs, options = zoo.batch(model, 4, 9), {"max_new_tokens": 12}

    def peer(**arguments):
        mask = arguments["attention_mask"].clone()
        mask[:, -2] = 0
        with fastgen.disabled():
            return model.generate(**arguments | {"attention_mask": mask})

    stock = model.generate(**inputs, **options)
    other = stock.clone()
    other[1, -1] += 1
    assert Agreement(model, inputs, options)(stock, other).agrees
    assert not Agreement(model, inputs, options, peer)(stock, other).agrees


def test_what_rounding_does_not_explain_has_no_times():
    outcome = compare(lambda: 1, lambda: 2, 3, lambda a, b: Verdict(False, note="wrong"))
    assert not outcome.rounds
    assert outcome.note == "wrong"
