"""Check calls whose prompts begin alike: common tokens run once, and the output is the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from transformers import DynamicCache

import fastgen
from fastgen.decoding.kv_cache import common_prefix
from fastgen.ops import native
from fastgen.patches.transformers.compat import CACHE
from fastgen.patches.transformers.generate.report import last_call
from fastgen.patches.transformers.planning import common_prompt
from tests.support import zoo
from tests.support.parity import assert_same
from tests.support.pretended import Pretended

SENTENCES, COMMON, OWN = 7, 37, 9
needs_c = pytest.mark.skipif(native.library() is None, reason="there are no operations in C here")
METHODS: dict[str, dict[str, Any]] = {
    "one token": {"max_new_tokens": 1},
    "greedy": {"max_new_tokens": 9, "eos_token_id": [2, *range(4, 30)]},
    "samples": {"max_new_tokens": 5, "do_sample": True, "num_return_sequences": 2},
    "beams": {"max_new_tokens": 9, "num_beams": 3, "eos_token_id": [2, *range(4, 16)]},
    "diverse": {
        "max_new_tokens": 5, "num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def _however_small_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common_prefix, "SAVED", 0)


def prompts(padded: bool, common: int = COMMON, seed: int = 0) -> dict[str, Tensor]:
    """Return prompts with `common` tokens in common; padded ones have 1 to 9 tokens more."""
    generator = torch.Generator().manual_seed(seed)
    drawn = lambda count: torch.randint(4, zoo.VOCABULARY, (count,), generator=generator)  # noqa: E731
    first, ids, mask = drawn(common), list[Tensor](), list[Tensor]()
    for row in range(SENTENCES):
        own = drawn(OWN - row * 4 % OWN if padded else OWN)
        own[0] = 4 + row  # so that no more tokens are in common
        missing = common + OWN - len(first) - len(own)
        text = torch.cat([first, own])
        ids.append(nn.functional.pad(text, (missing, 0), value=zoo.PAD))
        mask.append(nn.functional.pad(torch.ones_like(text), (missing, 0)))
    return {"input_ids": torch.stack(ids), "attention_mask": torch.stack(mask)}


def _common() -> int:
    """Return how many tokens the newest call ran once."""
    report = last_call()
    assert report is not None
    return report.plan.common


def _planned(model: Any, **kwargs: Any) -> int:
    plan = fastgen.explain(model, **kwargs).plan
    assert plan is not None
    return plan.common


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return the shapes of the token ids of each forward while common tokens are run once."""
    shapes: list[tuple[int, ...]] = []
    prefill = common_prompt.prefill

    def recorded(model: Any, *args: Any) -> Any:
        embeddings = model.get_input_embeddings()
        with embeddings.register_forward_hook(
            lambda module, inputs, output: shapes.append(tuple(inputs[0].shape))
        ):
            return prefill(model, *args)

    monkeypatch.setattr(common_prompt, "prefill", recorded)
    return shapes


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "family", ["gpt2", "llama", "opt", "phi3", "gpt_neox", "gptj", "falcon", "qwen3", "mixtral"]
)
def test_the_output_is_the_same(
    family: str, method: str, padded: bool, forwards: list[tuple[int, ...]]
) -> None:
    model, kwargs = zoo.build(family), prompts(padded) | METHODS[method]
    if method == "diverse":  # transformers has no such search any more
        ours = model.generate(**kwargs)
        forwards.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(common_prompt, "common_tokens", lambda *_: 0)
            assert torch.equal(ours, model.generate(**kwargs))
        assert not forwards
        return
    assert_same(model, kwargs)
    assert _common() == COMMON
    assert forwards == [(1, COMMON), (SENTENCES, OWN)]
    report = last_call()
    assert report is not None
    assert report.plan.fused


@pytest.mark.parametrize("family", ["bloom", "falcon-rw", "mpt", "gpt_neo"])
def test_biases_by_distance(family: str) -> None:
    """Padding must not come between tokens, whose distance would change."""
    model = zoo.build(family)
    kwargs = prompts(padded=False) | {"max_new_tokens": 6, "no_repeat_ngram_size": 2}
    assert_same(model, kwargs)
    assert _common() == COMMON
    kwargs |= prompts(padded=True)
    assert _planned(model, **kwargs) == 0
    assert_same(model, kwargs)


