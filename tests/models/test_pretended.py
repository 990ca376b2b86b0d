"""Whole calls on a pretended device: what they choose, capture and launch, and their results.

The models for counting launches have realistic numbers of heads and layers, but small vocabularies,
and compute nothing. Views and allocations do not count as launches.
"""

import contextlib
import functools
import gc
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

import fastgen
from benchmarks import session, smoke
from fastgen.models.cuda_graphs import graph
from fastgen.models.cuda_graphs.replay import Replay, not_captured
from fastgen.patches.transformers.generate.report import last_call
from tests.support import zoo
from tests.support.pretended import Pretended

VIEWS = ("split", "split_with_sizes", "slice", "select", "unbind", "expand", "view", "unsqueeze")
METHODS = {
    "greedy": {},
    "beams": {"num_beams": 4, "no_repeat_ngram_size": 3},
    "sampling": {"do_sample": True},
}


def _on_device(inputs: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.to("cuda") if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["bart", "t5", "gpt2", "llama"])
def test_tokens(
    family: str, method: str, monkeypatch: pytest.MonkeyPatch, setting: Callable[[str, str], None]
) -> None:
    """Steps are captured, replayed and not captured again, with the same tokens as on the CPU."""
    setting("FASTGEN_OPS", "reference")
    model = zoo.build(family, torch.float32)
    inputs = zoo.batch(model, 3, 9) | METHODS[method] | {"max_new_tokens": 24, "min_new_tokens": 24}
    torch.manual_seed(3)
    with fastgen.disabled():
        expected = model.generate(**inputs)
    device = Pretended(monkeypatch)
    model.to("cuda")
    fastgen.release()
    captured = []
    for _ in range(2):
        torch.manual_seed(3)
        found = model.generate(**_on_device(inputs))
        assert found.is_cuda
        assert found.tolist() == expected.tolist()
        call = last_call()
        assert call is not None
        assert (call.plan.shared, call.plan.fused, call.plan.graphs) == (True, True, True), (
            call.plan.left_off
        )
        assert not [text for text in call.plan.left_off if text.startswith("token selection")]
        # The first capture in a memory pool is empty.
        captured.append(sum(counts.total() > 1 for counts in device.captures))
        device.captures.clear()
    assert captured == [2, 0], "a step and a selection, then nothing"
    fastgen.release()


@pytest.mark.parametrize("method", ["greedy", "beams"])
def test_half_precision(
    method: str, monkeypatch: pytest.MonkeyPatch, setting: Callable[[str, str], None]
) -> None:
    """Token selection reads fp16 logits as captured steps leave them, as it would read fp32."""
    setting("FASTGEN_OPS", "reference")
    model = zoo.build("bart", torch.float16)
    inputs = zoo.batch(model, 3, 9) | METHODS[method]
    inputs |= {"max_new_tokens": 20, "min_new_tokens": 20}
    Pretended(monkeypatch)
    model.to("cuda")
    model.generate(**_on_device(inputs))  # whose first step the modules make
    finished, dtypes = Replay.finished, set[torch.dtype]()

    def cast(replay: Replay, logits: Tensor, weights: Tensor | None) -> Any:
        dtypes.add(logits.dtype)
        logits, weights = finished(replay, logits, weights)
        return logits.float(), weights

    found = model.generate(**_on_device(inputs)).tolist()
    fastgen.release()
    monkeypatch.setattr(Replay, "finished", cast)
    assert model.generate(**_on_device(inputs)).tolist() == found
    assert dtypes == {torch.float16}
    fastgen.release()


