"""Measure single texts beside busy processes: `python -m benchmarks.busy`.

Greedy search of one text at a time with a random Marian model, on one and on two threads, beside
zero, one, two and four processes that compute without a pause. Rounds alternate between the thread
counts. Prints the median time of a text in milliseconds.
"""

import argparse
import statistics
import subprocess
import sys
import time

import torch
from transformers import MarianConfig, MarianMTModel

import fastgen

BUSY = (0, 1, 2, 4)
THREADS = (1, 2)
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


def measure(of: MarianMTModel, rounds: int, tokens: int) -> dict[int, float]:
    """Return the median milliseconds of a text for each number of threads."""
    source = torch.randint(1, 15_000, (1, 24))
    times: dict[int, list[float]] = {threads: [] for threads in THREADS}
    for number in range(rounds):
        for threads in THREADS if number % 2 else THREADS[::-1]:
            torch.set_num_threads(threads)
            times[threads].append(text_time(of, source, tokens))
    return {threads: 1000 * statistics.median(each) for threads, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--busy", type=int, nargs="+", default=BUSY, metavar="PROCESSES")
    arguments = parser.parse_args()
    of = model()
    measure(of, 4, arguments.tokens)
    for count in arguments.busy:
        others = [subprocess.Popen([sys.executable, "-S", "-c", SPIN]) for _ in range(count)]
        try:
            found = measure(of, arguments.rounds, arguments.tokens)
        finally:
            for other in others:
                other.kill()
                other.wait()
        line = ", ".join(f"{each:6.0f} ms on {threads}" for threads, each in found.items())
        print(f"{count} busy processes: {line}", flush=True)
    print(f"operations in C: {fastgen.status().native}")


if __name__ == "__main__":
    main()
