"""Check the prefix cache: what it finds, keeps and drops, and that the output stays the same."""

import contextvars
import threading
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import fastgen
from fastgen import config
from fastgen.decoding.kv_cache import common_prefix
from fastgen.decoding.kv_cache.prefix_cache import (
    CachedText,
    PrefixCache,
    prefix_cache_of,
    source_cache_of,
)
from fastgen.models.model_fingerprint import ModelFingerprint, model_fingerprint
from fastgen.ops import native
from fastgen.patches.generation_call import current
from fastgen.patches.transformers.encoders import unpadded_encoder
from fastgen.patches.transformers.generate.report import last_call
from fastgen.patches.transformers.planning import cached_prompt
from tests.models.test_in_c import _wide  # noqa: F401  a fixture: heads that C can attend with
from tests.patches.transformers.planning.test_common_prompt import forwards  # noqa: F401  a fixture
from tests.support import zoo
from tests.support.parity import assert_same

FAMILIES = ["gpt2", "llama", "opt", "phi3", "gpt_neox", "gptj", "falcon", "qwen3", "mixtral"]
LIMIT = 2**28


@pytest.fixture(autouse=True)
def _however_small_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common_prefix, "SAVED", 0)
    monkeypatch.setattr(cached_prompt, "SAVED", 0)


