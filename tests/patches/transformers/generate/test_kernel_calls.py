"""Check `generate` with the kernels.

They run in the interpreter without a GPU, and compiled with one (marker `gpu`).
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fastgen import config
from fastgen.ops import dispatch
from fastgen.ops.counts import calls
from tests.support import zoo
from tests.support.parity import assert_same
from tests.support.poison import poison

interpreted = pytest.mark.skipif(
    not dispatch.INTERPRETED, reason="kernels are compiled where there is a GPU"
)


@pytest.fixture(
    params=[pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("FASTGEN_OPS", "triton")
    config.reload()
    poison(monkeypatch)
    yield request.param
    monkeypatch.undo()
    config.reload()


CALLS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "beams": (
        {"num_beams": 3, "no_repeat_ngram_size": 2, "min_new_tokens": 4},
        {"kbest", "ngram_block", "cache"},
    ),
    "sequences": (
        {"num_beams": 4, "num_return_sequences": 2, "early_stopping": True}, {"kbest", "cache"}
    ),
    "processors": (
        {"num_beams": 2, "repetition_penalty": 1.3, "return_dict_in_generate": True}, {"kbest"}
    ),
    "changes": (
        {
            "num_beams": 3, "repetition_penalty": 1.4, "bad_words_ids": [[5], [6, 7], [8, 9, 10]],
            "forced_eos_token_id": 3,
        },
        {"kbest", "token_mask", "ngram_block"},
    ),
    "bias": ({"num_beams": 3, "sequence_bias": {(5,): 4.0, (9,): -3.0}}, {"kbest", "token_mask"}),
    "biases": (
        {"num_beams": 3, "sequence_bias": {(5,): 4.0, (9, 5): 3.0, (7, 8, 6): 5.0}}, {"kbest"}
    ),
    "greedy": ({"no_repeat_ngram_size": 2}, {"argmax", "ngram_block"}),
}  # fmt: skip
"""Options, and the operations whose kernels they need."""

FAMILIES = ("bart", "t5", "gpt2", "llama", "gemma2", "marian")
PAIRS = [
    (call, family)
    for call in CALLS
    for family in FAMILIES
    if call == "beams" or family in ("bart", "llama")
]
"""Every family runs one call, as token selection depends on logits only."""


@pytest.mark.parametrize(("call", "family"), PAIRS)
@pytest.mark.slow
def test_generate(call: str, family: str, device: str) -> None:
    """The kernels choose the tokens that transformers chooses."""
    options, ran = CALLS[call]
    model = zoo.build(family, torch.float32).to(device)
    before = calls.copy()
    inputs = {name: value.to(device) for name, value in zoo.batch(model, 3, 7).items()}
    result = assert_same(model, inputs | options | {"max_new_tokens": 8}, tolerance=1e-4)
    assert result.error is None
    used = {operation for operation, path in calls - before if path == "triton"}
    assert used >= ran | ({"beam_attention"} if "num_beams" in options else set())
    assert "norm" in used
