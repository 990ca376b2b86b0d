"""Check extreme length penalties: C and torch give stock's output, or its error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fastgen.decoding.search.finishing_rules import TransformersRule
from fastgen.ops import native
from fastgen.ops.counts import calls
from tests.models.test_in_c import _wide  # noqa: F401  a fixture for all
from tests.support import zoo
from tests.support.parity import assert_same

PENALTIES = (-1e3, -10.0, -4.0, -1.0, 0.0, 4.0, 10.0, 1e3)


@pytest.mark.parametrize("early", [False, True, "never"])
@pytest.mark.parametrize("eos", [None, [2, 7]], ids=["endless", "ending"])
@pytest.mark.parametrize("beams", [2, 5])
@pytest.mark.parametrize("by", ["native", "reference"])
@pytest.mark.parametrize("penalty", PENALTIES)
def test_as_stock(
    penalty: float,
    by: str,
    beams: int,
    eos: list[int] | None,
    early: Any,
    setting: Callable[[str, str], None],
) -> None:
    """Generate 60 tokens; 60^4 exceeds 1e9 divided by a typical score."""
    if by == "native" and native.found().library is None:
        pytest.skip(str(native.found().reason))
    setting("FASTGEN_OPS", by)
    calls.clear()
    model = zoo.build("gpt2", torch.float32)
    call = zoo.batch(model, 2, 5) | {"num_beams": beams, "max_new_tokens": 60, "eos_token_id": eos}
    kwargs = call | {"length_penalty": penalty, "early_stopping": early}
    found = assert_same(model, kwargs, tolerance=1e-4)
    assert found.error is None or (penalty == 1e3 and isinstance(found.error, OverflowError))
    assert (calls["kbest", "native"] > 0) == (by == "native")


@pytest.mark.parametrize(
    ("penalty", "longest", "apart"),
    [
        (1.0, 1000, True), (0.0, 10**6, True), (10.0, 120, True), (1e3, 120, False), (1e3, 1, True),
        (-1.0, 120, True), (-1.0, 10**5, False), (-4.0, 5, True), (-4.0, 120, False),
        (-1e3, 120, False), (float("nan"), 9, False),
    ],
)  # fmt: skip
def test_whether_finished_hypotheses_rank_apart(penalty: float, longest: int, apart: bool) -> None:
    assert TransformersRule(4, 7 + longest, 7, 1, penalty, False).ranks_apart == apart
