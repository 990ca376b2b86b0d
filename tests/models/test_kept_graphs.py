"""Token selection of later calls replays graphs of earlier ones, with the same output."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, SuppressTokensLogitsProcessor

import fastgen
from fastgen.decoding.backends.captured_selection import CapturedSelection
from fastgen.models.cuda_graphs import graph_buffers, kept_graphs
from fastgen.models.cuda_graphs.graph import NotCaptured
from fastgen.models.cuda_graphs.graph_buffers import BufferPools
from fastgen.models.cuda_graphs.kept_graphs import CallState, KeptFunction, KeptGraphs, NotKept
from fastgen.models.state import state_of
from fastgen.ops import dispatch
from tests.models.test_fused import _build
from tests.support import zoo
from tests.support.parity import assert_same
from tests.support.recorder import Graphs


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    fastgen.release()
    yield Graphs(monkeypatch)
    fastgen.release()


SELECTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy_ngrams": {"no_repeat_ngram_size": 3, "repetition_penalty": 1.3},
    "greedy_ends": {"eos_token_id": [2, 7, 9], "pad_token_id": 2},
    "sampled": {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 1.2},
    "beams": {"num_beams": 3},
    "beams_ngrams": {"num_beams": 3, "no_repeat_ngram_size": 2, "repetition_penalty": 1.2},
    "beams_ends": {"num_beams": 3, "eos_token_id": [2, 7, 9], "length_penalty": 0.3},
    "beams_bias": {"num_beams": 3, "sequence_bias": {(5,): 4.0, (9,): -3.0}},
    "beams_sampled": {"num_beams": 3, "do_sample": True, "top_k": 20},
}


def _call(
    graphs: Graphs, model: Any, options: dict[str, Any], sentences: int = 3, length: int = 9,
    seed: int = 0, tokens: int = 20,
) -> int:  # fmt: skip
    """Return how often a call captures; its output is that of unpatched transformers."""
    ends = {"max_new_tokens": tokens} | (
        {} if "eos_token_id" in options else {"min_new_tokens": tokens}
    )
    before, replayed = graphs.captures, graphs.replayed["_select_tokens"]
    kwargs = zoo.batch(model, sentences, length, seed=seed) | ends | options
    assert assert_same(model, kwargs, tolerance=1e-6).error is None
    if "eos_token_id" not in options:
        assert graphs.replayed["_select_tokens"] - replayed >= 8
    return graphs.captures - before


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("family", ["bart", "gpt2"])
def test_the_next_call_captures_nothing(family: str, selection: str, graphs: Graphs) -> None:
    model, options = _build(family), SELECTIONS[selection]
    batch = zoo.batch(model, 3, 9)
    model.generate(**batch, max_new_tokens=2)  # the first step is computed both ways
    first = model.generate(**batch | options, max_new_tokens=20)
    returned = first.clone()
    assert graphs.captures >= 2
    _call(graphs, model, options)
    assert _call(graphs, model, options) == 0
    assert _call(graphs, model, options, seed=1) == 0
    if family == "bart":  # the text of a decoder-only model begins with the source
        assert _call(graphs, model, options, length=12, seed=4) == 0
    assert _call(graphs, model, options, sentences=2, seed=2) > 0
    assert _call(graphs, model, options, sentences=2, seed=3) == 0
    assert _call(graphs, model, options, seed=5) == 0
    assert torch.equal(first, returned), "memory of a graph was returned"


@pytest.mark.parametrize("selection", ["greedy", "greedy_ngrams", "sampled", "beams"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_prompts_of_similar_lengths(family: str, selection: str, graphs: Graphs) -> None:
    """In greedy search and sampling, one graph serves them; a beam search captures anew."""
    model, options = _build(family), SELECTIONS[selection]
    assert _call(graphs, model, options) > 0
    beams = "num_beams" in options
    assert (_call(graphs, model, options, length=12, seed=1) > 0) == beams
    assert (_call(graphs, model, options, length=11, seed=2) > 0) == beams
    assert _call(graphs, model, options, seed=3) == 0


@pytest.mark.parametrize(
    "pair",
    [
        ({"typical_p": 0.2}, {"typical_p": 0.95}),
        ({"epsilon_cutoff": 1e-4}, {"epsilon_cutoff": 0.05}),
        ({"remove_invalid_values": True}, {"renormalize_logits": True}),
    ],
    ids=["typical", "epsilon", "kinds"],
)
@pytest.mark.parametrize("beams", [1, 3])
def test_options_of_a_processor(
    beams: int, pair: tuple[dict[str, Any], ...], graphs: Graphs
) -> None:
    """Graphs with one option of a processor do not serve calls with another."""
    model = _build("gpt2")
    drawn = {"do_sample": True, "num_beams": beams, "top_k": 0}
    captured = [_call(graphs, model, drawn | options) for options in (*pair, *pair)]
    assert captured[1] > 0
    assert captured[2:] == [0, 0]


@pytest.mark.parametrize("beams", [1, 3])
def test_tensors_of_processors_are_left_alone(beams: int, graphs: Graphs) -> None:
    """A user's processors keep their tokens, and ban them, in whatever order they are used."""
    model = _build("gpt2")
    banned = [5, 6, 7, 14, 33, 49], [1, 2, 3, 8, 70, 82]
    processors = [SuppressTokensLogitsProcessor(tokens, device="cpu") for tokens in banned]
    kwargs = zoo.batch(model, 3, 9) | {"num_beams": beams}
    kwargs |= {"max_new_tokens": 20, "min_new_tokens": 20}
    for i in (0, 1, 0, 1):
        fresh = SuppressTokensLogitsProcessor(banned[i], device="cpu")
        with fastgen.disabled():
            expected = model.generate(**kwargs, logits_processor=LogitsProcessorList([fresh]))
        found = model.generate(**kwargs, logits_processor=LogitsProcessorList([processors[i]]))
        assert torch.equal(found, expected)
        assert [each.suppress_tokens.tolist() for each in processors] == [*banned]
    assert graphs.captured["_select_tokens"] == 1


