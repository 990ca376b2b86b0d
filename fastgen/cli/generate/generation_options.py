"""Command-line options for the arguments of `generate`.

Names, types and help come from the documentation of the installed transformers.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastgen.corpus.models import first_line
from fastgen.errors import CommandError
from fastgen.number import COUNT, POSITIVE, Number

ALIASES = {
    "num_return_sequences": ("--n-best",), "max_length": ("--max-gen-length",),
    "min_length": ("--min-gen-length",),
}  # fmt: skip
"""Additional flags of some options."""

ELSEWHERE = {
    "stop_strings": "such an end cannot be told from the padding of a batch",
    "is_assistant": "transformers uses it internally",
    "return_dict_in_generate": "--scores writes the scores of sequences",
    "output_scores": "--scores writes the scores of sequences",
    "output_logits": "only texts are written, not logits",
    "output_attentions": "only texts are written, not attentions",
    "output_hidden_states": "only texts are written, not hidden states",
    "compile_config": "fastgen runs its own decode steps",
}
"""Arguments of `generate` that are not options of the command, with the reason."""

RESTORED = {
    "num_beam_groups": (
        "int",
        "Number of beam groups; each is penalised for repeating earlier ones (diverse beam search)",
    ),
    "diversity_penalty": (
        "float",
        "Penalty of a token for each beam of an earlier group that has chosen it",
    ),
    "force_words_ids": (
        "list",
        "Token ids that each output must contain: a list of phrases, or of lists of alternatives",
    ),
    "penalty_alpha": (
        "float",
        "Weight of the penalty for similarity (contrastive search, with --top-k)",
    ),
}
"""Type and help of arguments that transformers no longer documents."""

_NOT_NEGATIVE, _SHARE = Number(least=0), Number(float, least=0, most=1)
RANGES = {
    **dict.fromkeys(
        ("num_beams", "num_return_sequences", "num_beam_groups", "max_length", "max_new_tokens"),
        COUNT,
    ),
    **dict.fromkeys(("min_length", "min_new_tokens", "top_k"), _NOT_NEGATIVE),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), _NOT_NEGATIVE),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "max_time"), POSITIVE),
    **dict.fromkeys(("top_p", "min_p"), _SHARE),
}
"""Allowed ranges of numbers that transformers rejects late, or accepts but cannot decode with."""

_DOCUMENTED = re.compile(r"^ {8}(\w+):? *\(([^\n]*)\):\n((?: {12}.*\n|\n)+)", re.M)
_TYPES: dict[str, tuple[type, ...]] = {
    "bool": (bool,), "int": (int,), "float": (int, float), "str": (str,), "list": (list,),
    "tuple": (list,),
    "dict": (dict, list),  # a dict whose keys are lists is a list of pairs in JSON
}  # fmt: skip
_DEST = "generation: "


@dataclass(frozen=True)
class Setting:
    """An option of `generate`.

    Attributes:
        name: its name in `generate`.
        kinds: names of the types that its value may have.
        help: the first sentence of its documentation.
    """

    name: str
    kinds: tuple[str, ...]
    help: str

    @property
    def flag(self) -> str:
        """Its option on the command line."""
        return "--" + self.name.replace("_", "-")

    def value(self, value_given: Any) -> Any:
        """Return the value for words of a command line or for a value of a JSON file.

        Raises:
            CommandError: the value has none of the types.
        """
        if isinstance(value_given, str):
            parsed = self._of_words([value_given])
        elif isinstance(value_given, list) and all(isinstance(word, str) for word in value_given):
            parsed = self._of_words(value_given)
        else:
            parsed = value_given
        if not any(self._is(parsed, kind) for kind in self.kinds):
            words = (
                " ".join(value_given)
                if isinstance(value_given, list) and all(isinstance(w, str) for w in value_given)
                else value_given
            )
            raise CommandError(f"{self.flag} {words}: must be {' or '.join(self.kinds)}")
        return parsed

    def _of_words(self, words: list[str]) -> Any:
        values = [_json(word) for word in words]
        if len(values) > 1 or (
            not isinstance(values[0], list) and not {*self.kinds} - {"list", "tuple"}
        ):
            return values
        return values[0] if any(self._is(values[0], kind) for kind in self.kinds) else words[0]

    @staticmethod
    def _is(value: Any, kind: str) -> bool:
        return isinstance(value, _TYPES[kind]) and (kind == "bool" or not isinstance(value, bool))


def settings() -> dict[str, Setting]:
    """Return all options that the installed transformers documents, and those of `RESTORED`.

    The options of `ELSEWHERE` are excluded.
    """
    from transformers import GenerationConfig

    known = vars(GenerationConfig())
    found: dict[str, Setting] = {}
    for name, types, text in _DOCUMENTED.findall(GenerationConfig.__doc__ or ""):
        kinds = tuple(
            kind for kind in dict.fromkeys(re.findall(r"\w+", _outermost(types))) if kind in _TYPES
        )
        if name in known and name not in ELSEWHERE and kinds:
            sentence = " ".join(text.split()).partition(". ")[0].replace("%", "%%")
            found[name] = Setting(name, kinds, sentence.rstrip(":."))
    return found | {name: Setting(name, (kind,), text) for name, (kind, text) in RESTORED.items()}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare an option for each of `settings`."""
    group = parser.add_argument_group(
        "generation",
        "The options of transformers' GenerationConfig; others keep the model's values. "
        "Give a list as several values, or as JSON.",
    )
    group.add_argument(
        "--generation-config",
        type=Path,
        metavar="FILE",
        help="JSON file with such options; flags take precedence",
    )
    for name, setting in settings().items():
        flags, kinds = (setting.flag, *ALIASES.get(name, ())), set(setting.kinds)
        common: dict[str, Any] = {"dest": _DEST + name, "help": setting.help, "default": None}
        if kinds == {"bool"}:
            group.add_argument(*flags, action=argparse.BooleanOptionalAction, **common)
            continue
        if "bool" in kinds:
            group.add_argument(*flags, nargs="?", const=True, metavar="VALUE", **common)
            no = f"--no-{setting.flag.removeprefix('--')}"
            group.add_argument(
                no, action="store_const", const=False, dest=_DEST + name, help=f"{name}=False"
            )
            continue
        nargs = "+" if kinds & {"list", "tuple"} else None
        group.add_argument(*flags, nargs=nargs, metavar=setting.kinds[0].upper(), **common)


