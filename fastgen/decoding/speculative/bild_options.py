"""Options of big-little decoding: the same names, ranges and messages in every toolkit."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

FALLBACK, ROLLBACK, MAX_DRAFT = 0.6, 2.0, 10
"""Default values."""

NAMES = (
    "fallback_threshold", "rollback_threshold", "max_draft", "lossless", "paper_compat",
    "adaptive_draft", "speculative_beams",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Options of one call.

    Attributes:
        small: the small model; None if it is the first `layers` layers of the large one.
        layers: number of those layers, or None.
        fallback: minimum probability with which the small model continues to draft.
        rollback: maximum cost of a drafted token, -log p under the large model in nats.
        max_draft: maximum number of tokens per draft.
        lossless: whether the output is the large model's own.
        paper_compat: whether to follow the program of the paper's authors.
        adaptive: whether the small model drafts only where that is faster. None: only if that
            cannot change the output, that is, if it is lossless and not sampled.
        beams: number of beam search steps drafted at a time; 0 for none.
    """

    small: Any
    layers: int | None
    fallback: float
    rollback: float
    max_draft: int
    lossless: bool
    paper_compat: bool
    adaptive: bool | None
    beams: int = 0


def options(
    small: Any,
    layers: int | None,
    requested: Mapping[str, Any],
    stored: Mapping[str, Any],
    smalls: tuple[str, str],
    called: Callable[[str], str] = str,
) -> Options:
    """Return the validated options of a call.

    Args:
        small: the small model, or None.
        layers: number of layers of the large model that draft instead, or None.
        requested: values that the call passes, keyed by `NAMES`.
        stored: values that apply where the call passes none.
        smalls: names under which the user passes the small model and the number of layers.
        called: maps one of `NAMES` to the name that the user knows.

    Raises:
        ValueError: a value is out of range, options contradict each other, or not exactly one of
            `small` and `layers` is passed.
        TypeError: a value has the wrong type.
    """
    if (small is None) == (layers is None):
        prefix = "".join(
            f"{', '.join(map(called, values))}: " for values in (requested or stored,) if values
        )
        raise ValueError(
            f"{prefix}big-little decoding needs a small model, either {smalls[0]} or {smalls[1]} "
            f"(layers of the model itself), and got {'neither' if small is None else 'both'}"
        )
    if requested.get("lossless") and requested.get("rollback_threshold") is not None:
        raise ValueError(
            f"{called('lossless')}=True keeps no token but the large model's own; "
            f"{called('rollback_threshold')}={requested['rollback_threshold']} would keep others"
        )
    if requested.get("rollback_threshold") is not None or requested.get("lossless") is False:
        stored = {
            name: value
            for name, value in stored.items()
            if name not in ("lossless", "adaptive_draft")
        }
    values = {**stored, **requested}
    if values.get("adaptive_draft") and not values.get("lossless"):
        raise ValueError(
            f"{called('adaptive_draft')}=True goes by the clock, and would change the output: "
            f"it needs {called('lossless')}=True"
        )
    return Options(
        small, layers,
        _number(called("fallback_threshold"), values.get("fallback_threshold", FALLBACK), 1.0),
        _number(called("rollback_threshold"), values.get("rollback_threshold", ROLLBACK), math.inf),
        _count(called("max_draft"), values.get("max_draft", MAX_DRAFT)),
        bool(values.get("lossless", False)), bool(values.get("paper_compat", False)),
        values.get("adaptive_draft"),
        _steps(called("speculative_beams"), values.get("speculative_beams", 0)),
    )  # fmt: skip


def one_text(name: str, value: object) -> str:
    """Return the error message for an option that requests more than one text per input."""
    return f"big-little decoding writes one text per input: {name} is {value}, and must be 1"


def _number(name: str, value: Any, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is a {type(value).__name__}, {value!r}; it must be a number")
    if not 0.0 <= value <= most:
        raise ValueError(
            f"{name} is {value}; "
            f"it must be {f'from 0 to {most:g}' if most < math.inf else '0 or more'}"
        )
    return float(value)


def _steps(name: str, value: Any) -> int:
    """Validate a number of steps; True means 1 and False means 0."""
    return int(value) if isinstance(value, bool) or value == 0 else _count(name, value)


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is a {type(value).__name__}, {value!r}; it must be an integer")
    if value < 1:
        raise ValueError(f"{name} is {value}; it must be 1 or more")
    return value
