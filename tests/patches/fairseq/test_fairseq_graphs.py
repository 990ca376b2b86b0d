"""Compare fairseq's beam search, with token selection captured and replayed, with stock."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastgen
from fastgen import config

pytest.importorskip("fairseq")
from fairseq import utils
from fairseq.search import BeamSearch
from fairseq.sequence_generator import SequenceGenerator

from fastgen.decoding.backends.captured_first_finished import CapturedFirstFinished
from fastgen.decoding.kv_cache import room
from fastgen.decoding.search.first_finished import FirstFinished
from fastgen.models.cuda_graphs import graph
from fastgen.ops import dispatch
from fastgen.patches.fairseq.generator.shared_stepper import SharedStepper
from tests.models.test_graphs import _Allocations as Allocations
from tests.support import fairseq_zoo as zoo
from tests.support.recorder import Graphs

NOT_CAPTURED = "token selection is not captured as a CUDA graph: "


@pytest.fixture(autouse=True)
def _double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fairseq's softmax compute in fp64, which it would otherwise round to fp32."""
    monkeypatch.setattr(utils, "softmax", lambda x, dim, onnx_trace=False: torch.softmax(x, dim))


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    return Graphs(monkeypatch)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not dispatch.INTERPRETED:
        pytest.skip("kernels are compiled where there is a GPU")
    monkeypatch.setenv("FASTGEN_OPS", "triton")
    config.reload()
    yield
    monkeypatch.undo()
    config.reload()


def _left_off() -> Counter[str]:
    """Return why token selection was not captured so far, with counts."""
    found = fastgen.status()["fairseq.generate"].left_off
    return Counter({reason: n for reason, n in found.items() if reason.startswith(NOT_CAPTURED)})


def _served(
    models: list[Any], sample: dict[str, Any], options: dict[str, Any], *reasons: str
) -> Any:
    """Assert that output equals fairseq's; check the reasons for not capturing token selection."""
    hits, before = zoo.hits(), _left_off()
    found = zoo.assert_same(models, sample, options, 1e-4)
    assert zoo.hits() == hits + 1
    assert _left_off() - before == Counter(NOT_CAPTURED + reason for reason in reasons)
    return found


