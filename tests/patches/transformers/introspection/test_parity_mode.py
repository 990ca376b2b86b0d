"""Check FASTGEN_PARITY=1: both ways run, differences are reported, stock output is returned."""

import json
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

import fastgen
from fastgen import config
from fastgen.decoding.search.near_ties import replayed
from fastgen.ops.selection import kbest as ops
from fastgen.patches.engine import engine
from fastgen.patches.engine.registry import registry
from fastgen.patches.transformers.compat import CACHE
from fastgen.patches.transformers.generate import searches
from fastgen.patches.transformers.introspection import parity
from fastgen.patches.transformers.introspection.parity import ParityError, ParityWarning
from tests.support import zoo
from tests.support.parity import hits


@pytest.fixture(autouse=True)
def parity_mode(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FASTGEN_PARITY", "1")
    config.reload()
    registry.counts.parity.clear()
    registry.warnings.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ParityWarning)
        yield
    registry.counts.parity.clear()
    monkeypatch.undo()
    config.reload()


def _outcomes() -> dict[str, int]:
    return fastgen.status().parity


def _stock(model: Any, kwargs: dict[str, Any], seed: int = 0) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(seed)
    with fastgen.disabled():
        output = model.generate(**kwargs)
    return output, torch.get_rng_state()


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 4, "no_repeat_ngram_size": 3},
    "sequences": {
        "num_beams": 4,
        "num_return_sequences": 2,
        "return_dict_in_generate": True,
        "output_scores": True,
    },
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "fields": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("family", ["bart", "gpt2"])
def test_equal_calls_are_counted(family: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    model = zoo.build(family, dtype)
    kwargs = zoo.batch(model, 3, 9) | options | {"max_new_tokens": 12}
    stock, state = _stock(model, kwargs)
    assert _outcomes() == {}, "a call inside disabled() is not compared"
    served = hits()
    torch.manual_seed(0)
    output = model.generate(**kwargs)
    assert torch.equal(torch.get_rng_state(), state), (
        "the random numbers are to go on as after transformers alone"
    )
    assert _outcomes() == {"equal": 1}
    assert hits() == served + 1
    assert type(output) is type(stock)
    sequences = [o if isinstance(o, torch.Tensor) else o.sequences for o in (output, stock)]
    assert torch.equal(*sequences)


def test_positional_arguments_and_given_encoder_outputs() -> None:
    model = zoo.build("bart")
    inputs = zoo.batch(model, 2, 6)
    model.generate(inputs["input_ids"], None, max_new_tokens=4)
    with torch.no_grad():
        encoded = model.get_encoder()(**inputs)
    shape = encoded.last_hidden_state.shape
    model.generate(encoder_outputs=encoded, num_beams=3, max_new_tokens=4)
    assert encoded.last_hidden_state.shape == shape
    assert _outcomes() == {"equal": 2}
    with pytest.raises(TypeError):
        model.generate(inputs["input_ids"], inputs=inputs["input_ids"])


def test_both_raise() -> None:
    model = zoo.build("bart")
    with pytest.raises(ValueError, match="num_return_sequences"):
        model.generate(**zoo.batch(model, 2, 6), num_beams=2, num_return_sequences=3)
    assert _outcomes() == {"equal": 1}


def test_off_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTGEN_PARITY", "0")
    config.reload()
    model = zoo.build("gpt2")
    model.generate(**zoo.batch(model, 2, 6), max_new_tokens=4)
    assert _outcomes() == {}
    assert "parity" not in str(fastgen.status()).replace("; parity mode", "")


class _Own(LogitsProcessor):
    calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores


class _Never(StoppingCriteria):
    calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class _Heard(BaseStreamer):
    calls = 0

    def put(self, value: torch.Tensor) -> None:
        self.calls += 1

    def end(self) -> None: ...


def test_other_precisions_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTGEN_PRECISION", "int8")
    config.reload()
    model, served = zoo.build("gpt2", torch.float32), hits()
    for _ in range(2):
        model.generate(**zoo.batch(model, 2, 6), max_new_tokens=6)
    assert hits() == served + 2
    reason = "run once: FASTGEN_PRECISION=int8 changes the output"
    assert _outcomes() == {reason: 2}
    assert reason in str(fastgen.status())


def test_what_cannot_be_repeated_runs_once() -> None:
    model = zoo.build("gpt2")
    kwargs = zoo.batch(model, 1, 6, "none") | {"max_new_tokens": 5, "min_new_tokens": 5}
    own, never, heard, of_beams = _Own(), _Never(), _Heard(), _Heard()
    served = hits()
    model.generate(**kwargs, logits_processor=LogitsProcessorList([own]))
    model.generate(**kwargs, stopping_criteria=StoppingCriteriaList([never]))
    model.generate(**kwargs, streamer=heard)
    model.generate(**kwargs, streamer=of_beams, num_beams=2)
    assert (own.calls, never.calls, heard.calls) == (5, 5, 6)
    assert of_beams.calls > 1
    assert hits() == served + 4, "run once, fastgen's way"
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(kwargs["input_ids"][:, :3], **{CACHE: cache})
    model.generate(**kwargs, **{CACHE: cache})
    model.generate(**kwargs, max_time=100.0)
    model.generate(**kwargs, assistant_model=zoo.build("gpt2", seed=1))
    model.generate(**kwargs, logits_processor=LogitsProcessorList([MinLengthLogitsProcessor(8, 2)]))
    reasons = {
        "run once: _Own may keep a state": 1,
        "run once: _Never may keep a state": 1,
        "run once: a streamer is set": 2,
        f"run once: {CACHE} is given": 1,
        "run once: max_time ends it by the clock": 1,
        "run once: assistant_model is given": 1,
        "equal": 1,
    }
    assert _outcomes() == reasons
    text = str(fastgen.status())
    assert all(reason in text for reason in reasons)
    assert json.loads(json.dumps(fastgen.status().to_dict()))["parity"] == reasons


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return `plant(row, position, token)`, which changes a token of fastgen's output."""

    def change(
        row: int, position: int, token: int, monkeypatch: pytest.MonkeyPatch = monkeypatch
    ) -> None:
        for name in ("_of_samples", "_of_beams"):
            original = getattr(searches, name)

            def planted(*args: Any, original: Any = original) -> Any:
                output = original(*args)
                (output if isinstance(output, torch.Tensor) else output.sequences)[
                    row, position
                ] = token
                return output

            monkeypatch.setattr(searches, name, planted)

    return change


def test_a_planted_token_is_reported(plant: Any) -> None:
    model = zoo.build("gpt2")
    kwargs = zoo.batch(model, 3, 6, "none") | {"max_new_tokens": 8, "min_new_tokens": 8}
    stock, _ = _stock(model, kwargs | {"return_dict_in_generate": True, "output_scores": True})
    theirs = int(stock.sequences[1, 9])
    ours = theirs - 1 if theirs > 4 else theirs + 1
    margin = float(stock.scores[3][1, theirs] - stock.scores[3][1, ours])
    plant(1, 9, ours)
    message = (
        f"GPT2LMHeadModel.generate: sentence 1, position 9: transformers has token {theirs}, "
        f"fastgen token {ours}; "
        f"in transformers' own scores they are {margin:.1e} apart"
    )
    torch.manual_seed(5)
    state = torch.get_rng_state()
    with pytest.warns(ParityWarning) as caught:
        output = model.generate(**kwargs)
    assert str(caught[0].message) == f"fastgen and transformers differ: {message}"
    assert torch.equal(output, stock.sequences), "transformers' own output is returned"
    assert torch.equal(torch.get_rng_state(), state), (
        "the run that measures the margin draws nothing"
    )
    model.generate(**kwargs)  # reported once: a second warning would raise
    assert _outcomes() == {"different": 2}


@pytest.mark.parametrize("family", ["bart", "gpt2"])
@pytest.mark.parametrize("sequences", [1, 3])
def test_a_planted_token_in_beams_is_reported(family: str, sequences: int, plant: Any) -> None:
    model = zoo.build(family)
    kwargs = zoo.batch(model, 3, 6, "none") | {
        "num_beams": 3,
        "max_new_tokens": 8,
        "num_return_sequences": sequences,
    }
    stock, _ = _stock(model, kwargs)
    row, place = 2 * sequences - 1, stock.shape[1] - 7
    theirs = int(stock[row, place])
    plant(row, place, 94)
    sequence = f", sequence {(row % 3)}" if sequences > 1 else ""
    expected = (
        rf"sentence 1{sequence}, position {place}: transformers has token {theirs}, "
        r"fastgen token 94; .* apart, and"
    )
    with pytest.warns(ParityWarning, match=expected):
        assert torch.equal(model.generate(**kwargs), stock)
    assert _outcomes() == {"different": 1}


def test_random_numbers_go_on_as_after_transformers_alone(plant: Any) -> None:
    model = zoo.build("gpt2")
    kwargs = zoo.batch(model, 2, 6, "none") | {
        "max_new_tokens": 8,
        "min_new_tokens": 8,
        "do_sample": True,
    }
    stock, state = _stock(model, kwargs, seed=3)
    plant(0, 8, 5 if int(stock[0, 8]) != 5 else 6)
    torch.manual_seed(3)
    with pytest.warns(ParityWarning, match="sentence 0, position 8"):
        assert torch.equal(model.generate(**kwargs), stock)
    assert torch.equal(torch.get_rng_state(), state)


def test_strict_raises(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build("gpt2")
    monkeypatch.setenv("FASTGEN_STRICT", "1")
    config.reload()
    kwargs = zoo.batch(model, 2, 6, "none") | {"max_new_tokens": 4, "min_new_tokens": 4}
    model.generate(**kwargs)
    stock, _ = _stock(model, kwargs)
    plant(0, 7, 5 if int(stock[0, 7]) != 5 else 6)
    with pytest.raises(ParityError, match="sentence 0, position 7"):
        model.generate(**kwargs)
    assert _outcomes() == {"equal": 1, "different": 1}
    with pytest.raises(engine.FallbackError):
        model.generate(**kwargs, num_beams=2, low_memory=True)
    fastgen.disable()  # nothing is left running
    fastgen.enable()


@pytest.mark.parametrize("beams", [1, 2])
def test_a_near_tie_is_told_from_a_difference(
    beams: int, plant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tokens with equal embeddings tie: choosing the other is no error, even in strict mode."""
    monkeypatch.setenv("FASTGEN_STRICT", "1")
    config.reload()
    model = zoo.build("gpt2", torch.float32)
    kwargs = zoo.batch(model, 1, 6, "none") | {
        "max_new_tokens": 1,
        "min_new_tokens": 1,
        "num_beams": beams,
    }
    best = int(_stock(model, kwargs)[0][0, -1])
    twin = best - 1 if best > 4 else best + 1
    with torch.no_grad():
        model.lm_head.weight[twin] = model.lm_head.weight[best]
    chosen = int(_stock(model, kwargs)[0][0, -1])
    assert chosen in (best, twin)
    other = best + twin - chosen
    plant(0, 6, other)
    with pytest.warns(
        ParityWarning, match=f"has token {chosen}, fastgen token {other}; .* 0.0e\\+00"
    ):
        model.generate(**kwargs)
    assert _outcomes() == {"near tie": 1}


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_judged_by_its_own_noise(
    dtype: torch.dtype, options: dict[str, Any], plant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another last token is no error, even in strict mode; another token on the way is one.

    The logits after a token that fastgen has not read are not those of the text.
    """
    monkeypatch.setenv("FASTGEN_STRICT", "1")
    config.reload()
    model = zoo.build("gpt2", torch.float32).to(dtype)
    kwargs = zoo.batch(model, 2, 6) | options | {"max_new_tokens": 6, "min_new_tokens": 6}
    stock, state = _stock(model, kwargs, seed=3)

    def planted(place: int) -> Any:
        with pytest.MonkeyPatch.context() as undone:
            plant(0, place, 5 if int(stock[0, place]) != 5 else 6, undone)
            torch.manual_seed(3)
            return model.generate(**kwargs)

    with pytest.warns(ParityWarning, match=r"sentence 0, position 11: .*; error of the logits "):
        assert torch.equal(planted(11), stock)
    assert torch.equal(torch.get_rng_state(), state)
    assert _outcomes() == {"within noise": 1}
    with pytest.raises(ParityError, match=r"sentence 0, position 7: .*; error of the logits "):
        planted(7)
    assert _outcomes() == {"within noise": 1, "different": 1}


def test_what_cannot_be_judged_by_noise_is_judged_by_margins(
    plant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.build("gpt2", torch.float32).to(torch.bfloat16)
    kwargs = zoo.batch(model, 1, 6) | {"max_new_tokens": 2, "min_new_tokens": 2}
    stock, _ = _stock(model, kwargs)
    plant(0, 7, 5 if int(stock[0, 7]) != 5 else 6)

    def too_large(*_: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(parity, "noise", too_large)
    with pytest.warns(ParityWarning, match="no errors of the logits, as OutOfMemoryError"):
        model.generate(**kwargs)
    assert _outcomes() == {"different": 1}


def test_other_scores_and_other_exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build("gpt2")
    kwargs = zoo.batch(model, 2, 6, "none") | {"max_new_tokens": 4}
    original = searches._of_samples

    def shifted(*args: Any) -> Any:
        output = original(*args)
        output.scores[2].add_(0.25)
        return output

    monkeypatch.setattr(searches, "_of_samples", shifted)
    with pytest.warns(
        ParityWarning, match="equal tokens, but scores of step 2 differ by up to 2.5e-01"
    ):
        model.generate(**kwargs, return_dict_in_generate=True, output_scores=True)

    def broken(*args: Any) -> Any:
        raise IndexError("out of range")

    monkeypatch.setattr(searches, "_of_samples", broken)
    with pytest.warns(
        ParityWarning, match=r"fastgen raised IndexError\('out of range'\), transformers None"
    ):
        assert model.generate(**kwargs).shape == (2, 10)
    assert _outcomes() == {"different": 2}


def test_a_wrong_operation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search itself is wrong: it takes the second best candidate for the best."""
    model = zoo.build("bart")
    kwargs = zoo.batch(model, 3, 6, "none") | {"num_beams": 2, "max_new_tokens": 8}
    from fastgen.decoding.search import beam_search

    def swapped(
        log_probs: torch.Tensor, scores: torch.Tensor, k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = ops.best_of_log_probs(log_probs, scores, k + 1)
        return values[:, 1:], indices[:, 1:]

    monkeypatch.setattr(beam_search, "best_of_log_probs", swapped)
    stock, _ = _stock(model, kwargs)
    with pytest.warns(ParityWarning, match="sentence 0, position 1"):
        assert torch.equal(model.generate(**kwargs), stock)


def test_replayed() -> None:
    """Replay two beams over four tokens, where 0 ends a text; values are log-probabilities."""
    first = torch.tensor([[-9.0, -1.0, -1.5, -1.75]] * 2)
    second = torch.tensor([[-0.5, -2.0, -3.0, -9.0], [-9.0, -2.0, -2.25, -9.0]])
    # Beams 1 and 2 are kept, 3 is dropped by 0.25. // Then 1 0 ends (-1.5), 1 1 (-3.0) and 2 1
    # (-3.5) go on, and 2 2 (-3.75) is dropped.
    assert replayed([first, second], [3, 1], {0}) == pytest.approx(0.25)
    first[0, 3] = -8.0
    assert replayed([first, second], [2, 2, 1], {0}) == pytest.approx(0.25)
    assert replayed([first, second], [2, 2], {0}) == pytest.approx(0.5), (
        "as the last step, 1 0 and 1 1 end before 2 1"
    )
    assert replayed([first, second], [1, 0], {0}) == pytest.approx(0.25)
    first[0, 2:] = -math.inf
    assert replayed([first], [1], set()) == math.inf, "what is banned is no choice"
