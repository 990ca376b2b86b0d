"""Logits transforms: their sparse form, alone and composed, equals their dense one."""

import copy

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessorList, MinPLogitsWarper

from fastgen.decoding.logits.forced_tokens import ForcedTokens
from fastgen.decoding.logits.min_p import MinP
from fastgen.decoding.logits.ngram_block import NGramBlock
from fastgen.decoding.logits.pipeline import (
    apply_transforms,
    capturable,
    keep_sentences,
    phases,
    sparse_updates,
)
from fastgen.decoding.logits.processor_call import ProcessorCall
from fastgen.decoding.logits.repetition_penalty import RepetitionPenalty
from fastgen.decoding.logits.sequence_bias import SequenceBias
from fastgen.decoding.logits.text import Text
from fastgen.decoding.logits.token_ban import OnlyToken, TokenBan
from fastgen.decoding.logits.transform import LogitsTransform
from fastgen.ops.selection.kbest import kbest_reference

V, LENGTH = 23, 9


def _penalty(factor: float = 1.3, start: int | Tensor = 0) -> RepetitionPenalty:
    def dense(ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for row, first in enumerate(torch.as_tensor(start).expand(len(ids)).tolist()):
            for token in set(ids[row, first:].tolist()):
                score = scores[row, token]
                scores[row, token] = score * factor if score < 0 else score / factor
        return scores

    return RepetitionPenalty(factor, start, dense)


def _text(rows: int, length: int = LENGTH, room: int = 0) -> Text:
    """Return texts of few distinct tokens; with `room`, in a buffer as captured steps have it."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(0, 6, (rows, length), generator=generator)
    if not room:
        return Text(ids, 1)
    unused = torch.full((rows, room), 5)
    return Text(torch.cat([ids, unused], 1), 1, length, torch.tensor([length]))


def _log_probs(rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return (torch.randn(rows, V, generator=generator, dtype=torch.float64) * 4).log_softmax(-1)


TRANSFORMS: dict[str, LogitsTransform] = {
    "n-grams": NGramBlock(2),
    "source": NGramBlock(2, torch.tensor([[3, 4, -1, 2, 1, -1]])),
    "ban": TokenBan(torch.tensor([3, 7, V + 5])),
    "ban elsewhere": TokenBan(torch.tensor([3]), lambda length: length < 4),
    "only": OnlyToken(4, lambda length: length == LENGTH),
    "bias": SequenceBias({(5,): 2.5, (2,): -1.5}),
    "sequences": SequenceBias({(5,): -2.5, (1, 2): -1.5, (3, 2): -0.25, (4, 0, 2): -3.0}, 1),
    "penalty": _penalty(),
    "penalty of rows": _penalty(0.7, torch.tensor([0, 3, 5, 9])),
    "forced": ForcedTokens(torch.tensor([6]), lambda length: length == LENGTH),
    "forced by sentence": ForcedTokens(torch.tensor([6, 2]), lambda _: True, by_sentence=True),
}
CHAINS = [
    *([name] for name in TRANSFORMS),
    ["bias", "sequences", "n-grams"],
    ["sequences", "penalty"],
    ["sequences", "penalty", "bias"],
    ["penalty", "bias", "ban", "source"],
    ["n-grams", "penalty", "penalty of rows", "sequences", "forced"],
]


@pytest.mark.parametrize("room", [0, 4])
@pytest.mark.parametrize("chain", CHAINS, ids="+".join)
def test_the_sparse_form_equals_the_dense_one(chain: list[str], room: int) -> None:
    rows, text = 4, _text(4, room=room)
    transforms = [copy.deepcopy(TRANSFORMS[name]) for name in chain]
    dense = apply_transforms(_log_probs(rows), text, transforms)
    updates = sparse_updates(transforms, text, V)
    assert updates is not None
    zeros = torch.zeros(rows, 1, dtype=torch.float64)
    best = kbest_reference(_log_probs(rows)[:, None], zeros, V, updates)
    found = torch.full_like(dense, torch.nan).scatter_(1, best.indices, best.values)
    assert torch.allclose(found, dense, rtol=0, atol=2e-6)
    assert capturable(transforms)


@pytest.mark.parametrize(
    "transforms",
    [
        # The penalty divides a score that the bias has made positive.
        [SequenceBias({(2,): 1.5}), _penalty()],
        [ForcedTokens(torch.tensor([6]), lambda _: True), SequenceBias({(6,): 1.0})],
        [ForcedTokens(torch.tensor([6, 7]), lambda _: True)],
        [NGramBlock(2), ProcessorCall(lambda ids, scores: scores)],
        [MinP(0.1)],
    ],
)
def test_what_has_no_sparse_form(transforms: list[LogitsTransform]) -> None:
    assert sparse_updates(transforms, _text(2), V) is None


def test_phases_tell_apart_the_lengths_at_which_transforms_differ() -> None:
    transforms = [TRANSFORMS[name] for name in ("sequences", "ban elsewhere", "only", "penalty")]
    found = [phases(transforms, length) for length in range(1, 12)]
    distinct = [one for one, before in zip(found, [None, *found], strict=False) if one != before]
    # From 2 and 3 tokens on, longer sequences match; the ban ends at 4, and 9 is the only length
    # of the third transform.
    assert len(distinct) == 6


@pytest.mark.parametrize("beams", [1, 2])
def test_rows_that_leave(beams: int) -> None:
    """The transforms of the sentences that stay do what they did for the whole batch."""
    sentences = 3
    rows, text = sentences * beams, _text(sentences * beams)
    sources = torch.tensor([[1, 2, -1], [2, 3, -1], [3, 4, -1]])
    transforms: list[LogitsTransform] = [
        NGramBlock(2, sources),
        _penalty(start=torch.arange(rows)),
        TokenBan(torch.tensor([1])),
    ]
    forced: list[LogitsTransform] = [
        ForcedTokens(torch.tensor([1, 2, 3]), lambda _: True, by_sentence=True)
    ]
    stay = torch.tensor([2, 0])
    at = (stay[:, None] * beams + torch.arange(beams)).flatten()
    for each in (transforms, forced):
        whole = apply_transforms(_log_probs(rows), text, each)
        keep_sentences(each, stay, beams)
        part = apply_transforms(_log_probs(rows)[at], Text(text.ids[at], 1), each)
        assert torch.equal(part, whole[at])
    assert [each.depends_on_rows for each in transforms] == [True, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("least", [1, 3, 40])
@pytest.mark.parametrize("min_p", [0.0, 0.01, 0.3, 1.0])
def test_min_p(min_p: float, least: int, dtype: torch.dtype) -> None:
    text = Text(torch.zeros(6, 1, dtype=torch.int64), 1)
    scores = torch.randn(6, 37, generator=torch.Generator().manual_seed(0)).to(dtype) * 3
    scores[1, :4] = scores[1].max()  # equal highest scores
    scores[2, 5:] = -torch.inf
    scores[3] = -torch.inf
    scores[4, 3] = torch.nan
    for removed in (-torch.inf, -7.0):
        warper = LogitsProcessorList([MinPLogitsWarper(min_p, removed, least)])
        wanted = warper(text.ids, scores)
        found = MinP(min_p, least, removed)(scores.clone(), text)
        assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0))
