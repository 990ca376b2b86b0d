"""Random states and candidates of a beam search step."""

from typing import Any

import torch
from torch import Tensor

from fastgen.decoding.search.beam_search import BeamSearch, Choice
from fastgen.decoding.search.finishing_rules import TransformersRule
from fastgen.decoding.search.stopping import Stop
from fastgen.ops.selection.choice import Candidates

LONGEST, PROMPT, VOCABULARY = 40, 7, 99


def choice(
    trial: int, beams: int, penalty: float, early: Any, device: str = "cpu", ends: int = 2
) -> tuple[BeamSearch, Candidates, int]:
    """Return a search in a random state, its candidates (best first), and their new-token count.

    Candidates end by the tokens below `ends`, all of which are below `VOCABULARY`.

    Args:
        trial: selects the random state; the batch size is 1 to 4.
        beams: number of beams.
        penalty: length penalty.
        early: early stopping, as in transformers.
        device: device of the tensors.
        ends: number of end tokens.
    """
    generator = torch.Generator().manual_seed(1_000 * beams + trial)
    b, rule = 1 + trial % 4, TransformersRule(beams, LONGEST, PROMPT, ends, penalty, early)
    k = rule.candidates
    values = (torch.randn(b, k, generator=generator) * 3 - 8).sort(descending=True).values
    hits = torch.rand(b, k, generator=generator) < (0.3, 0.7, 0.05)[trial % 3]
    beam = torch.randint(0, beams, (b, k), generator=generator)
    others = torch.randint(ends, VOCABULARY, (b, k), generator=generator)
    token = torch.where(hits, torch.randint(0, ends, (b, k), generator=generator), others)
    done = (
        (torch.rand(b, beams, generator=generator) < 0.5 + trial % 2)
        .sort(1, descending=True)
        .values
    )
    finished = torch.where(
        done, torch.randn(b, beams, generator=generator) * 2 - 4, rule.mask_value
    )
    search = BeamSearch(
        torch.zeros(b, PROMPT, dtype=torch.int64, device=device), rule, Stop(), [], 0
    )
    search.finished.scores.copy_(finished.sort(1, descending=True).values)
    search.finished.done.copy_(done)
    search.improvable.copy_(~done.all(1) | (torch.rand(b, generator=generator) < 0.5))
    return (
        search,
        Candidates(*(each.to(device) for each in (values, beam, token, hits))),
        2 + trial % 17,
    )


def assert_alike(found: Choice, wanted: Choice) -> None:
    """Assert that two choices are equal where it matters.

    Slots without a finished hypothesis may differ, and so may beams that continue where too few
    can.
    """
    live = wanted.scores > TransformersRule.mask_value / 2
    for name in ("parents", "tokens"):
        assert torch.equal(getattr(found, name)[live], getattr(wanted, name)[live]), name
    for name in ("scores", "improvable"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    assert torch.equal(found.flags[1:], wanted.flags[1:])
    assert torch.equal(found.merged.scores, wanted.merged.scores)
    assert torch.equal(found.merged.done, wanted.merged.done)
    there = found.merged.done
    assert torch.equal(found.merged.order[there], wanted.merged.order[there])
    assert (found.flags[0] >= _moved(found, there).any(1)).all()


def _moved(found: Choice, there: Tensor) -> Tensor:
    return there & found.merged.order.ne(torch.arange(there.shape[1], device=there.device))
