"""The options that fastgen adds to fairseq's generating commands, and where their values are kept."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Options:
    """postprocess_workers: 0 for none, 1 for a thread, more for processes. decode_hypothesis: whether D lines."""

    postprocess_workers: int = 1
    decode_hypothesis: bool = True


given = Options()
"""What the command line of this process says; fairseq's own settings have no place for it."""


class _Keep(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(given, self.dest, values)


class _KeepSwitch(argparse.BooleanOptionalAction):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        given.decode_hypothesis = not str(option_string).startswith("--no-")


def get_generation_parser(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`options.get_generation_parser`, with FastSeq's options, which are at their defaults until it parses."""
    vars(given).update(vars(Options()))
    parser = original(*args, **kwargs)
    group = parser.add_argument_group("fastgen")
    group.add_argument(
        "--postprocess-workers", type=_count, action=_Keep, default=argparse.SUPPRESS, metavar="N",
        help="undo word pieces, detokenize and score in the background: 0 not at all, 1 in a thread, more in as many "
        "processes (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--decode-hypothesis", action=_KeepSwitch, default=argparse.SUPPRESS,
        help="print detokenized hypotheses as D lines (default: yes)",
    )  # fmt: skip
    return parser


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {value}")
    return value