def _prompt(count: int, seed: int = 0, first: Tensor | None = None) -> Tensor:
    """Return a prompt (1, N) of `count` random tokens, after `first` (1, L)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, zoo.VOCABULARY, (1, count), generator=generator)
    return ids if first is None else torch.cat([first, ids], 1)


def _cached() -> int:
    """Return how many tokens the newest call took from the cache."""
    report = last_call()
    assert report is not None
    return report.plan.cached


def _stock(model: Any, **kwargs: Any) -> Tensor:
    with fastgen.disabled():
        return model.generate(**kwargs)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chat(family: str, forwards: list[tuple[int, ...]]) -> None:  # noqa: F811
    """Each turn sends the whole history; only the new tokens run."""
    model, history = zoo.build(family), _prompt(40)
    with fastgen.prefix_cache(bytes=LIMIT) as use:
        for turn in range(4):
            ids = {"input_ids": history, "attention_mask": torch.ones_like(history)}
            kwargs = ids | {"max_new_tokens": 8, "min_new_tokens": 8}
            assert_same(model, kwargs)
            # The last token of a text has not run through the model.
            assert _cached() == (history.shape[1] - 7 if turn else 0), turn
            history = _prompt(6, turn + 1, _stock(model, **kwargs))
    assert use.hits == 3
    assert use.tokens == sum(47 + 14 * turn for turn in range(3))
    assert forwards == [(1, 7)] * 3
    assert not prefix_cache_of(model).texts, "what the context has kept is freed"


METHODS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "samples": {"do_sample": True, "num_return_sequences": 2},
    "dict": {"return_dict_in_generate": True, "output_scores": True},
    "n-grams": {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
    "one token": {"max_new_tokens": 1, "num_beams": 2},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_second_call(family: str, method: str) -> None:
    model = zoo.build(family)
    first = _prompt(50)
    with fastgen.prefix_cache(bytes=LIMIT):
        model.generate(first, max_new_tokens=2)
        for seed in range(2):
            ids = _prompt(9, seed + 1, first[:, :45])
            assert_same(model, {"input_ids": ids, "max_new_tokens": 7} | METHODS[method])
            assert _cached() == 45


@pytest.mark.parametrize("padded", [False, True])
def test_batches(padded: bool) -> None:
    """All prompts of a batch begin alike; the first call keeps these tokens."""
    model, system = zoo.build("llama"), _prompt(40)
    rows = [_prompt(9 - row * padded, row + 1, system)[0] for row in range(4)]
    longest = max(map(len, rows))
    ids = torch.stack([nn.functional.pad(row, (longest - len(row), 0)) for row in rows])
    mask = torch.stack(
        [nn.functional.pad(torch.ones_like(row), (longest - len(row), 0)) for row in rows]
    )
    kwargs = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 6}
    with fastgen.prefix_cache(bytes=LIMIT):
        for expected in (0, 40):
            assert_same(model, kwargs)
            assert _cached() == expected
        other = kwargs | {"input_ids": ids.flip(0), "attention_mask": mask.flip(0)}
        assert_same(model, other | {"num_beams": 2})
        assert _cached() == 40


def test_longer_common_tokens_than_those_that_are_known() -> None:
    model, system = zoo.build("llama"), _prompt(60)
    with fastgen.prefix_cache(bytes=LIMIT):
        model.generate(system[:, :41], max_new_tokens=1, num_beams=2)
        ids = torch.cat([_prompt(5, row + 1, system) for row in range(3)])
        kwargs = {"input_ids": ids, "max_new_tokens": 5}
        assert_same(model, kwargs)
        assert _cached() == 41
        assert_same(model, kwargs)
        assert _cached() == 60


def _change_in_place(model: Any) -> None:
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)


def _change_data(model: Any) -> None:
    next(model.parameters()).data.mul_(1.5)


def _load(model: Any) -> None:
    model.load_state_dict({name: 1.5 * value for name, value in model.state_dict().items()})


def _replace(model: Any) -> None:
    layer = next(part for part in model.modules() if isinstance(part, nn.Linear))
    layer.weight = nn.Parameter(layer.weight.detach() * 1.5)


def _set_option(model: Any) -> None:
    model.config.rms_norm_eps = 0.5
    for part in model.modules():
        if hasattr(part, "variance_epsilon"):
            part.variance_epsilon = 0.5


def _add_hook(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, given, output: 1.5 * output)


def _scale_rotation(model: Any) -> None:
    model.model.rotary_emb.attention_scaling = 2.0


def _use_another_class(model: Any) -> None:
    """A linear layer whose class reads an attribute of its own."""

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.alpha  # type: ignore[attr-defined]

    layer = model.model.layers[0].self_attn.k_proj
    layer.__class__, layer.alpha = Scaled, 2.0


def _see_later_tokens(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.is_causal = False


@pytest.mark.parametrize(
    "change",
    [
        _change_in_place,
        _change_data,
        _load,
        _replace,
        _set_option,
        _add_hook,
        _scale_rotation,
        _use_another_class,
        _see_later_tokens,
    ],
)
def test_a_change_of_weights_empties_the_cache(change: Any) -> None:
    model, kwargs = zoo.build("llama"), {"input_ids": _prompt(50), "max_new_tokens": 4}
    with fastgen.prefix_cache(bytes=LIMIT):
        for _ in range(2):
            model.generate(**kwargs)
        assert _cached() == 49
        change(model)
        assert_same(model, kwargs)
        assert _cached() == 0


def test_an_address_that_comes_again() -> None:
    """A weight that replaces another may lie where an earlier one was."""
    model, kwargs = zoo.build("llama"), {"input_ids": _prompt(50), "max_new_tokens": 4}
    layer = model.model.layers[0].self_attn.k_proj
    with fastgen.prefix_cache(bytes=LIMIT):
        for column in range(8):
            weight = layer.weight.detach().numpy().copy()
            weight[:, column] = -weight[:, column] + 1.0
            layer.weight = nn.Parameter(torch.from_numpy(weight))
            assert_same(model, kwargs)
            assert _cached() == 0


def test_experts_of_each_token() -> None:
    model, kwargs = zoo.build("mixtral"), {"input_ids": _prompt(50), "max_new_tokens": 4}
    with fastgen.prefix_cache(bytes=LIMIT):
        model.generate(**kwargs)
        for part in model.modules():
            if hasattr(part, "top_k"):
                part.top_k = 1
        assert_same(model, kwargs)
        assert _cached() == 0


ADAPTERS: dict[str, Any] = {
    "lora": lambda peft: peft.LoraConfig(target_modules=LINEARS, init_lora_weights=False),
    "dora": lambda peft: peft.LoraConfig(
        target_modules=LINEARS, init_lora_weights=False, use_dora=True
    ),
    "embedding": lambda peft: peft.LoraConfig(
        target_modules=["embed_tokens"], init_lora_weights=False
    ),
    "loha": lambda peft: peft.LoHaConfig(target_modules=LINEARS, init_weights=False),
}
LINEARS = ["q_proj", "v_proj"]


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters(kind: str) -> None:
    """Keys and values depend on the active adapters and on their scaling."""
    peft = pytest.importorskip("peft")
    config = ADAPTERS[kind](peft)
    model = peft.get_peft_model(zoo.build("llama"), config, "one")
    model.add_adapter("two", config)
    model.eval()
    kwargs = {"input_ids": _prompt(50), "max_new_tokens": 4}
    with fastgen.prefix_cache(bytes=LIMIT):
        for name, expected in (("one", 0), ("one", 49), ("two", 0), ("two", 49), ("one", 0)):
            model.set_adapter(name)
            assert_same(model, kwargs)
            assert _cached() in (0, expected), name
        if kind == "lora":
            model.set_adapter("two")
            for _ in range(2):
                model.generate(**kwargs)
            assert _cached() == 49
        model.base_model.disable_adapter_layers()
        assert_same(model, kwargs)
        assert _cached() == 0


def test_layers_that_scale_all_tokens_together() -> None:
    """Dynamic quantisation rounds a token by the range of all tokens of a forward."""
    from torch.ao.quantization import quantize_dynamic

    model = quantize_dynamic(zoo.build("llama", torch.float32), {nn.Linear}, dtype=torch.qint8)
    first = _prompt(50)
    with fastgen.prefix_cache(bytes=LIMIT):
        model.generate(first, max_new_tokens=4)
        assert_same(model, {"input_ids": _prompt(9, 1, first), "max_new_tokens": 4})
        assert _cached() == 0
        batch = torch.cat([_prompt(9, row + 1, first) for row in range(3)])
        assert_same(model, {"input_ids": batch, "max_new_tokens": 4})


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize(
    ("family", "kwargs"),
    [
        ("llama", {"attention_mask": torch.ones(1, 52, dtype=torch.int64)}),
        ("gpt2", {"position_ids": torch.arange(52)[None]}),
        ("opt", {"position_ids": torch.tensor([[0]])}),
        ("bloom", {"attention_mask": torch.full((1, 50), 2)}),
    ],
)
def test_texts_at_other_positions_are_not_kept(
    family: str, kwargs: dict[str, Any], beams: int
) -> None:
    model, ids = zoo.build(family), _prompt(50)
    with fastgen.prefix_cache(bytes=LIMIT):
        try:
            model.generate(ids, max_new_tokens=4, num_beams=beams, **kwargs)
        except (RuntimeError, ValueError, IndexError):
            pytest.skip("transformers refuses it")
        assert_same(model, {"input_ids": ids, "max_new_tokens": 4, "num_beams": beams})
        assert _cached() == 0


def test_no_memory_for_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that has ended returns its output."""

    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    model = zoo.build("llama")
    monkeypatch.setattr(cached_prompt, "CachedText", no_memory)
    with fastgen.prefix_cache(bytes=LIMIT):
        assert_same(model, {"input_ids": _prompt(50), "max_new_tokens": 4})
    assert not prefix_cache_of(model).texts


