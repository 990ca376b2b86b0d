"""Check that `fastgen.explain` predicts what a call runs and uses, without side effects."""

import copy
import json
import os
import re
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers as tf
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

import fastgen
from fastgen import config
from fastgen.decoding.kv_cache import room
from fastgen.models.build import patched_torch
from fastgen.ops import native
from fastgen.patches.transformers.compat import CACHE
from fastgen.patches.transformers.generate.report import last_call
from tests.support import zoo
from tests.support.parity import counts, fallbacks, left_off
from tests.support.processes import python

ROOT = Path(__file__).parents[4]

CALLS: dict[str, dict[str, Any]] = {
    "greedy search": {},
    "beam search": {"num_beams": 4},
    "sampling": {"do_sample": True, "num_return_sequences": 3},
    "beam sampling": {"do_sample": True, "num_beams": 3},
}


def _explain(model: Any, kwargs: dict[str, Any]) -> Any:
    """Explain a call; assert that no forward ran, nothing was counted and nothing was changed."""
    ran: list[Any] = []
    call = torch.nn.Module.__call__

    def noted(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        ran.append(type(module).__name__)
        return call(module, *args, **kwargs)

    before = counts(), torch.get_rng_state(), last_call(), set(vars(model)), len(kwargs)
    given = copy.deepcopy(
        {name: value for name, value in kwargs.items() if isinstance(value, torch.Tensor)}
    )
    # The explanation would list a hook, and this patched `__call__` if `_PLACES` kept it.
    with (
        patch.object(torch.nn.Module, "__call__", noted),
        patch.object(patched_torch, "_PLACES", []),
    ):
        explanation = fastgen.explain(model, **kwargs)
    assert ran == [], "a forward ran"
    after = counts(), torch.get_rng_state(), last_call(), set(vars(model)), len(kwargs)
    assert all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(before, after, strict=True)
    )
    assert all(torch.equal(kwargs[name], value) for name, value in given.items())
    return explanation


def _bytes(cache: Any) -> int:
    parts = (
        [cache.self_attention_cache, cache.cross_attention_cache]
        if hasattr(cache, "layers") is False
        else [cache]
    )
    held = (kv for part in parts for layer in part.layers for kv in (layer.keys, layer.values))
    return sum(kv.nbytes for kv in held if kv is not None)


