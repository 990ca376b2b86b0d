"""Options of `generate` as options of a command: names, types and what they mean come from transformers itself."""

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
    "num_return_sequences": ("--n-best",), "max_length": ("--max-gen-length",), "min_length": ("--min-gen-length",),
}  # fmt: skip
"""Other names of some."""

ELSEWHERE = {
    "stop_strings": "what ends there cannot be told from a batch's padding",
    "is_assistant": "it is for transformers' own use",
    "return_dict_in_generate": "--scores gives the scores of sequences",
    "output_scores": "--scores gives the scores of sequences",
    "output_logits": "texts are written, and no logits",
    "output_attentions": "texts are written, and no attentions",
    "output_hidden_states": "texts are written, and no hidden states",
    "compile_config": "steps are fastgen's own",
}
"""Those that are no option of the command, and why."""

RESTORED = {
    "num_beam_groups": (
        "int",
        "Groups of beams, each unlike those before it (diverse beam search)",
    ),
    "diversity_penalty": (
        "float",
        "What a token loses for each earlier group's beam that has chosen it",
    ),
    "force_words_ids": (
        "list",
        "Token ids that each output has to hold: a list of phrases, or of lists of alternatives",
    ),
    "penalty_alpha": (
        "float",
        "How much unlikeness counts beside probability (contrastive search, with --top-k)",
    ),
}
"""Those that transformers no longer documents."""

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
"""Numbers that transformers refuses when it generates, or accepts and cannot decode with."""

_DOCUMENTED = re.compile(r"^ {8}(\w+):? *\(([^\n]*)\):\n((?: {12}.*\n|\n)+)", re.M)
_TYPES: dict[str, tuple[type, ...]] = {
    "bool": (bool,), "int": (int,), "float": (int, float), "str": (str,), "list": (list,), "tuple": (list,),
    "dict": (dict, list),  # a dict whose keys are lists is a list of pairs in JSON
}  # fmt: skip
_DEST = "generation: "


@dataclass(frozen=True)
class Setting:
    """An option of `generate`: its name there, the types that its value may have, and the first sentence on it."""

    name: str
    kinds: tuple[str, ...]
    help: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def value(self, said: Any) -> Any:
        """The value that words of a command line, or of a JSON file, stand for.

        Raises:
            CommandError: it has not one of the types.
        """
        if isinstance(said, str):
            found = self._of_words([said])
        elif isinstance(said, list) and all(isinstance(word, str) for word in said):
            found = self._of_words(said)
        else:
            found = said
        if not any(self._is(found, kind) for kind in self.kinds):
            words = (
                " ".join(said)
                if isinstance(said, list) and all(isinstance(w, str) for w in said)
                else said
            )
            raise CommandError(f"{self.flag} {words}: must be {' or '.join(self.kinds)}")
        return found

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
    """All that the installed transformers documents, but for `ELSEWHERE`, and `RESTORED`."""
    from transformers import GenerationConfig

    known = vars(GenerationConfig())
    found: dict[str, Setting] = {}
    for name, types, text in _DOCUMENTED.findall(GenerationConfig.__doc__ or ""):
        kinds = tuple(
            kind for kind in dict.fromkeys(re.findall(r"\w+", _outermost(types))) if kind in _TYPES
        )
        if name in known and name not in ELSEWHERE and kinds:
            said = " ".join(text.split()).partition(". ")[0].replace("%", "%%")
            found[name] = Setting(name, kinds, said.rstrip(":."))
    return found | {name: Setting(name, (kind,), text) for name, (kind, text) in RESTORED.items()}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare all of them."""
    group = parser.add_argument_group(
        "generation",
        "As transformers' GenerationConfig has them; what is not given is the model's own. Lists are several values, "
        "or JSON.",
    )
    group.add_argument(
        "--generation-config",
        type=Path,
        metavar="FILE",
        help="JSON with such options; flags go before",
    )
    for name, setting in settings().items():
        flags, kinds = (setting.flag, *ALIASES.get(name, ())), set(setting.kinds)
        given: dict[str, Any] = {"dest": _DEST + name, "help": setting.help, "default": None}
        if kinds == {"bool"}:
            group.add_argument(*flags, action=argparse.BooleanOptionalAction, **given)
            continue
        if "bool" in kinds:
            group.add_argument(*flags, nargs="?", const=True, metavar="VALUE", **given)
            no = f"--no-{setting.flag.removeprefix('--')}"
            group.add_argument(
                no, action="store_const", const=False, dest=_DEST + name, help=f"{name}=False"
            )
            continue
        nargs = "+" if kinds & {"list", "tuple"} else None
        group.add_argument(*flags, nargs=nargs, metavar=setting.kinds[0].upper(), **given)


def given(args: argparse.Namespace, elsewhere: Mapping[str, str] = ELSEWHERE) -> dict[str, Any]:
    """Return the arguments of `generate`, from the file and from the flags that are there.

    Args:
        elsewhere: names that the file must not have, and why.

    Raises:
        CommandError: a value is not of its type or not in its range, or the file is no such config.
    """
    known = settings()
    said = {
        name.removeprefix(_DEST): value
        for name, value in vars(args).items()
        if name.startswith(_DEST)
    }
    flags = {name: known[name].value(value) for name, value in said.items() if value is not None}
    file = args.generation_config
    found = ({} if file is None else of_file(file, known, elsewhere)) | flags
    ranges = RANGES | ({"temperature": POSITIVE} if found.get("do_sample") else {})
    for name in ranges.keys() & found.keys():
        if (problem := ranges[name].problem(found[name])) is not None:
            raise CommandError(f"{known[name].flag} {found[name]}: {problem}")
    return found


def of_file(
    file: Path, known: Mapping[str, Setting], elsewhere: Mapping[str, str] = ELSEWHERE
) -> dict[str, Any]:
    """What a generation config on disk says.

    Args:
        known: the options by name.
        elsewhere: names that it must not have, and why.

    Raises:
        CommandError: it cannot be read, or says what a command cannot have.
    """
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CommandError(
            f"--generation-config {file} cannot be read: {first_line(error)}"
        ) from error
    if not isinstance(found, dict):
        raise CommandError(
            f"--generation-config {file} holds no options, but a {type(found).__name__}"
        )
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
    """Raise CommandError where transformers says that options, with a model's stored ones, cannot be."""
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
    """Documented types without those inside of them: `Union[int, list[int]]` is an int or a list."""
    inside = types.replace("Union[", "")
    while (shorter := re.sub(r"[\[(][^\[\]()]*[\])]", "", inside)) != inside:
        inside = shorter
    return inside.partition("*optional*")[0]
