"""Compare every proven family with unpatched transformers, on commonly combined options."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
)
from transformers.generation import logits_process, utils
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

import fastgen
from fastgen.models.specs.registry import SPECS
from fastgen.patches.transformers.compat import CACHE
from tests.support import zoo
from tests.support.parity import assert_same, assert_same_but_for_ties, call, fallbacks, hits

# Stock gives NaN for Gemma 2 with left padding, as eager attention sees fully masked rows.
_NO_PADDING = ("gemma2",)


def _inputs(family: str, model: Any, sentences: int = 4, length: int = 11) -> dict[str, Any]:
    return zoo.batch(model, sentences, length, "none" if family in _NO_PADDING else "natural")


def test_every_family_has_a_model() -> None:
    families = set(zoo.FAMILIES | zoo.STREAMS | zoo.SPEECH)
    for name in zoo.MORE:
        try:
            families.add(zoo.build(name).config.model_type)
        except pytest.skip.Exception:  # an older transformers
            families.add(name)
    assert families == set(SPECS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("family", zoo.FAMILIES)
@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 1},
        {"num_beams": 4, "no_repeat_ngram_size": 3},
        {"num_beams": 5, "num_return_sequences": 5, "length_penalty": 0.6, "early_stopping": True},
        {"do_sample": True, "num_return_sequences": 3, "top_k": 20},
        {"do_sample": True, "num_beams": 3},
    ],
    ids=lambda o: "-".join(f"{k}={v}" for k, v in o.items()),
)
def test_family(family: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    model = zoo.build(family, dtype)
    before, served = fallbacks(), hits()
    kwargs = _inputs(family, model) | options | {"max_new_tokens": 20}
    # In float32, two beams within a rounding error may swap ranks without changing tokens.
    if dtype == torch.float64:
        kwargs |= {"return_dict_in_generate": True, "output_scores": True}
    if dtype == torch.float32 and kwargs.get("num_return_sequences") == kwargs.get("num_beams"):
        assert_same_but_for_ties(model, kwargs)
    else:
        # Gemma 2 has eager attention only, with a float32 softmax in any dtype.
        result = assert_same(model, kwargs, tolerance=1e-5 if family == "gemma2" else 1e-9)
        assert result.error is None
    assert hits() == served + 1
    assert fallbacks() == before


OPTIONS: dict[str, dict[str, Any]] = {
    "early_stopping": {"early_stopping": True},
    "never": {"early_stopping": "never", "length_penalty": 2.0},
    "never_short": {"early_stopping": "never", "length_penalty": -1.0},
    "no_length_penalty": {"length_penalty": 0.0},
    "return_sequences": {"num_return_sequences": 3},
    "several_eos": {"eos_token_id": [2, 7, 9]},
    "eos_is_pad": {"eos_token_id": 0},
    "min_length": {"min_length": 9},
    "min_new_tokens": {"min_new_tokens": 6},
    "forced_bos": {"forced_bos_token_id": 5},
    "forced_eos": {"forced_eos_token_id": 6},
    "bad_words": {"bad_words_ids": [[5], [6, 7], [8]]},
    "bad_word": {"bad_words_ids": [[5]]},
    "empty_bad_word": {"bad_words_ids": [[5], [], [6, 7]]},
    "long_bad_words": {
        "bad_words_ids": [[t, 7] for t in range(4, 60)] + [[3, t, 9] for t in range(60)]
    },
    "sequence_bias": {"sequence_bias": {(5,): -4.0, (6, 7): 3.0}},
    "token_bias": {"sequence_bias": {(5,): -4.0, (9,): 5.0}},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "ngrams_1": {"no_repeat_ngram_size": 1},
    "ngrams_2": {"no_repeat_ngram_size": 2},
    "encoder_ngrams": {"encoder_no_repeat_ngram_size": 2},
    "suppress": {"suppress_tokens": [4, 5, 6], "begin_suppress_tokens": [7, 8]},
    "suppress_nothing": {"suppress_tokens": [], "begin_suppress_tokens": []},
    "prefix_allowed": {
        "prefix_allowed_tokens_fn": lambda sentence, ids: [
            2,
            4 + sentence,
            10 + len(ids) % 5,
            30,
            31,
        ]
    },
    "one_allowed": {"prefix_allowed_tokens_fn": lambda sentence, ids: [4 + len(ids) % 3]},
    "decay": {"exponential_decay_length_penalty": (3, 1.2)},
    "renormalize": {"renormalize_logits": True, "repetition_penalty": 1.2},
    "remove_invalid": {"remove_invalid_values": True},
    "max_length": {"max_length": 17, "max_new_tokens": None},
    "one_token": {"max_new_tokens": 1},
    "cache_off": {"use_cache": False},
    "static_cache": {"cache_implementation": "static"},
    "chunked": {"prefill_chunk_size": 4},
}


@pytest.mark.parametrize("family", ["bart", "t5", "gpt2", "llama"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("fields", [False, True], ids=["tokens", "fields"])
def test_option(family: str, options: dict[str, Any], beams: int, fields: bool) -> None:
    model = zoo.build(family, seed=1)
    kwargs = _inputs(family, model) | {"num_beams": beams, "max_new_tokens": 14} | options
    if fields:
        kwargs |= {
            "return_dict_in_generate": True, "output_scores": True, "output_logits": True,
            "output_hidden_states": True,
        }  # fmt: skip
    assert_same(model, kwargs)


@pytest.mark.parametrize("family", ["bart", "t5", "gpt2", "llama", "mistral", "opt"])
@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("beams", [1, 3])
def test_padding(family: str, padding: str, beams: int) -> None:
    model = zoo.build(family)
    assert_same(
        model, zoo.batch(model, 4, 13, padding) | {"num_beams": beams, "max_new_tokens": 16}
    )


@pytest.mark.parametrize(
    "warpers",
    [
        {"temperature": 0.7, "top_p": 0.8},
        {"min_p": 0.05},
        {"typical_p": 0.9},
        {"epsilon_cutoff": 1e-3},
        {"eta_cutoff": 1e-3},
    ],
)
@pytest.mark.parametrize("beams", [1, 3])
def test_sampling(warpers: dict[str, Any], beams: int) -> None:
    model = zoo.build("gpt2")
    assert_same(
        model,
        _inputs("gpt2", model)
        | {"do_sample": True, "num_beams": beams, "max_new_tokens": 12}
        | warpers,
    )


@pytest.mark.parametrize("family", ["bart", "gpt2"])
@pytest.mark.parametrize("beams", [1, 3])
def test_attentions(family: str, beams: int) -> None:
    model = zoo.build(family)
    model.set_attn_implementation("eager")
    before, served = fallbacks(), hits()
    kwargs = _inputs(family, model) | {
        "num_beams": beams, "max_new_tokens": 6, "return_dict_in_generate": True,
        "output_attentions": True, "output_hidden_states": True,
    }  # fmt: skip
    assert assert_same(model, kwargs).error is None
    assert (fallbacks(), hits()) == (before, served + 1)


@pytest.mark.parametrize("beams", [1, 3])
def test_inputs_embeds(beams: int) -> None:
    for family in ("llama", "bart"):
        model = zoo.build(family)
        inputs = _inputs(family, model)
        inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids")).detach()
        assert_same(model, inputs | {"num_beams": beams, "max_new_tokens": 9})


@pytest.mark.parametrize("beams", [1, 3])
def test_decoder_prompt(beams: int) -> None:
    model = zoo.build("bart")
    prompt = torch.tensor(
        [[zoo.START, 5, 6], [zoo.START, 7, 8], [zoo.START, 9, 4], [zoo.START, 5, 5]]
    )
    assert_same(
        model,
        _inputs("bart", model)
        | {"decoder_input_ids": prompt, "num_beams": beams, "max_new_tokens": 9},
    )


@pytest.mark.parametrize("beams", [1, 2])
def test_given_past(beams: int) -> None:
    from transformers import DynamicCache

    model = zoo.build("gpt2")
    ids = zoo.batch(model, 2, 8, "none")["input_ids"]
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :5].repeat_interleave(beams, 0), **{CACHE: cache})
    assert_same(model, {"input_ids": ids, CACHE: cache, "num_beams": beams, "max_new_tokens": 6})


class _Favour(LogitsProcessor):
    """A user's processor that reads whole rows."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + (input_ids.sum(1, keepdim=True) % 7 == 0) * torch.linspace(
            0, 2, scores.shape[1]
        )


