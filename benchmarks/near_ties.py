"""Check for a near tie where only the text of the differing answer is known, not its tokens."""

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
    """Return whether rounding may have selected the answer.

    transformers' search runs for this text alone. The answer is a near tie if the search decided
    against it by less than `NEAR_TIE`.

    Args:
        generator: generator with an encoder-decoder in fp32.
        generation: arguments of `generate`.
        text: source text.
        answer: answer that differs from that of the search.
    """
    return _margin(generator, generation, text, answer) < NEAR_TIE[torch.float32]


def _margin(generator: TextGenerator, generation: dict[str, Any], text: str, answer: str) -> float:
    """Return the margin by which the search decided against the answer.

    It is infinite if the source cannot be encoded, or if the search could not have produced any
    tokenization of the answer.
    """
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
    candidates: list[float] = []
    # The answer is stripped, but its first token may begin with a space.
    for written in (answer, f" {answer}"):
        ids = tokenizer(text_target=written, add_special_tokens=False)["input_ids"]
        candidates += margins(
            model, inputs, generation, stock, torch.tensor([[start, *ids, end]])
        ).values()
    return min(candidates, default=math.inf)
