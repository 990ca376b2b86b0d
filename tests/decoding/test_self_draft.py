"""A model's own drafts on int8 weights change nothing but the time."""

import random
from typing import Any

import pytest
import torch

import fastgen
from benchmarks.widen import widened
from fastgen import config
from fastgen.decoding.backends.drafted_greedy import Drafting
from fastgen.ops import processor
from fastgen.patches.transformers.drafting import drafting as own_drafting
from tests.decoding.test_drafted_greedy import (  # noqa: F401  fixtures
    FAMILIES,
    _objects,
    _options,
    _products_in_c,
    _same,
)
from tests.models.test_in_c import _wide  # noqa: F401  a fixture: heads that C can attend with
from tests.ops.test_native import own_variant as variant  # noqa: F401  a fixture
from tests.support import zoo


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
    model = zoo.build(family, seed=3).to(dtype)
    before = _counts().get("tokens_accepted", 0)
    for seed in range(12):
        draw = random.Random(seed)
        texts = draw.choice([1, 1, 2, 4])
        ids = torch.randint(
            4, 40, (texts, draw.randint(3, 9)), generator=torch.Generator().manual_seed(seed)
        )
        mask = torch.ones_like(ids)
        if texts > 1:
            at = 0 if not model.config.is_encoder_decoder else -1
            mask[1, at], ids[1, at] = 0, zoo.PAD
        call = {"input_ids": ids, "attention_mask": mask, **_options(draw)}
        odd, stop = draw.random() < 0.3, draw.random() < 0.3
        mode("off")
        wanted = model.generate(**call, **_objects(odd, stop))
        mode("on")
        assert _same(wanted, model.generate(**call, **_objects(odd, stop))), (seed, call)
        lookup = call | {"prompt_lookup_num_tokens": 3}
        assert _same(wanted, model.generate(**lookup, **_objects(odd, stop))), (seed, call)
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
    assert torch.equal(model.generate(**call), wanted)
    assert made[-1] is not None
    assert made[-1].waits or made[-1].steps > 0  # first the clock
    for _ in range(40):
        assert torch.equal(model.generate(**call), wanted)
    last = made[-1]
    assert last is not None
    assert not last.waits
    batch = call | {"input_ids": ids.expand(5, -1)}
    model.generate(**batch)
    assert made[-1] is None
    mode("off")
    model.generate(**call)
    assert made[-1] is None


@torch.no_grad()
def test_explain(variant: str, mode: Any) -> None:  # noqa: F811
    model = zoo.build("llama", seed=3).float()
    call = {"input_ids": torch.arange(4, 12)[None], "max_new_tokens": 9}
    mode("on")
    explanation = fastgen.explain(model, **call)
    assert explanation.selection == "after each pass over a draft"
    assert any("drafts by itself" in note for note in explanation.notes)
    mode("off")
    assert fastgen.explain(model, **call).selection == "in C, many decode steps per call"


@torch.no_grad()
def test_a_widened_model_computes_the_same() -> None:
    model = zoo.build("marian", seed=3).float()
    ids = torch.randint(4, 40, (2, 7), generator=torch.Generator().manual_seed(1))
    wide = widened(model, 3)
    assert wide.num_parameters() > 4 * model.num_parameters()
    wanted = model(input_ids=ids, decoder_input_ids=ids).logits
    found = wide(input_ids=ids, decoder_input_ids=ids).logits
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)
