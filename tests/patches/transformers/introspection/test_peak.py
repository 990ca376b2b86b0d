"""The most memory that a call takes is what `fastgen.explain` predicts; and steps take little besides."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from transformers import LogitsProcessor, LogitsProcessorList, MaxLengthCriteria

import fastgen
from fastgen.decoding.kv_cache import room
from fastgen.decoding.kv_cache.ancestry import Ancestry
from fastgen.models.memory import scratch
from fastgen.models.memory.footprint import Footprint
from fastgen.models.memory.scratch import Memory
from fastgen.ops import native
from fastgen.ops.counts import calls
from tests.support import zoo
from tests.support.allocations import allocations
from tests.support.parity import assert_same

_SIZE: dict[str, Any] = {"vocab_size": 2_000, "d_model": 256}
_LAYERS: dict[str, Any] = {
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 1024, "decoder_ffn_dim": 1024,
    "max_position_embeddings": 512, "init_std": 0.1,
}  # fmt: skip
_MODELS: dict[str, Callable[..., Any]] = {
    "bart": lambda **more: tf.BartForConditionalGeneration(
        tf.BartConfig(**zoo._ENCODER_DECODER | _SIZE | _LAYERS | more)
    ),
    "marian": lambda **more: tf.MarianMTModel(tf.MarianConfig(**zoo._ENCODER_DECODER | _SIZE | _LAYERS | more)),
    "t5": lambda **more: tf.T5ForConditionalGeneration(
        tf.T5Config(**zoo._T5 | _SIZE | {"d_kv": 64, "d_ff": 1024, "num_heads": 4} | more)
    ),
    "gpt2": lambda: tf.GPT2LMHeadModel(
        tf.GPT2Config(
            vocab_size=2_000, n_embd=256, n_layer=2, n_head=4, n_positions=512, pad_token_id=zoo.PAD, bos_token_id=1,
            eos_token_id=zoo.EOS,
        )
    ),
    "llama": lambda **more: tf.LlamaForCausalLM(
        tf.LlamaConfig(
            **zoo._DECODER
            | {"vocab_size": 2_000, "hidden_size": 256, "intermediate_size": 1024, "head_dim": 64}
            | {"max_position_embeddings": 512}
            | more
        )
    ),
}  # fmt: skip


def _build(family: str, **more: Any) -> Any:
    torch.manual_seed(0)
    return _MODELS[family](**more).eval()


def _warm(model: Any, kwargs: dict[str, Any]) -> None:
    """Have weights packed, as they are at their third use, and steps proven; leave no memory that is kept."""
    for _ in range(3):
        model.generate(**kwargs | _length(6))
    scratch.release()


def _peak(model: Any, kwargs: dict[str, Any]) -> int:
    """What a call takes at most."""
    _warm(model, kwargs)
    gc.collect()
    return allocations(lambda: model.generate(**kwargs)).peak


def _length(count: int) -> dict[str, int]:
    return {"max_new_tokens": count, "min_new_tokens": count}


_CALLS: dict[str, dict[str, Any]] = {
    "greedy search": _length(20),
    "beam search": _length(20) | {"num_beams": 4},
    "beam search, n-grams": _length(20) | {"num_beams": 4, "no_repeat_ngram_size": 3},
}


@pytest.fixture
def all_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is given up: how many are, the text decides."""
    monkeypatch.setattr(room, "COMPACT_EVERY", 10**9)


def _assert_predicted(model: Any, kwargs: dict[str, Any]) -> int:
    taken, explanation = _peak(model, kwargs), fastgen.explain(model, **kwargs)
    assert explanation.peak_bytes == pytest.approx(taken, rel=0.05), explanation
    assert explanation.least_peak_bytes == pytest.approx(taken, rel=0.05), explanation
    return taken


@pytest.mark.usefixtures("all_slots")
@pytest.mark.parametrize("call", _CALLS)
@pytest.mark.parametrize("family", _MODELS)
def test_a_call_takes_what_is_predicted(family: str, call: str) -> None:
    model = _build(family)
    _assert_predicted(model, zoo.batch(model, 4, 128) | _CALLS[call])


@pytest.mark.usefixtures("all_slots")
@pytest.mark.parametrize("family", ["bart", "gpt2"])
def test_a_text_that_outgrows_its_first_room(family: str) -> None:
    model = _build(family)
    kwargs = zoo.batch(model, 4, 32) | {"num_beams": 4, "no_repeat_ngram_size": 3}
    short, long = (_assert_predicted(model, kwargs | _length(count)) for count in (8, 70))
    assert long > 1.05 * short, "keys and values make no difference"


