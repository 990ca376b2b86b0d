"""Check beam search with drafted steps.

The search gets the large model's logits, and no output changes.
"""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import fastgen
from fastgen.decoding.speculative.drafted_beams import DraftedBeams
from fastgen.models.runtime.tree_step import ROOT
from tests.patches.transformers.bild.test_bild_transformers import ENDS, FAMILIES, NEW, pair
from tests.support import zoo
from tests.support.bild_oracle import Toy

VOCABULARY = 11


class ToyTree:
    """A tree of continuations of a toy model; the prompt of each sentence is its index."""

    def __init__(self, toy: Toy, sentences: int) -> None:
        self.toy = toy
        self.texts: list[list[list[int]]] = [[] for _ in range(sentences)]

    @property
    def nodes(self) -> int:
        return len(self.texts[0])

    def grow(self, parents: list[list[int]], tokens: list[list[int]]) -> Tensor:
        found: list[Tensor] = []
        for b, texts in enumerate(self.texts):
            for parent, token in zip(parents[b], tokens[b], strict=True):
                assert parent < len(texts), "behind a node that is not there"
                texts.append([*([b] if parent == ROOT else texts[parent]), token])
            found.append(torch.stack([self.toy(text) for text in texts[-len(tokens[b]) :]]))
        assert len({len(texts) for texts in self.texts}) == 1
        return torch.stack(found)

    def first(self) -> Tensor:
        return torch.stack([self.toy([b]) for b in range(len(self.texts))])


def drafts(
    sentences: int, beams: int, width: int, depth: int, apart: float, seed: int
) -> tuple[DraftedBeams, Toy]:
    large = Toy(VOCABULARY, seed)
    small = Toy(VOCABULARY + seed % 3 - 1, seed + 1, other=large, own=apart)
    if small.vocabulary > VOCABULARY:
        small = Toy(VOCABULARY + 1, seed + 1)
    trees = ToyTree(large, sentences), ToyTree(small, sentences)
    return DraftedBeams(
        *trees, (trees[0].first(), trees[1].first()), beams, width, depth, ends=[1]
    ), large


@pytest.mark.parametrize("seed", range(40))
def test_every_text_gets_the_large_models_logits(seed: int) -> None:
    rng = random.Random(seed)
    sentences, beams = rng.choice([1, 3]), rng.choice([1, 2, 4])
    drafted, large = drafts(
        sentences, beams, rng.choice([1, 4, 8]), rng.choice([1, 2, 3]), rng.choice([0.0, 0.5]), seed
    )
    texts = [[[b]] * beams for b in range(sentences)]
    for _ in range(8):
        parents = [[rng.randrange(beams) for _ in range(beams)] for _ in range(sentences)]
        likely = rng.random() < 0.7
        for b in range(sentences):  # mostly the choice of a search, sometimes a random one
            before = [texts[b][parent] for parent in parents[b]]
            tokens = [
                int(large(text).argmax()) if likely else rng.randrange(VOCABULARY)
                for text in before
            ]
            texts[b] = [[*text, token] for text, token in zip(before, tokens, strict=True)]
        drafted.reorder(torch.tensor(parents))
        ids = torch.tensor([text for of_sentence in texts for text in of_sentence])
        logits = drafted.step(ids)
        for row, text in enumerate(ids.tolist()):
            assert torch.equal(logits[row], large(text))
        logits.fill_(torch.nan)  # the caller owns the logits and may modify them
    assert drafted.passes.steps == 8
    assert drafted.passes.large_calls <= 8


def test_a_step_that_was_drafted_needs_no_pass() -> None:
    drafted, large = drafts(2, 1, 1, 3, 0.0, seed=3)
    texts = [[0], [1]]
    for _ in range(8):
        texts = [
            [*text, int(large(text).argmax(0)) if int(large(text).argmax(0)) != 1 else 2]
            for text in texts
        ]
        drafted.step(torch.tensor(texts))
    assert drafted.passes.large_calls < 8
    assert drafted.passes.large_nodes >= drafted.passes.large_calls


def _settings(beams: int, **more: Any) -> dict[str, Any]:
    fields = {"return_dict_in_generate": True, "output_scores": True}
    return {"max_new_tokens": NEW, "eos_token_id": ENDS, "num_beams": beams} | fields | more


