"""All ``FASTGEN_*`` environment variables, in one table that is read once.

The documentation and ``fastgen status`` print `VARIABLES`; the code calls `settings()`.
"""

import functools
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from fastgen.errors import VariableError

Mode = Literal["1", "0", "compat"]
Ops = Literal["auto", "reference", "native", "triton"]
Linear = Literal["auto", "off", "plain", "packed"]
Step = Literal["auto", "module"]
Graphs = Literal["auto", "call", "off"]
Refill = Literal["auto", "on", "off"]
Unknown = Literal["check", "off", "trust"]
Precision = Literal["model", "int8"]
SelfDraft = Literal["auto", "on", "off"]
Int8Head = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Attributes:
        name: Name in the environment.
        default: Value that applies if the variable is unset or empty.
        allowed: Accepted values; empty if any text is accepted.
        help: Description in one line.
        form: Description of the accepted text if `allowed` is empty.
    """

    name: str
    default: str
    allowed: tuple[str, ...]
    help: str
    form: str = "any text"

    def read(self, environ: Mapping[str, str]) -> str:
        """Return the variable's value in ``environ``, or its default.

        Raises:
            VariableError: The value is not allowed; the message contains the name, the value and
                the allowed values.
        """
        value = environ.get(self.name, "").strip() or self.default
        if self.allowed and value not in self.allowed:
            problem = f"the value must be one of {', '.join(self.allowed)}"
            raise VariableError(
                self.name, value, problem, f"unset it for the default, {self.default}"
            )
        return value


VARIABLES = (
    Variable(
        "FASTGEN",
        "1",
        get_args(Mode),
        "0: `import fastgen` patches nothing; compat: only what toolkits fail without; "
        "fastgen.enable() patches all",
    ),
    Variable(
        "FASTGEN_SKIP",
        "",
        (),
        "comma-separated patches, or their dotted prefixes, that are left out",
    ),
    Variable(
        "FASTGEN_OPS", "auto", get_args(Ops), "which implementation of the tensor operations runs"
    ),
    Variable("FASTGEN_STRICT", "0", ("0", "1"), "1: a fallback or a failed patch raises"),
    Variable(
        "FASTGEN_PARITY",
        "0",
        ("0", "1"),
        "1: run the toolkit's own code too and report the first divergence",
    ),
    Variable(
        "FASTGEN_LINEAR",
        "auto",
        get_args(Linear),
        "how linear layers run on a CPU; off, plain: by torch; packed: in C, regardless of memory",
    ),
    Variable(
        "FASTGEN_MEMORY",
        "auto",
        (),
        "the most memory that copies of weights and kept buffers take; 0: keep none; "
        "auto: weights by what is free",
        "auto, a size like 2GiB or 500MB, 0",
    ),
    Variable(
        "FASTGEN_STEP",
        "auto",
        get_args(Step),
        "module: decode steps run through the model's own modules alone",
    ),
    Variable(
        "FASTGEN_GRAPHS",
        "auto",
        get_args(Graphs),
        "call: a GPU's decode steps are captured by every call; off: never",
    ),
    Variable(
        "FASTGEN_REFILL",
        "auto",
        get_args(Refill),
        "whether batches start beside others, and loops read batches ahead; auto: on a CPU",
    ),
    Variable(
        "FASTGEN_UNKNOWN",
        "check",
        get_args(Unknown),
        "model families without a spec; check: share keys and values once a first call has agreed "
        "with transformers; trust: share at once; off: leave them alone",
    ),
    Variable(
        "FASTGEN_PRECISION",
        "model",
        get_args(Precision),
        "int8: decode steps and encoders on a CPU run on weights rounded to int8, which changes "
        "the output",
    ),
    Variable(
        "FASTGEN_SELF_DRAFT",
        "auto",
        get_args(SelfDraft),
        "greedy search and sampling of up to 4 texts on a CPU: drafts on weights in int8, verified "
        "by the model's own, with the same output; auto: where it is measured to be faster",
    ),
    Variable(
        "FASTGEN_INT8_HEAD",
        "auto",
        get_args(Int8Head),
        "greedy search of up to 3 rows on a CPU: the output projection in int8 rules most tokens "
        "out, with the same output; auto: where steps read it from memory",
    ),
    Variable(
        "FASTGEN_PREFIX_CACHE",
        "0",
        (),
        "the most memory that keys and values of recent prompts take, which later prompts with the "
        "same first tokens reuse; 0: none are kept",
        "a size like 2GiB or 500MB, 0",
    ),
    Variable(
        "FASTGEN_MAX_WAITING",
        "0",
        (),
        "requests that may wait in a `ContinuousBatchingManager` without `max_queue_size`; "
        "`transformers serve` answers 503 to others; 0: any number",
        "a number",
    ),
    Variable(
        "FASTGEN_REPORT",
        "0",
        ("0", "1"),
        "1: print a summary of all calls to stderr when the process ends",
    ),
    Variable(
        "FASTGEN_FAIRSEQ_ALLOW",
        "",
        (),
        "comma-separated classes that a fairseq checkpoint you trust may hold",
    ),
    Variable(
        "FASTGEN_CACHE_DIR",
        "",
        (),
        "folder for kept results; empty: fastgen in the platform's user cache",
    ),
)


@dataclass(frozen=True)
class Settings:
    """The parsed environment variables; see `VARIABLES`."""

    mode: Mode
    skip: tuple[str, ...]
    ops: Ops
    strict: bool
    parity: bool
    linear: Linear
    memory: int | None
    step: Step
    graphs: Graphs
    refill: Refill
    unknown: Unknown
    precision: Precision
    self_draft: SelfDraft
    int8_head: Int8Head
    prefix_cache: int
    max_waiting: int
    report: bool
    fairseq_allow: tuple[str, ...]
    cache_dir: Path

    @property
    def enabled(self) -> bool:
        """Whether patches that accelerate are applied on import."""
        return self.mode == "1"

    @property
    def packs(self) -> bool:
        """Whether packed weights are allowed."""
        return self.linear != "plain" and self.memory != 0


@functools.cache
def settings() -> Settings:
    """Return the settings of this process. The first call reads the environment.

    Raises:
        VariableError: A variable has an invalid value.
    """
    return read(os.environ)


def reload() -> Settings:
    """Read the environment again (for tests), and return the new settings."""
    settings.cache_clear()
    return settings()


def use_precision(precision: Precision) -> None:
    """Set `FASTGEN_PRECISION` for this process and those that it starts."""
    if settings().precision != precision:
        os.environ["FASTGEN_PRECISION"] = precision
        reload()


def read(environ: Mapping[str, str]) -> Settings:
    """Parse the settings from ``environ``.

    Raises:
        VariableError: A variable has an invalid value.
    """
    value = {variable.name: variable.read(environ) for variable in VARIABLES}
    folder = value["FASTGEN_CACHE_DIR"]
    return Settings(
        mode=cast(Mode, value["FASTGEN"]),
        skip=_names(value["FASTGEN_SKIP"]),
        ops=cast(Ops, value["FASTGEN_OPS"]),
        strict=value["FASTGEN_STRICT"] == "1",
        parity=value["FASTGEN_PARITY"] == "1",
        linear=cast(Linear, value["FASTGEN_LINEAR"]),
        memory=_size("FASTGEN_MEMORY", value["FASTGEN_MEMORY"]),
        step=cast(Step, value["FASTGEN_STEP"]),
        graphs=cast(Graphs, value["FASTGEN_GRAPHS"]),
        refill=cast(Refill, value["FASTGEN_REFILL"]),
        unknown=cast(Unknown, value["FASTGEN_UNKNOWN"]),
        precision=cast(Precision, value["FASTGEN_PRECISION"]),
        self_draft=cast(SelfDraft, value["FASTGEN_SELF_DRAFT"]),
        int8_head=cast(Int8Head, value["FASTGEN_INT8_HEAD"]),
        prefix_cache=_size("FASTGEN_PREFIX_CACHE", value["FASTGEN_PREFIX_CACHE"], auto=False) or 0,
        max_waiting=_count("FASTGEN_MAX_WAITING", value["FASTGEN_MAX_WAITING"]),
        report=value["FASTGEN_REPORT"] == "1",
        fairseq_allow=_names(value["FASTGEN_FAIRSEQ_ALLOW"]),
        cache_dir=_folder("FASTGEN_CACHE_DIR", folder)
        if folder
        else _user_cache(environ) / "fastgen",
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for part in text.split(",") if (name := part.strip()))


def _count(name: str, text: str) -> int:
    if text.isdecimal():
        return int(text)
    raise VariableError(name, text, "the value must be a number", "unset it for the default, 0")


def _folder(name: str, text: str) -> Path:
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        problem = f"there is no home folder for {Path(text).parts[0]}"
        raise VariableError(name, text, problem, "name another folder, or unset it") from error


_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{unit}": base ** (power + 1)
    for power, prefix in enumerate("kmgt")
    for unit, base in (("b", 1000), ("ib", 1024))
}


def _size(name: str, text: str, auto: bool = True) -> int | None:
    """Parse a size into bytes, rounded down; None for ``auto``, where it is allowed."""
    if auto and text == "auto":
        return None
    number, unit = cast(re.Match[str], re.match(r"([0-9]*\.?[0-9]*) *(.*)", text)).groups()
    if number.strip(".") and unit.lower() in _UNITS:
        return int(float(number) * _UNITS[unit.lower()])
    problem = "the value must be a number of bytes, a size like 2GiB or 500MB, 0 to keep nothing"
    default = "auto" if auto else "0"
    raise VariableError(
        name,
        text,
        f"{problem}, or auto" if auto else problem,
        f"unset it for the default, {default}",
    )


def _user_cache(environ: Mapping[str, str]) -> Path:
    variable, below_home = {
        "win32": ("LOCALAPPDATA", "AppData/Local"),
        "darwin": ("", "Library/Caches"),
    }.get(sys.platform, ("XDG_CACHE_HOME", ".cache"))
    named = Path(environ.get(variable, ""))
    if named.is_absolute():  # the XDG specification ignores relative paths
        return named
    try:
        return Path.home() / below_home
    except RuntimeError:  # a user without a home directory, as in containers
        return Path(tempfile.gettempdir())