def _storages(*tensors: Tensor) -> set[int]:
    return {each.untyped_storage().data_ptr() for each in tensors}


@pytest.mark.parametrize("ops", ["reference", "triton"])
@pytest.mark.parametrize("selection", SELECTIONS)
def test_all_that_a_graph_reads_is_kept(
    selection: str, ops: str, setting: Callable[[str, str], None], graphs: Graphs
) -> None:
    """Memory that a captured selection has not allocated is its state, or that of the steps."""
    setting("FASTGEN_OPS", ops)
    model = _build("bart", torch.float32)
    options = {"max_new_tokens": 12, "min_new_tokens": 12} | SELECTIONS[selection]
    if "eos_token_id" in options:
        del options["min_new_tokens"]
    batch = zoo.batch(model, 2, 7)
    graphs.keeps_outside = True
    model.generate(**batch, max_new_tokens=2)
    model.generate(**batch | options)
    (pool,) = state_of(model.get_decoder()).of(BufferPools).pools.values()
    known = _storages(dispatch.counters(batch["input_ids"].device, 1))
    for buffers in pool.free:
        for kept in buffers.kept._graphs:
            inputs = [each for each in kept.inputs if isinstance(each, Tensor)]
            known |= _storages(*kept.memory, *inputs)
    captured = graphs.outside["_select_tokens"]
    assert captured
    for outside in captured:
        assert not [
            (tensor.shape, tensor.dtype) for at, tensor in outside.items() if at not in known
        ]


