"""Write the tables of the documentation from the code's own records.

The records are the model families, patches, variables, commands and measurements. `make tables`
runs this. A page holds `<!-- table: NAME -->` and `<!-- end of table -->`, and the text between
them is generated. A test compares pages and records, so the documentation cannot disagree with the
code.
"""

import argparse
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import tables as results
from benchmarks.tables import table
from fastgen.cli import COMMANDS
from fastgen.config import VARIABLES
from fastgen.models.specs.registry import SPECS
from fastgen.patches import fairseq, transformers

ROOT = Path(__file__).resolve().parents[2]
PLACE = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)


def families() -> str:
    """Return the table of transformers' model families."""
    kinds: dict[str, list[str]] = {"encoder-decoder": [], "decoder-only": [], _OWN_ATTENTION: []}
    for name, spec in sorted(SPECS.items()):
        kinds["encoder-decoder" if spec.encoder_decoder else "decoder-only"].append(f"`{name}`")
        if not spec.attention_interface:
            kinds[_OWN_ATTENTION].append(f"`{name}`")
    return table(("kind", "`model_type`"), ((kind, ", ".join(n)) for kind, n in kinds.items()))


_OWN_ATTENTION = "of these, with attention in their own modules"


def patches() -> str:
    """Return the table of patches to the toolkits."""
    records = (*transformers.PATCHES, *fairseq.PATCHES)
    # A narrow column breaks between the module and the name in it.
    rows = ((f"`{p.name}`", f"{p.help}<br>`{p.target.replace(':', '` `')}`") for p in records)
    return table(("patch", "what it does, and what it replaces"), rows)


def variables() -> str:
    """Return the table of environment variables."""
    rows = (
        (f"`{v.name}`", ", ".join(f"`{value}`" for value in v.allowed) or v.form, v.help)
        for v in VARIABLES
    )
    return table(("variable", "allowed (default first)", "what it does"), rows)


def commands() -> str:
    """Return every command with its arguments, as `--help` lists them."""
    parts: list[str] = []
    groups: dict[str, str] = {}
    for name, module in COMMANDS.items():
        parser = argparse.ArgumentParser(description=module.__doc__)
        module.arguments(parser)
        parts += _command(f"fastgen {name}", parser, groups)
    return "\n\n".join(parts)


def _command(name: str, parser: argparse.ArgumentParser, groups: dict[str, str]) -> Iterator[str]:
    """Yield a command's heading, description and tables, then those of its subcommands.

    Args:
        name: the command as a user types it.
        parser: its parser.
        groups: maps each table of a titled group to the first command that showed it; updated here.
            A later command with the same table refers to that command.
    """
    yield f"{'#' * len(name.split())} `{name}`"
    yield (parser.description or "").strip().partition("\n\n")[0].replace("\n", " ")
    below: list[argparse._SubParsersAction[argparse.ArgumentParser]] = []
    # By title of the group; arguments outside the command's own groups come first.
    tables: dict[str | None, list[tuple[str, str]]] = {None: []}
    for group in parser._action_groups:
        title = None if group in (parser._positionals, parser._optionals) else group.title
        for action in group._group_actions:
            if isinstance(action, argparse._SubParsersAction):
                below.append(action)
            elif not isinstance(action, argparse._HelpAction):
                tables.setdefault(title, []).append((f"`{_spelled(action)}`", _help(action)))
    for title, rows in tables.items():
        if not rows:
            continue
        shown = table((title or "argument", "what it does"), rows)
        first = name if title is None else groups.setdefault(shown, name)
        if first == name:
            yield shown
        else:
            link = f"#{first.replace(' ', '-')}"
            yield f"The options of *{title}* are those of [`{first}`]({link})."
    for action in below:
        for word, subparser in action.choices.items():
            yield from _command(f"{name} {word}", subparser, groups)


def _spelled(action: argparse.Action) -> str:
    if action.metavar is not None:
        value = action.metavar if isinstance(action.metavar, str) else " ".join(action.metavar)
    elif action.choices is not None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    else:
        value = action.dest.upper()
    if not action.option_strings:
        return value
    return ", ".join(action.option_strings) + ("" if action.nargs == 0 else f" {value}")


