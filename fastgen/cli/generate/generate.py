r"""Generate from every text of a corpus: files in, one file out, in the order of the input.

Examples:
    fastgen generate MODEL --input text.en --output text.es --num-beams 4 --max-new-tokens 128
    fastgen generate MODEL --input news.jsonl.gz --column article \
        --output summaries.jsonl.gz --prefix "summarize: "
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Literal

from fastgen.cli.generate import fastseq, generation_options, on_ray, scoring
from fastgen.cli.generate.arguments import arguments as arguments  # of the command
from fastgen.corpus import models
from fastgen.corpus.formats import compression, formats
from fastgen.corpus.formats.readers import STDIN, Files
from fastgen.corpus.formats.writers import File
from fastgen.corpus.run.job import Job
from fastgen.corpus.run.job import run as run_job
from fastgen.corpus.run.journal import in_progress
from fastgen.corpus.run.summary import Summary
from fastgen.corpus.texts import Options
from fastgen.decoding.speculative import bild_options
from fastgen.errors import CommandError

HELP = "generate for every text of a file, into a file"


def run(args: argparse.Namespace) -> int:
    """Run the generation and, if there is a reference, score the output.

    Returns:
        1 if the number of references is not that of the records, else 0.
    """
    options = _options(args)
    if args.engine == "ray":
        return on_ray.run(args, options, args.defaults)
    on_ray.check_unused(args, args.defaults)
    source, output = _source(args), _output_of(args)
    _check_parents(args)
    sink = _sink(args, options, source, source.check())
    metrics = scoring.prepared(args, output)
    if metrics is not None:
        metrics.check(source)
    shown = not args.quiet and sys.stderr.isatty()
    if not shown:
        from transformers.utils import logging

        logging.disable_progress_bar()
    job = Job(
        options, source, sink, output, on_error=args.on_error, block=args.block,
        processes=args.processes, restart=args.restart, progress=shown, summary=args.summary,
    )  # fmt: skip
    summary = run_job(job)
    if not args.quiet:
        _tell(summary)
    if metrics is not None and output is not None:
        return 0 if metrics.tell(sink, output, summary.records) else 1
    return 0


def _tell(summary: Summary) -> None:
    """Print on stderr what was done, and what fastgen did not accelerate."""
    rate = (
        f"{summary.records_per_second:.1f} a second" if summary.made else "all from an earlier run"
    )
    print(
        f"{summary.records} records, {summary.tokens} tokens, {summary.seconds:.1f} s ({rate})",
        file=sys.stderr,
    )
    if summary.blank:
        print(
            f"{summary.blank} of {summary.records} records are blank lines, "
            "and so are their outputs",
            file=sys.stderr,
        )
    if summary.at_limit:
        which = f" ({summary.limit})" if summary.limit else ""
        print(
            f"{summary.at_limit} of {summary.records} outputs hit the limit{which}", file=sys.stderr
        )
    for patch, reasons in summary.fallbacks.items():
        for reason, calls in reasons.items():
            print(f"not accelerated, calls of {patch}: {calls} ({reason})", file=sys.stderr)


def _check_parents(args: argparse.Namespace) -> None:
    """Raise CommandError if the folder of a file that is written at the end does not exist."""
    for option, file in (("--summary", args.summary), ("--score-path", args.score_path)):
        if file is not None and not file.absolute().parent.is_dir():
            raise CommandError(f"{option} {file}: there is no folder {file.absolute().parent}")


def _options(args: argparse.Namespace) -> Options:
    """Return the options that the outputs depend on.

    Raises:
        CommandError: an error that can be found before the model is loaded.
    """
    folder = models.folder_of(args.model)
    config, stored = _json_of(folder / "config.json"), _json_of(folder / "generation_config.json")
    task = fastseq.task(args.model, config, args.task, set(generation_options.settings()))
    generation = task.generation | generation_options.requested(args)
    targets = _targets(args, generation)
    generation_options.check(
        generation, {name: value for name, value in stored.items() if not name.startswith("_")}
    )
    drafting = {
        name: value for name in bild_options.NAMES if (value := getattr(args, name)) is not None
    }
    generation |= _drafts(args, generation, drafting, stored)
    if (
        "max_new_tokens" not in {**_settings_in(stored), **generation}
        and not models.load_config(args.model).is_encoder_decoder
    ):
        raise CommandError(
            "--max-new-tokens is required: --max-length would include the prompt of a "
            "decoder-only model"
        )
    local = args.engine == "local"  # with Ray, each machine resolves the model by itself
    assistant = args.assistant_model
    return Options(
        folder if local else args.model, generation, device=args.device, dtype=args.dtype,
        precision=args.precision, threads=args.threads, batch_tokens=args.batch_tokens,
        max_source_tokens=args.max_source_tokens, truncate=args.truncate,
        append_eos=args.append_eos, prefix=task.prefix if args.prefix is None else args.prefix,
        forced_bos_token=args.forced_bos_token, source_lang=args.source_lang,
        target_lang=args.target_lang, targets=targets, scores=args.scores, seed=args.seed,
        special_tokens=args.include_special_tokens, clean_up=args.clean_up_tokenization_spaces,
        assistant=models.folder_of(assistant) if local and assistant else assistant,
    )  # fmt: skip


def _targets(
    args: argparse.Namespace, requested: dict[str, Any]
) -> Literal["language", "token"] | None:
    """Return what the target column holds: languages, first tokens, or None without such a column.

    Raises:
        CommandError: another option also sets how outputs begin.
    """
    columns = [
        name
        for name in ("target_lang_column", "forced_bos_column")
        if getattr(args, name) is not None
    ]
    values = {
        "target_lang": args.target_lang,
        "forced_bos_token": args.forced_bos_token,
    } | requested
    names = ("target_lang", "forced_bos_token", "forced_bos_token_id")
    sources = columns + [name for name in names if values.get(name) is not None]
    if columns and len(sources) > 1:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in sources)
        raise CommandError(f"{flags}: choose one way to set the first token")
    if not columns:
        return None
    return "language" if args.target_lang_column is not None else "token"


def _drafts(
    args: argparse.Namespace,
    requested: dict[str, Any],
    bild_requested: dict[str, Any],
    stored: dict[str, Any],
) -> dict[str, Any]:
    """Return the options of big-little decoding; empty if none is requested."""
    layers = requested.get("assistant_early_exit")
    if args.assistant_model is None and layers is None and not bild_requested:
        return {}
    if args.assistant_model is not None:
        models.folder_of(args.assistant_model)
    if not {*bild_requested, *_settings_in(stored)} & set(bild_options.NAMES):
        bild_requested = {"lossless": True}
    if args.scores:
        raise CommandError("--scores: drafted texts have no scores")
    try:
        bild_options.options(
            args.assistant_model, layers, bild_requested, {},
            ("--assistant-model", "--assistant-early-exit"),
            lambda name: "--" + name.replace("_", "-"),
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise CommandError(str(error)) from error
    return bild_requested


def _source(args: argparse.Namespace) -> Files:
    return Files(
        tuple(args.input), args.input_format, args.column, args.prefix_column, args.header,
        args.quotes, args.limit, args.target_lang_column or args.forced_bos_column,
    )  # fmt: skip


def _output_of(args: argparse.Namespace) -> Path | None:
    """Return the output file, or None for standard output.

    Raises:
        CommandError: the file exists already, is also an input, or its folder does not exist.
    """
    if args.output == STDIN:
        return None
    output = Path(args.output)
    if not output.absolute().parent.is_dir():
        raise CommandError(f"--output {output}: there is no folder {output.absolute().parent}")
    if output.is_dir():
        raise CommandError(f"--output {output} is a folder")
    if output.exists() and not args.overwrite and not in_progress(output):
        raise CommandError(f"--output {output} exists already; --overwrite replaces it")
    if any(
        name != STDIN and output.exists() and output.samefile(name)
        for name in args.input
        if Path(name).exists()
    ):
        raise CommandError(f"--output {output} is also an input")
    return output


def _sink(
    args: argparse.Namespace, options: Options, source: Files, first: dict[str, Any] | None
) -> File:
    """Return the format of the output.

    Raises:
        CommandError: the format cannot hold the columns of the input.
    """
    ending, packing = ("", "") if args.output == STDIN else compression.split(Path(args.output))
    kind = args.output_format or formats.of_ending(ending)
    if kind == "parquet" and args.output == STDIN:
        raise CommandError(
            "--output-format parquet cannot be written to standard output; name a file"
        )
    if kind in formats.DELIMITERS and source.format != "text":
        if source.format == "jsonl":
            raise CommandError(
                f"--output: objects of JSONL have no fixed columns for {kind.upper()}; "
                "write JSONL or Parquet"
            )
        if first is None:
            raise CommandError(
                f"--output-format {kind}: the columns of standard input are unknown; write JSONL"
            )
    stored = _settings_in(_json_of(options.model / "generation_config.json"))
    several = {**stored, **options.generation}.get("num_return_sequences", 1) > 1
    columns = None if first is None else tuple(first)
    problems = args.on_error == "empty" and kind != "text"
    return File(
        kind, packing, columns, args.quotes, several, args.scores, problems, args.field_prefix
    )


def _json_of(file: Path) -> dict[str, Any]:
    """Return the contents of a JSON config of the model; empty if the file does not exist."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CommandError(f"{file} cannot be read: {models.first_line(error)}") from error
    return found if isinstance(found, dict) else {}


def _settings_in(stored: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in stored.items() if value is not None}
