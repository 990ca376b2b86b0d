"""Calls of one or two new tokens of a tiny model run transformers' own code; others do not."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList

import fastgen
from fastgen import config
from fastgen.patches.transformers.generate.report import last_call
from fastgen.patches.transformers.planning import small_call
from tests.support import zoo

LIMITS = small_call.LIMITS  # before a fixture empties it


@pytest.fixture(autouse=True)
def _in_force(_small_calls: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_call, "LIMITS", dict(LIMITS))


def _skipped() -> int:
    return fastgen.status()["transformers.generate"].left_off.get(small_call.REASON, 0)


def _is_small(family: str, rows: int = 2, length: int = 6, **options: Any) -> bool:
    """Generate; return whether the call was left to transformers, as `explain` says, too."""
    model = copy.deepcopy(zoo.build(family))
    batch, before = zoo.batch(model, rows, length), _skipped()
    explained = fastgen.explain(model, **batch, **options)
    found = model.generate(**batch, **options)
    with fastgen.disabled():
        assert torch.equal(found, model.generate(**batch, **options))
    is_small = _skipped() > before
    assert is_small == (explained.reason == small_call.REASON)
    if not is_small:
        assert last_call() is not None
    return is_small


@pytest.mark.parametrize("family", ["bart", "t5", "gpt2", "llama"])
def test_few_tokens_of_a_tiny_model(family: str) -> None:
    assert _is_small(family, max_new_tokens=1)
    assert _is_small(family, max_new_tokens=2)
    assert not _is_small(family, max_new_tokens=3)


@pytest.mark.parametrize("family", ["bart", "gpt2"])
def test_options_of_the_generation_config(family: str) -> None:
    model = copy.deepcopy(zoo.build(family))
    model.generation_config.max_new_tokens = 1
    before = _skipped()
    model.generate(**zoo.batch(model, 2, 6))
    assert _skipped() == before + 1


def test_beams_count_where_each_encodes() -> None:
    assert _is_small("bart", max_new_tokens=1, num_beams=3)
    assert not _is_small("gpt2", max_new_tokens=1, num_beams=3)


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize(("family", "limit"), [("bart", "encoded"), ("gpt2", "prompted")])
def test_the_limits_count_elements(
    family: str, limit: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    elements = 2 * 6 * zoo.build(family).config.hidden_size
    for changed, is_small in (({limit: elements}, True), ({limit: elements - 1}, False)):
        monkeypatch.setitem(small_call.LIMITS, tokens, LIMITS[tokens]._replace(**changed))
        assert _is_small(family, max_new_tokens=tokens) == is_small


def test_the_limits_of_the_hidden_size(monkeypatch: pytest.MonkeyPatch) -> None:
    width = zoo.build("gpt2").config.hidden_size
    for changed, is_small in ((width, True), (width - 1, False)):
        monkeypatch.setitem(small_call.LIMITS, 1, LIMITS[1]._replace(width=changed))
        assert _is_small("gpt2", max_new_tokens=1) == is_small


def test_features_of_fastgen_are_served() -> None:
    """transformers refuses diverse beam search."""
    model = copy.deepcopy(zoo.build("bart"))
    before = _skipped()
    model.generate(
        **zoo.batch(model, 2, 6), max_new_tokens=1, num_beams=4, num_beam_groups=2,
        diversity_penalty=0.5,
    )  # fmt: skip
    assert _skipped() == before


def test_features_of_fastgen_are_served_within_a_small_call() -> None:
    """A logits processor runs diverse beam search of another model."""
    model, other = (copy.deepcopy(zoo.build(family)) for family in ("gpt2", "bart"))
    options: dict[str, Any] = {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}
    calls: list[Any] = []

    def calling(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls.append(other.generate(**zoo.batch(other, 2, 6), max_new_tokens=5, **options))
        return scores

    model.generate(
        **zoo.batch(model, 2, 6),
        max_new_tokens=1,
        logits_processor=LogitsProcessorList([calling]),  # pyright: ignore[reportArgumentType]
    )
    assert calls


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor])
def test_first_tokens_of_sentences_are_checked(kind: Callable[[list[int]], Any]) -> None:
    """Three tokens divide the rows of two sentences with three beams, but belong to no sentence."""
    model = copy.deepcopy(zoo.build("bart"))
    for tokens, beams in ([5, 6, 7], 3), ([5, 10**6], 1):
        with pytest.raises(ValueError, match=r"forced_bos_token_id has"):
            model.generate(
                **zoo.batch(model, 2, 6), max_new_tokens=1, num_beams=beams,
                forced_bos_token_id=kind(tokens),
            )  # fmt: skip


def test_int8_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(zoo.build("gpt2")).float()
    monkeypatch.setenv("FASTGEN_PRECISION", "int8")
    config.reload()
    try:
        before = _skipped()
        model.generate(**zoo.batch(model, 2, 6), max_new_tokens=1)
        assert _skipped() == before
    finally:
        monkeypatch.undo()
        config.reload()


def test_strict_mode_accepts_small_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTGEN_STRICT", "1")
    config.reload()
    try:
        assert _is_small("gpt2", max_new_tokens=1)
    finally:
        monkeypatch.undo()
        config.reload()