def _prompted(options: dict[str, Any], sentences: int = 7) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a batch for a language model, with the prompt as prefix."""
    prompt = torch.randint(4, 30, (sentences, 5), generator=torch.Generator().manual_seed(0))
    sample = {"net_input": {"src_tokens": prompt, "src_lengths": torch.full((sentences,), 5)}}
    return sample, options | {"prefix_tokens": prompt}


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"beam_size": 1, "min_len": 12},
    "five": {"beam_size": 5},
    "penalty": {"len_penalty": 1.7},
    "negative": {"len_penalty": -0.6},
    "unnormalized": {"normalize_scores": False},
    "min_len": {"min_len": 21},
    "max_len": {"max_len_a": 1.1, "max_len_b": 14, "min_len": 5},
    "ends": {"max_len_b": 24, "min_len": 24},
    "ngrams": {"no_repeat_ngram_size": 2},
    "temperature": {"temperature": 0.6},
    "unk": {"unk_penalty": 0.4, "tokens_to_suppress": ("w3", "w5")},
    "eos": {"eos": 7, "bos_token": 0},
    "together": {"no_repeat_ngram_size": 3, "min_len": 10, "unk_penalty": -1.0, "len_penalty": 0.3},
}


FP32 = ("plain", "greedy", "negative", "together")


@pytest.mark.parametrize(
    ("option", "dtype"),
    [
        *((option, torch.float64) for option in OPTIONS),
        *((option, torch.float32) for option in FP32),
    ],
)
@pytest.mark.parametrize("name", ["transformer", "bart", "lm"])
def test_option(name: str, option: str, dtype: torch.dtype, graphs: Graphs) -> None:
    options, reasons = (
        {"beam_size": 4, "max_len_b": 30, "min_len": 9} | OPTIONS[option],
        list[str](),
    )
    # One of the prompts contains this end token, so they are not all prefilled at once.
    if (name, option) == ("lm", "eos"):
        reasons.append("while there is a prefix")
    for seed in (0, 1):
        sample = zoo.batch(7, 20, seed=seed)
        if name == "lm":
            sample, options = _prompted(options)
        found = _served([zoo.build(name, dtype, seed)], sample, options, *reasons)
        assert all(len(hypotheses) == options["beam_size"] for hypotheses in found)
    assert graphs.replayed["_select_tokens"] >= 5


@pytest.mark.parametrize("option", ["plain", "greedy", "ngrams", "unk"])
@pytest.mark.parametrize("name", ["transformer", "bart"])
def test_the_next_call_captures_nothing(name: str, option: str, graphs: Graphs) -> None:
    options = {"beam_size": 4} | OPTIONS[option] | {"max_len_b": 30, "min_len": 30}
    model, captured = zoo.build(name, torch.float64, 0), list[int]()
    for seed in (0, 0, 1):
        before = graphs.captures
        _served([model], zoo.batch(7, 20, seed=seed), options)
        captured.append(graphs.captures - before)
    assert captured[0] >= 2
    assert captured[1:] == [0, 0]


def test_as_many_beams_as_tokens(graphs: Graphs) -> None:
    """In the first step some beams have no candidate; beams that end later ignore them."""
    _served([zoo.build("transformer")], zoo.batch(7, 9), {"beam_size": 31, "max_len_b": 30})
    assert graphs.replayed["_select_tokens"] >= 2


@pytest.mark.parametrize("name", ["transformer", "bart"])
def test_no_longer_than_its_source(name: str, graphs: Graphs) -> None:
    options = {"beam_size": 3, "match_source_len": True, "min_len": 12}
    found = _served([zoo.build(name)], zoo.batch(7, 20), options)
    assert {bool(h["score"].isfinite()) for hypotheses in found for h in hypotheses} == {
        False,
        True,
    }
    assert graphs.replayed["_select_tokens"] >= 3


@pytest.mark.parametrize("beams", [1, 3])
def test_sentences_that_leave(beams: int, graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sentences leave early or late, some at a time; the remaining batch is captured anew."""
    left, keep = list[int](), FirstFinished.keep

    def noted(search: Any, model: Any, staying: list[int]) -> Tensor:
        left.append(search.batch_size - len(staying))
        return keep(search, model, staying)

    monkeypatch.setattr(FirstFinished, "keep", noted)
    options = {"beam_size": beams, "max_len_b": 40, "no_repeat_ngram_size": 2}
    found = _served([zoo.build("transformer", seed=2)], zoo.batch(24, 9), options)
    lengths = {max(len(h["tokens"]) for h in hypotheses) for hypotheses in found}
    assert len(lengths) > 3
    assert len(left) >= 2
    assert graphs.captured["_select_tokens"] >= 2


def test_batches_of_one_generator(graphs: Graphs) -> None:
    models = [zoo.build("transformer")]
    batches = [
        zoo.batch(sentences, length, seed=sentences)
        for sentences, length in ((5, 9), (1, 4), (9, 12), (5, 9))
    ]

    def run() -> list[Any]:
        generator = SequenceGenerator(
            models, zoo.dictionary(), beam_size=3, max_len_b=25, min_len=8
        )
        return [
            generator.generate(models, utils.apply_to_sample(torch.clone, batch))
            for batch in batches
        ]

    ours = run()
    assert graphs.captured["_select_tokens"] >= len(batches)
    with fastgen.disabled():
        stock = run()
    for mine, theirs in zip(ours, stock, strict=True):
        for own, other in zip(mine, theirs, strict=True):
            assert [h["tokens"].tolist() for h in own] == [h["tokens"].tolist() for h in other]
            torch.testing.assert_close(
                [h["score"] for h in own], [h["score"] for h in other], atol=1e-4, rtol=1e-4
            )