def _help(action: argparse.Action) -> str:
    """Return an argument's help.

    A default that is a path differs between machines, so only its name is shown.
    """
    default = f".../{action.default.name}" if isinstance(action.default, Path) else action.default
    return (action.help or "") % {**vars(action), "default": default, "prog": "fastgen"}


def api() -> str:
    """Return the directives for mkdocstrings, in the sections of API."""
    blocks: list[str] = []
    for title, text, names in API:
        blocks += [f"## {title}", text, *(f"::: fastgen.{name}" for name in names)]
    return "\n\n".join(blocks)


API = (
    (
        "Status and prediction",
        "`status` reports the calls that have run; `explain` predicts one without running it.",
        (
            "status", "explain", "patches.engine.status.Status", "patches.engine.status.Row",
            "patches.engine.status.ToolkitRow",
            "patches.transformers.introspection.explain.Explanation",
            "patches.transformers.introspection.explain.Linears", "decoding.plan.Plan",
        ),
    ),
    (
        "Enabling and disabling",
        "`import fastgen` enables it. `disabled` runs the toolkit's own code in one block.",
        ("disabled", "enable", "disable"),
    ),
    (
        "Many sentences",
        "`generate_stream` makes batches of similar lengths and keeps order ([guide](stream.md)).",
        ("generate_stream",),
    ),
    (
        "Scoring",
        "`score` gives log-probabilities and perplexity ([guide](supported.md#scoring)).",
        ("score", "patches.transformers.introspection.score.TextScore"),
    ),
    (
        "Prefix cache",
        (
            "Within `prefix_cache`, prompts reuse keys and values of earlier ones\n"
            "([details](kv-cache.md#prompts-that-continue-earlier-ones))."
        ),
        ("prefix_cache",),
    ),
    ("Memory", "`release` frees the memory that is kept between calls.", ("release",)),
    (
        "Big-little decoding",
        (
            "`bild` is for fairseq; with transformers, pass `assistant_model` to `generate` "
            "([guide](bild.md))."
        ),
        ("bild",),
    ),
    (
        "Constraints",
        "Pass these to `generate` as `constraints` ([guide](restored.md)).",
        (
            "constraints.Constraint", "constraints.PhrasalConstraint",
            "constraints.DisjunctiveConstraint",
        ),
    ),
    (
        "UniLM",
        "Load and convert UniLM and MiniLM checkpoints ([guide](unilm.md)).",
        ("unilm.load", "unilm.UniLMConfig", "unilm.UniLMForConditionalGeneration"),
    ),
    (
        "Corpora",
        "`fastgen generate` uses these modules ([guide](corpus.md)).",
        ("corpus\n    options:\n      show_submodules: true",),
    ),
    (
        "Ray",
        (
            "`Generator` maps over a Ray dataset; `Server` and `app` serve with Ray Serve "
            "([guide](cluster.md))."
        ),
        ("ray.Generator", "ray.Server", "ray.app"),
    ),
    (
        "Warnings and errors",
        "Wrong arguments raise `ValueError` or `TypeError`; fastgen has these classes of its own.",
        (
            "FastgenWarning", "patches.engine.patch.FallbackError",
            "patches.engine.patch.PatchError",
            "patches.transformers.introspection.parity.ParityError",
            "patches.transformers.introspection.parity.ParityWarning",
        ),
    ),
)  # fmt: skip
"""Sections of the API page: title, one sentence, names below `fastgen`."""

TABLES: dict[str, Callable[[], str]] = {
    "api": api,
    "commands": commands,
    "families": families,
    "patches": patches,
    "variables": variables,
    **results.TABLES,
}


def filled(page: str) -> str:
    """Return a page with newly generated tables.

    Raises:
        KeyError: the page names an unknown table.
    """
    return PLACE.sub(lambda place: f"{place[1]}\n{TABLES[place[2]]()}\n\n{place[4]}", page)


def main() -> None:
    """Write all tables of docs/ and README.md."""
    for file in sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")]):
        text = file.read_text("utf-8")
        if (new := filled(text)) != text:
            file.write_text(new, encoding="utf-8")
            print(f"{file.relative_to(ROOT)}: tables made anew")


if __name__ == "__main__":
    main()
