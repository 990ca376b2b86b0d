"""Greedy steps whose logits an int8 copy of the head bounds change nothing but the time."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fastgen
from fastgen import config
from fastgen.models.memory import budget
from fastgen.models.runtime import head_bounds
from fastgen.models.runtime.head_bounds import HeadUse
from fastgen.models.state import state_of
from fastgen.ops import logit_bounds, processor
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

NEED_ALL = (
    "repetition_penalty", "sequence_bias", "return_dict_in_generate", "output_scores",
    "output_logits",
)  # fmt: skip
"""Options of calls that need all logits."""

Mode = Callable[[str], None]


@pytest.fixture
def mode(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mode]:
    """Return a function that sets FASTGEN_INT8_HEAD; nothing else drafts."""
    monkeypatch.setenv("FASTGEN_SELF_DRAFT", "off")

    def setting(value: str) -> None:
        monkeypatch.setenv("FASTGEN_INT8_HEAD", value)
        config.reload()

    yield setting
    monkeypatch.undo()
    config.reload()


def _counts(model: Any) -> list[int]:
    return state_of(model.get_output_embeddings()).of(HeadUse).counts.tolist()


def _llama() -> tuple[Any, dict[str, Any]]:
    model = zoo.build("llama", seed=3).float()
    return model, {
        "input_ids": torch.arange(4, 12)[None], "max_new_tokens": 12, "eos_token_id": None,
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_fuzz(
    variant: str, mode: Mode, family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    """Tokens, scores and logits are the same, with processors, padding and several texts."""
    monkeypatch.setattr(logit_bounds, "LEAST_MOST", 60)
    model = built(family, dtype)
    for seed in range(16):
        call, make = drawn_call(model, random.Random(seed))
        objects = make if seed % 3 == 0 else dict
        if seed % 3:
            call = {name: value for name, value in call.items() if name not in NEED_ALL}
        mode("off")
        wanted = model.generate(**call, **objects())
        mode("on")
        assert same(wanted, model.generate(**call, **objects())), (seed, call)
    eligible, tried, missed = _counts(model)
    assert eligible >= tried > 2 * missed
    assert tried > 30, (eligible, tried)


@torch.no_grad()
def test_auto_bounds_where_the_head_is_read_from_memory(
    variant: str, mode: Mode, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    model, call = _llama()
    mode("auto")
    wanted = model.generate(**call)
    model.generate(**call)
    assert _counts(model) == [0, 0, 0]  # the weights fit into any cache
    monkeypatch.setattr(processor, "last_level_cache", lambda: 0)
    assert torch.equal(model.generate(**call), wanted)
    eligible, tried, _ = _counts(model)
    assert eligible > 0
    assert tried == 0  # a copy is not worth it yet
    assert not fastgen.status().memory["int8 weights"]
    monkeypatch.setattr(head_bounds, "WORTH", 0)
    assert torch.equal(model.generate(**call), wanted)
    assert _counts(model)[1] > 0
    assert fastgen.status().memory["int8 weights"]
    assert fastgen.status().memory["int8 error bounds"] == 4 * model.config.vocab_size
    monkeypatch.setattr(head_bounds, "LEAST_SHARE", 1.0)
    before = _counts(model)
    assert torch.equal(model.generate(**call), wanted)
    assert _counts(model) == before
    fastgen.release()
    assert not fastgen.status().memory["int8 weights"]
    assert not fastgen.status().memory["int8 error bounds"]


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "top_k": 5},
        {"num_beams": 2},
        {"repetition_penalty": 1.3},
        {"return_dict_in_generate": True, "output_logits": True},
        {"return_dict_in_generate": True, "output_scores": True},
    ],
    ids=str,
)
@torch.no_grad()
def test_calls_that_need_all_logits(
    variant: str, mode: Mode, options: dict[str, Any]  # noqa: F811
) -> None:  # fmt: skip
    model, call = _llama()
    mode("on")
    for _ in range(3):
        torch.manual_seed(0)
        model.generate(**call, **options)
    assert _counts(model) == [0, 0, 0]
    assert not fastgen.status().memory["int8 weights"]


@torch.no_grad()
def test_where_it_is_off(variant: str, mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    model, call = _llama()
    ids = call["input_ids"]
    mode("off")
    model.generate(**call)
    mode("on")
    rows = head_bounds.MOST_ROWS
    model.generate(**call | {"input_ids": ids.repeat(rows + 1, 1)})
    monkeypatch.setenv("FASTGEN_PRECISION", "int8")
    mode("on")
    model.generate(**call)
    assert _counts(model) == [0, 0, 0]
    monkeypatch.delenv("FASTGEN_PRECISION")
    mode("on")
    model.generate(**call | {"input_ids": ids.repeat(rows, 1)})
    assert _counts(model)[0] > 0


@torch.no_grad()
def test_too_little_memory(
    variant: str, mode: Mode, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    model, call = _llama()
    mode("off")
    wanted = model.generate(**call)
    mode("on")
    monkeypatch.setattr(budget, "shortage_now", lambda needed: "too little memory")
    for _ in range(3):
        assert torch.equal(model.generate(**call), wanted)
    eligible, tried, _ = _counts(model)
    assert eligible > 0
    assert tried == 0
    assert not fastgen.status().memory["int8 weights"]
    assert "not packed" not in str(fastgen.status())


@torch.no_grad()
def test_a_changed_head(variant: str, mode: Mode) -> None:  # noqa: F811
    """The copy and its bounds follow the head, whichever way it changes."""
    model, call = _llama()
    head = model.get_output_embeddings()
    mode("on")
    for change in (
        lambda: head.weight.mul_(-1.0),
        lambda: head.weight.data.copy_(head.weight.data.flip(0)),
        lambda: setattr(head, "weight", torch.nn.Parameter(head.weight.flip(1))),
        lambda: None,
    ):  # fmt: skip
        for _ in range(3):
            found = model.generate(**call)
        assert _counts(model)[1] > _counts(model)[2]
        mode("off")
        assert torch.equal(model.generate(**call), found)
        mode("on")
        change()


@torch.no_grad()
def test_explain(variant: str, mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    model, call = _llama()

    def is_noted(**options: Any) -> bool:
        return any(
            "rules most tokens out" in n for n in fastgen.explain(model, **call, **options).notes
        )

    mode("on")
    assert is_noted()
    assert not is_noted(do_sample=True)
    assert not is_noted(num_beams=2)
    mode("off")
    assert not is_noted()
    mode("auto")
    assert not is_noted()
    monkeypatch.setattr(processor, "last_level_cache", lambda: 0)
    assert is_noted()


@torch.no_grad()
def test_beside_own_drafts(variant: str, mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Both use one copy of the head."""
    model, call = _llama()
    mode("off")
    wanted = model.generate(**call)
    monkeypatch.setenv("FASTGEN_SELF_DRAFT", "on")
    mode("on")
    assert torch.equal(model.generate(**call), wanted)
    held = fastgen.status().memory["int8 weights"]
    monkeypatch.setenv("FASTGEN_SELF_DRAFT", "off")
    mode("on")
    for _ in range(2):
        assert torch.equal(model.generate(**call), wanted)
    assert _counts(model)[1] > 0
    assert fastgen.status().memory["int8 weights"] == held