def test_a_window_that_the_text_fits_into() -> None:
    model = zoo.build("cohere2")
    assert_same(model, prompts(padded=True) | {"max_new_tokens": 9, "num_beams": 2})
    assert _common() == COMMON
    assert _planned(zoo.build("mistral"), **prompts(padded=True), max_new_tokens=9) == 0


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_returned_caches_scores_and_logits(family: str, options: dict[str, Any]) -> None:
    model = zoo.build(family)
    returned = {
        "return_dict_in_generate": True, "output_scores": True, "output_logits": True,
        "max_new_tokens": 7,
    }  # fmt: skip
    assert_same(model, prompts(padded=False) | returned | options)
    assert _common() == COMMON
    assert_same(model, prompts(padded=True) | returned | options)
    assert _common() == 0  # keys and values of padding are returned as well


def test_processors_read_the_prompt_as_it_is() -> None:
    model = zoo.build("llama")
    options = {"max_new_tokens": 9, "no_repeat_ngram_size": 2, "repetition_penalty": 1.7}
    for padded in (False, True):
        assert_same(model, prompts(padded) | options)
        assert _common() == COMMON
        assert_same(model, prompts(padded) | options | {"prompt_lookup_num_tokens": 3})


@pytest.mark.parametrize("padded", [False, True])
def test_drafts_of_a_small_model(padded: bool) -> None:
    model, small = zoo.build("llama"), zoo.build("llama", seed=1)
    kwargs = prompts(padded) | {"max_new_tokens": 9}
    ours = model.generate(**kwargs, assistant_model=small, lossless=True)
    with fastgen.disabled():
        assert torch.equal(ours, model.generate(**kwargs))


def _gpt2() -> Any:
    return tf.GPT2LMHeadModel(
        tf.GPT2Config(
            vocab_size=zoo.VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=128,
            initializer_range=0.3, pad_token_id=zoo.PAD, bos_token_id=1, eos_token_id=zoo.EOS,
        )
    )  # fmt: skip


def _llama() -> Any:
    """Return a model with rotary positions and grouped key heads."""
    return tf.LlamaForCausalLM(
        tf.LlamaConfig(
            vocab_size=zoo.VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3,
            pad_token_id=zoo.PAD, bos_token_id=1, eos_token_id=zoo.EOS,
        )
    )  # fmt: skip


def _gptj() -> Any:
    """Return a model whose modules compute attention by themselves."""
    return tf.GPTJForCausalLM(
        tf.GPTJConfig(
            vocab_size=zoo.VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=128,
            rotary_dim=8, initializer_range=0.3, pad_token_id=zoo.PAD, bos_token_id=1,
            eos_token_id=zoo.EOS,
        )
    )  # fmt: skip