def test_a_weight_of_another_class() -> None:
    class Weight(nn.Parameter):
        pass

    model = zoo.build("llama")
    model.model.norm.weight = Weight(model.model.norm.weight.detach())
    with fastgen.prefix_cache(bytes=LIMIT):
        for _ in range(2):
            assert_same(model, {"input_ids": _prompt(50), "max_new_tokens": 4})
        assert _cached() == 0


def test_a_part_that_is_offloaded() -> None:
    model = zoo.build("llama")
    model.vision = nn.Linear(2, 2, device="meta")
    with fastgen.prefix_cache(bytes=LIMIT):
        for _ in range(2):
            assert_same(model, {"input_ids": _prompt(50), "max_new_tokens": 4})
        assert _cached() == 0


def test_a_context_that_has_ended() -> None:
    """A copy of the context may outlive it, and keeps nothing."""
    model = zoo.build("llama")
    with fastgen.prefix_cache(bytes=LIMIT) as use:
        copied = contextvars.copy_context()
    copied.run(model.generate, _prompt(50), max_new_tokens=4)
    assert not prefix_cache_of(model).texts
    assert use.hits == 0


def test_contexts_of_threads_do_not_share_a_bound() -> None:
    model = zoo.build("llama")

    def run() -> None:
        with fastgen.prefix_cache(bytes=10):
            model.generate(_prompt(50, 1), max_new_tokens=2)

    with fastgen.prefix_cache(bytes=LIMIT):
        model.generate(_prompt(50), max_new_tokens=2)
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert len(prefix_cache_of(model).texts) == 1


