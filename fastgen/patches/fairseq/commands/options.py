"""Command-line options that fastgen adds to fairseq's generation commands, and their values."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastgen.decoding.speculative.bild_options import FALLBACK, MAX_DRAFT, ROLLBACK
from fastgen.number import COUNT, Number
from fastgen.patches.engine import engine


@dataclass
class Options:
    """Values of fastgen's command-line options.

    Attributes:
        generate_workers: Number of processes that translate; None if not set.
        postprocess_workers: 0 for no background work, 1 for a thread, more for processes.
        decode_hypothesis: Whether to print D lines.
        bild_small: Checkpoint of the small model, or None.
        bild_early_exit: Number of the large model's layers that draft, or None.
        bild_fallback: `fallback_threshold` of `decoding.speculative.bild_options`; None if not set.
        bild_rollback: `rollback_threshold`, likewise.
        bild_max_draft: `max_draft`, likewise.
        bild_lossless: `lossless`, likewise.
        bild_adaptive_draft: `adaptive_draft`, likewise.
    """

    generate_workers: int | None = None
    postprocess_workers: int = 1
    decode_hypothesis: bool = True
    bild_small: str | None = None
    bild_early_exit: int | None = None
    bild_fallback: float | None = None
    bild_rollback: float | None = None
    bild_max_draft: int | None = None
    bild_lossless: bool | None = None
    bild_adaptive_draft: bool | None = None


command_line = Options()
"""Options of this process's command line; fairseq's own configuration has no place for them."""


class _Keep(argparse.Action):
    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        setattr(command_line, self.dest, values)


class _KeepSwitch(argparse.BooleanOptionalAction):
    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        setattr(command_line, self.dest, not str(option_string).startswith("--no-"))


def get_generation_parser(
    original: Callable[..., Any], interactive: bool = False, *args: Any, **kwargs: Any
) -> argparse.ArgumentParser:
    """`options.get_generation_parser`, with fastgen's options.

    They are reset to their defaults until the parser has run.
    """
    vars(command_line).update(vars(Options()))
    parser: argparse.ArgumentParser = original(interactive, *args, **kwargs)
    beam = next((action for action in parser._actions if action.dest == "beam"), None)
    if beam is not None:  # fairseq accepts 0 and fails at the first batch
        beam.type = COUNT
    group = parser.add_argument_group("fastgen")
    group.add_argument(
        "--postprocess-workers", type=Number(least=0), action=_Keep, default=argparse.SUPPRESS,
        metavar="N",
        help="undo word pieces, detokenize and score in the background: 0 not at all, 1 in a "
        "thread, more in as many processes (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--decode-hypothesis", action=_KeepSwitch, default=argparse.SUPPRESS,
        help="print detokenized hypotheses as D lines (default: yes)",
    )  # fmt: skip
    if engine.is_applied(f"fairseq.{'interactive' if interactive else 'generate'}_command"):
        group.add_argument(
            "--generate-workers", type=COUNT, action=_Keep, default=argparse.SUPPRESS, metavar="N",
            help="translate on a CPU in N processes of one thread each; 1: in this one, with all "
            "threads (default: as many as threads, where there are 8 batches for each, in a "
            "buffer if there are buffers, and memory)",
        )  # fmt: skip
        _add_bild(parser)
    return parser


def _add_bild(parser: argparse.ArgumentParser) -> None:
    """Add the options of big-little decoding, which only fastgen's commands support."""
    group = parser.add_argument_group(
        "fastgen: big-little decoding",
        "a small model drafts, the large one looks over it; with --beam 1",
    )
    keep: dict[str, Any] = {"action": _Keep, "default": argparse.SUPPRESS}
    group.add_argument(
        "--bild-small", metavar="CHECKPOINT", **keep, help="the small model, of the same dictionary"
    )
    group.add_argument(
        "--bild-early-exit", type=int, metavar="N", **keep,
        help="in its place the first N layers of the large model's decoder",
    )  # fmt: skip
    group.add_argument(
        "--bild-fallback", type=float, metavar="P", **keep,
        help="probability of its likeliest token below which the small model stops "
        f"(default: {FALLBACK})",
    )  # fmt: skip
    group.add_argument(
        "--bild-rollback", type=float, metavar="COST", **keep,
        help="-log p under the large model above which a drafted token does not stand "
        f"(default: {ROLLBACK})",
    )  # fmt: skip
    group.add_argument(
        "--bild-max-draft",
        type=int,
        metavar="N",
        **keep,
        help=f"tokens of a draft at most (default: {MAX_DRAFT})",
    )
    group.add_argument(
        "--bild-lossless", action=_KeepSwitch, default=argparse.SUPPRESS,
        help="let no token stand but the large model's own: the output is that of --beam 1",
    )  # fmt: skip
    group.add_argument(
        "--bild-adaptive-draft", action=_KeepSwitch, default=argparse.SUPPRESS,
        help="draft only where that is faster, by the clock (default: with --bild-lossless)",
    )  # fmt: skip
