"""Decode steps that are captured once and replayed equal steps that run one by one."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import StoppingCriteria
from transformers.generation.logits_process import (
    LogitNormalization,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

import fastgen
from fastgen.decoding.backends.captured_beam_search import CapturedBeamSearch
from fastgen.models.cuda_graphs import graph
from fastgen.models.runtime import sublayers
from fastgen.ops.rotation import Rotation
from fastgen.patches.transformers.generate.report import CallReport, last_call
from tests.models.test_fused import FAMILIES, FIELDS, METHODS, _build
from tests.support import zoo
from tests.support.parity import assert_same
from tests.support.recorder import Graphs

FEW = {"max_new_tokens": 2, "min_new_tokens": 2}
"""Options of a warm-up call: the first step of a model's first call is computed both ways."""


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    return Graphs(monkeypatch)


def _same(model: Any, kwargs: dict[str, Any], tolerance: float = 1e-6) -> CallReport:
    assert assert_same(model, kwargs, tolerance=tolerance).error is None
    call = last_call()
    assert call is not None
    return call


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str, method: str, graphs: Graphs) -> None:
    model = _build(family)
    for padding in ("none",) if family == "gemma2" else ("none", "natural"):
        kwargs = zoo.batch(model, 4, 9, padding) | METHODS[method] | {"max_new_tokens": 20} | FIELDS
        model.generate(**kwargs)  # the first step of the first call is computed both ways
        replays = graphs.replays
        assert _same(model, kwargs, tolerance=1e-5).plan.graphs
        assert graphs.replays - replays >= 8


@pytest.mark.parametrize(("family", "beams"), [("bart", 1), ("bart", 3), ("t5", 3), ("llama", 3)])
@pytest.mark.slow
def test_kernels(
    family: str, beams: int, setting: Callable[[str, str], None], graphs: Graphs
) -> None:
    """Triton kernels also read values that change from step to step on the device."""
    setting("FASTGEN_OPS", "triton")
    model = _build(family, torch.float32)
    kwargs = zoo.batch(model, 2, 7) | {
        "num_beams": beams,
        "max_new_tokens": 9,
        "min_new_tokens": 9,
        "no_repeat_ngram_size": 3,
    }
    model.generate(**kwargs | FEW)
    replays = graphs.replays
    _same(model, kwargs, tolerance=1e-4)
    assert graphs.replays - replays >= 5