@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_collected_during_a_capture(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Collecting another graph meanwhile would end the capture."""
    Pretended(monkeypatch)
    collected = list[bool]()

    def function() -> None:
        collected.append(gc.isenabled())
        if fails:
            raise RuntimeError("operation not permitted")

    device = torch.device("cuda", 0)
    pool = graph.CapturePool(device)
    with pytest.raises(graph.NotCaptured) if fails else contextlib.nullcontext():
        graph.capture(function, device, pool)
    assert collected == [False]
    assert gc.isenabled()


def test_no_garbage_is_collected_while_any_thread_captures() -> None:
    """Of two captures that overlap, the first to end does not enable collection again."""
    first, second = graph._without_collection(), graph._without_collection()
    with first:
        second.__enter__()
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_no_garbage_is_collected_while_a_pool_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    Pretended(monkeypatch)
    collected = list[bool]()
    begin = torch.cuda.CUDAGraph.capture_begin

    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        collected.append(gc.isenabled())
        begin(self, *args, **kwargs)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", capture_begin)
    graph.CapturePool(torch.device("cuda", 0))
    assert collected == [False]
    assert gc.isenabled()


@pytest.mark.parametrize("method", METHODS)
def test_a_pool_that_cannot_be_made(
    method: str, monkeypatch: pytest.MonkeyPatch, setting: Callable[[str, str], None]
) -> None:
    """The call runs without graphs and says why."""
    setting("FASTGEN_OPS", "reference")
    model = zoo.build("bart", torch.float32)
    inputs = zoo.batch(model, 3, 9) | METHODS[method] | {"max_new_tokens": 20, "min_new_tokens": 20}
    torch.manual_seed(3)
    with fastgen.disabled():
        expected = model.generate(**inputs)
    Pretended(monkeypatch)
    model.to("cuda")
    fastgen.release()

    def refuses(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", refuses)
    for _ in range(2):
        torch.manual_seed(3)
        assert model.generate(**_on_device(inputs)).tolist() == expected.tolist()
    call = last_call()
    assert call is not None
    assert not_captured("out of memory") in call.plan.left_off
    fastgen.release()


def test_offloaded_cache(
    monkeypatch: pytest.MonkeyPatch, setting: Callable[[str, str], None]
) -> None:
    """transformers' cache that moves layers to the CPU and back has the tokens of the CPU."""
    setting("FASTGEN_OPS", "reference")
    model = zoo.build("llama", torch.float32)
    inputs = zoo.batch(model, 2, 5) | {"max_new_tokens": 4}
    with fastgen.disabled():
        expected = model.generate(**inputs)
    Pretended(monkeypatch)
    inputs |= {"cache_implementation": "offloaded"}
    assert model.to("cuda").generate(**_on_device(inputs)).tolist() == expected.tolist()
    fastgen.release()


def test_kernels(monkeypatch: pytest.MonkeyPatch, setting: Callable[[str, str], None]) -> None:
    """Triton kernels run the call, with n-gram blocking."""
    setting("FASTGEN_OPS", "triton")
    model = zoo.build("bart", torch.float32)
    inputs = zoo.batch(model, 1, 4) | {
        "num_beams": 2,
        "no_repeat_ngram_size": 2,
        "max_new_tokens": 14,
    }
    with fastgen.disabled():
        expected = model.generate(**inputs)
    device = Pretended(monkeypatch)
    found = model.to("cuda").generate(**_on_device(inputs))
    assert found.tolist() == expected.tolist()
    kernels = {launch.kernel for launch in device.launches}
    assert {
        "_attention_kernel",
        "_norm_kernel",
        "_ngram_kernel",
        "_kbest_and_choose_kernel",
        "_move_rows_kernel",
    } <= kernels
    fastgen.release()


def test_smoke(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: Callable[[str, str], None]
) -> None:
    """The close look at one model, which `make gpu` takes first, runs all of its parts."""
    setting("FASTGEN_OPS", "reference")
    Pretended(monkeypatch)
    # A pretended device has no bandwidth, no driver and no kernels that a profiler sees.
    monkeypatch.setattr(smoke, "copy_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(smoke, "profiled", lambda call, device: session.profiled(call, "cpu"))
    monkeypatch.setattr(
        smoke, "subprocess", SimpleNamespace(run=lambda *_, **__: SimpleNamespace(stdout="none"))
    )
    arguments = ["--device", "cuda", "--scale", "tiny", "--out", str(tmp_path)]
    assert smoke.main(arguments) == 0
    found = json.loads((tmp_path / "smoke.json").read_text("utf-8"))["result"]
    assert set(found) == {
        "machine",
        *(f"{look}_batch{batch}" for look in ("call", "profile", "exact") for batch in (1, 3)),
    }
    assert found["machine"]["multiprocessors"] == 132
    for batch in (1, 3):
        call = found[f"call_batch{batch}"]
        assert call["plan"]["graphs"], call["plan"]
        assert len(call["seconds"]) == 3
        first, *later = call["captured"].split("|")
        assert first.split() == ["body", "select_tokens"]
        assert "".join(later).strip() == ""
        assert call["over_floor"] > 0
        assert found[f"exact_batch{batch}"]["equal"]
        assert (tmp_path / found[f"profile_batch{batch}"]["table"]).is_file()


def _bart(layers: int = 12) -> Any:
    return tf.BartForConditionalGeneration(
        tf.BartConfig(
            vocab_size=2000, encoder_layers=1, decoder_layers=layers, d_model=1024,
            encoder_ffn_dim=512, decoder_ffn_dim=512,
        )
    )  # fmt: skip


def _gpt2() -> Any:
    return tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=2000, bos_token_id=0, eos_token_id=1))