def test_too_few_tokens_to_keep() -> None:
    """The plan is that of a call without the cache."""
    model = zoo.build("llama")
    plans = list[Any]()
    for size in (0, LIMIT):
        with fastgen.prefix_cache(bytes=size):
            model.generate(_prompt(5), max_new_tokens=1)
            report = last_call()
            assert report is not None
            plans.append(report.plan)
    assert plans[0] == plans[1]


@pytest.mark.parametrize(
    "kwargs",
    [
        {"position_ids": torch.arange(50)[None] + 3},
        {"attention_mask": torch.cat([torch.ones(1, 20), torch.zeros(1, 9), torch.ones(1, 21)], 1)},
        {"past_key_values": None},
    ],
)
def test_calls_that_do_not_use_it(kwargs: dict[str, Any]) -> None:
    model = zoo.build("llama")
    with fastgen.prefix_cache(bytes=LIMIT):
        for _ in range(2):
            model.generate(_prompt(50), max_new_tokens=4)
        assert _cached() == 49
        if "past_key_values" in kwargs:
            kwargs = {"past_key_values": tf.DynamicCache(config=model.config)}
        model.generate(_prompt(50), max_new_tokens=4, **kwargs)
        assert _cached() == 0


def _scale_layer(encoder: Any) -> None:
    blocks = encoder.block if hasattr(encoder, "block") else encoder.layers
    blocks[0].register_forward_hook(
        lambda module, given, output: (
            (1.5 * output[0], *output[1:]) if isinstance(output, tuple) else 1.5 * output
        )
    )


def _change_eps(encoder: Any) -> None:
    for part in encoder.modules():
        for name in ("eps", "variance_epsilon"):
            if hasattr(part, name):
                setattr(part, name, 0.5)


SOURCE_CHANGES = [_change_eps, _scale_layer]


