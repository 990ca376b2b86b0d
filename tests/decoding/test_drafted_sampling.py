"""Greedy search over drafts equals greedy search, for any draft, processor and criterion."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import fastgen
from fastgen.decoding.backends.drafted_sampling import Drafting
from fastgen.decoding.search.sampling import Sampling
from fastgen.decoding.speculative.draft_length import DraftLength
from fastgen.models.runtime.ragged_step import Span
from fastgen.ops.counts import calls
from fastgen.patches.transformers.drafting import prompt_lookup
from fastgen.patches.transformers.generate.shared_stepper import SharedStepper
from tests.models.test_in_c import _wide  # noqa: F401  a fixture: heads that C can attend with
from tests.ops.test_native import own_variant as variant  # noqa: F401  a fixture
from tests.support import zoo
from tests.support.greedy_calls import (
    FAMILIES,
    built,
    drawn_call,
    products_in_c,  # noqa: F401  a fixture
    same,
)

MODELS = Path("../shared/models")
DATA = Path("../shared/data")


class _Oracle:
    """Drafts of what greedy search writes, with some tokens replaced by others."""

    def __init__(self, sequences: Tensor, seed: int, wrong: float) -> None:
        self.sequences, self.random, self.wrong = sequences, random.Random(seed), wrong

    def propose(self, search: Sampling, model: Any, most: int) -> Tensor:
        length = search.ids.shape[1]
        drafts = self.sequences[
            list(search.numbers()), length : length + self.random.randint(0, most)
        ]
        is_wrong = torch.tensor(
            [[self.random.random() < self.wrong for _ in row] for row in drafts], dtype=torch.bool
        ).view(drafts.shape)
        return torch.where(is_wrong, torch.full_like(drafts, 5), drafts)


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Drafting]]:
    """Return a list from which the next call takes how its tokens are drafted."""
    given = list[Drafting]()
    own = prompt_lookup.drafting_of
    monkeypatch.setattr(
        prompt_lookup, "drafting_of", lambda *args: given.pop() if given else own(*args)
    )
    return given


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_fuzz(variant: str, drafts: list[Drafting], family: str, dtype: torch.dtype) -> None:  # noqa: F811
    model = built(family, dtype)
    rounds = drafted = 0
    for seed in range(16):
        draw = random.Random(seed)
        call, objects = drawn_call(model, draw)
        wanted = model.generate(**call, **objects())
        sequences = wanted if isinstance(wanted, Tensor) else wanted.sequences
        oracle = _Oracle(sequences, seed, draw.choice([0.0, 0.1, 0.5]))
        drafting = Drafting(oracle, DraftLength(draw.choice([1, 3, 12])))
        drafts.append(drafting)
        found = model.generate(**call, **objects())
        assert same(wanted, found), (seed, call)
        assert not drafts
        rounds, drafted = rounds + drafting.rounds, drafted + drafting.drafted
    assert rounds > 20
    assert drafted > 60


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("texts", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_pass_equals_single_steps_bit_by_bit(
    variant: str, drafts: list[Drafting], family: str, texts: int, dtype: torch.dtype  # noqa: F811
) -> None:  # fmt: skip
    model = zoo.build(family, seed=1).to(dtype)
    ids = torch.randint(4, 40, (texts, 6), generator=torch.Generator().manual_seed(2))
    call = {"input_ids": ids, "max_new_tokens": 14, "eos_token_id": None}
    call |= dict.fromkeys(("return_dict_in_generate", "output_logits"), True)
    model.generate(**call)  # packs the weights
    wanted = model.generate(**call)
    drafts.append(Drafting(_Oracle(wanted.sequences, 0, 0.0), DraftLength(5)))
    calls.clear()
    found = model.generate(**call)
    assert calls["decoder_step", "native"] > 0
    assert calls["decoder_step", "reference"] == 0
    for step, other in zip(wanted.logits, found.logits, strict=True):
        assert torch.equal(step, other)


@torch.no_grad()
def test_spans_of_different_starts_run_in_torch(
    variant: str, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    """C takes only spans that are alike; the others give the same logits."""
    model = zoo.build("llama", seed=1).float()
    ids = torch.randint(4, 40, (2, 6), generator=torch.Generator().manual_seed(2))
    steppers = list[SharedStepper]()
    own = SharedStepper.end_steps

    def end_steps(self: SharedStepper, *args: Any) -> None:
        steppers.append(self)
        own(self, *args)

    monkeypatch.setattr(SharedStepper, "end_steps", end_steps)
    for _ in range(2):
        out = model.generate(ids, max_new_tokens=12, eos_token_id=None)
    fused = steppers[-1].fused
    assert fused is not None
    tokens: list[list[int]] = out[:, 6:].tolist()
    calls.clear()
    alike = fused.extend([Span(b, 2, tokens[b][2:5]) for b in range(2)])
    assert calls["decoder_step", "native"] == 1
    apart = fused.extend([Span(0, 2, tokens[0][2:5]), Span(1, 3, tokens[1][3:5])])
    assert calls["decoder_step", "native"] == 1
    torch.testing.assert_close(torch.cat([alike[:3], alike[4:]]), apart, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_prompt_lookup(variant: str) -> None:  # noqa: F811
    """A text that repeats itself is copied, and transformers' own loop writes the same."""
    model = zoo.build("bart", seed=3).float()
    ids = torch.randint(4, 40, (1, 9), generator=torch.Generator().manual_seed(1))
    call = {"input_ids": ids, "max_new_tokens": 40, "eos_token_id": None}
    greedy = model.generate(**call)
    before = dict(fastgen.status().bild)
    found = model.generate(**call, prompt_lookup_num_tokens=8)
    counts = {k: v - before.get(k, 0) for k, v in fastgen.status().bild.items()}
    assert torch.equal(greedy, found)
    # How much is drafted depends on the clock.
    assert counts["tokens_accepted"] > 4
    assert counts["passes"] == 39 - counts["tokens_accepted"]
    with fastgen.disabled():
        assert torch.equal(model.generate(**call, prompt_lookup_num_tokens=8), found)


