"""Random calls of greedy search, for tests of what runs them in another way."""

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from fastgen.ops import cpu_rules
from tests.support import zoo

FAMILIES = ("bart", "marian", "t5", "gpt2", "llama", "qwen3", "phi")


@pytest.fixture(autouse=True)
def products_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    run_products_in_c(monkeypatch)


def run_products_in_c(patch: pytest.MonkeyPatch) -> None:
    """Run the products of the tiny models in C for any number of rows, as those of others."""
    patch.setattr(cpu_rules, "LEAST_ROWS", ((math.inf, 1),))
    patch.setattr(cpu_rules, "FILLED", 0.0)


class _Odd(LogitsProcessor):
    """A processor that counts its calls, and changes the scores with their number."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, ids: Any, scores: Any) -> Any:
        self.calls += 1
        scores = scores.clone()
        scores[:, (ids[:, -1] * 7 + self.calls) % scores.shape[1]] += 3.0
        return scores


class _Sum(StoppingCriteria):
    def __call__(self, ids: Any, scores: Any, **kwargs: Any) -> Any:
        return ids[:, -3:].sum(1) % 11 == 0


def _options(draw: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {"max_new_tokens": draw.randint(3, 24)}
    for name, values in {
        "repetition_penalty": (0.7, 1.3),
        "no_repeat_ngram_size": (2, 3),
        "min_new_tokens": (5,),
        "eos_token_id": ([2, 7, 9, 30], None),
        "bad_words_ids": ([[8], [9, 4]],),
        "sequence_bias": ([[[6], 2.0]],),
        "suppress_tokens": ([5, 6],),
    }.items():
        if draw.random() < 0.3:
            options[name] = draw.choice(values)
    if draw.random() < 0.3:
        options |= dict.fromkeys(
            ("return_dict_in_generate", "output_scores", "output_logits"), True
        )
    return options


def _objects(odd: bool, stop: bool) -> dict[str, Any]:
    processors = {"logits_processor": LogitsProcessorList([_Odd()])} if odd else {}
    return processors | ({"stopping_criteria": StoppingCriteriaList([_Sum()])} if stop else {})


def built(family: str, dtype: torch.dtype) -> Any:
    """Return a model after its first steps, which its own modules run, and round otherwise."""
    model = zoo.build(family, seed=3).to(dtype)
    model.generate(torch.arange(4, 9)[None], max_new_tokens=8, eos_token_id=None)
    return model


def drawn_call(
    model: Any, draw: random.Random
) -> tuple[dict[str, Any], Callable[[], dict[str, Any]]]:
    """Return the arguments of a greedy call.

    Returns:
        Plain arguments; and a function that returns a processor and a criterion, or neither, which
        remember nothing of other calls.
    """
    texts = draw.choice([1, 1, 2, 4])
    generator = torch.Generator().manual_seed(draw.randrange(2**32))
    ids = torch.randint(4, 40, (texts, draw.randint(3, 9)), generator=generator)
    mask = torch.ones_like(ids)
    if texts > 1:
        at = 0 if not model.config.is_encoder_decoder else -1
        mask[1, at], ids[1, at] = 0, zoo.PAD
    call = {"input_ids": ids, "attention_mask": mask, **_options(draw)}
    return call, partial(_objects, draw.random() < 0.3, draw.random() < 0.3)


def same(one: Any, other: Any) -> bool:
    """Return whether two outputs of `generate` are equal, scores and logits included."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    steps = zip((*one.scores, *one.logits), (*other.scores, *other.logits), strict=True)
    return (
        type(one) is type(other)
        and torch.equal(one.sequences, other.sequences)
        and all(torch.equal(step, of_other) for step, of_other in steps)
        and one.past_key_values.get_seq_length() == other.past_key_values.get_seq_length()
    )