@pytest.mark.parametrize("captures", [1, 2])
@pytest.mark.parametrize("family", ["bart", "t5", "gpt2"])
@pytest.mark.parametrize("beams", [1, 2])
def test_each_function_is_captured_once(
    family: str, beams: int, captures: int, graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text outgrows its buffers only where room for all of it would take too much memory."""
    if captures == 2:
        monkeypatch.setattr(graph, "ROOMY", 2**60)
    model = _build(family)
    kwargs = zoo.batch(model, 2, 5) | {
        "num_beams": beams,
        "max_new_tokens": 110,
        "min_new_tokens": 110,
    }
    _same(model, kwargs)
    assert graphs.captured == Counter({"_body": captures, "_select_tokens": captures})
    # Without the step that is computed both ways, and the steps before a capture.
    assert graphs.replayed["_body"] == 109 - 1 - captures


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("family", ["pegasus", "gpt2"])
def test_sentences_that_leave(family: str, beams: int, graphs: Graphs) -> None:
    model = _build(family)
    options = {"num_beams": beams, "early_stopping": beams > 1}
    ends = {"eos_token_id": list(range(2, zoo.VOCABULARY, 4)), "pad_token_id": 2}
    call = _same(model, zoo.batch(model, 24, 9) | options | ends | {"max_new_tokens": 40})
    rows = [rows for rows, _ in call.steps]
    assert len(set(rows)) > 1
    assert graphs.captures >= 1
    assert graphs.replays >= 1


CHOICES: dict[str, dict[str, Any]] = {
    "plain": {},
    "never": {"early_stopping": "never", "length_penalty": 2.0},
    "early": {"early_stopping": True, "num_return_sequences": 3},
    "negative": {"length_penalty": -0.7, "num_return_sequences": 2},
    "ends": {"eos_token_id": [2, 5, 9, 11, 30, 31, 32, 33], "length_penalty": 0.0},
    "all_end": {"eos_token_id": list(range(2, zoo.VOCABULARY, 3)), "pad_token_id": 2},
    "no_end": {"eos_token_id": None, "pad_token_id": 2},
    "ngrams": {"no_repeat_ngram_size": 2},
    "words": {"bad_words_ids": [[5], [6, 7], [8, 9, 10]], "no_repeat_ngram_size": 3},
    "penalty": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 1},
    "bias": {"sequence_bias": {(5,): 4.0, (9,): -3.0}},
    "sequences": {
        "sequence_bias": {
            (5,): 4.0,
            (9, 5): -3.0,
            (7, 8, 5): 2.5,
            (11, 12): 6.0,
            (30, 31, 32, 33): 9.0,
        }
    },
    "lengths": {"min_new_tokens": 12, "forced_eos_token_id": 2, "eos_token_id": [2, 7, 9, 11]},
    "suppressed": {"suppress_tokens": [4, 5, 6], "begin_suppress_tokens": [7, 8]},
    "together": {"repetition_penalty": 1.2, "sequence_bias": {(5,): 4.0}},
    "forced": {"forced_eos_token_id": [2, 7], "eos_token_id": [2, 7]},
    "normalised": {
        "renormalize_logits": True,
        "remove_invalid_values": True,
        "repetition_penalty": 1.3,
    },
    "dense": {"exponential_decay_length_penalty": (3, 1.1)},
}
NOT_OF_SCORES = (
    "token selection is not captured as a CUDA graph: "
    "a logits processor may look at the text, or wait for the device"
)


@pytest.mark.parametrize("options", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("family", ["pegasus", "gpt2"])
def test_choices(family: str, options: dict[str, Any], graphs: Graphs) -> None:
    """Beam search with captured selection finds the same hypotheses.

    It notices one step late that the search has ended.
    """
    model = _build(family)
    kwargs = zoo.batch(model, 9, 9) | {"num_beams": 4, "max_new_tokens": 33} | options
    if family == "pegasus" and "no_repeat_ngram_size" in options:
        kwargs["encoder_no_repeat_ngram_size"] = 3
    for sentences in (9, 9, 1):
        batch = {
            name: value[:sentences] if torch.is_tensor(value) else value
            for name, value in kwargs.items()
        }
        call = _same(model, batch)
    assert (NOT_OF_SCORES in call.plan.left_off) == (options is CHOICES["dense"])
    if options is CHOICES["dense"]:
        assert graphs.captured["_select_tokens"] == 0
    elif options not in (CHOICES["all_end"], CHOICES["ends"]):  # these end too early
        assert graphs.replayed["_select_tokens"] >= 5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow
def test_greedy_choices(family: str, graphs: Graphs) -> None:
    """Greedy search with captured selection returns the same tokens, despite an extra step."""
    model = _build(family)
    batch = zoo.batch(model, 5, 9, "none" if family == "gemma2" else "natural")
    kwargs = batch | {"max_new_tokens": 24, "no_repeat_ngram_size": 3, "pad_token_id": 2}
    for ends in ([2], list(range(2, zoo.VOCABULARY, 7))):
        for _ in range(2):
            call = _same(model, kwargs | {"eos_token_id": ends})
            assert not [text for text in call.plan.left_off if text.startswith("token selection")]
    assert graphs.replayed["_select_tokens"] >= 5


GREEDY = {
    name: options for name, options in CHOICES.items() if name not in ("never", "early", "negative")
} | {
    "dense": {"exponential_decay_length_penalty": (3, 1.1)},
    "prompt_ignored": {
        "logits_processor": [RepetitionPenaltyLogitsProcessor(1.4, prompt_ignore_length=9)]
    },
    "warped": {
        "logits_processor": [TopKLogitsWarper(9), LogitNormalization()],
        "repetition_penalty": 1.4,
    },
    "leave": {
        "eos_token_id": list(range(2, zoo.VOCABULARY, 9)),
        "pad_token_id": 2,
        "min_new_tokens": 4,
    },
}


@pytest.mark.parametrize("options", GREEDY.values(), ids=GREEDY)
@pytest.mark.parametrize("family", ["pegasus", "gpt2"])
@pytest.mark.slow
def test_greedy_edits(family: str, options: dict[str, Any], graphs: Graphs) -> None:
    model = _build(family)
    kwargs = zoo.batch(model, 24, 9) | {"max_new_tokens": 33} | options
    if "length_penalty" in kwargs:
        del kwargs["length_penalty"]
    if family == "pegasus" and "no_repeat_ngram_size" in options:
        kwargs["encoder_no_repeat_ngram_size"] = 3
    for sentences in (24, 24, 1):
        batch = {
            name: value[:sentences] if torch.is_tensor(value) else value
            for name, value in kwargs.items()
        }
        call = _same(model, batch)
    assert (NOT_OF_SCORES in call.plan.left_off) == (options is GREEDY["dense"])
    if options is GREEDY["dense"]:
        assert not graphs.captured["_select_tokens"]
    elif "eos_token_id" not in options or options["eos_token_id"] is None:
        assert graphs.replayed["_select_tokens"] >= 5


DRAWN: dict[str, dict[str, Any]] = {
    "plain": {},
    "warped": {
        "temperature": 1.3,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.02,
        "typical_p": 0.95,
        "epsilon_cutoff": 3e-4,
    },
    "penalties": {
        "temperature": 0.8,
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "top_k": 0,
        "top_p": 0.8,
    },
    "together": {
        "repetition_penalty": 1.2,
        "sequence_bias": {(5,): 4.0, (9, 5): -3.0},
        "renormalize_logits": True,
    },
    "several": {"num_return_sequences": 3, "top_k": 20},
    "lengths": {"min_new_tokens": 12, "forced_eos_token_id": 2, "eos_token_id": [2, 7, 9, 11]},
    "ends": {
        "eos_token_id": list(range(2, zoo.VOCABULARY, 9)),
        "pad_token_id": 2,
        "temperature": 2.0,
    },
    "no_end": {"eos_token_id": None, "pad_token_id": 2},
    "eta": {"eta_cutoff": 3e-4},  # this processor reads values as it validates them
}


@pytest.mark.parametrize("options", DRAWN.values(), ids=DRAWN)
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("family", ["pegasus", "gpt2"])
@pytest.mark.slow
def test_drawn_choices(family: str, beams: int, options: dict[str, Any], graphs: Graphs) -> None:
    """Sampling with captured selection draws the same random numbers, and no more of them."""
    model = _build(family)
    kwargs = (
        zoo.batch(model, 9, 9)
        | {"do_sample": True, "num_beams": beams, "max_new_tokens": 33}
        | options
    )
    for sentences in (9, 9, 1):
        batch = {
            name: value[:sentences] if torch.is_tensor(value) else value
            for name, value in kwargs.items()
        }
        call = _same(model, batch)
        assert (NOT_OF_SCORES in call.plan.left_off) == (options is DRAWN["eta"])
    if options is not DRAWN["eta"]:
        assert not [text for text in call.plan.left_off if text.startswith("token selection")]
        assert graphs.replayed["_select_tokens"] >= 5


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("new_tokens", [12, 60], ids=["cut", "ended"])
def test_a_draw_too_many_is_put_back(new_tokens: int, beams: int, graphs: Graphs) -> None:
    """Calls leave the generator as unpatched transformers does, whether texts end or are cut."""
    model = _build("gpt2")
    ends = {
        "eos_token_id": list(range(2, zoo.VOCABULARY, 4 if beams > 1 else 8)),
        "pad_token_id": 2,
    }
    options = {
        "do_sample": True,
        "num_beams": beams,
        "early_stopping": beams > 1,
        "max_new_tokens": new_tokens,
    }
    kwargs = zoo.batch(model, 3, 9) | ends | options

    def calls() -> list[list[list[int]]]:
        torch.manual_seed(5)
        return [model.generate(**kwargs).tolist() for _ in range(6)]

    ours = calls()
    with fastgen.disabled():
        assert ours == calls()
    assert any(len(rows[0]) < 9 + new_tokens for rows in ours) or new_tokens == 12
    assert graphs.replayed["_select_tokens"] >= 5


@pytest.mark.parametrize("beams", [1, 3])
def test_nothing_to_draw_from(beams: int, graphs: Graphs) -> None:
    """NaN raises with captures too, one step late, but not in the extra step."""
    model = _build("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = torch.nan
    kwargs = zoo.batch(model, 2, 3, "none") | {
        "do_sample": True,
        "num_beams": beams,
        "max_new_tokens": 33,
    }
    errors = [
        assert_same(model, kwargs | {"eos_token_id": ends}, seed).error
        for ends in (2, [2, 7])
        for seed in range(5)
    ]
    assert any(errors)
    assert not all(errors)
    assert all("probability tensor contains" in str(error) for error in errors if error is not None)
    assert graphs.replayed["_select_tokens"] >= 5


@pytest.mark.parametrize("beams", [1, 3])
def test_a_graph_that_draws_otherwise(
    beams: int, graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "draws_alike", lambda _: False)
    model = _build("gpt2")
    call = _same(
        model,
        zoo.batch(model, 3, 9) | {"do_sample": True, "num_beams": beams, "max_new_tokens": 20},
    )
    assert (
        "token selection is not captured as a CUDA graph: a graph draws other random numbers"
        in call.plan.left_off
    )
    assert set(graphs.captured) == {"_body"}


@pytest.mark.parametrize("beams", [1, 3])
def test_keys_and_values_are_those_of_the_last_step(beams: int, graphs: Graphs) -> None:
    """The returned cache does not hold the extra step."""
    model = _build("gpt2")
    ends = {"eos_token_id": list(range(2, zoo.VOCABULARY, 6)), "pad_token_id": 2}
    kwargs = zoo.batch(model, 4, 9) | ends | {"num_beams": beams, "max_new_tokens": 33}
    for _ in range(2):
        call = _same(model, kwargs | {"return_dict_in_generate": True})
    assert (
        "token selection is not captured as a CUDA graph: return_dict_in_generate=True"
        in call.plan.left_off
    )
    assert graphs.replayed["_body"]


class _OneToken(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids[:, -1] == 5


class _Deaf(BaseStreamer):
    def put(self, value: Any) -> None:
        pass

    def end(self) -> None:
        pass


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"stopping_criteria": [_OneToken()]}, "a stopping criterion looks at all tokens"),
        ({"streamer": _Deaf()}, "a streamer is set"),
    ],
    ids=["criterion", "streamer"],
)
def test_choices_that_are_not_captured(
    options: dict[str, Any], reason: str, graphs: Graphs
) -> None:
    model = _build("gpt2")
    for _ in range(2):
        call = _same(
            model,
            zoo.batch(model, 1 if "streamer" in options else 3, 9)
            | {"max_new_tokens": 20}
            | options,
        )
    assert f"token selection is not captured as a CUDA graph: {reason}" in call.plan.left_off
    assert set(graphs.captured) == {"_body"}


@pytest.mark.parametrize("allowed", [0, 1])
@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("beams", [1, 3])
def test_choices_that_cannot_be_captured(
    beams: int, sample: bool, allowed: int, graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a capture fails, selection runs as single operations, whether or not rows have left."""
    capture, tried = graph.capture, Counter[str]()

    def refusing(function: Any, *others: Any) -> Any:
        tried[function.func.__name__] += 1
        if function.func.__name__ != "_body" and tried[function.func.__name__] > allowed:
            raise graph.NotCaptured("operation not permitted")
        return capture(function, *others)

    monkeypatch.setattr(graph, "capture", refusing)
    model = _build("gpt2")
    ends = {
        "eos_token_id": list(range(2, zoo.VOCABULARY, 12)),
        "pad_token_id": 2,
        "min_new_tokens": 8,
    }
    options = {"num_beams": beams, "do_sample": sample, "max_new_tokens": 60}
    monkeypatch.setattr(graph, "draws_alike", lambda _: True)
    for _ in range(2):
        tried.clear()
        call = _same(model, zoo.batch(model, 24, 9) | ends | options)
    assert (
        "token selection is not captured as a CUDA graph: operation not permitted"
        in call.plan.left_off
    )
    assert call.plan.graphs


def test_scores_alone_are_those_of_their_steps(graphs: Graphs) -> None:
    """A replayed step overwrites its logits, so the returned ones are copies."""
    model = _build("gpt2")
    kwargs = zoo.batch(model, 3, 9) | {
        "max_new_tokens": 20,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    for _ in range(2):
        _same(model, kwargs)
    assert graphs.replays >= 20


class _Allocations(TorchDispatchMode):
    """A mode that counts operators that allocate tensors, except during a replay."""

    def __init__(self, graphs: Graphs) -> None:
        super().__init__()
        self.graphs, self.made = graphs, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        old = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves((args, kwargs))
            if torch.is_tensor(leaf)
        }
        new = (
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves(result)
            if torch.is_tensor(leaf)
        )
        if not self.graphs.replaying and any(storage not in old for storage in new):
            self.made[str(func)] += 1
        return result


@pytest.mark.slow
def test_a_replayed_step_takes_no_memory(
    monkeypatch: pytest.MonkeyPatch, setting: Callable[[str, str], None], graphs: Graphs
) -> None:
    """Between two selections, everything runs in existing memory."""
    setting("FASTGEN_OPS", "triton")
    made: list[Counter[str]] = []
    select = CapturedBeamSearch.select

    def counted(self: Any, logits: torch.Tensor) -> bool:
        step = self.model.step

        def counted_step(ids: torch.Tensor) -> torch.Tensor:
            with allocations:
                return step(ids)

        allocations = _Allocations(graphs)
        self.model.step = counted_step
        with allocations:
            going_on = select(self, logits)
        made.append(allocations.made)
        return going_on

    model = _build("bart", torch.float32)
    kwargs = zoo.batch(model, 2, 7) | {"num_beams": 2, "max_new_tokens": 12, "min_new_tokens": 12}
    model.generate(**kwargs | FEW)
    monkeypatch.setattr(CapturedBeamSearch, "select", counted)
    model.generate(**kwargs, no_repeat_ngram_size=3)
    assert len(made) == 12
    assert made[0]
    # A stopping criterion returns a tensor, which is always on the CPU.
    of_a_criterion = Counter({"aten.full.default": 1})
    assert all(counted <= of_a_criterion for counted in made[8:-1]), made[8:-1]


@pytest.mark.slow
def test_kernels_of_a_choice(setting: Callable[[str, str], None], graphs: Graphs) -> None:
    """One launch moves all tables: tokens, rows, and the ancestry of beams."""
    setting("FASTGEN_OPS", "triton")
    model = _build("bart", torch.float32)
    kwargs = zoo.batch(model, 1, 7) | {
        "num_beams": 2,
        "max_new_tokens": 12,
        "no_repeat_ngram_size": 3,
    }
    model.generate(**kwargs | FEW)
    model.generate(**kwargs)
    kernels = graphs.kernels["_select_tokens"]
    names = "_ngram_kernel", "_group_kernel", "_kbest_and_choose_kernel", "_move_rows_kernel"
    assert kernels == dict.fromkeys(names, 1)


def test_few_steps_are_not_worth_it(graphs: Graphs) -> None:
    model = _build("bart")
    for _ in range(2):
        _same(model, zoo.batch(model, 2, 9) | {"num_beams": 3, "max_new_tokens": 7})
    assert graphs.captures == 0


def test_what_cannot_be_captured(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call continues step by step and reports the reason."""

    def capture(*_: Any) -> Any:
        raise graph.NotCaptured("operation not permitted")

    monkeypatch.setattr(graph, "capture", capture)
    model = _build("t5")
    call = _same(model, zoo.batch(model, 3, 9) | {"num_beams": 3, "max_new_tokens": 20})
    assert not call.plan.graphs
    assert call.plan.fused
    assert (
        "decode steps are not captured as CUDA graphs: operation not permitted"
        in call.plan.left_off
    )


def test_a_value_that_is_asked_for(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder rejects what a graph rejects: a step in which Python reads a computed value."""
    rotated = sublayers.rotated

    def asking(x: torch.Tensor, rotation: Rotation) -> Any:
        assert rotation.cosine.max() <= 1
        return rotated(x, rotation)

    monkeypatch.setattr(sublayers, "rotated", asking)
    call = _same(_build("llama"), zoo.batch(_build("llama"), 3, 9) | {"max_new_tokens": 20})
    assert graphs.captures == 0
    assert any("not permitted" in text for text in call.plan.left_off)


def test_switched_off(monkeypatch: pytest.MonkeyPatch, setting: Callable[[str, str], None]) -> None:
    cuda = torch.empty(0, device="meta")
    monkeypatch.setattr(
        torch.Tensor, "device", property(lambda _: torch.device("cuda")), raising=False
    )
    assert graph.enabled(cuda)
    setting("FASTGEN_GRAPHS", "off")
    assert not graph.enabled(cuda)


@pytest.mark.parametrize("beams", [1, 3])
def test_adapters(beams: int, graphs: Graphs) -> None:
    """A graph is never replayed for another adapter, or for another scale of the same one."""
    peft = pytest.importorskip("peft")
    config = lambda: peft.LoraConfig(  # noqa: E731
        r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    model = peft.get_peft_model(_build("llama"), config())
    model.add_adapter("other", config())
    model.double().eval()
    kwargs = zoo.batch(model.get_base_model(), 4, 9) | {
        "num_beams": beams,
        "max_new_tokens": 20,
        "min_new_tokens": 20,
    }
    model.generate(**kwargs)
    layer = model.get_base_model().model.layers[1].self_attn.v_proj
    changes: list[Callable[[], object]] = [
        lambda: None,
        lambda: model.set_adapter("other"),
        lambda: layer.set_scale("other", 3.0),
        lambda: model.set_adapter("default"),
    ]
    for change in changes:
        change()
        for _ in range(2):
            replays = graphs.replays
            plan = _same(model, kwargs | FIELDS, tolerance=1e-5).plan
            assert plan.fused
            assert plan.graphs
            assert graphs.replays - replays >= 8
