"""Measure every supported model family, at one small size, against the unpatched toolkit.

    python -m benchmarks.families
    python -m benchmarks.families --family bloom led

Models have random weights and four layers of width 256 (encoder-decoders: four and four). Each
family runs three calls: 4 beams, a greedy batch, and one greedy sentence. One JSON file,
families.json, goes to benchmarks/results/<hardware>/. The exit status is 1 if any output differed.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
)

import fastgen.unilm  # registers its family
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

_SIZES: dict[int, tuple[str, ...]] = {
    256: ("hidden_size", "d_model", "n_embd", "word_embed_proj_dim"),
    1024: ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff"),
    4: (
        "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers",
        "decoder_layers", "num_heads", "num_encoder_layers", "num_decoder_layers",
        "num_attention_heads", "n_head", "n_heads", "attention_heads", "encoder_attention_heads",
        "decoder_attention_heads", "num_encoder_attention_heads",
        "num_decoder_attention_heads", "num_key_value_heads",
    ),
    64: ("head_dim", "d_kv", "attention_window"),
    512: (
        "n_positions", "max_position_embeddings", "max_seq_len", "max_encoder_position_embeddings",
        "max_decoder_position_embeddings",
    ),
    VOCABULARY: ("vocab_size", "src_vocab_size", "tgt_vocab_size"),
    0: ("pad_token_id",),
    1: ("bos_token_id",),
    2: ("eos_token_id",),
    3: ("decoder_start_token_id",),
}  # fmt: skip
"""Names that configs use for their sizes, by value."""

_OWN: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 32},
    "fsmt": {"langs": ["en", "de"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 64},
    "gptj": {"rotary_dim": 32},
    "mpt": {"use_cache": True},
    **{key: {"decoder_start_token_id": 0} for key in ("mt5", "t5", "umt5")},
    "unilm": {"mask_token_id": 4},
    "whisper": {"max_source_positions": 128, "max_target_positions": 128, "suppress_tokens": None,
                "begin_suppress_tokens": None},
}  # fmt: skip


def build(name: str, tiny: bool = False) -> Any:
    """Return a model of a family in evaluation mode, with the same weights every time."""
    kind = CONFIG_MAPPING[name]
    known = inspect.signature(kind).parameters
    values = {word: size for size, words in _SIZES.items() for word in words if word in known}
    values |= dict.fromkeys({"init_std", "initializer_range"} & set(known), 0.08) | _OWN.get(
        name, {}
    )
    values |= {"forced_eos_token_id": None} if "forced_eos_token_id" in known else {}
    if tiny:
        values |= {word: 1 for word in values if "layers" in word or word == "n_layer"} | {
            word: 60 for word in _SIZES[VOCABULARY] if word in known
        }
        values |= {"attention_types": [[["local"], 1]]} if name == "gpt_neo" else {}
    config: Any = kind(**values)
    text = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    auto: Any = AutoModelForSpeechSeq2Seq if name == "whisper" else text
    torch.manual_seed(0)
    return auto.from_config(config).eval()


def inputs_of(model: Any, sentences: int, tokens: int) -> dict[str, Any]:
    """Return random seeded inputs of a call: token ids and mask, or audio features for Whisper."""
    generator = torch.Generator().manual_seed(1)
    config = model.config
    if config.model_type == "whisper":
        sound = torch.randn(
            sentences, config.num_mel_bins, 2 * config.max_source_positions, generator=generator
        )
        return {"input_features": sound.to(model.device)}
    words = getattr(config, "vocab_size", None) or config.src_vocab_size
    ids = torch.randint(5, words, (sentences, tokens), generator=generator).to(model.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the families that the arguments name; return the exit status."""
    parser = parser_of("benchmarks.families", __doc__)
    parser.add_argument(
        "--family", nargs="+", choices=sorted(SPECS), metavar="NAME", help="default: all"
    )
    args = common(parser, rounds=5).parse_args(argv)
    begin(args.threads)
    return measured(args, "families", _cells(args, args.family or sorted(SPECS)))


def _cells(
    args: argparse.Namespace, names: Sequence[str]
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    tiny = args.scale == "tiny"
    for name in names:
        model = build(name, tiny).to(args.device)
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
            inputs = inputs_of(model, *sizes)
            yield (
                name,
                call,
                compared(model, inputs, options, sizes[0] * new, Session(args.device), args.rounds),
            )


if __name__ == "__main__":
    sys.exit(main())
