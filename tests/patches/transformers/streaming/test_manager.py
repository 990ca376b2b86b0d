"""Check `ContinuousBatchingManager`: each request's result is that of `generate` for it alone."""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager, RequestStatus
from transformers.generation.continuous_batching.requests import GenerationOutput

import fastgen
from fastgen import config
from fastgen.decoding.batching import continuous_batching
from fastgen.ops import native
from fastgen.patches.transformers.streaming import manager as managers
from fastgen.patches.transformers.streaming.manager import RequestManager
from tests.patches.transformers.streaming.test_generate_batch import (
    ENDS,
    OPTIONS,
    _alone,
    _prompts,
)
from tests.support import zoo
from tests.support.parity import hits

NAME = "transformers.request_manager"
LONG: dict[str, Any] = {"max_new_tokens": 60, "eos_token_id": -1, "pad_token_id": 0}


def _results(manager: Any, count: int) -> dict[str, GenerationOutput]:
    """Return the next finished results, by id."""
    found = dict[str, GenerationOutput]()
    while len(found) < count:
        result = manager.get_result(timeout=30)
        assert result is not None
        if result.is_finished():
            found[result.request_id] = result
    return found


def _at_step(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], object]) -> list[int]:
    """Call a function within the decode step of a number, from the thread that generates.

    Returns:
        A list that gets the sentences in the batches of each step.
    """
    sentences, advance = list[int](), continuous_batching.advance

    def acting(running: Any, replay: Any) -> Any:
        sentences.append(sum(cohort.search.batch_size for cohort in running))
        if len(sentences) == number:
            act()
        return advance(running, replay)

    monkeypatch.setattr("fastgen.patches.transformers.streaming.refill.advance", acting)
    return sentences


@pytest.fixture
def started() -> Iterator[Callable[..., Any]]:
    """Return a function that starts a manager of a model; all are stopped in the end."""
    running = list[Any]()

    def start(model: Any, options: dict[str, Any], **batching: Any) -> Any:
        running.append(
            model.init_continuous_batching(
                GenerationConfig(**options), ContinuousBatchingConfig(**batching)
            )
        )
        running[-1].start()
        return running[-1]

    yield start
    for each in running:
        each.stop(hard_stop=True)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("family", ["llama", "bart", "t5"])
def test_each_request_as_by_itself(family: str, options: str, started: Any) -> None:
    model, prompts, given = zoo.build(family), _prompts(), OPTIONS[options]
    calls, manager = hits(), started(model, given)
    assert isinstance(manager, ContinuousBatchingManager)
    names = [manager.add_request(prompt) for prompt in prompts]
    more = given.get("num_return_sequences", 1) - 1
    found = _results(manager, len(prompts) * (1 + more))
    for name, prompt in zip(names, prompts, strict=True):
        ids = [name, *(f"{name}__child#{number}" for number in range(more))]
        assert [found[each].generated_tokens for each in ids] == _alone(model, prompt, given)
        assert (found[name].prompt_ids, found[name].error) == (prompt, None)
        assert found[name].status == RequestStatus.FINISHED
    assert calls < hits() <= calls + len(prompts) + 1