def test_a_text_that_outgrows_its_memory(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers for cross-attention grow together with the mask of the text.

    No step is captured twice for them.
    """
    monkeypatch.setattr(room, "GROWTH", 16)
    monkeypatch.setattr(graph, "ROOMY", 2**60)
    # Buffers of other calls, which only a CPU reuses, would let the KV cache grow at other times.
    fastgen.release()
    options = {"beam_size": 2, "max_len_b": 60, "min_len": 60}
    _served([zoo.build("bart")], zoo.batch(3, 9), options)
    assert graphs.captured == Counter({"_body": 3, "_select_tokens": 3})


@pytest.mark.parametrize(
    ("names", "options", "reason"),
    [
        (["transformer", "bart"], {}, "predictions of several models are mixed"),
        (
            ["transformer"],
            {"lm_model": "lm", "lm_weight": 0.3},
            "predictions of several models are mixed",
        ),
        (["transformer"], {"search_strategy": "sampling"}, "Sampling selects the tokens"),
        (["transformer"], {"search_strategy": "diverse"}, "DiverseBeamSearch selects the tokens"),
        (
            ["transformer"],
            {"search_strategy": "length"},
            "LengthConstrainedBeamSearch selects the tokens",
        ),
        (["adaptive"], {}, "log-probabilities of its own"),
    ],
    ids=["ensemble", "language_model", "sampling", "diverse", "length", "adaptive"],
)
def test_choices_that_are_not_captured(
    names: list[str], options: dict[str, Any], reason: str, graphs: Graphs
) -> None:
    models = [zoo.build(name) for name in names]
    if "lm_model" in options:
        options = options | {"lm_model": zoo.build(options["lm_model"])}
    _served(
        models, zoo.batch(3, 7), {"beam_size": 4, "max_len_b": 30, "min_len": 9} | options, reason
    )
    assert graphs.captured["_select_tokens"] == 0


@pytest.mark.parametrize("name", ["transformer", "bart"])
def test_prefix(name: str, graphs: Graphs) -> None:
    """With a prefix, token selection runs eagerly; a text that ends in its prefix is finished."""
    prefix = torch.tensor([[5, 6], [7, 1], [9, 2], [1, 1], [4, 4]])
    options = {"beam_size": 3, "max_len_b": 30, "min_len": 9, "prefix_tokens": prefix}
    _served([zoo.build(name)], zoo.batch(5, 7), options, "while there is a prefix")
    assert graphs.replayed["_select_tokens"] >= 5


@pytest.mark.parametrize("name", ["transformer", "lm"])
def test_choices_that_cannot_be_captured(
    name: str, graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a capture fails, token selection runs eagerly, whether sentences have left or not."""
    capture, tried = graph.capture, Counter[str]()
    sample, options = zoo.batch(24, 9), {"beam_size": 2, "max_len_b": 50, "min_len": 9}
    if name == "lm":
        sample, options = _prompted(options, 24)
    # The order matters: the second call starts with the buffers that the first has grown.
    for allowed in (0, 1):

        def refusing(function: Any, *others: Any, allowed: int = allowed) -> Any:
            tried[function.func.__name__] += 1
            if function.func.__name__ == "_select_tokens" and tried["_select_tokens"] > allowed:
                raise graph.NotCaptured("operation not permitted")
            return capture(function, *others)

        tried.clear()
        monkeypatch.setattr(graph, "capture", refusing)
        _served([zoo.build(name, seed=2)], sample, options, "operation not permitted")
        assert graphs.captured["_select_tokens"] == allowed
        assert tried["_select_tokens"] == allowed + 1


def test_steps_that_are_not_captured(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token selection is not captured unless decode steps are."""
    monkeypatch.setenv("FASTGEN_STEP", "module")
    config.reload()
    try:
        options = {"beam_size": 3, "max_len_b": 30, "min_len": 20}
        _served([zoo.build("bart")], zoo.batch(3, 7), options, "decode steps are not")
    finally:
        monkeypatch.undo()
        config.reload()
    assert graphs.captures == 0


@contextlib.contextmanager
def _only(model: Any, *tokens: int) -> Iterator[None]:
    """Make all other tokens impossible for the model within a block."""
    bias = torch.full((zoo.WORDS + 4,), -torch.inf, dtype=torch.float64)
    bias[list(tokens)] = 0.0
    own = model.decoder.output_projection
    biased = nn.Linear(own.in_features, own.out_features, dtype=torch.float64)
    biased.weight, biased.bias = own.weight, nn.Parameter(bias)
    model.decoder.output_projection = biased
    yield
    model.decoder.output_projection = own


@pytest.mark.parametrize("longest", [6, 12])
@pytest.mark.parametrize("stops", [False, True])
def test_no_text_can_end(
    stops: bool, longest: int, graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fairseq's assertion fails, or no hypothesis is returned if the search stops at max_len."""

    def search() -> BeamSearch:
        made = BeamSearch(zoo.dictionary())
        made.stop_on_max_len = stops
        return made

    monkeypatch.setitem(zoo.SEARCHES, "plain", search)
    model = zoo.build("transformer", seed=3)
    with _only(model, *range(4, 20)):
        options = {"beam_size": 2, "max_len_b": longest, "search_strategy": "plain"}
        found = zoo.assert_same([model], zoo.batch(3, 7), options)
    assert found == [[], [], []] if stops else isinstance(found, AssertionError)


@pytest.mark.parametrize("longest", [6, 12])
def test_few_texts_can_end(longest: int, graphs: Graphs) -> None:
    """A sentence is finished with its longest text, with possibly fewer texts than beams."""
    model = zoo.build("transformer", seed=3)
    with _only(model, 5, zoo.EOS):
        found = zoo.assert_same(
            [model], zoo.batch(3, 7), {"beam_size": 3, "max_len_b": longest, "min_len": longest}
        )
    assert [len(hypotheses) for hypotheses in found] == [1, 1, 1]


@pytest.mark.parametrize(
    ("name", "beams"), [("transformer", 4), ("bart", 1), ("bart", 3), ("lm", 3)]
)
@pytest.mark.slow
def test_kernels(name: str, beams: int, kernels: None, graphs: Graphs) -> None:
    """Kernels, too, read the values that change per step from the device."""
    options: dict[str, Any] = {
        "beam_size": beams,
        "max_len_b": 16,
        "min_len": 6,
        "no_repeat_ngram_size": 3,
    }
    sample = zoo.batch(3, 7)
    if name == "lm":
        sample, options = _prompted(options, 3)
    _served([zoo.build(name, torch.float32)], sample, options)
    assert graphs.replayed["_select_tokens"] >= 3


@pytest.mark.slow
def test_kernels_of_a_choice(kernels: None, graphs: Graphs) -> None:
    """One launch moves all tables: tokens, scores, attention and the ancestry of beams."""
    options = {"beam_size": 4, "max_len_b": 16, "min_len": 16, "no_repeat_ngram_size": 3}
    _served([zoo.build("bart", torch.float32)], zoo.batch(2, 7), options)
    ran = graphs.kernels["_select_tokens"]
    assert ran["_move_rows_kernel"] == 1
    assert ran["index_copy_"] == 1  # cross-attention
    assert ran["_reorder_rows_kernel"] == 0
    assert ran["_choose_first_kernel"] == 1
    assert ran.total() == 12, ran


@pytest.mark.slow
def test_a_replayed_step_takes_no_memory(
    kernels: None, graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replayed token selection and decode step allocate no memory."""
    made: list[Counter[str]] = []

    select, step = CapturedFirstFinished.select, SharedStepper.step

    def counted_select(backend: Any, output: Any) -> bool:
        with (allocations := Allocations(graphs)):
            going_on = select(backend, output)
        made.append(allocations.made)
        return going_on

    def counted_step(model: Any, ids: Tensor) -> Any:
        with (allocations := Allocations(graphs)):
            predicted = step(model, ids)
        made.append(allocations.made)
        return predicted

    monkeypatch.setattr(CapturedFirstFinished, "select", counted_select)
    monkeypatch.setattr(SharedStepper, "step", counted_step)
    options = {"beam_size": 2, "max_len_b": 16, "min_len": 16, "temperature": 0.9}
    zoo.call([zoo.build("bart", torch.float32)], zoo.batch(2, 7), options)
    assert len(made) == 2 * 17
    assert made[0]
    assert not any(made[14:-2]), made[14:-2]


@pytest.mark.parametrize("name", ["transformer", "bart"])
def test_the_next_batch_captures_no_step(name: str, graphs: Graphs) -> None:
    """Its buffers move to those of the last batch, whichever of its sentences leave.

    See `models.cuda_graphs.graph_buffers`.
    """
    fastgen.release()
    model, options = zoo.build(name), {"beam_size": 3, "max_len_b": 24, "min_len": 3}
    captured = []
    for seed in range(4):
        before = graphs.captured["_body"]
        _served([model], zoo.batch(8, 9, seed=seed), options)
        captured.append(graphs.captured["_body"] - before)
    assert captured[0] >= 1
    assert sum(captured) <= 4  # for 8, 4, 2 and 1 sentences
    assert 0 in captured