class _Even(StoppingCriteria):
    """A user's criterion: stop after two even tokens."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return (input_ids[:, -2:] % 2 == 0).all(1)


@pytest.mark.parametrize("family", ["bart", "gpt2"])
@pytest.mark.parametrize("beams", [1, 4])
def test_users_own(family: str, beams: int) -> None:
    model = zoo.build(family)
    kwargs = _inputs(family, model) | {"num_beams": beams, "max_new_tokens": 14}
    assert_same(model, kwargs | {"logits_processor": LogitsProcessorList([_Favour()])})
    assert_same(model, kwargs | {"stopping_criteria": StoppingCriteriaList([_Even()])})


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (logits_process.NoRepeatNGramLogitsProcessor, {"no_repeat_ngram_size": 2}),
        (logits_process.SequenceBiasLogitsProcessor, {"bad_words_ids": [[5], [6, 7]]}),
        (logits_process.SuppressTokensLogitsProcessor, {"suppress_tokens": [4, 5]}),
    ],
)
def test_users_own_call_of_transformers_processor(
    kind: type, options: dict[str, Any], beams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.build("bart")
    monkeypatch.setattr(kind, "__call__", lambda _, ids, scores: _Favour()(ids, scores.flip(1)))
    kwargs = _inputs("bart", model) | options | {"num_beams": beams, "max_new_tokens": 14}
    assert assert_same(model, kwargs).error is None


@pytest.mark.parametrize("beams", [1, 3])
def test_users_own_call_of_transformers_criterion(
    beams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.build("bart")
    monkeypatch.setattr(EosTokenCriteria, "__call__", lambda _, ids, scores: _Even()(ids, scores))
    assert (
        assert_same(
            model, _inputs("bart", model) | {"num_beams": beams, "max_new_tokens": 14}
        ).error
        is None
    )


class _Number(StoppingCriteria):
    """A user's criterion that returns one decision for all rows, in one of several forms."""

    def __init__(self, way: Callable[[torch.Tensor], Any]) -> None:
        self.way = way

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        return self.way(input_ids[0, -1] % 4 == 0)


