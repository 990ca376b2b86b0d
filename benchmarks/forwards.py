"""Measure forward passes outside `generate`: encoders that classify, against transformers.

    python -m benchmarks.forwards
    python -m benchmarks.forwards --model "bert 2 x 128" "roberta 12 x 768"

Models have published shapes and random weights. Batches hold sentences of equal, similar or
different lengths. One JSON file, forwards.json, goes to benchmarks/results/<hardware>/. The exit
status is 1 if any output differed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from random import Random
from typing import Any, NamedTuple

import torch
import transformers

from benchmarks.harness import begin, common, measured, parser_of
from benchmarks.session import Hits, figures
from fastgen.cli.bench.measure import Verdict, both, compare, synchronize

VOCABULARY = 30_000
BATCHES = {
    "1 of 16": (1, 16, 16),
    "4 of 4 to 12": (4, 4, 12),
    "16 of 32": (16, 32, 32),
    "16 of 30 to 32": (16, 30, 32),
    "16 of 8 to 64": (16, 8, 64),
    "16 of 16 to 256": (16, 16, 256),
}
"""Number of sentences, and tokens of the shortest and the longest, by label."""

SECONDS = 0.03
"""Approximate duration of one side of a round. Shorter calls are repeated."""


class Model(NamedTuple):
    """A transformers model class and its size.

    Attributes:
        kind: name of the class.
        layers: number of layers.
        width: hidden size; heads have 64 channels each.
    """

    kind: str
    layers: int
    width: int


MODELS = {
    "bert 2 x 64": Model("BertForSequenceClassification", 2, 64),
    "bert 2 x 128": Model("BertForSequenceClassification", 2, 128),
    "bert 4 x 256": Model("BertForSequenceClassification", 4, 256),
    "bert 12 x 768": Model("BertForSequenceClassification", 12, 768),
    "bert tags 2 x 128": Model("BertForTokenClassification", 2, 128),
    "bert tags 12 x 768": Model("BertForTokenClassification", 12, 768),
    "electra 12 x 256": Model("ElectraForSequenceClassification", 12, 256),
    "distilbert 6 x 768": Model("DistilBertForSequenceClassification", 6, 768),
    "roberta 12 x 768": Model("RobertaModel", 12, 768),
}


def build(model: Model, tiny: bool = False) -> Any:
    """Return a model in evaluation mode, with the same weights every time."""
    kind = getattr(transformers, model.kind)
    layers, width = (1, 32) if tiny else model[1:]
    words = {  # every name that configs use
        "vocab_size": VOCABULARY, "embedding_size": width, "max_position_embeddings": 512,
        **dict.fromkeys(("num_hidden_layers", "n_layers"), layers),
        **dict.fromkeys(("hidden_size", "dim"), width),
        **dict.fromkeys(("intermediate_size", "hidden_dim"), 4 * width),
        **dict.fromkeys(("num_attention_heads", "n_heads"), max(1, width // 64)),
    }  # fmt: skip
    known = kind.config_class.__dataclass_fields__
    torch.manual_seed(0)
    return kind(
        kind.config_class(**{word: value for word, value in words.items() if word in known})
    ).eval()


def inputs_of(model: Any, sentences: int, shortest: int, longest: int) -> dict[str, Any]:
    """Return random seeded sentences, right-padded; the last one is the longest."""
    draw = Random(1)
    lengths = [*(draw.randint(shortest, longest) for _ in range(sentences - 1)), longest]
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, model.config.vocab_size, (sentences, longest), generator=generator).to(
        model.device
    )
    mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long().to(model.device)
    return {
        "input_ids": ids.masked_fill(mask == 0, model.config.pad_token_id),
        "attention_mask": mask,
    }


def results_of(output: Any, mask: Any) -> list[Any]:
    """Return the tensors of an output without the rows of padding tokens."""
    return [part[mask.bool()] if part.dim() == 3 else part for part in output.values()]


def compared(model: Any, inputs: dict[str, Any], rounds: int, device: str) -> dict[str, Any]:
    """Time a forward pass with and without fastgen; return the speed-up and what ran."""

    def call() -> Any:
        output = None
        for _ in range(calls):
            output = model(**inputs)
        return results_of(output, inputs["attention_mask"])

    def same(stock: list[Any], ours: list[Any]) -> Verdict:
        error = max(
            float((a - b).abs().max() / a.abs().max()) for a, b in zip(stock, ours, strict=True)
        )
        return Verdict(error < 1e-4, note=f"apart by {error:.1e} of the largest value")

    stock, patched = both(call)
    hits, calls = Hits(), 1
    stock()
    began = time.perf_counter()
    stock()
    calls = max(1, round(SECONDS / (time.perf_counter() - began)))
    outcome = compare(
        stock, patched, rounds, same, warmup=2, synchronize=partial(synchronize, device)
    )
    return (
        figures(outcome, calls * int(inputs["attention_mask"].sum()))
        | hits.since()
        | {"calls": calls}
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the models that the arguments name; return the exit status."""
    parser = parser_of("benchmarks.forwards", __doc__)
    parser.add_argument(
        "--model", nargs="+", choices=sorted(MODELS), metavar="NAME", help="default: all"
    )
    args = common(parser, rounds=15).parse_args(argv)
    begin(args.threads)
    return measured(args, "forwards", _cells(args, args.model or list(MODELS)))


def _cells(
    args: argparse.Namespace, names: Sequence[str]
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for name in names:
        model = build(MODELS[name], args.scale == "tiny").to(args.device)
        for batch, sizes in BATCHES.items():
            inputs = inputs_of(model, *((2, 4, 8) if args.scale == "tiny" else sizes))
            yield name, batch, compared(model, inputs, args.rounds, args.device)


if __name__ == "__main__":
    sys.exit(main())
