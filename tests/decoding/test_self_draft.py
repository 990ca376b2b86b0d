"""A model's own drafts on int8 weights change nothing but the time."""

import gc
import random
import weakref
from argparse import Namespace
from typing import Any

import pytest
import torch

import fastgen
from benchmarks import self_draft
from benchmarks.widen import widened
from fastgen import config
from fastgen.decoding.backends.drafted_sampling import Drafting
from fastgen.decoding.search import multinomial
from fastgen.decoding.speculative.adaptive_drafting import DraftTiming
from fastgen.decoding.speculative.draft_length import DraftLength
from fastgen.decoding.speculative.drafts import PromptLookup
from fastgen.models.layers.linear import is_linear
from fastgen.models.memory import budget
from fastgen.ops import int8, processor
from fastgen.patches.transformers.drafting import drafting as own_drafting
from fastgen.patches.transformers.generate.shared_stepper import SharedStepper
from tests.models.test_in_c import _wide  # noqa: F401  a fixture: heads that C can attend with
from tests.ops.test_native import own_variant as variant  # noqa: F401  a fixture
from tests.support import zoo
from tests.support.greedy_calls import (
    FAMILIES,
    built,
    drawn_call,
    products_in_c,  # noqa: F401  a fixture
    same,
)


@pytest.fixture
def mode(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets FASTGEN_SELF_DRAFT."""

    def setting(value: str) -> None:
        monkeypatch.setenv("FASTGEN_SELF_DRAFT", value)
        config.reload()

    yield setting
    monkeypatch.undo()
    config.reload()


def _counts() -> dict[str, int]:
    return dict(fastgen.status().bild)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_fuzz(variant: str, mode: Any, family: str, dtype: torch.dtype) -> None:  # noqa: F811
    model = built(family, dtype)
    before = _counts().get("tokens_accepted", 0)
    for seed in range(12):
        call, objects = drawn_call(model, random.Random(seed))
        mode("off")
        wanted = model.generate(**call, **objects())
        mode("on")
        assert same(wanted, model.generate(**call, **objects())), (seed, call)
        lookup = call | {"prompt_lookup_num_tokens": 3}
        assert same(wanted, model.generate(**lookup, **objects())), (seed, call)
    assert _counts()["tokens_accepted"] - before > 30


@torch.no_grad()
def test_auto_drafts_where_weights_are_read_from_memory(
    variant: str, mode: Any, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    model = zoo.build("llama", seed=3).float()
    ids = torch.randint(4, 40, (1, 6), generator=torch.Generator().manual_seed(1))
    call = {"input_ids": ids, "max_new_tokens": 60, "eos_token_id": None}
    made = list[Drafting | None]()
    own = own_drafting.drafting_of

    def drafting_of(*args: Any) -> Drafting | None:
        made.append(own(*args))
        return made[-1]

    from fastgen.patches.transformers.generate import generate

    monkeypatch.setattr(generate, "drafting_of", drafting_of)
    mode("auto")
    wanted = model.generate(**call)
    assert made == [None]  # the weights fit into any cache
    monkeypatch.setattr(processor, "last_level_cache", lambda: 0)
    before = _counts()
    assert torch.equal(model.generate(**call), wanted)
    assert made[-1] is not None
    assert made[-1].draft is None  # first the clock
    assert made[-1].steps > 0
    assert _counts() == before
    for _ in range(40):
        assert torch.equal(model.generate(**call), wanted)
    last = made[-1]
    assert last is not None
    assert last.draft is not None
    assert model.generate(**call, prompt_lookup_num_tokens=3).equal(wanted)
    assert made[-1] is not None
    assert isinstance(made[-1].draft, PromptLookup)
    batch = call | {"input_ids": ids.expand(5, -1)}
    model.generate(**batch)
    assert made[-1] is None
    mode("off")
    model.generate(**call)
    assert made[-1] is None


@torch.no_grad()
def test_explain(variant: str, mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    model = zoo.build("llama", seed=3).float()
    call = {"input_ids": torch.arange(4, 12)[None], "max_new_tokens": 9}
    mode("on")
    explanation = fastgen.explain(model, **call)
    assert explanation.selection == "after each pass over a draft"
    assert any("drafts by itself" in note for note in explanation.notes)
    mode("off")
    assert fastgen.explain(model, **call).selection == "in C, many decode steps per call"
    mode("auto")
    monkeypatch.setattr(processor, "last_level_cache", lambda: 0)
    assert any("drafts by itself" in note for note in fastgen.explain(model, **call).notes)
    lookup = fastgen.explain(model, **call, prompt_lookup_num_tokens=3)
    assert not any("drafts by itself" in note for note in lookup.notes)


@torch.no_grad()
def test_a_call_frees_its_cache(variant: str, mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """The stepper, which has the keys and values, is in no cycle of references."""
    model = zoo.build("llama", seed=3).float()
    call = {"input_ids": torch.arange(4, 12)[None], "max_new_tokens": 9, "eos_token_id": None}
    steppers = list[weakref.ref[SharedStepper]]()
    own = SharedStepper.verify

    def verify(self: SharedStepper, *args: Any) -> Any:
        steppers.append(weakref.ref(self))
        return own(self, *args)

    monkeypatch.setattr(SharedStepper, "verify", verify)
    mode("on")
    gc.disable()
    try:
        model.generate(**call)
        assert steppers
        assert steppers[-1]() is None
    finally:
        gc.enable()


@torch.no_grad()
def test_too_little_memory_for_all_copies(
    variant: str, mode: Any, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    """Where only some copies fit, none is made, and nothing is drafted."""
    model = zoo.build("llama", seed=3).float()
    call = {"input_ids": torch.arange(4, 12)[None], "max_new_tokens": 9, "eos_token_id": None}
    mode("off")
    wanted = model.generate(**call)
    fastgen.release()
    mode("on")
    size = sum(
        int8.bytes_to_pack(*each.weight.shape) for each in model.modules() if is_linear(each)
    )

    def shortage(needed: int) -> str | None:
        held = budget.held_bytes()["int8 weights"]
        return "too little memory" if held + needed >= size else None

    monkeypatch.setattr(budget, "shortage_now", shortage)
    before = _counts()
    assert torch.equal(model.generate(**call), wanted)
    assert _counts() == before
    assert not fastgen.status().memory["int8 weights"]
    assert not any("drafts by itself" in note for note in fastgen.explain(model, **call).notes)


def test_the_total_while_another_thread_adds_a_number_of_texts() -> None:
    known = own_drafting.SelfDrafts()

    class Other(DraftTiming):
        def __getattribute__(self, name: str) -> Any:
            if name == "total":
                known.of(64, False)
            return super().__getattribute__(name)

    known.by_texts[1, False] = Other(), DraftLength(4)
    known.of(2, False)
    assert known.total == 0.0


@torch.no_grad()
def test_a_widened_model_computes_thesame() -> None:
    model = zoo.build("marian", seed=3).float()
    ids = torch.randint(4, 40, (2, 7), generator=torch.Generator().manual_seed(1))
    wide = widened(model, 3)
    assert wide.num_parameters() > 4 * model.num_parameters()
    wanted = model(input_ids=ids, decoder_input_ids=ids).logits
    found = wide(input_ids=ids, decoder_input_ids=ids).logits
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)


@torch.no_grad()
def test_the_benchmark_counts_calls_without_drafts(mode: Any) -> None:
    mode("off")  # the benchmark sets it too, and the fixture restores it
    model = zoo.build("marian", seed=3).float()
    ids = torch.randint(4, 40, (1, 7), generator=torch.Generator().manual_seed(1))
    batches = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}]
    cell = self_draft._cell(model, batches, Namespace(rounds=1, mode="auto", prompt_lookup=None))
    assert cell["counts"] == {"tokens_drafted": 0, "tokens_accepted": 0, "passes": 0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["marian", "llama"])
@torch.no_grad()
def test_samples(variant: str, mode: Any, family: str, dtype: torch.dtype) -> None:  # noqa: F811
    """The tokens, and the state of the generator afterwards, are those without drafts."""
    model = built(family, dtype)
    before = _counts()
    for seed in range(12):
        draw = random.Random(seed)
        call, objects = drawn_call(model, draw)
        call |= {"do_sample": True, "temperature": draw.choice([0.5, 1.0, 1.7])}
        call |= draw.choice([{}, {"top_k": 0}, {"top_p": 0.8, "min_p": 0.1}, {"typical_p": 0.7}])
        found = []
        for value in ("off", "on"):
            mode(value)
            torch.manual_seed(seed)
            found.append((model.generate(**call, **objects()), torch.rand(1)))
        assert same(found[0][0], found[1][0]), (seed, call)
        assert torch.equal(found[0][1], found[1][1]), (seed, call)
    after = _counts()
    drafted = after["tokens_drafted"] - before.get("tokens_drafted", 0)
    assert drafted > 60
    assert after["tokens_accepted"] - before.get("tokens_accepted", 0) > drafted / 3


@torch.no_grad()
def test_no_draft_while_another_thread_samples(variant: str, mode: Any) -> None:  # noqa: F811
    model = built("llama", torch.float32)
    call = {"input_ids": torch.arange(4, 12)[None], "max_new_tokens": 9, "eos_token_id": None}
    mode("on")
    before = _counts()
    other = multinomial.GeneratorUser()
    other.thread = -1
    torch.manual_seed(0)
    while_other = model.generate(**call, do_sample=True)
    assert other.thread == -1  # and still alive
    assert _counts() == before
    del other
    torch.manual_seed(0)
    assert torch.equal(model.generate(**call, do_sample=True), while_other)
    assert _counts() != before
