"""Allocations of a `generate` call: KV buffers are reused, and decode steps allocate little."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from transformers import MaxLengthCriteria

import fastgen
from fastgen.decoding.kv_cache import room
from fastgen.models import state
from fastgen.models.memory import scratch
from fastgen.models.memory.scratch import ScratchPool
from tests.support import zoo
from tests.support.allocations import allocations
from tests.support.parity import assert_same

_BART: dict[str, Any] = {
    "vocab_size": 2_000, "d_model": 256, "max_position_embeddings": 512, "init_std": 0.1,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 1024,
    "decoder_ffn_dim": 1024,
}  # fmt: skip
_MODELS: dict[str, Callable[..., Any]] = {
    "bart": lambda: tf.BartForConditionalGeneration(tf.BartConfig(**zoo._ENCODER_DECODER | _BART)),
    "gpt2": lambda: tf.GPT2LMHeadModel(
        tf.GPT2Config(
            vocab_size=2_000, n_embd=256, n_layer=2, n_head=4, n_positions=512,
            pad_token_id=zoo.PAD, bos_token_id=1, eos_token_id=zoo.EOS,
        )
    ),
    "llama": lambda: tf.LlamaForCausalLM(
        tf.LlamaConfig(
            **zoo._DECODER
            | {"vocab_size": 2_000, "hidden_size": 256, "intermediate_size": 1024, "head_dim": 64}
            | {"max_position_embeddings": 512}
        )
    ),
}  # fmt: skip


def _build(family: str) -> Any:
    torch.manual_seed(0)
    return _MODELS[family]().eval()


def _warm(model: Any, kwargs: dict[str, Any]) -> None:
    """Run calls until weights are packed (third use) and steps are checked; drop the buffers."""
    for _ in range(3):
        model.generate(**kwargs | _length(6))
    state.release(scratch.ScratchPool)


def _length(count: int) -> dict[str, int]:
    return {"max_new_tokens": count, "min_new_tokens": count}


@pytest.fixture
def all_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never compact the KV cache, as the number of live slots depends on the generated text."""
    monkeypatch.setattr(room, "COMPACT_EVERY", 10**9)


@pytest.mark.usefixtures("all_slots")
@pytest.mark.parametrize("family", ["bart", "gpt2"])
def test_outgrown_keys_and_values_are_given_up(family: str) -> None:
    """A text of 150 tokens outgrows its KV buffers twice.

    If outgrown buffers were kept, the call would take more than twice as much memory.
    """
    model = _build(family)
    kwargs = zoo.batch(model, 4, 128) | {"num_beams": 4} | _length(150)
    _warm(model, kwargs)
    gc.collect()
    held = fastgen.explain(model, **kwargs).kv_bytes
    assert held is not None
    assert held < allocations(lambda: model.generate(**kwargs)).peak < 1.6 * held


def _buffers(model: Any, kwargs: dict[str, Any], least: int) -> int:
    """Return how many tensors of at least `least` bytes a call allocates."""
    return sum(size >= least for size in allocations(lambda: model.generate(**kwargs)).sizes)


@pytest.mark.usefixtures("all_slots")
@pytest.mark.parametrize("family", ["bart", "llama"])
def test_a_second_call_allocates_no_keys_and_values(family: str) -> None:
    """The second call immediately finds buffers of the size that the first one needed."""
    model = _build(family)
    kwargs = zoo.batch(model, 4, 8) | {"num_beams": 4} | _length(80)
    _warm(model, kwargs)
    least = fastgen.explain(model, **kwargs).kv_bytes // 8  # of the smaller key buffer of a layer
    assert _buffers(model, kwargs, least) == 2 * 2 * 2, (
        "room for 64 steps, then for 79, of keys and values of 2 layers"
    )
    assert _buffers(model, kwargs, least) == 0
    assert _buffers(model, kwargs | _length(70), least) == 0


def test_free_memory_gives_more_room_but_is_no_reason_for_more() -> None:
    held, like = ScratchPool(), torch.empty(0)
    assert held.capacity(like, 10, 5, 50) == 5
    one, other = held.take(like, 30, 10), held.take(like, 30, 10)
    assert held.capacity(like, 10, 5, 50) == 5, "somebody has it"
    del one
    assert held.capacity(like, 10, 5, 50) == 5, "keys would have it, and values nothing"
    del other
    assert held.capacity(like, 10, 5, 50) == 30
    assert held.capacity(like, 10, 5, 20) == 20
    assert held.capacity(like, 10, 5, 8) == 5, "far too much"
    assert held.capacity(like, 10, 31, 50) == 31
    for tensor in (held.take(like, 30, 10), held.take(like, 30, 10)):
        held.forget(tensor)
    assert held.free == 0


STEADY = {
    ("bart", 1): 57 + 12,
    ("bart", 4): 59 + 97,
    ("llama", 1): 100 + 12,
    ("llama", 4): 100 + 97,
}
"""Allocations of a steady decode step of two layers plus its token selection; all are small."""


@pytest.mark.parametrize(("family", "beams"), STEADY)
def test_a_steady_step(family: str, beams: int) -> None:
    model = _build(family)
    kwargs = zoo.batch(model, 4, 64) | {"num_beams": beams}
    _warm(model, kwargs)
    model.generate(**kwargs | _length(20))
    short, long = (
        allocations(lambda n=n: model.generate(**kwargs | _length(n))).sizes for n in (10, 20)
    )
    assert len(long) - len(short) <= 10 * STEADY[family, beams]
    logits = 4 * beams * 2_000 * 4
    assert sum(size > logits for size in long) == sum(size > logits for size in short), (
        "only before the steps"
    )


def test_a_text_longer_than_the_config_says() -> None:
    """The user's stopping criterion replaces the config's length."""
    model = zoo.build("gpt2")
    inputs = zoo.batch(model, 2, 5)
    for _ in range(3):  # the second call finds the first call's memory
        kwargs = inputs | {
            "max_new_tokens": 6, "eos_token_id": None, "num_beams": 1,
            "stopping_criteria": [MaxLengthCriteria(max_length=90)],
        }  # fmt: skip
        found = assert_same(model, kwargs)
        assert found.error is None
        assert found.value.shape[1] == 90
