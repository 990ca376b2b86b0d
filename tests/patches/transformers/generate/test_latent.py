"""Check latents that condition a text, which the beams of a sentence share.

A latent is passed as embeddings, as keys and values, or as encoder states.
"""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

import fastgen
from fastgen import config
from fastgen.patches.transformers.compat import CACHE
from fastgen.patches.transformers.generate.report import last_call
from tests.support import zoo
from tests.support.parity import assert_same, fallbacks, left_off

SENTENCES, LATENT = 3, 4
METHODS: dict[str, dict[str, Any]] = {
    "greedy": {"no_repeat_ngram_size": 2},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 4, "no_repeat_ngram_size": 2, "eos_token_id": [2, 7, 9, 30]},
    "five beams": {"num_beams": 5, "early_stopping": True, "num_return_sequences": 2},
    "beam samples": {"do_sample": True, "num_beams": 3},
}


def _rows(options: dict[str, Any]) -> int:
    return max(options.get("num_beams", 1), options.get("num_return_sequences", 1))


def _drawn(model: Any, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(
        model.dtype
    )


def as_embeddings(model: Any, rows: int) -> dict[str, Any]:
    """Return embeddings of a latent followed by a prompt, padded to equal length."""
    inputs = zoo.batch(model, SENTENCES, 5)
    embeds = model.get_input_embeddings()(inputs["input_ids"]).detach()
    latent = _drawn(model, SENTENCES, LATENT, embeds.shape[2])
    mask = inputs["attention_mask"]
    return {
        "inputs_embeds": torch.cat([latent, embeds], 1),
        "attention_mask": torch.cat([mask.new_ones(SENTENCES, LATENT), mask], 1),
    }


def as_embeddings_with_ids(model: Any, rows: int) -> dict[str, Any]:
    """Add token ids at the latent's positions, which n-gram blocking reads and outputs contain."""
    given = as_embeddings(model, rows)
    return given | {"input_ids": zoo.batch(model, SENTENCES, LATENT + 5, "none")["input_ids"]}


def _prefix(model: Any, rows: int, *, layers: int = 2) -> DynamicCache:
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "d_kv", None) or getattr(config, "head_dim", None)
    dim = dim or config.hidden_size // config.num_attention_heads
    drawn = _drawn(model, 2 * layers, SENTENCES, heads, LATENT, dim).repeat_interleave(rows, 1)
    cache = DynamicCache()
    for layer in range(layers):
        cache.update(drawn[2 * layer], drawn[2 * layer + 1], layer)
    return cache


def as_keys(model: Any, rows: int) -> dict[str, Any]:
    """Return keys and values of each sentence's prefix, as in prefix tuning."""
    inputs = zoo.batch(model, SENTENCES, 5)
    cache: Any = _prefix(model, rows)
    if model.config.is_encoder_decoder:
        cache = EncoderDecoderCache(cache, DynamicCache())
        return inputs | {CACHE: cache}
    mask = inputs["attention_mask"]
    return {
        "input_ids": inputs["input_ids"],
        "attention_mask": torch.cat([mask.new_ones(SENTENCES, LATENT), mask], 1),
        CACHE: cache,
    }


def as_nothing(model: Any, rows: int) -> dict[str, Any]:
    """Return an empty cache."""
    cache: Any = DynamicCache(config=model.config)
    if model.config.is_encoder_decoder:
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    return zoo.batch(model, SENTENCES, 5) | {CACHE: cache}


def as_encoder_states(model: Any, rows: int) -> dict[str, Any]:
    """Return states in place of the encoder's; one sentence has fewer of them."""
    mask = torch.ones(SENTENCES, LATENT, dtype=torch.int64)
    mask[0, 2:] = 0
    states = _drawn(model, SENTENCES, LATENT, model.config.d_model)
    return {"encoder_outputs": BaseModelOutput(last_hidden_state=states), "attention_mask": mask}  # type: ignore[arg-type]


WAYS = [
    *(
        (way, family)
        for way in (as_embeddings, as_embeddings_with_ids)
        for family in ("gpt2", "llama")
    ),
    *((as_keys, family) for family in ("gpt2", "llama", "bart", "t5")),
    *((as_nothing, family) for family in ("gpt2", "bart")),
    *((as_encoder_states, family) for family in ("bart", "t5")),
]


