"""Check `generate_batch` of transformers: each request's result is that of `generate` for it."""

import contextlib
import time
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import RequestStatus
from transformers.generation.continuous_batching.requests import GenerationOutput

import fastgen
from tests.support import zoo
from tests.support.parity import hits
from tests.support.together import start_soon

NAME = "transformers.generate_batch"
SMALL = {"num_blocks": 16, "max_batch_tokens": 64}
"""Sizes for transformers' own, which otherwise takes most of the memory."""
ENDS: dict[str, Any] = {"eos_token_id": [2, *range(20, 40)], "pad_token_id": 5}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": ENDS | {"max_new_tokens": 12, "do_sample": False},
    "penalty": ENDS | {"max_new_tokens": 12, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
    "no end": {"eos_token_id": -1, "max_new_tokens": 5},
    "beams": ENDS | {"max_new_tokens": 12, "num_beams": 3},
    "several": ENDS
    | {"max_new_tokens": 12, "num_beams": 4, "num_return_sequences": 3, "early_stopping": True},
    # Rules that would take padding, whose token these options make likely, for tokens of the text.
    "n-grams of the fill": {
        "eos_token_id": -1, "max_new_tokens": 12, "no_repeat_ngram_size": 2,
        "sequence_bias": [[[0], 12.0]],
    },
    "a biased sequence of the fill": {
        "eos_token_id": -1, "max_new_tokens": 12,
        "sequence_bias": [[[0, token, other], 500.0] for token in (50, 60) for other in (70, 71)],
    },
    "source n-grams of the fill": {
        "eos_token_id": -1, "max_new_tokens": 12, "encoder_no_repeat_ngram_size": 2,
        "sequence_bias": [[[0], 12.0]],
    },
    "a penalty of the source": {
        "eos_token_id": 2, "pad_token_id": 2, "max_new_tokens": 12,
        "encoder_repetition_penalty": 1.8,
    },
}  # fmt: skip


def _prompts(count: int = 24, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 12, (count,), generator=generator).tolist()
    return [torch.randint(40, zoo.VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def _alone(model: Any, prompt: list[int], options: dict[str, Any]) -> list[list[int]]:
    """Return the generated tokens that transformers gives for one prompt, best first."""
    with fastgen.disabled():
        found = model.generate(
            torch.tensor([prompt]), generation_config=GenerationConfig(**options)
        )
    ends = torch.as_tensor(options.get("eos_token_id", zoo.EOS)).flatten()
    texts = []
    for row in found[:, 1 if model.config.is_encoder_decoder else len(prompt) :]:
        ended = torch.isin(row, ends).nonzero()
        texts.append(row[: int(ended[0]) + 1 if len(ended) else len(row)].tolist())
    return texts


def _reasons() -> list[str]:
    return list(fastgen.status()[NAME].fallbacks)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "bart", "t5"])
