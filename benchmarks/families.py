"""Every model family that is proven, at one small size, beside the unpatched toolkit: is any of them slower?

    python -m benchmarks.families
    python -m benchmarks.families --family bloom led

Models of four layers of 256 (encoder-decoders of four and four) with random weights; three calls of each: 4 beams, a
greedy batch, one sentence. One JSON file, families.json, goes to benchmarks/results/<hardware>/. The exit status is 1
if any output differed.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.run import RESULTS, hardware, positive

VOCABULARY, NEW_TOKENS = 8_000, 16
CALLS = {"4 x 128, 4 beams": (4, 128, 4), "8 x 64, greedy": (8, 64, 1), "1 x 32, greedy": (1, 32, 1)}
"""Sentences, tokens of each source or prompt, beams."""

_SIZES: dict[int, tuple[str, ...]] = {
    256: ("hidden_size", "d_model", "n_embd", "word_embed_proj_dim"),
    1024: ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff"),
    4: (
        "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_heads",
        "num_encoder_layers", "num_decoder_layers", "num_attention_heads", "n_head", "n_heads", "attention_heads",
        "encoder_attention_heads", "decoder_attention_heads", "num_encoder_attention_heads",
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
"""What configs call their sizes."""

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
    """Return a model of a family, in evaluation mode, with the same weights every time."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

    kind = CONFIG_MAPPING[name]
    known = inspect.signature(kind).parameters
    values = {word: size for size, words in _SIZES.items() for word in words if word in known}
    values |= dict.fromkeys({"init_std", "initializer_range"} & set(known), 0.08) | _OWN.get(name, {})
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
    """Random seeded inputs of a call: token ids and their mask, or what Whisper hears."""
    import torch

    generator = torch.Generator().manual_seed(1)
    config = model.config
    if config.model_type == "whisper":
        sound = torch.randn(sentences, config.num_mel_bins, 2 * config.max_source_positions, generator=generator)
        return {"input_features": sound.to(model.device)}
    words = getattr(config, "vocab_size", None) or config.src_vocab_size
    ids = torch.randint(5, words, (sentences, tokens), generator=generator).to(model.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def compare(model: Any, sentences: int, tokens: int, beams: int, rounds: int, new_tokens: int, device: str) -> Any:
    """One call beside itself unpatched, and why it was left alone, if it was."""
    import fastgen
    from benchmarks.ops import synchronize
    from benchmarks.runners import Hits, both, figures
    from fastgen.cli import measure
    from fastgen.cli.agreement import Agreement

    inputs = inputs_of(model, sentences, tokens)
    options = {"num_beams": beams, "do_sample": False, "min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
    fastgen.release()
    hits = Hits()
    outcome = measure.compare(
        *both(lambda: model.generate(**inputs, **options)), rounds, Agreement(model, inputs, options),
        synchronize=lambda: synchronize(device),
    )  # fmt: skip
    return figures(outcome, sentences * new_tokens) | hits.since()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the families that the arguments name; return the exit status."""
    from fastgen.models.families import FAMILIES

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.families", description=(__doc__ or "").split("\n\n", 1)[0]
    )
    add = parser.add_argument
    add("--family", nargs="+", choices=sorted(FAMILIES), metavar="NAME", help="default: all")
    add("--rounds", type=positive, default=5, metavar="N", help="default: 5")
    add("--threads", type=positive, metavar="N", help="torch's CPU threads (default: torch's choice)")
    add("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    add("--scale", default="full", choices=["full", "tiny"], help="tiny: a test of the benchmark itself")
    add("--out", type=Path, metavar="DIR", help="folder (default: benchmarks/results/<hardware>)")
    args = parser.parse_args(argv)
    import torch
    from transformers.utils import logging

    from benchmarks.runners import outcome_text
    from fastgen.cli.measure import environment

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_grad_enabled(False)
    if args.threads:
        torch.set_num_threads(args.threads)
    tiny = args.scale == "tiny"
    results: dict[str, Any] = {}
    for name in args.family or sorted(FAMILIES):
        model = build(name, tiny).to(args.device)
        for call, (sentences, tokens, beams) in CALLS.items():
            sizes = (2, 8, beams) if tiny else (sentences, tokens, beams)
            new_tokens = 4 if tiny else NEW_TOKENS
            found = compare(model, *sizes, args.rounds, new_tokens, args.device)
            results.setdefault(name, {})[call] = found
            print(f"{name:<18}{call:<20}{outcome_text(found)}", flush=True)
        del model
    folder = args.out or RESULTS / hardware(args.device)
    folder.mkdir(parents=True, exist_ok=True)
    data = {
        "case": "families", "kind": "families", "arguments": {"threads": args.threads, "rounds": args.rounds},
        "environment": environment(), "result": results,
    }  # fmt: skip
    (folder / "families.json").write_text(json.dumps(data, indent=1) + "\n", "utf-8")
    return 0 if all(found["equal"] for calls in results.values() for found in calls.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
