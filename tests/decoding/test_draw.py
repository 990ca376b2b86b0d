"""Sampling that CUDA graphs can capture: the same draws as torch.multinomial."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fastgen.decoding.search.multinomial import draw
from fastgen.models.cuda_graphs import graph
from tests.support.recorder import Graphs

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("left", [1.0, 0.5, 0.0], ids=["all", "half", "few"])
@pytest.mark.parametrize("count", [1, 2, 9])
@pytest.mark.parametrize("shape", [(1, 9), (5, 11), (24, 1000), (3, 50264)], ids=str)
def test_draw(
    shape: tuple[int, int], count: int, left: float, dtype: torch.dtype, device: str
) -> None:
    """The draws and the generator's final state equal those of torch.multinomial bit for bit."""
    torch.manual_seed(7)
    out = (torch.rand(shape) >= left) & (torch.arange(shape[1]) >= count)
    weights = (
        torch.randn(shape, dtype=dtype).mul(3).masked_fill(out, -torch.inf).softmax(-1).to(device)
    )
    before, source = weights.clone(), graph.generator(weights.device)
    state = source.get_state()
    wanted, after = torch.multinomial(weights, count), source.get_state()
    source.set_state(state)
    assert torch.equal(draw(weights, count), wanted)
    assert torch.equal(source.get_state(), after)
    assert torch.equal(weights, before)


@pytest.mark.parametrize("count", [1, 4])
def test_nothing_else_is_left_to_draw(count: int) -> None:
    """If fewer weights are positive than there are draws, the rest come in the same order."""
    weights = torch.tensor([[0.5, 0.0, 0.0, 0.5, 0.0]])
    torch.manual_seed(1)
    wanted = torch.multinomial(weights, count)
    torch.manual_seed(1)
    assert torch.equal(draw(weights, count), wanted)


@pytest.fixture
def untried() -> Iterator[None]:
    graph.draws_alike.cache_clear()
    yield
    graph.draws_alike.cache_clear()


@pytest.mark.usefixtures("untried")
def test_graphs_that_draw_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs(monkeypatch)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    for _ in range(2):
        assert graph.draws_alike(torch.device("cpu"))
        assert torch.equal(torch.get_rng_state(), state)
    assert (graphs.captures, graphs.replays) == (1, 2), "it is tried once"


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("otherwise", ["numbers", "state", "not at all"])
def test_graphs_that_draw_otherwise(otherwise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Graphs(monkeypatch)
    capture = graph.capture

    def other(*arguments: Any) -> Any:
        if otherwise == "not at all":
            raise graph.NotCaptured("operation not permitted")
        launch, result = capture(*arguments)

        def launched() -> None:
            if otherwise == "numbers":
                torch.rand(1)
            state = torch.get_rng_state()
            launch()
            if otherwise == "state":
                torch.set_rng_state(state)

        return launched, result

    monkeypatch.setattr(graph, "capture", other)
    state = torch.get_rng_state()
    assert not graph.draws_alike(torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.gpu
def test_a_device_draws_alike() -> None:
    assert graph.draws_alike(torch.empty(0, device="cuda").device)


@pytest.mark.gpu
def test_a_capture_that_fails() -> None:
    """The random number generator works again after a failed capture."""
    values = torch.rand(3, device="cuda")
    with pytest.raises(graph.NotCaptured):
        graph.capture(lambda: values.sum().item(), values.device, graph.CapturePool(values.device))
    assert torch.rand(3, device="cuda").isfinite().all()
