"""Buffers and graphs that calls reuse: the outputs are the same, and nothing is captured again."""

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.generation.streamers import BaseStreamer

import fastgen
from fastgen.models.build.step_fingerprint import Unknown, fingerprint_of
from fastgen.models.cuda_graphs import graph_buffers
from fastgen.models.cuda_graphs.graph_buffers import PooledBuffers, rounded
from fastgen.models.layers import linear
from fastgen.models.layers.experts import Experts
from fastgen.models.layers.positions import AttentionBias
from fastgen.models.runtime.decode_step import Embedding
from fastgen.models.state import state_of
from tests.models.test_fused import _build
from tests.support import zoo
from tests.support.parity import assert_same
from tests.support.recorder import Graphs

FAMILIES = ("bart", "marian", "t5", "gpt2", "llama", "gemma2")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    fastgen.release()
    yield Graphs(monkeypatch)
    fastgen.release()


def _kwargs(
    model: Any, sentences: int = 3, length: int = 9, beams: int = 3, seed: int = 0
) -> dict[str, Any]:
    padding = "none" if model.config.model_type == "gemma2" else "natural"
    options = {"num_beams": beams, "max_new_tokens": 14, "min_new_tokens": 14}
    return zoo.batch(model, sentences, length, padding, seed) | options


def _steps_captured(graphs: Graphs, model: Any, kwargs: dict[str, Any]) -> int:
    """Return how often a call, whose output is unchanged, captures its steps; it always replays."""
    captured, replayed = graphs.captured["_body"], graphs.replayed["_body"]
    assert assert_same(model, kwargs, tolerance=1e-6).error is None
    assert graphs.replayed["_body"] - replayed >= 8
    return graphs.captured["_body"] - captured


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_next_call_captures_nothing(family: str, beams: int, graphs: Graphs) -> None:
    """The inputs differ in tokens, padding and, slightly, in length; the weights change too."""
    model = _build(family)
    assert _steps_captured(graphs, model, _kwargs(model, beams=beams)) == 1
    assert _steps_captured(graphs, model, _kwargs(model, beams=beams, seed=1)) == 0
    assert _steps_captured(graphs, model, _kwargs(model, length=12, beams=beams, seed=4)) == 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    assert _steps_captured(graphs, model, _kwargs(model, beams=beams, seed=3)) == 0