@pytest.mark.parametrize("family", zoo.FAMILIES)
@pytest.mark.parametrize("method", CALLS)
def test_the_memory_is_what_the_call_then_takes(
    family: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No KV slots are freed here, as that would depend on the text."""
    monkeypatch.setattr(room, "COMPACT_EVERY", 1_000)
    model = zoo.build(family, torch.float32)
    kwargs = (
        zoo.batch(model, 4, 11, "none")
        | CALLS[method]
        | {"max_new_tokens": 20, "min_new_tokens": 20}
    )
    explanation = _explain(model, kwargs)
    model.generate(**kwargs)
    call = last_call()
    assert call is not None
    assert explanation.plan == call.plan
    assert explanation.plan.method == method
    assert explanation.reason is None
    assert explanation.kv_bytes == call.kv_bytes
    with fastgen.disabled():
        stock = model.generate(**kwargs, return_dict_in_generate=True)[CACHE]
    assert explanation.stock_kv_bytes == _bytes(stock)
    monkeypatch.setattr(room, "COMPACT_EVERY", 2)
    model.generate(**kwargs)
    call = last_call()
    assert call is not None
    assert call.kv_bytes <= explanation.kv_bytes


def test_inputs_of_other_kinds() -> None:
    kwargs: dict[str, Any]
    for family in ("llama", "bart"):
        model = zoo.build(family)
        inputs = zoo.batch(model, 3, 7)
        embeds = model.get_input_embeddings()(inputs.pop("input_ids")).detach()
        kwargs = inputs | {
            "inputs_embeds": embeds,
            "num_beams": 2,
            "max_new_tokens": 9,
            "min_new_tokens": 9,
        }
        _matches(model, kwargs)
    model = zoo.build("bart")
    inputs = zoo.batch(model, 3, 7)
    options = {"num_beams": 2, "max_new_tokens": 9, "min_new_tokens": 9}
    _matches(model, inputs | options | {"decoder_input_ids": torch.tensor([[zoo.START, 5, 6]] * 3)})
    _matches(model, {"inputs": inputs["input_ids"]} | options)
    with torch.no_grad():
        encoded = model.get_encoder()(**inputs)
    shape = encoded.last_hidden_state.shape
    _matches(model, {"encoder_outputs": encoded} | options)
    assert encoded.last_hidden_state.shape == shape, "explain expanded the user's own"
    model = zoo.build("gpt2")
    _matches(model, {"max_length": 12, "min_length": 12})


def _matches(model: Any, kwargs: dict[str, Any]) -> None:
    explanation = _explain(model, kwargs)
    model.generate(**{name: copy.copy(value) for name, value in kwargs.items()})
    call = last_call()
    assert call is not None
    assert (explanation.plan, explanation.kv_bytes) == (call.plan, call.kv_bytes)


def test_autocast() -> None:
    for family in ("bart", "gpt2"):
        model = zoo.build(family, torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            _matches(
                model,
                zoo.batch(model, 2, 7) | {"num_beams": 2, "max_new_tokens": 9, "min_new_tokens": 9},
            )


class _Own(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise AssertionError("ran")


class _Deaf(BaseStreamer):
    def put(self, value: torch.Tensor) -> None:
        raise AssertionError("heard")

    def end(self) -> None:
        raise AssertionError("heard")


DECLINED: dict[str, dict[str, Any]] = {
    "synced_gpus=True": {"synced_gpus": True},
    "low_memory=True": {"low_memory": True, "num_beams": 2},
}


@pytest.mark.parametrize("family", ["bart", "gpt2"])
@pytest.mark.parametrize("reason", DECLINED)
def test_the_reason_is_the_one_that_the_call_is_counted_with(family: str, reason: str) -> None:
    model = zoo.build(family)
    model.set_attn_implementation("eager")
    kwargs = zoo.batch(model, 2, 6) | DECLINED[reason] | {"max_new_tokens": 4}
    explanation = _explain(model, kwargs)
    assert (explanation.plan, explanation.reason) == (None, reason)
    assert (explanation.kv_bytes, explanation.stock_kv_bytes) == (None, None)
    if kwargs.pop("synced_gpus", None) is None:  # would need several processes
        before = fallbacks().get(reason, 0)
        with suppress(ValueError):  # transformers itself refuses low_memory
            model.generate(**kwargs)
        assert fallbacks()[reason] == before + 1


UNSHARED: dict[str, dict[str, Any]] = {
    "use_cache=False": {"use_cache": False},
    "the cache is a StaticCache whose whole room is in attentions": {
        "cache_implementation": "static",
        "return_dict_in_generate": True,
        "output_attentions": True,
    },
    "output_attentions=True": {
        "num_beams": 2,
        "return_dict_in_generate": True,
        "output_attentions": True,
    },
    "the text may outgrow the sliding window": {},
}


@pytest.mark.parametrize("family", ["bart", "mistral"])
@pytest.mark.parametrize("reason", UNSHARED)
def test_what_is_not_shared(family: str, reason: str) -> None:
    """The call runs in transformers' own cache or none; reason, plan and memory match."""
    if (family, reason) == ("bart", "the text may outgrow the sliding window"):
        pytest.skip("of a decoder")
    model = zoo.build(family, torch.float32)
    model.set_attn_implementation("eager")
    kwargs = (
        zoo.batch(model, 2, 6, "none")
        | {"max_new_tokens": 9, "min_new_tokens": 9}
        | UNSHARED[reason]
    )
    explanation = _explain(model, kwargs)
    what = f"keys and values are not shared: {reason}"
    assert explanation.notes[0] == what
    assert what in str(explanation)
    assert not explanation.plan.shared
    before = fallbacks(), left_off().get(what, 0)
    _matches(model, kwargs)
    assert (fallbacks(), left_off()[what]) == (before[0], before[1] + 1)
    assert what in str(fastgen.status())
    call = last_call()
    assert call is not None
    assert (explanation.stock_kv_bytes, call.stock_kv_bytes) == (call.kv_bytes, call.kv_bytes)


def test_a_window_that_the_text_fits_into() -> None:
    model = zoo.build("mistral")  # its window is 8
    inputs = zoo.batch(model, 2, 4)
    assert _explain(model, inputs | {"max_new_tokens": 4}).plan.shared
    assert not _explain(model, inputs | {"max_new_tokens": 5}).plan.shared
    assert _explain(model, inputs | {"max_new_tokens": 5, "num_beams": 2}).plan.shared


def test_what_never_comes_to_a_patched_loop() -> None:
    model = zoo.build("gpt2")
    kwargs = zoo.batch(model, 1, 6, "none") | {"max_new_tokens": 4}
    reason = lambda **more: _explain(model, kwargs | more).reason  # noqa: E731
    assert reason(assistant_model=zoo.build("gpt2", seed=1)) == "_assisted_decoding is not patched"
    assert reason(prompt_lookup_num_tokens=2) == "_assisted_decoding is not patched"  # in fp64
    assert reason(custom_generate=lambda *_, **__: None) == "custom_generate is given"
    assert reason(custom_generate="somebody/something") == "custom_generate is given"
    assert "dola" in reason(dola_layers="high", trust_remote_code=True)
    assert reason(cache_implementation="paged") == "cache_implementation='paged'"
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(kwargs["input_ids"][:, :3], **{CACHE: cache})
    # Pass the whole text, or only what the cache does not hold.
    for ids in (
        kwargs["input_ids"],
        kwargs["input_ids"][:, 3:],
    ):
        explanation = _explain(model, {**kwargs, "input_ids": ids, CACHE: cache})
        assert explanation.plan.shared
    assert not hasattr(cache, "_is_user_defined") or not cache._is_user_defined
    with pytest.raises(ValueError, match="trust_remote_code"):
        fastgen.explain(model, **kwargs, dola_layers="high")


def test_families_with_other_state() -> None:
    shape: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "intermediate_size": 16,
    }
    model = tf.MambaForCausalLM(tf.MambaConfig(**shape, state_size=4))
    explanation = _explain(
        model, {"input_ids": torch.ones(1, 3, dtype=torch.int64), "num_beams": 2}
    )
    assert explanation.reason == "MambaForCausalLM keeps other state than keys and values"