@pytest.mark.parametrize(
    "way", [bool, lambda found: found, lambda found: found[None]], ids=["bool", "one", "row"]
)
@pytest.mark.parametrize("beams", [1, 3])
def test_a_criterion_that_answers_for_all_rows(
    way: Callable[[torch.Tensor], Any], beams: int
) -> None:
    model = zoo.build("bart")
    kwargs = _inputs("bart", model) | {"num_beams": beams, "max_new_tokens": 14}
    assert assert_same(model, kwargs | {"stopping_criteria": [_Number(way)]}).error is None


@pytest.mark.parametrize("family", ["t5", "bloom", "gptj", "gpt2"])
@pytest.mark.parametrize("length", [4, 40])
def test_a_users_own_length(family: str, length: int) -> None:
    """It takes precedence over the length from other options."""
    model = zoo.build(family)
    kwargs = _inputs(family, model) | {"max_new_tokens": 6, "eos_token_id": None}
    prompt = 1 if model.config.is_encoder_decoder else 11
    kwargs["stopping_criteria"] = StoppingCriteriaList([MaxLengthCriteria(prompt + length)])
    assert assert_same(model, kwargs).error is None
    assert model.generate(**kwargs).shape[1] == prompt + length


@pytest.mark.parametrize("number", [np.int64, torch.tensor])
@pytest.mark.parametrize("beams", [1, 3])
def test_counts_of_numpy_and_torch(number: Callable[[int], Any], beams: int) -> None:
    model = zoo.build("gpt2")
    config = tf.GenerationConfig(num_beams=number(beams), max_new_tokens=number(7))
    assert assert_same(model, _inputs("gpt2", model) | {"generation_config": config}).error is None
    assert type(config.max_new_tokens) is type(number(7)), "the user's own config is not changed"