def test_what_is_made_of_weights_is_made_anew(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merged QKV weights and T5's relative bias are updated.

    They are copies, whose changes no weight's address shows.
    """
    monkeypatch.setattr(linear, "MERGED", (2**20, 2**20))
    model = _build("t5")
    _steps_captured(graphs, model, _kwargs(model))
    for name, parameter in model.named_parameters():
        if any(
            part in name
            for part in ("SelfAttention.q", "SelfAttention.v", "relative_attention_bias")
        ):
            parameter.data.mul_(-1.5)
            # The first step after a change is computed both ways.
            model.generate(**_kwargs(model, sentences=1))
            assert _steps_captured(graphs, model, _kwargs(model)) == 0, name


def test_weights_that_lie_elsewhere(graphs: Graphs) -> None:
    model = _build("bart")
    assert _steps_captured(graphs, model, _kwargs(model)) == 1
    layer = model.get_decoder().layers[0].fc1
    layer.weight = nn.Parameter(layer.weight.detach() * 2)
    assert _steps_captured(graphs, model, _kwargs(model)) == 1
    model.get_decoder().layers[1].fc2.bias.data = torch.ones(16, dtype=torch.float64)
    assert _steps_captured(graphs, model, _kwargs(model)) == 1
    model.config.scale_embedding = not model.config.scale_embedding  # no step reads it any more
    assert _steps_captured(graphs, model, _kwargs(model)) <= 1


@pytest.mark.parametrize(
    "change",
    [{"sentences": 4}, {"beams": 2}, {"length": 20}],
    ids=["sentences", "beams", "source"],
)
def test_another_shape_has_another_seat(change: dict[str, int], graphs: Graphs) -> None:
    model = _build("bart")
    shapes = {}, change
    for shape in shapes:
        assert _steps_captured(graphs, model, _kwargs(model, **shape)) == 1
    for shape in shapes:
        assert _steps_captured(graphs, model, _kwargs(model, **shape)) == 0


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("family", ["pegasus", "gpt2"])
def test_sentences_that_leave(family: str, beams: int, graphs: Graphs) -> None:
    """The batch is compacted by halves, so each number of rows is captured once for all calls."""
    model = _build(family)
    ends = {
        "eos_token_id": list(range(2, zoo.VOCABULARY, 5)),
        "pad_token_id": 2,
        "max_new_tokens": 40,
    }
    options = ends | {"num_beams": beams, "early_stopping": beams > 1}
    captured = []
    for seed in range(3):
        before = graphs.captured["_body"]
        batch = zoo.batch(model, 16, 9, seed=seed) | options
        assert assert_same(model, batch, tolerance=1e-6).error is None
        captured.append(graphs.captured["_body"] - before)
    assert 1 <= captured[0] <= 5
    assert sum(captured) <= 5  # 16, 8, 4, 2 and 1 sentences


def test_fewer_sentences_take_a_part_of_a_seat(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs are kept for the most recent numbers of sentences."""
    model = _build("bart")
    _steps_captured(graphs, model, _kwargs(model, sentences=5))
    (of_model,) = state_of(model.get_decoder()).of(graph_buffers.BufferPools).pools.values()
    (seat,) = of_model.free
    assert [_steps_captured(graphs, model, _kwargs(model, sentences=n)) for n in (3, 1, 5, 3)] == [
        1,
        1,
        0,
        0,
    ]
    assert of_model.free == [seat]
    monkeypatch.setattr(graph_buffers, "GRAPHS", 2)
    assert [_steps_captured(graphs, model, _kwargs(model, sentences=n)) for n in (2, 3, 5)] == [
        1,
        0,
        1,
    ]


class _Nested(BaseStreamer):
    """A streamer that makes another call in the middle of a call."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call, self.steps = call, 0

    def put(self, value: Tensor) -> None:
        self.steps += 1
        if self.steps == 6:
            self.call()

    def end(self) -> None:
        pass


def test_two_calls_at_a_time(graphs: Graphs) -> None:
    """Concurrent calls use separate buffers; both are there for the next two calls."""
    model = _build("bart")
    kwargs, others = (_kwargs(model, sentences=1, beams=1, seed=seed) for seed in (0, 1))
    with fastgen.disabled():
        wanted = [model.generate(**each) for each in (kwargs, others)]
    model.generate(**kwargs)
    found: list[Tensor] = []
    for captures in (1, 0):
        before = graphs.captured["_body"]
        inner = _Nested(lambda: found.append(model.generate(**others)))
        found.insert(0, model.generate(**kwargs, streamer=inner))
        assert graphs.captured["_body"] - before == captures
        assert [each.tolist() for each in found] == [each.tolist() for each in wanted]
        found.clear()


@pytest.mark.parametrize("by", ["weights", "release"])
def test_a_seat_that_comes_back_too_late(by: str, graphs: Graphs) -> None:
    """Buffers are dropped if weights are replaced, or all is released, while their call runs."""
    model = _build("bart")
    kwargs = _kwargs(model, sentences=1, beams=1)
    model.generate(**kwargs)

    def inner() -> None:
        if by == "release":
            fastgen.release()
            return
        layer = model.get_decoder().layers[0].fc1
        layer.weight = nn.Parameter(layer.weight.detach() * 2)
        model.generate(**kwargs)

    model.generate(**kwargs, streamer=_Nested(inner))
    (of_model,) = state_of(model.get_decoder()).of(graph_buffers.BufferPools).pools.values()
    assert len(of_model.free) == (by == "weights")  # those of the inner call
    assert _steps_captured(graphs, model, kwargs) == (by == "release")


def test_release_and_the_setting(graphs: Graphs, setting: Callable[[str, str], None]) -> None:
    model = _build("bart")
    captures = [_steps_captured(graphs, model, _kwargs(model)) for _ in range(2)]
    fastgen.release()
    captures.append(_steps_captured(graphs, model, _kwargs(model)))
    setting("FASTGEN_GRAPHS", "call")
    captures += [_steps_captured(graphs, model, _kwargs(model)) for _ in range(2)]
    assert captures == [1, 0, 1, 1, 1]


def _legacy(on: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = on


def _of_products(on: bool) -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32" if on else "none"


@pytest.mark.parametrize("switch", [torch.use_deterministic_algorithms, _legacy, _of_products])
def test_precision_decides_what_is_captured(switch: Callable[[bool], None], graphs: Graphs) -> None:
    """Precision settings are part of the key, by whichever of torch's two names they are set.

    Reading one by its other name may raise.
    """
    if switch is _of_products and not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("this torch has one name for it")
    model = _build("bart")
    captures = [_steps_captured(graphs, model, _kwargs(model))]
    try:
        switch(True)
        captures.append(_steps_captured(graphs, model, _kwargs(model)))
    finally:
        switch(False)
    captures.append(_steps_captured(graphs, model, _kwargs(model)))
    assert captures == [1, 1, 0]


def test_inference_mode_has_seats_of_its_own(graphs: Graphs) -> None:
    """Tensors made in inference mode may not be written outside of it."""
    model = _build("bart")
    kwargs = _kwargs(model)
    expected = model.generate(**kwargs).tolist()
    for _ in range(2):
        with torch.inference_mode():
            assert model.generate(**kwargs).tolist() == expected
        assert model.generate(**kwargs).tolist() == expected
    assert graphs.captured["_body"] == 2


def test_what_is_kept_is_bounded(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _build("bart")
    _steps_captured(graphs, model, _kwargs(model))
    (of_model,) = state_of(model.get_decoder()).of(graph_buffers.BufferPools).pools.values()
    size, kept = of_model.free[0].nbytes, of_model.free[0].kept.nbytes
    monkeypatch.setattr(graph_buffers, "KEPT", 3 * size)
    for sentences in (4, 5, 3, 2, 1):
        _steps_captured(graphs, model, _kwargs(model, sentences=sentences))
        assert sum(seat.nbytes for seat in of_model.free) <= 3 * size
    # The others were used longer ago.
    assert [list(seat.by_sentences) for seat in of_model.free] == [[4, 3, 2, 1]]
    monkeypatch.setattr(graph_buffers, "KEPT", size - kept - 1)
    assert [_steps_captured(graphs, model, _kwargs(model)) for _ in range(2)] == [1, 1]


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("family", ["bart", "t5", "gpt2"])
def test_what_no_call_has_written_is_not_read(
    family: str, beams: int, graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers hold arbitrary values beyond a call's source and text."""
    make = PooledBuffers._buffers

    def poisoned(seat: PooledBuffers, reads: Any) -> Any:
        buffers = make(seat, reads)
        for tensor in (
            buffers.mask,
            buffers.source_mask,
            *(kv for pair in (*buffers.text, *buffers.source) for kv in pair),
        ):
            if tensor is not None:
                tensor.fill_(torch.nan)
        return buffers

    monkeypatch.setattr(PooledBuffers, "_buffers", poisoned)
    model = _build(family)
    for seed in range(2):
        assert _steps_captured(graphs, model, _kwargs(model, beams=beams, seed=seed)) == (seed == 0)


def test_no_memory_for_a_seat(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    model = _build("bart")
    monkeypatch.setattr(PooledBuffers, "_buffers", no_memory)
    assert [_steps_captured(graphs, model, _kwargs(model)) for _ in range(2)] == [1, 1]


def test_a_capture_that_fails_leaves_no_seat(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, call = _build("bart"), Embedding.__call__
    model.generate(**_kwargs(model, sentences=1))

    def asking(embedding: Embedding, ids: Tensor, position: int | Tensor) -> Tensor:
        int(ids[0])
        return call(embedding, ids, position)

    (of_model,) = state_of(model.get_decoder()).of(graph_buffers.BufferPools).pools.values()
    of_model.free.clear()
    with monkeypatch.context() as patch:
        patch.setattr(Embedding, "__call__", asking)
        assert assert_same(model, _kwargs(model), tolerance=1e-6).error is None
    assert not of_model.free
    assert _steps_captured(graphs, model, _kwargs(model)) == 1


def test_a_model_is_not_kept_alive(graphs: Graphs) -> None:
    model = _build("llama")
    model.generate(**_kwargs(model))
    assert graphs.replays
    decoder = weakref.ref(model.get_decoder())
    assert len(state_of(model.get_decoder()).of(graph_buffers.BufferPools).pools) == 1
    del model
    gc.collect()
    assert decoder() is None


def test_what_nobody_knows_has_memory_of_its_own(graphs: Graphs) -> None:
    """A step with a part of unknown inputs gets its own buffers."""

    @dataclass(frozen=True)
    class Other(Embedding):
        pass

    model = _build("bart")
    with pytest.raises(Unknown, match="Other"):
        fingerprint_of(Other(model.get_input_embeddings().weight), [])
    with pytest.raises(Unknown, match="function"):
        fingerprint_of(lambda x: model(x), [])
    mixtral = zoo.build("mixtral")
    mixture = Experts(mixtral.model.layers[0].mlp)
    with pytest.raises(Unknown, match="a loop over experts"):
        fingerprint_of(mixture, [])
    mixtral.set_experts_implementation("grouped_mm")
    before = fingerprint_of(mixture, [])
    assert before == fingerprint_of(mixture, [])
    mixtral.model.layers[0].mlp.gate.top_k = 1
    assert before != fingerprint_of(mixture, [])


def test_facts() -> None:
    """Fingerprints are equal for equal parts, and list derived tensors."""
    table = torch.zeros(7, 4)
    part = Embedding(table, 2.0, table[1:], norm=None)
    assert fingerprint_of(part, []) == fingerprint_of(replace(part), [])
    others = [
        replace(part, scale=1.0),
        replace(part, positions=table[2:]),
        replace(part, tokens=table.clone()),
    ]
    assert all(fingerprint_of(part, []) != fingerprint_of(other, []) for other in others)
    made: list[tuple[Any, str]] = []
    bias = AttentionBias(lambda: torch.ones(2, 5))
    assert fingerprint_of((bias, bias), made) == (fingerprint_of(bias, []),) * 2
    assert made == [(bias, "table")]
    assert fingerprint_of(bias, []) != fingerprint_of(AttentionBias(lambda: torch.ones(2, 6)), [])


def test_rounded() -> None:
    assert [rounded(count) for count in (1, 16, 17, 100, 129, 1000, 1025)] == [
        16,
        16,
        32,
        112,
        144,
        1024,
        1152,
    ]
    assert all(
        count <= rounded(count) <= max(16 * -(-count // 16), count * 9 / 8)
        for count in range(1, 5000)
    )
    assert len({rounded(count) for count in range(1, 1025)}) == 32
