"""Align a small model with a large one by fine-tuning it on the large one's outputs.

The large model's outputs for a file of sources are kept in a file beside the output folder, so that
a run that was killed resumes where it stopped. Source: Kim et al. 2023 (BiLD), section 3.5.1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastgen.cli.bild import outputs, pair
from fastgen.corpus import models
from fastgen.corpus.run.identity import digest
from fastgen.errors import CommandError
from fastgen.number import COUNT, POSITIVE, Number

if TYPE_CHECKING:
    from fastgen.cli.bild.finetune import Example, Recipe

HELP = "fine-tune the small model on the large model's outputs"
RECORD = "alignment.json"
WINDOW = 512
"""The most outputs that a killed run loses."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    pair.arguments(parser)
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="new folder for the aligned model",
    )
    parser.add_argument(
        "--restart", action="store_true", help="discard the large model's outputs of an earlier run"
    )
    parser.add_argument(
        "--batch-tokens",
        type=COUNT,
        default=4096,
        metavar="N",
        help="maximum source tokens of a batch for the large model (%(default)s)",
    )
    parser.add_argument("--epochs", type=POSITIVE, default=3.0, metavar="N",
                        help="passes over the outputs (%(default)g)")  # fmt: skip
    parser.add_argument(
        "--max-steps", type=COUNT, metavar="N", help="number of updates, instead of --epochs"
    )
    parser.add_argument("--learning-rate", type=POSITIVE, default=1e-4, metavar="X",
                        help="initial rate; decays linearly to 0 (%(default)g)")  # fmt: skip
    parser.add_argument("--batch-size", type=COUNT, default=32, metavar="N",
                        help="lines per update (%(default)s)")  # fmt: skip
    parser.add_argument(
        "--label-smoothing",
        type=Number(float, least=0, below=1),
        default=0.0,
        metavar="X",
        help="label smoothing of the loss (%(default)g)",
    )
    parser.add_argument(
        "--seed", type=int, default=1, metavar="N", help="seed of dropout and order (%(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Generate, fine-tune, and write the aligned model. Arguments are checked first."""
    output: Path = args.output
    if output.exists():
        raise CommandError(f"--output {output} exists: name a new folder")
    pair.check_parent(output)
    for model in (args.large, args.small):
        models.folder_of(model)
    lines = [line for line in pair.read_lines(args.input) if line.strip()]
    models.need("transformers", "accelerate")
    device = pair.device_of(args)
    tokenizers = tuple(map(models.load_tokenizer, (args.large, args.small)))
    sources = pair.encode(tokenizers[0], lines, args.append_eos, args.max_source_tokens)
    small = pair.load_model(args.small, "cpu", "float32")
    _check_writable(small, args.small)
    header = {
        "large": digest(models.folder_of(args.large)), "input": digest(args.input),
        "lines": len(lines), "append_eos": args.append_eos,
        "max_source_tokens": args.max_source_tokens,
        "max_new_tokens": args.max_new_tokens, "dtype": args.dtype,
    }  # fmt: skip
    written = _written(args, header, small, tokenizers, sources, device)

    from fastgen.cli.bild.finetune import Recipe, examples

    recipe = Recipe(
        args.epochs,
        args.max_steps,
        args.learning_rate,
        args.batch_size,
        args.label_smoothing,
        args.seed,
    )
    data = examples(sources, written, bool(small.config.is_encoder_decoder))
    log = _train(small, data, recipe, device)
    record = {
        "large": str(args.large),
        "small": str(args.small),
        "outputs": header,
        "recipe": vars(recipe),
        "log": log,
    }
    _save(small, tokenizers[1], record, args.small, output)
    print(f"{output}: the aligned model, its tokenizer, and {RECORD}")
    return 0


def _check_writable(model: Any, folder: Path) -> None:
    """Raise CommandError if transformers would refuse to write the model's generation config."""
    try:
        model.generation_config.validate(strict=True)
    except ValueError as error:
        raise CommandError(
            f"{folder}: its generation config cannot be rewritten: {error}"
        ) from error


def _written(
    args: argparse.Namespace, header: outputs.Header, small: Any, tokenizers: tuple[Any, ...],
    sources: Sequence[list[int]], device: str,
) -> outputs.Outputs:  # fmt: skip
    """Return the large model's outputs. The model is freed, so that training gets its memory."""
    large = pair.load_model(args.large, device, args.dtype)
    pair.check_pair(large, small, tokenizers)
    file = args.output.with_name(f"{args.output.name}.outputs.jsonl")
    written = outputs.finished(
        file, header, lambda done: _generated(large, sources, done, args), args.restart
    )
    starts = [1 if large.config.is_encoder_decoder else len(source) for source in sources]
    cut = sum(
        len(output) - start >= args.max_new_tokens
        for output, start in zip(written, starts, strict=True)
    )
    print(f"{file}: the large model's outputs for {len(written)} lines")
    if cut:
        print(
            f"{cut} of them have all of the {args.max_new_tokens} tokens "
            "that --max-new-tokens allows; they may be cut off"
        )
    sys.stdout.flush()
    return written


def _generated(
    large: Any, sources: Sequence[list[int]], done: int, args: argparse.Namespace
) -> Iterator[list[int]]:
    """Yield the large model's greedy outputs, starting at source number `done`."""
    from tqdm import tqdm

    import fastgen

    if done:
        print(f"continues after line {done} of {len(sources)}", flush=True)
    stream = fastgen.generate_stream(
        large, itertools.islice(sources, done, None), max_tokens=args.batch_tokens, window=WINDOW,
        **pair.greedy(large, args.max_new_tokens),
    )  # fmt: skip
    with tqdm(total=len(sources), initial=done, unit="line", file=sys.stderr, mininterval=5) as bar:
        for sequences in stream:
            bar.update()
            yield sequences[0].tolist()


def _train(small: Any, data: list[Example], recipe: Recipe, device: str) -> list[dict[str, float]]:
    from fastgen.cli.bild.finetune import finetune

    pad = small.generation_config.pad_token_id
    return finetune(small, data, 0 if pad is None else pad, recipe, on_cpu=device == "cpu")


def _save(small: Any, tokenizer: Any, record: dict[str, Any], source: Path, output: Path) -> None:
    """Write the model atomically, in the dtype of its source."""
    scratch = output.with_name(f"{output.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)
    stored = models.load_config(source).dtype
    small.to(stored or small.dtype).save_pretrained(scratch)
    tokenizer.save_pretrained(scratch)
    (scratch / RECORD).write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    scratch.rename(output)