def _in_c(make: Callable[[], Any], dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return make().eval().to(dtype)


def _kept(model: Any, kwargs: dict[str, Any]) -> tuple[bool, float]:
    """Run a call; return whether it kept common tokens apart, and its share of stock's KV bytes."""
    model.generate(**kwargs)
    report = last_call()
    assert report is not None
    assert report.plan.common == COMMON
    return report.plan.apart, report.kv_bytes / report.stock_kv_bytes


IN_C: dict[str, dict[str, Any]] = {
    "one token": {"max_new_tokens": 1},
    "greedy": {"max_new_tokens": 12, "eos_token_id": [2, *range(4, 30)]},
    "samples": {"max_new_tokens": 8, "do_sample": True, "num_return_sequences": 2},
    "beams": {"max_new_tokens": 20, "num_beams": 3, "eos_token_id": [2, *range(4, 16)]},
    "processors": {"max_new_tokens": 8, "num_beams": 2, "no_repeat_ngram_size": 2},
    "steps of a stopping criterion": {"max_new_tokens": 8, "max_time": 1000.0},
}


@needs_c
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("method", IN_C)
@pytest.mark.parametrize("make", [_gpt2, _llama, _gptj])
def test_one_copy_of_keys_and_values(make: Callable[[], Any], method: str, padded: bool) -> None:
    model, kwargs = _in_c(make), prompts(padded) | IN_C[method]
    rows = kwargs.get("num_return_sequences", kwargs.get("num_beams", 1))
    for _ in range(2):  # the first call compares a step with the modules
        torch.manual_seed(0)
        ours = model.generate(**kwargs)
        report = last_call()
        assert report is not None
        assert (report.plan.common, report.plan.apart) == (COMMON, True)
        # The common tokens once, and at most all other slots of each row.
        most = COMMON + SENTENCES * (OWN + rows * kwargs["max_new_tokens"])
        slot = report.stock_kv_bytes / (SENTENCES * rows * (COMMON + OWN))
        assert report.kv_bytes <= slot * most
        torch.manual_seed(0)
        with fastgen.disabled():
            assert torch.equal(ours, model.generate(**kwargs))


@needs_c
@pytest.mark.parametrize("beams", [1, 3])
def test_explain_predicts_the_bytes(beams: int) -> None:
    model = _in_c(_gpt2)
    kwargs = prompts(padded=False) | {"num_beams": beams, "max_new_tokens": 8, "min_length": 200}
    explanation = fastgen.explain(model, **kwargs)
    assert f"the first {COMMON} tokens, alike in all, run and are kept once" in str(explanation)
    model.generate(**kwargs)
    report = last_call()
    assert report is not None
    assert report.kv_bytes == explanation.kv_bytes
    assert report.stock_kv_bytes == explanation.stock_kv_bytes


@needs_c
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """The first call's equivalence check runs torch operations, which read a copy per sentence."""
    model, kwargs = _in_c(_gpt2, dtype), prompts(padded=True) | {"max_new_tokens": 8}
    assert [_kept(model, kwargs)[0] for _ in range(2)] == [False, True]
    apart = model.generate(**kwargs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common_prompt, "is_kept_apart", lambda *_: False)
        assert torch.equal(apart, model.generate(**kwargs))  # the same sums in the same order


@needs_c
def test_other_readers_have_a_copy_per_sentence() -> None:
    model = _in_c(_llama)
    kwargs = prompts(padded=True) | {"max_new_tokens": 9}
    with fastgen.disabled():
        stock = model.generate(**kwargs)
    # Drafts are verified over several successive tokens, and bounded drafts by a small model.
    for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": _in_c(_llama)}):
        extra = {"lossless": True} if "assistant_model" in options else {}
        for _ in range(2):
            assert torch.equal(model.generate(**kwargs, **options, **extra), stock)
    returned = model.generate(
        **prompts(padded=False), max_new_tokens=3, return_dict_in_generate=True
    )
    assert returned[CACHE].layers[0].keys.shape[2] == COMMON + OWN + 2
    assert _planned(_in_c(_llama), **kwargs) == COMMON


@needs_c
@pytest.mark.parametrize("beams", [1, 3])
def test_a_step_that_differs_from_the_modules(beams: int) -> None:
    model = _in_c(_gpt2)
    kwargs = prompts(padded=True) | {"max_new_tokens": 6, "num_beams": beams}
    with fastgen.disabled():
        stock = model.generate(**kwargs)
    with pytest.MonkeyPatch.context() as patch:
        name = "fastgen.patches.transformers.generate.shared_stepper.record_verdict"
        patch.setattr(name, lambda *_: "a reason")
        assert torch.equal(model.generate(**kwargs), stock)
    report = last_call()
    assert report is not None
    assert (report.plan.apart, report.plan.fused) == (False, False)


def test_equal_prompts() -> None:
    model, kwargs = zoo.build("gpt2"), prompts(padded=False)
    kwargs = {name: value[:1].expand(5, -1) for name, value in kwargs.items()}
    assert_same(model, kwargs | {"max_new_tokens": 5})
    assert _common() == COMMON + OWN - 1


def test_padding_of_every_row() -> None:
    model, kwargs = zoo.build("gpt2"), prompts(padded=True)
    kwargs = {name: nn.functional.pad(value, (3, 0)) for name, value in kwargs.items()}
    assert_same(model, kwargs | {"max_new_tokens": 5})
    assert _common() == COMMON


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_position_ids_of_the_caller(family: str) -> None:
    model, kwargs = zoo.build(family), prompts(padded=False) | {"max_new_tokens": 5}
    positions = torch.arange(COMMON + OWN).expand(SENTENCES, -1) + 5
    assert_same(model, kwargs | {"position_ids": positions})
    assert _common() == COMMON
    positions = positions.clone()
    positions[2, COMMON - 3 :] += 2
    assert_same(model, kwargs | {"position_ids": positions})
    assert _common() == COMMON - 3


def test_modules_that_go_on_alone() -> None:
    """The model's own modules run all later steps over the same keys and values."""
    for padded in (False, True):
        for beams in (1, 3):
            model = zoo.build("llama")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    "fastgen.patches.transformers.generate.shared_stepper.record_verdict",
                    lambda *_: "a reason",
                )
                assert_same(model, prompts(padded) | {"max_new_tokens": 6, "num_beams": beams})
            report = last_call()
            assert report is not None
            assert (report.plan.common, report.plan.fused) == (COMMON, False)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("beams", [1, 3])
