"""Measure fastgen in int8 against CTranslate2 in int8 on a trained model, with BLEU.

    python -m benchmarks.int8_peer MODEL --input FILE --reference FILE --append-eos

MODEL is a folder of a Marian model. Both systems get batches of the same texts, sorted by length.
Each runs in a process of its own, and the processes take turns, since the threads of one slow down
those of the other. CTranslate2 is needed: `pip install ctranslate2==4.8.5`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from benchmarks import peer_ctranslate2
from benchmarks.harness import begin, finished, option, parser_of, positive, write_result
from fastgen.cli.bench.measure import paired_ratio
from fastgen.cli.bild import pair
from fastgen.cli.generate import quality

FASTGEN, PEER = "fastgen", "CTranslate2"
MAX_NEW_TOKENS = 64


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all, or, as one of the processes, one system."""
    args = _arguments().parse_args(argv)
    begin(args.threads)
    if args.system:
        print(json.dumps(_of_system(args)))
        return 0
    peer_ctranslate2.load()
    references = pair.read_lines(args.reference)[: args.lines]
    cells: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = pair.load_model(args.model, "cpu", "float32")
        args.converted = peer_ctranslate2.convert(model, Path(folder), own_start=True)
        for beams in args.num_beams:
            for batch in args.batch_size:
                cell = cells[f"{batch} texts, {beams} beams"] = _cell(
                    args, batch, beams, references
                )
                print(
                    f"{batch} texts, {beams} beams   {{ratio:.2f}} [{{low:.2f}}, {{high:.2f}}]   "
                    "{bleu}".format(**cell),
                    flush=True,
                )
    name = f"int8_peer_{args.model.name}"
    del args.converted
    write_result(args, name, {"cells": cells, "sentences": len(references)}, kind="int8_peer")
    return 0


def _arguments() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.int8_peer", __doc__)
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--input", type=Path, required=True, metavar="FILE")
    parser.add_argument("--reference", type=Path, required=True, metavar="FILE")
    parser.add_argument("--append-eos", action="store_true", help="end sources with </s>")
    parser.add_argument("--lines", type=positive, metavar="N", help="first lines (default: all)")
    parser.add_argument("--batch-size", type=positive, nargs="+", default=[1, 8, 32])
    parser.add_argument("--num-beams", type=positive, nargs="+", default=[1, 4])
    option(parser, "rounds", default=3, help="default: 3")
    option(parser, "threads", default=1, help="default: 1")
    option(parser, "out")
    parser.add_argument("--system", choices=[FASTGEN, PEER], help=argparse.SUPPRESS)
    parser.add_argument("--converted", type=Path, help=argparse.SUPPRESS)
    return parser


def _cell(args: argparse.Namespace, batch: int, beams: int, references: list[str]) -> Any:
    """Return the ratio over rounds with its interval, seconds, and BLEU of both systems."""
    seconds: dict[str, list[float]] = {FASTGEN: [], PEER: []}
    texts: dict[str, list[str]] = {}
    command = [sys.executable, "-m", "benchmarks.int8_peer", str(args.model)]
    command += ["--input", str(args.input), "--reference", str(args.reference)]
    command += ["--append-eos"] * args.append_eos + ["--converted", str(args.converted)]
    command += ["--lines", str(len(references)), "--threads", str(args.threads)]
    command += ["--batch-size", str(batch), "--num-beams", str(beams)]
    for _ in range(args.rounds):
        for system, times in seconds.items():
            done = finished([*command, "--system", system], {"FASTGEN_PRECISION": "int8"})
            found = json.loads(done.stdout.splitlines()[-1])
            times.append(found["seconds"])
            texts[system] = found["texts"]
    ratio, low, high = paired_ratio(seconds[PEER], seconds[FASTGEN])
    bleu = {
        system: quality.METRICS["bleu"]().score(found, references)
        for system, found in texts.items()
    }
    return {"ratio": ratio, "low": low, "high": high, "seconds": seconds, "bleu": bleu}


def _of_system(args: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds that one system takes for all texts, and its outputs."""
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(args.model)
    lines = pair.read_lines(args.input)[: args.lines]
    sources = pair.encode(tokenizer, lines, args.append_eos, None)
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    size = args.batch_size[0]
    batches = [order[i : i + size] for i in range(0, len(order), size)]
    run = {FASTGEN: _fastgen, PEER: _peer}[args.system](args)
    found: dict[int, list[int]] = {}
    for batch in batches[:: max(1, len(batches) // 8)]:
        run([sources[i] for i in batch])
    began = time.perf_counter()
    for batch in batches:
        found |= zip(batch, run([sources[i] for i in batch]), strict=True)
    seconds = time.perf_counter() - began
    texts = [tokenizer.decode(found[i], skip_special_tokens=True) for i in range(len(sources))]
    return {"seconds": seconds, "texts": texts}


def _fastgen(args: argparse.Namespace) -> Callable[[list[list[int]]], list[list[int]]]:
    model = pair.load_model(args.model, "cpu", "float32")
    settings = pair.greedy(model, MAX_NEW_TOKENS) | {"num_beams": args.num_beams[0]}
    pad = model.config.pad_token_id

    def run(sources: list[list[int]]) -> list[list[int]]:
        longest = max(map(len, sources))
        rows = [source + [pad] * (longest - len(source)) for source in sources]
        mask = [[1] * len(source) + [0] * (longest - len(source)) for source in sources]
        output: Any = model.generate(
            torch.tensor(rows), attention_mask=torch.tensor(mask), **settings
        )
        return output.tolist()

    return run


def _peer(args: argparse.Namespace) -> Callable[[list[list[int]]], list[list[int]]]:
    translator = peer_ctranslate2.load().Translator(
        str(args.converted), device="cpu", compute_type="int8", intra_threads=args.threads
    )

    def run(sources: list[list[int]]) -> list[list[int]]:
        results = translator.translate_batch(
            [[f"t{token}" for token in source] for source in sources],
            beam_size=args.num_beams[0],
            max_decoding_length=MAX_NEW_TOKENS,
        )
        return [[int(token[1:]) for token in each.hypotheses[0]] for each in results]

    return run


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
