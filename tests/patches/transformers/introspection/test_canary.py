"""Check the canary of transformers.

A difference is found in its part and leaves the other parts accelerated.
"""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastgen.patches.transformers import CACHES, PATCHES, compat, part_of
from fastgen.patches.transformers.generate import searches, shared_stepper
from fastgen.patches.transformers.introspection import canary

ROOT = Path(__file__).parents[4]
BEAM_SAMPLING = {part_of("beam sampling", True), part_of("beam sampling", False)}


def differing() -> dict[str, str]:
    """Return the parts that differ, with descriptions of the differences."""
    return {name: found for name, part in canary.parts().items() if (found := part()) is not None}


def test_all_parts_agree() -> None:
    assert differing() == {}
    equal, said = canary.agree()
    assert equal, said
    assert said == "BART and GPT-2: 9 parts agree"


def test_every_part_of_a_patch_is_tried() -> None:
    assert {part for patch in PATCHES for part in patch.parts} | {CACHES} == set(canary.parts())


def _order_of_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(compat.INSTALLED, ranks_drawn_beams=not compat.INSTALLED.ranks_drawn_beams)
    monkeypatch.setattr(compat, "INSTALLED", other)


def _no_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searches, "transforms_of", lambda *_: [])


def _another_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    stepper = shared_stepper.SharedStepper.step

    def step(self: shared_stepper.SharedStepper, ids: torch.Tensor) -> torch.Tensor:
        if self.plan.method == "sampling":
            torch.rand(1)
        return stepper(self, ids)

    monkeypatch.setattr(shared_stepper.SharedStepper, "step", step)


def _nothing_is_handed_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_stock(self: object) -> object:
        return self.stock  # pyright: ignore[reportAttributeAccessIssue]

    monkeypatch.setattr(
        "fastgen.patches.transformers.cache.shared_cache.SharedCache.as_stock", as_stock
    )


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (_order_of_draws, BEAM_SAMPLING),
        (_no_processors, {part_of("beam search", True), part_of("beam search", False)}),
        (_another_seed, {part_of("sampling", True), part_of("sampling", False)}),
        (_nothing_is_handed_back, {CACHES}),
    ],
)
def test_a_difference_is_found_where_it_is(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None], parts: set[str]
) -> None:
    change(monkeypatch)
    found = differing()
    assert set(found) == parts
    for name, said in found.items():
        kind = (
            "BartFor" if "encoder-decoder" in name else "GPT2LM" if "decoder-only" in name else ""
        )
        assert kind in said, said


NEWER = """
    import warnings
    import fastgen  # with FASTGEN=0
    from dataclasses import replace
    from fastgen.patches.transformers import TOOLKIT, compat
    object.__setattr__(TOOLKIT, "tested", "5.1.0")
    other = replace(compat.INSTALLED, ranks_drawn_beams=not compat.INSTALLED.ranks_drawn_beams)
    compat.INSTALLED = other
    fastgen.enable()
    from tests.support import zoo
    model = zoo.build("bart")
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", fastgen.FastgenWarning)
        for options in ({}, {"num_beams": 3}, {"num_beams": 3, "do_sample": True}, {"num_beams": 3, "do_sample": True}):
            model.generate(**zoo.batch(model, 2, 6), **options, max_new_tokens=4)
    said = [str(each.message) for each in heard if each.category is fastgen.FastgenWarning]
    print(len(said), said[0])
    for group in fastgen.status().calls:
        print(group.method, group.accelerated + group.partly, group.not_accelerated)
    print(fastgen.status()["transformers.beam_search"].state)
"""  # noqa: E501


@pytest.mark.slow
def test_on_a_newer_version_what_differs_steps_aside_and_says_so(tmp_path: Path) -> None:
    environment = os.environ | {
        "FASTGEN": "0",
        "FASTGEN_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(ROOT),
    }
    if "PYTHONPATH" in os.environ:
        environment["PYTHONPATH"] += os.pathsep + os.environ["PYTHONPATH"]
    for _ in range(2):  # the second process reads the cached result of the first
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(NEWER)],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        warning, *calls, state = done.stdout.splitlines()
        assert warning.startswith(
            "1 fastgen leaves beam sampling of encoder-decoder models to transformers 5."
        )
        assert "beam sampling of BartForConditionalGeneration gave other tokens" in warning
        assert calls == ["greedy search 1 0", "beam search 1 0", "beam sampling 0 2"]
        assert state == "applied"
    (file,) = tmp_path.glob("canary-*.json")
    assert "beam sampling of GPT2LMHeadModel gave other tokens" in file.read_text("utf-8")