def test_captured_steps(
    beams: int, padded: bool, monkeypatch: pytest.MonkeyPatch, setting: Callable[[str, str], None]
) -> None:
    """On a pretended device, where CUDA graphs read a copy for every sentence."""
    setting("FASTGEN_OPS", "reference")
    model = zoo.build("llama", torch.float32)
    kwargs = prompts(padded) | {"num_beams": beams, "max_new_tokens": 24, "min_new_tokens": 24}
    with fastgen.disabled():
        expected = model.generate(**kwargs)
    Pretended(monkeypatch)
    model.to("cuda")
    fastgen.release()
    on_device = {k: v.to("cuda") if isinstance(v, Tensor) else v for k, v in kwargs.items()}
    for _ in range(2):
        assert model.generate(**on_device).tolist() == expected.tolist()
        report = last_call()
        assert report is not None
        plan = report.plan
        assert (plan.common, plan.apart, plan.graphs) == (COMMON, False, True)
    fastgen.release()


def _hooked(model: Any) -> dict[str, Any]:
    model.get_decoder().layers[0].register_forward_hook(lambda *_: None)
    return {}


def _in_training(model: Any) -> dict[str, Any]:
    model.config.attention_dropout = 0.1
    for layer in model.get_decoder().layers:
        layer.self_attn.attention_dropout = 0.1
    model.train()
    return {}


def _cache(model: Any) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompts(padded=False)["input_ids"][:, :3], **{CACHE: cache})
    return cache


REFUSED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "use_cache": lambda _: {"use_cache": False},
    "chunks": lambda _: {"prefill_chunk_size": 16},
    "a given cache": lambda model: {CACHE: _cache(model)},
    "embeddings": lambda model: {
        "inputs_embeds": model.get_input_embeddings()(prompts(padded=False)["input_ids"]).detach()
    },
    "hidden states": lambda _: {"return_dict_in_generate": True, "output_hidden_states": True},
    "attentions": lambda _: {"return_dict_in_generate": True, "output_attentions": True},
    "contrastive search": lambda _: {"penalty_alpha": 0.6, "top_k": 3},
    "one prompt": lambda _: {name: value[:1] for name, value in prompts(padded=False).items()},
    "few tokens": lambda _: prompts(padded=False, common=common_prefix.LEAST - 1),
    "a hook": _hooked,
    "dropout": _in_training,
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_runs_whole(case: str, forwards: list[tuple[int, ...]]) -> None:
    model = zoo.build("llama")
    kwargs = prompts(padded=False) | {"max_new_tokens": 6}
    assert _planned(model, **kwargs) == COMMON
    kwargs |= REFUSED[case](model)
    if "inputs_embeds" in kwargs:
        del kwargs["input_ids"]
    if case == "contrastive search":
        model.generate(**kwargs)
    else:
        assert_same(model, kwargs)
    assert not forwards


def test_padding_on_the_right_and_other_beginnings() -> None:
    model, kwargs = zoo.build("llama"), prompts(padded=False)
    other = {name: value.clone() for name, value in kwargs.items()}
    other["input_ids"][4, 20] += 1
    assert _planned(model, **other, max_new_tokens=6) == 0
    for place in (slice(-3, None), slice(COMMON + 1, COMMON + 3)):
        other = {name: value.clone() for name, value in kwargs.items()}
        other["attention_mask"][3, place] = 0
        assert _planned(model, **other, max_new_tokens=6) == 0
        assert_same(model, other | {"max_new_tokens": 6})


