"""Write what the documentation says of the code's own records: families, patches, variables, commands, measurements.

`make tables` runs it. A page holds `<!-- table: NAME -->` and `<!-- end of table -->`; what stands between them is
made here, from the records that the code itself reads. A test compares, so that no page says anything else than they.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fastgen
from fastgen.cli import COMMANDS
from fastgen.config import VARIABLES
from fastgen.models.families import FAMILIES
from fastgen.models.layouts import LAYOUTS
from fastgen.patches import fairseq, transformers

ROOT = Path(__file__).resolve().parents[2]
PLACE = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)
RESULTS = ROOT / "benchmarks" / "results"
MEGA = 2**20
NOT_YET = "There are no results yet."


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    lines = [tuple(head), *(tuple(cell.replace("|", r"\|").replace("\n", " ") for cell in row) for row in rows)]
    lines.insert(1, ("---",) * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def families() -> str:
    """The model families of transformers."""
    rows = (
        (
            f"`{name}`",
            "encoder-decoder" if family.encoder_decoder else "decoder-only",
            "yes" if name in LAYOUTS else "no",
            "yes" if family.activated else "no",
        )
        for name, family in sorted(FAMILIES.items())
    )
    return table(("`model_type`", "kind", "decode steps from the weights", "activation in place (CPU)"), rows)


def patches() -> str:
    """What is patched in the toolkits."""
    records = (*transformers.PATCHES, *fairseq.PATCHES)
    rows = ((f"`{p.name}`", p.help, f"`{p.target.replace(':', '.')}`") for p in records)
    return table(("patch", "what it does", "in the place of"), rows)


def variables() -> str:
    """The environment variables."""
    rows = ((f"`{v.name}`", ", ".join(f"`{value}`" for value in v.allowed) or "any text", v.help) for v in VARIABLES)
    return table(("variable", "allowed (default first)", "what it does"), rows)


def commands() -> str:
    """Every command with its arguments, as `--help` lists them."""
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
        groups: the command that each table of a titled group has been shown for; extended. A later
            command with the same group refers to it.
    """
    yield f"{'#' * len(name.split())} `{name}`"
    yield (parser.description or "").strip().partition("\n\n")[0].replace("\n", " ")
    below: list[argparse._SubParsersAction[argparse.ArgumentParser]] = []
    tables: dict[str | None, list[tuple[str, str]]] = {None: []}  # arguments of no group of the command's own first
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
    """An argument's help. A default that is a path is this machine's, so that only its name is told."""
    default = f".../{action.default.name}" if isinstance(action.default, Path) else action.default
    return (action.help or "") % {**vars(action), "default": default, "prog": "fastgen"}


def speed() -> str:
    """Whole calls against the toolkit's own, of all results files."""
    head = ("case", "where", "toolkit", "fastgen", "times as fast", "results")
    rows: list[tuple[str, ...]] = []
    for name, data in _results("generate", "best_batch", "text", "fairseq", "command"):
        result = data["result"]
        ratio = f"{result['ratio']:.2f} [{result['low']:.2f}, {result['high']:.2f}]"
        seconds = (f"{result[side]:.3g} s" for side in ("baseline_seconds", "candidate_seconds"))
        shown = (*seconds, ratio) if result["equal"] else ("", "", "outputs differ")
        rows.append((data["help"], _where(data), *shown, f"`{name}`"))
    return table(head, rows)


def peers() -> str:
    """Whole calls beside another system's with the same weights, of all results files."""
    head = ("case", "where", "peer", "toolkit", "fastgen", "peer's", "over the toolkit", "over the peer", "same texts")
    names = {"ctranslate2": "CTranslate2", "compiled": "static cache, compiled"}
    rows: list[tuple[str, ...]] = []
    for _, data in _results("peer"):
        result, peer = data["result"], data["arguments"]["peer"]
        if not result["equal"]:
            rows.append((data["case"], _where(data), names[peer], *[""] * 5, "outputs differ"))
            continue
        seconds = (f"{result['systems'][name]:.3g} s" for name in ("stock", "fastgen", peer))
        over = (_ratio(result["over"][name] | {"equal": True}) for name in ("stock", peer))
        same = result.get("same_texts", {}).get(peer)
        texts = "all tokens" if same is None else f"{same} of {result['sentences']}"
        rows.append((data["case"], _where(data), names[peer], *seconds, *over, texts))
    return table(head, rows)


def never_worse() -> str:
    """The range of ratios of the grid, of all results files."""
    lines: list[str] = []
    for name, data in _results("grid"):
        if data["case"] != "never_worse":
            continue
        cells = data["result"]["cells"].values()
        ratios = [cell["ratio"] for cell in cells if cell["equal"]]
        lines.append(
            f"- {_where(data)}: {len(ratios)} of {len(cells)} calls with equal output, between {min(ratios):.2f} and "
            f"{max(ratios):.2f} times as fast (`{name}`)"
        )
    return "\n".join(lines)


def few_tokens() -> str:
    """Ratios of calls for few new tokens, of all results files."""
    found: dict[tuple[str, str], dict[int, str]] = {}  # by what is a row, and the number of new tokens
    for _, data in _results("grid"):
        for cell in data["result"]["cells"].values() if data["case"] == "few_tokens" else ():
            row = found.setdefault((f"{cell['batch']} x {cell['beams']}", _where(data)), {})
            row[cell["new_tokens"]] = _ratio(cell)
    counts = sorted({count for row in found.values() for count in row})
    rows = [(*row, *(ratios.get(count, "") for count in counts)) for row, ratios in found.items()]
    return table(("sentences x beams", "where", *(f"{n} new" for n in counts)), rows) if rows else NOT_YET


