"""Measure `generate_batch` with fastgen against transformers' own and against a padded `generate`.

    python -m benchmarks.many_requests --threads 2

Many requests of different lengths end at different steps. Tokens of every request are compared in
every round. transformers' own `generate_batch` has no beams and no encoder-decoder models, so those
are compared with the padded `generate` alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fastgen
from benchmarks.cases import SHAPES, Shape
from benchmarks.harness import begin, common, parser_of, positive, write_result
from benchmarks.session import in_turn
from benchmarks.setting import ENDS
from benchmarks.weights import Weights
from fastgen.cli.bench.agreement import Agreements

MODELS = {
    "decoder-only": Shape(
        "LlamaConfig",
        {
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "vocab_size": 16000,
            "pad_token_id": 0,
        },
        {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64},
        Weights(gain=2.5, embedding=0.1),
    ),
    "encoder-decoder": SHAPES["small"],
}
CALLS = {"greedy": 1, "4 beams": 4}
Arm = Callable[[], list[Tensor]]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all models and calls; return 1 if an output differed."""
    parser = common(parser_of("benchmarks.many_requests", __doc__), 5)
    parser.add_argument("--requests", type=positive, default=32, metavar="N", help="default: 32")
    parser.add_argument("--new-tokens", type=positive, default=64, metavar="N", help="default: 64")
    args = parser.parse_args(argv)
    begin(args.threads)
    cells: dict[str, Any] = {}
    for name, shape in MODELS.items():
        model = (shape.tiny_version() if args.scale == "tiny" else shape).build(
            torch.float32, args.device
        )
        for call, beams in CALLS.items():
            cells[f"{name}, {call}"] = cell = _cell(model, beams, args)
            print(f"{name}, {call:<10}{_text(cell)}", flush=True)
            write_result(args, "many_requests", {"cells": cells, "requests": args.requests})
    return 0 if all(cell["equal"] for cell in cells.values()) else 1


def _cell(model: Any, beams: int, args: argparse.Namespace) -> dict[str, Any]:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    prompts = _prompts(model, args.requests)
    options = {
        "num_beams": beams,
        "max_new_tokens": args.new_tokens,
        "eos_token_id": list(range(5, model.config.vocab_size - 1, ENDS)),
        "pad_token_id": model.config.pad_token_id,
        "do_sample": False,
    }
    pages = ContinuousBatchingConfig(num_blocks=4 * args.requests, page_size=64)
    config = GenerationConfig(**options)
    batched = partial(_batched, model, prompts, config, pages)
    arms: dict[str, Arm] = {"fastgen": batched, "padded": _unpatched(partial(
        _padded, model, prompts, options))}  # fmt: skip
    if beams == 1 and not model.config.is_encoder_decoder:
        arms["stock"] = _unpatched(batched)
    same = Agreements(model, [{"input_ids": torch.tensor([one])} for one in prompts], options)

    def check(outputs: Sequence[list[Tensor]]) -> str | None:
        verdicts = [same(other, outputs[0]) for other in outputs[1:]]
        return "; ".join(one.note for one in verdicts if not one.agrees) or None

    result = in_turn(arms, args.rounds, check)
    return result | {"tokens": same.tokens} if result["equal"] else result


def _prompts(model: Any, count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(8, 65, (count,), generator=generator).tolist()
    last = model.config.vocab_size - 1
    return [torch.randint(4, last, (n,), generator=generator).tolist() for n in lengths]


def _batched(model: Any, prompts: list[list[int]], config: Any, pages: Any) -> list[Tensor]:
    found = model.generate_batch(prompts, config, pages)
    start = [model.config.decoder_start_token_id] if model.config.is_encoder_decoder else None
    return [torch.tensor([(start or one.prompt_ids) + one.generated_tokens])
            for one in found.values()]  # fmt: skip


def _padded(model: Any, prompts: list[list[int]], options: dict[str, Any]) -> list[Tensor]:
    """Generate all prompts in one padded batch."""
    width, fill = max(map(len, prompts)), model.config.pad_token_id
    is_text_to_text = model.config.is_encoder_decoder
    rows = [[fill] * (width - len(one)) for one in prompts]
    ids = [one + pad if is_text_to_text else pad + one
           for one, pad in zip(prompts, rows, strict=True)]  # fmt: skip
    masks = [
        [1] * len(one) + [0] * len(pad) if is_text_to_text else [0] * len(pad) + [1] * len(one)
        for one, pad in zip(prompts, rows, strict=True)
    ]
    found = model.generate(
        input_ids=torch.tensor(ids), attention_mask=torch.tensor(masks), **options
    )
    ends = torch.tensor(options["eos_token_id"])
    begin = 1 if is_text_to_text else width
    cut: list[Tensor] = []
    for row, prompt in zip(found, prompts, strict=True):
        text = row[begin:]
        ended = torch.isin(text, ends).nonzero()
        text = text[: int(ended[0]) + 1] if len(ended) else text
        start = row[:1] if is_text_to_text else torch.tensor(prompt)
        cut.append(torch.cat([start, text])[None])
    return cut


def _unpatched(call: Arm) -> Arm:
    def run() -> list[Tensor]:
        with fastgen.disabled():
            return call()

    return run


def _text(cell: dict[str, Any]) -> str:
    if not cell["equal"]:
        return f"OUTPUTS DIFFER: {cell['note']}"
    return ", ".join(
        f"{one['ratio']:.2f}x [{one['low']:.2f}, {one['high']:.2f}] of {name}"
        for name, one in cell["over"].items()
    )


if __name__ == "__main__":
    sys.exit(main())
