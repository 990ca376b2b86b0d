"""How close transformers' own search came to an answer that is not its own, where only the answer's text is known."""

import math
from typing import Any

import torch

import fastgen
from fastgen.cli.bench.agreement import margins
from fastgen.corpus.texts import Problem, TextGenerator
from fastgen.decoding.search.near_ties import NEAR_TIE


def is_near_tie(
    generator: TextGenerator, generation: dict[str, Any], text: str, answer: str
) -> bool:
    """Whether rounding may have chosen the answer: the search, run for this text alone, left it by less than that.

    Args:
        generator: of an encoder-decoder in fp32. generation: arguments of `generate`.
    """
    return _margin(generator, generation, text, answer) < NEAR_TIE[torch.float32]


def _margin(generator: TextGenerator, generation: dict[str, Any], text: str, answer: str) -> float:
    """By how much the search decided against the answer; infinite where its tokens are not found."""
    model, tokenizer = generator.model, generator.tokenizer
    (source,) = generator.encode([text])
    if isinstance(source, Problem):
        return math.inf
    inputs = {
        "input_ids": torch.tensor([source.ids]),
        "attention_mask": torch.ones(1, len(source), dtype=torch.int64),
    }
    with fastgen.disabled(), torch.no_grad():
        stock = model.generate(**inputs, **generation)
    start, end = model.generation_config.decoder_start_token_id, tokenizer.eos_token_id
    found: list[float] = []
    for written in (
        answer,
        f" {answer}",
    ):  # an answer has lost the space that its first token may begin with
        ids = tokenizer(text_target=written, add_special_tokens=False)["input_ids"]
        found += margins(
            model, inputs, generation, stock, torch.tensor([[start, *ids, end]])
        ).values()
    return min(found, default=math.inf)
