"""A short first call of a model does not pack its weights; any other call does."""

import copy
from typing import Any

import pytest
import torch

import fastgen
from fastgen.ops import native
from fastgen.patches.transformers.generate.report import last_call
from fastgen.patches.transformers.planning import first_call
from tests.support import zoo

REASON = "the first call of this model is short"

needs_c = pytest.mark.skipif(native.library() is None, reason="operations in C are off")


def _model(family: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(first_call, "_HEAVY", 1)
    return copy.deepcopy(zoo.build(family)).float()


def _run(model: Any, rows: int = 1, **options: Any) -> tuple[bool, bool]:
    """Generate; return whether the steps were fused, and whether the reason was the first call."""
    batch = zoo.batch(model, rows, 6)
    found = model.generate(**batch, **options)
    report = last_call()
    assert report is not None
    with fastgen.disabled():
        assert torch.equal(found, model.generate(**batch, **options))
    return report.plan.fused, any(REASON in why for why in report.plan.left_off)


@needs_c
@pytest.mark.parametrize("options", [{"max_new_tokens": 5}, {"max_new_tokens": 8, "num_beams": 3}])
@pytest.mark.parametrize("family", ["bart", "gpt2", "llama"])
def test_the_second_call_packs(
    family: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model(family, monkeypatch)
    explained = fastgen.explain(model, **zoo.batch(model, 1, 6), **options)
    assert REASON in str(explained)
    assert _run(model, **options) == (False, True)
    assert _run(model, **options) == (True, False)


@needs_c
@pytest.mark.parametrize(
    ("rows", "options"), [(1, {"max_new_tokens": 9}), (5, {"max_new_tokens": 4})]
)
def test_longer_calls_pack_at_once(
    rows: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _run(_model("llama", monkeypatch), rows, **options) == (True, False)


def test_small_models_pack_at_once() -> None:
    assert _run(copy.deepcopy(zoo.build("llama")).float(), max_new_tokens=5) == (True, False)