def test_each_request_as_by_itself(
    family: str, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompts, together = zoo.build(family), _prompts(), start_soon(monkeypatch)
    before, calls = fastgen.status()[NAME], hits()
    batching = ContinuousBatchingConfig(max_batch_tokens=60)
    found = model.generate_batch(prompts, GenerationConfig(**OPTIONS[options]), batching)
    expected = [_alone(model, prompt, OPTIONS[options]) for prompt in prompts]
    assert [found[f"req_{i}"].generated_tokens for i in range(24)] == [one[0] for one in expected]
    more = OPTIONS[options].get("num_return_sequences", 1) - 1
    for i, texts in enumerate(expected):
        children = [found[f"req_{i}__child#{n}"].generated_tokens for n in range(more)]
        assert children == texts[1:]
    names = [[*(f"req_{i}__child#{n}" for n in range(more)), f"req_{i}"] for i in range(24)]
    assert list(found) == [name for group in names for name in group]
    assert fastgen.status()[NAME].hits == before.hits + 1
    assert calls + 1 < hits() < calls + 1 + len(prompts)
    assert OPTIONS[options]["eos_token_id"] in (-1, 2) or max(together) > 1


def test_results_are_of_transformers_type() -> None:
    model, prompts = zoo.build("llama"), _prompts(3)
    begin = time.perf_counter()
    found = model.generate_batch(prompts, max_new_tokens=4, record_timestamps=True)
    for prompt, (name, output) in zip(prompts, found.items(), strict=True):
        assert type(output) is GenerationOutput
        assert (output.request_id, output.prompt_ids) == (name, prompt)
        assert (output.status, output.error, output.logprobs) == (RequestStatus.FINISHED, None, [])
        assert output.is_finished()
        assert output.timestamps == sorted(output.timestamps or [])
        assert len(output.timestamps) == len(output.generated_tokens)
        assert begin <= output.created_time <= output.timestamps[0] <= output.lifespan[1]
    plain = model.generate_batch(prompts, max_new_tokens=4)
    assert [one.timestamps for one in plain.values()] == [None] * 3


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_greedy_results_are_those_of_transformers_own(family: str) -> None:
    """With an end token, without penalties: there both read the options alike."""
    model, prompts = zoo.build(family), _prompts(6)
    given = GenerationConfig(**OPTIONS["greedy"])
    found = model.generate_batch(prompts, given)
    with fastgen.disabled():
        expected = model.generate_batch(prompts, given, ContinuousBatchingConfig(**SMALL))
    assert list(found) == list(expected)
    for name, output in expected.items():
        assert found[name].generated_tokens == output.generated_tokens
        assert found[name].prompt_ids == output.prompt_ids
        assert found[name].status == output.status


def test_draws_follow_the_options() -> None:
    """Two tokens remain possible, and both are drawn."""
    model, prompt = zoo.build("llama"), [50, 51, 52]
    with fastgen.disabled():
        logits = model(torch.tensor([prompt])).logits[0, -1]
    best = set(logits.topk(2).indices.tolist())
    options = GenerationConfig(
        do_sample=True, top_k=2, temperature=50.0, max_new_tokens=1, eos_token_id=-1
    )
    torch.manual_seed(0)
    found = model.generate_batch([prompt] * 40, options)
    assert {output.generated_tokens[0] for output in found.values()} == best


def test_options_as_arguments() -> None:
    """transformers ignores `num_beams` here; fastgen searches with beams."""
    model, prompts = zoo.build("llama"), _prompts(5)
    options = {"num_beams": 3, "max_new_tokens": 9}
    found = model.generate_batch(prompts, **options)
    assert [one.generated_tokens for one in found.values()] == [
        _alone(model, prompt, options)[0] for prompt in prompts
    ]


def test_a_wrong_request_fails_alone() -> None:
    model, prompts = zoo.build("bart"), [[50, 51], [], [50, 96], [60]]
    found = model.generate_batch(prompts, max_new_tokens=5)
    assert [one.status for one in found.values()] == [
        RequestStatus.FINISHED, RequestStatus.FAILED, RequestStatus.FAILED, RequestStatus.FINISHED
    ]  # fmt: skip
    assert "shape (0,)" in str(found["req_1"].error)
    assert "96" in str(found["req_2"].error)
    options = {"max_new_tokens": 5}
    assert found["req_3"].generated_tokens == _alone(model, [60], options)[0]
    assert model.generate_batch([]) == {}


UNSUPPORTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "max_new_tokens is not given": ({"max_new_tokens": None}, {}),
    "min_length": ({"min_length": 3}, {}),
    "return_logprobs": ({}, {"return_logprobs": True}),
    "a seed": ({"do_sample": True}, {"seed": 3}),
    "default_compile_level": ({}, {"default_compile_level": 1}),
}


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_falls_back_with_a_reason(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (more, batching) = zoo.build("llama"), UNSUPPORTED[reason]
    called = list[Any]()
    monkeypatch.setattr(
        model, "continuous_batching_context_manager", lambda **kw: called.append(kw)
    )
    options = ENDS | {"max_new_tokens": 4} | more
    with pytest.raises(TypeError):  # of the manager, which is None here
        model.generate_batch(
            _prompts(2), GenerationConfig(**options), ContinuousBatchingConfig(**batching)
        )
    assert len(called) == 1
    assert any(reason in text for text in _reasons())


def test_log_probabilities_come_from_transformers() -> None:
    model, prompts = zoo.build("llama"), _prompts(2)
    options, batching = GenerationConfig(**OPTIONS["greedy"]), SMALL | {"return_logprobs": True}
    found = model.generate_batch(prompts, options, ContinuousBatchingConfig(**batching))
    for output in found.values():
        assert len(output.logprobs) == len(output.generated_tokens) > 0


def test_beams_are_never_ignored() -> None:
    model, options = zoo.build("llama"), GenerationConfig(num_beams=3, eos_token_id=2)
    with pytest.raises(ValueError, match=r"num_beams = 3 .* max_new_tokens is not given"):
        model.generate_batch(_prompts(2), options)


def test_a_paged_generate() -> None:
    """transformers puts the texts of equal lengths into a tensor (1, B, L)."""
    model, prompts = zoo.build("llama"), torch.randint(40, zoo.VOCABULARY, (4, 6))
    before = fastgen.status()[NAME].hits
    options = {"max_new_tokens": 7, "eos_token_id": -1, "num_beams": 3, "pad_token_id": 0}
    found = model.generate(prompts, cache_implementation="paged", **options)
    with fastgen.disabled():
        expected = model.generate(prompts, **options)
    assert torch.equal(found[0], expected)
    assert fastgen.status()[NAME].hits == before + 1


def test_a_mask_with_padding_falls_back() -> None:
    model, mask = zoo.build("llama"), torch.ones(2, 5, dtype=torch.int64)
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="attention mask with padding"):
        model.generate_batch([[50] * 5] * 2, attention_mask=mask, num_beams=2, max_new_tokens=3)


