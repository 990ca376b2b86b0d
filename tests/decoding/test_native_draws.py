"""Check sampling of `generate` in native multistep decoding.

The tokens, and the state in which torch's generator is left, must be those of transformers.
"""

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.logits_process import (
    LogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import fastgen
from fastgen.decoding import loop
from fastgen.decoding.backends import native_draws
from fastgen.decoding.search import sampling
from fastgen.decoding.search.multinomial import GeneratorUser, multinomial
from fastgen.ops import native
from fastgen.ops.counts import calls
from fastgen.ops.native import noise
from fastgen.ops.native import search as c
from fastgen.patches.transformers.compat import CACHE
from fastgen.patches.transformers.generate.report import last_call
from tests.models.test_in_c import _wide  # noqa: F401  a fixture: heads that C can attend with
from tests.ops.test_native import own_variant as variant  # noqa: F401  a fixture
from tests.support import zoo
from tests.support.parity import assert_same

DRAWS = {"do_sample": True, "max_new_tokens": 40}
ENDS = [2, 7, 9, 30]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that records token selections in Python."""
    made, own = list[int](), sampling.Sampling.advance

    def advance(self: Any, model: Any, logits: Tensor) -> bool:
        made.append(self.batch_size)
        return own(self, model, logits)

    monkeypatch.setattr(sampling.Sampling, "advance", advance)
    return made


@pytest.fixture(params=["C", "torch"])
def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return where the random numbers come from."""
    if request.param == "torch":
        monkeypatch.setattr(noise, "is_torchs", lambda by: False)
    return request.param


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "all tokens": {"top_k": 0},
    "cold": {"top_k": 0, "temperature": 0.3},
    "top-k": {"top_k": 3, "temperature": 1.7},
    "top-k of all": {"top_k": 500, "top_p": 0.4},
    "top-p": {"top_k": 0, "top_p": 0.9},
    "top-p of few": {"top_k": 7, "top_p": 0.6, "temperature": 2.5},
    "top-p of one": {"top_k": 0, "top_p": 0.0},
    "min-p": {"top_k": 0, "min_p": 0.05, "temperature": 1.5},
    "min-p of one": {"top_k": 0, "min_p": 1.0},
    "ends": {"eos_token_id": ENDS, "min_new_tokens": 3, "temperature": 2.0},
    "all": {
        "temperature": 1.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3,
        "sequence_bias": [[[5], 4.5], [[7], -3.0]], "no_repeat_ngram_size": 2,
        "bad_words_ids": [[6], [8, 11]], "min_new_tokens": 9, "eos_token_id": ENDS,
        "suppress_tokens": [9, 11],
    },
}  # fmt: skip
UNDECIDED = ("top-p of one", "min-p of one")
"""Options with which rounding decides every draw."""


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("family", ["llama", "marian"])
def test_options(
    variant: str,  # noqa: F811
    family: str,
    options: str,
    source: str,
    alone: list[int],
) -> None:
    model = zoo.build(family, torch.float32)
    for seed in range(6):
        calls.clear(), alone.clear()
        kwargs = zoo.batch(model, 1 + 2 * (seed % 2), 9, "natural") | DRAWS | OPTIONS[options]
        assert assert_same(model, kwargs, seed).error is None
        assert calls["search", "native"] > 0
        call = last_call()
        assert call is not None
        if seed and options not in UNDECIDED:
            assert len(alone) < max(4, len(call.steps) // 4), "most steps were in a row"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", ["default", "top-p of few", "min-p", "all"])
def test_half_precision(
    variant: str,  # noqa: F811
    options: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tokens are those that single steps in C select; many scores are equal."""
    model = zoo.build("llama", dtype)
    kwargs = zoo.batch(model, 2, 9, "natural") | DRAWS | OPTIONS[options]
    model.generate(**kwargs)

    def drawn() -> list[Tensor]:
        found = list[Tensor]()
        for seed in range(6):
            torch.manual_seed(seed)
            found += [model.generate(**kwargs), torch.get_rng_state()]
        return found

    calls.clear()
    found = drawn()
    assert calls["search", "native"] > 0
    monkeypatch.setattr(loop, "BACKENDS", (loop.Eager,))
    calls.clear()
    assert all(map(torch.equal, found, drawn()))
    assert calls["decoder_step", "native"] > calls["search", "native"] == 0


def test_equal_scores(variant: str, source: str) -> None:  # noqa: F811
    """Tokens with equal embeddings tie in every step, often where top-k and top-p cut."""
    model = zoo.build("marian", torch.float32)
    with torch.no_grad():
        model.model.shared.weight[50:] = model.model.shared.weight[4:50]
    for options in ({"top_k": 3}, {"top_k": 4, "top_p": 0.7}, {"top_k": 0, "min_p": 0.1}):
        for seed in range(6):
            kwargs = zoo.batch(model, 2, 9) | DRAWS | options
            assert assert_same(model, kwargs, seed).error is None
    assert calls["search", "native"] > 0


def test_calls_one_after_another(variant: str, source: str) -> None:  # noqa: F811
    """Each call goes on from the state in which the one before it has left the generator."""
    model = zoo.build("gpt2", torch.float32)
    kwargs = zoo.batch(model, 2, 9) | DRAWS | {"eos_token_id": ENDS, "temperature": 2.0}

    def drawn() -> list[Tensor]:
        torch.manual_seed(5)
        found = [model.generate(**kwargs), torch.randn(3), model.generate(**kwargs)]
        torch.manual_seed(5)
        return [*found, model.generate(**kwargs), torch.rand(7), model.generate(**kwargs)]

    with fastgen.disabled():
        wanted = drawn()
    assert all(map(torch.equal, drawn(), wanted))
    assert all(map(torch.equal, drawn(), wanted))
    assert calls["search", "native"] > 0
    assert torch.equal(wanted[0], wanted[3])
    assert not torch.equal(wanted[0], wanted[2])


class _Loud(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores


class _Odd(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] > 12)


class _Silent(BaseStreamer):
    def put(self, value: Tensor) -> None:
        pass

    def end(self) -> None:
        pass


SEEN: dict[str, Callable[[], dict[str, Any]]] = {
    "processor": lambda: {"logits_processor": LogitsProcessorList([_Loud()])},
    "criterion": lambda: {"stopping_criteria": StoppingCriteriaList([_Odd()])},
    "streamer": lambda: {"streamer": _Silent()},
    "time": lambda: {"max_time": 1e6},
    "other filter": lambda: {"typical_p": 0.8},
    "filters twice": lambda: {"logits_processor": LogitsProcessorList([TopKLogitsWarper(5)])},
    "filters in another order": lambda: {
        "logits_processor": LogitsProcessorList([TopKLogitsWarper(5)]),
        "temperature": 0.7,
        "top_k": 0,
    },
    "filters that keep more": lambda: {
        "logits_processor": LogitsProcessorList([TopKLogitsWarper(5, filter_value=-1.0)]),
        "top_k": 0,
    },
    "filters without draws": lambda: {
        "logits_processor": LogitsProcessorList([TemperatureLogitsWarper(0.7)]),
        "do_sample": False,
    },
}


@pytest.mark.parametrize("options", SEEN)
def test_whoever_looks_at_a_step_sees_it(variant: str, options: str) -> None:  # noqa: F811
    model = zoo.build("gpt2", torch.float32)
    kwargs = zoo.batch(model, 1 if options == "streamer" else 2, 9) | DRAWS | SEEN[options]()
    for seed in range(2):
        assert assert_same(model, kwargs, seed).error is None
    assert calls["search", "native"] == 0


@pytest.mark.parametrize("options", ["default", "top-p of few", "ends", "all"])
@pytest.mark.parametrize("family", ["gpt2", "marian", "t5"])
def test_several_samples(
    variant: str,  # noqa: F811
    family: str,
    options: str,
    source: str,
    alone: list[int],
) -> None:
    """Rows of a sentence share its keys and values; each sees its own tokens after them."""
    model = zoo.build(family, torch.float32)
    for samples in (2, 4):
        kwargs = zoo.batch(model, 2, 9, "natural") | DRAWS | OPTIONS[options]
        for seed in range(3):
            calls.clear(), alone.clear()
            found = assert_same(model, kwargs | {"num_return_sequences": samples}, seed)
            assert found.error is None
            assert calls["search", "native"] > 0
            call = last_call()
            assert call is not None
            if seed:
                assert len(alone) < max(4, len(call.steps) // 4), "most steps were in a row"


def test_keys_and_values_of_several_samples(variant: str, source: str) -> None:  # noqa: F811
    model = zoo.build("gpt2", torch.float32)
    kwargs = zoo.batch(model, 2, 9, "none") | DRAWS | {"num_return_sequences": 3}
    kwargs |= {"return_dict_in_generate": True, "eos_token_id": ENDS}
    model.generate(**kwargs)
    calls.clear(), torch.manual_seed(1)
    ours = model.generate(**kwargs)
    torch.manual_seed(1)
    with fastgen.disabled():
        stock = model.generate(**kwargs)
    assert torch.equal(ours.sequences, stock.sequences)
    assert calls["search", "native"] > 0
    for mine, theirs in zip(ours[CACHE].layers, stock[CACHE].layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(mine.values, theirs.values, atol=1e-3, rtol=1e-3)


def test_scores_that_are_no_numbers(variant: str, source: str) -> None:  # noqa: F811
    """Torch raises in the step in which the weights have become invalid, and draws nothing."""
    model = zoo.build("marian", torch.float32)
    kwargs = zoo.batch(model, 2, 7) | DRAWS
    for _ in range(2):
        model.generate(**kwargs)
    for bad in (torch.nan, torch.inf):
        with torch.no_grad():
            model.final_logits_bias[0, 20] = bad
        assert isinstance(assert_same(model, kwargs).error, RuntimeError)


def test_threads_that_sample_at_a_time(variant: str) -> None:  # noqa: F811
    """While another thread samples, steps run one at a time: C would make it wait."""
    model = zoo.build("gpt2", torch.float32)
    kwargs = zoo.batch(model, 2, 9) | DRAWS
    for seed in range(2):
        assert_same(model, kwargs, seed)
    other: list[GeneratorUser] = []
    thread = threading.Thread(target=lambda: other.append(GeneratorUser()))
    thread.start()
    thread.join()
    calls.clear()
    assert assert_same(model, kwargs).error is None
    assert calls["search", "native"] == 0
    other.clear()
    assert assert_same(model, kwargs).error is None
    assert calls["search", "native"] > 0


def test_other_draws_wait_for_those_in_c(
    variant: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While C continues the generator, a draw of another thread does not begin from its state."""
    model = zoo.build("gpt2", torch.float32)
    kwargs = zoo.batch(model, 2, 9) | DRAWS
    for seed in range(2):
        assert_same(model, kwargs, seed)
    drawn: list[bool] = []
    search_rows, weights = c.search_rows, torch.ones(1, 8)

    def searched(*args: Any) -> int:
        thread = threading.Thread(target=lambda: multinomial(weights, 1))
        thread.start()
        thread.join(0.1)
        drawn.append(not thread.is_alive())
        return search_rows(*args)

    monkeypatch.setattr(c, "search_rows", searched)
    model.generate(**kwargs)
    assert drawn
    assert not any(drawn)


@pytest.mark.skipif(native.library() is None, reason="there are no operations in C here")
def test_top_p_at_the_edge_of_many_alike() -> None:
    """torch's sum of many equal probabilities is off by more than C's: the step is left to it."""
    vocabulary, top_p = 262_144, 0.6
    torch.manual_seed(0)
    logits = torch.cat([torch.full((vocabulary - 20_000,), 0.1), torch.randn(20_000) + 3])
    kept = TopPLogitsWarper(top_p)(None, logits[None].clone())
    cumulative, order = logits.double().softmax(0).sort(descending=True)
    edge = int((cumulative.cumsum(0) < top_p).sum())
    by = ctypes.CDLL(f"{native.LIBRARIES}/{native.instruction_set()}.so")
    by.draw_size.restype, by.draw_size.argtypes = ctypes.c_int64, [ctypes.c_int64]
    by.draw_rows.argtypes = [ctypes.c_void_p] * 7 + [ctypes.c_int64] * 3
    held = torch.zeros(by.draw_size(vocabulary), dtype=torch.uint8)
    for token in order[edge - 40 : edge + 40].tolist():
        noise = torch.ones(1, vocabulary)
        noise[0, token] = 1e-12
        draws = c.Draws(temperature=1.0, top_p=top_p, noise=noise.data_ptr())
        drawn, twister = torch.zeros(1, dtype=torch.int64), torch.zeros(8000, dtype=torch.uint8)
        status = by.draw_rows(
            ctypes.byref(draws), twister.data_ptr(), drawn.data_ptr(), logits.data_ptr(), None,
            ctypes.byref(c.Texts()), held.data_ptr(), 1, 1, vocabulary,
        )  # fmt: skip
        assert not status or int(drawn) == int((kept.softmax(-1) / noise).argmax())


def test_dropout_in_training(variant: str) -> None:  # noqa: F811
    """Dropout draws from the generator between the tokens."""
    model = zoo.build("gpt2", torch.float32).train()
    for seed in range(2):
        assert_same(model, zoo.batch(model, 2, 9) | DRAWS, seed)
    assert calls["search", "native"] == 0


def test_without_memory(variant: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """The generator is left as after the steps that were made."""
    model = zoo.build("gpt2", torch.float32)
    kwargs = zoo.batch(model, 2, 9, "none") | DRAWS | {"eos_token_id": None}
    model.generate(**kwargs)
    own = c.search_rows

    def failing(*given: Any) -> int:
        own(*given)
        return c.NO_MEMORY

    torch.manual_seed(1)
    wanted = model.generate(**kwargs | {"max_new_tokens": 3})
    state = torch.get_rng_state()
    monkeypatch.setattr(c, "search_rows", failing)
    torch.manual_seed(1)
    with pytest.raises(torch.OutOfMemoryError):
        model.generate(**kwargs | {"max_new_tokens": 3})
    assert wanted.shape[1] == 12
    assert torch.equal(torch.get_rng_state(), state)


def test_order_of_warpers() -> None:
    warper = native_draws.Warper
    assert native_draws.supported([])
    assert native_draws.supported([warper("temperature", 2.0), warper("top-p", 0.5)])
    assert not native_draws.supported([warper("top-p", 0.5), warper("temperature", 2.0)])
    assert not native_draws.supported([warper("top-k", 5), warper("top-k", 3)])