def memory() -> str:
    """Measured bytes of keys and values, of all results files."""
    rows = [
        (
            model,
            _where(data),
            f"{sides['stock']['measured'] / MEGA:.0f} MiB",
            f"{sides['fastgen']['measured'] / MEGA:.0f} MiB",
            f"`{name}`",
        )
        for name, data in _results("memory")
        for model, sides in data["result"]["models"].items()
    ]
    return table(("model", "where", "toolkit", "fastgen", "results"), rows)


def families_speed() -> str:
    """Ratios of every family's calls, of all results files."""
    return _ratios("families", "family")


def encoders_speed() -> str:
    """Ratios of encoders' calls by how long the sentences of a batch are, of all results files."""
    return _ratios("forwards", "encoder", lambda name: "loss" not in name)


def loss_speed() -> str:
    """Ratios of language models' losses, of all results files."""
    return _ratios("forwards", "model", lambda name: "loss" in name)


def _ratios(kind: str, title: str, shown: Callable[[str], bool] = lambda name: True) -> str:
    """A row of ratios for every model of results of a kind, with a column for each call."""
    rows: list[tuple[str, ...]] = []
    calls: tuple[str, ...] = ()
    for _, data in _results(kind):
        for name, of_model in data["result"].items():
            if shown(name):
                calls = tuple(of_model)
                rows.append((f"`{name}`", _where(data), *(_ratio(found) for found in of_model.values())))
    return table((title, "where", *calls), rows) if rows else NOT_YET


def _ratio(found: dict[str, Any]) -> str:
    if not found["equal"]:
        return "outputs differ"
    aside = "" if found.get("hits", True) else " aside"
    return f"{found['ratio']:.2f} [{found['low']:.2f}, {found['high']:.2f}]{aside}"


def paper() -> str:
    """The papers' tables and figures, as measured on each hardware."""
    parts: list[str] = []
    for file in sorted(RESULTS.glob("*/paper/*.json")):
        data = json.loads(file.read_text("utf-8"))
        result = data["result"]
        what = data["what"][0].upper() + data["what"][1:]
        here = f"Here: {_where(data)}; {result['shape']}. The paper's: {data['paper_hardware']}."
        parts.append(f"## {data['title']}\n\n{what}. {here}")
        differ = "The outputs differed: no speed is given."
        parts.append(table(result["columns"], result["rows"]) if result["equal"] else differ)
        if result["curve"] is not None:
            parts.append(f"![{data['title']}](plots/{file.parts[-3]}-{data['case']}.svg)")
    return "\n\n".join(parts) or NOT_YET


def _results(*kinds: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for file in sorted(RESULTS.glob("*/*.json")):
        data = json.loads(file.read_text("utf-8"))
        if data["kind"] in kinds:
            yield str(file.relative_to(RESULTS)), data


def _where(data: dict[str, Any]) -> str:
    place = data["environment"]
    return place["gpu"] or f"{place['cpu']}, {place['threads']} threads"


def api() -> str:
    """What mkdocstrings is to show: public names, and all modules of a package that does not say which those are."""
    names = [name for name in fastgen.__all__ if not name.startswith("_")]
    blocks = [
        "## fastgen\n\n" + "\n\n".join(f"::: fastgen.{name}" for name in names),
        "## What they return and raise\n\n" + "\n\n".join(f"::: {path}" for path in RETURNED),
    ]
    for part in ("constraints", "unilm", "corpus", "ray"):
        if find_spec(f"fastgen.{part}"):
            public = getattr(import_module(f"fastgen.{part}"), "__all__", None)
            shown = [f"::: fastgen.{part}.{name}" for name in public] if public else [WHOLE.format(part=part)]
            blocks.append("\n\n".join([f"## fastgen.{part}", *shown]))
    return "\n\n".join(blocks)


WHOLE = "::: fastgen.{part}\n    options:\n      show_submodules: true"

RETURNED = (
    "fastgen.patches._status.Status",
    "fastgen.patches._status.Row",
    "fastgen.patches._status.ToolkitRow",
    "fastgen.patches.transformers.explain.Explanation",
    "fastgen.patches.transformers.explain.Linears",
    "fastgen.patches.transformers.score.TextScore",
    "fastgen.decoding.plan.Plan",
    "fastgen.patches._patch.FallbackError",
    "fastgen.patches._patch.PatchError",
    "fastgen.patches.transformers.parity.ParityError",
    "fastgen.patches.transformers.parity.ParityWarning",
)

TABLES: dict[str, Callable[[], str]] = {
    "api": api,
    "commands": commands,
    "encoders-speed": encoders_speed,
    "families": families,
    "few-tokens": few_tokens,
    "families-speed": families_speed,
    "loss-speed": loss_speed,
    "memory": memory,
    "never-worse": never_worse,
    "paper": paper,
    "patches": patches,
    "peers": peers,
    "speed": speed,
    "variables": variables,
}


def filled(page: str) -> str:
    """Return a page with its tables made anew.

    Raises:
        KeyError: it names a table that is not known.
    """
    return PLACE.sub(lambda place: f"{place[1]}\n{TABLES[place[2]]()}\n\n{place[4]}", page)


def main() -> None:
    """Write all tables of docs/."""
    for file in sorted((ROOT / "docs").glob("*.md")):
        text = file.read_text("utf-8")
        if (new := filled(text)) != text:
            file.write_text(new, encoding="utf-8")
            print(f"{file.relative_to(ROOT)}: tables made anew")


if __name__ == "__main__":
    main()
