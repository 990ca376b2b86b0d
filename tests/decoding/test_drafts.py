"""Sources of drafts, and how many tokens they draft."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgen.decoding.search.sampling import Sampling
from fastgen.decoding.search.stopping import Stop
from fastgen.decoding.speculative.draft_length import DraftLength
from fastgen.decoding.speculative.drafts import Longest, PromptLookup


def _propose(draft: PromptLookup | Longest, *rows: list[int], most: int = 4) -> list[list[int]]:
    return draft.propose(_search(rows), None, most).tolist()


def _search(rows: Sequence[Sequence[int]]) -> Sampling:
    return Sampling(torch.tensor(rows), Stop(), [], None, 99)


def test_what_followed_the_longest_match_is_copied() -> None:
    text = [1, 2, 3, 4, 5, 9, 3, 8, 1, 2, 3]
    assert _propose(PromptLookup(), text) == [[4, 5, 9, 3]]
    assert _propose(PromptLookup(), text, most=2) == [[4, 5]]


def test_a_shorter_match_drafts_fewer_tokens() -> None:
    assert _propose(PromptLookup(3), [7, 1, 2, 3, 4, 9, 1, 2]) == [[3, 4]]
    assert _propose(PromptLookup(3), [7, 1, 2, 3, 4, 9, 8, 1]) == [[2]]
    assert _propose(PromptLookup(2), [7, 1, 2, 3, 4, 9, 1, 2]) == [[3, 4, 9, 1]]


def test_the_last_place_counts() -> None:
    assert _propose(PromptLookup(1), [1, 5, 1, 6, 1], most=1) == [[6]]


def test_a_draft_ends_with_the_text() -> None:
    assert _propose(PromptLookup(1), [1, 5, 1]) == [[5, 1]]


def test_without_a_match_there_is_no_draft() -> None:
    assert torch.tensor(_propose(PromptLookup(), [1, 2, 3])).shape == (1, 0)


def test_all_texts_draft_as_many_tokens() -> None:
    assert _propose(PromptLookup(1), [1, 5, 6, 1], [0, 9, 4, 9]) == [[5, 6], [4, 9]]
    assert torch.tensor(_propose(PromptLookup(1), [1, 5, 6, 1], [1, 2, 3, 4])).shape == (2, 0)


def test_the_source_is_looked_up_but_not_beyond_its_end() -> None:
    source = torch.tensor([[4, 5, 6, 7]])
    assert _propose(PromptLookup(1, source), [1, 6]) == [[7]]
    assert _propose(PromptLookup(2, source), [1, 4, 5]) == [[6, 7]]
    assert torch.tensor(_propose(PromptLookup(1, source), [1, 7])).shape == (1, 0)


def test_texts_are_known_by_their_number() -> None:
    lookup = PromptLookup(1)
    lookup.propose(_search([[1, 5, 0], [2, 6, 0]]), None, 4)
    search = _search([[2, 6, 0, 2]])
    search.rows = torch.tensor([1])  # the first text has left the batch
    assert lookup.propose(search, None, 4).tolist() == [[6, 0, 2]]


class _Fixed:
    def __init__(self, *tokens: int) -> None:
        self.tokens, self.calls = tokens, 0

    def propose(self, search: Sampling, model: Any, most: int) -> Tensor:
        self.calls += 1
        return torch.tensor([self.tokens[:most]] * search.batch_size, dtype=torch.int64)


def test_the_longest_draft_is_taken() -> None:
    short, long = _Fixed(1), _Fixed(2, 3)
    assert _propose(Longest([short, long]), [0]) == [[2, 3]]
    assert _propose(Longest([long, short]), [0]) == [[2, 3]]
    short.calls = long.calls = 0
    assert _propose(Longest([short, long]), [0], most=1) == [[1]]
    assert (short.calls, long.calls) == (1, 0)  # no draft can be longer


@pytest.mark.parametrize("each", [0.0, 0.1])
def test_length_grows_with_acceptance(each: float) -> None:
    """A pass costs 1 and `each` per token."""
    lengths: list[int] = []
    for every in (1, 4, 1000):  # one token in `every` is rejected
        length = DraftLength(32)
        for _ in range(60):
            drafted = length.best()
            length.note(drafted, min(drafted, every - 1), 0.02 * drafted, 1 + each * (drafted + 1))
            length.note(0, 0, 0.0, 1 + each)
        lengths.append(length.best())
    assert lengths[0] <= 2
    assert lengths[0] < lengths[1] < lengths[2]


def test_length_falls_with_the_cost_of_a_token() -> None:
    lengths: list[int] = []
    for each in (0.01, 0.3, 3.0):
        length = DraftLength(32)
        for i in range(80):
            drafted = length.best() if i % 8 else 0
            length.note(drafted, min(drafted, 6), 0.0, 1 + each * (drafted + 1))
        lengths.append(length.best())
    assert lengths[0] > lengths[1] > lengths[2]