def test_one_new_token(setting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One new token alone is no reason for fastgen's loop; common tokens are."""
    model, kwargs = zoo.build("gpt2"), prompts(padded=False)
    explanation = fastgen.explain(model, **kwargs, max_new_tokens=1)
    assert explanation.plan is not None
    assert explanation.plan.shared
    assert f"the first {COMMON} tokens, alike in all, run once" in str(explanation)
    monkeypatch.setattr(common_prefix, "SAVED", 1 << 30)
    explanation = fastgen.explain(model, **kwargs, max_new_tokens=1)
    assert explanation.plan is not None
    assert not explanation.plan.shared
    assert "run once" not in str(explanation)
    assert_same(model, kwargs | {"max_new_tokens": 1})
    monkeypatch.setattr(common_prefix, "SAVED", 0)
    setting("FASTGEN_STEP", "module")  # nothing shows that the modules are plain
    explanation = fastgen.explain(model, **kwargs, max_new_tokens=1)
    assert explanation.plan is not None
    assert (explanation.plan.shared, explanation.plan.common) == (False, 0)
    assert explanation.notes[0].endswith("at most 1 new tokens, too few to gain")


# Groups of prompts that begin alike


@pytest.fixture
def _few_steps_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common_prefix, "APART", 0)


def _in_groups(padded: bool) -> dict[str, Tensor]:
    """Return the prompts of two groups and two others, one after the other."""
    each = [prompts(padded, seed=seed) for seed in range(4)]
    order = [(0, 0), (1, 0), (0, 1), (2, 0), (0, 2), (1, 1), (3, 3), (1, 2), (0, 3)]
    return {name: torch.stack([each[group][name][row] for group, row in order]) for name in each[0]}


NOTE = "prompts begin alike in 3 groups"


def _noted() -> int:
    (row,) = (row for row in fastgen.status().rows if row.name == "transformers.generate")
    return row.left_off.get(NOTE, 0)


@pytest.mark.usefixtures("_few_steps_pay")
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 9, "eos_token_id": [2, *range(4, 30)]},
        {"max_new_tokens": 7, "num_beams": 3, "num_return_sequences": 2},
        {"max_new_tokens": 6, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    ],
)
def test_groups(padded: bool, options: dict[str, Any], forwards: list[tuple[int, ...]]) -> None:
    model, before = zoo.build("llama"), _noted()
    assert_same(model, _in_groups(padded) | options)
    assert _noted() == before + 1
    assert forwards == [(1, COMMON), (4, OWN), (1, COMMON), (3, OWN)]


@pytest.mark.usefixtures("_few_steps_pay")
def test_groups_of_other_calls() -> None:
    model, before, given = zoo.build("llama"), _noted(), _in_groups(padded=True)
    more = {"max_new_tokens": 5}
    assert_same(model, given | more | {"return_dict_in_generate": True, "output_scores": True})
    assert_same(model, given | more | {"do_sample": True})
    assert _noted() == before
    ids = given.pop("input_ids")
    ours = model.generate(ids, **given, **more)  # by position
    assert _noted() == before + 1
    with fastgen.disabled():
        assert torch.equal(ours, model.generate(ids, **given, **more))


@pytest.mark.usefixtures("_few_steps_pay")
def test_groups_of_a_stream(forwards: list[tuple[int, ...]]) -> None:
    model, given = zoo.build("llama"), _in_groups(padded=True)
    texts = [
        ids[mask.bool()]
        for ids, mask in zip(given["input_ids"], given["attention_mask"], strict=True)
    ]
    options = {"max_new_tokens": 6, "num_beams": 2}
    told: dict[int, list[int]] = {}
    found = list(
        fastgen.generate_stream(
            model, texts, on_tokens=lambda i, ids: told.setdefault(i, []).extend(ids), **options
        )
    )
    assert sorted(forwards) == sorted([(1, COMMON), (4, OWN), (1, COMMON), (3, OWN)])
    for number, (text, sequences) in enumerate(zip(texts, found, strict=True)):
        with fastgen.disabled():
            alone = model.generate(
                text[None], attention_mask=torch.ones_like(text[None]), **options
            )
        assert torch.equal(sequences, alone)
        assert told[number] == alone[0, len(text) :].tolist()


def test_which_prompts_are_groups() -> None:
    first, second = [list(range(start, start + 64)) for start in (100, 200)]
    texts = [[*first, 1], [*second, 2], [*first, 3], [9] * 65, [*second[:40], 5]]
    assert common_prefix.groups(texts, 1, 4096) == [[0, 2], [1, 4], [3]]
    assert common_prefix.groups(texts, 2, 4096) == [[0, 2], [1, 3, 4]]  # 40 tokens for 2 steps
    assert common_prefix.groups(texts, 3, 4096) == []
    assert common_prefix.groups(texts[::2][:2], 1, 4096) == []  # all begin alike
    assert common_prefix.groups([text[:30] for text in texts], 1, 4096) == []