def test_more_samples_by_numpy() -> None:
    model = zoo.build("gpt2")
    kwargs = _inputs("gpt2", model) | {
        "do_sample": True,
        "num_return_sequences": np.int64(3),
        "max_new_tokens": 7,
    }
    assert assert_same(model, kwargs).error is None


@pytest.mark.parametrize("length", [10.5, math.inf])
@pytest.mark.parametrize("beams", [1, 3])
def test_a_length_that_is_no_integer(length: float, beams: int) -> None:
    """A text ends at the first length that reaches it; transformers' beam search raises."""
    model = zoo.build("gpt2")
    kwargs = _inputs("gpt2", model) | {
        "num_beams": beams,
        "max_new_tokens": length,
        "eos_token_id": list(range(2, 40)),
    }
    assert isinstance(assert_same(model, kwargs).error, TypeError if beams > 1 else type(None))


class _Reads(tf.BartForConditionalGeneration):
    """A user's model whose logits depend on all encoder states."""

    def forward(self, *args: Any, encoder_outputs: Any = None, **kwargs: Any) -> Any:
        output = super().forward(*args, encoder_outputs=encoder_outputs, **kwargs)
        output.logits = output.logits + encoder_outputs[0].mean(1, keepdim=True).sum(
            -1, keepdim=True
        ) * torch.linspace(0, 1, output.logits.shape[-1], dtype=output.logits.dtype)
        return output


@pytest.mark.parametrize("beams", [1, 3])
def test_a_model_that_reads_what_the_encoder_made(beams: int) -> None:
    torch.manual_seed(0)
    model = _Reads(zoo.build("bart").config).eval().double()
    kwargs = _inputs("bart", model) | {"num_beams": beams, "max_new_tokens": 9}
    assert assert_same(model, kwargs).error is None


def test_encoder_outputs_as_a_tuple() -> None:
    model = zoo.build("bart")
    inputs = _inputs("bart", model)
    with torch.no_grad():
        hidden = model.get_encoder()(**inputs)[0]
    for _ in range(2):
        assert (
            assert_same(model, inputs | {"encoder_outputs": (hidden,), "max_new_tokens": 6}).error
            is None
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("beams", [1, 3])
def test_another_default_dtype(dtype: torch.dtype, beams: int) -> None:
    """The user's default dtype is neither that of the model nor of the search."""
    model = zoo.build("bart", torch.float32)
    kwargs = _inputs("bart", model) | {
        "num_beams": beams,
        "max_new_tokens": 9,
        "repetition_penalty": 1.2,
    }
    kwargs |= {"return_dict_in_generate": True, "output_scores": True}
    # The first call takes its first token from the modules, which round differently.
    model.generate(**kwargs)
    expected = model.generate(**kwargs)
    torch.set_default_dtype(dtype)
    try:
        found = model.generate(**kwargs)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found.sequences, expected.sequences)
    if beams > 1:
        assert found.sequences_scores.dtype == torch.float32
        assert torch.equal(found.sequences_scores, expected.sequences_scores)


def test_one_new_token_needs_no_step() -> None:
    model = zoo.build("gpt2")
    kwargs = _inputs("gpt2", model) | {"num_beams": 3, "max_new_tokens": 1}
    plan = fastgen.explain(model, **kwargs).plan
    assert (plan.shared, plan.fused, plan.left_off) == (True, False, ())
    assert assert_same(model, kwargs).error is None