def test_a_generate_of_its_own() -> None:
    class Own(tf.GPT2LMHeadModel):
        def generate(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("ran")

    model = Own(zoo.build("gpt2").config)
    assert _explain(model, {"max_new_tokens": 4}).reason == "Own has a generate of its own"


def test_what_is_left_off_is_said() -> None:
    model = zoo.build("gpt2")
    kwargs = zoo.batch(model, 3, 6) | {"max_new_tokens": 4}
    assert _explain(model, kwargs).plan.drop
    for more, why in (
        ({"streamer": _Deaf()}, "a streamer is set"),
        ({"logits_processor": LogitsProcessorList([_Own()])}, "_Own may look at the whole batch"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate=True"),
    ):
        explanation = _explain(model, kwargs | more)
        assert explanation.plan is not None
        assert explanation.notes[0] == f"finished sentences stay in the batch: {why}"
        assert why in str(explanation)


def test_wrong_arguments_raise_what_generate_raises() -> None:
    model = zoo.build("bart")
    inputs = zoo.batch(model, 2, 5)
    for bad in (
        {"beams": 3},
        {"num_beams": 2, "num_return_sequences": 3},
        {"max_length": 1},
        {"num_beams": 0},
    ):
        errors: list[type[Exception]] = []
        for run in (fastgen.explain, type(model).generate):
            try:
                run(model, **inputs, **bad)
            except Exception as error:
                errors.append(type(error))
        assert len(errors) == 2, bad
        assert errors[0] is errors[1], bad
    with pytest.raises(TypeError, match="Linear has no generate"):
        fastgen.explain(torch.nn.Linear(2, 2))


def test_patches_that_are_not_in_place() -> None:
    model = zoo.build("gpt2")
    kwargs = zoo.batch(model, 2, 6) | {"max_new_tokens": 4}
    with fastgen.disabled():
        assert _explain(model, kwargs).reason == "inside fastgen.disabled()"
    fastgen.disable()
    try:
        explanation = _explain(model, kwargs)
    finally:
        fastgen.enable()
    assert explanation.reason == "transformers.sample is off: disabled"
    assert explanation.linears.reason == "transformers.generate is off: disabled"


def test_without_the_attention_patch() -> None:
    """Several rows cannot share a cache then; the call reports it at once, as `explain` does."""
    code = """
        import fastgen
        from tests.support import zoo
        from tests.support.parity import notes
        model = zoo.build("bart")
        kwargs = zoo.batch(model, 2, 6) | {"max_new_tokens": 4}
        assert fastgen.explain(model, **kwargs).plan.shared
        explanation = fastgen.explain(model, **kwargs, num_beams=2)
        assert notes(explanation) == ["keys and values are not shared: transformers.attention is not in place"]
        model.generate(**kwargs, num_beams=2)
        row = fastgen.status()["transformers.beam_search"]
        assert (row.hits, row.fallbacks, row.left_off) == (1, {}, {notes(explanation)[0]: 1}), row
    """  # noqa: E501
    done = python(
        ["-c", textwrap.dedent(code)],
        environment=os.environ | {"FASTGEN_SKIP": "transformers.attention"},
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def linear_mode(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def choose(mode: str) -> None:
        monkeypatch.setenv("FASTGEN_LINEAR", mode)
        config.reload()

    yield choose
    monkeypatch.undo()
    config.reload()


@pytest.mark.skipif(native.library() is None, reason="there are no operations in C here")
def test_linear_layers(linear_mode: Any, request: pytest.FixtureRequest) -> None:
    model = tf.GPT2LMHeadModel(
        tf.GPT2Config(
            vocab_size=512, n_embd=256, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2
        )
    ).eval()
    from fastgen.models.layers import packed_weights
    from fastgen.models.routing import routes

    kwargs = zoo.batch(model, 4, 6, "none") | {
        "max_new_tokens": 4,
        "num_beams": 2,
        "pad_token_id": 0,
    }
    packed_weights.release()
    linear_mode("packed")
    explained = _explain(model, kwargs).linears
    assert explained.packed
    assert explained.reason is None
    with routes.routed(model) as routed:
        assert explained.routed == routed
        assert fastgen.explain(model, **kwargs).linears == explained, "while another call runs"
    model.generate(**kwargs)
    assert 0 < packed_weights.packed_bytes() <= explained.packed_bytes * 1.1 + 4096, (
        "a packed layout may pad a little"
    )
    assert " in C, packed copies of" in str(explained)
    for mode in ("plain", "off"):
        linear_mode(mode)
        assert _explain(model, kwargs).linears.reason == f"FASTGEN_LINEAR={mode}"
    linear_mode("packed")
    request.getfixturevalue("by_torch_alone")
    assert not _explain(model, kwargs).linears.packed
    packed_weights.release()
    linear_mode("auto")
    assert _explain(zoo.build("gpt2"), kwargs).linears.reason == "weights are float64, not float32"


def test_it_reads_and_is_plain_data() -> None:
    model = zoo.build("bart", torch.float32)
    explanation = _explain(model, zoo.batch(model, 4, 11) | {"num_beams": 4, "max_new_tokens": 20})
    text = str(explanation)
    assert text.splitlines()[0] == "BartForConditionalGeneration.generate"
    assert "fastgen's beam search, 4 sentences x 4 rows" in text
    assert "KiB" in text
    assert json.loads(json.dumps(explanation.to_dict()))["plan"]["beams"] == 4


def test_images() -> None:
    """The call runs as explained, with equal output."""
    model = zoo.seeing()
    kwargs: dict[str, Any] = {
        "input_ids": torch.tensor([[1, 5, 95, 95, 95, 95, 7, 8]]),
        "pixel_values": torch.randn(1, 3, 8, 8), "max_new_tokens": 4, "min_new_tokens": 4,
    }  # fmt: skip
    for beams in (1, 2):
        explanation = _explain(model, kwargs | {"num_beams": beams})
        before = fallbacks().get(str(explanation.reason), 0)
        ours = model.generate(**kwargs, num_beams=beams)
        if explanation.plan is None:
            assert fallbacks()[explanation.reason] == before + 1
        else:
            call = last_call()
            assert call is not None
            assert (explanation.plan, explanation.kv_bytes) == (call.plan, call.kv_bytes)
        with fastgen.disabled():
            assert torch.equal(ours, model.generate(**kwargs, num_beams=beams))


@pytest.mark.parametrize("options", [{}, {"use_cache": False}], ids=["cache", "no cache"])
def test_images_do_not_leave(options: dict[str, Any]) -> None:
    """Sentences with several images end at different times; image inputs stay uncut."""
    model, image = zoo.seeing(), [95] * 4
    short, long = [1, 5, *image, 7, 8, 9, 10], [1, *image, *image, 6]
    kwargs: dict[str, Any] = {
        "input_ids": torch.tensor([short, long, long]), "pixel_values": torch.randn(5, 3, 8, 8),
        "max_new_tokens": 12, "eos_token_id": list(range(2, 30)),
        "attention_mask": torch.ones(3, 10, dtype=torch.int64), "suppress_tokens": image[:1],
        # the model would look for its image
    }  # fmt: skip
    explanation = _explain(model, kwargs | options)
    ours = model.generate(**kwargs, **options)
    call = last_call()
    assert call is not None
    assert explanation.plan == call.plan
    with fastgen.disabled():
        assert torch.equal(ours, model.generate(**kwargs, **options))


def test_wrapped_models() -> None:
    peft = pytest.importorskip("peft")
    model = zoo.build("gpt2")
    kwargs = zoo.batch(model, 2, 6) | {"max_new_tokens": 9, "min_new_tokens": 9, "num_beams": 3}
    plain = _explain(model, kwargs)
    lora = peft.get_peft_model(
        model,
        peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], fan_in_fan_out=True),
    ).eval()
    explanation = _explain(lora, kwargs)
    assert explanation.plan == plain.plan
    assert explanation.kv_bytes == plain.kv_bytes
    _matches(lora, kwargs)
    prompt = peft.get_peft_model(
        zoo.build("gpt2"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )
    assert "prompt learning" in fastgen.explain(prompt, **kwargs).reason


def test_the_documentation_lists_every_reason() -> None:
    pages = ((ROOT / "docs" / name).read_text("utf-8") for name in ("reasons.md", "switches.md"))
    listed, switches = (" ".join(page.split()) for page in pages)  # joins wrapped lines
    folder = ROOT / "fastgen" / "patches" / "transformers"
    planning = "".join(file.read_text("utf-8") for file in (folder / "planning").glob("*.py"))
    parity = (folder / "introspection" / "parity.py").read_text("utf-8")
    parity = parity.partition("def _reason_not_to_repeat")[2].partition("\ndef ")[0]
    fused = "".join(
        (ROOT / "fastgen" / name).read_text("utf-8")
        for name in (
            "models/build/step_builder.py",
            "models/build/introspection.py",
            "patches/transformers/generate/fused_decoder.py",
            "patches/transformers/generate/captured_module_step.py",
            "patches/fairseq/generator/shared_stepper.py",
        )
    )
    for code, text in ((planning, listed), (parity, switches), (fused, listed)):
        reasons = re.findall(r'(?:Unsupported\(|NotFused\(|return) *\n? *f?"(.+)"', code)
        assert len(reasons) >= 4
        for reason in reasons:
            for part in re.split(r"\{.*?\}+", reason):
                assert part.strip(" '") in text, reason
