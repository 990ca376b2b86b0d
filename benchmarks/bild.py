"""Measure quality and speed of big-little decoding with a trained pair, at every threshold.

    python -m benchmarks.bild LARGE SMALL --aligned FOLDER --train FILE --input FILE
        --reference FILE --append-eos

Each model alone is measured as well. If FOLDER does not exist, `fastgen bild align` first creates
it from the lines of `--train`. All ways to generate take turns at every batch. At batch 1 the
counters also give the speed that an ideal coordination of the same passes would reach. One JSON
file goes to benchmarks/results/<hardware>/.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import fastgen
from benchmarks.harness import begin, option, parser_of, positive, write_result
from fastgen.cli import main as command
from fastgen.cli.bench.agreement import Agreements
from fastgen.cli.bild import pair, sweep
from fastgen.cli.bild.sweep import Arm, Batch, Point
from fastgen.corpus import models
from fastgen.patches.transformers.bild import bild

FALLBACKS, ROLLBACKS, MAX_DRAFT = (0.2, 0.4, 0.6, 0.8), (1.0, 2.0, 4.0), 10
FIXED_DRAFTS = (2, 4, 8)
PASS_WIDTHS, COST_SOURCES = (1, 2, 3, 4, 5, 7, 9, 11), 50
LARGE, SMALL, STOCK, ASSISTED = (
    "large alone",
    "small alone",
    "transformers, large alone",
    "transformers, assisted",
)
ADAPTIVE = "adaptive, lossless"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all batch sizes; return 1 if a lossless output differed from the large model's."""
    args = _arguments().parse_args(argv)
    if args.scale == "tiny":
        args.sentences, args.rounds, args.batch, args.max_new_tokens = 5, 1, [1, 3], 8
        args.fallback, args.rollback = args.fallback[:1], args.rollback[:1]

    begin(args.threads)
    if not args.aligned.is_dir():
        _align(args)
    large = pair.load_model(args.large, args.device, args.dtype)
    smalls = {
        name: pair.load_model(folder, args.device, args.dtype)
        for name, folder in (("unaligned", args.small), ("aligned", args.aligned))
    }
    if not large.config.is_encoder_decoder:
        raise SystemExit(
            f"{args.large} is no encoder-decoder, whose encoders' time this benchmark tells apart"
        )
    tokenizer = models.load_tokenizer(args.large)
    lines, references = (
        pair.read_lines(file)[: args.sentences] for file in (args.input, args.reference)
    )
    sources = pair.encode(tokenizer, lines, args.append_eos, None)
    result: dict[str, Any] = {"cells": {}, "sentences": len(sources)}
    for size in args.batch:
        result["cells"] |= _of_batch_size(size, large, smalls, tokenizer, sources, references, args)
        if size == 1:
            result["cost"] = _costs(large, smalls, sources, args)
            _add_ideal(result, len(sources))
        write_result(args, "bild", result, status=fastgen.status().to_dict())
        print("\n".join(_lines(result["cells"], size)), flush=True)
    return 0 if all(cell["equal"] is not False for cell in result["cells"].values()) else 1