def test_what_is_said_of_a_compile_config(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(utils.logger, "warning_once", said.append)
    model = zoo.build("gpt2")
    kwargs = _inputs("gpt2", model) | {"compile_config": tf.CompileConfig(), "max_new_tokens": 6}
    assert assert_same(model, kwargs).error is None
    assert len(said) == 2
    assert said[0] == said[1]


class _Heard(TextStreamer):
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.heard.append(value.tolist())

    def end(self) -> None:
        self.heard.append("end")


def test_streamer() -> None:
    model = zoo.build("gpt2")
    inputs = zoo.batch(model, 1, 6, "none")
    ours, stock = _Heard(), _Heard()
    call(model, inputs | {"streamer": ours, "max_new_tokens": 9}, 0)
    with fastgen.disabled():
        call(model, inputs | {"streamer": stock, "max_new_tokens": 9}, 0)
    assert ours.heard == stock.heard
    assert ours.heard[-1] == "end"


BAD: dict[str, dict[str, Any]] = {
    "empty batch": {"input_ids": torch.zeros(0, 4, dtype=torch.int64)},
    "empty prompt": {"input_ids": torch.zeros(2, 0, dtype=torch.int64)},
    "float ids": {"input_ids": torch.rand(2, 4)},
    "text": {"input_ids": "some text"},
    "more beams than tokens": {"num_beams": 97},
    "more sequences than beams": {"num_beams": 2, "num_return_sequences": 3},
    "no beams": {"num_beams": 0},
    "early_stopping": {"num_beams": 2, "early_stopping": "sometimes"},
    "min above max": {"min_new_tokens": 9, "max_new_tokens": 4, "min_length": 30},
    "unknown argument": {"beams": 3},
    "id beyond the vocabulary": {"input_ids": torch.full((1, 3), 1000)},
    "forced beyond the vocabulary": {"num_beams": 2, "forced_eos_token_id": 1000},
    "bad words beyond the vocabulary": {"num_beams": 2, "bad_words_ids": [[1000]]},
    "temperature": {"do_sample": True, "temperature": -1.0},
    "n-gram": {"no_repeat_ngram_size": -1},
    "low memory": {"num_beams": 2, "low_memory": True},
}


@pytest.mark.parametrize("family", ["bart", "gpt2"])
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_bad_input(family: str, bad: dict[str, Any]) -> None:
    model = zoo.build(family)
    good = _inputs(family, model)
    kwargs = good | {"max_new_tokens": 6} | bad
    if kwargs["input_ids"] is not good["input_ids"]:
        kwargs.pop("attention_mask")
    assert_same(model, kwargs)
    assert_same(model, good | {"num_beams": 2, "max_new_tokens": 5})


@pytest.mark.parametrize(("family", "seed"), [("bart", 0), ("marian", 1), ("gpt2", 0)])
@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3, "length_penalty": 0.0},
        {"num_beams": 3, "early_stopping": True},
        {"num_beams": 3},
        {},
        {"num_beams": 3, "length_penalty": 0.0, "use_cache": False},
        {"use_cache": False},
    ],
    ids=[
        "no length penalty",
        "early stopping",
        "beams",
        "greedy",
        "beams, no cache",
        "greedy, no cache",
    ],
)
def test_finished_sentences_leave(
    family: str, seed: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sentences that end at different times leave the batch, with unchanged tokens."""
    from fastgen.patches.transformers.generate.module_stepper import ModuleStepper

    left: list[int] = []
    keep = ModuleStepper.keep
    monkeypatch.setattr(
        ModuleStepper, "keep", lambda self, kept: (left.append(len(kept)), keep(self, kept))
    )
    model = zoo.build(family, seed=seed)
    ends = list(range(2, 30))
    assert_same(
        model,
        _inputs(family, model, sentences=12)
        | options
        | {"max_new_tokens": 40, "eos_token_id": ends},
    )
    assert left
    assert sorted(left, reverse=True) == left


class _InPlace(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, 7] += 1.0
        return scores


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(
    "idle",
    [
        {},
        {"no_repeat_ngram_size": 9},
        {"begin_suppress_tokens": [5]},
        {"forced_eos_token_id": 5},
        {"min_length": 1},
    ],
    ids=str,
)
def test_a_processor_that_writes_in_place(idle: dict[str, Any], beams: int) -> None:
    """It modifies the returned logits themselves if earlier processors do nothing, as in stock."""
    model = zoo.build("bart")
    kwargs = (
        _inputs("bart", model)
        | idle
        | {"num_beams": beams, "max_new_tokens": 6, "logits_processor": [_InPlace()]}
    )
    result = assert_same(model, kwargs | {"return_dict_in_generate": True, "output_logits": True})
    assert result.error is None
