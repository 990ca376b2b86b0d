"""In half precision two ways to compute a model round otherwise: fastgen's is as near to fp32 as transformers'."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fastgen
from tests import zoo

TOKENS, SENTENCES, SEEDS = 6, 8, 3
GIVEN: dict[str, Any] = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False, "num_beams": 1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", sorted(zoo.FAMILIES | zoo.MORE))
def test_logits_are_as_near_to_those_of_fp32(family: str, dtype: torch.dtype) -> None:
    theirs, ours = [], []
    for seed in range(SEEDS):
        model, exact = zoo.build(family, dtype, seed), zoo.build(family, dtype, seed).float()
        kwargs = zoo.batch(model, SENTENCES, 11, seed=seed) | GIVEN
        model.generate(**kwargs)  # a first call compares, and its first token comes through the modules
        found = _logits(model, kwargs)
        with fastgen.disabled():
            stock, wanted = _logits(model, kwargs), _logits(exact, kwargs)
        told = _told_of_one_text(found, stock, wanted)
        assert told.any()
        ours.append((found[1] - wanted[1])[told])
        theirs.append((stock[1] - wanted[1])[told])
    assert _spread(ours) <= 1.5 * _spread(theirs)


def _logits(model: Any, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """What is generated (B, T), and the logits that each of these tokens was chosen by, (B, T, V)."""
    found = model.generate(**kwargs, output_logits=True, return_dict_in_generate=True)
    return found.sequences[:, -TOKENS:], torch.stack(found.logits, 1).double()


def _told_of_one_text(*found: tuple[Tensor, Tensor]) -> Tensor:
    """Which tokens (B, T) all have chosen behind the same text, by logits that are numbers."""
    first, *others = (tokens for tokens, _ in found)
    same = torch.stack([first == other for other in others]).all(0).cumprod(1).bool()
    behind = torch.cat([torch.ones_like(same[:, :1]), same[:, :-1]], 1)
    return behind & torch.stack([logits.isfinite().all(-1) for _, logits in found]).all(0)


def _spread(errors: list[Tensor]) -> float:
    return torch.cat(errors).pow(2).mean().sqrt().item()