def _arguments() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.bild", __doc__)
    parser.add_argument("large", type=Path, metavar="LARGE")
    parser.add_argument("small", type=Path, metavar="SMALL", help="folders of the pair")
    parser.add_argument(
        "--aligned", type=Path, required=True, metavar="FOLDER", help="the aligned small model"
    )
    parser.add_argument(
        "--train",
        type=Path,
        metavar="FILE",
        help="sources to align it on, where it is not there yet",
    )
    parser.add_argument(
        "--align-options",
        default="--epochs 5 --learning-rate 3e-4",
        metavar="TEXT",
        help="further options of `fastgen bild align` (default: %(default)s)",
    )
    parser.add_argument("--input", type=Path, required=True, metavar="FILE")
    parser.add_argument(
        "--reference", type=Path, required=True, metavar="FILE", help="validation text"
    )
    parser.add_argument("--append-eos", action="store_true", help="as of `fastgen bild align`")
    parser.add_argument("--max-new-tokens", type=positive, default=128, metavar="N")
    parser.add_argument(
        "--sentences", type=positive, default=300, metavar="N", help="first lines (default: 300)"
    )
    parser.add_argument(
        "--batch", type=positive, nargs="+", default=[1, 8, 32], metavar="N", help="default: 1 8 32"
    )
    option(parser, "rounds", default=3, help="default: 3")
    parser.add_argument("--fallback", type=float, nargs="+", default=list(FALLBACKS), metavar="X")
    parser.add_argument("--rollback", type=float, nargs="+", default=list(ROLLBACKS), metavar="X")
    option(parser, "threads")
    option(parser, "device", choices=["cpu", "cuda"], help="default: cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    option(parser, "scale")
    option(parser, "out")
    return parser


def _align(args: argparse.Namespace) -> None:
    if args.train is None:
        raise SystemExit(
            f"--aligned {args.aligned}: there is no such folder, and no --train to make it from"
        )
    words = [
        "bild",
        "align",
        args.large,
        args.small,
        "--input",
        args.train,
        "--output",
        args.aligned,
    ]
    words += [
        "--device",
        args.device,
        "--max-new-tokens",
        args.max_new_tokens,
        *args.align_options.split(),
    ]
    words += ["--append-eos"] * args.append_eos
    with torch.enable_grad():
        if command([str(word) for word in words]):
            raise SystemExit("the small model could not be aligned")


def _points(args: argparse.Namespace) -> dict[str, Point]:
    """Return the points to measure, by label.

    These are every pair of thresholds, lossless decoding for each fallback threshold, lossless
    drafts of fixed lengths, and one adaptive lossless point that drafts only while measured times
    favour it.
    """
    by_thresholds = [
        Point(f, r, MAX_DRAFT) for f, r in itertools.product(args.fallback, args.rollback)
    ]
    lossless = [Point(fallback, None, MAX_DRAFT) for fallback in args.fallback]
    points = {str(point): point for point in (*by_thresholds, *lossless)}
    points[ADAPTIVE] = lossless[len(lossless) // 2]
    return points | {f"drafts of {n}, lossless": Point(0.0, None, n) for n in FIXED_DRAFTS}


def _of_batch_size(
    size: int, large: Any, smalls: dict[str, Any], tokenizer: Any, sources: list[list[int]],
    references: list[str], args: argparse.Namespace,
) -> dict[str, Any]:  # fmt: skip
    """Return one cell for each way to generate in batches of this size."""
    greedy = pair.greedy(large, args.max_new_tokens)
    batches = sweep.batches_of(sources, size, large)
    points = _points(args)
    alone, disabled = _arm(large, greedy), fastgen.disabled()
    arms: dict[str, Arm] = {LARGE: alone, STOCK: disabled(alone)}
    kinds = {name: {"small": None, "point": None} for name in arms}
    for which, small in smalls.items():
        arms[f"{SMALL}, {which}"] = _arm(small, pair.greedy(small, args.max_new_tokens))
        kinds[f"{SMALL}, {which}"] = {"small": which, "point": None}
    for (which, small), (label, point) in itertools.product(smalls.items(), points.items()):
        adaptive = label == ADAPTIVE
        options = greedy | point.options | {"assistant_model": small, "adaptive_draft": adaptive}
        arms[f"{which}, {label}"] = _arm(large, options | {"return_dict_in_generate": True})
        kinds[f"{which}, {label}"] = {"small": which, "point": vars(point) | {"adaptive": adaptive}}
    for which, small in smalls.items() if size == 1 else ():
        arms[f"{ASSISTED}, {which}"] = disabled(_arm(large, greedy | {"assistant_model": small}))
        kinds[f"{ASSISTED}, {which}"] = {"small": which, "point": None}
    measured = sweep.measure(arms, batches, args.rounds)
    texts = {
        name: sweep.texts_of(result, batches, tokenizer, True) for name, result in measured.items()
    }
    quality = _quality(texts, references, args.scale == "tiny")
    agreements = Agreements(large, [batch.inputs for batch in batches], greedy)
    cells: dict[str, Any] = {}
    for name, result in measured.items():
        point = kinds[name]["point"]
        exact = (
            name == LARGE
            or name.startswith(ASSISTED)
            or (point is not None and point["rollback"] is None)
        )
        verdict = agreements(measured[STOCK].outputs, result.outputs) if exact else None
        equal = None if verdict is None else verdict.equal
        cell = kinds[name] | {
            "batch": size,
            "equal": equal,
            **quality[name],
            **result.over(measured[LARGE]),
        }
        cell["over_transformers"] = result.over(measured[STOCK])["ratio"]
        if verdict is not None:
            cell |= {"near_ties": verdict.near_ties, "note": verdict.note}
        if equal is False:
            # Report no speed on a mismatch.
            cell |= dict.fromkeys(("ratio", "low", "high", "over_transformers"))
        cells[f"batch {size}, {name}"] = cell
    return cells


def _arm(model: Any, options: dict[str, Any]) -> Arm:
    def generate(batch: Batch) -> Any:
        return model.generate(**batch.inputs, **options)

    return generate


def _quality(
    texts: dict[str, list[str]], references: list[str], tiny: bool
) -> dict[str, dict[str, Any]]:
    """Return the BLEU score of each way to generate, with its 95% interval and p-value.

    The p-value is the probability that a difference this large from the large model arises by
    chance.

    Source: Koehn 2004, paired bootstrap; computed by sacrebleu.
    """
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.significance import PairedTest

    names = [LARGE, *(name for name in texts if name != LARGE)]
    metric = BLEU(references=[references])
    test = PairedTest(
        [(name, texts[name]) for name in names], {"BLEU": metric}, None, "bs", 20 if tiny else 1000
    )
    _, scores = test()
    return {
        name: {
            "bleu": score.score,
            "bleu_interval": score.ci,
            "p_value": 1.0 if texts[name] == texts[LARGE] else score.p_value,
        }
        for name, score in zip(names, scores["BLEU"], strict=True)
    }


def _costs(
    large: Any, smalls: dict[str, Any], sources: list[list[int]], args: argparse.Namespace
) -> dict[str, Any]:
    """Return times at batch 1, in seconds.

    These are a decode step of the large model alone, a pass of the large model over k tokens, a
    pass of the small model, and the encoder of each model. A step of the large model alone is not
    equivalent to its pass over one token during big-little decoding: there the CPU caches hold the
    small model's weights as well.
    """
    greedy = pair.greedy(large, args.max_new_tokens)
    batches = sweep.batches_of(sources, 1, large)
    small = smalls["unaligned"]
    encoders = {
        name: _encoder_seconds(model, batches)
        for name, model in (("large", large), ("small", small))
    }
    passes: dict[tuple[bool, int], list[float]] = {}
    steps: list[float] = []
    points = [
        Point(0.0, None, width - 1) if width > 1 else Point(1.0, None, 1) for width in PASS_WIDTHS
    ]
    with _watched_passes(large, passes, steps):
        for batch in batches[:: max(1, len(batches) // COST_SOURCES)]:
            _arm(large, greedy)(batch)
            for point in points:
                options = (
                    greedy | point.options | {"assistant_model": small, "adaptive_draft": False}
                )
                _arm(large, options)(batch)
    table = {
        tokens: statistics.median(times)
        for (is_large, tokens), times in sorted(passes.items())
        if is_large
    }
    small_pass = statistics.median(passes[False, 1])
    return {
        "large_step": statistics.median(steps),
        "large_pass": table,
        "small_pass": small_pass,
        "encoder": encoders,
    }


@contextmanager
def _watched_passes(
    large: Any, passes: dict[tuple[bool, int], list[float]], steps: list[float]
) -> Iterator[None]:
    """Record the seconds of every pass of both models within the context.

    Args:
        large: the large model.
        passes: receives the times, by (whether the pass is the large model's, number of tokens).
        steps: receives the times of the large model's decode steps where it runs alone.
    """
    extends, steps_on = bild._FusedModel.extend, bild.FusedDecoder.__call__

    def timed(call: Callable[[], Any]) -> tuple[Any, float]:
        began = time.perf_counter()
        logits = call()
        if logits.is_cuda:
            logits.sum().item()
        return logits, time.perf_counter() - began

    def extend(self: Any, spans: Any) -> Any:
        logits, seconds = timed(lambda: extends(self, spans))
        passes.setdefault(
            (self.stepper.model is large, sum(len(span.tokens) for span in spans)), []
        ).append(seconds)
        return logits

    def step(self: Any, ids: Any) -> Any:
        logits, seconds = timed(lambda: steps_on(self, ids))
        steps.append(seconds)
        return logits

    with (
        mock.patch.object(bild._FusedModel, "extend", extend),
        mock.patch.object(bild.FusedDecoder, "__call__", step),
    ):
        yield


def _encoder_seconds(model: Any, batches: Sequence[Batch]) -> float:
    """Return the median time of the encoder for one source, as `generate` runs it."""
    began: list[float] = []
    times: list[float] = []
    hooks: list[Callable[..., Any]] = [
        model.get_encoder().register_forward_pre_hook(lambda *_: began.append(time.perf_counter())),
        model.get_encoder().register_forward_hook(
            lambda *_: times.append(time.perf_counter() - began.pop())
        ),
    ]
    for batch in batches:
        model.generate(**batch.inputs, num_beams=1, do_sample=False, max_new_tokens=1)
    for hook in hooks:
        hook.remove()
    return statistics.median(times)


def _add_ideal(result: dict[str, Any], sentences: int) -> None:
    """Add the ideal speed-up and the efficiency reached to the cells of batch 1."""
    for cell in result["cells"].values():
        if cell["batch"] == 1 and cell["point"] is not None and cell["ratio"] is not None:
            cell["ideal"] = ideal(cell["counts"], sentences, result["cost"])
            cell["efficiency"] = cell["ratio"] / cell["ideal"]


def ideal(counts: dict[str, int], sentences: int, cost: dict[str, Any]) -> float:
    """Return the speed-up over the large model alone if only the counted passes took time.

    A pass of the large model reads the tokens drafted since its previous pass and its own last
    token. The time of a pass is interpolated in the measured table at the mean number of these
    tokens.

    Args:
        counts: counters of big-little decoding, summed over all sentences.
        sentences: number of sentences.
        cost: times of passes and encoders, as `_costs` returns them.
    """
    widths = sorted(cost["large_pass"])
    mean = (counts["drafted"] + counts["large_calls"]) / max(1, counts["large_calls"])
    at_mean = float(np.interp(mean, widths, [cost["large_pass"][width] for width in widths]))
    encoders = cost["encoder"]
    alone = sentences * encoders["large"] + counts["tokens"] * cost["large_step"]
    combined = sentences * (encoders["large"] + encoders["small"])
    combined += counts["small_calls"] * cost["small_pass"] + counts["large_calls"] * at_mean
    return alone / combined


def _lines(cells: dict[str, Any], size: int) -> list[str]:
    lines: list[str] = []
    for name, cell in cells.items():
        if cell["batch"] != size:
            continue
        if cell["ratio"] is None:
            lines.append(f"{name:<62}outputs differ, no speed given: {cell['note']}")
            continue
        reached = (
            f"  {cell['efficiency']:.0%} of ideal {cell['ideal']:.2f}x" if "ideal" in cell else ""
        )
        bleu = f"BLEU {cell['bleu']:.2f} (p {cell['p_value']:.3f})"
        lines.append(f"{name:<62}{cell['ratio']:6.2f}x  {bleu}{reached}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
