"""A large and a small model of one tokenizer, from their folders, and the lines of text that they are given."""

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
_UNLIMITED = 10**6  # a tokenizer's model_max_length above this stands for none


def arguments(parser: argparse.ArgumentParser) -> None:
    """What both tools ask for."""
    parser.add_argument("large", type=Path, metavar="LARGE", help=models.HELP)
    parser.add_argument("small", type=Path, metavar="SMALL", help=models.HELP)
    parser.add_argument(
        "--input", type=Path, required=True, metavar="FILE", help="UTF-8 text, one source per line"
    )
    parser.add_argument("--append-eos", action="store_true",
                        help="end each source with the end token, where the tokenizer does not")  # fmt: skip
    parser.add_argument("--max-source-tokens", type=COUNT, metavar="N",
                        help="cut longer sources (default: what the tokenizer says)")  # fmt: skip
    parser.add_argument("--max-new-tokens", type=COUNT, default=MAX_NEW_TOKENS, metavar="N",
                        help="longest output (%(default)s)")  # fmt: skip
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], help="default: cuda where there is one"
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"],
                        help="type in which the models generate (%(default)s)")  # fmt: skip
    parser.add_argument("--threads", type=COUNT, metavar="N", help="torch's CPU threads")


def device_of(args: argparse.Namespace) -> str:
    """The device to run on; torch gets the number of threads on the way."""
    return models.usable_device(args.device, args.threads)


def check_parent(output: Path) -> None:
    """Raise CommandError where the folder is missing that an output is to lie in."""
    if not output.absolute().parent.is_dir():
        raise CommandError(f"--output {output}: there is no folder {output.absolute().parent}")


def load_model(source: Path, device: str, dtype: str) -> Any:
    """A model, ready to generate, without what an earlier tuning stored with it."""
    model = models.load_model(source, device, dtype)
    for name in (*bild_options.NAMES, "assistant_early_exit"):
        vars(model.generation_config).pop(name, None)
    model.generation_config.assistant_early_exit = None
    return model


def greedy(model: Any, max_new_tokens: int) -> dict[str, Any]:
    """What `generate` is to be given for greedy outputs, whatever the model's own generation config says."""
    model.generation_config.max_length = (
        None  # else transformers warns at every call that there are two limits
    )
    return {
        "num_beams": 1,
        "do_sample": False,
        "num_return_sequences": 1,
        "max_new_tokens": max_new_tokens,
    }


def check_pair(large: Any, small: Any, tokenizers: tuple[Any, ...]) -> None:
    """Raise CommandError where two models do not read and write the same tokens."""
    from fastgen.patches.transformers.bild.bild_call import options_of

    call = {
        "assistant_model": small, "tokenizer": tokenizers[0], "assistant_tokenizer": tokenizers[1],
        "fallback_threshold": 0.5, "num_beams": 1, "num_return_sequences": 1,
    }  # fmt: skip
    try:
        options_of(large, call)
    except ValueError as error:
        raise CommandError(str(error)) from error


def read_lines(file: Path) -> list[str]:
    """The lines of a text file, without their ends.

    Raises:
        CommandError: there is no such file, it is empty, or not UTF-8; the message has the line.
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
    """The token ids of each line, of `limit` at most.

    Raises:
        CommandError: a line without a token, or an end token where there is none, or one already.
    """
    end = tokenizer.eos_token_id
    if append_eos and end is None:
        raise CommandError("--append-eos: the tokenizer has no end token")
    if limit is None and tokenizer.model_max_length < _UNLIMITED:
        limit = int(tokenizer.model_max_length)
    room = None if limit is None else limit - append_eos
    options: dict[str, Any] = {} if room is None else {"truncation": True, "max_length": room}
    found: list[list[int]] = tokenizer(list(lines), **options)["input_ids"]
    for line, ids in zip(lines, found, strict=True):
        if append_eos and ids[-1:] == [end]:
            raise CommandError(
                f"--append-eos: the tokenizer ends {line[:60]!r} with {tokenizer.eos_token!r} already"
            )
        if append_eos:
            ids.append(end)
        if not ids:
            raise CommandError(f"{line[:60]!r} has no tokens")
    return found
