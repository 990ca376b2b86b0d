"""Measure single texts beside busy processes: `python -m benchmarks.busy`.

Greedy search of one text at a time with a random Marian model, on one and on two threads, and by
transformers alone on two, beside zero, one, two and four processes, each of which computes on two
threads without a pause; with `--peer ctranslate2`, by CTranslate2 on two threads, too. Rounds
alternate between them. Prints the median time of a text in milliseconds.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import MarianConfig, MarianMTModel

import fastgen
from benchmarks import peer_ctranslate2

BUSY = (0, 1, 2, 4)
THREADS_OF_EACH = 2
SPIN = "while True: pass"


def model() -> MarianMTModel:
    """Return a random model of 37 million parameters."""
    torch.manual_seed(0)
    config = MarianConfig(
        vocab_size=16_000, d_model=512, encoder_layers=3, decoder_layers=3,
        encoder_attention_heads=8, decoder_attention_heads=8, encoder_ffn_dim=2048,
        decoder_ffn_dim=2048, max_position_embeddings=128, pad_token_id=15_999, eos_token_id=0,
        decoder_start_token_id=15_999, forced_eos_token_id=None, init_std=0.1,
    )  # fmt: skip
    return MarianMTModel(config).eval()


def sides(of: MarianMTModel, tokens: int, peer: bool) -> dict[str, Callable[[], Any]]:
    """Return by name what translates one text, each on the threads that it sets."""
    source = torch.randint(1, 15_000, (1, 24))
    options: dict[str, Any] = {
        "num_beams": 1, "do_sample": False, "min_new_tokens": tokens, "max_new_tokens": tokens,
    }  # fmt: skip

    def generate(threads: int, patched: bool) -> None:
        torch.set_num_threads(threads)
        with nullcontext() if patched else fastgen.disabled():
            of.generate(source, **options)

    found: dict[str, Callable[[], Any]] = {
        "fastgen, 1 thread": lambda: generate(1, True),
        "fastgen, 2 threads": lambda: generate(2, True),
        "transformers, 2 threads": lambda: generate(2, False),
    }
    if peer:
        inputs = {"input_ids": source, "attention_mask": torch.ones_like(source)}
        torch.set_num_threads(2)
        with tempfile.TemporaryDirectory() as folder:
            place = peer_ctranslate2.convert(of, Path(folder))
            found["CTranslate2, 2 threads"] = peer_ctranslate2.Peer(
                place, of, inputs, options, "cpu"
            )
    return found


def measure(by_name: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the median milliseconds of a text for each side."""
    times: dict[str, list[float]] = {side: [] for side in by_name}
    for number in range(rounds):
        for side in by_name if number % 2 else reversed(by_name):
            start = time.perf_counter()
            by_name[side]()
            times[side].append(time.perf_counter() - start)
    return {side: 1000 * statistics.median(each) for side, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--busy", type=int, nargs="+", default=BUSY, metavar="PROCESSES")
    parser.add_argument("--peer", choices=["ctranslate2"])
    arguments = parser.parse_args()
    by_name = sides(model(), arguments.tokens, arguments.peer is not None)
    measure(by_name, 4)
    for count in arguments.busy:
        command = [sys.executable, "-S", "-c", SPIN]  # for each thread, as Python has one lock
        others = [subprocess.Popen(command) for _ in range(THREADS_OF_EACH * count)]
        try:
            found = measure(by_name, arguments.rounds)
        finally:
            for other in others:
                other.kill()
                other.wait()
        line = ", ".join(f"{side} {each:6.0f} ms" for side, each in found.items())
        print(f"{count} busy processes: {line}", flush=True)
    print(f"operations in C: {fastgen.status().native}")


if __name__ == "__main__":
    main()