@pytest.mark.parametrize(
    ("method", "dtype"),
    [*((method, torch.float64) for method in METHODS), ("beams", torch.float32)],
    ids=str,
)
@pytest.mark.parametrize(
    ("way", "family"), WAYS, ids=lambda value: getattr(value, "__name__", value)
)
def test_a_latent(way: Any, family: str, method: str, dtype: torch.dtype) -> None:
    """Output equals stock's, including the user-provided cache after the call.

    The cache is shared and the steps are fused.
    """
    model = zoo.build(family, dtype)
    options = METHODS[method] | {"max_new_tokens": 12, "pad_token_id": zoo.PAD}
    kwargs = way(model, _rows(options)) | options
    # In float32, two beams within a rounding error may swap ranks without changing tokens.
    if dtype == torch.float64:
        kwargs |= {"return_dict_in_generate": True, "output_scores": True}
    before = fallbacks()
    assert (
        assert_same(model, kwargs, tolerance=1e-9 if dtype == torch.float64 else 1e-4).error is None
    )
    assert fallbacks() == before
    call = last_call()
    assert call is not None
    assert call.plan.shared
    assert call.plan.fused
    if method == "beams":
        plan = fastgen.explain(model, **kwargs).plan
        assert plan is not None
        assert (plan.shared, plan.fused) == (True, True)


@pytest.fixture
def by_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Disable steps from the weights."""
    monkeypatch.setenv("FASTGEN_STEP", "module")
    config.reload()
    yield
    monkeypatch.undo()
    config.reload()


@pytest.mark.parametrize("family", ["gpt2", "bart"])
def test_a_latent_by_the_models_own_modules(family: str, by_modules: None) -> None:
    model = zoo.build(family)
    assert (
        assert_same(model, as_keys(model, 4) | METHODS["beams"] | {"max_new_tokens": 12}).error
        is None
    )
    call = last_call()
    assert call is not None
    assert (call.plan.shared, call.plan.fused) == (True, False)


def test_a_latent_that_is_refused() -> None:
    """A model that uses the cache in its own way continues in the user-provided cache."""
    model = zoo.alone(zoo.build("gpt2"))
    assert (
        assert_same(model, as_keys(model, 4) | METHODS["beams"] | {"max_new_tokens": 12}).error
        is None
    )
    call = last_call()
    assert call is not None
    assert not call.plan.shared


def _other_rows(cache: Any) -> None:
    cache.layers[1].values[1] += 1.0


def _other_lengths(cache: Any) -> None:
    cache.layers[1].keys, cache.layers[1].values = (
        cache.layers[1].keys[:, :, 1:],
        cache.layers[1].values[:, :, 1:],
    )


def _other_type(cache: Any) -> None:
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.float(), layer.values.float()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_other_rows, "and differs between rows of a sentence"),
        (_other_lengths, "with layers of different lengths"),
        (_other_type, "of other rows, another type or device"),
    ],
)
def test_what_cannot_be_shared(change: Any, reason: str) -> None:
    model = zoo.build("gpt2")
    kwargs = as_keys(model, 4) | METHODS["beams"] | {"max_new_tokens": 6}
    change(kwargs[CACHE])
    what = f"keys and values are not shared: a KV cache is given, {reason}"
    assert what in fastgen.explain(model, **copy.deepcopy(kwargs)).notes
    before = left_off()[what]
    # transformers itself fails for some of these caches.
    error = assert_same(model, kwargs).error
    assert left_off()[what] == before + (error is None)


def test_a_mask_of_the_prompt_alone() -> None:
    """The mask omits the prefix; output must equal that of transformers."""
    model = zoo.build("gpt2")
    kwargs = as_keys(model, 4) | METHODS["beams"] | {"max_new_tokens": 6}
    kwargs["attention_mask"] = kwargs["attention_mask"][:, LATENT:]
    assert_same(model, kwargs)


def test_sliding_windows_are_not_shared() -> None:
    model = zoo.build("mistral")
    cache = DynamicCache(config=model.config)
    inputs = zoo.batch(model, 2, 6)
    with torch.no_grad():
        model(inputs["input_ids"][:, :3].repeat_interleave(2, 0), **{CACHE: cache})
    kwargs = inputs | {CACHE: cache, "num_beams": 2, "max_new_tokens": 9}
    what = "keys and values are not shared: a KV cache is given, with a sliding window"
    before = left_off()[what]
    assert assert_same(model, kwargs).error is None
    assert left_off()[what] == before + 1


def test_prompt_that_repeats_what_the_cache_holds() -> None:
    """In a chat's second turn, the prompt begins with the cached tokens."""
    model = zoo.build("llama")
    ids = zoo.batch(model, 2, 8, "none")["input_ids"]
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :5].repeat_interleave(3, 0), **{CACHE: cache})
    kwargs = {"input_ids": ids, CACHE: cache, "num_beams": 3, "max_new_tokens": 6}
    assert fastgen.explain(model, **copy.deepcopy(kwargs)).plan.shared
    assert assert_same(model, kwargs).error is None


def test_a_decoder_given_for_both() -> None:
    """fastgen leaves a single cache for decoder and encoder to transformers, which accepts it."""
    model = zoo.build("bart")
    kwargs = zoo.batch(model, 2, 5) | {CACHE: DynamicCache(), "max_new_tokens": 4}
    notes = fastgen.explain(model, **copy.deepcopy(kwargs)).notes
    assert "keys and values are not shared: a KV cache is given, a DynamicCache" in notes
    assert_same(model, kwargs)