@pytest.mark.skipif(native.library() is None, reason="there are no operations in C here")
@pytest.mark.usefixtures("_wide")
@pytest.mark.parametrize("padding", ["none", "natural"])
@pytest.mark.parametrize("family", ["bart", "t5", "marian", "m2m_100"])
def test_sources(family: str, padding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder runs only the sources that it has not encoded before."""
    encoded: list[int] = []
    run = unpadded_encoder._rows

    def counted(encoder: Any, ids: Tensor, sentences: Any) -> Tensor:
        encoded.append(len(ids))
        return run(encoder, ids, sentences)

    model = zoo.build(family, torch.float32)
    batch = zoo.batch(model, 4, 19, padding)
    options = {"num_beams": 2, "max_new_tokens": 6}
    with fastgen.prefix_cache(bytes=LIMIT) as use:
        assert_same(model, batch | options)
        monkeypatch.setattr(unpadded_encoder, "_rows", counted)
        assert_same(model, batch | options)
        assert encoded == []
        assert use.hits == 4
        # Two sources that are known, in another order, and one that is not.
        others = {name: value[[1, 0, 0]] for name, value in batch.items()}
        others["input_ids"][2, :3] = others["input_ids"][2, :3].flip(0)
        assert_same(model, others | options)
        assert encoded == [1]
        with torch.no_grad():
            next(model.get_encoder().parameters()).mul_(1.5)
        assert_same(model, batch | options)
        assert sum(encoded) > 4
        for change in SOURCE_CHANGES:
            change(model.get_encoder())
            assert_same(model, batch | options)
        assert use.hits == 6
        assert not prefix_cache_of(model).texts, "the decoder's prompts are one token long"
    assert not source_cache_of(model.get_encoder()).texts


def test_the_bound_and_the_order_of_use() -> None:
    model = zoo.build("llama")
    with fastgen.prefix_cache(bytes=LIMIT):
        model.generate(_prompt(50), max_new_tokens=1)
        size = prefix_cache_of(model).nbytes
    assert size > 0
    prompts = [_prompt(50, seed) for seed in range(3)]
    with fastgen.prefix_cache(bytes=2 * size):
        for prompt in (prompts[0], prompts[1], prompts[0], prompts[2]):
            model.generate(prompt, max_new_tokens=1)
        kept = [text.tokens for text in prefix_cache_of(model).texts]
        assert prefix_cache_of(model).nbytes == 2 * size
        assert fastgen.status().memory["prefix cache"] == 2 * size
        assert [torch.equal(tokens, prompts[i][0]) for tokens, i in zip(kept, (0, 2), strict=True)]
        with fastgen.prefix_cache(bytes=0):
            model.generate(prompts[0], max_new_tokens=1)
            assert _cached() == 0
        assert len(prefix_cache_of(model).texts) == 2, "those of the outer context"
    with fastgen.prefix_cache(bytes=size - 1):
        model.generate(prompts[0], max_new_tokens=1)
        assert not prefix_cache_of(model).texts


def test_release() -> None:
    model = zoo.build("llama")
    with fastgen.prefix_cache(bytes=LIMIT):
        model.generate(_prompt(50), max_new_tokens=1)
        fastgen.release()
        assert not prefix_cache_of(model).texts
        model.generate(_prompt(50), max_new_tokens=2)
        assert _cached() == 0


def test_the_setting_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads have no context of their creator, and use the setting."""
    model, found = zoo.build("llama"), list[int]()

    def run() -> None:
        model.generate(_prompt(50), max_new_tokens=2)
        found.append(_cached())

    with fastgen.prefix_cache(bytes=LIMIT):
        run()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    monkeypatch.setenv("FASTGEN_PREFIX_CACHE", "64MiB")
    config.reload()
    try:
        run()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    finally:
        monkeypatch.undo()
        config.reload()
    assert found == [0, 0, 0, 49]


@pytest.mark.parametrize(
    ("size", "error"), [(-1, ValueError), (1.5, TypeError), ("1GiB", TypeError), (True, TypeError)]
)
def test_sizes(size: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"bytes={size!r}"), fastgen.prefix_cache(bytes=size):
        pass
    assert current.get().prefix_cache is None


def test_explanation() -> None:
    model = zoo.build("llama")
    with fastgen.prefix_cache(bytes=LIMIT):
        model.generate(_prompt(50), max_new_tokens=2)
        text = str(fastgen.explain(model, input_ids=_prompt(9, 1, _prompt(50)), max_new_tokens=4))
    assert "the first 50 tokens are in the prefix cache" in text


def test_half_precision() -> None:
    """Tokens from the cache differ from others by rounding alone."""
    model = zoo.build("llama", torch.bfloat16)
    first = _prompt(50)
    with fastgen.prefix_cache(bytes=LIMIT):
        model.generate(first, max_new_tokens=2)
        ids = _prompt(9, 1, first)
        ours = model.generate(ids, max_new_tokens=1, num_beams=2, output_logits=True,
                              return_dict_in_generate=True)  # fmt: skip
        assert _cached() == 50
    stock = _stock(model, input_ids=ids, max_new_tokens=1, num_beams=2, output_logits=True,
                   return_dict_in_generate=True)  # fmt: skip
    torch.testing.assert_close(ours.logits[0], stock.logits[0], atol=0.1, rtol=0.05)


def _text(*tokens: int) -> CachedText:
    ids = torch.tensor(tokens + (9,) * (40 - len(tokens)))
    return CachedText(ids, [torch.zeros(1, 1, len(ids), 2)] * 2)


def _fingerprint() -> ModelFingerprint:
    found = model_fingerprint(nn.Linear(2, 2))
    assert found is not None
    return found


def test_kept_texts() -> None:
    cache, weights = PrefixCache(), _fingerprint()
    cache.validate(weights)
    one, other = _text(1), _text(2)
    cache.add(one, weights, LIMIT)
    cache.add(other, weights, LIMIT)
    assert cache.texts == [one, other]
    longer = CachedText(torch.cat([one.tokens, one.tokens]), one.tensors)
    cache.add(longer, weights, LIMIT)
    assert cache.texts == [other, longer], "the text that a longer one begins with is dropped"
    cache.add(_text(1), weights, LIMIT)
    assert cache.texts == [other, longer], "a longer text begins with it"
    assert cache.find(one.tokens) == (longer, 40)
    assert cache.find(_text(2, 3).tokens) == (None, 0)
    cache.add(_text(3), _fingerprint(), LIMIT)
    assert cache.texts == [other, longer], "its call began with other weights"
