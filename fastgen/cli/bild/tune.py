"""Choose the thresholds of big-little decoding for a pair of models on a validation file.

Every pair of a fallback and a rollback threshold, and each fallback threshold with lossless=True,
is timed in turn with the large model alone. The fastest setting that loses at most --max-loss
points of quality is written into a generation config.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastgen.cli.bild import pair
from fastgen.cli.generate import quality
from fastgen.config import settings
from fastgen.corpus import models
from fastgen.errors import CommandError, needs
from fastgen.number import COUNT, POSITIVE, Number

if TYPE_CHECKING:
    from fastgen.cli.bild.sweep import Arm, Batch, Point

HELP = "measure thresholds on a validation file and write the best ones into a generation config"
FALLBACKS = (0.2, 0.4, 0.6, 0.8)
ROLLBACKS = (1.0, 2.0, 3.0, 5.0)
_LARGE = "large"
_OF_BEAMS = (
    "early_stopping", "length_penalty", "output_scores", "output_logits", "output_attentions",
    "output_hidden_states",
)  # fmt: skip
_OF_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "top_h",
    "epsilon_cutoff",
    "eta_cutoff",
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    pair.arguments(parser)
    parser.add_argument(
        "--reference", type=Path, required=True, metavar="FILE", help="one reference per source"
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="CONFIG.json|FOLDER",
        help="generation config to write, or a folder for generation_config.json",
    )
    parser.add_argument(
        "--metric",
        choices=list(quality.METRICS),
        default="bleu",
        help="metric of an output's quality (%(default)s)",
    )
    parser.add_argument("--max-loss", type=Number(float, least=0), default=0.0, metavar="X",
                        help="maximum loss, in points of the metric (%(default)g)")  # fmt: skip
    parser.add_argument(
        "--fallback",
        type=Number(float, least=0, most=1),
        nargs="+",
        default=list(FALLBACKS),
        metavar="X",
        help="thresholds to try",
    )
    parser.add_argument("--rollback", type=POSITIVE, nargs="*", default=list(ROLLBACKS),
                        metavar="X", help="thresholds to try, besides lossless")  # fmt: skip
    parser.add_argument("--max-draft", type=COUNT, default=10, metavar="N",
                        help="maximum number of tokens per draft (%(default)s)")  # fmt: skip
    parser.add_argument("--batch-size", type=COUNT, default=1, metavar="N",
                        help="sentences per batch (%(default)s)")  # fmt: skip
    parser.add_argument("--lines", type=COUNT, default=200, metavar="N",
                        help="number of lines to use, from the first (%(default)s)")  # fmt: skip
    parser.add_argument("--rounds", type=COUNT, default=3, metavar="N",
                        help="number of rounds (%(default)s)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measure, print and choose.

    Returns:
        1 if no setting qualifies, else 0.
    """
    config_file: Path = (
        args.output if args.output.suffix == ".json" else args.output / "generation_config.json"
    )
    pair.check_parent(args.output)
    if config_file != args.output and args.output.is_file():
        raise CommandError(f"--output {args.output} is a file, not a folder or CONFIG.json")
    if config_file.is_dir():
        raise CommandError(f"--output {config_file} is a folder, not a file")
    for model in (args.large, args.small):
        models.folder_of(model)
    lines, references = _texts(args)
    models.need("transformers")
    if not settings().enabled:
        raise CommandError(f"FASTGEN={settings().mode} disables what is to be measured")
    metric = quality.METRICS[args.metric]()
    device = pair.device_of(args)
    tokenizers = tuple(map(models.load_tokenizer, (args.large, args.small)))
    large, small = (
        pair.load_model(model, device, args.dtype) for model in (args.large, args.small)
    )
    pair.check_pair(large, small, tokenizers)
    sources = pair.encode(tokenizers[0], lines, args.append_eos, args.max_source_tokens)

    config = copy.deepcopy(large.generation_config)
    _check_writable(config, args.large)
    data = _measured(args, large, small, tokenizers[0], sources, references, metric)
    data["chosen"] = choose(data["points"], data["large"]["quality"], args.max_loss)
    config_file.parent.mkdir(exist_ok=True)
    sweep_file = config_file.with_name(f"{config_file.stem}.sweep.json")
    sweep_file.write_text(json.dumps(data, indent=1) + "\n", "utf-8")
    print("\n".join(table(data)))
    print(f"\n{sweep_file}: all results")
    chosen = data["chosen"]
    if chosen is None:
        within = f"within {args.max_loss:g} points of it" if args.max_loss else "without a loss"
        print(
            f"nothing is faster than the large model alone {within}: "
            "no generation config is written"
        )
        return 1
    _plot(sweep_file)
    point = _point(chosen)
    _set(config, point)
    config.save_pretrained(config_file.parent, config_file_name=config_file.name)
    print(f"{config_file}: {point}, {chosen['ratio']:.2f} times as fast as the large model alone")
    return 0


def choose(
    points: Sequence[dict[str, Any]], quality: float, max_loss: float
) -> dict[str, Any] | None:
    """Return the fastest point that loses at most `max_loss` in quality against the large model.

    Returns None if no such point is faster over its whole interval (`low` > 1).
    """
    good = [
        point for point in points if point["quality"] >= quality - max_loss and point["low"] > 1.0
    ]
    return max(good, key=lambda point: point["ratio"], default=None)