@torch.no_grad()
def test_the_source_is_looked_up(variant: str) -> None:  # noqa: F811
    model = zoo.build("bart", seed=3).float()
    ids = torch.randint(4, 40, (2, 9), generator=torch.Generator().manual_seed(1))
    call = {"input_ids": ids, "max_new_tokens": 20, "prompt_lookup_num_tokens": 4}
    assert torch.equal(model.generate(ids, max_new_tokens=20), model.generate(**call))


@torch.no_grad()
def test_what_is_left_to_transformers(variant: str) -> None:  # noqa: F811
    model = zoo.build("llama", seed=3).float()
    ids = torch.randint(4, 40, (1, 9), generator=torch.Generator().manual_seed(1))
    call = {"input_ids": ids, "max_new_tokens": 6, "prompt_lookup_num_tokens": 3}
    before = dict(fastgen.status().bild)
    model.generate(**call, do_sample=True)
    with pytest.raises(ValueError, match="num_return_sequences"):
        model.generate(**call, num_return_sequences=2)
    with pytest.raises(ValueError, match="max_matching_ngram_size"):
        model.generate(**call, max_matching_ngram_size=-1)
    assert fastgen.status().bild == before


@pytest.mark.skipif(not MODELS.is_dir(), reason="the trained models are not here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("texts", [1, 2, 4])
@torch.no_grad()
def test_trained_models(texts: int, dtype: torch.dtype) -> None:
    folder = MODELS / "multi30k-en-de-small"
    model = transformers.MarianMTModel.from_pretrained(folder).to(dtype)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    lines = (DATA / "multi30k" / "val.en").read_text().splitlines()[:24]
    # The first steps of a model run in its own modules too, which round otherwise.
    first = tokenizer(lines[:2], return_tensors="pt", padding=True)
    model.generate(first["input_ids"], num_beams=1)
    for i in range(0, len(lines), texts):
        batch = [f"{line}</s>" for line in lines[i : i + texts]]
        inputs = tokenizer(batch, return_tensors="pt", padding=True, return_token_type_ids=False)
        call = {**inputs, "num_beams": 1, "max_new_tokens": 50}
        greedy = model.generate(**call)
        assert torch.equal(greedy, model.generate(**call, prompt_lookup_num_tokens=8)), batch


@torch.no_grad()
def test_explain(variant: str) -> None:  # noqa: F811
    model = zoo.build("llama", seed=3).float()
    call = {"input_ids": torch.arange(4, 12)[None], "max_new_tokens": 9}
    explanation = fastgen.explain(model, **call, prompt_lookup_num_tokens=3)
    assert explanation.plan is not None
    assert explanation.plan.method == "greedy search"
    assert explanation.selection == "after each pass over a draft"
    assert fastgen.explain(model, **call).selection == "in C, many decode steps per call"
    sampled = fastgen.explain(model, **call, prompt_lookup_num_tokens=3, do_sample=True)
    assert sampled.reason == "_assisted_decoding is not patched"


@torch.no_grad()
def test_texts_that_end_within_a_draft_cost_no_further_pass(
    variant: str, drafts: list[Drafting]  # noqa: F811
) -> None:  # fmt: skip
    model = built("llama", torch.float32)
    ids = torch.randint(4, 40, (4, 6), generator=torch.Generator().manual_seed(2))
    call = {"input_ids": ids, "max_new_tokens": 16, "eos_token_id": None}
    made = model.generate(**call)[:, 6:]
    call["eos_token_id"] = [int(made[0, 2]), int(made[1, 9])]
    wanted = model.generate(**call)
    ends = [int(torch.isin(row, torch.tensor(call["eos_token_id"])).int().argmax()) for row in made]
    assert len(set(ends)) > 1  # texts end at different places

    class Whole(_Oracle):
        def propose(self, search: Sampling, model: Any, most: int) -> Tensor:
            length = search.ids.shape[1]
            return self.sequences[list(search.numbers()), length : length + most]

    drafting = Drafting(Whole(wanted, 0, 0.0), DraftLength(32))
    drafts.append(drafting)
    assert torch.equal(model.generate(**call), wanted)
    assert drafting.rounds == 2  # the first draft has 8 tokens
    assert drafting.accepted == drafting.drafted