def _llama() -> Any:
    return tf.LlamaForCausalLM(
        tf.LlamaConfig(
            vocab_size=2000, num_hidden_layers=16, hidden_size=2048, num_attention_heads=32,
            num_key_value_heads=8, intermediate_size=1024,
        )
    )  # fmt: skip


@pytest.fixture
def counted(
    monkeypatch: pytest.MonkeyPatch, setting: Callable[[str, str], None]
) -> Callable[..., Pretended]:
    """Return a function that runs a bfloat16 call without computing, and returns the device."""
    setting("FASTGEN_OPS", "triton")

    def call(
        build: Callable[[], Any],
        batch: int = 1,
        tokens: int = 24,
        source: int = 100,
        **options: Any,
    ) -> Pretended:
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = build().eval()
        finally:
            torch.set_default_dtype(torch.float32)
        device = Pretended(monkeypatch, computes=False)
        model.to("cuda").generation_config.eos_token_id = 2
        ids = torch.full((batch, source), 5, dtype=torch.int64).to("cuda")
        options |= {
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": tokens,
            "pad_token_id": 1,
        }
        model.generate(input_ids=ids, **options)
        fastgen.release()
        return device

    return call


def _launches(device: Pretended) -> list[int]:
    """Return the number of launches in each capture: the decode step, then the token selection."""
    counts = [sum(n for name, n in each.items() if name not in VIEWS) for each in device.captures]
    return [count for count in counts if count > 1]


BEAMS = {"num_beams": 4}
NGRAMS = {"num_beams": 4, "no_repeat_ngram_size": 3}


@pytest.mark.parametrize(
    ("build", "options", "layers", "of_layer", "beside", "choice"),
    [
        (_bart, NGRAMS, 12, 12, 2, 4), (_gpt2, BEAMS, 12, 8, 2, 3),
        (_llama, BEAMS, 16, 12, 11, 3), (_llama, {}, 16, 12, 11, 6),
    ],
    ids=["bart", "gpt2", "llama", "llama-greedy"],
)  # fmt: skip
def test_launches(
    build: Callable[[], Any], options: dict[str, Any], layers: int, of_layer: int, beside: int,
    choice: int, counted: Callable[..., Pretended],
) -> None:  # fmt: skip
    """Launches stay within a bound per layer, for the rest of the step, and for the selection.

    The device has 132 multiprocessors.
    """
    step, chosen = _launches(counted(build, **options))
    assert step <= layers * of_layer + beside
    assert chosen <= choice


SHAPES = [
    (1, 24, 100),
    (1, 40, 33),
    (8, 24, 64),
    (32, 30, 7),
    (3, 24, 129),
    (16, 33, 250),
    (2, 64, 16),
    (5, 24, 77),
]
"""Shapes of a service's calls: sentences, new tokens, source tokens."""


def test_specialisations(counted: Callable[..., Pretended]) -> None:
    """Kernels compiled for the first call serve nearly all later ones, whatever their shapes."""
    known: set[Any] = set()
    new: list[int] = []
    for batch, tokens, source in SHAPES:
        found = {
            launch.specialisation
            for launch in counted(
                functools.partial(_bart, 2), batch, tokens, source, **NGRAMS
            ).launches
        }
        new.append(len(found - known))
        known |= found
    assert new[0] <= 19
    assert sum(new) <= 24
