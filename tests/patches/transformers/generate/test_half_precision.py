"""Check rounding in half precision: fastgen is as close to fp32 as transformers is."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import fastgen
from fastgen.models.build import equivalence_check
from fastgen.models.build.equivalence_check import (
    OUTPUTS_DIFFER,
    TOLERANCE,
    TrialOutputs,
    by_modules,
    tried,
)
from fastgen.models.specs.registry import SPECS
from fastgen.patches.transformers.generate.report import last_call
from tests.support import zoo

TOKENS, SENTENCES, SEEDS = 6, 8, 3
CLAMPED = by_modules("float16, in which its sums are clamped")
GIVEN: dict[str, Any] = {
    "max_new_tokens": TOKENS,
    "min_new_tokens": TOKENS,
    "do_sample": False,
    "num_beams": 1,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", sorted(zoo.FAMILIES | zoo.MORE))
@pytest.mark.slow
def test_logits_are_as_near_to_those_of_fp32(family: str, dtype: torch.dtype) -> None:
    theirs, ours = [], []
    for seed in range(SEEDS):
        model, exact = zoo.build(family, dtype, seed), zoo.build(family, dtype, seed).float()
        kwargs = zoo.batch(model, SENTENCES, 11, seed=seed) | GIVEN
        # The first call runs the equivalence check and takes its first token from the modules.
        model.generate(**kwargs)
        found = _logits(model, kwargs)
        with fastgen.disabled():
            stock, wanted = _logits(model, kwargs), _logits(exact, kwargs)
        told = _told_of_one_text(found, stock, wanted)
        assert told.any()
        ours.append((found[1] - wanted[1])[told])
        theirs.append((stock[1] - wanted[1])[told])
    assert _spread(ours) <= 1.5 * _spread(theirs)


def _logits(model: Any, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the generated tokens (B, T) and the logits (B, T, V) that they were chosen from."""
    found = model.generate(**kwargs, output_logits=True, return_dict_in_generate=True)
    return found.sequences[:, -TOKENS:], torch.stack(found.logits, 1).double()


def _told_of_one_text(*found: tuple[Tensor, Tensor]) -> Tensor:
    """Return a mask (B, T) of tokens that all runs chose after equal text, by finite logits."""
    first, *others = (tokens for tokens, _ in found)
    same = torch.stack([first == other for other in others]).all(0).cumprod(1).bool()
    behind = torch.cat([torch.ones_like(same[:, :1]), same[:, :-1]], 1)
    return behind & torch.stack([logits.isfinite().all(-1) for _, logits in found]).all(0)


def _spread(errors: list[Tensor]) -> float:
    """Return the median of the tokens' errors: another expert, after a near tie, is an outlier."""
    return torch.cat(errors).pow(2).mean(-1).sqrt().median().item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", sorted(zoo.FAMILIES | zoo.MORE))
def test_steps_are_made_from_the_weights(family: str, dtype: torch.dtype) -> None:
    """Half precision uses fused steps where fp32 does, except where a family clamps activations."""
    in_fp32, in_half = (_left_off(zoo.build(family, each)) for each in (torch.float32, dtype))
    assert in_half == in_fp32 or (dtype == torch.float16 and in_half == [CLAMPED])


def _left_off(model: Any) -> list[str]:
    padding = "none" if model.config.model_type == "gemma2" else "natural"
    model.generate(**zoo.batch(model, 4, 9, padding) | {"num_beams": 3, "max_new_tokens": 5})
    call = last_call()
    assert call is not None
    return [reason for reason in call.plan.left_off if reason.startswith("decode steps run")]


def test_rounding_is_not_taken_for_another_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reordering sums changes twelve layers of random weights more than any shallow model."""
    compared: list[tuple[Tensor, Tensor, Tensor]] = []
    agree = equivalence_check.agree
    monkeypatch.setattr(
        equivalence_check, "agree", lambda *given: compared.append(given) or agree(*given)
    )
    torch.manual_seed(0)
    size = {
        "n_layer": 12,
        "n_embd": 128,
        "n_head": 4,
        "n_positions": 64,
        "vocab_size": zoo.VOCABULARY,
    }
    model = GPT2LMHeadModel(
        GPT2Config(**size, initializer_range=0.8, bos_token_id=1, eos_token_id=2, pad_token_id=2)
    )
    assert _left_off(model.eval().bfloat16()) == []
    ((found, own, rounded),) = compared
    # How far apart depends on the products of the processor.
    assert (found - own).double().norm() < 1.5 * (rounded - found).double().norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_another_computation_is_found_out(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This shifts the positions by two rows.
    monkeypatch.setitem(SPECS, "bart", zoo.misplaced("bart", 0))
    model = zoo.build("bart", dtype)
    for _ in range(2):
        assert _left_off(model) == [by_modules(OUTPUTS_DIFFER)]


def test_agreement() -> None:
    """Shapes are compared first, then values, relative to their spread or to rounding errors."""
    own = torch.arange(8, dtype=torch.bfloat16).view(2, 4)
    spread = (own.double() - own.double().mean(-1, keepdim=True)).norm()
    assert equivalence_check.agree(own[:1], own) is False
    assert equivalence_check.agree(own, own * torch.nan) is None
    shift = torch.zeros(2, 4, dtype=torch.double)
    shift[0, 0] = 0.1 * spread
    assert equivalence_check.agree(own + shift, own) is False
    assert equivalence_check.agree(own + shift, own, own + shift + 0.3 * shift) is False
    assert equivalence_check.agree(own + shift, own, own + shift - 0.4 * shift) is True
    assert [equivalence_check.agree(own + f * shift, own, own) for f in (0.29, 0.31)] == [
        True,
        True,
    ]
    assert [
        equivalence_check.agree(own + f * shift, own, own + f * shift) for f in (0.29, 0.31)
    ] == [True, False]
    for dtype, tolerance in TOLERANCE.items():
        assert equivalence_check.agree(own.to(dtype) + shift * 9 * tolerance, own.to(dtype)) is True
        assert (
            equivalence_check.agree(own.to(dtype) + shift * 11 * tolerance, own.to(dtype)) is False
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_is_tried_where_it_counts(dtype: torch.dtype) -> None:
    calls: list[Tensor] = []

    def make() -> list[Tensor]:
        calls.append(torch.ones(1, dtype=dtype))
        return calls[-1:]

    state = torch.get_rng_state()
    assert tried(make, dtype) == TrialOutputs(calls)
    assert len(calls) == 1
    assert tried(make, torch.bfloat16) == TrialOutputs(calls[1:2], calls[2:])
    assert torch.equal(torch.get_rng_state(), state)


def test_constant_logits_agree_with_nothing_else() -> None:
    """Neither side's spread, which may be 0, widens what rounding explains."""
    constant, noisy = torch.full((2, 9), 5.0), torch.full((2, 9), 5.01)
    spread = torch.arange(18.0).view(2, 9)
    for dtype in (torch.bfloat16, torch.float16):
        tensors = [x.to(dtype) for x in (constant, noisy, spread)]
        for found, rounded, own in (tensors, [tensors[2], tensors[2] + 0.01, tensors[0]]):
            assert equivalence_check.agree(found, own, rounded) is False
