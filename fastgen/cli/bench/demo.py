"""Run plain transformers code unpatched and patched: same output, and how much faster?

Part 1 translates real sentences with the small trained model of examples/en-es. Part 2 runs a model
of BART-large's shape. Both run in one process. No speed is shown where the outputs differ.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import fastgen
from fastgen.cli.bench.counts import counts
from fastgen.errors import CommandError, needs
from fastgen.number import COUNT

if TYPE_CHECKING:
    from torch import Tensor

    from fastgen.cli.bench.measure import Outcome
    from fastgen.cli.bench.workloads import Text, Workload

HELP = "translate real sentences with and without fastgen, side by side"
TRANSLATIONS_SHOWN = 3


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    folder = Path(__file__).resolve().parents[3] / "examples" / "en-es"
    parser.add_argument(
        "--examples",
        type=Path,
        default=folder,
        metavar="DIR",
        help="folder with model/, test.en and test.es",
    )
    parser.add_argument(
        "--sentences", type=COUNT, default=200, metavar="N", help="sentences to translate (200)"
    )
    parser.add_argument(
        "--tokens", type=COUNT, default=16, metavar="N", help="new tokens in part 2 (16)"
    )
    parser.add_argument(
        "--rounds",
        type=COUNT,
        default=5,
        metavar="N",
        help="rounds of part 1 (5); part 2 has at most 2",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="8 sentences, one round, and a toy model in part 2: a test, not a measurement",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all results to FILE as well"
    )


def run(args: argparse.Namespace) -> int:
    """Run both parts.

    Returns:
        1 if an output differed or fastgen did not run; else 0.
    """
    if args.json and not args.json.resolve().parent.is_dir():
        raise CommandError(f"--json {args.json}: there is no folder {args.json.resolve().parent}")
    try:
        from fastgen.cli.bench.measure import environment
        from fastgen.cli.bench.workloads import bart, translation
    except ModuleNotFoundError as error:
        raise CommandError(needs(str(error.name))) from error
    from transformers.utils import logging

    logging.disable_progress_bar()
    rounds = 1 if args.quick else args.rounds
    place = environment()
    print(
        f"fastgen {place['fastgen']}, transformers {place['transformers']}, "
        f"torch {place['torch']}, {place['threads']} threads, {place['gpu'] or place['cpu']}\n"
    )
    workload, text = translation(args.examples, 8 if args.quick else args.sentences)
    parts = [_part(workload, rounds, text)]
    del workload
    parts.append(_part(bart(4 if args.quick else args.tokens, small=args.quick), min(rounds, 2)))
    print(fastgen.status())
    if args.json:
        figures = {"environment": place, "parts": parts, "status": fastgen.status().to_dict()}
        args.json.write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n", "utf-8")
    return 0 if all(part["outcome"]["equal"] and part["hits"] for part in parts) else 1


def _part(workload: "Workload", rounds: int, text: "Text | None" = None) -> dict[str, Any]:
    """Measure one workload, print the result, and return it as JSON-ready data."""
    from fastgen.cli.bench.agreement import Agreements
    from fastgen.cli.bench.measure import compare
    from fastgen.cli.bench.workloads import KVPeak, watched_cache
    from fastgen.patches.transformers.generate.report import last_call

    print(f"{workload.name}\n  {workload.detail}")
    kv_stock, kv_fastgen, kv_expected = KVPeak(), KVPeak(), KVPeak()
    before_all = counts()
    same = Agreements(workload.model, workload.batches, workload.generate)

    with _progress(workload, rounds) as advance:

        def stock() -> list["Tensor"]:
            with fastgen.disabled():
                if kv_stock.bytes is None:  # the warm-up, which is not timed
                    with watched_cache(workload.model, kv_stock):
                        return workload.run(advance)
                return workload.run(advance)

        def patched() -> list["Tensor"]:
            before = last_call()

            def after_batch() -> None:
                nonlocal before
                call = last_call()
                # If transformers' own code ran, the report is of an earlier call.
                if call and call is not before:
                    before = call
                    kv_fastgen.see(call.kv_bytes)
                    kv_expected.see(call.stock_kv_bytes)
                advance()

            return workload.run(after_batch)

        outcome = compare(stock, patched, rounds, same)
    counted = counts().since(before_all)
    part: dict[str, Any] = {
        "name": workload.name,
        "detail": workload.detail,
        "sentences": workload.sentences,
        "generated_tokens": same.tokens,
        "outcome": outcome.to_dict(),
        "kv_cache_bytes": {
            "transformers": kv_stock.bytes,
            "fastgen": kv_fastgen.bytes,
            "transformers_computed": kv_expected.bytes,
        },
        "hits": counted.hits,
        "fallbacks": counted.fallbacks,
    }
    _print_figures(part, outcome)
    if text is not None:
        part |= _translations(text, text.decode(workload, same.other))
    print()
    return part


def _print_figures(part: dict[str, Any], outcome: "Outcome") -> None:
    """Print the result of one part; speed only if fastgen ran and the outputs are the same."""
    import torch

    from fastgen.cli.bench.measure import MIN_ROUNDS
    from fastgen.decoding.search.near_ties import NEAR_TIE

    limit = NEAR_TIE[torch.float32]
    rounds = f"{len(outcome.rounds)} round{'s' if len(outcome.rounds) > 1 else ''}"
    if outcome.equal:
        print(f"  same output           yes, all {part['sentences']}, in the warm-up and {rounds}")
        if outcome.near_ties:
            print(
                f"{'':24}({outcome.near_ties} by a near tie: "
                f"transformers' own margin was below {limit:g})"
            )
    else:
        print(f"  same output           NO: {outcome.note}; no speed is shown")
    if not part["hits"]:
        print("  fastgen did not run, so no speed is shown; the table at the end has the reason")
    for reason, count in part["fallbacks"].items():
        print(f"  transformers' own code ran {count} times: {reason}")
    timed = outcome.equal and part["hits"]
    lines: list[tuple[str, list[str]]] = []
    if timed:
        seconds = (outcome.baseline_seconds, outcome.candidate_seconds)
        for name, count in (
            ("sentences/s", part["sentences"]),
            ("tokens/s", part["generated_tokens"]),
        ):
            lines.append((name, [f"{count / s:.2f}" for s in seconds]))
        lines.append(("seconds", [f"{s:.2f}" for s in seconds]))
    kv = part["kv_cache_bytes"]
    lines.append(
        ("KV cache, peak MiB", [_mebibytes(kv["transformers"]), _mebibytes(kv["fastgen"])])
    )
    for name, (stock, ours) in [("", ["transformers", "fastgen"]), *lines]:
        print(f"  {name:<22}{stock:>12}{ours:>12}")
    if timed:
        # With few rounds the bootstrap interval is just the range of the ratios.
        kind = "95% interval" if len(outcome.rounds) >= MIN_ROUNDS else "range"
        spread = (
            f"{kind} {outcome.low:.2f} to {outcome.high:.2f}; " if len(outcome.rounds) > 1 else ""
        )
        print(
            f"  faster by             {outcome.ratio:.2f}x "
            f"({spread}median of {rounds}, alternating)"
        )


def _mebibytes(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 2**20:.2f}"


def _translations(text: "Text", translations: list[str]) -> dict[str, Any]:
    """Print some translations and the BLEU of all; return them as JSON-ready data."""
    for i in range(0, len(translations), max(1, len(translations) // TRANSLATIONS_SHOWN))[
        :TRANSLATIONS_SHOWN
    ]:
        print()
        for name, side in (
            ("en", text.sources),
            ("es", translations),
            ("reference", text.references),
        ):
            print(f"  {name:<11}{shorten(side[i], 160)}")
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ModuleNotFoundError:
        print(f"\n  BLEU: not computed, {needs('sacrebleu')}")
        return {"translations": translations}
    metric = BLEU()
    score = metric.corpus_score(translations, [text.references]).score
    signature = str(metric.get_signature())
    print(f"\n  BLEU of these {len(translations)}: {score:.1f} ({signature})")
    return {"translations": translations, "bleu": score, "bleu_signature": signature}


@contextmanager
def _progress(workload: "Workload", rounds: int) -> Iterator[Any]:
    """Show a progress bar and yield the function that advances it by one batch.

    The bar covers a warm-up and `rounds` rounds of both arms.
    """
    from tqdm import tqdm

    with tqdm(
        total=len(workload.batches) * 2 * (1 + rounds), unit="batch", file=sys.stderr, leave=False
    ) as bar:
        yield lambda: bar.update()
