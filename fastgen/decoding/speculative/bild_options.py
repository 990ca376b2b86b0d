"""What a call of big-little decoding says: the same options, ranges and messages in every toolkit."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

FALLBACK, ROLLBACK, MAX_DRAFT = 0.6, 2.0, 10
"""What holds where a call does not say."""

NAMES = (
    "fallback_threshold", "rollback_threshold", "max_draft", "lossless", "paper_compat", "adaptive_draft",
    "speculative_beams",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """What a call asks for.

    Attributes:
        small: the small model; None where it is the first `layers` of the large one itself.
        fallback: the least probability with which the small model goes on. rollback: the most that one of its tokens
            may cost, -log p under the large model.
        lossless: whether the output is the large model's own.
        adaptive: whether the small model drafts only where that is faster; None: where that cannot be told from the
            output, which is lossless and not drawn.
        beams: how many steps of a beam search are drafted at a time; 0 for none.
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
    asked: Mapping[str, Any],
    stored: Mapping[str, Any],
    smalls: tuple[str, str],
    called: Callable[[str], str] = str,
) -> Options:
    """Return the options of a call.

    Args:
        asked: what it says, by `NAMES`. stored: what holds where it does not say.
        smalls: how its user names the small model, and layers of the large one.
        called: how its user names one of `NAMES`.

    Raises:
        ValueError, TypeError: a value is not one that it can have; or not just one small model is given.
    """
    if (small is None) == (layers is None):
        said = "".join(
            f"{', '.join(map(called, values))}: " for values in (asked or stored,) if values
        )
        raise ValueError(
            f"{said}big-little decoding needs a small model, either {smalls[0]} or {smalls[1]} (layers of the model "
            f"itself), and got {'neither' if small is None else 'both'}"
        )
    if asked.get("lossless") and asked.get("rollback_threshold") is not None:
        raise ValueError(
            f"{called('lossless')}=True keeps no token but the large model's own; {called('rollback_threshold')}="
            f"{asked['rollback_threshold']} would keep others"
        )
    if asked.get("rollback_threshold") is not None or asked.get("lossless") is False:
        stored = {
            name: value
            for name, value in stored.items()
            if name not in ("lossless", "adaptive_draft")
        }
    values = {**stored, **asked}
    if values.get("adaptive_draft") and not values.get("lossless"):
        raise ValueError(
            f"{called('adaptive_draft')}=True goes by the clock, and would change the output: it needs "
            f"{called('lossless')}=True"
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
    """What is said of an option that asks for more than one text."""
    return f"big-little decoding writes one text per input: {name} is {value}, and must be 1"


def _number(name: str, value: Any, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is a {type(value).__name__}, {value!r}; it must be a number")
    if not 0.0 <= value <= most:
        raise ValueError(
            f"{name} is {value}; it must be {f'from 0 to {most:g}' if most < math.inf else '0 or more'}"
        )
    return float(value)


def _steps(name: str, value: Any) -> int:
    """True is one step at a time, False none."""
    return int(value) if isinstance(value, bool) or value == 0 else _count(name, value)


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is a {type(value).__name__}, {value!r}; it must be an integer")
    if value < 1:
        raise ValueError(f"{name} is {value}; it must be 1 or more")
    return value
