"""Measure every supported model family, at one small size, against the unpatched toolkit.

    python -m benchmarks.families
    python -m benchmarks.families --family bloom led --dtype bfloat16

Models have random weights and four layers of width 256 (encoder-decoders: four and four). Each
family runs three calls: 4 beams, a greedy batch, and one greedy sentence. One JSON file,
families.json or families_bfloat16.json, goes to benchmarks/results/<hardware>/. The exit status is
1 if any output differed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

import fastgen.unilm  # registers its family
from benchmarks.coverage import recipe
from benchmarks.coverage.recipe import Sizes
from benchmarks.harness import begin, common, measured, parser_of
from benchmarks.session import Session, compared
from fastgen.models.specs.registry import SPECS

VOCABULARY, NEW_TOKENS = 8_000, 16
CALLS = {
    "4 x 128, 4 beams": (4, 128, 4),
    "8 x 64, greedy": (8, 64, 1),
    "1 x 32, greedy": (1, 32, 1),
}
"""Number of sentences, tokens of each source or prompt, and beams, by label."""

_SIZES = Sizes(256, 1024, 4, 4, 4, 64, 512, VOCABULARY)
_TINY = replace(_SIZES, layers=1, vocabulary=60)
_OWN: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 32},
    "fsmt": {"langs": ["en", "de"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 64},
    "gptj": {"rotary_dim": 32},
    "mpt": {"use_cache": True},
    "unilm": {"mask_token_id": 4},
    "whisper": {"max_source_positions": 128, "max_target_positions": 128, "suppress_tokens": None,
                "begin_suppress_tokens": None},
    **{
        name: {"q_lora_rank": 128, "kv_lora_rank": 128}
        for name in (
            "axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "sarvam_mla", "youtu"
        )
    },
}  # fmt: skip


def build(name: str, tiny: bool = False) -> Any:
    """Return a model of a family in evaluation mode, with the same weights every time."""
    own = {"init_std": 0.08, "initializer_range": 0.08} | _OWN.get(name, {})
    own |= {"attention_types": [[["local"], 1]]} if tiny and name == "gpt_neo" else {}
    return recipe.build(name, _TINY if tiny else _SIZES, own)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the families that the arguments name; return the exit status."""
    parser = parser_of("benchmarks.families", __doc__)
    parser.add_argument(
        "--family", nargs="+", choices=sorted(SPECS), metavar="NAME", help="default: all"
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    args = common(parser, rounds=5).parse_args(argv)
    begin(args.threads)
    return measured(args, "families", _cells(args, args.family or sorted(SPECS)))


def _cells(
    args: argparse.Namespace, names: Sequence[str]
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    tiny, dtype = args.scale == "tiny", getattr(torch, args.dtype)
    for name in names:
        model = build(name, tiny).to(args.device, dtype)
        for call, (sentences, tokens, beams) in CALLS.items():
            sizes = (2, 8) if tiny else (sentences, tokens)
            new = 4 if tiny else NEW_TOKENS
            options = {
                "num_beams": beams,
                "do_sample": False,
                "min_new_tokens": new,
                "max_new_tokens": new,
            }
            fastgen.release()
            inputs = {
                key: value.to(dtype) if value.is_floating_point() else value
                for key, value in recipe.inputs_of(model, *sizes).items()
            }
            yield (
                name,
                call,
                compared(
                    model, inputs, options, sizes[0] * new, Session(args.device, dtype), args.rounds
                ),
            )


if __name__ == "__main__":
    sys.exit(main())
