"""Check fastgen's loops with transformers' own cache, or with none: output equals stock's."""

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as tf
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    LogitsProcessor,
    LogitsProcessorList,
    StaticCache,
)

import fastgen
from benchmarks.coverage import recipe
from fastgen.models.state import cached_state_of, iter_cached_states, state_of
from fastgen.patches.transformers.compat import CACHE
from fastgen.patches.transformers.generate.report import last_call
from fastgen.patches.transformers.planning import sharing
from tests.support import zoo
from tests.support.parity import Result, assert_same, fallbacks, hits, left_off, same

METHODS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 4, "eos_token_id": [2, 7, 9, 30]},
    "sampling": {"do_sample": True, "num_return_sequences": 3},
    "beam sampling": {"do_sample": True, "num_beams": 3},
}
FIELDS: dict[str, dict[str, Any]] = {
    "tokens": {},
    "fields": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
}
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "use_cache=False": ("sdpa", {"use_cache": False}),
    "output_attentions=True": (
        "eager",
        {"output_attentions": True, "return_dict_in_generate": True},
    ),
    f"attention implementation {zoo.OWN_ATTENTION!r}": (zoo.OWN_ATTENTION, {}),
}


def _check_unshared(
    model: Any, kwargs: dict[str, Any], reason: str, tolerance: float = 1e-9
) -> Result:
    """Assert equal output from fastgen's loop without the shared cache, and the reported reason."""
    what = f"keys and values are not shared: {reason}"
    before, served, said = fallbacks(), hits(), left_off().get(what, 0)
    result = assert_same(model, kwargs, tolerance=tolerance)
    assert result.error is None
    assert (fallbacks(), hits(), left_off().get(what, 0)) == (before, served + 1, said + 1)
    call = last_call()
    assert call is not None
    assert not call.plan.shared
    return result


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("family", ["bart", "t5", "gpt2", "llama", "mistral", "gemma3_text"])
@pytest.mark.parametrize("reason", OPTIONS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fields", FIELDS)
def test_option(family: str, reason: str, method: str, fields: str, dtype: torch.dtype) -> None:
    attention, options = OPTIONS[reason]
    model = zoo.build(family, dtype)
    model.set_attn_implementation(attention)
    # In float64, eager attention gives NaN for fully masked rows, as left padding causes.
    padding = "none" if attention == "eager" and family in zoo.DECODERS else "natural"
    kwargs = (
        zoo.batch(model, 4, 11, padding)
        | METHODS[method]
        | FIELDS[fields]
        | options
        | {"max_new_tokens": 14}
    )
    sliding = family in ("mistral", "gemma3_text")
    if method == "greedy":
        if reason == "output_attentions=True" and sliding:
            reason = "output_attentions=True with a sliding window"
        elif reason.startswith(("output_attentions", "attention implementation")):
            if not sliding:
                pytest.skip("one row per sentence has a cache of fastgen's")
            reason = "the text may outgrow the sliding window"
    _check_unshared(
        model,
        kwargs,
        reason,
        tolerance=1e-5 if attention == "eager" or dtype == torch.float32 else 1e-9,
    )


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3_text"])
@pytest.mark.parametrize("options", [{}, {"do_sample": True}], ids=["greedy", "sampling"])
@pytest.mark.parametrize("fields", FIELDS)
def test_one_row_and_a_sliding_window(family: str, options: dict[str, Any], fields: str) -> None:
    """The returned cache holds the window, and uses no more memory than transformers' own."""
    model = zoo.build(family)
    inputs = zoo.batch(model, 5, 11, "none" if family == "gemma2" else "natural")
    kwargs = (
        inputs
        | options
        | FIELDS[fields]
        | {"max_new_tokens": 25, "eos_token_id": list(range(2, 20))}
    )
    tolerance = 1e-5 if family == "gemma2" else 1e-9
    _check_unshared(model, kwargs, "the text may outgrow the sliding window", tolerance)
    call = last_call()
    assert call is not None
    assert call.kv_bytes <= call.stock_kv_bytes


def test_one_row_and_a_window_without_steps_in_c() -> None:
    """In fp64 torch runs the steps, which would read the whole text."""
    model = zoo.build("gpt_oss")
    kwargs = zoo.batch(model, 3, 60) | {"max_new_tokens": 12}
    _check_unshared(model, kwargs, "the text may outgrow the sliding window")


@pytest.mark.parametrize("family", ["gpt2", "mistral", "gemma3_text"])
def test_bytes_of_stock_with_several_rows(family: str) -> None:
    """transformers' own cache holds its windows only."""
    model = zoo.build(family)
    kwargs = zoo.batch(model, 3, 11, "none") | {
        "num_beams": 3,
        "max_new_tokens": 9,
        "min_new_tokens": 9,
    }
    model.generate(**kwargs)
    call = last_call()
    assert call is not None
    assert call.plan.shared
    with fastgen.disabled():
        cache = model.generate(**kwargs, return_dict_in_generate=True)[CACHE]
    assert call.stock_kv_bytes == sum(
        kv.nbytes for layer in cache.layers for kv in (layer.keys, layer.values)
    )


def _rows(method: str) -> int:
    return METHODS[method].get("num_beams") or METHODS[method].get("num_return_sequences", 1)


def _filled(model: Any, inputs: dict[str, torch.Tensor], rows: int, static: bool) -> Any:
    """Return a user-provided cache with the start of the text, expanded as in `generate`."""
    seen = {name: value[:, :5].repeat_interleave(rows, 0) for name, value in inputs.items()}
    cache: Any = (
        StaticCache(config=model.config, max_cache_len=60)
        if static
        else DynamicCache(config=model.config)
    )
    with torch.no_grad():
        model(**seen, **{CACHE: cache})
    return cache


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fields", FIELDS)
def test_given_past(family: str, kind: str, method: str, fields: str, dtype: torch.dtype) -> None:
    """Stock and fastgen fill a user-provided cache in place alike, and a chat continues from it."""
    model = zoo.build(family, dtype)
    inputs = zoo.batch(model, 3, 9)
    caches = [_filled(model, inputs, _rows(method), kind == "static") for _ in range(2)]
    options = METHODS[method] | FIELDS[fields] | {"max_new_tokens": 8, "pad_token_id": zoo.PAD}
    # The first turn shares what all rows of a sentence hold.
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    before, served = fallbacks(), hits()

    def talk(cache: Any) -> list[Any]:
        layers, said = list(cache.layers), []
        given = inputs
        for turn in range(2):
            torch.manual_seed(turn)
            out = model.generate(**given, **options, **{CACHE: cache})
            said.append(out)
            if fields == "fields":
                assert out[CACHE] is cache
            assert all(mine is theirs for mine, theirs in zip(cache.layers, layers, strict=True))
            ids = (out.sequences if fields == "fields" else out)[
                :: options.get("num_return_sequences", 1)
            ]
            if ids.shape[1] <= int(cache.get_seq_length()):  # a beam that ended before the others
                ids = torch.cat([ids, ids.new_full((3, 12), 5)], 1)
            given = {"input_ids": torch.cat([ids, ids.new_full((3, 2), 7)], 1)}
            given["attention_mask"] = (given["input_ids"] != zoo.PAD).long()
        return said

    ours = talk(caches[0])
    assert (fallbacks(), hits()) == (before, served + 2)
    with fastgen.disabled():
        stock = talk(caches[1])
    for mine, theirs in zip(ours, stock, strict=True):
        same(mine, theirs, tolerance=tolerance)
    same(caches[0], caches[1], "the user's cache", tolerance)


@pytest.mark.parametrize("family", ["bart", "t5"])
@pytest.mark.parametrize("method", METHODS)
def test_given_past_of_an_encoder_decoder(family: str, method: str) -> None:
    model = zoo.build(family)
    inputs = zoo.batch(model, 3, 9)
    prompt = torch.tensor([[zoo.START, 5, 6, 8]] * 3)
    rows = _rows(method)
    caches = [EncoderDecoderCache(DynamicCache(), DynamicCache()) for _ in range(2)]
    for cache in caches:
        seen = {name: value.repeat_interleave(rows, 0) for name, value in inputs.items()}
        with torch.no_grad():
            model(
                **seen, decoder_input_ids=prompt[:, :3].repeat_interleave(rows, 0), **{CACHE: cache}
            )
    mask = torch.ones_like(prompt)  # tells transformers that the cache holds the start
    call = inputs | METHODS[method] | {"decoder_input_ids": prompt, "decoder_attention_mask": mask}
    served, before = hits(), fallbacks()
    torch.manual_seed(0)
    ours = model.generate(**call, **{CACHE: caches[0]}, max_new_tokens=9)
    assert (fallbacks(), hits()) == (before, served + 1)
    torch.manual_seed(0)
    with fastgen.disabled():
        stock = model.generate(**call, **{CACHE: caches[1]}, max_new_tokens=9)
    assert torch.equal(ours, stock)
    same(caches[0], caches[1])
    assert caches[0].is_updated == caches[1].is_updated


def test_a_given_cache_that_does_not_fit() -> None:
    """Errors for a cache of other rows, or without one to reorder, equal transformers' errors."""
    model = zoo.build("gpt2")
    inputs = zoo.batch(model, 3, 9)
    cache = _filled(model, inputs, 1, static=False)
    options: dict[str, Any]
    for options in ({"num_beams": 4}, {"do_sample": True, "num_return_sequences": 2}):
        assert (
            assert_same(model, inputs | options | {CACHE: cache, "max_new_tokens": 4}).error
            is not None
        )
    options = {CACHE: None, "use_cache": False, "num_beams": 2, "max_new_tokens": 4}
    assert isinstance(assert_same(model, inputs | options).error, ValueError)


def test_quantized_cache() -> None:
    model = zoo.build("llama", torch.float32)
    kwargs = zoo.batch(model, 3, 9) | {
        "cache_implementation": "quantized", "cache_config": {"backend": "fp8"},
        "max_new_tokens": 8,
    }  # fmt: skip
    with fastgen.disabled():
        try:
            model.generate(**kwargs)
        except Exception as error:
            pytest.skip(f"no such cache here: {error}")
    for method in METHODS.values():
        served, before = hits(), fallbacks()
        assert assert_same(model, kwargs | method).error is None
        assert (fallbacks(), hits()) == (before, served + 1)


@pytest.mark.parametrize("name", ["offloaded", "offloaded_static"])
def test_an_offloaded_cache(name: str) -> None:
    """It needs a GPU: on a CPU transformers raises an error, and so does fastgen."""
    model = zoo.build("llama")
    for method in METHODS.values():
        kwargs = zoo.batch(model, 3, 9) | method | {"max_new_tokens": 4}
        error = assert_same(model, kwargs | {"cache_implementation": name}).error
        assert (error is None) == torch.cuda.is_available()


STATIC: dict[str, Any] = {"cache_implementation": "static"}


def _check_static(model: Any, kwargs: dict[str, Any], tolerance: float = 1e-9) -> None:
    """Assert that a call with a static cache runs as one with a dynamic cache, and its output."""
    before, served = fallbacks(), hits()
    assert assert_same(model, kwargs, tolerance=tolerance).error is None
    assert (fallbacks(), hits()) == (before, served + 1)
    call = last_call()
    assert call is not None
    default = fastgen.explain(model, **kwargs | {"cache_implementation": None}).plan
    assert default is not None
    assert (call.plan.shared, call.plan.fused) == (default.shared, default.fused)
    planned = fastgen.explain(model, **kwargs).plan
    assert planned is not None
    assert (planned.shared, planned.fused) == (default.shared, default.fused)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("family", ["bart", "t5", "gpt2", "llama", "mistral", "gemma3_text"])
@pytest.mark.parametrize("padding", ["none", "natural"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fields", FIELDS)
def test_static_cache(
    family: str, padding: str, method: str, fields: str, dtype: torch.dtype
) -> None:
    """The returned cache is a static one; with padding, and windows, its own keys are computed."""
    model = zoo.build(family, dtype)
    new = {"max_new_tokens": 14}
    kwargs = zoo.batch(model, 4, 11, padding) | METHODS[method] | FIELDS[fields] | STATIC | new
    tolerance = 1e-3 if dtype == torch.float32 else 1e-9
    if fields == "fields" and family in ("mistral", "gemma3_text"):  # with short windows
        window = model.config.sliding_window
        reason = f"the cache is a StaticCache of {window} tokens for a longer text"
        _check_unshared(model, kwargs, reason, tolerance)
    elif padding == "natural" and fields == "fields" and family in zoo.DECODERS:
        _check_unshared(model, kwargs, "the cache is a StaticCache that keeps padding", tolerance)
    else:
        _check_static(model, kwargs | {"eos_token_id": list(range(2, 9))}, tolerance)


def test_static_cache_that_is_kept_large() -> None:
    """A static cache never shrinks between calls, and a chunked prefill fills it."""
    model = zoo.build("llama")
    kwargs = zoo.batch(model, 3, 9, "none") | STATIC | {"num_beams": 3}
    for more in (
        {"max_new_tokens": 20},
        {"max_new_tokens": 5},
        {"max_new_tokens": 5, "prefill_chunk_size": 4},
    ):
        _check_static(model, kwargs | more | FIELDS["fields"])


@pytest.mark.parametrize("room", [3, 12, 30])
def test_a_given_static_cache_of_another_size(room: int) -> None:
    """A cache that is too small raises transformers' error; a larger one is filled."""
    model = zoo.build("llama")
    kwargs = zoo.batch(model, 2, 9, "none") | {"max_new_tokens": 8, "min_new_tokens": 8}
    for more in ({}, {"num_beams": 2, "num_return_sequences": 2}):
        given = kwargs | more | {CACHE: StaticCache(model.config, max_cache_len=room)}
        assert (assert_same(model, given).error is None) == (room == 30)
        given = kwargs | more | {CACHE: StaticCache(model.config, max_cache_len=room)}
        plan = fastgen.explain(model, **given).plan
        assert plan is not None
        assert plan.shared == (room == 30)


def test_a_given_static_cache_of_other_rows() -> None:
    model = zoo.build("llama")
    kwargs = zoo.batch(model, 2, 9, "none") | {"max_new_tokens": 4}
    cache = StaticCache(model.config, max_cache_len=30)
    model.generate(**kwargs, **{CACHE: cache})
    for _ in range(2):
        more = zoo.batch(model, 3, 9, "none") | {"max_new_tokens": 4, CACHE: cache}
        assert assert_same(model, more).error is not None
        cache.reset()


def test_rows_that_leave_a_static_cache() -> None:
    """Finished sentences leave a static cache whose modules compute attention by themselves."""
    model = zoo.build("codegen")
    ends = {"eos_token_id": list(range(2, 40)), "max_new_tokens": 14}
    for method in ({}, {"num_beams": 2}):
        assert_same(model, zoo.batch(model, 6, 11) | STATIC | ends | method)
        call = last_call()
        assert call is not None
        assert call.plan.drop
        assert not call.plan.shared
        assert call.steps[-1][0] < call.steps[0][0]


@pytest.mark.parametrize("new_tokens", [1, 6])
def test_a_prompt_in_one_chunk_that_leaves_no_cache(new_tokens: int) -> None:
    """Beams raise the error of transformers."""
    model = zoo.build("qwen3")
    kwargs = zoo.batch(model, 3, 9) | {
        "use_cache": False,
        "prefill_chunk_size": 20,
        "max_new_tokens": new_tokens,
    }
    for beams in (1, 3):
        given = kwargs | {"num_beams": beams, CACHE: DynamicCache(config=model.config)}
        error = assert_same(model, given).error
        assert (error is not None) == (beams > 1)


def test_a_decoder_that_keeps_no_cache_and_a_prompt_in_chunks() -> None:
    """BERT without `is_decoder` ignores the cache: in chunks, each step sees its token alone."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    bert = tf.BertConfig(vocab_size=zoo.VOCABULARY, intermediate_size=24, **sizes).to_dict()
    config = tf.EncoderDecoderConfig(
        encoder=dict(bert), decoder=dict(bert), pad_token_id=zoo.PAD, eos_token_id=zoo.EOS,
        decoder_start_token_id=zoo.START,
    )  # fmt: skip
    model: Any = recipe.enlarge(tf.EncoderDecoderModel(config).eval()).double()
    assert not model.decoder.config.is_decoder
    kwargs = zoo.batch(model, 3, 9) | {"max_new_tokens": 5}
    for method in METHODS.values():
        assert assert_same(model, kwargs | method).error is None
        error = assert_same(model, kwargs | method | {"prefill_chunk_size": 1}).error
        assert (error is not None) == ("num_beams" in method)


# Models that do not read keys from the shared cache


@pytest.fixture
def forget_refused() -> Iterator[None]:
    yield
    for model, _ in iter_cached_states(sharing.SharedCacheRefusal):
        state_of(model).drop(sharing.SharedCacheRefusal)


class _Counts(LogitsProcessor):
    def __init__(self) -> None:
        self.rows: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.rows.append(input_ids[:, -1].tolist())
        return scores


@pytest.mark.usefixtures("forget_refused")
@pytest.mark.parametrize("family", ["bart", "t5", "gpt2", "mistral"])
@pytest.mark.parametrize("method", ["beams", "sampling", "beam sampling"])
@pytest.mark.parametrize("fields", FIELDS)
def test_found_out_at_the_first_step(family: str, method: str, fields: str) -> None:
    """The call continues in place: processors see each token once, and results equal stock's."""
    model = zoo.build(family)
    zoo.alone(model)
    kwargs = zoo.batch(model, 4, 11) | METHODS[method] | FIELDS[fields] | {"max_new_tokens": 12}
    what = f"keys and values are not shared: {sharing.computes_alone(model)}"
    assert fastgen.explain(model, **kwargs).plan.shared
    said, served, before = left_off().get(what, 0), hits(), fallbacks()
    assert assert_same(model, kwargs).error is None
    assert (left_off()[what], hits(), fallbacks()) == (said + 1, served + 1, before)
    assert cached_state_of(model, sharing.SharedCacheRefusal) is not None
    assert what in fastgen.explain(model, **kwargs).notes
    _check_unshared(model, kwargs, sharing.computes_alone(model))


@pytest.mark.usefixtures("forget_refused")
def test_what_others_see_of_it() -> None:
    model = zoo.build("bart")
    zoo.alone(model)
    kwargs = zoo.batch(model, 4, 11) | METHODS["beams"] | {"max_new_tokens": 12}
    seen: list[list[list[int]]] = []
    for run in (model.generate, functools.partial(_stock, model)):
        counts = _Counts()
        run(**kwargs, logits_processor=LogitsProcessorList([counts]))
        seen.append(counts.rows)
    assert seen[0] == seen[1]


def _stock(model: Any, **kwargs: Any) -> Any:
    with fastgen.disabled():
        return model.generate(**kwargs)


@pytest.mark.usefixtures("forget_refused")
@pytest.mark.parametrize("family", ["bart", "gpt2"])
def test_found_out_when_sentences_have_left(family: str) -> None:
    """Sentences that end with their first token leave before the first step."""
    model = zoo.build(family)
    inputs = zoo.batch(model, 6, 11)
    kwargs = inputs | {"num_beams": 3, "early_stopping": True, "max_new_tokens": 12}
    first = _stock(model, **kwargs)[:, inputs["input_ids"].shape[1] if family == "gpt2" else 1]
    kwargs["eos_token_id"] = sorted({int(token) for token in first[:3]} | set(range(4, 70, 2)))
    zoo.alone(model)
    assert assert_same(model, kwargs).error is None
    assert cached_state_of(model, sharing.SharedCacheRefusal) is not None
    call = last_call()
    assert call is not None
    assert call.steps[0][0] < call.plan.rows
    assert_same(model, copy.copy(kwargs))


@pytest.mark.usefixtures("forget_refused")
def test_what_one_model_does_is_not_held_against_others_of_its_class() -> None:
    model, other = zoo.build("bart"), zoo.build("bart")
    zoo.alone(model)
    kwargs = zoo.batch(model, 4, 11) | METHODS["beams"] | {"max_new_tokens": 12}
    model.generate(**kwargs)
    assert not fastgen.explain(model, **kwargs).plan.shared
    assert fastgen.explain(other, **kwargs).plan.shared


def test_a_config_without_a_vocabulary_s_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's model may have such a config: transformers runs it, without an error."""
    model = zoo.unproven()
    kwargs = zoo.batch(model, 2, 6, "none") | {"max_new_tokens": 4}
    expected = _stock(model, **kwargs)
    del model.config.vocab_size
    monkeypatch.delattr(type(model.config), "vocab_size")  # the default of the class
    assert not hasattr(model.config, "vocab_size")
    assert torch.equal(model.generate(**kwargs), expected)


def test_unproven_models_may_be_left_alone(setting: Callable[[str, str], None]) -> None:
    setting("FASTGEN_UNKNOWN", "off")
    model, reason = zoo.unproven(), "model type 'arcee' is not supported"
    before = fallbacks().get(reason, 0)
    assert (
        assert_same(model, zoo.batch(model, 2, 9) | {"num_beams": 2, "max_new_tokens": 6}).error
        is None
    )
    assert fallbacks()[reason] > before


FEW: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "one": ("bart", {"max_new_tokens": 1}, "at most 1 new tokens, too few to gain"),
    "two": ("t5", {"max_new_tokens": 2}, None),
    "two behind a short prompt": (
        "gpt2",
        {"max_new_tokens": 2},
        "at most 2 new tokens, too few to gain",
    ),
    "one behind a long prompt": (
        "gpt2",
        {"length": 40, "max_new_tokens": 1},
        "at most 1 new tokens",
    ),
    "two behind a long prompt": ("gpt2", {"length": 40, "max_new_tokens": 2}, None),
    "three": ("gpt2", {"max_new_tokens": 3}, None),
    "two rows": ("bart", {"max_new_tokens": 1, "num_beams": 2}, None),
}


@pytest.mark.parametrize(("family", "options", "reason"), FEW.values(), ids=FEW)
@pytest.mark.parametrize("fields", FIELDS)
def test_few_new_tokens(
    family: str, options: dict[str, Any], reason: str | None, fields: str
) -> None:
    """Building a cache to read in place takes some steps to pay off."""
    model = zoo.build(family)
    length = options.get("length", 9)
    kwargs = zoo.batch(model, 3, length) | {
        name: value for name, value in options.items() if name != "length"
    }
    assert assert_same(model, kwargs | FIELDS[fields], tolerance=1e-9).error is None
    call = last_call()
    assert call is not None
    assert call.plan.shared == (reason is None)
    assert reason is None or any(reason in said for said in call.plan.left_off)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
def test_a_mask_that_is_longer_than_the_text(options: dict[str, Any]) -> None:
    """The mask covers generated tokens, so the model's own modules run despite checked steps."""
    model = zoo.build("gpt2")
    kwargs = zoo.batch(model, 2, 6, "none") | options | {"max_new_tokens": 6}
    assert_same(model, kwargs)  # later steps are made from the weights
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[0, :7] = 0
    embeds = model.get_input_embeddings()(kwargs.pop("input_ids")).detach()
    before = left_off()
    assert_same(
        model, kwargs | {"inputs_embeds": embeds, "attention_mask": mask, CACHE: DynamicCache()}
    )
    assert any("a mask of 8 tokens for a text of 6" in reason for reason in left_off() - before)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("beams", [1, 3])
def test_prompt_tuning(family: str, beams: int) -> None:
    """PEFT may insert its embeddings in every forward, as in stock."""
    peft = pytest.importorskip("peft")
    tuned = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = peft.get_peft_model(zoo.build(family), tuned).double().eval()
    kwargs = zoo.batch(model.base_model, 3, 9) | {"num_beams": beams, "max_new_tokens": 6}
    assert_same(model, kwargs)
    call = last_call()
    assert call is not None
    assert not call.plan.shared