@pytest.mark.parametrize("length", [2, 3])
def test_an_end_token_in_a_prompt_is_no_padding(length: int) -> None:
    """Its n-grams would otherwise go on as those of the padding do."""
    model = zoo.build("llama")
    prompts = [[50, 2], [2], [2, 60], [60, 61, 62, 63], [70, 71, 72]]
    options = {
        "eos_token_id": 2, "pad_token_id": 2, "max_new_tokens": 12,
        "no_repeat_ngram_size": length, "sequence_bias": [[[50], 100.0]],
    }  # fmt: skip
    found = model.generate_batch(prompts, GenerationConfig(**options))
    for prompt, result in zip(prompts, found.values(), strict=True):
        assert result.generated_tokens == _alone(model, prompt, options)[0]


def test_a_request_that_fails_loses_no_other() -> None:
    model = zoo.build("gpt2")
    long = [50] * (model.config.n_positions + 1)
    options = GenerationConfig(max_new_tokens=4)
    results = model.generate_batch([[50, 51], long, [52]], options, record_timestamps=True)
    assert [one.status for one in results.values()] == [
        RequestStatus.FINISHED, RequestStatus.FAILED, RequestStatus.FINISHED,
    ]  # fmt: skip
    assert "IndexError" in results["req_1"].error
    expected = model.generate_batch([[50, 51], [52]], options)
    for name, other in (("req_0", "req_0"), ("req_2", "req_1")):
        assert results[name].generated_tokens == expected[other].generated_tokens
        assert len(results[name].timestamps) == len(results[name].generated_tokens)
    (failed,) = model.generate_batch([long], options).values()
    assert failed.status == RequestStatus.FAILED


def test_prompts_are_lists_of_integers_in_results() -> None:
    model, options = zoo.build("llama"), GenerationConfig(max_new_tokens=2)
    results = model.generate_batch([torch.tensor([50, 51]), None, [52]], options)
    assert [one.prompt_ids for one in results.values()] == [[50, 51], [], [52]]
    assert all(type(token) is int for token in results["req_0"].prompt_ids)
    assert results["req_1"].status == RequestStatus.FAILED


def test_processors_as_arguments_have_a_reason() -> None:
    model = zoo.build("llama")
    kwargs: dict[str, Any] = {"prefix_allowed_tokens_fn": lambda batch, ids: [60]}
    with contextlib.suppress(Exception):  # of transformers' own manager
        model.generate_batch(
            [[50]], GenerationConfig(max_new_tokens=2), ContinuousBatchingConfig(**SMALL), **kwargs
        )
    assert "prefix_allowed_tokens_fn is given" in _reasons()