def table(data: dict[str, Any]) -> list[str]:
    """Return the lines of a table of the measurements, one for each point."""
    large = data["large"]
    title = (
        f"{'fallback':>8}{'rollback':>10}{data['metric']:>8}{'loss':>7}"
        f"{'times as fast':>15}{'range':>14}"
    )
    lines = [f"{title}{'tokens/large pass':>19}{'drafted/token':>15}"]
    lines.append(f"{'large alone':>18}{large['quality']:8.2f}{'':7}{1:15.2f}{'':14}{1:19.2f}")
    for point in data["points"]:
        rollback = "lossless" if point["rollback"] is None else f"{point['rollback']:g}"
        counts, spread = point["counts"], f"{point['low']:.2f}-{point['high']:.2f}"
        lines.append(
            f"{point['fallback']:8g}{rollback:>10}{point['quality']:8.2f}"
            f"{large['quality'] - point['quality']:7.2f}{point['ratio']:15.2f}{spread:>14}"
            f"{counts['tokens'] / max(1, counts['large_calls']):19.2f}"
            f"{counts['drafted'] / max(1, counts['tokens']):15.2f}"
        )
    return lines


def _texts(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return the sources and references to measure on; blank sources are skipped."""
    sources, references = (pair.read_lines(file) for file in (args.input, args.reference))
    if len(sources) != len(references):
        raise CommandError(
            f"{args.input} has {len(sources)} lines, and {args.reference} {len(references)}"
        )
    both = [(s, r) for s, r in zip(sources, references, strict=True) if s.strip()][: args.lines]
    return [s for s, _ in both], [r for _, r in both]


def _measured(
    args: argparse.Namespace, large: Any, small: Any, tokenizer: Any, sources: list[list[int]],
    references: Sequence[str], metric: quality.Metric,
) -> dict[str, Any]:  # fmt: skip
    """Measure all points; return the measurements and their conditions, JSON-ready."""
    from tqdm import tqdm

    import fastgen  # noqa: F401
    from fastgen.cli.bench.measure import environment
    from fastgen.cli.bild import sweep

    points = [
        sweep.Point(fallback, rollback, args.max_draft)
        for fallback in dict.fromkeys(args.fallback)
        for rollback in (*dict.fromkeys(args.rollback), None)
    ]
    greedy = pair.greedy(large, args.max_new_tokens) | {"return_dict_in_generate": True}
    arms: dict[str, Arm] = {_LARGE: functools.partial(_generate, large, greedy)}
    # Adaptive drafting would let lossless points learn from each other's costs.
    always = {"assistant_model": small, "adaptive_draft": False}
    for point in points:
        arms[str(point)] = functools.partial(_generate, large, greedy | point.options | always)
    batches = sweep.batches_of(sources, args.batch_size, large)
    try:
        arms[str(points[0])](batches[0])
    except ValueError as error:  # the models cannot decode together
        raise CommandError(str(error)) from error
    with tqdm(
        total=args.rounds * len(batches), unit="batch", file=sys.stderr, mininterval=5
    ) as bar:
        measurements = sweep.measure(arms, batches, args.rounds, bar.update)
    alone = measurements.pop(_LARGE)

    def score(measured: sweep.Measured) -> float:
        texts = sweep.texts_of(measured, batches, tokenizer, large.config.is_encoder_decoder)
        return metric.score(texts, references)

    results = [
        vars(point) | {"quality": score(measured)} | measured.over(alone)
        for point, measured in zip(points, measurements.values(), strict=True)
    ]
    return {
        "models": {"large": str(args.large), "small": str(args.small)},
        "lines": len(sources), "batch_size": args.batch_size, "metric": args.metric,
        "signature": metric.signature, "max_loss": args.max_loss, "environment": environment(),
        "large": {"quality": score(alone), "seconds": alone.seconds}, "points": results,
    }  # fmt: skip


def _generate(model: Any, options: dict[str, Any], batch: Batch) -> Any:
    return model.generate(**batch.inputs, **options)


def _point(chosen: dict[str, Any]) -> Point:
    from fastgen.cli.bild.sweep import Point

    return Point(chosen["fallback"], chosen["rollback"], chosen["max_draft"])


def _set(config: Any, point: Point) -> None:
    """Set up a generation config for greedy big-little decoding with the thresholds of `point`."""
    config.update(
        num_beams=1,
        do_sample=False,
        num_return_sequences=1,
        **dict.fromkeys((*_OF_SAMPLING, *_OF_BEAMS)),
    )
    # If True, transformers drops unknown fields when it reads the file.
    config._from_model_config = False
    for name, value in point.options.items():
        setattr(config, name, value)


def _check_writable(config: Any, folder: Path) -> None:
    """Raise CommandError if transformers would refuse to write the chosen config."""
    from fastgen.cli.bild.sweep import Point

    trial = copy.deepcopy(config)
    _set(trial, Point(0.5, None, 1))
    try:
        trial.validate(strict=True)
    except ValueError as error:
        raise CommandError(
            f"{folder}: its generation config cannot be rewritten: {error}"
        ) from error


def _plot(sweep_file: Path) -> None:
    """Plot the measurements in the sweep's file, if matplotlib is installed."""
    try:
        from fastgen.cli.bild.plot import draw

        figure = draw(json.loads(sweep_file.read_text("utf-8")))
    except ModuleNotFoundError as error:
        print(f"no plot: {needs(str(error.name))}")
        return
    file = sweep_file.with_suffix(".svg")
    figure.savefig(file)
    print(f"{file}: quality against speed")
