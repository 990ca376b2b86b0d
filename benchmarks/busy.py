"""Measure single texts beside busy processes: `python -m benchmarks.busy`.

Greedy search of one text at a time with a random Marian model, on one and on two threads, and by
transformers alone on two, beside zero, one, two and four processes, each of which computes on two
threads without a pause. Rounds alternate between the three. Prints the median time of a text in
milliseconds.
"""

import argparse
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext

import torch
from transformers import MarianConfig, MarianMTModel

import fastgen

BUSY = (0, 1, 2, 4)
THREADS_OF_EACH = 2
SIDES = {"fastgen, 1 thread": 1, "fastgen, 2 threads": 2, "transformers, 2 threads": 2}
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


def text_time(of: MarianMTModel, source: torch.Tensor, tokens: int) -> float:
    """Return the seconds that one text takes."""
    start = time.perf_counter()
    of.generate(source, max_new_tokens=tokens, min_new_tokens=tokens, num_beams=1)
    return time.perf_counter() - start


def measure(of: MarianMTModel, rounds: int, tokens: int) -> dict[str, float]:
    """Return the median milliseconds of a text for each side."""
    source = torch.randint(1, 15_000, (1, 24))
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(rounds):
        for side in SIDES if number % 2 else reversed(SIDES):
            torch.set_num_threads(SIDES[side])
            with nullcontext() if side.startswith("fastgen") else fastgen.disabled():
                times[side].append(text_time(of, source, tokens))
    return {side: 1000 * statistics.median(each) for side, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--busy", type=int, nargs="+", default=BUSY, metavar="PROCESSES")
    arguments = parser.parse_args()
    of = model()
    measure(of, 4, arguments.tokens)
    for count in arguments.busy:
        command = [sys.executable, "-S", "-c", SPIN]  # for each thread, as Python has one lock
        others = [subprocess.Popen(command) for _ in range(THREADS_OF_EACH * count)]
        try:
            found = measure(of, arguments.rounds, arguments.tokens)
        finally:
            for other in others:
                other.kill()
                other.wait()
        line = ", ".join(f"{side} {each:6.0f} ms" for side, each in found.items())
        print(f"{count} busy processes: {line}", flush=True)
    print(f"operations in C: {fastgen.status().native}")


if __name__ == "__main__":
    main()
