"""A large and a small model with one tokenizer, loaded from their folders, and their sources."""

from __future__ import annotations

import argparse
import codecs
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastgen.corpus import models
from fastgen.decoding.speculative import bild_options
from fastgen.errors import CommandError
from fastgen.number import COUNT

MAX_NEW_TOKENS = 128
_UNLIMITED = 10**6  # a tokenizer's model_max_length from here on means "no limit"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that `align` and `tune` share."""
    parser.add_argument("large", type=Path, metavar="LARGE", help=models.HELP)
    parser.add_argument("small", type=Path, metavar="SMALL", help=models.HELP)
    parser.add_argument(
        "--input", type=Path, required=True, metavar="FILE", help="UTF-8 text, one source per line"
    )
    parser.add_argument(
        "--append-eos",
        action="store_true",
        help="append the end token to each source, if the tokenizer does not",
    )
    parser.add_argument("--max-source-tokens", type=COUNT, metavar="N",
                        help="truncate longer sources (default: tokenizer's limit)")  # fmt: skip
    parser.add_argument("--max-new-tokens", type=COUNT, default=MAX_NEW_TOKENS, metavar="N",
                        help="maximum length of an output (%(default)s)")  # fmt: skip
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if available")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"],
                        help="dtype of the models (%(default)s)")  # fmt: skip
    parser.add_argument("--threads", type=COUNT, metavar="N", help="number of torch's CPU threads")


def device_of(args: argparse.Namespace) -> str:
    """Return the device to run on; also set torch's number of threads."""
    return models.usable_device(args.device, args.threads)


def check_parent(output: Path) -> None:
    """Raise CommandError if the folder that is to hold `output` does not exist."""
    if not output.absolute().parent.is_dir():
        raise CommandError(f"--output {output}: there is no folder {output.absolute().parent}")


def load_model(source: Path, device: str, dtype: str) -> Any:
    """Load a model for generation, without the options that an earlier tuning stored with it."""
    model = models.load_model(source, device, dtype)
    for name in (*bild_options.NAMES, "assistant_early_exit"):
        vars(model.generation_config).pop(name, None)
    model.generation_config.assistant_early_exit = None
    return model


def greedy(model: Any, max_new_tokens: int) -> dict[str, Any]:
    """Return the arguments of `generate` for greedy search, independent of the model's config.

    The model's own `max_length` is cleared.
    """
    # With both limits set, transformers warns at every call.
    model.generation_config.max_length = None
    return {
        "num_beams": 1,
        "do_sample": False,
        "num_return_sequences": 1,
        "max_new_tokens": max_new_tokens,
    }


def check_pair(large: Any, small: Any, tokenizers: tuple[Any, ...]) -> None:
    """Raise CommandError if the two models do not share one vocabulary."""
    from fastgen.patches.transformers.bild.bild_call import options_of

    call = {
        "assistant_model": small, "tokenizer": tokenizers[0],
        "assistant_tokenizer": tokenizers[1], "fallback_threshold": 0.5, "num_beams": 1,
        "num_return_sequences": 1,
    }  # fmt: skip
    try:
        options_of(large, call)
    except ValueError as error:
        raise CommandError(str(error)) from error


def read_lines(file: Path) -> list[str]:
    """Return the lines of a text file, without line ends.

    Raises:
        CommandError: the file cannot be read, has no text, or is not UTF-8. The message names the
            line.
    """
    try:
        data = file.read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise CommandError(f"{file} cannot be read: {error.strerror}") from error
    lines: list[str] = []
    for number, line in enumerate(data.removesuffix(b"\n").split(b"\n"), 1):
        try:
            lines.append(line.decode("utf-8").removesuffix("\r"))
        except UnicodeDecodeError as error:
            raise CommandError(
                f"{file}, line {number}: not UTF-8 ({error.reason} at byte {error.start})"
            ) from error
    if not any(line.strip() for line in lines):
        raise CommandError(f"{file} is empty")
    return lines


def encode(
    tokenizer: Any, lines: Sequence[str], append_eos: bool, limit: int | None
) -> list[list[int]]:
    """Return the token ids of each line, truncated to `limit` tokens.

    Args:
        tokenizer: of both models.
        lines: the texts.
        append_eos: whether to append the end token.
        limit: the most tokens of a line, end token included; None for the tokenizer's own limit.

    Raises:
        CommandError: a line has no tokens, the tokenizer has no end token, or adds it itself.
    """
    end = tokenizer.eos_token_id
    if append_eos and end is None:
        raise CommandError("--append-eos: the tokenizer has no end token")
    if limit is None and tokenizer.model_max_length < _UNLIMITED:
        limit = int(tokenizer.model_max_length)
    room = None if limit is None else limit - append_eos
    options: dict[str, Any] = {} if room is None else {"truncation": True, "max_length": room}
    encoded: list[list[int]] = tokenizer(list(lines), **options)["input_ids"]
    for line, ids in zip(lines, encoded, strict=True):
        if append_eos and ids[-1:] == [end]:
            raise CommandError(
                f"--append-eos: the tokenizer ends {line[:60]!r} "
                f"with {tokenizer.eos_token!r} already"
            )
        if append_eos:
            ids.append(end)
        if not ids:
            raise CommandError(f"{line[:60]!r} has no tokens")
    return encoded
