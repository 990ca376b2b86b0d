"""Tests on a CUDA device: the same calls return the same tokens."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastgen
from fastgen.models.cuda_graphs import graph
from fastgen.patches.transformers.generate.report import last_call
from fastgen.patches.transformers.introspection.noise import noise
from tests.support import zoo
from tests.support.parity import assert_same, fallbacks, hits

pytestmark = pytest.mark.gpu


def _on_device(inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: value.to("cuda") for name, value in inputs.items()}


@pytest.mark.parametrize("family", [family for family in zoo.FAMILIES if family != "gemma2"])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 4, "no_repeat_ngram_size": 3}, {"num_beams": 3, "num_return_sequences": 3}],
    ids=["greedy", "beams", "sequences"],
)
def test_family(family: str, options: dict[str, Any]) -> None:
    model = zoo.build(family).to("cuda")
    before, served = fallbacks(), hits()
    result = assert_same(
        model, _on_device(zoo.batch(model, 4, 11)) | options | {"max_new_tokens": 20}
    )
    assert result.error is None
    assert hits() == served + 1
    assert fallbacks() == before


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["bart", "t5", "gpt2", "llama"])
def test_dtypes(family: str, dtype: torch.dtype, beams: int) -> None:
    """Captured steps return the same tokens in fp32.

    In half precision, the error of their logits is at most that of the toolkit.
    """
    model = zoo.build(family, dtype).to("cuda")
    inputs = _on_device(zoo.batch(model, 3, 9))
    options = {"num_beams": beams, "max_new_tokens": 40, "min_new_tokens": 40}
    for _ in range(2):
        if dtype == torch.float32:
            assert_same(model, inputs | options, tolerance=1e-4)
        else:
            found = noise(model, inputs, options)
            assert found.explains, found
        call = last_call()
        assert call is not None
        if (family, dtype) != ("t5", torch.float16):  # its sums are clamped
            assert call.plan.fused, call.plan.left_off
            assert call.plan.graphs, call.plan.left_off


def test_sentences_leave() -> None:
    model = zoo.build("gpt2").to("cuda")
    inputs = _on_device(zoo.batch(model, 12, 11))
    assert_same(
        model, inputs | {"num_beams": 3, "max_new_tokens": 40, "eos_token_id": list(range(2, 30))}
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"do_sample": True, "top_p": 0.9}, {"do_sample": True, "num_beams": 3}],
    ids=["greedy", "beams", "sampling", "beam sampling"],
)
@pytest.mark.parametrize("family", ["bart", "t5", "gpt2", "llama"])
@pytest.mark.parametrize("step", ["auto", "module"])
def test_graphs(
    step: str, family: str, options: dict[str, Any], setting: Callable[[str, str], None]
) -> None:
    """Steps are captured while the text outgrows its buffers and sentences leave the batch."""
    setting("FASTGEN_STEP", step)
    model = zoo.build(family).to("cuda")
    for ends in ([2], list(range(2, zoo.VOCABULARY, 4))):
        for _ in range(2):
            kwargs = (
                _on_device(zoo.batch(model, 8, 11))
                | options
                | {"max_new_tokens": 100, "eos_token_id": ends}
            )
            assert_same(model, kwargs | {"pad_token_id": 2})
            call = last_call()
            assert call is not None
            assert call.plan.graphs, call.plan.left_off
            assert not [text for text in call.plan.left_off if text.startswith("token selection")]


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("family", ["bart", "t5", "gpt2", "llama"])
def test_graphs_that_outlive_a_call(
    family: str, beams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next call captures nothing, uses current weights, and memory does not grow."""
    model, captures, capture = (
        zoo.build(family, torch.float32).to("cuda"),
        list[str](),
        graph.capture,
    )

    def counted(function: Any, *args: Any) -> Any:
        captures.append(function.func.__name__)
        return capture(function, *args)

    monkeypatch.setattr(graph, "capture", counted)
    fastgen.release()
    options, held = {"num_beams": beams, "max_new_tokens": 30, "min_new_tokens": 30}, list[int]()
    for seed in range(6):
        assert_same(
            model, _on_device(zoo.batch(model, 4, 9, "natural", seed)) | options, tolerance=1e-4
        )
        call = last_call()
        assert call is not None
        assert call.plan.graphs, call.plan.left_off
        held.append(torch.cuda.memory_allocated())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
    # A batch without padding needs a step without a mask.
    assert captures.count("_body") <= 2
    assert captures.count("_select_tokens") <= 2
    assert held[-1] <= 1.05 * max(held[:2])
    seats = held[-1]
    fastgen.release()
    assert torch.cuda.memory_allocated() < seats


@pytest.mark.parametrize("kind", ["offloaded", "static"])
@pytest.mark.parametrize("beams", [1, 3])
def test_caches(kind: str, beams: int) -> None:
    """Caches of transformers work; a call whose forward transformers compiles is not patched."""
    model = zoo.build("llama").to("cuda")
    kwargs = _on_device(zoo.batch(model, 4, 11)) | {
        "cache_implementation": kind,
        "num_beams": beams,
    }
    explanation = fastgen.explain(model, **kwargs, max_new_tokens=12)
    if (kind, beams) == ("static", 1):
        assert explanation.reason == "transformers compiles the forward"
        kwargs["disable_compile"] = True
    before, served = fallbacks(), hits()
    assert assert_same(model, kwargs | {"max_new_tokens": 12}).error is None
    assert (fallbacks(), hits()) == (before, served + 1)


def test_inputs_elsewhere() -> None:
    """Ids on the CPU for a model on the device: transformers moves them at each step."""
    model = zoo.build("llama").to("cuda")
    assert_same(model, dict(zoo.batch(model, 2, 7)) | {"num_beams": 2, "max_new_tokens": 8})


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("name", ["transformer", "bart"])
def test_fairseq_graphs(name: str, beams: int) -> None:
    """Steps and token selection are captured, while sentences leave the batch."""
    pytest.importorskip("fairseq")
    from tests.support import fairseq_zoo

    model = fairseq_zoo.build(name, torch.float32, 2).to("cuda")
    batch = fairseq_zoo.batch(24, 9)
    batch["net_input"] = _on_device(batch["net_input"])
    options = {"beam_size": beams, "max_len_b": 40, "no_repeat_ngram_size": 2}
    before = Counter(fastgen.status()["fairseq.generate"].left_off)
    try:
        fairseq_zoo.assert_same([model], batch, options, 1e-4)
    finally:
        model.to("cpu")  # later tests get the same model
    assert not Counter(fastgen.status()["fairseq.generate"].left_off) - before