def test_a_call_at_the_same_time_has_graphs_of_its_own(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one call uses the graphs, another one, over other buffers, leaves its memory alone."""
    model = _build("gpt2")
    kwargs = zoo.batch(model, 2, 9) | {"max_new_tokens": 20, "min_new_tokens": 20}
    other = zoo.batch(model, 2, 9, seed=3) | {"max_new_tokens": 20, "min_new_tokens": 20}
    with fastgen.disabled():
        expected, expected_other = model.generate(**kwargs), model.generate(**other)
    for _ in range(2):
        assert torch.equal(model.generate(**kwargs), expected)
    run, within = CapturedSelection.run, list[Tensor]()

    def run_within(self: Any, *args: Any) -> Any:
        result = run(self, *args)
        if self.search.ids.shape[1] == 15 and not within:
            within.append(torch.empty(0))
            within[0] = model.generate(**other)
        return result

    monkeypatch.setattr(CapturedSelection, "run", run_within)
    assert torch.equal(model.generate(**kwargs), expected)
    assert torch.equal(within[0], expected_other)


@pytest.mark.parametrize("beams", [1, 3])
def test_sentences_that_leave(beams: int, graphs: Graphs) -> None:
    """Each number of sentences is captured once for all calls."""
    model = _build("gpt2")
    options = {"num_beams": beams, "early_stopping": beams > 1, "max_new_tokens": 40}
    options |= {"eos_token_id": list(range(2, zoo.VOCABULARY, 5)), "pad_token_id": 2}
    captured = []
    for seed in (0, 1, 0, 1):
        before = graphs.captured["_select_tokens"]
        batch = zoo.batch(model, 16, 9, seed=seed) | options
        assert assert_same(model, batch, tolerance=1e-6).error is None
        captured.append(graphs.captured["_select_tokens"] - before)
    assert captured[0] > 0
    assert sum(captured) <= 5  # 16, 8, 4, 2 and 1 sentences


def test_what_is_kept_is_bounded(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_graphs, "MOST", 2)
    model = _build("gpt2")
    for length_penalty in (0.5, 1.0, 1.5):
        assert _call(graphs, model, {"num_beams": 3, "length_penalty": length_penalty}) > 0
    (pool,) = state_of(model.get_decoder()).of(BufferPools).pools.values()
    (buffers,) = pool.free
    assert len(buffers.kept._graphs) == 2
    assert buffers.nbytes > buffers.shape.nbytes + sum(buffers.by_sentences) * buffers.shape.outputs
    assert _call(graphs, model, {"num_beams": 3, "length_penalty": 1.5}) == 0


def test_graphs_of_dropped_steps_are_dropped(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hold the logits of a step that no call replays again."""
    monkeypatch.setattr(graph_buffers, "GRAPHS", 2)
    model = _build("gpt2")
    for sentences in (6, 5, 4, 3):
        assert _call(graphs, model, {}, sentences) > 0
    (pool,) = state_of(model.get_decoder()).of(BufferPools).pools.values()
    (buffers,) = pool.free
    logits = [buffers.repeated.result[0][0][0] for buffers in buffers.by_sentences.values()]
    assert len(logits) == len(buffers.kept._graphs) == 2
    assert all(
        kept.inputs[0] is each for kept, each in zip(buffers.kept._graphs, logits, strict=True)
    )
    assert _call(graphs, model, {}, 4) == 0


def test_a_capture_that_fails_drops_all(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _build("gpt2")
    assert _call(graphs, model, {}) > 0
    capture = kept_graphs.CapturedFunction._captured

    def refusing(self: Any, *args: Any) -> Any:
        if isinstance(self, KeptFunction):
            raise NotCaptured("operation not permitted")
        return capture(self, *args)

    monkeypatch.setattr(kept_graphs.CapturedFunction, "_captured", refusing)
    kwargs = zoo.batch(model, 3, 9) | {"max_new_tokens": 20, "min_new_tokens": 20}
    assert assert_same(model, kwargs | {"no_repeat_ngram_size": 2}).error is None
    monkeypatch.undo()
    (pool,) = state_of(model.get_decoder()).of(BufferPools).pools.values()
    assert not any(buffers.kept._graphs for buffers in pool.free)


@dataclass
class _Part:
    number: float
    tensor: Tensor
    others: list[Any] = field(default_factory=list[Any])
    function: Any = None


class _List(list[Any]):
    pass


class _Slotted:
    __slots__ = ("number",)


_Part.__module__ = _List.__module__ = _Slotted.__module__ = "fastgen.tests"


def _facts(part: _Part) -> object:
    names = ("number", "tensor", "others", "function")
    return CallState(torch.device("cpu"), [(part, names)]).fingerprint


def test_facts() -> None:
    """Facts say what has to be equal: everything but the contents of tensors."""
    zeros, ones = torch.zeros(3), torch.ones(3)
    fingerprint = _facts(_Part(1.0, zeros, [zeros, _Part(2.0, ones)]))
    assert fingerprint == _facts(_Part(1.0, ones, [ones, _Part(2.0, zeros)]))
    for other in (
        _Part(2.0, zeros, [zeros, _Part(2.0, ones)]),
        _Part(1.0, zeros[:2], [zeros, _Part(2.0, ones)]),
        _Part(1.0, zeros.double(), [zeros, _Part(2.0, ones)]),
        _Part(1.0, zeros, [ones, _Part(2.0, ones)]),  # other tensors are the same one
        _Part(1.0, zeros, [zeros, _Part(3.0, ones)]),
        _Part(1.0, zeros, [zeros, _Part(2.0, ones)], function=_facts),
    ):
        assert fingerprint != _facts(other)
    for unknown in (
        object(), (zeros,), torch.zeros(1).expand(3), {"a": zeros}, lambda: zeros,
        torch.empty(3, device="meta"),
    ):  # fmt: skip
        with pytest.raises(NotKept):
            _facts(_Part(1.0, zeros, [unknown]))
    assert _facts(_Part(1.0, zeros, _List([1]))) != _facts(_Part(1.0, zeros, _List([2])))
    described = _List()
    described.name = "attributes and items"  # pyright: ignore[reportAttributeAccessIssue]
    for partly in (described, _Slotted()):  # attributes do not describe all of them
        with pytest.raises(NotKept):
            _facts(_Part(1.0, zeros, function=partly))
    itself = _Part(1.0, zeros)
    itself.others.append(itself)
    with pytest.raises(NotKept):
        _facts(itself)


def test_one_call_at_a_time() -> None:
    kept, first, second = KeptGraphs(), KeptFunction(), KeptFunction()
    assert kept.claim(first)
    assert kept.claim(first)
    assert not kept.claim(second)
    del first  # a call that has ended with an error
    assert kept.claim(second)
    kept.leave()
    assert kept.claim(KeptFunction())


def test_a_call_that_leaves_captures_in_a_pool_of_its_own() -> None:
    """Another call may use the graphs, and their pool, from then on."""
    kept, function, device = KeptGraphs(), KeptFunction(), torch.device("cpu")
    part = _Part(1.0, torch.zeros(3))
    reads = lambda: [(part, ("tensor",))]  # noqa: E731
    assert function.run(lambda: 1, device, kept, reads) == 1
    assert function._borrowed_pool is kept.borrowed_pool
    function.leave()
    assert function._borrowed_pool is not kept.borrowed_pool