def test_requests_join_running_ones(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that comes at the third step ends before the one that was there."""
    model, names = zoo.build("llama"), list[str]()
    manager = started(model, LONG)
    sentences = _at_step(
        monkeypatch, 3, lambda: names.append(manager.add_request([70, 71], max_new_tokens=5))
    )
    names.append(manager.add_request([50, 51, 52]))
    late, early = (manager.get_result(timeout=30) for _ in range(2))
    assert [late.request_id, early.request_id] == names[::-1]
    assert sentences[:4] == [1, 1, 1, 2]
    assert 1 in sentences[4:12]
    assert late.generated_tokens == _alone(model, [70, 71], LONG | {"max_new_tokens": 5})[0]
    assert early.generated_tokens == _alone(model, [50, 51, 52], LONG)[0]


def test_options_of_requests(started: Any) -> None:
    model, prompts = zoo.build("bart"), _prompts(8)
    manager = started(model, ENDS | {"max_new_tokens": 12})
    given: list[dict[str, Any]] = [
        {}, {"num_beams": 3}, {"max_new_tokens": 4}, {"eos_token_id": 50},
        {"num_beams": 2, "length_penalty": 0.2}, {"repetition_penalty": 1.5}, {"num_beams": 3}, {},
    ]  # fmt: skip
    names = [manager.add_request(p, **one) for p, one in zip(prompts, given, strict=True)]
    found = _results(manager, 8)
    for name, prompt, one in zip(names, prompts, given, strict=True):
        expected = _alone(model, prompt, ENDS | {"max_new_tokens": 12} | one)[0]
        assert found[name].generated_tokens == expected


def _batches(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return a list that gets the sentences of each batch at each decode step."""
    sizes, advance = list[list[int]](), continuous_batching.advance

    def noting(running: Any, replay: Any) -> Any:
        sizes.append([cohort.search.batch_size for cohort in running])
        return advance(running, replay)

    monkeypatch.setattr("fastgen.patches.transformers.streaming.refill.advance", noting)
    return sizes


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("options", "groups"),
    [
        ({}, [[4], [4, 4]]),
        ({"repetition_penalty": 1.3}, [[4], [4, 4]]),
        ({"forced_eos_token_id": 9}, [[2], [2, 2], [2, 2, 2], [2, 2, 2, 2]]),
        ({"num_beams": 2}, [[2], [2, 2], [2, 2, 2], [2, 2, 2, 2]]),
    ],
    ids=["greedy", "penalty", "forced end", "beams"],
)
def test_requests_of_different_limits_share_a_batch(
    options: dict[str, Any], groups: list[list[int]], streaming: bool, started: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Those with other options, or whose limit changes the text, have a batch of their own."""
    model, limits = zoo.build("llama"), [9, 30, 12, 20]
    manager, sizes = started(model, LONG | options), _batches(monkeypatch)
    asked = [
        ([50 + n, 51, 60 + n], {"max_new_tokens": limit, "no_repeat_ngram_size": size})
        for n, limit in enumerate(limits * 2)
        for size in [2 if n < 4 else 0]
    ]
    if len(groups) > 2:
        asked = [(ids, given | {"no_repeat_ngram_size": 2}) for ids, given in asked]
    with manager.pause():
        names = [manager.add_request(ids, streaming=streaming, **given) for ids, given in asked]
    found = _results(manager, len(asked))
    for name, (ids, given) in zip(names, asked, strict=True):
        assert found[name].generated_tokens == _alone(model, ids, LONG | options | given)[0]
    assert sizes[: len(groups)] == groups


def test_prompts_start_in_parts(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Running requests have a decode step between prompts of at most so many tokens."""
    monkeypatch.setattr("fastgen.patches.transformers.streaming.request_loop.PREFILL", 8)
    model = zoo.build("llama")
    manager, sizes = started(model, LONG), _batches(monkeypatch)
    prompts = [[50, 51, 52], [60, 61, 62], [70, 71, 72], [80] * 12]
    with manager.pause():
        names = manager.add_requests(prompts)
    found = _results(manager, 4)
    assert sizes[:3] == [[2], [2, 1], [2, 1, 1]]
    for name, prompt in zip(names, prompts, strict=True):
        assert found[name].generated_tokens == _alone(model, prompt, LONG)[0]


@pytest.mark.parametrize("beams", [1, 3])
def test_streams(beams: int, started: Any) -> None:
    model, options = zoo.build("llama"), ENDS | {"max_new_tokens": 20, "num_beams": beams}
    manager = started(model, options)
    prompts = _prompts(6)
    names = manager.add_requests(prompts, streaming=True, record_timestamps=True)
    for name, prompt in zip(names, prompts, strict=True):
        outputs = list(manager.request_id_iter(name))
        texts = [output.generated_tokens for output in outputs]
        assert all(len(a) < len(b) and b[: len(a)] == a for a, b in pairwise(texts))
        assert texts[-1] == _alone(model, prompt, options)[0]
        assert {output.status for output in outputs[:-1]} <= {RequestStatus.DECODING}
        assert outputs[-1].status == RequestStatus.FINISHED
        assert len(outputs[-1].timestamps or []) == len(texts[-1])
        assert beams > 1 or len(texts) == len(texts[-1])


def test_a_cancelled_request_leaves_at_the_next_step(
    started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.build("llama")
    manager = started(model, LONG)
    sentences = _at_step(monkeypatch, 5, lambda: manager.cancel_request("req_1"))
    with manager.pause():
        manager.add_requests([[50, 51], [60, 61]])
    found = _results(manager, 1)
    assert list(found) == ["req_0"]
    assert found["req_0"].generated_tokens == _alone(model, [50, 51], LONG)[0]
    assert sentences[:6] == [2, 2, 2, 2, 2, 1]
    assert manager.get_result(timeout=0.05) is None


def test_a_waiting_request_is_cancelled(started: Any) -> None:
    manager = started(zoo.build("llama"), LONG)
    with manager.pause():
        manager.add_requests([[50, 51], [60, 61]])
        manager.cancel_request("req_0")
    assert list(_results(manager, 1)) == ["req_1"]


def test_wrong_requests_fail_alone(started: Any) -> None:
    model = zoo.build("llama")
    manager = started(model, ENDS | {"max_new_tokens": 6})
    names = [
        manager.add_request([]),
        manager.add_request([50], unknown_option=3),
        manager.add_request([50], min_length=9),
        manager.add_request([50], num_beams=2, num_return_sequences=2, streaming=True),
        manager.add_request([50], temperature=-1.0, do_sample=True),
        manager.add_request([50, 51]),
    ]
    found = _results(manager, 6)
    errors = [found[name].error or "" for name in names]
    for error, part in zip(
        errors, ["shape (0,)", "unknown_option", "min_length", "2 beams", "temperature", ""],
        strict=True,
    ):  # fmt: skip
        assert part in error
        assert bool(part) == bool(error)
    assert (
        found[names[-1]].generated_tokens
        == _alone(model, [50, 51], ENDS | {"max_new_tokens": 6})[0]
    )


def test_an_error_of_a_step_fails_the_running_requests(
    started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.build("llama")
    manager = started(model, LONG)

    def fail() -> None:
        raise ArithmeticError("no step")

    _at_step(monkeypatch, 3, fail)
    manager.add_request([50, 51])
    assert _results(manager, 1)["req_0"].error == "no step"
    manager.add_request([60, 61])
    found = _results(manager, 1)["req_1"]
    assert found.generated_tokens == _alone(model, [60, 61], LONG)[0]


@pytest.mark.parametrize("length", [250, 257], ids=["in a step", "in prefill"])
def test_a_request_that_fails_costs_no_other(started: Any, length: int) -> None:
    """It has no positions for its tokens, in the prompt or later."""
    model = zoo.build("gpt2")
    options = {"max_new_tokens": 12, "eos_token_id": -1, "pad_token_id": 0}
    manager = started(model, options)
    prompts = [[50, 51], [60] * length, [52], [53, 54]]
    with manager.pause():
        manager.add_requests(prompts)
    found = _results(manager, 4)
    failed = found.pop("req_1")
    assert failed.status == RequestStatus.FAILED
    assert failed.error
    for name, result in found.items():
        prompt = prompts[int(name.removeprefix("req_"))]
        assert result.generated_tokens == _alone(model, prompt, options)[0]


def test_prompts_in_any_form(started: Any) -> None:
    manager = started(zoo.build("llama"), ENDS | {"max_new_tokens": 3})
    names = [manager.add_request(prompt) for prompt in (None, 50, torch.tensor([50, 51]))]
    found = _results(manager, 3)
    assert [found[name].prompt_ids for name in names] == [[], [], [50, 51]]
    assert [found[name].status for name in names] == [
        RequestStatus.FAILED, RequestStatus.FAILED, RequestStatus.FINISHED,
    ]  # fmt: skip


def test_other_arguments_have_a_reason() -> None:
    model = zoo.build("llama")
    kwargs: dict[str, Any] = {"logits_processor": [lambda ids, scores: scores]}
    with contextlib.suppress(Exception):  # of transformers' own
        model.init_continuous_batching(GenerationConfig(max_new_tokens=2), **kwargs)
    assert "logits_processor is given" in fastgen.status()[NAME].fallbacks


def test_without_c_transformers_own_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(native, "why_off", lambda: "no library")
    model = zoo.build("llama")
    options = GenerationConfig(max_new_tokens=2)
    assert not isinstance(model.init_continuous_batching(options), RequestManager)
    assert any("one by one are slower" in why for why in fastgen.status()[NAME].fallbacks)
    options.num_beams = 2
    model = zoo.build("llama")  # transformers' own may have prepared the other one
    assert isinstance(model.init_continuous_batching(options), RequestManager)


def test_stops(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are completed; a hard stop fails them. A manager starts again."""
    model, prompts = zoo.build("llama"), _prompts(4)
    manager = started(model, LONG)
    manager.add_requests(prompts)
    manager.stop()
    assert not manager.is_running()
    assert manager.add_request([50]) is None
    assert len(list(manager)) == 4
    assert manager.get_result() is None
    manager.start()
    asked = threading.Event()
    _at_step(monkeypatch, 3, asked.set)
    with manager.pause():
        manager.add_requests(prompts)
    assert asked.wait(30)
    manager.stop(hard_stop=True)
    found = list(manager)
    assert [output.status for output in found] == [RequestStatus.FAILED] * 4
    assert all("stopped" in str(output.error) for output in found)
    assert all(len(output.generated_tokens) < 60 for output in found)


def test_a_pause(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins once what runs is complete; the model may change, and what waits sees it."""
    model = zoo.build("llama")
    manager, runs = started(model, LONG), threading.Event()
    _at_step(monkeypatch, 3, runs.set)
    manager.add_request([50, 51])
    assert runs.wait(30)
    with manager.pause():
        assert len(_results(manager, 1)) == 1
        with pytest.raises(RuntimeError, match="paused"):
            manager.stop()
        with torch.no_grad():
            model.lm_head.weight.mul_(-1)
        manager.add_request([50, 51])
        assert manager.get_result(timeout=0.05) is None
    found = _results(manager, 1)["req_1"]
    assert found.generated_tokens == _alone(model, [50, 51], LONG)[0]
    manager.stop()
    with pytest.raises(RuntimeError, match="does not run"), manager.pause():
        pass


def test_results_go_to_a_handler(started: Any) -> None:
    model, options = zoo.build("llama"), ENDS | {"max_new_tokens": 9}
    manager = started(model, options)

    async def ask(prompt: list[int], name: str) -> list[GenerationOutput]:
        outputs, over = list[GenerationOutput](), asyncio.Event()

        def note(output: GenerationOutput) -> None:
            outputs.append(output)
            if output.is_finished():
                over.set()

        manager.add_request(prompt, name, streaming=True)
        await asyncio.sleep(0.01)  # results that come before the handler are not lost
        manager.register_result_handler(name, note)
        await asyncio.wait_for(over.wait(), 30)
        return outputs

    async def ask_all(prompts: list[list[int]]) -> Any:
        return await asyncio.gather(*(ask(p, f"own {n}") for n, p in enumerate(prompts)))

    prompts = _prompts(5)
    for prompt, outputs in zip(prompts, asyncio.run(ask_all(prompts)), strict=True):
        expected = _alone(model, prompt, options)[0]
        assert [one.generated_tokens for one in outputs] == [
            expected[: n + 1] for n in range(len(expected))
        ]


def test_samples_are_told_apart(started: Any) -> None:
    """Samples of one prompt are requests by themselves, and leave as they end."""
    options = ENDS | {"do_sample": True, "max_new_tokens": 30, "num_return_sequences": 3}
    manager = started(zoo.build("llama"), options | {"top_k": 0})
    manager.add_request([50, 51], streaming=True)
    found = _results(manager, 3)
    assert set(found) == {"req_0", "req_0__child#0", "req_0__child#1"}
    texts = [tuple(output.generated_tokens) for output in found.values()]
    assert len(set(texts)) == 3
    for text in texts:
        assert not set(text[:-1]) & set(ENDS["eos_token_id"])
        assert len(text) == 30 or text[-1] in ENDS["eos_token_id"]


def test_sizes_bound_what_runs(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 tokens hold five requests of 2 + 10 tokens; the oldest does not starve."""
    model = zoo.build("llama")
    manager = (
        started(model, LONG | {"max_new_tokens": 10}, num_blocks=4, page_size=16)
        if (hasattr(ContinuousBatchingConfig(), "page_size"))
        else started(model, LONG | {"max_new_tokens": 10}, num_blocks=4, block_size=16)
    )
    sentences = _at_step(monkeypatch, 0, lambda: None)
    with manager.pause():
        manager.add_request([50] * 70)  # more than all tokens: by itself
        manager.add_requests([[50, n] for n in range(60, 72)])
    found = _results(manager, 13)
    assert found["req_0"].error is None
    assert max(sentences) == 5
    first = max(output.lifespan[1] for name, output in found.items() if name == "req_0")
    assert all(output.lifespan[1] >= first for output in found.values())


def test_a_full_queue(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(managers, "FULL", 0.05)
    manager = started(zoo.build("llama"), LONG, max_queue_size=2)
    with manager.pause():
        manager.add_requests([[50], [51]])
        with pytest.raises(queue.Full, match="2 requests wait, 2 at most"):
            manager.add_request([52])
    assert len(_results(manager, 2)) == 2


def test_a_full_queue_holds_up_no_event_loop(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTGEN_MAX_WAITING", "1")
    config.reload()
    try:
        manager = started(zoo.build("llama"), LONG)

        async def add() -> float:
            begin = time.monotonic()
            with pytest.raises(queue.Full):
                manager.add_request([52])
            return time.monotonic() - begin

        with manager.pause():
            manager.add_request([50])
            assert asyncio.run(add()) < managers.FULL / 2
        assert len(_results(manager, 1)) == 1
    finally:
        monkeypatch.undo()
        config.reload()


def test_a_cancelled_request_leaves_nothing_behind(
    started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its handler nor results that nobody has taken."""
    manager = started(zoo.build("llama"), LONG)
    cancelled = threading.Event()
    _at_step(monkeypatch, 6, lambda: (manager.cancel_request("a"), cancelled.set()))
    loop = asyncio.new_event_loop()

    async def register() -> None:
        manager.register_result_handler("b", lambda _: None)

    with manager.pause():
        manager.add_request([50, 51], "a", streaming=True)
        manager.add_request([60, 61], "b")
        manager.add_request([70, 71], "c")
        loop.run_until_complete(register())
        manager.cancel_request("b")
    assert list(_results(manager, 1)) == ["c"]
    assert cancelled.is_set()
    assert not manager.results
    assert not manager.results._handlers
    loop.close()


def test_kept_by_the_model() -> None:
    model = zoo.build("llama")
    options = GenerationConfig(**LONG)
    with model.continuous_batching_context_manager(options, persistent_manager=True) as first:
        first.add_request([50])
    with model.continuous_batching_context_manager(options) as second:
        assert second is first
    model.destroy_cached_continuous_batching_manager()
    with model.continuous_batching_context_manager(options) as third:
        assert third is not first


def test_falls_back_with_a_reason() -> None:
    model = zoo.build("llama")
    options = GenerationConfig(eos_token_id=2, max_new_tokens=4)
    batching = ContinuousBatchingConfig(return_logprobs=True)
    found = model.init_continuous_batching(options, batching)
    assert not isinstance(found, RequestManager)
    assert "return_logprobs=True" in fastgen.status()[NAME].fallbacks
    with pytest.raises(ValueError, match="num_beams = 2"):
        model.init_continuous_batching(GenerationConfig(num_beams=2, max_new_tokens=4), batching)
    with fastgen.disabled():
        assert not isinstance(model.init_continuous_batching(options), RequestManager)


def test_a_family_without_joint_steps(started: Any) -> None:
    """Batches of models whose decode steps are not fused run one after the other."""
    model, options = zoo.build("llama"), ENDS | {"max_new_tokens": 8}
    model.model.layers[0].register_forward_hook(lambda *_: None)
    manager, prompts = started(model, options), _prompts(5)
    names = manager.add_requests(prompts)
    found = _results(manager, 5)
    for name, prompt in zip(names, prompts, strict=True):
        assert found[name].generated_tokens == _alone(model, prompt, options)[0]


def test_from_many_threads(started: Any) -> None:
    model, options, prompts = zoo.build("llama"), OPTIONS["greedy"], _prompts(30)
    manager = started(model, options)
    expected = [_alone(model, prompt, options)[0] for prompt in prompts]
    wrong = list[int]()

    def ask(first: int) -> None:
        for number in range(first, 30, 5):
            name = manager.add_request(prompts[number], f"{number}")
            (output,) = manager.request_id_iter(name)
            if output.generated_tokens != expected[number]:
                wrong.append(number)

    threads = [threading.Thread(target=ask, args=(first,)) for first in range(5)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 60
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