def requested(args: argparse.Namespace, elsewhere: Mapping[str, str] = ELSEWHERE) -> dict[str, Any]:
    """Return the arguments of `generate` from the file and from the flags; flags take precedence.

    Args:
        args: the parsed arguments.
        elsewhere: names that the file must not have, with the reason.

    Raises:
        CommandError: a value has the wrong type or is out of range, or the file is not such a
            config.
    """
    known = settings()
    words = {
        name.removeprefix(_DEST): value
        for name, value in vars(args).items()
        if name.startswith(_DEST)
    }
    flags = {name: known[name].value(value) for name, value in words.items() if value is not None}
    file = args.generation_config
    generation = ({} if file is None else of_file(file, known, elsewhere)) | flags
    ranges = RANGES | ({"temperature": POSITIVE} if generation.get("do_sample") else {})
    for name in ranges.keys() & generation.keys():
        if (problem := ranges[name].problem(generation[name])) is not None:
            raise CommandError(f"{known[name].flag} {generation[name]}: {problem}")
    return generation


def of_file(
    file: Path, known: Mapping[str, Setting], elsewhere: Mapping[str, str] = ELSEWHERE
) -> dict[str, Any]:
    """Return the options in a generation config on disk.

    Args:
        file: path of the JSON file.
        known: the options by name.
        elsewhere: names that the file must not have, with the reason.

    Raises:
        CommandError: the file cannot be read, or has an option that the command does not support.
    """
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CommandError(
            f"--generation-config {file} cannot be read: {first_line(error)}"
        ) from error
    if not isinstance(found, dict):
        raise CommandError(f"--generation-config {file} contains a {type(found).__name__}")
    values: dict[str, Any] = {}
    for name, value in found.items():
        if value is None or name.startswith("_") or name == "transformers_version":
            continue
        if name in known:
            values[name] = known[name].value(value)
        elif value:
            reason = elsewhere.get(name, "transformers has no such option")
            raise CommandError(
                f"--generation-config {file}: {name} is not an option here: {reason}"
            )
    return values


def check(generation: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    """Raise CommandError if transformers rejects the options, together with the stored ones.

    Args:
        generation: the options.
        stored: the model's generation config.
    """
    from transformers import GenerationConfig

    from fastgen.patches.transformers.generate import legacy_search

    try:
        config = GenerationConfig(**{**stored, **generation})
        config.validate()
        legacy_search.check(config)
    except (TypeError, ValueError) as error:
        raise CommandError(first_line(error)) from error


def _json(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return word


def _outermost(types: str) -> str:
    """Return documented types without parameters: `Union[int, list[int]]` is int or list."""
    inside = types.replace("Union[", "")
    while (shorter := re.sub(r"[\[(][^\[\]()]*[\])]", "", inside)) != inside:
        inside = shorter
    return inside.partition("*optional*")[0]