@pytest.mark.parametrize("family", ["bart", "llama"])
def test_a_large_vocabulary(family: str) -> None:
    """The choice of tokens takes more than the layers do."""
    model = _build(family, vocab_size=30_000)
    for call in ("greedy search", "beam search"):
        _assert_predicted(model, zoo.batch(model, 4, 8) | _CALLS[call] | _length(6))


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("family", ["bart", "t5", "llama"])
def test_steps_by_the_models_own_modules(family: str, beams: int, setting: Callable[[str, str], None]) -> None:
    setting("FASTGEN_STEP", "module")
    model = _build(family, vocab_size=12_000)
    _assert_predicted(model, zoo.batch(model, 4, 16) | _length(6) | {"num_beams": beams})


@pytest.mark.parametrize(
    ("family", "sentences", "length", "more"),
    [
        ("t5", 1, 16, {}),
        ("t5", 1, 300, {"num_beams": 4}),
        ("bart", 2, 400, {"num_beams": 4, "no_repeat_ngram_size": 3}),
        ("marian", 4, 64, {"do_sample": True}),
    ],
)
def test_an_encoder_in_c(family: str, sentences: int, length: int, more: dict[str, Any]) -> None:
    """It takes less than its operations one by one, and decides what the call takes; it is not proven anew."""
    if native.library() is None:
        pytest.skip("no library in C")
    model = _build(family)
    kwargs = zoo.batch(model, sentences, length) | _length(12) | more
    calls.clear()
    _assert_predicted(model, kwargs)
    assert calls["encoder", "native"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("family", "more"), [("gpt2", {}), ("t5", {"repetition_penalty": 1.3})])