def _assert_same(
    large: Any, small: Any, inputs: dict[str, Tensor], depth: int, settings: dict[str, Any]
) -> None:
    with fastgen.disabled():
        torch.manual_seed(0)
        stock = large.generate(**inputs, **settings)
    torch.manual_seed(0)
    found = large.generate(
        **inputs, **settings, assistant_model=small, lossless=True, speculative_beams=depth
    )
    assert torch.equal(found.sequences, stock.sequences)
    assert torch.equal(found.beam_indices, stock.beam_indices)
    assert torch.allclose(
        found.sequences_scores,
        stock.sequences_scores,
        rtol=0.0,
        atol=1e-6 if large.config.model_type.startswith("gemma") else 1e-9,
    )
    for ours, theirs in zip(found.scores, stock.scores, strict=True):
        assert torch.allclose(ours, theirs, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str) -> None:
    large, small = pair(family, seed=1, apart=0.03)
    padding = "none" if family.startswith("gemma") else "natural"
    before = fastgen.status().bild
    _assert_same(
        large, small, zoo.batch(large, 1, 7, padding), 1, _settings(4, no_repeat_ngram_size=2)
    )
    _assert_same(
        large, small, zoo.batch(large, 3, 7, padding), 2, _settings(3, num_return_sequences=2)
    )
    after = fastgen.status().bild
    assert after["beam_steps"] > before.get("beam_steps", 0)


@pytest.mark.parametrize("seed", range(6))
def test_options_of_beam_search(seed: int) -> None:
    large, small = pair("bart", seed=seed, apart=0.02)
    options = [
        {"early_stopping": True}, {"length_penalty": 2.0, "early_stopping": "never"},
        {"repetition_penalty": 1.5}, {"do_sample": True, "top_k": 20}, {"min_new_tokens": 8},
        {"bad_words_ids": [[5], [6, 7]]},
    ]  # fmt: skip
    _assert_same(
        large,
        small,
        zoo.batch(large, 2, 6, seed=seed),
        1 + seed % 3,
        _settings(2 + seed % 3, **options[seed]),
    )


def test_steps_are_saved() -> None:
    large, _ = pair("gpt2")
    before = fastgen.status().bild
    large.generate(
        **zoo.batch(large, 1, 5), max_new_tokens=NEW, num_beams=2, assistant_model=large,
        lossless=True, speculative_beams=True,
    )  # fmt: skip
    after = fastgen.status().bild
    gained = {name: after[name] - before.get(name, 0) for name in ("beam_steps", "large_calls")}
    assert gained["large_calls"] < 0.8 * gained["beam_steps"], (
        "a small model that is the large one drafts well"
    )


def test_what_it_needs_is_said() -> None:
    large, small = pair("marian")
    inputs = zoo.batch(large, 2, 5)
    with pytest.raises(
        ValueError, match="num_beams is 4, and must be 1; with speculative_beams=True"
    ):
        large.generate(**inputs, num_beams=4, assistant_model=small, lossless=True)
    with pytest.raises(ValueError, match="it needs lossless=True and a model"):
        large.generate(**inputs, num_beams=4, assistant_model=small, speculative_beams=True)
    with pytest.raises(ValueError, match="it needs lossless=True and a model"):
        large.generate(
            **inputs, num_beams=4, assistant_early_exit=1, lossless=True, speculative_beams=True
        )
    with pytest.raises(ValueError, match="num_beams is 1"):
        large.generate(**inputs, assistant_model=small, lossless=True, speculative_beams=True)
    with pytest.raises(ValueError, match="max_draft says nothing of it"):
        large.generate(
            **inputs,
            num_beams=4,
            assistant_model=small,
            lossless=True,
            speculative_beams=1,
            max_draft=3,
        )
    with pytest.raises(ValueError, match="speculative_beams is -1"):
        large.generate(
            **inputs, num_beams=4, assistant_model=small, lossless=True, speculative_beams=-1
        )


def test_drafts_end_where_the_positions_do() -> None:
    large, small = pair("bart", seed=2, apart=0.02)
    longest = large.config.max_position_embeddings
    settings = _settings(2, min_new_tokens=longest, eos_token_id=None) | {
        "max_new_tokens": longest - 1
    }
    _assert_same(large, small, zoo.batch(large, 1, 5), 3, settings)