def test_slots_that_are_given_up(family: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """How many are depends on the text, so that there are two predictions: what a call takes lies between them."""
    model = _build(family)
    kwargs = zoo.batch(model, 3, 40) | {"num_beams": 8} | _length(70) | more
    taken, explanation = _peak(model, kwargs), fastgen.explain(model, **kwargs)
    least, most = explanation.least_peak_bytes, explanation.peak_bytes
    assert least is not None
    assert most is not None
    assert least < most / 1.1
    assert least / 1.05 < taken < most * 1.05
    assert "where beams share most tokens, at most" in str(explanation)
    monkeypatch.setattr(room, "COMPACT_EVERY", 10**9)
    assert _peak(model, kwargs) == pytest.approx(most, rel=0.05)


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_beams_that_share_all_their_tokens(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All the slots that may ever be given up are."""
    model = _build(family)
    kwargs = zoo.batch(model, 2, 40) | {"num_beams": 4} | _length(100)
    seen = Ancestry.sweep

    def sweep(ancestry: Ancestry) -> torch.Tensor | None:
        if ancestry.is_due:
            ancestry.visible[:] = ancestry.visible[:, :1].clone()
        return seen(ancestry)

    with monkeypatch.context() as patch:
        patch.setattr(Ancestry, "sweep", sweep)
        taken = _peak(model, kwargs)
    explanation = fastgen.explain(model, **kwargs)
    assert explanation.least_peak_bytes == pytest.approx(taken, rel=0.05), explanation


@pytest.mark.parametrize("mode", ["plain", "off"])
def test_linear_layers_of_other_kinds(mode: str, setting: Callable[[str, str], None]) -> None:
    setting("FASTGEN_LINEAR", mode)
    model = _build("gpt2")
    _assert_predicted(model, zoo.batch(model, 4, 128) | _CALLS["beam search"])


def test_outputs_in_memory_that_is_used_again() -> None:
    """Large outputs of layers lie in the model's memory, which hands out more than it is asked for."""
    model = _build("bart", encoder_ffn_dim=4_096)
    _assert_predicted(model, zoo.batch(model, 16, 128) | {"num_beams": 2} | _length(3))


def test_sampling() -> None:
    model = _build("bart")
    kwargs = zoo.batch(model, 4, 128) | _length(6) | {"do_sample": True}
    for more in ({}, {"num_return_sequences": 3, "top_p": 0.9, "top_k": 0}, {"num_beams": 3}):
        _assert_predicted(model, kwargs | more)


class _Own(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise AssertionError("ran")


def test_what_is_not_predicted_and_why() -> None:
    model = zoo.build("bart", torch.float32)
    kwargs = zoo.batch(model, 2, 6) | _length(4)
    for more, why in (
        ({"use_cache": False}, "the cache is transformers' own"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate=True"),
        ({"logits_processor": LogitsProcessorList([_Own()])}, "_Own may take any"),
    ):
        explanation = fastgen.explain(model, **kwargs, **more)
        assert explanation.peak_bytes is explanation.least_peak_bytes is None
        assert f"peak memory is not predicted: {why}" in explanation.notes
        assert "peak memory  " not in str(explanation)
    with torch.autocast("cpu", torch.bfloat16):
        assert fastgen.explain(model, **kwargs).peak_bytes is None
    model.model.encoder.register_forward_hook(lambda *_: pytest.fail("ran"))
    assert "peak memory is not predicted: BartEncoder may take any" in fastgen.explain(model, **kwargs).notes


def test_nothing_is_left_behind() -> None:
    """Neither the model, nor what is kept between calls, knows of what was not computed."""
    model = _build("bart")
    kwargs = zoo.batch(model, 2, 16) | _CALLS["beam search"]
    expected = model.generate(**kwargs)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    held = scratch.memory_of(model).free
    assert fastgen.explain(model, **kwargs).peak_bytes
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert scratch.memory_of(model).free == held
    assert torch.equal(model.generate(**kwargs), expected)


def test_a_footprint() -> None:
    kept = torch.ones(8, 8)
    with Footprint() as footprint:
        x = kept + 1  # 256 bytes, as each of the following
        y = x.t()
        for _ in range(3):
            y = torch.mm(y, x)
        assert (footprint.now, footprint.peak) == (512, 768)
        del x, y
        assert footprint.now == 0
        index = torch.arange(4)
        assert index.tolist() == [0, 1, 2, 3], "integers are computed"
        assert bool(kept.sum() > 10**9), "what has no value is the most that it can be"
        taken = Memory(planned=True).take(kept, 100)
        assert footprint.now == 32 + 400 <= taken.untyped_storage().nbytes() + 32
    assert torch.equal(kept, torch.ones(8, 8))


def _buffers(model: Any, kwargs: dict[str, Any], least: int) -> int:
    """How many tensors of so many bytes at least a call allocates."""
    return sum(size >= least for size in allocations(lambda: model.generate(**kwargs)).sizes)


@pytest.mark.usefixtures("all_slots")
@pytest.mark.parametrize("family", ["bart", "llama"])
def test_a_second_call_allocates_no_keys_and_values(family: str) -> None:
    """It finds the room that the first has come to need, at once, and nothing moves."""
    model = _build(family)
    kwargs = zoo.batch(model, 4, 8) | {"num_beams": 4} | _length(80)
    _warm(model, kwargs)
    least = fastgen.explain(model, **kwargs).kv_bytes // 8  # of the smaller room of a layer's keys
    assert _buffers(model, kwargs, least) == 2 * 2 * 2, "room for 64 steps, then for 79, of keys and values of 2 layers"
    assert _buffers(model, kwargs, least) == 0
    assert _buffers(model, kwargs | _length(70), least) == 0


def test_free_memory_gives_more_room_but_is_no_reason_for_more() -> None:
    held, like = Memory(), torch.empty(0)
    assert held.room(like, 10, 5, 50) == 5
    one, other = held.take(like, 30, 10), held.take(like, 30, 10)
    assert held.room(like, 10, 5, 50) == 5, "somebody has it"
    del one
    assert held.room(like, 10, 5, 50) == 5, "keys would have it, and values nothing"
    del other
    assert held.room(like, 10, 5, 50) == 30
    assert held.room(like, 10, 5, 20) == 20
    assert held.room(like, 10, 5, 8) == 5, "far too much"
    assert held.room(like, 10, 31, 50) == 31
    for tensor in (held.take(like, 30, 10), held.take(like, 30, 10)):
        held.forget(tensor)
    assert held.free == 0


STEADY = {("bart", 1): 57 + 12, ("bart", 4): 59 + 97, ("llama", 1): 100 + 12, ("llama", 4): 100 + 97}
"""Allocations of a steady step of two layers and of the choice of its tokens, all of them small."""


@pytest.mark.parametrize(("family", "beams"), STEADY)
def test_a_steady_step(family: str, beams: int) -> None:
    model = _build(family)
    kwargs = zoo.batch(model, 4, 64) | {"num_beams": beams}
    _warm(model, kwargs)
    model.generate(**kwargs | _length(20))
    short, long = (allocations(lambda n=n: model.generate(**kwargs | _length(n))).sizes for n in (10, 20))
    assert len(long) - len(short) <= 10 * STEADY[family, beams]
    logits = 4 * beams * 2_000 * 4
    assert sum(size > logits for size in long) == sum(size > logits for size in short), "only before the steps"


def test_a_text_longer_than_the_config_says() -> None:
    """A stopping criterion of the user's stands in the place of the config's length."""
    model = zoo.build("gpt2")
    inputs = zoo.batch(model, 2, 5)
    for _ in range(3):  # the second call finds the first one's memory
        kwargs = inputs | {
            "max_new_tokens": 6, "eos_token_id": None, "num_beams": 1,
            "stopping_criteria": [MaxLengthCriteria(max_length=90)],
        }  # fmt: skip
        found = assert_same(model, kwargs)
        assert found.error is None
        assert found.value.shape[1] == 90
